import type { ConntrackStatsView, ServiceView, StatusView } from '../control/views.js';

/** Tables for people. Numbers are right-aligned. */
export function renderTable(head: readonly string[], rows: readonly (readonly (string | number)[])[]): string {
  const widths = head.map((cell, i) => Math.max(cell.length, ...rows.map((row) => String(row[i]).length)));
  const line = (row: readonly (string | number)[]): string =>
    row
      .map((cell, i) => (typeof cell === 'number' ? String(cell).padStart(widths[i]!) : cell.padEnd(widths[i]!)))
      .join('  ')
      .trimEnd();
  return `${[head, ...rows].map(line).join('\n')}\n`;
}

export function renderServices(services: readonly ServiceView[]): string {
  const rows = services.flatMap(({ name, vip, protocol, algorithm, mode, backends }) => {
    const service = [name, `${vip}/${protocol}`, `${algorithm} ${mode}`];
    if (backends.length === 0) return [[...service, '(none)', '', 0, '', 0, 0, 0]];
    return backends.map((backend, i) => [
      ...(i === 0 ? service : ['', '', '']),
      backend.name,
      backend.endpoint,
      backend.weight,
      backend.takesNew ? 'up' : 'no new',
      backend.connections,
      backend.bytes.original,
      backend.bytes.reply,
    ]);
  });
  const head = ['SERVICE', 'VIP', 'HOW', 'BACKEND', 'ENDPOINT', 'WEIGHT', 'STATE', 'OPENED', 'BYTES IN', 'BYTES OUT'];
  return renderTable(head, rows);
}

export function renderStatus(status: StatusView): string {
  const { device, lastReload } = status;
  const lines = [
    ['process', `pid ${status.pid}, up ${duration(status.uptimeSeconds)}`],
    [
      'config',
      `${status.configFile}, version ${status.configVersion}, in force for ${duration(status.configAgeSeconds)}`,
    ],
    ['last reload', lastReload.success ? 'succeeded' : `refused at ${lastReload.at}`],
    ...lastReload.problems.map((problem) => ['', problem]),
    ['device', `${device.name}, mtu ${device.mtu}, engine ${device.engine}`],
    [
      'offloads',
      Object.entries(device.offloads)
        .map(([name, on]) => `${name} ${on ? 'on' : 'off'}`)
        .join(', '),
    ],
  ];
  return `${lines.map(([key, value]) => `${key!.padEnd(12)} ${value}`).join('\n')}\n\n${renderServices(status.services)}`;
}

export function renderConntrackStats({ tables, gc, packets, reasons }: ConntrackStatsView): string {
  const head = ['TABLE', 'ENTRIES', 'LIMIT', 'INSERTED', 'REFUSED', 'EVICTED', 'STATES'];
  const rows = tables.map(({ table, entries, limit, inserted, insertFailures, evicted, states }) => [
    table,
    entries,
    limit,
    inserted,
    insertFailures,
    evicted.expired + evicted.closing + evicted.halfOpen,
    Object.entries(states)
      .map(([state, count]) => `${state} ${count}`)
      .join(', ') || '-',
  ]);
  const lines = [
    `gc: ${gc.runs} passes, every ${duration(gc.intervalSeconds)}, the last took ${gc.lastPassMs.toFixed(1)} ms and deleted ${gc.lastDeleted}`,
    `packets: ${packets.received} received, ${packets.sent} sent, ${packets.forwarded} forwarded, ${packets.stateless} without an entry`,
  ];
  const reasonRows = Object.entries(reasons).map(([reason, count]) => [reason, count]);
  const reasonTable = reasonRows.length === 0 ? '' : `\n${renderTable(['REASON', 'PACKETS'], reasonRows)}`;
  return `${renderTable(head, rows)}\n${lines.join('\n')}\n${reasonTable}`;
}

export interface MaglevShare {
  readonly backend: string;
  readonly weight: number;
  readonly slots: number;
  readonly share: number;
  /** Slots of other backends that change owner if this one leaves. */
  readonly disturbed: number;
}

export function renderMaglev(shares: readonly MaglevShare[], size: number): string {
  const rows = shares.map(({ backend, weight, slots, share, disturbed }) => [
    backend,
    weight,
    slots,
    `${(share * 100).toFixed(2)} %`,
    '#'.repeat(Math.round(share * 40)),
    `${((disturbed / size) * 100).toFixed(2)} %`,
  ]);
  return renderTable(['BACKEND', 'WEIGHT', 'SLOTS', 'SHARE', '', 'OTHERS MOVED IF IT LEFT'], rows);
}

function duration(seconds: number): string {
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}
