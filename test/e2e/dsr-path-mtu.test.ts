import t from 'tap';
import { WEB_PORT } from '../../lib/lab/demo-config.js';
import { must } from '../../lib/lab/process.js';
import { ECHO_PORT, Lab, VIP, type WeirProcess } from '../../lib/lab/topology.js';
import { transfers } from '../../lib/lab/traffic.js';
import { startWeirs } from '../../lib/lab/weirs.js';
import { needsRoot } from '../support/skip.js';

/*
 *                              frag-needed
 *                            +-------------> gw or gw2 ==> b1, b2, b3
 *    client ---( 1400 )--- router <----------------------- answers of 1500
 *
 * The router spreads connections over the gateways by their ports. Its errors have none, and come to either.
 */
const NARROW = 1400;
const DOWNLOADS = 40;

/** What does not get through is asked for anew. */
const ECHO_CLIENT = `
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(1)
for size in (10, 1372, 1373, 1400):
    for attempt in range(3):
        s.sendto(bytes([size & 255]) * size, (sys.argv[1], int(sys.argv[2])))
        try:
            answer, peer = s.recvfrom(65535)
            break
        except TimeoutError:
            if attempt == 2: raise
    assert answer == bytes([size & 255]) * size and peer[0] == sys.argv[1], (size, len(answer), peer)
print('ok')
`;

async function dropped(weirs: readonly WeirProcess[], reason: string): Promise<number> {
  const all = await Promise.all(weirs.map((weir) => weir.command(['status', '-o', 'json'])));
  return all.reduce((sum, { stdout }) => sum + JSON.parse(stdout).traffic.drops[reason], 0);
}

t.test('a path to the client narrower than its ends know', needsRoot(t, 'ip', 'python3'), async (t) => {
  const lab = await Lab.create({ prefix: `weir-t${process.pid}`, shape: 'one-arm', gateways: 2 });
  t.teardown(() => lab.destroy());
  await lab.startServers();
  const narrow = ['route', 'change', '10.1.0.0/24', 'dev', 'client', 'src', '10.1.0.1', 'mtu', String(NARROW)];
  await must('ip', ['-n', lab.namespace('router'), ...narrow]);
  const plain = (role: string): string | undefined => (role === 'b1' ? 'device: { offload: false }' : undefined);
  const { gateways, nodes } = await startWeirs(lab, 'dsr', plain);

  const options = ['--downloads', String(DOWNLOADS), '--bytes', '1000000'];
  const { whole, errors, backends } = await transfers(lab, WEB_PORT, options, { timeoutMs: 40_000 });
  t.equal(whole, DOWNLOADS, `all are whole ${JSON.stringify(errors)}`);
  t.same(Object.keys(backends).sort(), ['b1', 'b2', 'b3'], 'also of a node without offloads');
  const echo = await lab.exec('client', 'python3', ['-c', ECHO_CLIENT, VIP, String(ECHO_PORT)]);
  t.equal(echo.stdout, 'ok\n', `datagrams ${echo.stderr}`);
  t.equal(await dropped(gateways, 'icmp-unknown-flow'), 0, 'errors find their node by either gateway');
  for (const weir of [...gateways, ...nodes]) t.equal(await weir.stop(), 0);
});
