import { setTimeout as sleep } from 'node:timers/promises';
import { ALL_BACKENDS, DICE_PORT, demoConfig, type Mode, WEB_PORT, type Weights } from './demo-config.js';
import { describeErrors, describeStart, showExcerpt, showSelection, showStop, startAll } from './demo-stages.js';
import type { LoadReport } from './load.js';
import type { Result } from './process.js';
import type { Screen } from './screen.js';
import { ECHO_PORT, type Lab, type WeirProcess } from './topology.js';
import { iperf, load, startIperf } from './traffic.js';
import { startWeirs } from './weirs.js';

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

/** Connections that stay open. */
const KEPT = 12;
/** After a reload, requests that had begun may still end. */
const SETTLE_MS = 400;
const ECHO_DATAGRAMS = 20_000;
const OPEN_ROWS = 6;
const OTHER_ROWS = 3;

/** Everything between an inline lab's building and its removal. Failed checks are counted by the screen. */
export async function showDemo(lab: Lab, mode: Mode, screen: Screen, startedMs: number): Promise<void> {
  const weirs = await startAll(lab, screen, startedMs, () => startWeirs(lab, mode));
  describeStart(weirs, screen);
  const weir = weirs.gateways[0]!;
  await showSelection(lab, screen, [
    { name: 'Random', port: DICE_PORT, isSticky: false },
    { name: 'Maglev', port: WEB_PORT, isSticky: true },
  ]);
  showConntrack(await showLiveChange(lab, mode, weir, screen), screen);
  await showSpeed(lab, screen);
  await showStop(lab, { gw: weir }, screen);
}

/**
 * One row a second while connections are opened without a break and others stay open.
 *
 * @returns what `weir ct list` said in the middle of it
 */
async function showLiveChange(lab: Lab, mode: Mode, weir: WeirProcess, screen: Screen): Promise<Result> {
  screen.heading('Live: b3 is added, b1 is drained, while connections come in without a break');
  const change = (web: Weights, text: string): Promise<void> => reload(weir, demoConfig(mode, web), text, screen);
  await weir.reload(demoConfig(mode, { 1: 1, 2: 1 }));
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
  await change({ 1: 1, 2: 1, 3: 1 }, '+ b3 added');
  await watch(2);
  await change({ 1: 0, 2: 1, 3: 1 }, '− b1 drained: no new connections, the open ones stay');
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

async function reload(weir: WeirProcess, config: string, text: string, screen: Screen): Promise<void> {
  const startedMs = performance.now();
  await weir.reload(config);
  screen.line(
    `       ${text} ${screen.dim(`reload: ${Math.round(performance.now() - startedMs)} ms, command and all`)}`,
  );
}

function showConntrack({ status, stdout, stderr }: Result, screen: Screen): void {
  screen.heading('Meanwhile, in conntrack: weir ct list');
  const isOpen = (row: string): boolean => row.includes('ESTABLISHED');
  const groups = [
    { of: isOpen, limit: OPEN_ROWS },
    { of: (row: string) => !isOpen(row), limit: OTHER_ROWS },
  ];
  const [head = '', ...rows] = stdout.trimEnd().split('\n');
  showExcerpt([head, ...rows], groups, screen);
  const open = rows.filter(isOpen).length;
  screen.check(status === 0 && open >= KEPT, `${rows.length} connections, ${open} of them open ${stderr}`.trim());
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
  if (!(await startIperf(lab))) {
    screen.line('  no iperf3 here, so no bulk transfer is measured (apt install iperf3)');
    return;
  }
  const bulk = await screen.during('TCP, one stream', iperf(lab, []));
  const gigabits = (bulk.sum?.bits_per_second ?? 0) / 1e9;
  screen.check(gigabits > 0, `TCP, one stream: ${gigabits.toFixed(2)} Gb/s${bulk.error}`);
  const small = await screen.during('UDP, 64 bytes', iperf(lab, ['-u', '-b', '0', '-l', '64']));
  const { packets = 0, lost_packets: lost = 0, seconds = 1 } = small.sum ?? {};
  const arrived = Math.round((packets - lost) / seconds).toLocaleString('en');
  screen.check(packets > 0, `UDP, 64 bytes: ${arrived} packets/s arrived${small.error}`);
}
