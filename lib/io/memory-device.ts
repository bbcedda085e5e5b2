import { BATCH_PACKETS, HEADROOM_BYTES, MAX_PACKET_BYTES } from '../base/limits.js';
import { VNET_HEADER_BYTES } from '../wire/vnet.js';
import { type BatchDevice, type DeviceFeatures, heapMemory, PacketBatch, packetOffset } from './device.js';

/** A packet as tests see it; `vnet` is its virtio-net header when that is not all zero. */
export interface MemoryPacket {
  readonly bytes: Uint8Array;
  readonly vnet?: Uint8Array;
  /** `bytes` came through the tunnel's socket: from whom, and if they are several datagrams, of how many bytes each. */
  readonly tunnel?: { readonly peer: number; readonly tos?: number; readonly datagramBytes?: number };
}

/** A device whose packets come from `push` and go to `sent`: for tests. */
export class MemoryDevice implements BatchDevice {
  readonly memory;
  readonly rx;
  readonly features: DeviceFeatures = { engine: 'memory', vnetHeader: true, udpSegmentation: true };
  readonly writeErrors = 0;

  /** What was transmitted and not yet collected, in order. */
  sent: MemoryPacket[] = [];

  readonly #queue: MemoryPacket[] = [];
  readonly #free: number[] = [];
  readonly #batch: number;

  constructor(batch = BATCH_PACKETS, slotBytes = HEADROOM_BYTES + MAX_PACKET_BYTES + 1) {
    this.memory = heapMemory(batch * 2, slotBytes);
    this.rx = new PacketBatch(batch);
    this.#batch = batch;
    for (let slot = batch * 2 - 1; slot >= 0; slot--) this.#free.push(slot);
  }

  push(...packets: MemoryPacket[]): void {
    this.#queue.push(...packets);
  }

  receive(): number {
    if (this.#queue.length === 0) return -1;
    let count = 0;
    while (count < this.#batch && this.#queue.length > 0) {
      const slot = this.take();
      if (slot < 0) break;
      const { bytes, vnet, tunnel } = this.#queue.shift()!;
      const offset = packetOffset(this.memory, slot);
      this.memory.bytes.set(bytes, offset);
      if (vnet) this.memory.bytes.set(vnet, offset - VNET_HEADER_BYTES);
      else this.memory.bytes.fill(0, offset - VNET_HEADER_BYTES, offset);
      this.rx.slot[count] = slot;
      this.rx.offset[count] = offset;
      this.rx.length[count] = bytes.length;
      this.rx.datagramBytes[count] = tunnel ? (tunnel.datagramBytes ?? Math.max(1, bytes.length)) : 0;
      this.rx.peer[count] = tunnel?.peer ?? 0;
      this.rx.tos[count] = tunnel?.tos ?? 0;
      count++;
    }
    this.rx.count = count;
    return count;
  }

  transmit(slot: number, offset: number, length: number): void {
    const bytes = this.memory.bytes.slice(offset, offset + length);
    const vnet = this.memory.bytes.slice(offset - VNET_HEADER_BYTES, offset);
    this.sent.push(vnet.some((byte) => byte !== 0) ? { bytes, vnet } : { bytes });
    this.release(slot);
  }

  release(slot: number): void {
    if (this.#free.includes(slot)) throw new Error(`slot ${slot} was given back twice`);
    this.#free.push(slot);
  }

  take(): number {
    return this.#free.pop() ?? -1;
  }

  /** Slots the data path has not given back: none, between batches. */
  get slotsHeld(): number {
    return this.memory.slots - this.#free.length;
  }

  close(): void {}
}
