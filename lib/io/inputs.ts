import { BATCH_PACKETS, HEADROOM_BYTES } from '../base/limits.js';
import { VNET_HEADER_BYTES } from '../wire/vnet.js';
import { DATAGRAM_OVERHEAD_BYTES, DatagramBuffers } from './datagrams.js';
import type { PacketBatch } from './device.js';
import type { BufferRing, Ring } from './ring.js';
import type { KernelDevice, SlotPool } from './slots.js';

// linux/io_uring.h
const OP_RECVMSG = 10;
const OP_READ = 22;
export const OP_READ_MULTISHOT = 49; // 6.7
const IOSQE_BUFFER_SELECT = 1 << 5;
const RECV_MULTISHOT = 1 << 1; // 6.0
const CQE_F_BUFFER = 1 << 0;
const CQE_F_MORE = 1 << 1;
const CQE_BUFFER_SHIFT = 16;

/** What an input reads from: how reads are asked for, and what they leave in a slot. */
export interface Source {
  /** Buffers for a multishot read, which ends up in the slot in any case. */
  readonly bufferBytes: number;
  bufferAddress(slot: number): number;
  queueMultishot(ring: Ring, tag: number, group: number): void;
  queueSingle(ring: Ring, slot: number, tag: number): void;
  /** Bytes of what a read with this result brought; negative: nothing that could be used. */
  contentBytes(result: number, multishot: boolean): number;
  /** Fills a row with what a read brought. */
  describe(slot: number, contentBytes: number, multishot: boolean, rx: PacketBatch, row: number): void;
  close(): void;
}

/** A TUN device. */
export class TunSource implements Source {
  readonly bufferBytes: number;
  readonly #fd: number;
  readonly #headerBytes: number;
  readonly #pool: SlotPool;

  constructor({ fd, vnetHeader }: KernelDevice, pool: SlotPool) {
    this.#fd = fd;
    this.#headerBytes = vnetHeader ? VNET_HEADER_BYTES : 0;
    this.#pool = pool;
    this.bufferBytes = pool.memory.slotBytes - HEADROOM_BYTES + this.#headerBytes;
  }

  bufferAddress(slot: number): number {
    return this.#pool.addressOf(slot * this.#pool.memory.slotBytes + HEADROOM_BYTES - this.#headerBytes);
  }

