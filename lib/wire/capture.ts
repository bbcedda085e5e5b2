/** What pcap and pcapng have in common. */

/** Link types (https://www.tcpdump.org/linktypes.html). */
export const LINK_ETHERNET = 1;
export const LINK_RAW = 101;
export const LINK_IPV4 = 228;
export const LINK_IPV6 = 229;

/** No link layer has larger packets; a length beyond is a sign of reading at the wrong place. */
export const MAX_CAPTURED_BYTES = 1 << 20;

/** A packet of a capture. One object per reader, overwritten by each `next`; `bytes` stays valid until then. */
export interface CapturedPacket {
  bytes: Uint8Array;
  /** Of the link-layer header. */
  offset: number;
  /** What was captured, which may be less than what was on the wire. */
  length: number;
  linkType: number;
  /** Since the epoch; both 0 for a packet without a time (`timed` false). */
  seconds: number;
  nanoseconds: number;
  timed: boolean;
}

export interface CaptureReader {
  readonly packet: CapturedPacket;

  /** Whether times are finer than microseconds: of the file, or of the interface of the current packet. */
  readonly nanosecond: boolean;

  /**
   * Reads the next packet into `packet`.
   *
   * @returns false at the end.
   * @throws WeirError CAPTURE_INVALID: what is wrong, and at which offset.
   */
  next(): boolean;
}

export function newPacket(): CapturedPacket {
  return { bytes: new Uint8Array(0), offset: 0, length: 0, linkType: 0, seconds: 0, nanoseconds: 0, timed: true };
}
