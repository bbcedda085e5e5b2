/** UDP (RFC 768), after `ipv4.check()`. Ports are read with `tcp.ports`: both protocols begin with them. */

export const UDP_HEADER_BYTES = 8;

/** Where the checksum stands; a stored 0 means that there is none. */
export const UDP_CHECKSUM = 6;

export function length(bytes: Uint8Array, l4: number): number {
  return (bytes[l4 + 4]! << 8) | bytes[l4 + 5]!;
}

export function checksum(bytes: Uint8Array, l4: number): number {
  return (bytes[l4 + UDP_CHECKSUM]! << 8) | bytes[l4 + UDP_CHECKSUM + 1]!;
}
