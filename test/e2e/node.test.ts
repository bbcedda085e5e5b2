import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import t, { type Test } from 'tap';
import {
  backendAddress,
  ECHO_PORT,
  GATEWAY_ADDRESS,
  HTTP_PORT,
  type Lab,
  VIP,
  type WeirProcess,
} from '../../lib/lab/topology.js';
import { createGatewayLab } from '../support/gateway-lab.js';
import { needsRoot } from '../support/skip.js';

/**
 * Direct server return in the lab: a gateway, and a node beside the servers of each backend. The clients' packets go through the
 * gateway's tunnels; answers are routed by the kernel of the gateway's host, past weir.
 */
const FILE_BYTES = 32 * 1024 * 1024;
const IPERF_PORT = 5201;

function gatewayConfig(lab: Lab, tunnel = ''): string {
  const list = (port: number, count = lab.backends.length): string =>
    lab.backends
      .slice(0, count)
      .map((name, i) => `{ name: ${name}, address: ${backendAddress(i + 1)}, port: ${port} }`)
      .join(', ');
  return `
tunnel: { address: ${GATEWAY_ADDRESS}${tunnel} }
admin: { listen: off }
services:
  - { name: web, address: ${VIP}, port: 80, mode: dsr, backends: [${list(HTTP_PORT)}] }
  - { name: echo, address: ${VIP}, port: 7, protocol: udp, mode: dsr, backends: [${list(ECHO_PORT)}] }
  - { name: iperf, address: ${VIP}, port: ${IPERF_PORT}, mode: dsr, backends: [${list(IPERF_PORT, 1)}] }
`;
}

interface NodeOptions {
  readonly engine?: string;
  readonly offload?: boolean;
  /** The gateway's services as well; without them the node learns. */
  readonly knows?: boolean;
}

function nodeConfig(lab: Lab, number: number, { engine = 'auto', offload = true, knows = false }: NodeOptions): string {
  const services = knows ? gatewayConfig(lab).slice(gatewayConfig(lab).indexOf('services:')) : '';
  return `
role: node
device: { engine: ${engine}, offload: ${offload} }
tunnel: { address: ${backendAddress(number)} }
admin: { listen: off }
${services}`;
}

function startNodes(lab: Lab, options: NodeOptions): Promise<WeirProcess[]> {
  return Promise.all(
    lab.backends.map((name, i) => lab.startWeir(nodeConfig(lab, i + 1, options), { role: name, name: `weir-${name}` })),
  );
}

async function stopAll(t: Test, weirs: readonly WeirProcess[]): Promise<void> {
  for (const weir of weirs) t.equal(await weir.stop(), 0);
}

/** What does not fit the tunnel and may not be fragmented is answered by an error, and asked anew in fragments. */
const ECHO_CLIENT = `
import socket, sys
server = (sys.argv[1], int(sys.argv[2]))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(2)
for size in (0, 1, 1400, 1472, 3000, 20000):
    data = bytes(i & 255 for i in range(size))
    for attempt in range(2):
        s.sendto(data, server)
        try:
            answer, peer = s.recvfrom(65535)
            break
        except TimeoutError:
            if attempt == 1 or size != 1472: raise
    assert answer == data and peer == server, (size, len(answer), peer)
print('ok')
`;

async function checkTraffic(t: Test, lab: Lab, expected: string): Promise<void> {
  const base = `http://${VIP}`;
  const script = `curl -sS --fail --max-time 60 ${base}/bytes/${FILE_BYTES} | sha256sum`;
  const down = await lab.exec('client', 'sh', ['-c', script], { timeoutMs: 70_000 });
  t.equal(down.stdout.split(' ')[0], expected, 'a file comes down whole');

  const upload = `head -c ${FILE_BYTES} /dev/urandom | tee >(sha256sum | cut -d' ' -f1 >${lab.dir}/sent) | curl -sS --fail --max-time 60 -T - ${base}/upload; sleep 0.2`;
  const up = await lab.exec('client', 'bash', ['-c', upload], { timeoutMs: 70_000 });
  const sent = readFileSync(join(lab.dir, 'sent'), 'utf8').trim();
  t.equal(JSON.parse(up.stdout || '{}').sha256, sent, `and goes up whole ${up.stderr}`);

  const many = ['-sS', '-Z', '--parallel-max', '100', '-o', '/dev/null', '-w', '%{http_code} %{remote_ip}\\n'];
  const parallel = await lab.exec('client', 'curl', [...many, `${base}/bytes/[1001-1300]`], { timeoutMs: 60_000 });
  const answered = parallel.stdout.split('\n').filter((line) => line === `200 ${VIP}`);
  t.equal(answered.length, 300, '100 clients at a time');

  const echo = await lab.exec('client', 'python3', ['-c', ECHO_CLIENT, VIP, '7'], { timeoutMs: 30_000 });
  t.equal(echo.stdout, 'ok\n', `datagrams, whole and in fragments ${echo.stderr}`);
  for (const number of [1, 2, 3]) {
    const direct = await lab.exec('client', 'curl', [
      '-sS',
      '-m',
      '5',
      `http://${backendAddress(number)}:${HTTP_PORT}/`,
    ]);
    t.match(direct.stdout, `"backend":"b${number}"`, 'a direct connection works');
  }
  const direct = await lab.exec('client', 'python3', ['-c', ECHO_CLIENT, backendAddress(1), String(ECHO_PORT)]);
  t.equal(direct.stdout, 'ok\n', `and so do datagrams ${direct.stderr}`);
}

