import type { LiveBackendView, LiveServiceView, LiveView, RatesView } from '../control/live/live-view.js';
import type { TableView } from '../control/view.js';
import { sayDuration } from './render.js';

/** How services, and backends within each, follow each other: as in the file, or the busiest first. */
export const SORTS = ['file', 'packets', 'bits', 'new', 'open'] as const;

export type Sort = (typeof SORTS)[number];

/** What of a view is shown. */
export interface FrameOptions {
  readonly columns: number;
  /** Lines at most; Infinity: all there are. */
  readonly rows: number;
  readonly sort: Sort;
  /** Part of the names of the services that are shown. */
  readonly service: string;
  /** Lines of the services that are above the screen. */
  readonly skip: number;
  readonly hasColour: boolean;
  /** The last line. */
  readonly status: string;
}

type Paint = (text: string, style: keyof typeof STYLES) => string;

const STYLES = { bold: '1', dim: '2', good: '32', warn: '33', bad: '31', head: '7' } as const;

const CLIENTS = 5;
const REASONS = 5;

/** A frame of `weir top`: lines no longer than there are columns. Where these are few, names are shortened and figures are not. */
export function renderFrame(view: LiveView, options: FrameOptions): string[] {
  const paint: Paint = (text, style) => (options.hasColour ? `\x1b[${STYLES[style]}m${text}\x1b[0m` : text);
  const line = (text: string): string => clip(text, options.columns);
  const below = [...reasonLines(view, paint, line), ...clientLines(view, paint, line)];
  const services = serviceLines(view, options, paint);
  const foot = options.status === '' ? [] : [paint(line(options.status), 'dim')];
  const head = headLines(view, options.columns, paint);
  const [titles, ...rows] = services;
  const room = Math.max(1, options.rows - head.length - 2 - below.length - foot.length);
  const skip = Math.min(options.skip, Math.max(0, rows.length - room));
  const lines = [...head, '', titles!, ...rows.slice(skip, skip + room), ...below];
  return [...lines.slice(0, Math.max(0, options.rows - foot.length)), ...foot];
}

function headLines({ status, rates, conntrack, count }: LiveView, columns: number, paint: Paint): string[] {
  const { tcp, any } = conntrack.tables;
  const wrap = (parts: readonly string[], between: string): string[] =>
    join(parts, between, columns).map((text) => clip(text, columns));
  const rateParts = [
    `packets ${si(rates.packetsIn)}/s in, ${si(rates.packetsOut)}/s out`,
    `bits ${withUnit(rates.bitsIn, 'b/s')} in, ${withUnit(rates.bitsOut, 'b/s')} out`,
    `new ${si(rates.connections)}/s`,
    `dropped ${si(rates.drops)}/s`,
  ];
  const counted = `  counted ${Math.round(count.secondsAgo)} s ago`;
  const title = `weir ${status.version}, ${status.device.name}, up ${sayDuration(status.uptimeSeconds)}`;
  return [
    paint(clip(title, columns), 'bold'),
    ...wrap(rateParts, '; '),
    ...wrap([`conntrack tcp ${fill(tcp)}`, ...states(tcp), `  other ${fill(any)}`, ...states(any), counted], ' '),
  ];
}

/** As many parts on a line as there is room for. */
function join(parts: readonly string[], between: string, columns: number): string[] {
  const lines: string[] = [];
  for (const part of parts) {
    const longer = lines.length === 0 ? part : `${lines.at(-1)}${between}${part}`;
    if (lines.length > 0 && longer.length > columns) lines.push(part.trimStart());
    else lines[Math.max(0, lines.length - 1)] = longer;
  }
  return lines;
}

function fill({ entries, limit }: TableView): string {
  const cells = Math.min(10, Math.ceil((entries / limit) * 10));
  return `[${'#'.repeat(cells)}${'-'.repeat(10 - cells)}] ${entries} of ${limit}`;
}

function states({ states }: TableView): string[] {
  return Object.entries(states).map(([name, number]) => `${name} ${number}`);
}

interface Row {
  readonly cells: readonly string[];
  readonly style?: keyof typeof STYLES;
}

const TITLES: Row = {
  cells: ['SERVICE, BACKEND', 'STATE', 'SHARE', 'PACKETS/S', 'BITS/S', 'NEW/S', 'OPEN'],
  style: 'head',
};

/** Titles, and a line for each service and backend. */
function serviceLines(view: LiveView, options: FrameOptions, paint: Paint): string[] {
  const { services, omittedServices } = view;
  const { columns, sort, service: wanted } = options;
  const shown = sorted(
    services.filter(({ name }) => name.includes(wanted)),
    sort,
  );
  const rows = [TITLES, ...shown.flatMap((service) => serviceRows(service, sort))];
  const widths = widthsOf(rows, columns);
  const lines = rows.map(({ cells, style }) => {
    const text = clip(align(cells, widths), columns);
    return style === undefined ? text : paint(text, style);
  });
  const none = services.length === 0 ? 'No services.' : `No service has "${wanted}" in its name.`;
  if (shown.length === 0) lines.push(clip(none, columns));
  return omittedServices === 0 ? lines : [...lines, clip(`${omittedServices} more services are not shown.`, columns)];
}

