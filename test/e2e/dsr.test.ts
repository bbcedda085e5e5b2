import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import t, { type Test } from 'tap';
import {
  backendAddress,
  CLIENT_ADDRESS,
  ECHO_PORT,
  HTTP_PORT,
  type Lab,
  VIP,
  type WeirProcess,
} from '../../lib/lab/topology.js';
import { createDsrLab, gatewayConfig, startNodes } from '../support/dsr-lab.js';
import { needsRoot } from '../support/skip.js';
import { addressOf, captureAt, dropOffloads, verifyWire } from '../support/wire-capture.js';

/**
 * Direct server return in the lab: clients' packets go through the gateway's tunnels to a node beside the servers of each backend, whose
 * answers come to the client by the router, past the gateway.
 */

/** By hand all combinations, with 1 GiB (WEIR_E2E_BYTES=1073741824); otherwise each pair of options once. */
const { WEIR_E2E_BYTES } = process.env;
const FILE_BYTES = Number(WEIR_E2E_BYTES ?? 32 * 1024 * 1024);

/** A datagram that is too large for the tunnel and may not be fragmented is answered by an error, and asked anew in fragments. */
const ECHO_CLIENT = `
import socket, sys
server = (sys.argv[1], int(sys.argv[2]))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(1)
for size in (0, 1, 1438, 1439, 3000, 20000):
    data = bytes(i & 255 for i in range(size))
    for attempt in range(3):
        s.sendto(data, server)
        try:
            answer, peer = s.recvfrom(65535)
            break
        except TimeoutError:
            if attempt == 2 or size < 1400: raise
    assert answer == data and peer == server, (size, len(answer), peer)
print('ok')
`;

async function checkTraffic(t: Test, lab: Lab, expected: string): Promise<void> {
  const base = `http://${VIP}`;
  const script = `curl -sS --fail --max-time 300 ${base}/bytes/${FILE_BYTES} | sha256sum`;
  const down = await lab.exec('client', 'sh', ['-c', script], { timeoutMs: 310_000 });
  t.equal(down.stdout.split(' ')[0], expected, `a file of ${FILE_BYTES} bytes comes down whole`);
  await checkUpload(t, lab, FILE_BYTES);

  const answers = await captureAt(lab, ['gw'], 'tcp or udp');
  const many = ['-sS', '-Z', '--parallel-max', '200', '-o', '/dev/null', '-w', '%{http_code} %{remote_ip}\\n'];
  const parallel = await lab.exec('client', 'curl', [...many, `${base}/bytes/[1001-1400]`], { timeoutMs: 60_000 });
  const answered = parallel.stdout.split('\n').filter((line) => line === `200 ${VIP}`);
  t.equal(answered.length, 400, `200 clients at a time ${parallel.stderr}`);

  const echo = await lab.exec('client', 'python3', ['-c', ECHO_CLIENT, VIP, '7'], { timeoutMs: 30_000 });
  t.equal(echo.stdout, 'ok\n', `datagrams, whole and in fragments ${echo.stderr}`);
  for (const { stop } of answers) {
    const packets = await stop();
    const sources = new Set(packets.map((packet) => addressOf(packet, 12)));
    t.same([...sources], [CLIENT_ADDRESS], `none of ${packets.length} packets that came to the gateway is an answer`);
  }
}

async function checkUpload(t: Test, lab: Lab, bytes: number): Promise<void> {
  const upload = `head -c ${bytes} /dev/urandom | tee >(sha256sum | cut -d' ' -f1 >${lab.dir}/sent) | curl -sS --fail --max-time 300 -T - http://${VIP}/upload; sleep 0.2`;
  const up = await lab.exec('client', 'bash', ['-c', upload], { timeoutMs: 310_000 });
  const sent = readFileSync(join(lab.dir, 'sent'), 'utf8').trim();
  t.equal(JSON.parse(up.stdout || '{}').sha256, sent, `${bytes} bytes go up whole ${up.stderr}`);
}

