/**
 * struct virtio_net_hdr as a TUN device with IFF_VNET_HDR prepends it (linux/virtio_net.h; little endian on every machine
 * weir runs on). It stands right before the packet in every slot, also on devices that have no such header, where it is zero:
 * the data path then need not know what kind of device a packet came from.
 *
 *     0 flags u8 | 1 gso_type u8 | 2 hdr_len u16 | 4 gso_size u16 | 6 csum_start u16 | 8 csum_offset u16
 */

export const VNET_HEADER_BYTES = 10;

/** flags: the L4 checksum is in partial form and covers csum_start to the end. */
export const NEEDS_CSUM = 1;

export const GSO_TCPV4 = 1;
export const GSO_UDP_L4 = 5;
/** Or-ed into gso_type: the TCP super-packet has CWR set. */
export const GSO_ECN = 0x80;

/** Where L4 begins after an IPv4 header without options. */
const L4_START = 20;

/** Whether the L4 checksum of the packet at `at`, whose L4 header is at `l4`, is in partial form. */
export function isPartial(bytes: Uint8Array, at: number, l4: number): boolean {
  // csum_start names another header when the packet itself carries a tunnel; its own checksum is then full.
  return (bytes[at - 10]! & NEEDS_CSUM) !== 0 && (bytes[at - 4]! | (bytes[at - 3]! << 8)) === l4 - at;
}

export function gsoType(bytes: Uint8Array, at: number): number {
  return bytes[at - 9]! & 0x7f;
}

export function gsoSize(bytes: Uint8Array, at: number): number {
  return bytes[at - 6]! | (bytes[at - 5]! << 8);
}

/** The segments of the super-packet at `at` are to be of so many bytes. */
export function setGsoSize(view: DataView, at: number, segmentBytes: number): void {
  view.setUint16(at - 6, segmentBytes, true);
}

/** No offload: what weir writes into the header of a packet it made itself. */
export function clear(bytes: Uint8Array, at: number): void {
  bytes.fill(0, at - VNET_HEADER_BYTES, at);
}

/**
 * Describes the IPv4 packet at `at`, whose header has no options, as one write of several UDP datagrams with the same header: the
 * kernel cuts its payload every `segmentBytes`. Its UDP checksum must be in partial form.
 */
export function describeUdpSegments(view: DataView, at: number, segmentBytes: number): void {
  const header = at - VNET_HEADER_BYTES;
  view.setUint8(header, NEEDS_CSUM);
  view.setUint8(header + 1, GSO_UDP_L4);
  view.setUint16(header + 2, L4_START + 8, true);
  view.setUint16(header + 4, segmentBytes, true);
  view.setUint16(header + 6, L4_START, true);
  view.setUint16(header + 8, 6, true);
}

/**
 * The same of TCP: a super-packet, whose headers take `headerBytes` and are repeated for every segment. Its TCP checksum must be in
 * partial form.
 */
export function describeTcpSegments(view: DataView, at: number, headerBytes: number, segmentBytes: number): void {
  const header = at - VNET_HEADER_BYTES;
  view.setUint8(header, NEEDS_CSUM);
  view.setUint8(header + 1, GSO_TCPV4);
  view.setUint16(header + 2, headerBytes, true);
  view.setUint16(header + 4, segmentBytes, true);
  view.setUint16(header + 6, L4_START, true);
  view.setUint16(header + 8, 16, true);
}

/** Moves the header along when the packet's start moves within its slot. */
export function move(bytes: Uint8Array, from: number, to: number): void {
  bytes.copyWithin(to - VNET_HEADER_BYTES, from - VNET_HEADER_BYTES, from);
}
