import { statSync } from 'node:fs';
import { performance } from 'node:perf_hooks';

/** What takes less than this says nothing. */
const PATIENCE_MS = 1000;
const REDRAW_MS = 200;
/** Looking at the time costs more than a packet: it is looked at this often. */
const STEPS_PER_LOOK = 1024;

/** A line on stderr that says how far a long command is; silent where stderr is no terminal. */
export class Progress {
  readonly #isShown = process.stderr.isTTY === true;
  readonly #startMs = performance.now();
  readonly #say: (count: number) => string;
  readonly #totalBytes: number;
  #drawnMs = 0;
  #count = 0;
  #nextLook = STEPS_PER_LOOK;

  /**
   * @param path of what is read: its size is the whole
   * @param say the line for a number of steps
   */
  constructor(path: string, say: (count: number) => string) {
    this.#say = say;
    this.#totalBytes = this.#isShown ? sizeOf(path) : 0;
  }

  /** Call after each step, or after `count` of them. `bytesRead`: so far. */
  step(bytesRead: number, count = 1): void {
    this.#count += count;
    if (!this.#isShown || this.#count < this.#nextLook) return;
    this.#nextLook = this.#count + STEPS_PER_LOOK;
    const nowMs = performance.now();
    if (nowMs - this.#startMs < PATIENCE_MS || nowMs - this.#drawnMs < REDRAW_MS) return;
    this.#drawnMs = nowMs;
    const share = this.#totalBytes > 0 ? `, ${Math.floor((bytesRead / this.#totalBytes) * 100)} %` : '';
    process.stderr.write(`\r${this.#say(this.#count)}${share}\u001b[K`);
  }

  /** Wipes the line. */
  end(): void {
    if (this.#drawnMs > 0) process.stderr.write('\r\u001b[K');
  }
}

/** 0 for a pipe. */
function sizeOf(path: string): number {
  try {
    return statSync(path).size;
  } catch {
    return 0;
  }
}
