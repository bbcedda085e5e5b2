import { parentPort, workerData } from 'node:worker_threads';
import { WeirError } from '../../lib/base/errors.js';
import type { BatchDevice } from '../../lib/io/device.js';
import { IoUringDevice } from '../../lib/io/io-uring.js';
import { ReadWriteDevice } from '../../lib/io/read-write.js';
import type { KernelDevice } from '../../lib/io/slots.js';

/**
 * The smallest program on a device: it swaps source and destination address of every packet. A host that has 10.9.0.1 and
 * routes 10.9.0.2 into the device then talks to its own sockets as if they were another host's, and no checksum changes.
 * As a Worker it runs until STOP is set and it is woken.
 */

export type EngineName = 'multishot' | 'single' | 'readwrite';

/** Words of the shared memory. */
export const STOP = 0;
export const RECEIVES = 1;
export const WORDS = 2;

export interface MirrorData {
  readonly device: KernelDevice;
  readonly engine: EngineName;
  readonly shared: Int32Array;
}

export interface MirrorReport {
  readonly packets: number;
  readonly largestBytes: number;
  readonly largestBatch: number;
  readonly slotsLost: number;
  readonly writeErrors: number;
  /** The code of the WeirError that ended the run. */
  readonly failure: string | undefined;
}

export function engineOn(device: KernelDevice, engine: EngineName): IoUringDevice | ReadWriteDevice {
  if (engine === 'readwrite') return new ReadWriteDevice(device);
  return new IoUringDevice(device, { multishot: engine === 'multishot' });
}

/** Sends every packet of the batch back, addresses swapped; every 16th through a slot that was taken for it. */
export function mirrorBatch(device: BatchDevice): void {
  const { rx, memory } = device;
  const { bytes, view } = memory;
  for (let row = 0; row < rx.count; row++) {
    const slot = rx.slot[row]!;
    const offset = rx.offset[row]!;
    const length = rx.length[row]!;
    if (bytes[offset]! >> 4 !== 4) {
      device.release(slot);
      continue;
    }
    const source = view.getInt32(offset + 12);
    view.setInt32(offset + 12, view.getInt32(offset + 16));
    view.setInt32(offset + 16, source);
    const copy = row % 16 === 15 ? device.take() : -1;
    if (copy < 0) {
      device.transmit(slot, offset, length);
      continue;
    }
    const copyOffset = copy * memory.slotBytes + 128;
    bytes.copyWithin(copyOffset - 10, offset - 10, offset + length);
    device.release(slot);
    device.transmit(copy, copyOffset, length);
  }
}

function run({ device: options, engine, shared }: MirrorData): MirrorReport {
  const device = engineOn(options, engine);
  let packets = 0;
  let largestBytes = 0;
  let largestBatch = 0;
  let failure: string | undefined;
  try {
    while (Atomics.load(shared, STOP) === 0) {
      const count = device.receive(Number.POSITIVE_INFINITY);
      packets += count;
      largestBatch = Math.max(largestBatch, count);
      for (let row = 0; row < count; row++) largestBytes = Math.max(largestBytes, device.rx.length[row]!);
      mirrorBatch(device);
      Atomics.add(shared, RECEIVES, 1);
      Atomics.notify(shared, RECEIVES);
    }
    device.receive(0);
    for (let row = 0; row < device.rx.count; row++) device.release(device.rx.slot[row]!);
  } catch (error) {
    if (!(error instanceof WeirError)) throw error;
    failure = error.code;
  }
  const slotsLost = device.memory.slots - device.slotsOwned;
  device.close();
  return { packets, largestBytes, largestBatch, slotsLost, writeErrors: device.writeErrors, failure };
}

if (parentPort) parentPort.postMessage(run(workerData as MirrorData));
