import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import t, { type Test } from 'tap';
import { HTTP_PORT, type Lab, VIP } from '../../lib/lab/topology.js';
import { createGatewayLab, gatewayConfig, PORTS } from '../support/gateway-lab.js';
import { needsRoot } from '../support/skip.js';
import { addressOf, captureAt, dropOffloads, verifyWire } from '../support/wire-capture.js';

/** 1 GiB by hand (WEIR_E2E_BYTES=1073741824); in between, as much as says the same in the time a test may take. */
const FILE_BYTES = Number(process.env.WEIR_E2E_BYTES ?? 64 * 1024 * 1024);

const ECHO_CLIENT = `
import socket, sys
host, port, unchecked = sys.argv[1], int(sys.argv[2]), sys.argv[3] == '1'
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if unchecked: s.setsockopt(socket.SOL_SOCKET, 11, 1)  # SO_NO_CHECK
s.settimeout(3)
for size in (0, 1, 1472, 3000):
    data = bytes(i & 255 for i in range(size))
    s.sendto(data, (host, port))
    answer, peer = s.recvfrom(65535)
    assert answer == data and peer == (host, port), (size, len(answer), peer)
print('ok')
`;

async function sha256(lab: Lab, url: string): Promise<string> {
  const { stdout } = await lab.exec('client', 'sh', ['-c', `curl -sS --fail --max-time 300 ${url} | sha256sum`], {
    timeoutMs: 310_000,
  });
  return stdout.split(' ')[0]!;
}

async function checkTraffic(t: Test, lab: Lab, mode: 'dnat' | 'snat', expected: string): Promise<void> {
  const base = `http://${VIP}:${PORTS[mode]}`;
  t.equal(await sha256(lab, `${base}/bytes/${FILE_BYTES}`), expected, `${mode}: ${FILE_BYTES} bytes arrive whole`);

  const script = `head -c ${FILE_BYTES >> 2} /dev/urandom | tee >(sha256sum | cut -d' ' -f1 >${lab.dir}/sent) | curl -sS --fail -T - ${base}/upload`;
  const upload = await lab.exec('client', 'bash', ['-c', `${script}; sleep 0.2`], { timeoutMs: 120_000 });
  t.equal(
    JSON.parse(upload.stdout).sha256,
    readFileSync(join(lab.dir, 'sent'), 'utf8').trim(),
    `${mode}: and go up whole`,
  );

  const args = [
    '-sS',
    '--fail',
    '-Z',
    '--parallel-max',
    '200',
    '-o',
    '/dev/null',
    '-w',
    '%{http_code}\\n',
    `${base}/bytes/[1001-1400]`,
  ];
  const parallel = await lab.exec('client', 'curl', args, { timeoutMs: 60_000 });
  t.equal(parallel.stdout.split('\n').filter((line) => line === '200').length, 400, `${mode}: 200 clients at a time`);

  const port = mode === 'dnat' ? PORTS.echoDnat : PORTS.echoSnat;
  for (const unchecked of ['0', '1']) {
    const echo = await lab.exec('client', 'python3', ['-c', ECHO_CLIENT, VIP, String(port), unchecked], {
      timeoutMs: 30_000,
    });
    t.equal(echo.stdout, 'ok\n', `${mode}: UDP echo${unchecked === '1' ? ' without checksums' : ''} ${echo.stderr}`);
  }
}

t.setTimeout(1_200_000);
const root = needsRoot(t, 'ip', 'curl', 'python3', 'bash');

t.test('traffic through a real TUN', { ...root, timeout: 900_000 }, async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  const direct = await lab.exec('client', 'curl', ['-sS', `http://10.2.0.11:${HTTP_PORT}/sha256/${FILE_BYTES}`], {
    timeoutMs: 60_000,
  });
  const expected = JSON.parse(direct.stdout).sha256 as string;
  for (const engine of ['io_uring', 'readwrite'] as const) {
    for (const offload of [true, false]) {
      await t.test(`${engine}, offload ${offload ? 'on' : 'off'}`, async (t) => {
        const weir = await lab.startWeir(gatewayConfig(lab, { engine, offload }));
        t.comment(`ready after ${Math.round(weir.readyMs)} ms`);
        for (const mode of ['dnat', 'snat'] as const) await checkTraffic(t, lab, mode, expected);
        t.equal(await weir.stop(), 0);
      });
    }
  }
});

t.test(
  'what leaves the gateway',
  { ...needsRoot(t, 'ip', 'curl', 'tcpdump', 'ethtool', 'python3'), timeout: 120_000 },
  async (t) => {
    const lab = await createGatewayLab();
    t.teardown(() => lab.destroy());
    const hosts = ['client', ...lab.backends];
    await dropOffloads(lab, hosts);
    for (const offload of [true, false]) {
      const weir = await lab.startWeir(gatewayConfig(lab, { offload }));
      const captures = await captureAt(lab, hosts);
      for (const mode of ['dnat', 'snat'] as const) {
        await lab.exec(
          'client',
          'curl',
          ['-sS', '-Z', '-o', '/dev/null', `http://${VIP}:${PORTS[mode]}/bytes/[300001-300040]`],
          { timeoutMs: 30_000 },
        );
        const port = mode === 'dnat' ? PORTS.echoDnat : PORTS.echoSnat;
        await lab.exec('client', 'python3', ['-c', ECHO_CLIENT, VIP, String(port), '0'], { timeoutMs: 30_000 });
      }
      await lab.exec('client', 'curl', ['-s', '-m', '2', `http://${VIP}:99/`]);
      await lab.exec('client', 'ping', ['-c', '1', '-W', '2', VIP]);
      await new Promise((resolve) => setTimeout(resolve, 300));
      for (const { role, stop } of captures) {
        const packets = await stop();
        t.ok(packets.length > 10, `${packets.length} packets came to ${role}`);
        const wrong = packets.flatMap((packet) => verifyWire(packet));
        t.same(wrong, [], `${role}: lengths and checksums`);
        const toVip = packets.filter((packet) => addressOf(packet, 16) === VIP);
        t.equal(toVip.length, 0, `${role}: nothing is addressed to the VIP`);
      }
      t.equal(await weir.stop(), 0);
    }
  },
);
