import { WeirError } from '../base/errors.js';
import { BATCH_PACKETS, HEADROOM_BYTES } from '../base/limits.js';
import { VNET_HEADER_BYTES } from '../wire/vnet.js';
import { type BatchDevice, type DeviceFeatures, PacketBatch, type PacketMemory } from './device.js';
import { ReadFaults } from './faults.js';
import { type BufferRing, Ring } from './ring.js';
import { maxPacketBytes, SlotPool } from './slots.js';
import { EINTR, ENOBUFS, ETIME, errnoName, setNonBlocking } from './syscalls.js';
export class IoUringDevice implements BatchDevice {
  readonly memory: PacketMemory;
  readonly rx = new PacketBatch(BATCH_PACKETS);
  readonly features: DeviceFeatures;

  readonly #fd: number;
  readonly #wakeFd: number;
  readonly #headerBytes: number;
  readonly #roomBytes: number;
  readonly #pool: SlotPool;
  readonly #ring: Ring;
  readonly #buffers: BufferRing | undefined;
  readonly #writeFlags: number;
  readonly #faults = new ReadFaults();

  readonly #written: Int32Array;
  #writtenCount = 0;
  readonly #readySlots: Int32Array;
  readonly #readyLengths: Int32Array;
  #readyCount = 0;
  /** Slots the kernel may fill. */
  #lent = 0;
  readonly #reading: Uint8Array;
  #readsArmed = 0;
  #readsWanted = 1;
  #wakeArmed = false;
  #woken = false;
  #writeErrors = 0;
  #closed = false;

  constructor(options: KernelDevice & { readonly multishot?: boolean; fixed?: number }) {
    this.#fd = options.fd;
    this.#wakeFd = options.wakeFd;
    this.fixed = options.fixed ?? 0;
    this.#ring = new Ring();
    const multishot = (options.multishot ?? true) && this.#ring.deferred && this.#ring.supports(OP_READ_MULTISHOT);
    this.#buffers = multishot ? this.#ring.createBuffers(BUFFER_GROUP) : undefined;
    this.#pool = new SlotPool(maxPacketBytes(options.vnetHeader, options.mtu));
    this.memory = this.#pool.memory;
    this.#headerBytes = options.vnetHeader ? VNET_HEADER_BYTES : 0;
    this.#roomBytes = this.memory.slotBytes - HEADROOM_BYTES + this.#headerBytes;
    this.#writeFlags = this.#ring.canSkipSuccess ? SKIP_SUCCESS : 0;
    this.#written = new Int32Array(this.memory.slots);
    this.#readySlots = new Int32Array(this.memory.slots);
    this.#readyLengths = new Int32Array(this.memory.slots);
    this.#reading = new Uint8Array(this.memory.slots);
    this.features = { engine: 'io_uring', vnetHeader: options.vnetHeader, udpSegmentation: options.udpSegmentation };
    setNonBlocking(this.#fd, false);
  }
  fixed: number;
  enters = 0;
  get writeErrors(): number {
    return this.#writeErrors;
  }

  receive(timeoutMs: number): number {
    this.rx.count = 0;
    this.#reclaimWritten();
    const deadlineMs = timeoutMs === Infinity || timeoutMs <= 0 ? timeoutMs : performance.now() + timeoutMs;
    let leftMs = timeoutMs;
    for (;;) {
      const pauseMs = this.#faults.pauseMs();
      if (pauseMs === 0) this.#arm();
      this.#armWake();
      const wait = this.#readyCount === 0 && leftMs > 0 ? 1 : 0;
      this.enters++;
      const result = this.#ring.enter(wait, pauseMs > 0 ? Math.min(leftMs, pauseMs) : leftMs);
      if (result < 0 && result !== -ETIME && result !== -EINTR) throw submitError(result);
      this.#reap();
      if (this.#readyCount > 0) return this.#deliver();
      if (this.#woken || leftMs <= 0) {
        this.#woken = false;
        return 0;
      }
      if (deadlineMs !== Infinity) leftMs = Math.max(0, deadlineMs - performance.now());
    }
  }

  transmit(slot: number, offset: number, length: number): void {
    const address = this.#pool.addressOf(offset - this.#headerBytes);
    this.#ring.queue(OP_WRITE, this.#fd, address, length + this.#headerBytes, TAG_WRITE, this.#writeFlags, RWF_NOWAIT);
    this.#written[this.#writtenCount++] = slot;
  }

  release(slot: number): void {
    this.#pool.give(slot);
  }

  take(): number {
    if (this.#pool.free === 0 && this.#writtenCount > 0) {
      this.#ring.enter(0, 0);
      this.#reap();
      this.#reclaimWritten();
    }
    return this.#pool.take();
  }

  close(): void {
  }

  #reclaimWritten(): void {
    for (let i = 0; i < this.#writtenCount; i++) this.#pool.give(this.#written[i]!);
    this.#writtenCount = 0;
  }

  #arm(): void {
    if (this.#buffers) this.#armMultishot(this.#buffers);
    else this.#armSingle();
  }

  #armMultishot(buffers: BufferRing): void {
    let added = false;
    while (this.#lent < BATCH_PACKETS && this.#pool.free > 0) {
      const slot = this.#pool.take();
      buffers.add(slot, this.#readAddress(slot), this.#roomBytes);
      this.#lent++;
      added = true;
    }
    if (added) buffers.publish();
    if (this.#readsArmed === 0 && this.#lent > 0) {
      this.#ring.queue(OP_READ_MULTISHOT, this.#fd, 0, 0, TAG_READ, BUFFER_SELECT, 0);
      this.#readsArmed = 1;
    }
  }

  #armSingle(): void {
    while (this.#lent < (this.fixed||this.#readsWanted) && this.#pool.free > 0) {
      const slot = this.#pool.take();
      this.#ring.queue(OP_READ, this.#fd, this.#readAddress(slot), this.#roomBytes, TAG_READ | (slot << 2), 0, 0);
      this.#reading[slot] = 1;
      this.#lent++;
    }
  }

  #armWake(): void {
    if (this.#wakeArmed) return;
    this.#ring.queue(OP_READ, this.#wakeFd, this.#ring.resultAddress, 8, TAG_WAKE, 0, 0);
    this.#wakeArmed = true;
  }

  #readAddress(slot: number): number {
    return this.#pool.addressOf(slot * this.memory.slotBytes + HEADROOM_BYTES - this.#headerBytes);
  }

