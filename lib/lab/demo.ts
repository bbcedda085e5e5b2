import type { ChildProcess } from 'node:child_process';
import { setTimeout as sleep } from 'node:timers/promises';
import { ALL_BACKENDS, DICE_PORT, demoConfig, IPERF_PORT, WEB_PORT, type Weights } from './demo-config.js';
import type { LoadReport } from './load.js';
import { nodeCommand, type Result } from './process.js';
import type { Screen } from './screen.js';
import { ECHO_PORT, type Lab, VIP, type WeirProcess } from './topology.js';

/*
 *   client                     gw                        b1 b2 b3
 *     |  1 which backend?      weir: random, Maglev        |
 *     |------------------------------------------------->  |   bars
 *     |  2 without a break     reload: + b3, b1 drained    |
 *     |=================================================>  |   a row a second, no failure
 *     |                        3 weir ct list              |
 *     |  4 as fast as it goes                              |   Gb/s, packets/s
 *     |                        5 SIGTERM                   |   nothing is left
 */

const BAR_COLUMNS = 24;
const SELECTION_REQUESTS = 900;
/** Asked in two rounds, well below the ports the kernel gives out by itself most often. */
const SAME_PORTS = 200;
const FIRST_PORT = 20_000;
/** Connections that stay open. */
const KEPT = 12;
/** After a reload, requests that had begun may still end. */
const SETTLE_MS = 400;
const IPERF_SECONDS = 2;
const ECHO_DATAGRAMS = 20_000;
const OPEN_ROWS = 6;
const OTHER_ROWS = 3;

/** Everything between the lab's building and its removal. Failed checks are counted by the screen. */
export async function showDemo(lab: Lab, screen: Screen, startedMs: number): Promise<void> {
  screen.heading('Building');
  await screen.during('starting three backends', lab.startServers());
  const builtMs = performance.now() - startedMs;
  screen.line(
    `  5 namespaces, 3 backends with an HTTP and a UDP server each ${screen.dim(`${Math.round(builtMs)} ms`)}`,
  );
  const weir = await screen.during('starting weir', lab.startWeir(demoConfig()));
  describeStart(weir, screen);
  await showSelection(lab, screen);
  showConntrack(await showLiveChange(lab, weir, screen), screen);
  await showSpeed(lab, screen);
  await showStop(lab, weir, screen);
}

function describeStart(weir: WeirProcess, screen: Screen): void {
  const events = weir.events();
  const find = (name: string): Record<string, unknown> | undefined => events.find(({ event }) => event === name);
  screen.line(`  weir is ready ${screen.dim(`${Math.round(weir.readyMs)} ms after its start`)}`);
  const details = [find('engine')?.engine, find('device-opened')?.msg].filter(Boolean).join('; ');
  if (details) screen.line(screen.dim(`  ${details}`));
  for (const { event, msg } of events) if (event === 'network-note') screen.line(screen.dim(`  note: ${String(msg)}`));
}

async function showSelection(lab: Lab, screen: Screen): Promise<void> {
  for (const [name, port] of [
    ['Random', DICE_PORT],
    ['Maglev', WEB_PORT],
  ] as const) {
    screen.heading(`${name}: who answers ${SELECTION_REQUESTS} connections`);
    const spread = await screen.during('asking', load(lab, port, ['--requests', String(SELECTION_REQUESTS)]));
    showBars(spread.backends, screen);
    screen.check(isEven(spread), `${spread.ok} answered, ${spread.failed} failed, evenly${describeErrors(spread)}`);
    const again = ['--requests', String(SAME_PORTS), '--rounds', '2', '--first-port', String(FIRST_PORT)];
    const { asked, same, failed, errors } = await screen.during('asking again', load(lab, port, again));
    const share = asked === 0 ? 0 : Math.round((same / asked) * 100);
    const text = `${asked} source ports asked twice: ${share} % met the same backend again`;
    if (name === 'Maglev')
      screen.check(asked > 0 && same === asked && failed === 0, text + describeErrors({ failed, errors }));
    else screen.line(`    ${text}`);
  }
}

function showBars(counts: Readonly<Record<string, number>>, screen: Screen): void {
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  const max = Math.max(...Object.values(counts));
  for (const name of Object.keys(ALL_BACKENDS).map((number) => `b${number}`)) {
    const count = counts[name] ?? 0;
    const share = total === 0 ? '' : `${((count / total) * 100).toFixed(1)} %`;
    const bar = screen.bar(count, max, BAR_COLUMNS, Number(name.slice(1)) - 1);
    screen.line(`  ${name} ${bar} ${String(count).padStart(4)}  ${screen.dim(share)}`);
  }
}

/** Within four standard deviations of a third: a fair draw fails this once in ten thousand demos. */
function isEven({ ok, failed, backends }: LoadReport): boolean {
  const expected = ok / 3;
  const tolerance = 4 * Math.sqrt((ok * 2) / 9) + ok * 0.01;
  const counts = Object.keys(ALL_BACKENDS).map((number) => backends[`b${number}`] ?? 0);
  return failed === 0 && counts.every((count) => Math.abs(count - expected) <= tolerance);
}

