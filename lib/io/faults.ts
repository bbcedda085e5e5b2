import { WeirError } from '../base/errors.js';
import { EBADF, EBADFD, ENODEV, ENXIO, errnoName } from './syscalls.js';

/** Reads that may fail in a row before the device counts as broken: with the pauses below, about 8 s. */
const MAX_FAULTS = 16;
const FIRST_PAUSE_MS = 1;
const LONGEST_PAUSE_MS = 1000;

/**
 * What to do about a read the kernel refused. A device that was deleted is an error at once; anything else may pass, and
 * is tried again after a pause that doubles, a bounded number of times. A device whose link is down gives no error: its reads
 * simply wait.
 */
export class ReadFaults {
  #inARow = 0;
  #retryAtMs = 0;

  /** @throws WeirError DEVICE_FAILED */
  record(result: number): void {
    const errno = -result;
    if (errno === EBADFD || errno === EBADF || errno === ENODEV || errno === ENXIO) {
      throw new WeirError('DEVICE_FAILED', `the device is gone (${errnoName(result)})`, 'find out who deleted it; restart weir');
    }
    if (++this.#inARow === MAX_FAULTS) {
      throw new WeirError('DEVICE_FAILED', `the device keeps failing (${errnoName(result)})`, 'see what the kernel log says');
    }
    this.#retryAtMs = performance.now() + Math.min(FIRST_PAUSE_MS * 2 ** (this.#inARow - 1), LONGEST_PAUSE_MS);
  }

  /** A packet came. */
  clear(): void {
    this.#inARow = 0;
    this.#retryAtMs = 0;
  }

  /** Milliseconds until reading may be tried again; 0: now. */
  pauseMs(): number {
    return this.#inARow === 0 ? 0 : Math.max(0, this.#retryAtMs - performance.now());
  }
}
