import { LRUCache } from 'lru-cache';

/** Clients remembered at once, per data path. */
export const AFFINITY_ENTRIES = 65_536;

/**
 * Which backend a client was sent to: (service id, client address) -> backend id, until a deadline that every new flow of the client
 * moves. Bounded: the client that was longest without a flow is forgotten first. A forgotten client is not lost with
 * Maglev, whose hash leaves the source port out under affinity; a random service draws anew.
 *
 * Time is the caller's: the deadline is part of the value, and lru-cache's own clock is not used. Touched once per new flow.
 */
export class AffinityTable {
  readonly #entries: LRUCache<number, { backend: number; untilMs: number }>;

  constructor(max = AFFINITY_ENTRIES) {
    this.#entries = new LRUCache({ max });
  }

  get size(): number {
    return this.#entries.size;
  }

  /** The backend id, or 0 when the client is unknown or its time is over. */
  get(service: number, client: number, nowMs: number): number {
    const key = keyOf(service, client);
    const entry = this.#entries.get(key);
    if (entry === undefined) return 0;
    if (entry.untilMs > nowMs) return entry.backend;
    this.#entries.delete(key);
    return 0;
  }

  set(service: number, client: number, backend: number, untilMs: number): void {
    const key = keyOf(service, client);
    const entry = this.#entries.get(key);
    if (entry === undefined) this.#entries.set(key, { backend, untilMs });
    else {
      entry.backend = backend;
      entry.untilMs = untilMs;
    }
  }
}

/** Exact: 32 bits of address and up to 21 of id fit a double. */
function keyOf(service: number, client: number): number {
  return service * 0x100000000 + (client >>> 0);
}