function serviceRows(service: LiveServiceView, sort: Sort): Row[] {
  const { name, address, port, protocol, backends } = service;
  const takers = backends.filter(({ takesNew }) => takesNew).length;
  const vip = `${address}:${port}/${protocol}`;
  return [
    { cells: [`${name} ${vip}`, `${takers} of ${backends.length}`, '', ...figures(service)], style: 'bold' },
    ...sorted(backends, sort).map((backend): Row => {
      const share = `${(backend.share * 100).toFixed(1)}%`;
      const cells = [`  ${backend.name}`, stateOf(backend), share, ...figures(backend)];
      return backend.state === 'active' ? { cells } : { cells, style: backend.state === 'down' ? 'bad' : 'warn' };
    }),
  ];
}

function figures({ rates, open, maxConnections }: LiveServiceView | LiveBackendView): string[] {
  const limit = maxConnections === null ? '' : `/${maxConnections}`;
  return [si(packetsOf(rates)), si(bitsOf(rates)), si(rates.connections), `${open}${limit}`];
}

function stateOf({ state, drainedBy, health, takesNew }: LiveBackendView): string {
  if (drainedBy !== null) return `draining (${drainedBy})`;
  if (state === 'down') return takesNew ? 'down (used)' : `down: ${health?.last ?? ''}`;
  return health === null ? 'active' : `active, up ${sayDuration(health.seconds)}`;
}

function reasonLines({ reasons }: LiveView, paint: Paint, line: (text: string) => string): string[] {
  const drops = reasons.filter(({ verdict }) => verdict === 'drop').slice(0, REASONS);
  if (drops.length === 0) return ['', line('Nothing was dropped.')];
  const rows = drops.map(({ reason, rate, packets, meaning }) =>
    line(`${reason.padEnd(24)} ${`${si(rate)}/s`.padStart(9)} ${String(packets).padStart(10)}  ${meaning}`),
  );
  return [
    '',
    paint(line(`${'DROPPED FOR'.padEnd(24)} ${'RATE'.padStart(9)} ${'PACKETS'.padStart(10)}  MEANING`), 'head'),
    ...rows,
  ];
}

function clientLines({ clients: { top, error } }: LiveView, paint: Paint, line: (text: string) => string): string[] {
  if (top.length === 0) return [];
  const rows = top
    .slice(0, CLIENTS)
    .map(({ address, connections, bytes }) =>
      line(`${address.padEnd(24)} ${String(connections).padStart(12)} ${withUnit(bytes, 'B').padStart(10)}`),
    );
  const title = `${'CLIENT'.padEnd(24)} ${'CONNECTIONS'.padStart(12)} ${'BYTES'.padStart(10)}`;
  return ['', paint(line(error === 0 ? title : `${title}  up to ${error} connections more each`), 'head'), ...rows];
}

function sorted<Item extends LiveServiceView | LiveBackendView>(items: readonly Item[], sort: Sort): Item[] {
  const by: Readonly<Record<Sort, (item: Item) => number>> = {
    file: () => 0,
    packets: ({ rates }) => packetsOf(rates),
    bits: ({ rates }) => bitsOf(rates),
    new: ({ rates }) => rates.connections,
    open: ({ open }) => open,
  };
  return [...items].sort((a, b) => by[sort](b) - by[sort](a));
}

function packetsOf({ packets }: RatesView): number {
  return packets.original + packets.reply;
}

function bitsOf({ bits }: RatesView): number {
  return bits.original + bits.reply;
}

/** Of the columns: what they are given where there is room, and what figures can take without a limit of connections. */
const WIDTHS = [34, 20, 7, 10, 10, 8, 12] as const;
const NARROW = [0, 0, 6, 9, 6, 6, 5] as const;

/** Where there is less room, the name and the state share what the figures leave. */
function widthsOf(rows: readonly Row[], columns: number): number[] {
  const figures = (least: readonly number[]): number[] =>
    least.slice(2).map((width, i) => Math.max(width, ...rows.map(({ cells }) => cells[i + 2]!.length)));
  const leftBy = (widths: readonly number[]): number => columns - widths.reduce((sum, width) => sum + width + 1, 1);
  const wide = figures(WIDTHS);
  if (leftBy(wide) >= WIDTHS[0] + WIDTHS[1]) return [WIDTHS[0], WIDTHS[1], ...wide];
  const narrow = figures(NARROW);
  const left = Math.max(0, leftBy(narrow));
  const state = Math.min(WIDTHS[1], Math.floor(left / 3));
  return [left - state, state, ...narrow];
}

/** The first two to the left, figures to the right. */
function align(cells: readonly string[], widths: readonly number[]): string {
  return cells
    .map((cell, i) => (i < 2 ? shorten(cell, widths[i]!).padEnd(widths[i]!) : cell.padStart(widths[i]!)))
    .join(' ');
}

/** Shows that there is more of it. */
function shorten(text: string, columns: number): string {
  return [...text].length <= columns || columns < 2 ? clip(text, columns) : `${clip(text, columns - 1)}…`;
}

/** Control characters, should there be any in what others have called something, do not reach the terminal. */
function clip(text: string, columns: number): string {
  return [...text.replace(/\p{Cc}/gu, '?')].slice(0, columns).join('');
}

/** `7.5`, `123`, `1.23 k`, `40.1 M` */
function si(value: number): string {
  if (value < 999.5) return value < 100 && !Number.isInteger(value) ? value.toFixed(1) : String(Math.round(value));
  let scaled = value;
  let step = 0;
  for (; scaled >= 999.5; step++) scaled /= 1000;
  return `${scaled.toFixed(scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0)} ${' kMGTPE'[step]}`;
}

/** `12 b/s`, `40.1 Mb/s` */
function withUnit(value: number, unit: string): string {
  return value < 999.5 ? `${si(value)} ${unit}` : `${si(value)}${unit}`;
}
