import { REASON } from '../base/reasons.js';
import { fold, storeFull, sum } from './checksum.js';

/**
 * IPv4 (RFC 791). `check()` first, once; when it returns 0 no accessor here, in tcp.ts, udp.ts or icmp.ts reads outside
 * the packet, so none of them tests a bound. `at` is always the offset of the IPv4 header, `l4` that of the next one.
 *
 *      0               1               2               3
 *     |version  ihl  |     tos       |         total length          |  0
 *     |        identification        |0 DF MF|   fragment offset     |  4
 *     |     ttl      |   protocol    |        header checksum        |  8
 *     |                       source address                         | 12
 *     |                     destination address                      | 16
 */

export const IPV4_HEADER_BYTES = 20;

export const PROTO_ICMP = 1;
export const PROTO_TCP = 6;
export const PROTO_UDP = 17;

export const FLAG_DF = 0x4000;
export const FLAG_MF = 0x2000;

const TOTAL_LENGTH = 2;
const ID = 4;
const FRAGMENT = 6;
const TTL = 8;
const PROTOCOL = 9;
const CHECKSUM = 10;
const SOURCE = 12;
const DESTINATION = 16;

/**
 * Judges the packet of `length` bytes at `at`: the IPv4 header whole and its checksum right, the lengths consistent,
 * and for the first fragment the TCP, UDP or ICMP header whole.
 *
 * @returns 0, or the id of the reason to drop it: `malformed`, `bad-checksum-header`, `unsupported-protocol`.
 */
export function check(bytes: Uint8Array, at: number, length: number): number {
  if (length < 1) return REASON.malformed;
  const version = bytes[at]! >> 4;
  if (version !== 4) return version === 6 ? REASON['unsupported-protocol'] : REASON.malformed;
  if (length < IPV4_HEADER_BYTES) return REASON.malformed;
  const header = headerLength(bytes, at);
  const total = totalLength(bytes, at);
  if (header < IPV4_HEADER_BYTES || total < header || total > length) return REASON.malformed;
  if (fold(sum(bytes, at, header)) !== 0xffff) return REASON['bad-checksum-header'];

  const payload = total - header;
  const fragment = (bytes[at + FRAGMENT]! << 8) | bytes[at + FRAGMENT + 1]!;
  const protocol = bytes[at + PROTOCOL]!;
  const offset = (fragment & 0x1fff) << 3;
  if ((fragment & FLAG_MF) !== 0 && (payload & 7) !== 0) return REASON.malformed;
  if (offset !== 0) {
    // RFC 1858: a second fragment that rewrites the TCP header; RFC 791: none may end past the largest datagram.
    if (payload === 0 || offset + total > 65535 || (protocol === PROTO_TCP && offset === 8)) return REASON.malformed;
    return 0;
  }
  const l4 = at + header;
  switch (protocol) {
    case PROTO_TCP: {
      if (payload < 20) return REASON.malformed;
      const tcpHeader = (bytes[l4 + 12]! >> 4) << 2;
      return tcpHeader < 20 || tcpHeader > payload ? REASON.malformed : 0;
    }
    case PROTO_UDP: {
      if (payload < 8) return REASON.malformed;
      const udpLength = (bytes[l4 + 4]! << 8) | bytes[l4 + 5]!;
      // The length of a fragmented datagram exceeds its first fragment; that is not a lie.
      return udpLength < 8 || (udpLength > payload && (fragment & FLAG_MF) === 0) ? REASON.malformed : 0;
    }
    case PROTO_ICMP:
      return payload < 8 ? REASON['icmp-malformed'] : 0;
    default:
      return 0;
  }
}

export function headerLength(bytes: Uint8Array, at: number): number {
  return (bytes[at]! & 15) << 2;
}

export function tos(bytes: Uint8Array, at: number): number {
  return bytes[at + 1]!;
}

export function totalLength(bytes: Uint8Array, at: number): number {
  return (bytes[at + TOTAL_LENGTH]! << 8) | bytes[at + TOTAL_LENGTH + 1]!;
}

export function identification(bytes: Uint8Array, at: number): number {
  return (bytes[at + ID]! << 8) | bytes[at + ID + 1]!;
}

/** Flags and offset together: 0 or DF alone means the packet is no fragment. */
export function fragmentField(bytes: Uint8Array, at: number): number {
  return (bytes[at + FRAGMENT]! << 8) | bytes[at + FRAGMENT + 1]!;
}

export function isFragment(bytes: Uint8Array, at: number): boolean {
  return (fragmentField(bytes, at) & 0x3fff) !== 0;
}

/** In bytes. */
export function fragmentOffset(bytes: Uint8Array, at: number): number {
  return (fragmentField(bytes, at) & 0x1fff) << 3;
}

export function ttl(bytes: Uint8Array, at: number): number {
  return bytes[at + TTL]!;
}

export function protocol(bytes: Uint8Array, at: number): number {
  return bytes[at + PROTOCOL]!;
}

export function source(view: DataView, at: number): number {
  return view.getInt32(at + SOURCE);
}

export function destination(view: DataView, at: number): number {
  return view.getInt32(at + DESTINATION);
}

export function setSource(view: DataView, at: number, address: number): void {
  view.setInt32(at + SOURCE, address);
}

export function setDestination(view: DataView, at: number, address: number): void {
  view.setInt32(at + DESTINATION, address);
}

export function setTotalLength(view: DataView, at: number, length: number): void {
  view.setUint16(at + TOTAL_LENGTH, length);
}

export function setIdentification(view: DataView, at: number, id: number): void {
  view.setUint16(at + ID, id);
}

/** Flags and offset together, as `fragmentField` reads them. */
export function setFragmentField(view: DataView, at: number, field: number): void {
  view.setUint16(at + FRAGMENT, field);
}

/** Where the header checksum stands, for a difference update. */
export function checksumOffset(at: number): number {
  return at + CHECKSUM;
}

/** Computes the header checksum anew. */
export function storeChecksum(bytes: Uint8Array, at: number): void {
  bytes[at + CHECKSUM] = 0;
  bytes[at + CHECKSUM + 1] = 0;
  storeFull(bytes, at + CHECKSUM, sum(bytes, at, headerLength(bytes, at)));
}

/**
 * Writes a 20-byte header with its checksum: DF set, id 0 (RFC 6864: an atomic datagram's id means nothing).
 */
export function writeHeader(
  view: DataView,
  bytes: Uint8Array,
  at: number,
  totalBytes: number,
  proto: number,
  src: number,
  dst: number,
  tosByte = 0,
): void {
  bytes[at] = 0x45;
  bytes[at + 1] = tosByte;
  view.setUint16(at + TOTAL_LENGTH, totalBytes);
  view.setUint16(at + ID, 0);
  view.setUint16(at + FRAGMENT, FLAG_DF);
  bytes[at + TTL] = 64;
  bytes[at + PROTOCOL] = proto;
  view.setInt32(at + SOURCE, src);
  view.setInt32(at + DESTINATION, dst);
  storeChecksum(bytes, at);
}
