import { REASON, REASON_MEANINGS, type ReasonName } from '../base/reasons.js';
import { plural } from '../control/summary.js';
import type {
  BackendView,
  ConntrackView,
  DrainView,
  FlowEventView,
  LogLineView,
  ServiceView,
  StatusView,
} from '../control/view.js';

type Cell = string | number;

/** A table for people; numbers are right-aligned. */
export function renderTable(head: readonly string[], rows: readonly (readonly Cell[])[]): string {
  const widths = head.map((title, i) => Math.max(title.length, ...rows.map((row) => String(row[i]).length)));
  const line = (row: readonly Cell[]): string =>
    row
      .map((cell, i) => (typeof cell === 'number' ? String(cell).padStart(widths[i]!) : cell.padEnd(widths[i]!)))
      .join('  ')
      .trimEnd();
  return `${[head, ...rows].map(line).join('\n')}\n`;
}

export function renderServices(services: readonly ServiceView[]): string {
  if (services.length === 0) return 'no services\n';
  const rows = services.flatMap(({ name, address, port, protocol, algorithm, mode, removed, backends }) => {
    const how = `${algorithm} ${mode}${removed ? ', removed' : ''}`;
    const service = [name, `${address}:${port}/${protocol}`, how];
    if (backends.length === 0) return [[...service, '(none)', '', 0, '', 0, 0, 0, 0]];
    return backends.map((backend, i): Cell[] => [
      ...(i === 0 ? service : ['', '', '']),
      backend.name === endpointOf(backend) ? '-' : backend.name,
      endpointOf(backend),
      backend.weight,
      sayState(backend),
      backend.flows,
      backend.connections,
      backend.bytes.original,
      backend.bytes.reply,
    ]);
  });
  const table = renderTable(
    ['SERVICE', 'VIP', 'HOW', 'BACKEND', 'ADDRESS', 'WEIGHT', 'STATE', 'FLOWS', 'OPENED', 'BYTES IN', 'BYTES OUT'],
    rows,
  );
  const health = services.flatMap(({ name, backends }) => healthRows(name, backends));
  const limits = services.flatMap(limitRows);
  return [
    table,
    ...(health.length === 0
      ? []
      : [renderTable(['SERVICE', 'BACKEND', 'HEALTH', 'FOR', 'NO ANSWER', 'REFUSED', 'LAST PROBE'], health)]),
    ...(limits.length === 0 ? [] : [renderTable(['SERVICE', 'BACKEND', 'OPEN', 'LIMIT', 'NEW PER CLIENT'], limits)]),
  ].join('\n');
}

function endpointOf({ address, port }: BackendView): string {
  return `${address}:${port}`;
}

/** Of the services and backends that have limits. */
function limitRows({ name, open, maxConnections, newConnectionsPerSecond, backends }: ServiceView): Cell[][] {
  const limited = backends.filter((backend) => backend.maxConnections !== null);
  const ofService = maxConnections !== null || newConnectionsPerSecond !== null;
  const rate = newConnectionsPerSecond === null ? '' : `${newConnectionsPerSecond}/s`;
  return [
    ...(ofService ? [[name, '(all)', open, maxConnections ?? '', rate]] : []),
    ...limited.map((backend): Cell[] => [name, backend.name, backend.open, backend.maxConnections!, '']),
  ];
}

function sayState({ removed, state, drainedBy, takesNew }: BackendView): string {
  if (removed) return 'removed';
  if (drainedBy === 'command') return 'draining (by command)';
  return state === 'down' && takesNew ? 'down (used: all are)' : state;
}

/** Of the backends that there is something to say of: checks, or SYNs that came to nothing. */
function healthRows(service: string, backends: readonly BackendView[]): Cell[][] {
  return backends
    .filter(({ health, signals }) => health !== null || signals.refused + signals.unanswered > 0)
    .map(({ name, health, signals: { refused, unanswered } }) => {
      if (health === null) return [service, name, '-', '', unanswered, refused, ''];
      const { state, seconds, reason, last } = health;
      const found = state === 'down' && last !== reason ? `${last} (down for: ${reason})` : last;
      return [service, name, state, sayDuration(seconds), unanswered, refused, found];
    });
}

export function renderDrain(view: DrainView): string {
  const none = view.takers === 0 ? `no backend of ${view.service} takes new connections now\n` : '';
  return `${sayDrain(view)}\n${none}`;
}

function sayDrain({ service, backend, drained, changed, takesNew, weight, flows }: DrainView): string {
  const name = `${service}/${backend}`;
  const before = changed ? '' : ', as before';
  if (drained) return `${name} takes no new connections${before}; it has ${plural(flows, 'connection')}`;
  if (changed && takesNew) return `${name} takes new connections again`;
  const why = weight === 0 ? 'its weight in the file is 0' : 'it is down';
  const now = takesNew ? 'it takes new connections' : `it takes no new connections, since ${why}`;
  return changed
    ? `${name} is no longer drained, but ${now}`
    : `${name} was not drained by command, nothing is changed: ${now}`;
}

