import { HEADROOM_BYTES } from '../base/limits.js';
import type { PacketBatch } from './device.js';
import type { SlotPool } from './slots.js';
import { MAP_PRIVATE_ANONYMOUS, mmap, munmap, recvmsg, storeAddress, viewMemory } from './syscalls.js';

// In a slot. The kernel writes the first of them by itself, for a multishot receive.
const RECVMSG_OUT_BYTES = 16;
const NAME_BYTES = 16;
/** Two messages of 24 bytes: the TOS, and the size of joined datagrams. */
const CONTROL_BYTES = 48;
const CONTROL_AT = HEADROOM_BYTES - CONTROL_BYTES;
const NAME_AT = CONTROL_AT - NAME_BYTES;
const BUFFER_AT = NAME_AT - RECVMSG_OUT_BYTES;

const RECVMSG_OUT_CONTROL = 4;
const NAME_ADDRESS = 4;
const CONTROL_HEADER_BYTES = 16;
const CONTROL_LEVEL = 8;
const CONTROL_TYPE = 12;
const IPPROTO_IP = 0;
const IP_TOS = 1;
const IPPROTO_UDP = 17;
const UDP_GRO = 104;

/** struct msghdr, 56 bytes, with its one struct iovec behind it. */
const MESSAGE_BYTES = 128;
const MESSAGE_WORDS = MESSAGE_BYTES / 4;
const IOVEC_AT = 56;
const NAME_LENGTH_WORD = 2;
const CONTROL_LENGTH_WORD = 10;

/** What a multishot receive puts before the payload. */
export const DATAGRAM_OVERHEAD_BYTES = HEADROOM_BYTES - BUFFER_AT;

/**
 * Where datagrams of the tunnel's socket go: into the slots of a device, each with its sender and control messages in the
 * headroom before it.
 *
 *     slot: | 48 | recvmsg_out 16 | name 16 | control 48 | payload ...
 *                ^ the kernel's buffer, multishot        ^ HEADROOM_BYTES: rx.offset
 *
 * There is a struct msghdr for each slot, which names these places; where the kernel picks the buffer itself one of them
 * says how long name and control are. Nothing is prepared in the slot itself: what was written from it may still be queued.
 */
export class DatagramBuffers {
  /** Of the buffer that is lent to a multishot receive. */
  readonly bufferBytes: number;

  readonly #pool: SlotPool;
  readonly #messages: number;
  readonly #messagesBytes: number;
  readonly #words: Int32Array;

  /** @throws RangeError when memory cannot be mapped */
  constructor(pool: SlotPool) {
    const { slots, slotBytes } = pool.memory;
    this.#pool = pool;
    this.bufferBytes = slotBytes - BUFFER_AT;
    this.#messagesBytes = slots * MESSAGE_BYTES;
    this.#messages = mmap(this.#messagesBytes, MAP_PRIVATE_ANONYMOUS);
    if (this.#messages < 0) throw new RangeError(`${this.#messagesBytes} bytes of messages cannot be mapped`);
    const words = new Int32Array(viewMemory(this.#messages, this.#messagesBytes));
    for (let slot = 0; slot < slots; slot++) {
      const at = slot * MESSAGE_WORDS;
      const iovec = at + IOVEC_AT / 4;
      storeAddress(words, at, this.#addressOf(slot, NAME_AT));
      words[at + NAME_LENGTH_WORD] = NAME_BYTES;
      storeAddress(words, at + 4, this.messageAddress(slot) + IOVEC_AT);
      words[at + 6] = 1;
      storeAddress(words, at + 8, this.#addressOf(slot, CONTROL_AT));
      words[at + CONTROL_LENGTH_WORD] = CONTROL_BYTES;
      storeAddress(words, iovec, this.#addressOf(slot, HEADROOM_BYTES));
      words[iovec + 2] = slotBytes - HEADROOM_BYTES;
    }
    this.#words = words;
  }

  /** Where the buffer of a slot begins that a multishot receive fills. */
  bufferAddress(slot: number): number {
    return this.#addressOf(slot, BUFFER_AT);
  }

  /** Of the struct msghdr of a slot. */
  messageAddress(slot: number): number {
    return this.#messages + slot * MESSAGE_BYTES;
  }

  /** To be called before the kernel gets a slot for a single receive: it has written there how much it used. */
  prepare(slot: number): void {
    this.#words[slot * MESSAGE_WORDS + NAME_LENGTH_WORD] = NAME_BYTES;
    this.#words[slot * MESSAGE_WORDS + CONTROL_LENGTH_WORD] = CONTROL_BYTES;
  }

  /** Receives one datagram, or several that were joined, into a slot that is prepared. @returns bytes, or -errno */
  receive(fd: number, slot: number, flags: number): number {
    return recvmsg(fd, this.messageAddress(slot), flags);
  }

  /** Fills a row with the payload of `payloadBytes` in `slot`, which a multishot receive brought, or a single one. */
  describe(slot: number, payloadBytes: number, multishot: boolean, rx: PacketBatch, row: number): void {
    const { bytes, view, slotBytes } = this.#pool.memory;
    const start = slot * slotBytes;
    const controlBytes = multishot
      ? view.getInt32(start + BUFFER_AT + RECVMSG_OUT_CONTROL, true)
      : this.#words[slot * MESSAGE_WORDS + CONTROL_LENGTH_WORD]!;
    rx.slot[row] = slot;
    rx.offset[row] = start + HEADROOM_BYTES;
    rx.length[row] = payloadBytes;
    rx.datagramBytes[row] = Math.max(1, payloadBytes);
    rx.peer[row] = view.getInt32(start + NAME_AT + NAME_ADDRESS);
    rx.tos[row] = 0;
    const end = start + CONTROL_AT + controlBytes;
    for (let at = start + CONTROL_AT; at + CONTROL_HEADER_BYTES < end; ) {
      const messageBytes = view.getInt32(at, true);
      if (messageBytes <= CONTROL_HEADER_BYTES) return;
      const level = view.getInt32(at + CONTROL_LEVEL, true);
      const type = view.getInt32(at + CONTROL_TYPE, true);
      const data = at + CONTROL_HEADER_BYTES;
      if (level === IPPROTO_IP && type === IP_TOS) rx.tos[row] = bytes[data]!;
      else if (level === IPPROTO_UDP && type === UDP_GRO) rx.datagramBytes[row] = view.getInt32(data, true);
      at += (messageBytes + 7) & ~7;
    }
  }

  /** The kernel must be done with every slot. */
  close(): void {
    munmap(this.#messages, this.#messagesBytes);
  }

  #addressOf(slot: number, offset: number): number {
    return this.#pool.addressOf(slot * this.#pool.memory.slotBytes + offset);
  }
}
