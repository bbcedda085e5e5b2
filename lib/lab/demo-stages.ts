import { setTimeout as sleep } from 'node:timers/promises';
import { ALL_BACKENDS } from './demo-config.js';
import type { LoadReport } from './load.js';
import type { Screen } from './screen.js';
import type { Lab, WeirProcess } from './topology.js';
import { load } from './traffic.js';
import type { Weirs } from './weirs.js';

/*
 *   every demo:   describe what runs -> ... -> SIGTERM, nothing is left
 *                 who answers          bars, evenly; with the same ports again, the same backends
 */

const BAR_COLUMNS = 24;
const REQUESTS = 900;
/** Asked in two rounds, well below the ports the kernel gives out by itself most often. */
const SAME_PORTS = 200;
const FIRST_PORT = 20_000;
const STOP_LIMIT_MS = 5000;

/** Starts the servers and then weir, by `start`. @returns what `start` did */
export async function startAll<T>(lab: Lab, screen: Screen, startedMs: number, start: () => Promise<T>): Promise<T> {
  const { backends } = lab;
  screen.heading('Building');
  await screen.during(`starting ${backends.length} backends`, lab.startServers());
  const builtMs = performance.now() - startedMs;
  const count = lab.namespaces.length;
  screen.line(
    `  ${count} namespaces, ${backends.length} backends with an HTTP and a UDP server each ${screen.dim(`${Math.round(builtMs)} ms`)}`,
  );
  return await screen.during('starting weir', start());
}

export function describeStart({ gateways, nodes }: Weirs, screen: Screen): void {
  const all = [...gateways, ...nodes];
  const events = gateways[0]!.events();
  const find = (name: string): Record<string, unknown> | undefined => events.find(({ event }) => event === name);
  const who =
    nodes.length === 0
      ? 'weir is ready'
      : `weir is ready, ${gateways.length} as gateway${gateways.length === 1 ? '' : 's'} and ${nodes.length} as nodes`;
  screen.line(
    `  ${who} ${screen.dim(`${Math.round(Math.max(...all.map(({ readyMs }) => readyMs)))} ms after the start`)}`,
  );
  const details = [find('engine')?.engine, find('device-opened')?.msg].filter(Boolean).join('; ');
  if (details) screen.line(screen.dim(`  ${details}`));
  const notes = all.flatMap((weir) => weir.events()).filter(({ event }) => event === 'network-note');
  for (const msg of new Set(notes.map((note) => String(note.msg)))) screen.line(screen.dim(`  note: ${msg}`));
}

/** @param services headings and ports; of a sticky one the same ports must meet the same backends again */
export async function showSelection(
  lab: Lab,
  screen: Screen,
  services: readonly { readonly name: string; readonly port: number; readonly isSticky: boolean }[],
): Promise<void> {
  for (const { name, port, isSticky } of services) {
    screen.heading(`${name}: who answers ${REQUESTS} connections`);
    const spread = await screen.during('asking', load(lab, port, ['--requests', String(REQUESTS)]));
    showBars(spread.backends, screen);
    screen.check(isEven(spread), `${spread.ok} answered, ${spread.failed} failed, evenly${describeErrors(spread)}`);
    const again = ['--requests', String(SAME_PORTS), '--rounds', '2', '--first-port', String(FIRST_PORT)];
    const { asked, same, failed, errors } = await screen.during('asking again', load(lab, port, again));
    const share = asked === 0 ? 0 : Math.round((same / asked) * 100);
    const text = `${asked} source ports asked twice: ${share} % met the same backend again`;
    if (isSticky) screen.check(asked > 0 && same === asked && failed === 0, text + describeErrors({ failed, errors }));
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

/** ` (reason: count, ...)`, or nothing. */
export function describeErrors({ failed, errors }: Pick<LoadReport, 'failed' | 'errors'>): string {
  if (failed === 0) return '';
  return ` (${Object.entries(errors)
    .map(([reason, count]) => `${reason}: ${count}`)
    .join(', ')})`;
}

/** The head of a table and some of its rows: of each group, up to so many. */
export function showExcerpt(
  [head = '', ...rows]: readonly string[],
  groups: readonly { readonly of: (row: string) => boolean; readonly limit: number }[],
  screen: Screen,
): void {
  const excerpt = groups.flatMap(({ of, limit }) => rows.filter(of).slice(0, limit));
  for (const row of [head, ...excerpt]) screen.line(screen.fit(`  ${row}`));
  if (rows.length > excerpt.length) screen.line(screen.dim(`  ... and ${rows.length - excerpt.length} more`));
}

/** @param running by the roles of their namespaces */
export async function showStop(
  lab: Lab,
  running: Readonly<Record<string, WeirProcess>>,
  screen: Screen,
): Promise<void> {
  screen.heading('SIGTERM');
  const startedMs = performance.now();
  const stopping = Object.values(running).map((weir) => Promise.race([weir.stop(), sleep(STOP_LIMIT_MS, null)]));
  const statuses = await screen.during('stopping weir', Promise.all(stopping));
  const took = screen.dim(`${Math.round(performance.now() - startedMs)} ms`);
  const who = statuses.length === 1 ? 'weir' : `all ${statuses.length} of weir`;
  screen.check(
    statuses.every((status) => status === 0),
    `${who} ended with status ${[...new Set(statuses)].join(', ')} ${took}`,
  );
  const script = 'ip -o link show weir0 2>/dev/null; ip rule show; ip route show table all';
  const shown = await Promise.all(Object.keys(running).map((role) => lab.exec(role, 'sh', ['-c', script])));
  const left = shown
    .flatMap(({ stdout }) => stdout.split('\n'))
    .filter((line) => /weir0|proto 196|blackhole/.test(line));
  screen.check(
    left.length === 0,
    left.length === 0 ? 'devices, routes and rules are gone' : `left behind: ${left.join('; ')}`,
  );
}
