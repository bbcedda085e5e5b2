import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import { callJson, callStream } from '../../lib/cli/client.js';
import type { FlowJson } from '../../lib/control/flows.js';
import type { FlowEventView, StatusView } from '../../lib/control/view.js';
import { HTTP_PORT, type Lab, VIP } from '../../lib/lab/topology.js';
import { createGatewayLab, gatewayConfig, PORTS } from '../support/gateway-lab.js';
import { Load } from '../support/load.js';
import { needsRoot } from '../support/skip.js';

t.setTimeout(900_000);

async function answers(lab: Lab): Promise<boolean> {
  const { stdout } = await lab.exec('client', 'curl', ['-s', '-m', '5', `http://${VIP}:${PORTS.dnat}/`]);
  return stdout.includes('"backend"');
}

/** What of weir's the kernel holds. */
async function traces(lab: Lab): Promise<string[]> {
  const script =
    'ip rule show | grep -v "lookup \\(local\\|main\\|default\\)$"; ip route show table all | grep -E "weir0|10096|blackhole|10[.]96[.]"; ip -o link show weir0 2>/dev/null';
  const { stdout } = await lab.exec('gw', 'sh', ['-c', script]);
  return stdout.split('\n').filter((line) => line !== '');
}

t.test('SIGTERM leaves nothing; kill -9 leaves what the next start cleans', needsRoot(t, 'ip', 'curl'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());

  const first = await lab.startWeir(gatewayConfig(lab));
  t.ok(await answers(lab));
  t.not((await traces(lab)).length, 0);
  t.equal(await first.stop('SIGTERM'), 0, 'SIGTERM ends it with 0');
  t.same(await traces(lab), [], 'device, routes and rules are gone');
  t.notOk(existsSync(first.socket), 'and so is the socket');

  const second = await lab.startWeir(gatewayConfig(lab));
  await second.stop('SIGKILL');
  const left = await traces(lab);
  t.ok(
    left.some((line) => line.includes('blackhole')),
    'after kill -9 the blackholes hold the connections',
  );
  t.ok(left.some((line) => line.includes('10096')));

  const third = await lab.startWeir(gatewayConfig(lab));
  t.ok(await answers(lab), 'a start over the remains works');
  t.equal(await third.stop('SIGTERM'), 0);
  t.same(await traces(lab), [], 'and takes them away at its end');
});

t.test('SIGTERM in the middle of everything', needsRoot(t, 'ip', 'iperf3'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  lab.spawn('b1', 'iperf3', 'iperf3', ['-s']);
  const stateFile = join(lab.dir, 'state');
  const config = gatewayConfig(lab, { conntrack: `{ stateFile: ${stateFile} }` });
  const weir = await lab.startWeir(config);
  const loads = [
    new Load(lab, `${VIP}:${PORTS.dnat}`, '--parallel', '25', '--kept', '5'),
    new Load(lab, `${VIP}:${PORTS.snat}`, '--parallel', '25', '--kept', '5'),
    new Load(lab, `${VIP}:${PORTS.echoDnat}`, '--udp'),
  ];
  t.teardown(async () => {
    for (const load of loads) load.stop();
    await Promise.all(loads.map(({ ended }) => ended));
  });
  const bulk = lab.spawn('client', 'bulk', 'iperf3', ['-c', VIP, '-t', '60']);
  t.teardown(() => lab.end(bulk, 'SIGKILL'));
  const { socket } = weir;
  const flows = async (): Promise<number> =>
    (await callJson<StatusView>({ socket, path: '/v1/status' })).conntrack.tcp.entries;
  while ((await flows()) < 500 || !loads.every(({ report }) => report !== undefined && report.ok > 100))
    await sleep(100);

  const watch = callStream({ socket, path: '/v1/ct/watch' }, () => {}).catch((error: Error) => error.message);
  const list = callStream({ socket, path: '/v1/ct' }, () => {}).catch((error: Error) => error.message);
  const reload = callJson({ socket, method: 'POST', path: '/v1/reload' }).catch((error: Error) => error.message);
  // Past its own limit for the stop weir would end with 1.
  t.equal(await weir.stop('SIGTERM'), 0, 'weir ends with 0, within its 2 s');
  await Promise.all([watch, list, reload]);
  const stopped = weir.events().find(({ event }) => event === 'stopped');
  t.comment(`after ${stopped?.tookMs} ms`);
  t.notOk(existsSync(socket), 'takes no more questions');
  t.same(
    (await traces(lab)).filter((line) => !/blackhole|10096/.test(line)),
    [],
    'and leaves in the kernel only what holds packets back until the next start',
  );

  const next = await lab.startWeir(config);
  const resumed = next.events().find(({ event }) => event === 'state-file');
  t.ok(Number(resumed?.kept) >= 500, `which goes on with ${resumed?.kept} connections`);
  t.equal(await next.stop('SIGTERM'), 0, 'and is stopped as well');
});

