import { LRUCache } from 'lru-cache';
import { REPLIES_PER_SECOND, REPLIES_PER_SOURCE_PER_SECOND } from '../base/limits.js';

const WINDOW_MS = 1000;

interface Window {
  startMs: number;
  count: number;
}

/** How much of the limits is used up: in all, and by one source (null: it got no answer). */
export interface AnswersCounted {
  readonly all: Readonly<Window>;
  readonly source: Readonly<Window> | null;
}

/**
 * Limits what weir answers on its own: REPLIES_PER_SECOND in all, REPLIES_PER_SOURCE_PER_SECOND to one source address.
 *
 * Both count in fixed windows of one second that begin with the first answer in them, so that a burst of 60 gets exactly 50.
 * The price is that two bursts around a window's end can come to twice the limit within one second. Rejected: token buckets, which let 75
 * through in the first half second or need a burst size to explain.
 *
 * Memory: a source with a live window got an answer within the last second, which touches two windows of the total at
 * most. So 2 x REPLIES_PER_SECOND sources are all there can be, the cache of that size never forgets a live one, and forged
 * sources cannot push others out. A refusal allocates nothing.
 */
export class AnswerLimiter {
  readonly #sources: LRUCache<number, Window>;
  #startMs = Number.NEGATIVE_INFINITY;
  #count = 0;

  constructor(max = 2 * REPLIES_PER_SECOND) {
    this.#sources = new LRUCache({ max });
  }

  /**
   * Whether one more answer may be sent to `source` (an address word, signed), and counts it if so. A source that is
   * refused uses up nothing of the total.
   */
  allow(source: number, nowMs: number): boolean {
    if (nowMs - this.#startMs >= WINDOW_MS) {
      this.#startMs = nowMs;
      this.#count = 0;
    } else if (this.#count === REPLIES_PER_SECOND) return false;

    const window = this.#sources.get(source);
    if (window === undefined) this.#sources.set(source, { startMs: nowMs, count: 1 });
    else if (nowMs - window.startMs >= WINDOW_MS) {
      window.startMs = nowMs;
      window.count = 1;
    } else if (window.count === REPLIES_PER_SOURCE_PER_SECOND) return false;
    else window.count += 1;
    this.#count += 1;
    return true;
  }

  /** What counts for the next answer to `source`. */
  recall(source: number): AnswersCounted {
    const window = this.#sources.peek(source);
    return { all: { startMs: this.#startMs, count: this.#count }, source: window === undefined ? null : { ...window } };
  }

  /** Goes on from what another limiter has recalled. */
  assume(source: number, { all, source: window }: AnswersCounted): void {
    this.#startMs = all.startMs;
    this.#count = all.count;
    if (window === null) this.#sources.delete(source);
    else this.#sources.set(source, { ...window });
  }
}
