import { statSync } from 'node:fs';
import { performance } from 'node:perf_hooks';

/** Replays shorter than this say nothing. */
const PATIENCE_MS = 1000;
const REDRAW_MS = 200;
/** Looking at the time costs more than a packet: it is looked at this often. */
const PACKETS_PER_LOOK = 1024;

/** A line on stderr that says how far a long replay is; silent where stderr is no terminal. */
export class Progress {
  readonly #isShown = process.stderr.isTTY === true;
  readonly #startMs = performance.now();
  readonly #totalBytes: number;
  #drawnMs = 0;
  #packets = 0;

  constructor(path: string) {
    this.#totalBytes = this.#isShown ? sizeOf(path) : 0;
  }

  /** Call once per packet. `bytesRead`: of the capture. */
  step(bytesRead: number): void {
    this.#packets++;
    if (!this.#isShown || this.#packets % PACKETS_PER_LOOK !== 0) return;
    const nowMs = performance.now();
    if (nowMs - this.#startMs < PATIENCE_MS || nowMs - this.#drawnMs < REDRAW_MS) return;
    this.#drawnMs = nowMs;
    const share = this.#totalBytes > 0 ? `, ${Math.floor((bytesRead / this.#totalBytes) * 100)} %` : '';
    process.stderr.write(`\rreplayed ${this.#packets} packets${share}\u001b[K`);
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
