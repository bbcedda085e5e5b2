import { WeirError } from '../base/errors.js';
import type { BatchDevice } from './device.js';
import { IoUringDevice } from './io-uring.js';
import { ReadWriteDevice } from './read-write.js';
import type { KernelDevice } from './slots.js';

export interface DeviceOptions extends KernelDevice {
  readonly engine: 'auto' | 'io_uring' | 'readwrite';
}

/**
 * Puts an engine on an open TUN device, in the thread that will use it. The fds stay the caller's, who closes them after
 * the device.
 *
 * @returns the device, and one line for the log: the engine, and why it is not the better one.
 * @throws WeirError ENGINE_UNAVAILABLE: an engine asked for by name cannot run here.
 */
export function openDevice(options: DeviceOptions): { readonly device: BatchDevice; readonly note: string } {
  if (options.engine === 'readwrite') return { device: new ReadWriteDevice(options), note: 'engine readwrite' };
  try {
    const device = new IoUringDevice(options);
    return { device, note: `engine io_uring, ${device.reads} reads` };
  } catch (error) {
    const refused = error instanceof WeirError && error.code === 'ENGINE_UNAVAILABLE';
    if (!refused || options.engine === 'io_uring') throw error;
    return { device: new ReadWriteDevice(options), note: `engine readwrite: ${error.message}` };
  }
}
