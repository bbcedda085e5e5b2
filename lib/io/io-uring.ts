import { BATCH_PACKETS, HEADROOM_BYTES } from '../base/limits.js';
import { VNET_HEADER_BYTES } from '../wire/vnet.js';
import { type BatchDevice, type DeviceFeatures, PacketBatch, type PacketMemory } from './device.js';
import { ReadFaults } from './faults.js';
import { type BufferRing, Ring } from './ring.js';
import { type KernelDevice, maxPacketBytes, SlotPool } from './slots.js';
import { EINTR, ENOBUFS, ETIME, setNonBlocking } from './syscalls.js';

// linux/io_uring.h
const OP_ASYNC_CANCEL = 14;
const OP_READ = 22;
const OP_WRITE = 23;
const OP_READ_MULTISHOT = 49; // 6.7
const IOSQE_BUFFER_SELECT = 1 << 5;
const IOSQE_CQE_SKIP_SUCCESS = 1 << 6;
const CQE_F_BUFFER = 1 << 0;
const CQE_F_MORE = 1 << 1;
const CQE_BUFFER_SHIFT = 16;
const RWF_NOWAIT = 8;

const BUFFER_GROUP = 0;

// The tag of a request: what it is, and above that the slot of a single read.
const TAG_READ = 0;
const TAG_WRITE = 1;
const TAG_WAKE = 2;
const TAG_CANCEL = 3;
const TAG_KIND = 3;
const TAG_SLOT_SHIFT = 2;

/** For requests in flight to end after they were cancelled, in steps. */
const CANCEL_STEP_MS = 50;
const CANCEL_STEPS = 40;

/**
 * A TUN device driven by io_uring: one system call a batch.
 *
 * Theory of operation. `transmit` queues a write; `receive` lends free slots to the kernel, then submits the writes of the
 * last batch and waits for packets in one `enter`. Each slot is in exactly one place:
 *
 *     free -> lent (the kernel may fill it) -> ready (filled) -> the data path -> written (queued) -> free
 *       ^------------------------------------------------------- released ---------------------------'
 *       '------> taken by the data path ------> written
 *
 * - **Reads, Linux 6.7 on.** One READ_MULTISHOT stays armed and fills lent slots, one completion each, until it runs out of
 *   them (ENOBUFS) and is armed again with the next batch. It waits as one poller, drains the device in one go and keeps the
 *   order.
 * - **Reads before 6.7.** Single reads. All that wait are woken by every packet: 64 of them double the p50 of one connection,
 *   and the kernel moves a read that was woken 128 times for nothing to a worker thread, where the order is lost. So their
 *   number follows the traffic: twice as many as the last batch used when it used them all, else no more than it used. A
 *   ping-pong then has one or two armed, and since the number falls with every batch that leaves some over, none of them
 *   waits for long. They take about a sixth more CPU per packet than the above.
 * - **Writes** carry RWF_NOWAIT, so the kernel ends each while it is being submitted, in order, and never moves it elsewhere:
 *   when `enter` is back, every slot written is free. Hence a slot may be lent again in the very `enter` that writes it: single
 *   reads are queued behind the writes, and a multishot read runs after the submission (it is only used where task work is
 *   deferred). Successful writes post no completion where the kernel can leave it out, so that they do not end the wait.
 * - **Wake-up.** A read of the eventfd waits in the same ring; a wake-up that comes with packets is theirs.
 * - **Completions outstanding** are bounded by the writes of one `enter` (at most all slots) plus the slots lent and two more,
 *   far below what the ring holds: `take` reaps too, and keeps packets that arrived for the next `receive`.
 *
 * Rejected: POLL_ADD and then reads (one more system call a packet), hard-linked reads (one packet an `enter`), spinning before
 * blocking (it starves the others on a small machine).
 */
export class IoUringDevice implements BatchDevice {
  readonly memory: PacketMemory;
  readonly rx = new PacketBatch(BATCH_PACKETS);
  readonly features: DeviceFeatures;

  readonly #fd: number;
  readonly #wakeFd: number;
  readonly #headerBytes: number;
  readonly #readBytes: number;
  readonly #writeEntryFlags: number;
  readonly #ring: Ring;
  readonly #buffers: BufferRing | undefined;
  readonly #pool: SlotPool;
  readonly #faults = new ReadFaults();

  /** Slots of writes that were queued since the last `enter`. */
  readonly #written: Int32Array;
  #writtenCount = 0;