async function checkDirect(t: Test, lab: Lab): Promise<void> {
  for (const number of [1, 2, 3]) {
    const url = `http://${backendAddress(number)}:${HTTP_PORT}/`;
    const { stdout, stderr } = await lab.exec('client', 'curl', ['-sS', '-m', '20', url], { timeoutMs: 30_000 });
    t.match(stdout, `"backend":"b${number}"`, `a direct connection works ${stderr}`);
  }
  const direct = await lab.exec('client', 'python3', ['-c', ECHO_CLIENT, backendAddress(1), String(ECHO_PORT)]);
  t.equal(direct.stdout, 'ok\n', `and so do datagrams ${direct.stderr}`);
}

async function stopAll(t: Test, weirs: readonly WeirProcess[]): Promise<void> {
  for (const weir of weirs) t.equal(await weir.stop(), 0);
}

/** What a gateway and its nodes know of the connections that were. */
async function checkTables(t: Test, lab: Lab, gateway: WeirProcess, node: WeirProcess, knows: boolean): Promise<void> {
  // Some for every node, and so recent that none has expired: closed ones are listed for 10 s.
  const many = ['-sS', '-Z', '-o', '/dev/null', `http://${VIP}/bytes/[1001-1040]`];
  await lab.exec('client', 'curl', many, { timeoutMs: 60_000 });
  const flows = JSON.parse((await gateway.command(['ct', 'list', '-o', 'json'])).stdout);
  t.ok(flows.length > 0 && flows.every(({ type }: { type: string }) => type === 'SVC'));
  t.ok(
    flows.every(({ packets }: { packets: { reply: number } }) => packets.reply === 0),
    'answers go past weir',
  );
  const own = JSON.parse((await node.command(['ct', 'list', '-o', 'json'])).stdout);
  t.match(own[0], { type: 'OUT', client: /^10\.1\.0\.2:/, backend: /^10\.2\.0\.11:/, vip: /^10\.96\.0\.10:/ });
  t.ok(own.every(({ flags }: { flags: string[] }) => flags.includes('DSR')));
  t.equal(own[0].service !== '', knows, 'services have names where the node knows them');

  const { node: view } = JSON.parse((await node.command(['status', '-o', 'json'])).stdout);
  t.match(view, { address: '10.2.0.11', port: 6081 });
  const web = { address: '10.2.0.11', port: HTTP_PORT, protocol: 'tcp', learned: !knows };
  t.ok(view.endpoints.some((each: object) => JSON.stringify(each) === JSON.stringify(web)));

  const rules = (await lab.exec('b1', 'ip', ['rule'])).stdout;
  t.match(rules, `from 10.2.0.11 ipproto tcp sport ${HTTP_PORT} lookup 10096`);
  const echo = `iif lo ipproto udp sport ${ECHO_PORT} lookup 10096`;
  const all = await Promise.all(lab.backends.map((name) => lab.exec(name, 'ip', ['rule'])));
  const led = all.filter(({ stdout }) => stdout.includes(echo)).length;
  t.equal(led, knows ? 3 : 1, 'the one client’s datagrams have taught one node');
}

t.setTimeout(3_600_000);

