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
  readonly #entries: LRUCache<number, Entry>;
  /** The same entries, each at its `place`: for counting them in slices. */
  readonly #places: Entry[] = [];

  constructor(max = AFFINITY_ENTRIES) {
    this.#entries = new LRUCache({ max, dispose: (entry) => this.#vacate(entry) });
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
    if (entry !== undefined) {
      entry.backend = backend;
      entry.untilMs = untilMs;
      return;
    }
    const added = { backend, untilMs, place: 0 };
    this.#entries.set(key, added);
    added.place = this.#places.push(added) - 1;
  }

  forget(service: number, client: number): void {
    this.#entries.delete(keyOf(service, client));
  }

  /** What is remembered of a client, without counting as a use of it. */
  peek(service: number, client: number): Remembered | null {
    const entry = this.#entries.peek(keyOf(service, client));
    return entry === undefined ? null : { backend: entry.backend, untilMs: entry.untilMs };
  }

  /**
   * Counts clients by the backend they are remembered with: a slice of them, from the last places down. Of what changes between
   * two slices some may be counted twice.
   *
   * @param end the slice ends before this place; Infinity at first
   * @param into pairs of backend and count are added
   * @returns where the next one ends; 0: nowhere
   */
  count(end: number, limit: number, nowMs: number, into: Map<number, number>): number {
    const last = Math.min(end, this.#places.length);
    const first = Math.max(0, last - limit);
    for (let place = first; place < last; place++) {
      const { backend, untilMs } = this.#places[place]!;
      if (untilMs > nowMs) into.set(backend, (into.get(backend) ?? 0) + 1);
    }
    return first;
  }

  #vacate(entry: Entry): void {
    const last = this.#places.pop()!;
    if (last === entry) return;
    this.#places[entry.place] = last;
    last.place = entry.place;
  }
}

/** A client's backend, and until when it is its. */
export interface Remembered {
  readonly backend: number;
  readonly untilMs: number;
}

interface Entry {
  backend: number;
  untilMs: number;
  place: number;
}

/** Exact: 32 bits of address and up to 21 of id fit a double. */
function keyOf(service: number, client: number): number {
  return service * 0x100000000 + (client >>> 0);
}
