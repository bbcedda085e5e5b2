import { LRUCache } from 'lru-cache';
import { REPLIES_PER_SECOND, REPLIES_PER_SOURCE_PER_SECOND } from '../base/limits.js';

const WINDOW_MS = 1000;

interface Window {
  startMs: number;
  count: number;
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
  readonly #sources = new LRUCache<number, Window>({ max: 2 * REPLIES_PER_SECOND });
  #startMs = Number.NEGATIVE_INFINITY;
  #count = 0;

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
}