t.test('a second weir is refused; the first goes on', needsRoot(t, 'ip', 'curl'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  const weir = await lab.startWeir(gatewayConfig(lab));
  for (const socket of [weir.socket, `${lab.dir}/other.sock`]) {
    const refused = await t.rejects(lab.startWeir(gatewayConfig(lab), { socket, name: 'second' }));
    t.type(refused, Error);
  }
  t.ok(await answers(lab));
  t.equal(await weir.stop(), 0);
});

t.test('kill -9 and a start in the middle of transfers', needsRoot(t, 'ip', 'iperf3'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  lab.spawn('b1', 'iperf3', 'iperf3', ['-s']);
  for (const [name, args] of [
    ['upload', []],
    ['download', ['-R']],
  ] as const) {
    let weir = await lab.startWeir(gatewayConfig(lab));
    const transfer = lab.exec('client', 'iperf3', ['-c', VIP, '-p', String(PORTS.iperf), '-t', '10', '-J', ...args], {
      timeoutMs: 60_000,
    });
    await new Promise((resolve) => setTimeout(resolve, 3500));
    await weir.stop('SIGKILL');
    weir = await lab.startWeir(gatewayConfig(lab));
    const { stdout, status } = await transfer;
    t.equal(status, 0, `${name}: iperf3 ends well`);
    const { end, error } = JSON.parse(stdout);
    t.equal(error, undefined, `${name}: ${error ?? 'no error'}`);
    t.ok(end.sum_received.bytes > 0);
    t.equal(await weir.stop(), 0);
  }
});

t.test('reload: a live flow stays, a bad file changes nothing', needsRoot(t, 'ip', 'curl'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  const weir = await lab.startWeir(gatewayConfig(lab));
  const download = lab.exec(
    'client',
    'curl',
    [
      '-sS',
      '--fail',
      '--limit-rate',
      '30M',
      '-o',
      '/dev/null',
      '-w',
      '%{size_download}',
      `http://${VIP}:${PORTS.dnat}/bytes/100000000`,
    ],
    { timeoutMs: 60_000 },
  );
  await new Promise((resolve) => setTimeout(resolve, 500));
  await weir.reload(gatewayConfig(lab, { algorithm: 'random' }));
  await t.rejects(weir.reload('services: [{ name: x }]'), 'a file with mistakes is refused');
  t.ok(await answers(lab), 'and the old configuration goes on');
  t.equal((await download).stdout, '100000000', 'the transfer has seen nothing of it');
  const list = await weir.command(['ct', 'list', '-o', 'json']);
  t.ok(JSON.parse(list.stdout).some((flow: { service: string }) => flow.service === 'web'));
  const direct = await lab.exec('client', 'curl', ['-s', '-m', '5', `http://10.2.0.11:${HTTP_PORT}/`]);
  t.match(direct.stdout, /"client":"10.1.0.2"/, 'a direct connection to a backend keeps working');
  t.equal(await weir.stop(), 0);
});

