import { WeirError } from '../base/errors.js';
import { BATCH_PACKETS, HEADROOM_BYTES, MAX_PACKET_BYTES } from '../base/limits.js';
import type { CaptureReader } from '../wire/capture.js';
import { linkHeaderLength, NOT_IP, UNKNOWN_LINK } from '../wire/link-layer.js';
import { PcapWriter } from '../wire/pcap.js';
import { VNET_HEADER_BYTES } from '../wire/vnet.js';
import { type BatchDevice, type DeviceFeatures, heapMemory, PacketBatch, packetOffset } from './device.js';

/** Slots beyond a batch, for packets that the data path makes itself. */
const SPARE_SLOTS = BATCH_PACKETS;

const SLOT_BYTES = HEADROOM_BYTES + MAX_PACKET_BYTES + 1;

export interface PcapDeviceOptions {
  readonly input: CaptureReader;
  /** Receives the bytes of a pcap file of what is transmitted; it must be done with them when it returns. */
  readonly write?: (bytes: Uint8Array) => void;
  /** Packets per `receive`. With 1, every packet transmitted carries the time of the one that caused it. */
  readonly batch?: number;
  /** Sees every packet transmitted, in order. */
  readonly onTransmit?: (bytes: Uint8Array, offset: number, length: number) => void;
}

/**
 * A capture as a device: its packets come in, link-layer headers taken off, and what goes out is written to another capture
 * (raw IP). It never waits, and its features are none: packets have full checksums and at most MAX_PACKET_BYTES.
 *
 * A frame that holds no IP packet is delivered with length 0, so that every packet of the capture has its row; `isIp`
 * tells it from an IP packet of which nothing was captured.
 */
export class PcapDevice implements BatchDevice {
  readonly memory;
  readonly rx: PacketBatch;
  readonly features: DeviceFeatures = { engine: 'pcap', vnetHeader: false, udpSegmentation: false };
  readonly writeErrors = 0;

  /** By row of `rx`: 1 for IP packets. */
  readonly isIp: Uint8Array;

  /**
   * The time that transmitted packets get, since the epoch. `receive` moves it to that of the last packet it delivered; a packet
   * without a time leaves it.
   */
  seconds = 0;
  nanoseconds = 0;
  /** Whether any packet so far had a time. */
  isTimed = false;

  readonly #input: CaptureReader;
  readonly #write: ((bytes: Uint8Array) => void) | undefined;
  readonly #onTransmit: ((bytes: Uint8Array, offset: number, length: number) => void) | undefined;
  readonly #batch: number;
  readonly #free: Int32Array;
  readonly #isOut: Uint8Array;
  #freeCount: number;
  #writer: PcapWriter | undefined;

  constructor({ input, write, batch = 1, onTransmit }: PcapDeviceOptions) {
    const slots = batch + SPARE_SLOTS;
    this.memory = heapMemory(slots, SLOT_BYTES);
    this.rx = new PacketBatch(batch);
    this.isIp = new Uint8Array(batch);
    this.#input = input;
    this.#write = write;
    this.#onTransmit = onTransmit;
    this.#batch = batch;
    this.#free = Int32Array.from({ length: slots }, (_, i) => slots - 1 - i);
    this.#freeCount = slots;
    this.#isOut = new Uint8Array(slots);
  }

  /** @throws WeirError CAPTURE_INVALID from the reader, or for a link type that is not read. */
  receive(): number {
    const { rx } = this;
    let count = 0;
    while (count < this.#batch && this.#freeCount > 0 && this.#input.next()) this.#deliver(count++);
    rx.count = count;
    return count === 0 ? -1 : count;
  }

  #deliver(row: number): void {
    const { packet } = this.#input;
    if (packet.timed) {
      this.seconds = packet.seconds;
      this.nanoseconds = packet.nanoseconds;
      this.isTimed = true;
    }
    if (this.#writer === undefined && this.#write !== undefined) {
      this.#writer = new PcapWriter(this.#write, this.#input.nanosecond);
    }
    const header = linkHeaderLength(packet.linkType, packet.bytes, packet.offset, packet.length);
    if (header === UNKNOWN_LINK) throw unsupportedLink(packet.linkType);
    // More than the longest IP packet is padding: the total length of IP says where it ends.
    const length = header === NOT_IP ? 0 : Math.min(packet.length - header, MAX_PACKET_BYTES);
    const slot = this.take();
    const offset = packetOffset(this.memory, slot);
    const { bytes } = this.memory;
    bytes.fill(0, offset - VNET_HEADER_BYTES, offset);
    const from = packet.offset + header;
    bytes.set(packet.bytes.subarray(from, from + length), offset);
    this.rx.slot[row] = slot;
    this.rx.offset[row] = offset;
    this.rx.length[row] = length;
    this.isIp[row] = header === NOT_IP ? 0 : 1;
  }

  transmit(slot: number, offset: number, length: number): void {
    const { bytes } = this.memory;
    this.#writer?.packet(bytes, offset, length, this.seconds, this.nanoseconds);
    this.#onTransmit?.(bytes, offset, length);
    this.release(slot);
  }

  release(slot: number): void {
    if (this.#isOut[slot] !== 1) throw new Error(`slot ${slot} was given back twice`);
    this.#isOut[slot] = 0;
    this.#free[this.#freeCount++] = slot;
  }

  take(): number {
    if (this.#freeCount === 0) return -1;
    const slot = this.#free[--this.#freeCount]!;
    this.#isOut[slot] = 1;
    return slot;
  }

  /** Slots the data path has not given back: none, between batches. */
  get slotsHeld(): number {
    return this.memory.slots - this.#freeCount;
  }

  /** Writes what is buffered; the capture of what was transmitted is then whole, if empty. Idempotent. */
  close(): void {
    if (this.#write === undefined) return;
    this.#writer ??= new PcapWriter(this.#write, this.#input.nanosecond);
    this.#writer.flush();
  }
}

function unsupportedLink(linkType: number): WeirError {
  return new WeirError(
    'CAPTURE_INVALID',
    `the capture has packets of link type ${linkType}; raw IP (101, 228, 229) and Ethernet (1) are read`,
    'Capture on one interface instead of `any` (tcpdump -i eth0), or convert the file with editcap -T.',
  );
}
