/** TCP (RFC 9293), after `ipv4.check()`. `l4` is the offset of the TCP header. */

export const TCP_HEADER_BYTES = 20;

export const FIN = 0x01;
export const SYN = 0x02;
export const RST = 0x04;
export const PSH = 0x08;
export const ACK = 0x10;
export const URG = 0x20;
export const ECE = 0x40;
export const CWR = 0x80;

/** Where the checksum stands. */
export const TCP_CHECKSUM = 16;

/** Both ports in one word: source << 16 | destination, as the flow table keys them. */
export function ports(view: DataView, l4: number): number {
  return view.getInt32(l4);
}

export function sequence(view: DataView, l4: number): number {
  return view.getInt32(l4 + 4);
}

export function acknowledgement(view: DataView, l4: number): number {
  return view.getInt32(l4 + 8);
}

export function dataOffset(bytes: Uint8Array, l4: number): number {
  return (bytes[l4 + 12]! >> 4) << 2;
}

export function flags(bytes: Uint8Array, l4: number): number {
  return bytes[l4 + 13]!;
}

export function setSequence(view: DataView, l4: number, seq: number): void {
  view.setInt32(l4 + 4, seq);
}

export function setFlags(bytes: Uint8Array, l4: number, tcpFlags: number): void {
  bytes[l4 + 13] = tcpFlags;
}

/** As on the wire, unscaled. */
export function window(bytes: Uint8Array, l4: number): number {
  return (bytes[l4 + 14]! << 8) | bytes[l4 + 15]!;
}

/** Bytes from the sequence number to the end of urgent data; means something with URG only. */
export function urgentPointer(view: DataView, l4: number): number {
  return view.getUint16(l4 + 18);
}

export function setUrgentPointer(view: DataView, l4: number, urgentBytes: number): void {
  view.setUint16(l4 + 18, urgentBytes);
}

/** A SYN that opens a connection: without ACK, RST and FIN; the ECN bits do not matter (RFC 3168). */
export function isOpeningSyn(tcpFlags: number): boolean {
  return (tcpFlags & (SYN | ACK | RST | FIN)) === SYN;
}

/** The window scale option's shift of a SYN or SYN-ACK, at most 14 (RFC 7323 2.3), or -1 when it has none. */
export function windowScale(bytes: Uint8Array, l4: number): number {
  const end = l4 + dataOffset(bytes, l4);
  let at = l4 + TCP_HEADER_BYTES;
  while (at < end) {
    const kind = bytes[at]!;
    if (kind === 0) return -1;
    if (kind === 1) {
      at++;
      continue;
    }
    if (at + 1 >= end) return -1;
    const length = bytes[at + 1]!;
    if (length < 2 || at + length > end) return -1;
    if (kind === 3 && length === 3) return Math.min(bytes[at + 2]!, 14);
    at += length;
  }
  return -1;
}