t.setTimeout(900_000);

t.test('traffic', { ...needsRoot(t, 'ip', 'curl', 'python3', 'bash'), timeout: 600_000 }, async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  const direct = await lab.exec('client', 'curl', [
    '-sS',
    `http://${backendAddress(1)}:${HTTP_PORT}/sha256/${FILE_BYTES}`,
  ]);
  const expected = JSON.parse(direct.stdout).sha256 as string;
  for (const [tunnel, options] of [
    ['', { engine: 'io_uring', knows: true }],
    [', option: syn, inner: ip', { engine: 'io_uring' }],
    ['', { engine: 'readwrite' }],
    ['', { engine: 'readwrite', offload: false, knows: true }],
  ] as const) {
    await t.test(`${JSON.stringify(options)}${tunnel}`, async (t) => {
      const gateway = await lab.startWeir(gatewayConfig(lab, tunnel));
      const nodes = await startNodes(lab, options);
      await checkTraffic(t, lab, expected);

      const flows = JSON.parse((await gateway.command(['ct', 'list', '-o', 'json'])).stdout);
      t.ok(flows.length > 0 && flows.every(({ type }: { type: string }) => type === 'SVC'));
      t.ok(
        flows.every(({ packets }: { packets: { reply: number } }) => packets.reply === 0),
        'answers go past weir',
      );
      const own = JSON.parse((await nodes[0]!.command(['ct', 'list', '-o', 'json'])).stdout);
      t.match(own[0], { type: 'OUT', client: /^10\.1\.0\.2:/, backend: /^10\.2\.0\.11:/, vip: /^10\.96\.0\.10:/ });
      t.ok(own.every(({ flags }: { flags: string[] }) => flags.includes('DSR')));
      t.equal(own[0].service !== '', 'knows' in options, 'services have names where the node knows them');

      const { node } = JSON.parse((await nodes[0]!.command(['status', '-o', 'json'])).stdout);
      t.match(node, { address: '10.2.0.11', port: 6081 });
      const web = { address: '10.2.0.11', port: HTTP_PORT, protocol: 'tcp', learned: !('knows' in options) };
      t.ok(node.endpoints.some((each: object) => JSON.stringify(each) === JSON.stringify(web)));

      const rules = (await lab.exec('b1', 'ip', ['rule'])).stdout;
      t.match(rules, `from 10.2.0.11 ipproto tcp sport ${HTTP_PORT} lookup 10096`);
      const echo = `iif lo ipproto udp sport ${ECHO_PORT} lookup 10096`;
      const all = await Promise.all(lab.backends.map((name) => lab.exec(name, 'ip', ['rule'])));
      const led = all.filter(({ stdout }) => stdout.includes(echo)).length;
      t.equal(led, 'knows' in options ? 3 : 1, 'the one client’s datagrams have taught one node');
      await stopAll(t, [gateway, ...nodes]);
      const left = (await lab.exec('b1', 'ip', ['rule'])).stdout.trim().split('\n');
      t.equal(left.length, 3, 'nothing is left');
    });
  }
});

t.test('kill -9 of a node in the middle of transfers', needsRoot(t, 'ip', 'iperf3'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  lab.spawn('b1', 'iperf3', 'iperf3', ['-s']);
  const gateway = await lab.startWeir(gatewayConfig(lab));
  for (const [name, knows, args] of [
    ['upload', false, []],
    ['download', true, ['-R']],
  ] as const) {
    const start = (): Promise<WeirProcess> =>
      lab.startWeir(nodeConfig(lab, 1, { knows }), { role: 'b1', name: 'weir-b1' });
    const first = await start();
    const transfer = lab.exec('client', 'iperf3', ['-c', VIP, '-t', '8', '-J', ...args], { timeoutMs: 60_000 });
    await new Promise((resolve) => setTimeout(resolve, 3000));
    await first.stop('SIGKILL');
    const second = await start();
    const { stdout, status } = await transfer;
    const { end, error } = JSON.parse(stdout);
    t.equal(status, 0, `${name}: ${error ?? 'iperf3 ends well'}`);
    t.ok(end.sum_received.bytes > 0);
    t.equal(await second.stop(), 0);
  }
  t.equal(await gateway.stop(), 0);
});

t.test('what stands in a node’s way', needsRoot(t, 'ip', 'python3'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  const holder =
    'import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("10.2.0.11", 6081)); time.sleep(60)';
  lab.spawn('b1', 'holder', 'python3', ['-c', holder]);
  await new Promise((resolve) => setTimeout(resolve, 500));
  await t.rejects(lab.startWeir(nodeConfig(lab, 1, {}), { role: 'b1' }), { message: /UDP 10\.2\.0\.11:6081 is taken/ });
  await t.rejects(lab.startWeir(nodeConfig(lab, 2, {}), { role: 'b1' }), {
    message: /tunnel\.address 10\.2\.0\.12 is no address of this host/,
  });
  t.equal((await lab.exec('b1', 'ip', ['rule'])).stdout.trim().split('\n').length, 3, 'nothing was changed');
});
