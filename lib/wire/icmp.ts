/** ICMP (RFC 792), after `ipv4.check()`, which has seen its 8-byte header. `l4` is the offset of the ICMP header. */

export const ICMP_HEADER_BYTES = 8;

export const ECHO_REPLY = 0;
export const DESTINATION_UNREACHABLE = 3;
export const SOURCE_QUENCH = 4;
export const REDIRECT = 5;
export const ECHO_REQUEST = 8;
export const TIME_EXCEEDED = 11;
export const PARAMETER_PROBLEM = 12;

/** Codes of DESTINATION_UNREACHABLE. */
export const PROTOCOL_UNREACHABLE = 2;
export const PORT_UNREACHABLE = 3;
export const FRAGMENTATION_NEEDED = 4;

/** Where the checksum stands. */
export const ICMP_CHECKSUM = 2;

export function type(bytes: Uint8Array, l4: number): number {
  return bytes[l4]!;
}

export function code(bytes: Uint8Array, l4: number): number {
  return bytes[l4 + 1]!;
}

/** What the next hop takes, of a FRAGMENTATION_NEEDED; 0 from a router older than RFC 1191. */
export function nextHopMtu(view: DataView, l4: number): number {
  return view.getUint16(l4 + 6);
}

/** Whether the message is an error that quotes the packet it speaks of (RFC 1122 3.2.2). */
export function isError(icmpType: number): boolean {
  return (
    icmpType === DESTINATION_UNREACHABLE ||
    icmpType === SOURCE_QUENCH ||
    icmpType === REDIRECT ||
    icmpType === TIME_EXCEEDED ||
    icmpType === PARAMETER_PROBLEM
  );
}
