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
const HEAD_ROWS = 4;

/** A frame of `weir top`: lines no longer than there are columns. */
export function renderFrame(view: LiveView, options: FrameOptions): string[] {
  const paint: Paint = (text, style) => (options.hasColour ? `\x1b[${STYLES[style]}m${text}\x1b[0m` : text);
  const line = (text: string): string => clip(text, options.columns);
  const below = [...reasonLines(view, paint, line), ...clientLines(view, paint, line)];
  const services = serviceLines(view, options, paint, line);
  const foot = options.status === '' ? [] : [paint(line(options.status), 'dim')];
  const room = Math.max(1, options.rows - HEAD_ROWS - 1 - below.length - foot.length);
  const skip = Math.min(options.skip, Math.max(0, services.length - room));
  const lines = [
    ...headLines(view, paint, line),
    '',
    paint(line(columns(['SERVICE, BACKEND', 'STATE', 'SHARE', 'PACKETS/S', 'BITS/S', 'NEW/S', 'OPEN'])), 'head'),
    ...services.slice(skip, skip + room),
    ...below,
  ];
  return [...lines.slice(0, Math.max(0, options.rows - foot.length)), ...foot];
}

function headLines(
  { status, rates, conntrack, count }: LiveView,
  paint: Paint,
  line: (text: string) => string,
): string[] {
  const { tcp, any } = conntrack.tables;
  const bits = `${withUnit(rates.bitsIn, 'b/s')} in, ${withUnit(rates.bitsOut, 'b/s')} out`;
  return [
    paint(line(`weir ${status.version}, ${status.device.name}, up ${sayDuration(status.uptimeSeconds)}`), 'bold'),
    line(
      `packets ${si(rates.packetsIn)}/s in, ${si(rates.packetsOut)}/s out; bits ${bits}; new ${si(rates.connections)}/s; dropped ${si(rates.drops)}/s`,
    ),
    line(`conntrack tcp ${fill(tcp)}   other ${fill(any)}   counted ${Math.round(count.secondsAgo)} s ago`),
  ];
}

function fill({ entries, limit, states }: TableView): string {
  const cells = Math.min(10, Math.ceil((entries / limit) * 10));
  const named = Object.entries(states).map(([name, number]) => ` ${name} ${number}`);
  return `[${'#'.repeat(cells)}${'-'.repeat(10 - cells)}] ${entries} of ${limit}${named.join('')}`;
}

function serviceLines(
  { services, omittedServices }: LiveView,
  { sort, service: wanted }: FrameOptions,
  paint: Paint,
  line: (text: string) => string,
): string[] {
  const shown = sorted(
    services.filter(({ name }) => name.includes(wanted)),
    sort,
  );
  const lines = shown.flatMap((service) => {
    const { name, address, port, protocol, backends } = service;
    const takers = backends.filter(({ takesNew }) => takesNew).length;
    const head = columns([
      `${name} ${address}:${port}/${protocol}`,
      `${takers} of ${backends.length}`,
      '',
      ...figures(service),
    ]);
    return [
      paint(line(head), 'bold'),
      ...sorted(backends, sort).map((backend) => {
        const state = stateOf(backend);
        const text = line(
          columns([`  ${backend.name}`, state, `${(backend.share * 100).toFixed(1)}%`, ...figures(backend)]),
        );
        return backend.state === 'active' ? text : paint(text, backend.state === 'down' ? 'bad' : 'warn');
      }),
    ];
  });
  if (lines.length === 0)
    lines.push(line(services.length === 0 ? 'No services.' : `No service has "${wanted}" in its name.`));
  return omittedServices === 0 ? lines : [...lines, line(`${omittedServices} more services are not shown.`)];
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

const WIDTHS = [34, 20, 7, 10, 10, 8, 12] as const;

/** The first two to the left, figures to the right. */
function columns(cells: readonly string[]): string {
  return cells
    .map((cell, i) => (i < 2 ? clip(cell, WIDTHS[i]!).padEnd(WIDTHS[i]!) : cell.padStart(WIDTHS[i]!)))
    .join(' ');
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