export function renderStatus({
  version,
  pid,
  uptimeSeconds,
  device,
  node,
  config,
  conntrack,
  traffic,
}: StatusView): string {
  const { lastReload } = config;
  const rows: [string, string][] = [
    ['weir', `${version}, pid ${pid}, up ${sayDuration(uptimeSeconds)}`],
    ['device', `${device.name}, mtu ${device.mtu}, ${device.engine}`],
    ...device.notes.map((note): [string, string] => ['', note]),
    ...renderNode(node),
    ['config', `${config.path}, version ${config.version}, for ${sayDuration(config.ageSeconds)}`],
    ...(lastReload.success ? [] : indent(`refused ${lastReload.at}`, lastReload.message)),
    [
      'connections',
      `tcp ${conntrack.tcp.entries} of ${conntrack.tcp.limit}, other ${conntrack.any.entries} of ${conntrack.any.limit}`,
    ],
    ['packets', `${traffic.rxPackets} in, ${traffic.txPackets} out, ${sum(traffic.drops)} dropped`],
  ];
  return rows.map(([key, value]) => `${key.padEnd(12)} ${value}\n`).join('');
}

function renderNode(node: StatusView['node']): [string, string][] {
  if (node === null) return [];
  const answers = node.endpoints.map(({ address, port, protocol, learned }): [string, string] => [
    '',
    `answers for ${address}:${port}/${protocol}${learned ? ', learned' : ''}`,
  ]);
  return [['node', `tunnels end at ${node.address}:${node.port}`], ...answers];
}

function indent(title: string, lines: string): [string, string][] {
  return [['', title], ...lines.split('\n').map((line): [string, string] => ['', `  ${line}`])];
}

export function renderConntrack({ tables, gc, drops }: ConntrackView): string {
  const rows = (['tcp', 'any'] as const).map((name) => {
    const { entries, limit, inserted, insertFailures, evicted, collected, states } = tables[name];
    const evictions = evicted.expired + evicted.closing + evicted.halfOpen;
    return [name, entries, limit, inserted, insertFailures, evictions, collected, sayCountsOf(states)];
  });
  const table = renderTable(
    ['TABLE', 'ENTRIES', 'LIMIT', 'INSERTED', 'REFUSED', 'EVICTED', 'COLLECTED', 'STATES'],
    rows,
  );
  const last = gc.runs === 0 ? '' : `; the last took ${ms(gc.lastPassSeconds)} and deleted ${gc.lastDeleted}`;
  const collector = `\ngc: every ${sayDuration(gc.intervalSeconds)}, ${gc.runs} so far${last}; longest slice ${ms(gc.longestSliceSeconds)}\n`;
  const dropped = Object.entries(drops).map(([reason, packets]) => [
    reason,
    packets,
    REASON_MEANINGS[REASON[reason as ReasonName]]!,
  ]);
  return (
    table + collector + (dropped.length === 0 ? '' : `\n${renderTable(['DROPPED FOR', 'PACKETS', 'MEANING'], dropped)}`)
  );
}

const EVENT_COLUMNS = [12, 15, 5, 21, 21, 21, 16, 22, 11, 15] as const;

/** Above the lines of `renderEvent`, which are as wide. */
export function renderEventHead(): string {
  return eventLine([
    'TIME (UTC)',
    'EVENT',
    'PROTO',
    'CLIENT',
    'VIP',
    'BACKEND',
    'SERVICE',
    'STATE',
    'PACKETS',
    'BYTES',
    'FLAGS',
  ]);
}

/** An event as a line for people. */
export function renderEvent(event: FlowEventView): string {
  const { at, proto, client, vip, backend, service, state, previous, packets, bytes, flags } = event;
  return eventLine([
    at.slice(11, 23),
    event.cause === undefined ? event.event : `${event.event} ${event.cause}`,
    proto,
    client,
    vip,
    backend,
    service,
    previous === undefined ? state : `${previous} > ${state}`,
    `${packets.original}/${packets.reply}`,
    `${bytes.original}/${bytes.reply}`,
    flags.join(' '),
  ]);
}

/** A line of the log as `run --pretty` would show it, with its date. */
export function renderLogLine({ time, level, event, msg }: LogLineView): string {
  return `${time.replace('T', ' ').replace('Z', '')} ${level.toUpperCase().padEnd(5)} ${event}: ${msg}\n`;
}

/** The columns of a stream, whose widths cannot be those of what is still to come. */
function eventLine(cells: readonly string[]): string {
  return `${cells
    .map((cell, i) => cell.padEnd(EVENT_COLUMNS[i] ?? 0))
    .join(' ')
    .trimEnd()}\n`;
}

function sayCountsOf(counts: Readonly<Record<string, number>>): string {
  const text = Object.entries(counts).map(([name, count]) => `${name} ${count}`);
  return text.join(', ') || '-';
}

function sum(counts: Readonly<Record<string, number>>): number {
  return Object.values(counts).reduce((total, count) => total + count, 0);
}

function ms(seconds: number): string {
  return `${(seconds * 1000).toFixed(1)} ms`;
}

export function sayDuration(seconds: number): string {
  const whole = Math.floor(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86_400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}
