import { formatDuration } from '../../config/duration.js';

/** What a probe found: `unknown` when it could not be made. */
export interface Finding {
  readonly outcome: 'success' | 'failure' | 'unknown';
  /** A few words: `connected`, `connection refused`. */
  readonly text: string;
}

/** A timer that fires this late was held up by other work of the thread, and so was whatever had arrived. */
const LATE_MS = 20;

/**
 * A probe under way. It ends once: by a finding, by its time-out, or without a word when it is cancelled; then `release` is
 * called, which frees what it uses.
 *
 * The time-out is that of a thread with other things to do. What has arrived in time and was not looked at, since the thread was
 * busy, must not count as missing: a late timer gives the time back that was lost, once, and then what is waiting comes first.
 */
export class Attempt {
  /** What has not come when the time is over. */
  awaited = 'no answer';
  release: () => void = () => {};

  readonly #done: (finding: Finding) => void;
  readonly #timeoutMs: number;
  #timer: NodeJS.Timeout | undefined;
  #isOver = false;

  constructor(timeoutMs: number, done: (finding: Finding) => void) {
    this.#timeoutMs = timeoutMs;
    this.#done = done;
    this.#wait(timeoutMs, false);
  }

  /** It has ended. */
  get isOver(): boolean {
    return this.#isOver;
  }

  settle(outcome: Finding['outcome'], text: string): void {
    if (this.#isOver) return;
    this.cancel();
    this.#done({ outcome, text });
  }

  cancel(): void {
    this.#isOver = true;
    clearTimeout(this.#timer);
    this.release();
  }

  #wait(ms: number, isExtended: boolean): void {
    const dueMs = performance.now() + ms;
    this.#timer = setTimeout(() => {
      const lateMs = performance.now() - dueMs;
      if (lateMs > LATE_MS && !isExtended) this.#wait(Math.min(lateMs, this.#timeoutMs), true);
      else setImmediate(() => this.settle('failure', `${this.awaited} within ${formatDuration(this.#timeoutMs)}`));
    }, ms);
  }
}