function describeErrors({ failed, errors }: Pick<LoadReport, 'failed' | 'errors'>): string {
  if (failed === 0) return '';
  return ` (${Object.entries(errors)
    .map(([reason, count]) => `${reason}: ${count}`)
    .join(', ')})`;
}

/**
 * One row a second while connections are opened without a break and others stay open.
 *
 * @returns what `weir ct list` said in the middle of it
 */
async function showLiveChange(lab: Lab, weir: WeirProcess, screen: Screen): Promise<Result> {
  screen.heading('Live: b3 is added, b1 is drained, while connections come in without a break');
  await weir.reload(demoConfig({ 1: 1, 2: 1 }));
  const reports: LoadReport[] = [];
  let stop = (): void => {};
  const running = load(lab, WEB_PORT, ['--parallel', '4', '--kept', String(KEPT)], {
    onReport: (report) => reports.push(report),
    started: (child) => {
      stop = () => child.kill('SIGTERM');
    },
  });
  const ended = running.then(
    () => true,
    () => true,
  );
  let shown: LoadReport | undefined;
  const watch = async (seconds: number): Promise<void> => {
    for (let i = 0; i < seconds; i++) {
      if (await Promise.race([sleep(1000, false), ended])) return;
      const now = reports.at(-1);
      if (now !== undefined) screen.line(liveRow(shown, now, screen));
      shown = now;
    }
  };
  await watch(2);
  await change(weir, { 1: 1, 2: 1, 3: 1 }, '+ b3 added', screen);
  await watch(2);
  await change(weir, { 1: 0, 2: 1, 3: 1 }, '− b1 drained: no new connections, the open ones stay', screen);
  await Promise.race([sleep(SETTLE_MS), ended]);
  const drained = reports.at(-1);
  await watch(3);
  const list = await weir.command(['ct', 'list']);
  const last = reports.at(-1);
  stop();
  const end = await screen.during('letting the last ones finish', running);
  const onB1 = (report: LoadReport | undefined): number => report?.backends.b1 ?? 0;
  screen.check(end.ok > 0 && end.failed === 0, `${end.ok} connections, ${end.failed} failed${describeErrors(end)}`);
  screen.check((end.backends.b3 ?? 0) > 0, 'b3 got its share');
  screen.check(onB1(end) === onB1(drained), 'b1 got no new connection after the drain');
  const where = Object.entries(end.kept.backends)
    .sort()
    .map(([name, count]) => `${count} on ${name}`)
    .join(', ');
  screen.check(last?.kept.open === KEPT, `the ${KEPT} connections open since the start never noticed: ${where}`);
  return list;
}

function liveRow(from: LoadReport | undefined, to: LoadReport, screen: Screen): string {
  const elapsed = (to.elapsedMs - (from?.elapsedMs ?? 0)) / 1000;
  const columns = Object.keys(ALL_BACKENDS).map((number) => {
    const name = `b${number}`;
    const rate = elapsed <= 0 ? 0 : ((to.backends[name] ?? 0) - (from?.backends[name] ?? 0)) / elapsed;
    const total = elapsed <= 0 ? 0 : (to.ok - (from?.ok ?? 0)) / elapsed;
    return `${name} ${screen.bar(rate, total, 10, Number(number) - 1)} ${String(Math.round(rate)).padStart(4)}/s`;
  });
  return `  ${screen.dim(`${(to.elapsedMs / 1000).toFixed(1)} s`)}  ${columns.join('   ')}`;
}

async function change(weir: WeirProcess, web: Weights, text: string, screen: Screen): Promise<void> {
  const startedMs = performance.now();
  await weir.reload(demoConfig(web));
  screen.line(
    `       ${text} ${screen.dim(`reload: ${Math.round(performance.now() - startedMs)} ms, command and all`)}`,
  );
}

function showConntrack({ status, stdout, stderr }: Result, screen: Screen): void {
  screen.heading('Meanwhile, in conntrack: weir ct list');
  const [head = '', ...rows] = stdout.trimEnd().split('\n');
  const open = rows.filter((row) => row.includes('ESTABLISHED'));
  const others = rows.filter((row) => !row.includes('ESTABLISHED'));
  const excerpt = [...open.slice(0, OPEN_ROWS), ...others.slice(0, OTHER_ROWS)];
  for (const row of [head, ...excerpt]) screen.line(screen.fit(`  ${row}`));
  if (rows.length > excerpt.length) screen.line(screen.dim(`  ... and ${rows.length - excerpt.length} more`));
  screen.check(
    status === 0 && open.length >= KEPT,
    `${rows.length} connections, ${open.length} of them open ${stderr}`.trim(),
  );
}

