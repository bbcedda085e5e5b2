import { storeFull } from './checksum.js';

/** UDP (RFC 768), after `ipv4.check()`. Ports are read with `tcp.ports`: both protocols begin with them. */

export const UDP_HEADER_BYTES = 8;

/** Where the checksum stands; a stored 0 means that there is none. */
export const UDP_CHECKSUM = 6;

export function length(bytes: Uint8Array, l4: number): number {
  return (bytes[l4 + 4]! << 8) | bytes[l4 + 5]!;
}

export function setLength(view: DataView, l4: number, lengthBytes: number): void {
  view.setUint16(l4 + 4, lengthBytes);
}

export function checksum(bytes: Uint8Array, l4: number): number {
  return (bytes[l4 + UDP_CHECKSUM]! << 8) | bytes[l4 + UDP_CHECKSUM + 1]!;
}

/** Writes a header without a checksum. */
export function writeHeader(view: DataView, l4: number, ports: number, lengthBytes: number): void {
  view.setInt32(l4, ports);
  view.setInt32(l4 + 4, lengthBytes << 16);
}

/** Stores the complement of `total` as the checksum; a computed 0 is sent as ffff (RFC 768). */
export function storeChecksum(bytes: Uint8Array, l4: number, total: number): void {
  const at = l4 + UDP_CHECKSUM;
  storeFull(bytes, at, total);
  if ((bytes[at]! | bytes[at + 1]!) === 0) {
    bytes[at] = 0xff;
    bytes[at + 1] = 0xff;
  }
}
