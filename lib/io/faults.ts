import { WeirError } from '../base/errors.js';
import { EBADF, EBADFD, ENODEV, ENXIO, errnoName } from './syscalls.js';

/** Failures in a row before the device counts as broken: with the pauses below, about 6 s. */
const MAX_FAULTS = 16;
const FIRST_PAUSE_MS = 1;
const LONGEST_PAUSE_MS = 1000;

/**
 * What to do about reads the kernel refused. A device that was deleted has failed at once; anything else may pass, and is
 * tried again after a pause that doubles, a bounded number of times. A device whose link is down gives no error: its reads
 * simply wait.
 */
export class ReadFaults {
  #inARow = 0;
  #retryAtMs = 0;
  #failure: WeirError | undefined;

  record(result: number): void {
    const errno = -result;
    this.#inARow++;
    if (errno === EBADFD || errno === EBADF || errno === ENODEV || errno === ENXIO) {
      this.#failure = new WeirError('DEVICE_FAILED', `the device is gone (${errnoName(result)})`, 'see who deleted it');
    } else if (this.#inARow === MAX_FAULTS) {
      this.#failure = new WeirError(
        'DEVICE_FAILED',
        `the device keeps failing (${errnoName(result)})`,
        'see the kernel log',
      );
    } else {
      this.#retryAtMs = performance.now() + Math.min(FIRST_PAUSE_MS * 2 ** (this.#inARow - 1), LONGEST_PAUSE_MS);
    }
  }

  /** A packet came. */
  clear(): void {
    this.#inARow = 0;
  }

  /**
   * Milliseconds until reading may be tried again; 0: now.
   *
   * @throws WeirError DEVICE_FAILED: never again. Packets that came before the failure are to be delivered first.
   */
  pauseMs(): number {
    if (this.#inARow === 0) return 0;
    if (this.#failure) throw this.#failure;
    return Math.max(0, this.#retryAtMs - performance.now());
  }
}