  #reap(): void {
    const ring = this.#ring;
    while (ring.next()) {
      const kind = ring.tag & 3;
      if (kind === TAG_READ) {
        if (this.#buffers) {
          if ((ring.flags & CQE_MORE) === 0) this.#readsArmed = 0;
          if (ring.flags & CQE_BUFFER) this.#accept(ring.flags >>> 16, ring.result);
          else if (ring.result !== -ENOBUFS) this.#faults.record(ring.result);
        } else {
          const slot = ring.tag >>> 2;
          this.#reading[slot] = 0;
          this.#accept(slot, ring.result);
        }
      } else if (kind === TAG_WAKE) {
        this.#wakeArmed = false;
        this.#woken = true;
      } else if (kind === TAG_WRITE && ring.result < 0) this.#writeErrors++;
    }
  }

  #accept(slot: number, result: number): void {
    this.#lent--;
    const length = result - this.#headerBytes;
    if (length <= 0) {
      this.#pool.give(slot);
      if (result < 0) this.#faults.record(result);
      return;
    }
    this.#readySlots[this.#readyCount] = slot;
    this.#readyLengths[this.#readyCount++] = length;
  }

  #deliver(): number {
    const { rx } = this;
    const count = Math.min(this.#readyCount, BATCH_PACKETS);
    for (let row = 0; row < count; row++) {
      const slot = this.#readySlots[row]!;
      const offset = slot * this.memory.slotBytes + HEADROOM_BYTES;
      rx.slot[row] = slot;
      rx.offset[row] = offset;
      rx.length[row] = this.#readyLengths[row]!;
      if (this.#headerBytes === 0) this.#pool.clearHeader(offset);
    }
    rx.count = count;
    this.#readyCount = 0;
    this.#readsWanted = Math.min(BATCH_PACKETS, 2 * count);
    this.#woken = false;
    this.#faults.clear();
    return count;
  }
}
export interface KernelDevice { readonly fd: number; readonly vnetHeader: boolean; readonly udpSegmentation: boolean; readonly mtu: number; readonly wakeFd: number; }
const OP_READ = 22;
const OP_WRITE = 23;
const OP_READ_MULTISHOT = 49;
const SKIP_SUCCESS = 1 << 6;
const BUFFER_SELECT = 1 << 5;
const RWF_NOWAIT = 8;
const CQE_BUFFER = 1;
const CQE_MORE = 2;
const BUFFER_GROUP = 0;
const TAG_READ = 0;
const TAG_WRITE = 1;
const TAG_WAKE = 2;
function submitError(result: number): WeirError {
  return new WeirError('DEVICE_FAILED', `io_uring_enter: ${errnoName(result)}`);
}
