import { WeirError } from '../base/errors.js';
import { close, EFD_CLOEXEC, errnoName, eventfd, writeBuffer } from './syscalls.js';

/** Interrupts a blocked `BatchDevice.receive` from another thread. */
export interface Wake {
  /** An eventfd: a number, so that it can be handed to a Worker. */
  readonly fd: number;

  /** The device's current or next `receive` returns. Several calls may end one `receive` only. Does not block. */
  wake(): void;

  /** Closes the fd; nobody may be blocked on it any more. */
  close(): void;
}

/** @param fd of an existing wake-up made by another thread; without it, one is made. */
export function createWake(fd?: number): Wake {
  // Blocking on purpose: io_uring waits for it in the ring instead of giving EAGAIN back. A write blocks at 2^64 - 1.
  const wakeFd = fd ?? eventfd(0, EFD_CLOEXEC);
  if (wakeFd < 0)
    throw new WeirError('DEVICE_FAILED', `eventfd: ${errnoName(wakeFd)}`, 'raise the limit of open files');
  const one = new Uint8Array(new BigUint64Array([1n]).buffer);
  return {
    fd: wakeFd,
    wake() {
      writeBuffer(wakeFd, one);
    },
    close() {
      close(wakeFd);
    },
  };
}
