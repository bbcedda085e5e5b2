import { BATCH_PACKETS, HEADROOM_BYTES, MAX_PACKET_BYTES } from '../base/limits.js';
import { VNET_HEADER_BYTES } from '../wire/vnet.js';
import type { PacketBatch, PacketMemory } from './device.js';
import { discardPages, MAP_PRIVATE_ANONYMOUS, mmap, viewMemory } from './syscalls.js';

/** An open device as an engine takes it over: plain values, so that they can be handed to a Worker. */
export interface KernelDevice {
  readonly fd: number;
  /** Packets have a virtio-net header before them, in both directions. */
  readonly vnetHeader: boolean;
  readonly udpSegmentation: boolean;
  /** Bytes; a packet that is larger is cut off on its way in. */
  readonly mtu: number;
  /** The eventfd that ends a blocked `receive`: see wake. */
  readonly wakeFd: number;
  /** A UDP socket whose datagrams are delivered as well: see tunnel-socket. */
  readonly tunnelFd?: number;
}

/** Slots beyond a full batch, for packets the data path makes itself. */
const RESERVE_SLOTS = 32;

const CACHE_LINE_BYTES = 64;

/**
 * The packet memory of a kernel device and the list of its free slots. It is mapped outside the JavaScript heap, where its
 * address is known and never changes. The list is a stack: the slot given back last is the one most likely in cache.
 *
 * The mapping lives as long as the process, since views of it cannot be taken back from whoever holds one; `close` returns
 * its pages, which is all the memory there is to it.
 */
export class SlotPool {
  readonly memory: PacketMemory;
  readonly #address: number;
  readonly #words: Uint16Array;
  readonly #stack: Int32Array;
  #free: number;

  /** @param maxPacketBytes the largest packet a slot must hold, from the IP header on */
  constructor(maxPacketBytes: number) {
    const slotBytes = Math.ceil((HEADROOM_BYTES + maxPacketBytes) / CACHE_LINE_BYTES) * CACHE_LINE_BYTES;
    const slots = BATCH_PACKETS + RESERVE_SLOTS;
    this.#address = mmap(slots * slotBytes, MAP_PRIVATE_ANONYMOUS);
    if (this.#address < 0) throw new RangeError(`${slots * slotBytes} bytes of packet memory cannot be mapped`);
    const buffer = viewMemory(this.#address, slots * slotBytes);
    this.memory = { bytes: new Uint8Array(buffer), view: new DataView(buffer), slotBytes, slots };
    this.#words = new Uint16Array(buffer);
    this.#stack = new Int32Array(slots);
    for (let slot = 0; slot < slots; slot++) this.#stack[slots - 1 - slot] = slot;
    this.#free = slots;
  }

  get free(): number {
    return this.#free;
  }

  /** A free slot, or -1. */
  take(): number {
    return this.#free > 0 ? this.#stack[--this.#free]! : -1;
  }

  give(slot: number): void {
    this.#stack[this.#free++] = slot;
  }

  /** The kernel's address of an offset in the memory. */
  addressOf(offset: number): number {
    return this.#address + offset;
  }

  /**
   * Fills a row with the IP packet of `lengthBytes` in `slot`.
   *
   * @param hasHeader whether the device put a vnet header before it; else it is zeroed
   */
  describe(slot: number, lengthBytes: number, hasHeader: boolean, rx: PacketBatch, row: number): void {
    const offset = slot * this.memory.slotBytes + HEADROOM_BYTES;
    rx.slot[row] = slot;
    rx.offset[row] = offset;
    rx.length[row] = lengthBytes;
    rx.datagramBytes[row] = 0;
    if (!hasHeader) this.#clearHeader(offset);
  }

  /** Slots are aligned, and so is this. */
  #clearHeader(offset: number): void {
    const word = (offset - VNET_HEADER_BYTES) >> 1;
    this.#words[word] = 0;
    this.#words[word + 1] = 0;
    this.#words[word + 2] = 0;
    this.#words[word + 3] = 0;
    this.#words[word + 4] = 0;
  }

  /** The kernel must be done with every slot. Stale views then read zeros. */
  close(): void {
    discardPages(this.#address, this.memory.slots * this.memory.slotBytes);
  }
}

/** The largest packet a device can deliver: super-packets, and what comes through a tunnel, whatever the MTU is. */
export function maxPacketBytes({ vnetHeader, mtu, tunnelFd }: KernelDevice): number {
  return vnetHeader || tunnelFd !== undefined ? MAX_PACKET_BYTES : mtu;
}
