import type { ByteWindow } from './byte-window.js';
import { type CapturedPacket, type CaptureReader, MAX_CAPTURED_BYTES, newPacket } from './capture.js';

/**
 * pcapng (draft-ietf-opsawg-pcapng): a sequence of blocks
 *
 *     type u32 | length u32 | body, padded to 4 | length u32 again
 *
 * in sections, each with its own byte order and its own list of interfaces. Packets are in Enhanced (6), Simple (3) and the
 * obsolete Packet (2) blocks; what else there may be is skipped by its length.
 *
 *     section header: 0x1a2b3c4d in the section's order | major u16 | minor u16 | section length i64 | options
 *     interface:      link type u16 | 0 u16 | snaplen u32 | options: if_tsresol (9), if_tsoffset (14)
 *     enhanced:       interface u32 | time high u32 | time low u32 | captured u32 | original u32 | bytes | options
 *     packet:         interface u16 | drops u16 | the same
 *     simple:         original u32 | bytes: no time, interface 0
 */

/** The type of a section header block reads the same in both byte orders. */
export const BLOCK_SECTION = 0x0a0d0d0a;
const BLOCK_INTERFACE = 1;
const BLOCK_PACKET = 2;
const BLOCK_SIMPLE = 3;
const BLOCK_ENHANCED = 6;

const BYTE_ORDER_MAGIC = 0x1a2b3c4d;
const OPTION_END = 0;
const OPTION_TSRESOL = 9;
const OPTION_TSOFFSET = 14;

/** Head and tail of a block. */
const FRAME_BYTES = 12;
const MAX_BLOCK_BYTES = 16 * MAX_CAPTURED_BYTES;

interface Interface {
  readonly linkType: number;
  /** 0: no limit. */
  readonly snapLength: number;
  readonly ticksPerSecond: bigint;
  readonly offsetSeconds: number;
}

export class PcapngReader implements CaptureReader {
  readonly packet: CapturedPacket = newPacket();
  nanosecond = false;

  readonly #window: ByteWindow;
  #littleEndian = false;
  #interfaces: Interface[] = [];

  constructor(window: ByteWindow) {
    this.#window = window;
  }