  queueMultishot(ring: Ring, tag: number, group: number): void {
    ring.queue(OP_READ_MULTISHOT, this.#fd, 0, 0, tag, IOSQE_BUFFER_SELECT, 0, 0, group);
  }

  queueSingle(ring: Ring, slot: number, tag: number): void {
    ring.queue(OP_READ, this.#fd, this.bufferAddress(slot), this.bufferBytes, tag, 0, 0);
  }

  contentBytes(result: number): number {
    return result > this.#headerBytes ? result - this.#headerBytes : -1;
  }

  describe(slot: number, contentBytes: number, _multishot: boolean, rx: PacketBatch, row: number): void {
    this.#pool.describe(slot, contentBytes, this.#headerBytes > 0, rx, row);
  }

  close(): void {}
}

/** The socket of a tunnel. Datagrams without a byte are delivered too. */
export class SocketSource implements Source {
  readonly bufferBytes: number;
  readonly #fd: number;
  readonly #buffers: DatagramBuffers;

  constructor(fd: number, pool: SlotPool) {
    this.#fd = fd;
    this.#buffers = new DatagramBuffers(pool);
    this.bufferBytes = this.#buffers.bufferBytes;
  }

  bufferAddress(slot: number): number {
    return this.#buffers.bufferAddress(slot);
  }

  /** Of the message only the lengths of its name and control are looked at. */
  queueMultishot(ring: Ring, tag: number, group: number): void {
    const message = this.#buffers.messageAddress(0);
    ring.queue(OP_RECVMSG, this.#fd, message, 1, tag, IOSQE_BUFFER_SELECT, 0, RECV_MULTISHOT, group);
  }

  queueSingle(ring: Ring, slot: number, tag: number): void {
    this.#buffers.prepare(slot);
    ring.queue(OP_RECVMSG, this.#fd, this.#buffers.messageAddress(slot), 1, tag, 0, 0);
  }

  contentBytes(result: number, multishot: boolean): number {
    return multishot ? result - DATAGRAM_OVERHEAD_BYTES : result;
  }

  describe(slot: number, contentBytes: number, multishot: boolean, rx: PacketBatch, row: number): void {
    this.#buffers.describe(slot, contentBytes, multishot, rx, row);
  }

  close(): void {
    this.#buffers.close();
  }
}

/**
 * The reads of one source: slots lent to the kernel, by one multishot read or by single ones (io-uring.ts says when and
 * why), and what comes back.
 */
export class Input {
  readonly #source: Source;
  readonly #ring: Ring;
  readonly #pool: SlotPool;
  /** Of its requests; single reads have the slot above it. */
  readonly #tag: number;
  readonly #slotShift: number;
  readonly #group: number;
  readonly #buffers: BufferRing | undefined;
  /** The most slots it may have lent. */
  readonly #share: number;
  /** Single reads: by slot, whether one is in flight. */
  readonly #reading: Uint8Array;
  #wanted = 1;
  #lent = 0;
  #isArmed = false;

  /** @param buffers for multishot reads; undefined: single ones */
  constructor(
    source: Source,
    ring: Ring,
    pool: SlotPool,
    request: { readonly tag: number; readonly slotShift: number; readonly group: number },
    share: number,
    buffers: BufferRing | undefined,
  ) {
    this.#source = source;
    this.#ring = ring;
    this.#pool = pool;
    this.#tag = request.tag;
    this.#slotShift = request.slotShift;
    this.#group = request.group;
    this.#share = share;
    this.#buffers = buffers;
    this.#reading = new Uint8Array(pool.memory.slots);
  }

  /** Slots that are with the kernel. */
  get lent(): number {
    return this.#lent;
  }

  /** Whether the kernel may still fill a slot. */
  get isInFlight(): boolean {
    return this.#isArmed || this.#reading.includes(1);
  }

  /** Queues reads; at most `room` slots may be with the kernel afterwards. */
  arm(room: number): void {
    const limit = Math.min(this.#buffers ? this.#share : Math.min(this.#wanted, this.#share), room);
    while (this.#lent < limit && this.#pool.free > 0) {
      const slot = this.#pool.take();
      if (this.#buffers) this.#buffers.add(slot, this.#source.bufferAddress(slot), this.#source.bufferBytes);
      else {
        this.#source.queueSingle(this.#ring, slot, this.#tag | (slot << this.#slotShift));
        this.#reading[slot] = 1;
      }
      this.#lent++;
    }
    if (this.#buffers === undefined) return;
    this.#buffers.publish();
    if (this.#isArmed || this.#lent === 0) return;
    this.#source.queueMultishot(this.#ring, this.#tag, this.#group);
    this.#isArmed = true;
  }

  /** Takes a completion of one of its requests, in the ring's hand. @returns the slot it filled; -1: none */
  end(): number {
    const { tag, flags } = this.#ring;
    if (this.#buffers === undefined) {
      const slot = tag >>> this.#slotShift;
      this.#reading[slot] = 0;
      this.#lent--;
      return slot;
    }
    if ((flags & CQE_F_MORE) === 0) this.#isArmed = false;
    if ((flags & CQE_F_BUFFER) === 0) return -1;
    this.#lent--;
    return flags >>> CQE_BUFFER_SHIFT;
  }

  contentBytes(result: number): number {
    return this.#source.contentBytes(result, this.#buffers !== undefined);
  }

  describe(slot: number, contentBytes: number, rx: PacketBatch, row: number): void {
    this.#source.describe(slot, contentBytes, this.#buffers !== undefined, rx, row);
  }

  /** How many single reads to keep from now on, after a batch of which `count` were its own. */
  adapt(count: number): void {
    this.#wanted = Math.max(1, this.#lent === 0 ? Math.min(2 * count, BATCH_PACKETS) : count);
  }

  /** Asks the kernel to end what is in flight. @param cancel queues the cancellation of a tag */
  cancel(cancel: (tag: number) => void): void {
    if (this.#isArmed) cancel(this.#tag);
    for (let slot = 0; slot < this.#reading.length; slot++) {
      if (this.#reading[slot] === 1) cancel(this.#tag | (slot << this.#slotShift));
    }
  }

  /** After its ring. */
  close(): void {
    this.#buffers?.close();
    this.#source.close();
  }
}
