import { BATCH_PACKETS } from '../base/limits.js';
import { VNET_HEADER_BYTES } from '../wire/vnet.js';
import { type BatchDevice, type DeviceFeatures, PacketBatch, type PacketMemory } from './device.js';
import { ReadFaults } from './faults.js';
import { Input, OP_READ_MULTISHOT, SocketSource, type Source, TunSource } from './inputs.js';
import { Ring } from './ring.js';
import { type KernelDevice, maxPacketBytes, SlotPool } from './slots.js';
import { EINTR, ENOBUFS, ETIME, setNonBlocking } from './syscalls.js';

// linux/io_uring.h
const OP_ASYNC_CANCEL = 14;
const OP_READ = 22;
const OP_WRITE = 23;
const IOSQE_CQE_SKIP_SUCCESS = 1 << 6;
const RWF_NOWAIT = 8;

// The tag of a request: what it is, and above that the slot of a single read. Reads have the number of their input.
const TAG_TUN = 0;
const TAG_TUNNEL = 1;
const TAG_WRITE = 2;
const TAG_WAKE = 3;
const TAG_CANCEL = 4;
const TAG_KIND = 7;
const TAG_SLOT_SHIFT = 3;

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
 *   deferred); nothing may be stored in a slot that is about to be lent. Successful writes post no completion where the kernel can leave it out, so that they do not end the wait.
 * - **A tunnel's socket** is a second input of the same ring: a multishot RECVMSG (or single ones) beside the reads of the device.
 *   Each input may lend half of a batch, so that neither waits for the other.
 * - **Wake-up.** A read of the eventfd waits in the same ring; a wake-up that comes with packets is theirs.
 * - **Completions outstanding** are bounded by the writes of one `enter` (at most all slots) plus the slots lent and a few more,
 *   far below what the ring holds. `take` reaps too, and keeps packets that arrived for the next `receive`; slots lent and
 *   slots ready are a batch together at most.
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
  readonly #writeEntryFlags: number;
  readonly #ring: Ring;
  readonly #pool: SlotPool;
  /** By number: the device, and the tunnel's socket if there is one. */
  readonly #inputs: readonly Input[];
  readonly #isMultishot: boolean;
  readonly #faults = new ReadFaults();

  /** Slots of writes that were queued since the last `enter`. */
  readonly #written: Int32Array;
  #writtenCount = 0;

  readonly #readySlots: Int32Array;
  readonly #readyBytes: Int32Array;
  readonly #readyInputs: Uint8Array;
  #readyCount = 0;

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
    this.#pool = new SlotPool(maxPacketBytes(device));
    this.memory = this.#pool.memory;
    const sources: Source[] = [new TunSource(device, this.#pool)];
    if (device.tunnelFd !== undefined) sources.push(new SocketSource(device.tunnelFd, this.#pool));
    const usable = multishot && this.#ring.deferred && this.#ring.supports(OP_READ_MULTISHOT);
    const buffers = sources.map((_, group) => (usable ? this.#ring.createBuffers(group) : undefined));
    this.#isMultishot = buffers.every((each) => each !== undefined);
    this.#inputs = sources.map((source, number) => {
      const request = { tag: number, slotShift: TAG_SLOT_SHIFT, group: number };
      const share = BATCH_PACKETS / sources.length;
      return new Input(source, this.#ring, this.#pool, request, share, this.#isMultishot ? buffers[number] : undefined);
    });
    const { slots } = this.memory;
    this.#written = new Int32Array(slots);
    this.#readySlots = new Int32Array(slots);
    this.#readyBytes = new Int32Array(slots);
    this.#readyInputs = new Uint8Array(slots);
    this.features = { engine: 'io_uring', vnetHeader: device.vnetHeader, udpSegmentation: device.udpSegmentation };
    // io_uring gives EAGAIN back on a non-blocking file, instead of waiting for it.
    setNonBlocking(this.#fd, false);
    if (device.tunnelFd !== undefined) setNonBlocking(device.tunnelFd, false);
  }

  get writeErrors(): number {
    return this.#writeErrors;
  }

  /** How packets are read, for the log. */
  get reads(): 'multishot' | 'single' {
    return this.#isMultishot ? 'multishot' : 'single';
  }

  /** Slots that are free or with the kernel; all of them, when the data path has given back what it had. */
  get slotsOwned(): number {
    return this.#pool.free + this.#lent() + this.#writtenCount + this.#readyCount;
  }

  receive(timeoutMs: number): number {
    this.rx.count = 0;
    this.#freeWritten();
    const startMs = timeoutMs > 0 && timeoutMs !== Infinity ? performance.now() : 0;
    for (let leftMs = timeoutMs; ; leftMs = timeoutMs - (performance.now() - startMs)) {
      const pauseMs = this.#faults.pauseMs();
      if (pauseMs === 0) {
        for (const input of this.#inputs) input.arm(BATCH_PACKETS - this.#readyCount - this.#lent() + input.lent);
      }
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
    for (const input of this.#inputs) input.cancel((tag) => this.#cancel(tag));
    if (this.#wakeArmed) this.#cancel(TAG_WAKE);
    for (let step = 0; step < CANCEL_STEPS && this.#inFlight(); step++) {
      this.#ring.enter(1, CANCEL_STEP_MS);
      this.#reap();
    }
    // Memory that the kernel might still fill stays mapped: a leak, in a case that was never seen, is better than corruption.
    const ended = !this.#inFlight();
    this.#ring.close();
    if (!ended) return;
    for (const input of this.#inputs) input.close();
    this.#pool.close();
  }

  #cancel(tag: number): void {
    this.#ring.queue(OP_ASYNC_CANCEL, -1, tag, 0, TAG_CANCEL, 0, 0);
  }

  #inFlight(): boolean {
    return this.#wakeArmed || this.#inputs.some(({ isInFlight }) => isInFlight);
  }

  /** Slots that are with the kernel, to be filled. */
  #lent(): number {
    let lent = 0;
    for (const input of this.#inputs) lent += input.lent;
    return lent;
  }

  #armWake(): void {
    if (this.#wakeArmed) return;
    this.#ring.queue(OP_READ, this.#wakeFd, this.#ring.resultAddress, 8, TAG_WAKE, 0, 0);
    this.#wakeArmed = true;
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
        case TAG_TUN:
        case TAG_TUNNEL:
          this.#endRead(ring.tag & TAG_KIND, ring.result);
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

  #endRead(number: number, result: number): void {
    const input = this.#inputs[number]!;
    const slot = input.end();
    if (result < 0 && result !== -ENOBUFS) this.#faults.record(result);
    if (slot < 0) return;
    const contentBytes = input.contentBytes(result);
    if (result < 0 || contentBytes < 0) {
      this.#pool.give(slot);
      return;
    }
    this.#readySlots[this.#readyCount] = slot;
    this.#readyBytes[this.#readyCount] = contentBytes;
    this.#readyInputs[this.#readyCount] = number;
    this.#readyCount++;
  }

  /** Never more than a batch is ready, since no more slots than that are lent. */
  #deliver(): number {
    const { rx } = this;
    const count = this.#readyCount;
    for (let row = 0; row < count; row++) {
      const input = this.#inputs[this.#readyInputs[row]!]!;
      input.describe(this.#readySlots[row]!, this.#readyBytes[row]!, rx, row);
    }
    rx.count = count;
    this.#readyCount = 0;
    this.#adapt(count);
    this.#woken = false;
    this.#faults.clear();
    return count;
  }

  #adapt(count: number): void {
    let ofTunnel = 0;
    for (let row = 0; row < count; row++) ofTunnel += this.#readyInputs[row]!;
    this.#inputs[TAG_TUN]!.adapt(count - ofTunnel);
    this.#inputs[TAG_TUNNEL]?.adapt(ofTunnel);
  }
}