  readonly #readySlots: Int32Array;
  readonly #readyBytes: Int32Array;
  #readyCount = 0;

  #lentCount = 0;
  /** Single reads: by slot, whether one is in flight. */
  readonly #reading: Uint8Array;
  #readsWanted = 1;
  #multishotArmed = false;

  #wakeArmed = false;
  #woken = false;
  #writeErrors = 0;
  #closed = false;

  /**
   * Belongs to the thread that makes it.
   *
   * @param multishot false: single reads even where the kernel has better
   * @throws WeirError ENGINE_UNAVAILABLE
   */
  constructor(device: KernelDevice, { multishot = true }: { readonly multishot?: boolean } = {}) {
    this.#fd = device.fd;
    this.#wakeFd = device.wakeFd;
    this.#headerBytes = device.vnetHeader ? VNET_HEADER_BYTES : 0;
    this.#ring = new Ring();
    this.#writeEntryFlags = this.#ring.canSkipSuccess ? IOSQE_CQE_SKIP_SUCCESS : 0;
    const usable = multishot && this.#ring.deferred && this.#ring.supports(OP_READ_MULTISHOT);
    this.#buffers = usable ? this.#ring.createBuffers(BUFFER_GROUP) : undefined;
    this.#pool = new SlotPool(maxPacketBytes(device.vnetHeader, device.mtu));
    this.memory = this.#pool.memory;
    this.#readBytes = this.memory.slotBytes - HEADROOM_BYTES + this.#headerBytes;
    this.#written = new Int32Array(this.memory.slots);
    this.#readySlots = new Int32Array(this.memory.slots);
    this.#readyBytes = new Int32Array(this.memory.slots);
    this.#reading = new Uint8Array(this.memory.slots);
    this.features = { engine: 'io_uring', vnetHeader: device.vnetHeader, udpSegmentation: device.udpSegmentation };
    // io_uring gives EAGAIN back on a non-blocking file, instead of waiting for it.
    setNonBlocking(this.#fd, false);
  }

  get writeErrors(): number {
    return this.#writeErrors;
  }

  /** How packets are read, for the log. */
  get reads(): 'multishot' | 'single' {
    return this.#buffers ? 'multishot' : 'single';
  }

  /** Slots that are free or with the kernel; all of them, when the data path has given back what it had. */
  get slotsOwned(): number {
    return this.#pool.free + this.#lentCount + this.#writtenCount + this.#readyCount;
  }

  receive(timeoutMs: number): number {
    this.rx.count = 0;
    this.#freeWritten();
    const startMs = timeoutMs > 0 && timeoutMs !== Infinity ? performance.now() : 0;
    for (let leftMs = timeoutMs; ; leftMs = timeoutMs - (performance.now() - startMs)) {
      const pauseMs = this.#faults.pauseMs();
      if (pauseMs === 0) this.#armReads();
      this.#armWake();
      const wait = leftMs > 0 && this.#readyCount === 0 && !this.#woken;
      this.#submit(wait ? 1 : 0, pauseMs > 0 && pauseMs < leftMs ? pauseMs : leftMs);
      if (this.#readyCount > 0) return this.#deliver();
      if (this.#woken || leftMs <= 0) {
        this.#woken = false;
        return 0;
      }
    }
  }

  transmit(slot: number, offset: number, length: number): void {
    const address = this.#pool.addressOf(offset - this.#headerBytes);
    const lengthBytes = length + this.#headerBytes;
    this.#ring.queue(OP_WRITE, this.#fd, address, lengthBytes, TAG_WRITE, this.#writeEntryFlags, RWF_NOWAIT);
    this.#written[this.#writtenCount++] = slot;
  }

  release(slot: number): void {
    this.#pool.give(slot);
  }

  take(): number {
    if (this.#pool.free === 0 && this.#writtenCount > 0 && this.#submit(0, 0)) this.#freeWritten();
    return this.#pool.take();
  }

  close(): void {
    if (this.#closed) return;
    this.#closed = true;
    if (this.#multishotArmed) this.#cancel(TAG_READ);
    for (let slot = 0; slot < this.memory.slots; slot++) {
      if (this.#reading[slot] === 1) this.#cancel(TAG_READ | (slot << TAG_SLOT_SHIFT));
    }
    if (this.#wakeArmed) this.#cancel(TAG_WAKE);
    for (let step = 0; step < CANCEL_STEPS && this.#inFlight(); step++) {
      this.#ring.enter(1, CANCEL_STEP_MS);
      this.#reap();
    }
    // Memory that the kernel might still fill stays mapped: a leak, in a case that was never seen, is better than corruption.
    const ended = !this.#inFlight();
    this.#ring.close();
    if (!ended) return;
    this.#buffers?.close();
    this.#pool.close();
  }

  #cancel(tag: number): void {
    this.#ring.queue(OP_ASYNC_CANCEL, -1, tag, 0, TAG_CANCEL, 0, 0);
  }

  #inFlight(): boolean {
    return this.#multishotArmed || this.#wakeArmed || this.#reading.includes(1);
  }

  #armReads(): void {
    if (this.#buffers) this.#armMultishot(this.#buffers);
    else this.#armSingle();
  }

  #armMultishot(buffers: BufferRing): void {
    while (this.#lentCount < BATCH_PACKETS && this.#pool.free > 0) {
      const slot = this.#pool.take();
      buffers.add(slot, this.#readAddress(slot), this.#readBytes);
      this.#lentCount++;
    }
    buffers.publish();
    if (this.#multishotArmed || this.#lentCount === 0) return;
    this.#ring.queue(OP_READ_MULTISHOT, this.#fd, 0, 0, TAG_READ, IOSQE_BUFFER_SELECT, 0);
    this.#multishotArmed = true;
  }

  #armSingle(): void {
    while (this.#lentCount < this.#readsWanted && this.#pool.free > 0) {
      const slot = this.#pool.take();
      const tag = TAG_READ | (slot << TAG_SLOT_SHIFT);
      this.#ring.queue(OP_READ, this.#fd, this.#readAddress(slot), this.#readBytes, tag, 0, 0);
      this.#reading[slot] = 1;
      this.#lentCount++;
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

  /** @returns whether everything queued was submitted */
  #submit(minComplete: number, timeoutMs: number): boolean {
    const result = this.#ring.enter(minComplete, timeoutMs);
    this.#reap();
    if (result === 0 || result === -ETIME || result === -EINTR) return true;
    this.#faults.record(result);
    return false;
  }

  #freeWritten(): void {
    for (let i = 0; i < this.#writtenCount; i++) this.#pool.give(this.#written[i]!);
    this.#writtenCount = 0;
  }

  #reap(): void {
    const ring = this.#ring;
    while (ring.next()) {
      switch (ring.tag & TAG_KIND) {
        case TAG_READ:
          if (this.#buffers) this.#endMultishot(ring.result, ring.flags);
          else this.#endSingle(ring.tag >>> TAG_SLOT_SHIFT, ring.result);
          break;
        case TAG_WRITE:
          if (ring.result < 0) this.#writeErrors++;
          break;
        case TAG_WAKE:
          this.#wakeArmed = false;
          this.#woken = true;
          break;
      }
    }
  }

  #endMultishot(result: number, flags: number): void {
    if ((flags & CQE_F_MORE) === 0) this.#multishotArmed = false;
    if (flags & CQE_F_BUFFER) this.#filled(flags >>> CQE_BUFFER_SHIFT, result);
    else if (result !== -ENOBUFS) this.#faults.record(result);
  }

  #endSingle(slot: number, result: number): void {
    this.#reading[slot] = 0;
    this.#filled(slot, result);
  }

  #filled(slot: number, result: number): void {
    this.#lentCount--;
    const lengthBytes = result - this.#headerBytes;
    if (lengthBytes <= 0) {
      this.#pool.give(slot);
      if (result < 0) this.#faults.record(result);
      return;
    }
    this.#readySlots[this.#readyCount] = slot;
    this.#readyBytes[this.#readyCount] = lengthBytes;
    this.#readyCount++;
  }

  /** Never more than a batch is ready, since no more slots than that are lent. */
  #deliver(): number {
    const { rx } = this;
    const count = this.#readyCount;
    for (let row = 0; row < count; row++) {
      const slot = this.#readySlots[row]!;
      const offset = slot * this.memory.slotBytes + HEADROOM_BYTES;
      rx.slot[row] = slot;
      rx.offset[row] = offset;
      rx.length[row] = this.#readyBytes[row]!;
      if (this.#headerBytes === 0) this.#pool.clearHeader(offset);
    }
    rx.count = count;
    this.#readyCount = 0;
    this.#readsWanted = this.#lentCount === 0 ? Math.min(2 * count, BATCH_PACKETS) : count;
    this.#woken = false;
    this.#faults.clear();
    return count;
  }
}
