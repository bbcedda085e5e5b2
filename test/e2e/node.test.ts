import t from 'tap';
import { VIP, type WeirProcess } from '../../lib/lab/topology.js';
import { createDsrLab, gatewayConfig, nodeConfig } from '../support/dsr-lab.js';
import { needsRoot } from '../support/skip.js';

/** A node's end and beginning; its traffic is in dsr.test.ts. */

t.setTimeout(900_000);

t.test('kill -9 of a node in the middle of transfers', needsRoot(t, 'ip', 'iperf3'), async (t) => {
  const lab = await createDsrLab();
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
  const lab = await createDsrLab();
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
