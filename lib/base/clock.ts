/** Time as everything in weir sees it: milliseconds of a clock that only goes forward. Wall-clock steps do not exist. */
export interface Clock {
  /** Milliseconds, fractional, monotonic. Correct past 2^31 ms: never truncated to an int. */
  nowMs(): number;
}

/** A clock that stands still until told otherwise: tests and `weir replay` never sleep. */
export class ManualClock implements Clock {
  #nowMs: number;

  constructor(startMs = 0) {
    this.#nowMs = startMs;
  }

  nowMs(): number {
    return this.#nowMs;
  }

  /** Moves to `ms`, never backwards: a capture with disordered timestamps must not rejuvenate entries. */
  set(ms: number): void {
    if (ms > this.#nowMs) this.#nowMs = ms;
  }

  advance(ms: number): void {
    this.set(this.#nowMs + ms);
  }
}