t.test('ct watch: a real connection from its SYN to its end', needsRoot(t, 'ip', 'curl'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  const weir = await lab.startWeir(gatewayConfig(lab));
  const program = fileURLToPath(new URL('../../bin/weir.js', import.meta.url));
  const options = ['--socket', weir.socket, '-o', 'json', '--service', 'web'];
  const watch = lab.spawn('gw', 'watch', process.execPath, [program, 'ct', 'watch', ...options]);
  const lines = (): string[] => readFileSync(watch.logPath, 'utf8').split('\n').slice(0, -1);
  while (lines().length === 0) t.ok(await answers(lab));

  const url = `http://${VIP}:${PORTS.dnat}/bytes/100000000`;
  const download = lab.exec('client', 'curl', ['-s', '--limit-rate', '1M', '-o', '/dev/null', url]);
  let flow: FlowJson | undefined;
  while (flow === undefined) {
    const { stdout } = await weir.command(['ct', 'list', '-o', 'json', '--state', 'ESTABLISHED']);
    flow = (JSON.parse(stdout) as FlowJson[]).find(({ bytes }) => bytes.reply > 100_000);
  }
  const { client } = flow;
  t.match(await weir.command(['ct', 'flush', '--client', client]), { stdout: '1 connection forgotten\n' });
  const eventsOfIt = (): FlowEventView[] =>
    lines()
      .map((line) => JSON.parse(line) as FlowEventView)
      .filter((event) => event.client === client);
  while (!eventsOfIt().some(({ cause }) => cause === 'flushed')) await sleep(20);
  const ofIt = eventsOfIt().slice(0, 4);
  t.match(ofIt, [
    { event: 'created', state: 'SYN_SENT', proto: 'tcp', vip: `${VIP}:${PORTS.dnat}`, service: 'web', at: /Z$/ },
    { event: 'state', previous: 'SYN_SENT', state: 'SYN_RECV' },
    { event: 'state', previous: 'SYN_RECV', state: 'ESTABLISHED' },
    { event: 'closed', cause: 'flushed', state: 'ESTABLISHED' },
  ]);
  t.ok(ofIt[3]!.bytes.reply >= flow.bytes.reply, 'with the bytes it carried');
  t.ok(ofIt.every((event, i) => i === 0 || event.at >= ofIt[i - 1]!.at));

  t.equal(await weir.stop(), 0);
  t.equal(await watch.ended, 1, 'the watch ends with weir');
  t.equal(lines().at(-1), 'weir: weir ended in the middle of its answer. See its log.');
  await lab.destroy();
  await download;
});

t.test('an idle weir sleeps', needsRoot(t, 'ip'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  for (const engine of ['io_uring', 'readwrite'] as const) {
    const weir = await lab.startWeir(gatewayConfig(lab, { engine }));
    if (engine === 'io_uring') t.same(priorities(weir.pid), { dataPath: 0, unlike5: [] }, 'packets come first');
    const before = await cpuTicks(lab, weir.pid);
    await new Promise((resolve) => setTimeout(resolve, 5000));
    const used = (await cpuTicks(lab, weir.pid)) - before;
    t.ok(used <= 5, `${engine}: ${used} ticks of 10 ms in 5 s`);
    t.equal(await weir.stop(), 0);
  }
});

/** Flags of threads that the kernel runs for a process: PF_IO_WORKER and PF_USER_WORKER. Their names come a moment later. */
const KERNELS_OWN = 0x10 | 0x4000;

/** Niceness of the thread that waits in io_uring_enter; and of the others, but the kernel's own, which of them differ from 5. */
function priorities(pid: number): { dataPath: number | undefined; unlike5: string[] } {
  const tasks = readdirSync(`/proc/${pid}/task`).map((task) => {
    const stat = readFileSync(`/proc/${pid}/task/${task}/stat`, 'utf8');
    const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
    const isWaiting = readFileSync(`/proc/${pid}/task/${task}/syscall`, 'utf8').startsWith('426 ');
    return { stat, flags: Number(fields[6]), niceness: Number(fields[16]), isWaiting };
  });
  const weirs = tasks.filter(({ flags }) => (flags & KERNELS_OWN) === 0);
  const others = weirs.filter(({ isWaiting, niceness }) => !isWaiting && niceness !== 5);
  return {
    dataPath: weirs.find(({ isWaiting }) => isWaiting)?.niceness,
    unlike5: others.map(({ stat }) => stat),
  };
}

async function cpuTicks(lab: Lab, pid: number): Promise<number> {
  const { stdout } = await lab.exec('gw', 'cat', [`/proc/${pid}/stat`]);
  const fields = stdout.slice(stdout.lastIndexOf(')') + 2).split(' ');
  return Number(fields[11]) + Number(fields[12]);
}