t.test('traffic', { ...needsRoot(t, 'ip', 'curl', 'python3', 'bash', 'tcpdump'), timeout: 3_600_000 }, async (t) => {
  const lab = await createDsrLab();
  t.teardown(() => lab.destroy());
  const url = `http://${backendAddress(1)}:${HTTP_PORT}/sha256/${FILE_BYTES}`;
  const direct = await lab.exec('client', 'curl', ['-sS', url], { timeoutMs: 120_000 });
  const expected = JSON.parse(direct.stdout).sha256 as string;
  for (const inner of ['ethernet', 'ip']) {
    for (const option of ['always', 'syn']) {
      for (const offload of [true, false]) {
        const odd = Number(inner === 'ip') + Number(option === 'syn') + Number(!offload);
        if (odd % 2 === 1 && WEIR_E2E_BYTES === undefined) continue;
        const common = { offload, engine: option === 'always' ? 'io_uring' : 'readwrite' };
        const knows = inner === 'ethernet';
        await t.test(`${inner}, option ${option}, ${JSON.stringify({ ...common, knows })}`, async (t) => {
          await lab.exec('client', 'ip', ['route', 'flush', 'cache']);
          const tunnel = `, inner: ${inner}, option: ${option}`;
          const gateway = await lab.startWeir(gatewayConfig(lab, { ...common, tunnel }));
          const nodes = await startNodes(lab, { ...common, knows });
          await checkTraffic(t, lab, expected);
          if (offload) await checkDirect(t, lab);
          await checkTables(t, lab, gateway, nodes[0]!, knows);
          await stopAll(t, [gateway, ...nodes]);
          const left = (await lab.exec('b1', 'ip', ['rule'])).stdout.trim().split('\n');
          t.equal(left.length, 3, 'nothing is left');
        });
      }
    }
  }
});

t.test('on the wire', needsRoot(t, 'ip', 'curl', 'python3', 'tcpdump', 'ethtool'), async (t) => {
  const lab = await createDsrLab();
  t.teardown(() => lab.destroy());
  await dropOffloads(lab, ['client', 'gw', ...lab.backends]);
  for (const [inner, option, offload] of [
    ['ethernet', 'always', true],
    ['ip', 'syn', false],
  ] as const) {
    await lab.exec('client', 'ip', ['route', 'flush', 'cache']);
    const gateway = await lab.startWeir(
      gatewayConfig(lab, { offload, tunnel: `, inner: ${inner}, option: ${option}` }),
    );
    const nodes = await startNodes(lab, { offload, knows: true });
    const captures = await captureAt(lab, ['client', 'gw', 'b1'], 'ip');
    const many = ['-sS', '-Z', '-o', '/dev/null', `http://${VIP}/bytes/[300001-300040]`];
    await lab.exec('client', 'curl', many, { timeoutMs: 30_000 });
    const echo = await lab.exec('client', 'python3', ['-c', ECHO_CLIENT, VIP, '7'], { timeoutMs: 30_000 });
    t.equal(echo.stdout, 'ok\n', echo.stderr);
    for (const { role, stop } of captures) {
      const packets = await stop();
      t.ok(packets.length > 10, `${packets.length} packets came to ${role}`);
      t.same(packets.flatMap(verifyWire), [], `${role}: lengths and checksums`);
      const sources = [...new Set(packets.map((packet) => addressOf(packet, 12)))];
      if (role === 'client') t.same(sources, [VIP], 'the client hears of the VIP alone');
      if (role === 'gw') t.same(sources, [CLIENT_ADDRESS], 'the gateway of the client alone');
    }
    await stopAll(t, [gateway, ...nodes]);
  }
});

t.test('path MTU discovery, without help by the MSS', needsRoot(t, 'ip', 'curl', 'bash'), async (t) => {
  const lab = await createDsrLab();
  t.teardown(() => lab.destroy());
  for (const offload of [true, false]) {
    for (const role of ['client', ...lab.backends]) await lab.exec(role, 'ip', ['tcp_metrics', 'flush']);
    await lab.exec('client', 'ip', ['route', 'flush', 'cache']);
    const gateway = await lab.startWeir(gatewayConfig(lab, { offload }));
    const nodes = await startNodes(lab, { offload, knows: true, tunnel: ', clampMss: false' });
    await checkUpload(t, lab, Math.max(FILE_BYTES, 100_000_000));
    const { traffic } = JSON.parse((await gateway.command(['status', '-o', 'json'])).stdout);
    t.comment(JSON.stringify(traffic.replies));
    // With offloads the super-packets of a client that knows no better are cut to fit.
    if (!offload) t.ok(traffic.replies['frag-needed'] > 0, 'the client was told');
    await stopAll(t, [gateway, ...nodes]);
  }
});
