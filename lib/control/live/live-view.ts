import type { BackendView, ConntrackView, ServiceView, StatusView } from '../view.js';

/**
 * A running weir as it is now, and what went through it in the last second: the answer of `GET /v1/live`, which the dashboard and
 * `weir top` show. One comes each second. Rates are per second.
 */
export interface LiveView {
  readonly at: string;
  /** What rates are averages over; 0 in the first view of a watch, whose rates are 0. */
  readonly intervalSeconds: number;
  /** `conntrack` is of the last count of connections. */
  readonly status: StatusView;
  readonly rates: DeviceRatesView;
  /** Whole services with 1000 backends in all, in the order of the file. */
  readonly services: readonly LiveServiceView[];
  /** Services beyond these. */
  readonly omittedServices: number;
  /** `entries` and `states` are of the last count. */
  readonly conntrack: ConntrackView;
  /** Reasons that occurred since the start. */
  readonly reasons: readonly ReasonView[];
  readonly count: CountView;
  readonly clients: ClientsView;
}

/** Through the device: from the kernel (in) and back to it (out). */
export interface DeviceRatesView {
  readonly packetsIn: number;
  readonly packetsOut: number;
  readonly bitsIn: number;
  readonly bitsOut: number;
  /** Begun, of all services shown. */
  readonly connections: number;
  readonly drops: number;
}

/** From clients (original) and from backends (reply). */
export interface RatesView {
  readonly packets: { readonly original: number; readonly reply: number };
  readonly bits: { readonly original: number; readonly reply: number };
  /** Begun. */
  readonly connections: number;
}

export interface LiveServiceView extends Omit<ServiceView, 'backends'> {
  readonly rates: RatesView;
  readonly backends: readonly LiveBackendView[];
}

export interface LiveBackendView extends BackendView {
  readonly rates: RatesView;
  /** Of new connections, by Maglev slots or by weight: 0 to 1. */
  readonly share: number;
}

/** Packets that were not simply forwarded, for one reason. */
export interface ReasonView {
  readonly reason: string;
  readonly verdict: 'drop' | 'reply' | 'pass';
  readonly meaning: string;
  readonly packets: number;
  readonly rate: number;
}

/** The last count of connections; more of them are counted less often. */
export interface CountView {
  /** When it was complete. */
  readonly secondsAgo: number;
  /** The work it was, without rests. */
  readonly tookSeconds: number;
}

export interface ClientsView {
  /** Client addresses with a live connection; null: more than are kept apart. */
  readonly distinct: number | null;
  /** By how many connections figures may be too low; 0: they are exact. */
  readonly error: number;
  /** At most 20, the one with the most connections first. */
  readonly top: readonly ClientView[];
}

export interface ClientView {
  readonly address: string;
  /** Live now. */
  readonly connections: number;
  /** Both ways, of these connections. */
  readonly bytes: number;
}

/** Somebody watches. */
export interface LiveWatch {
  /** The newest LiveView as JSON that was not taken yet, or the next; null: it was given up, being too slow. The first call begins the watch. */
  next(): Promise<string | null>;
  /** Ends it; idempotent. */
  close(): void;
}