  next(): boolean {
    const window = this.#window;
    for (;;) {
      const start = window.position;
      if (!window.require(FRAME_BYTES)) {
        if (window.available === 0) return false;
        throw window.error(start, `the last block is cut short: ${window.available} bytes of it are there`);
      }
      const isSection = window.view.getUint32(window.at) === BLOCK_SECTION;
      if (isSection) this.#readByteOrder(start);
      const type = window.view.getUint32(window.at, this.#littleEndian);
      const length = window.view.getUint32(window.at + 4, this.#littleEndian);
      if (length < FRAME_BYTES || length % 4 !== 0 || length > MAX_BLOCK_BYTES) {
        throw this.#window.error(start + 4, `a block of ${length} bytes is not credible`);
      }
      if (!window.require(length)) {
        throw this.#window.error(
          start,
          `the last block is cut short: ${window.available} of its ${length} bytes are there`,
        );
      }
      const { view, at } = window;
      const again = view.getUint32(at + length - 4, this.#littleEndian);
      if (again !== length)
        throw this.#window.error(start + length - 4, `a block of ${length} bytes ends with length ${again}`);
      window.skip(length);
      if (this.#readBlock(type, view, at, length, start)) return true;
    }
  }

  #readByteOrder(start: number): void {
    const { view, at } = this.#window;
    if (view.getUint32(at + 8) === BYTE_ORDER_MAGIC) this.#littleEndian = false;
    else if (view.getUint32(at + 8, true) === BYTE_ORDER_MAGIC) this.#littleEndian = true;
    else throw this.#window.error(start + 8, 'a section header without a byte-order magic');
  }

  /** Returns whether the block, whole at `at`, held a packet. */
  #readBlock(type: number, view: DataView, at: number, length: number, start: number): boolean {
    const needs = (bodyBytes: number): void => {
      if (length < FRAME_BYTES + bodyBytes)
        throw this.#window.error(start, `a block of type ${type} has only ${length} bytes`);
    };
    const little = this.#littleEndian;
    const body = at + 8;
    switch (type) {
      case BLOCK_SECTION: {
        needs(16);
        const major = view.getUint16(body + 4, little);
        if (major !== 1) throw this.#window.error(start + 12, `pcapng version ${major} is not 1`);
        this.#interfaces = [];
        return false;
      }
      case BLOCK_INTERFACE:
        needs(8);
        this.#interfaces.push(this.#readInterface(view, body, at + length - 4, start));
        return false;
      case BLOCK_ENHANCED: {
        needs(20);
        const from = this.#interface(view.getUint32(body, little), start);
        this.#setTime(from, view.getUint32(body + 4, little), view.getUint32(body + 8, little));
        this.#setBytes(from, body + 20, view.getUint32(body + 12, little), length - FRAME_BYTES - 20, start);
        return true;
      }
      case BLOCK_PACKET: {
        needs(20);
        const from = this.#interface(view.getUint16(body, little), start);
        this.#setTime(from, view.getUint32(body + 4, little), view.getUint32(body + 8, little));
        this.#setBytes(from, body + 20, view.getUint32(body + 12, little), length - FRAME_BYTES - 20, start);
        return true;
      }
      case BLOCK_SIMPLE: {
        needs(4);
        const from = this.#interface(0, start);
        const original = view.getUint32(body, little);
        const captured = from.snapLength === 0 ? original : Math.min(original, from.snapLength);
        this.packet.timed = false;
        this.packet.seconds = 0;
        this.packet.nanoseconds = 0;
        this.#setBytes(from, body + 4, captured, length - FRAME_BYTES - 4, start);
        return true;
      }
      default:
        return false;
    }
  }

  #readInterface(view: DataView, body: number, end: number, start: number): Interface {
    const little = this.#littleEndian;
    let ticksPerSecond = 1_000_000n;
    let offsetSeconds = 0;
    let at = body + 8;
    while (at + 4 <= end) {
      const code = view.getUint16(at, little);
      const length = view.getUint16(at + 2, little);
      if (code === OPTION_END) break;
      if (at + 4 + length > end)
        throw this.#window.error(start, `option ${code} of an interface block exceeds the block`);
      if (code === OPTION_TSRESOL && length === 1) {
        const resolution = view.getUint8(at + 4);
        ticksPerSecond = (resolution & 0x80 ? 2n : 10n) ** BigInt(resolution & 0x7f);
      } else if (code === OPTION_TSOFFSET && length === 8) {
        offsetSeconds = Number(view.getBigInt64(at + 4, little));
      }
      at += 4 + ((length + 3) & ~3);
    }
    return {
      linkType: view.getUint16(body, little),
      snapLength: view.getUint32(body + 4, little),
      ticksPerSecond,
      offsetSeconds,
    };
  }

  #interface(id: number, start: number): Interface {
    const found = this.#interfaces[id];
    if (found === undefined)
      throw this.#window.error(start, `a packet of interface ${id}, which the section does not describe`);
    return found;
  }

  #setTime({ ticksPerSecond, offsetSeconds }: Interface, high: number, low: number): void {
    const ticks = (BigInt(high) << 32n) | BigInt(low);
    this.packet.timed = true;
    this.packet.seconds = Number(ticks / ticksPerSecond) + offsetSeconds;
    this.packet.nanoseconds = Number(((ticks % ticksPerSecond) * 1_000_000_000n) / ticksPerSecond);
    this.nanosecond = 1_000_000n % ticksPerSecond !== 0n;
  }

  #setBytes(from: Interface, offset: number, captured: number, room: number, start: number): void {
    if (captured > room)
      throw this.#window.error(start, `a packet of ${captured} bytes in a block with room for ${room}`);
    this.packet.bytes = this.#window.bytes;
    this.packet.offset = offset;
    this.packet.length = captured;
    this.packet.linkType = from.linkType;
  }
}
