/**
 * How fast each client may open connections of a service: a token bucket for each pair of service and client address. It holds what may
 * be opened in a second and fills up in one, so that after a pause a client opens `perSecond` at once, as a browser does, and then
 * one every 1/perSecond of a second; never more than 2 * perSecond within one.
 *
 * A bucket is one number, when it will be full (the virtual scheduling of ITU-T I.371): each connection moves that by
 * 1/perSecond, and one that would move it more than a second ahead is too many. A bucket that is full is the same as none. So what must be
 * remembered is who opened something within the last second; nothing has to be thrown away, only written over.
 *
 * Buckets lie in sets of WAYS, the hash says which. Of a set that is taken the bucket goes that will be full first: who had it may
 * open more than it should within the second that is left. Nothing is allocated, however many sources are forged.
 *
 *     bucket, 16 bytes: | service i32 | client i32 | full at, ms f64 |          a set: 64 bytes
 *
 * Rejected: the windows of nat/rate-limit.ts, which are for a limit that is told in windows ("50 of 60"); an LRU cache, which allocates
 * for each forged source.
 */
const SETS = 16_384;
const WAYS = 4;

/** A bucket takes this long to fill. */
const BURST_MS = 1000;

export class ClientRates {
  readonly #doubles: Float64Array;
  readonly #words: Int32Array;
  readonly #mask: number;

  /** @param sets a power of two */
  constructor(sets = SETS) {
    this.#doubles = new Float64Array(sets * WAYS * 2);
    this.#words = new Int32Array(this.#doubles.buffer);
    this.#mask = sets - 1;
  }

  /**
   * Whether a client may open one more connection now.
   *
   * @param client an address word, signed
   * @param hash of both, keyed with a secret
   */
  allows(service: number, client: number, hash: number, perSecond: number, nowMs: number): boolean {
    const at = this.#find(service, client, hash);
    if (at < 0) return true;
    const stepMs = BURST_MS / perSecond;
    // Makes up for what adding fractions loses.
    const toleranceMs = Math.min(0.1, stepMs / 100);
    return this.#doubles[at * 2 + 1]! + stepMs - nowMs <= BURST_MS + toleranceMs;
  }

  /** Counts a connection that was opened. Parameters as for `allows`. */
  count(service: number, client: number, hash: number, perSecond: number, nowMs: number): void {
    const found = this.#find(service, client, hash);
    const at = found < 0 ? this.#claim(service, client, hash) : found;
    const before = found < 0 ? nowMs : Math.max(this.#doubles[at * 2 + 1]!, nowMs);
    this.#doubles[at * 2 + 1] = before + BURST_MS / perSecond;
  }

  /** When the bucket of a client will be full; null: it is. */
  recall(service: number, client: number, hash: number): number | null {
    const at = this.#find(service, client, hash);
    return at < 0 ? null : this.#doubles[at * 2 + 1]!;
  }

  /** Goes on from what others have recalled. */
  assume(service: number, client: number, hash: number, fullAtMs: number | null): void {
    const found = this.#find(service, client, hash);
    if (found < 0 && fullAtMs === null) return;
    const at = found < 0 ? this.#claim(service, client, hash) : found;
    this.#doubles[at * 2 + 1] = fullAtMs ?? 0;
  }

  #find(service: number, client: number, hash: number): number {
    const first = this.#setOf(hash);
    for (let at = first; at < first + WAYS; at++) {
      if (this.#words[at * 4] === service && this.#words[at * 4 + 1] === client) return at;
    }
    return -1;
  }

  #claim(service: number, client: number, hash: number): number {
    const first = this.#setOf(hash);
    let at = first;
    for (let other = first + 1; other < first + WAYS; other++) {
      if (this.#doubles[other * 2 + 1]! < this.#doubles[at * 2 + 1]!) at = other;
    }
    this.#words[at * 4] = service;
    this.#words[at * 4 + 1] = client;
    return at;
  }

  #setOf(hash: number): number {
    return (hash & this.#mask) * WAYS;
  }
}
