import type { LiveView, RatesView } from '../lib/control/live/live-view.js';

/** Views that are kept: five minutes. */
const KEPT = 300;

/** More than this without a view is a gap in the lines. */
const GAP_SECONDS = 3;

export const MEASURES = ['packets', 'bits', 'connections'] as const;

export type Measure = (typeof MEASURES)[number];

/** A line of a chart: null where nothing is known. */
export type Line = (number | null)[];

export interface Identified {
  readonly address: string;
  readonly port: number;
}

export function serviceKey({ address, port, protocol }: Identified & { readonly protocol: string }): string {
  return `${address}:${port}/${protocol}`;
}

export function backendKey(service: string, { address, port }: Identified): string {
  return `${service} ${address}:${port}`;
}

/** The rates of the last minutes, of each service and backend by its key. */
export class History {
  /** Seconds since 1970, as views say them. */
  readonly times: number[] = [];
  readonly #lines = new Map<string, Record<Measure, Line>>();

  add({ at, intervalSeconds, services }: LiveView): void {
    const time = Date.parse(at) / 1000;
    const last = this.times.at(-1);
    // The first view of a watch has no rates yet; nor can a clock that was set back continue these lines.
    if (last !== undefined && time <= last) this.clear();
    else if (last !== undefined && time - last > GAP_SECONDS) this.#push(last + 1, new Map());
    if (intervalSeconds === 0) return;
    const rates = new Map<string, RatesView>();
    for (const service of services) {
      const key = serviceKey(service);
      rates.set(key, service.rates);
      for (const backend of service.backends) rates.set(backendKey(key, backend), backend.rates);
    }
    this.#push(time, rates);
  }

  line(key: string, measure: Measure): Line {
    return this.#lines.get(key)?.[measure] ?? this.times.map(() => null);
  }

  clear(): void {
    this.times.length = 0;
    this.#lines.clear();
  }

  #push(time: number, rates: ReadonlyMap<string, RatesView>): void {
    for (const key of rates.keys()) {
      if (this.#lines.has(key)) continue;
      const unknown = (): Line => this.times.map(() => null);
      this.#lines.set(key, { packets: unknown(), bits: unknown(), connections: unknown() });
    }
    this.times.push(time);
    for (const [key, lines] of this.#lines) {
      const now = rates.get(key);
      for (const measure of MEASURES) lines[measure].push(now === undefined ? null : total(now, measure));
    }
    if (this.times.length <= KEPT) return;
    this.times.shift();
    for (const [key, lines] of this.#lines) {
      for (const measure of MEASURES) lines[measure].shift();
      if (lines.packets.every((value) => value === null)) this.#lines.delete(key);
    }
  }
}

/** Both ways. */
export function total(rates: RatesView, measure: Measure): number {
  if (measure === 'connections') return rates.connections;
  return rates[measure].original + rates[measure].reply;
}
