/**
 * Blocks of a pcapng file (draft-ietf-opsawg-pcapng; their frame is drawn in pcapng.ts), one by one, so that they can be sent as
 * they come: a section header, the interfaces, then packets. All little-endian, times in µs.
 */

const BLOCK_SECTION = 0x0a0d0d0a;
const BLOCK_INTERFACE = 1;
const BLOCK_STATISTICS = 5;
const BLOCK_ENHANCED = 6;
const BYTE_ORDER_MAGIC = 0x1a2b3c4d;

const OPTION_COMMENT = 1;
const SECTION_APPLICATION = 4;
const INTERFACE_NAME = 2;
const INTERFACE_DESCRIPTION = 3;
const PACKET_FLAGS = 2;
const STATISTICS_RECEIVED = 4;
const STATISTICS_DROPPED = 5;

/** epb_flags: which way the packet went. */
export const INBOUND = 1;
export const OUTBOUND = 2;

const U32 = 0x1_0000_0000;

export function sectionBlock(application: string): Uint8Array {
  const body = new DataView(new ArrayBuffer(16));
  body.setUint32(0, BYTE_ORDER_MAGIC, true);
  body.setUint16(4, 1, true);
  // The length of the section is not known.
  body.setBigInt64(8, -1n, true);
  return block(BLOCK_SECTION, bytesOf(body), options([SECTION_APPLICATION, application]));
}

/** @param snapBytes the most that is captured of a packet */
export function interfaceBlock(linkType: number, snapBytes: number, name: string, description: string): Uint8Array {
  const body = new DataView(new ArrayBuffer(8));
  body.setUint16(0, linkType, true);
  body.setUint32(4, snapBytes, true);
  const told = options([INTERFACE_NAME, name], [INTERFACE_DESCRIPTION, description]);
  return block(BLOCK_INTERFACE, bytesOf(body), told);
}

/**
 * A packet.
 *
 * @param at its number among the interfaces
 * @param epochMs fractional
 * @param bytes what was captured of it, of `originalBytes`
 */
export function packetBlock(
  at: number,
  epochMs: number,
  bytes: Uint8Array,
  originalBytes: number,
  direction: typeof INBOUND | typeof OUTBOUND,
  comment: string,
): Uint8Array {
  const body = new Uint8Array(20 + padded(bytes.length));
  const view = new DataView(body.buffer);
  view.setUint32(0, at, true);
  setTime(view, 4, epochMs);
  view.setUint32(12, bytes.length, true);
  view.setUint32(16, originalBytes, true);
  body.set(bytes, 20);
  return block(BLOCK_ENHANCED, body, options([PACKET_FLAGS, u32(direction)], [OPTION_COMMENT, comment]));
}

/** How many packets an interface has had, and how many of them are missing. */
export function statisticsBlock(at: number, epochMs: number, received: number, dropped: number): Uint8Array {
  const body = new DataView(new ArrayBuffer(12));
  body.setUint32(0, at, true);
  setTime(body, 4, epochMs);
  const counts = options([STATISTICS_RECEIVED, u64(received)], [STATISTICS_DROPPED, u64(dropped)]);
  return block(BLOCK_STATISTICS, bytesOf(body), counts);
}

function setTime(view: DataView, offset: number, epochMs: number): void {
  const us = Math.round(epochMs * 1000);
  view.setUint32(offset, Math.floor(us / U32), true);
  view.setUint32(offset + 4, us % U32, true);
}

function block(type: number, body: Uint8Array, options: Uint8Array): Uint8Array {
  const bytes = new Uint8Array(12 + body.length + options.length);
  const view = new DataView(bytes.buffer);
  view.setUint32(0, type, true);
  view.setUint32(4, bytes.length, true);
  bytes.set(body, 8);
  bytes.set(options, 8 + body.length);
  view.setUint32(bytes.length - 4, bytes.length, true);
  return bytes;
}

/** code u16 | length u16 | value, padded to 4; and the end, which is all zero. */
function options(...list: readonly (readonly [code: number, value: string | Uint8Array])[]): Uint8Array {
  const values = list.map(([, value]) => (typeof value === 'string' ? new TextEncoder().encode(value) : value));
  const bytes = new Uint8Array(values.reduce((sum, value) => sum + 4 + padded(value.length), 4));
  const view = new DataView(bytes.buffer);
  let at = 0;
  for (const [i, value] of values.entries()) {
    view.setUint16(at, list[i]![0], true);
    view.setUint16(at + 2, value.length, true);
    bytes.set(value, at + 4);
    at += 4 + padded(value.length);
  }
  return bytes;
}

function u32(value: number): Uint8Array {
  return new Uint8Array(new Uint32Array([value]).buffer);
}

function u64(value: number): Uint8Array {
  return new Uint8Array(new BigUint64Array([BigInt(value)]).buffer);
}

function bytesOf(view: DataView): Uint8Array {
  return new Uint8Array(view.buffer);
}

function padded(length: number): number {
  return (length + 3) & ~3;
}