async function showSpeed(lab: Lab, screen: Screen): Promise<void> {
  screen.heading('Speed: one process, one thread, client and backends on the same machine');
  const echo = await screen.during(
    'datagrams of 0 to 1472 bytes, there and back',
    load(lab, ECHO_PORT, ['--udp', '--requests', String(ECHO_DATAGRAMS), '--seconds', '5']),
  );
  const rate = Math.round((echo.ok * 2000) / Math.max(1, echo.elapsedMs)).toLocaleString('en');
  const echoed = `${echo.ok.toLocaleString('en')} datagrams of 0 to 1472 bytes came back unchanged`;
  screen.check(
    echo.failed === 0 && echo.ok > 0,
    `${echoed}, ${echo.failed} did not ${screen.dim(`${rate} packets/s`)}`,
  );
  const version = await lab.exec('client', 'sh', ['-c', 'command -v iperf3']);
  if (version.status !== 0) {
    screen.line('  no iperf3 here, so no bulk transfer is measured (apt install iperf3)');
    return;
  }
  const server = lab.spawn('b1', 'iperf3', 'iperf3', ['-s', '-p', String(IPERF_PORT)]);
  await Promise.race([waitForIperf(lab), server.ended]);
  const bulk = await screen.during('TCP, one stream', iperf(lab, []));
  const gigabits = (bulk.sum?.bits_per_second ?? 0) / 1e9;
  screen.check(gigabits > 0, `TCP, one stream: ${gigabits.toFixed(2)} Gb/s${bulk.error}`);
  const small = await screen.during('UDP, 64 bytes', iperf(lab, ['-u', '-b', '0', '-l', '64']));
  const { packets = 0, lost_packets: lost = 0, seconds = 1 } = small.sum ?? {};
  const arrived = Math.round((packets - lost) / seconds).toLocaleString('en');
  screen.check(packets > 0, `UDP, 64 bytes: ${arrived} packets/s arrived${small.error}`);
}

interface IperfSum {
  readonly bits_per_second?: number;
  readonly packets?: number;
  readonly lost_packets?: number;
  readonly seconds?: number;
}

async function waitForIperf(lab: Lab): Promise<void> {
  const script = `for i in $(seq 100); do [ -n "$(ss -Hltn sport = :${IPERF_PORT})" ] && exit; sleep 0.02; done`;
  await lab.exec('b1', 'sh', ['-c', script]);
}

async function iperf(lab: Lab, options: readonly string[]): Promise<{ sum?: IperfSum; error: string }> {
  const args = ['-c', VIP, '-p', String(IPERF_PORT), '-t', String(IPERF_SECONDS), '-J', ...options];
  const { stdout, stderr } = await lab.exec('client', 'iperf3', args, { timeoutMs: (IPERF_SECONDS + 8) * 1000 });
  try {
    const { end, error } = JSON.parse(stdout) as { end?: { sum_received?: IperfSum; sum?: IperfSum }; error?: string };
    const sum = options.includes('-u') ? end?.sum : end?.sum_received;
    return { ...(sum ? { sum } : {}), error: error ? ` (iperf3: ${error})` : '' };
  } catch {
    return { error: ` (iperf3: ${stderr.trim() || 'no result'})` };
  }
}

async function showStop(lab: Lab, weir: WeirProcess, screen: Screen): Promise<void> {
  screen.heading('SIGTERM');
  const startedMs = performance.now();
  const status = await screen.during('stopping weir', Promise.race([weir.stop(), sleep(5000, null)]));
  const tookMs = Math.round(performance.now() - startedMs);
  screen.check(status === 0, `weir ended with status ${status} ${screen.dim(`${tookMs} ms`)}`);
  const script = 'ip -o link show weir0 2>/dev/null; ip rule show; ip route show table all';
  const { stdout } = await lab.exec('gw', 'sh', ['-c', script]);
  const left = stdout.split('\n').filter((line) => /weir0|proto 196|blackhole/.test(line));
  screen.check(
    left.length === 0,
    left.length === 0 ? 'device, routes and rules are gone' : `left behind: ${left.join('; ')}`,
  );
}

/** Runs the load of load.ts from the client and resolves with its last report. */
async function load(
  lab: Lab,
  port: number,
  options: readonly string[],
  { onReport, started }: { onReport?: (report: LoadReport) => void; started?: (child: ChildProcess) => void } = {},
): Promise<LoadReport> {
  const [command, ...args] = nodeCommand('load');
  let text = '';
  let last: LoadReport | undefined;
  const { stderr } = await lab.exec('client', command!, [...args, '--target', `${VIP}:${port}`, ...options], {
    ...(started ? { started } : {}),
    onOutput: (part) => {
      text += part;
      const end = text.lastIndexOf('\n') + 1;
      for (const line of text.slice(0, end).split('\n')) {
        if (line === '') continue;
        last = JSON.parse(line) as LoadReport;
        onReport?.(last);
      }
      text = text.slice(end);
    },
  });
  if (last?.done) return last;
  throw new Error(`the load ended early: ${stderr.trim() || 'it said nothing'}`);
}
