import type { PacketMemory } from '../io/device.js';
import { isOneHost } from '../wire/address.js';
import { adjustFull, difference16, pseudoHeaderSum, storeFull, sum, sumPayload } from '../wire/checksum.js';
import * as icmp from '../wire/icmp.js';
import * as ipv4 from '../wire/ipv4.js';
import * as tcp from '../wire/tcp.js';
import * as udp from '../wire/udp.js';
import * as vnet from '../wire/vnet.js';

/**
 * Packets weir makes itself. An answer is built in the slot of the packet it answers; nothing is allocated, and the packet
 * is gone afterwards. All begin with a 20-byte header (TTL 64) and a clear vnet header, and have full checksums.
 *
 * An ICMP error needs no copying at all: its headers are prepended, and the packet itself becomes the quote.
 *
 *     slot: | headroom              | vnet | IP packet .............. |
 *     error:        | vnet | IP 20 | ICMP 8 | quote ..... |   <- at most 576 in all
 *
 * The quote must be the packet that the client sent, not what the kernel's offloads made of it: a checksum in partial form is
 * completed, and of a super-packet the first segment is quoted, length, flags and checksum as they were on the wire.
 */

/** Where an answer lies; owned by the caller and reused. */
export interface Answer {
  /** Of the IP header, in the packet memory. */
  offset: number;
  /** Bytes from the IP header on. */
  length: number;
}

/** RFC 1812 4.3.2.3: as much of the packet as possible without exceeding 576 bytes in all. */
const MAX_ERROR_BYTES = 576;

/** RFC 1812 4.3.2.5: errors have precedence 6, internetwork control. */
const TOS_INTERNETWORK_CONTROL = 0xc0;

const ERROR_HEADER_BYTES = ipv4.IPV4_HEADER_BYTES + icmp.ICMP_HEADER_BYTES;

/**
 * Whether a packet that `ipv4.check()` accepted may be answered at all (RFC 1122 3.2.2). Not if it is an RST, an ICMP
 * message other than an echo request (errors are never answered, unknown types silently discarded), a fragment but the
 * first, addressed to many hosts, or from a source that is not one host or is the destination itself.
 */
export function mayAnswer(bytes: Uint8Array, view: DataView, at: number): boolean {
  const source = ipv4.source(view, at);
  const destination = ipv4.destination(view, at);
  if (!isOneHost(source) || source === destination || destination >>> 28 >= 14) return false;
  if (ipv4.fragmentOffset(bytes, at) !== 0) return false;
  const l4 = at + ipv4.headerLength(bytes, at);
  switch (ipv4.protocol(bytes, at)) {
    case ipv4.PROTO_TCP:
      return (tcp.flags(bytes, l4) & tcp.RST) === 0;
    case ipv4.PROTO_ICMP:
      return icmp.type(bytes, l4) === icmp.ECHO_REQUEST;
    default:
      return true;
  }
}

/**
 * Turns a TCP segment into the RST that refuses it (RFC 9293 3.10.7.1). `length` is that of the IP packet; a super-packet
 * counts with all its data. The caller has asked `mayAnswer`.
 */
export function answerRst(memory: PacketMemory, at: number, length: number, into: Answer): void {
  const { bytes, view } = memory;
  const l4 = at + ipv4.headerLength(bytes, at);
  const flags = tcp.flags(bytes, l4);
  const ports = tcp.ports(view, l4);
  const source = ipv4.source(view, at);
  const destination = ipv4.destination(view, at);
  let sequence = 0;
  let acknowledgement = 0;
  let answerFlags = tcp.RST;
  if ((flags & tcp.ACK) !== 0) sequence = tcp.acknowledgement(view, l4);
  else {
    const data = at + length - l4 - tcp.dataOffset(bytes, l4);
    acknowledgement = tcp.sequence(view, l4) + data + ((flags & tcp.SYN) !== 0 ? 1 : 0) + (flags & tcp.FIN);
    answerFlags |= tcp.ACK;
  }
  const swapped = (ports << 16) | (ports >>> 16);
  buildRst(memory, at, destination, source, swapped, sequence, acknowledgement, answerFlags, into);
}

/**
 * Writes an RST at `at`: to refuse a segment, or to cut a connection, when `sequence` is the next byte the receiver
 * expects.
 *
 * @param ports source port << 16 | destination port
 * @param acknowledgement goes with the ACK flag; 0 without
 * @param flags RST, or RST | ACK
 */
export function buildRst(
  memory: PacketMemory,
  at: number,
  source: number,
  destination: number,
  ports: number,
  sequence: number,
  acknowledgement: number,
  flags: number,
  into: Answer,
): void {
  const { bytes, view } = memory;
  const l4 = at + ipv4.IPV4_HEADER_BYTES;
  ipv4.writeHeader(view, bytes, at, l4 + tcp.TCP_HEADER_BYTES - at, ipv4.PROTO_TCP, source, destination);
  view.setInt32(l4, ports);
  view.setInt32(l4 + 4, sequence);
  view.setInt32(l4 + 8, acknowledgement);
  view.setUint16(l4 + 12, (5 << 12) | flags);
  view.setInt32(l4 + 14, 0); // window and checksum
  view.setUint16(l4 + 18, 0);
  storeFull(
    bytes,
    l4 + tcp.TCP_CHECKSUM,
    pseudoHeaderSum(source, destination, ipv4.PROTO_TCP, tcp.TCP_HEADER_BYTES) + sum(bytes, l4, tcp.TCP_HEADER_BYTES),
  );
  vnet.clear(bytes, at);
  into.offset = at;
  into.length = ipv4.IPV4_HEADER_BYTES + tcp.TCP_HEADER_BYTES;
}

/**
 * Turns a packet into the ICMP destination unreachable that refuses it, from the address it was sent to: call it before
 * the packet is rewritten. Needs 38 bytes before `at`. The caller has asked `mayAnswer`.
 *
 * @param length of the IP packet
 * @param code of DESTINATION_UNREACHABLE
 * @param mtu next-hop MTU for FRAGMENTATION_NEEDED (RFC 1191), else 0
 */
export function answerUnreachable(
  memory: PacketMemory,
  at: number,
  length: number,
  code: number,
  mtu: number,
  into: Answer,
): void {
  const { bytes, view } = memory;
  const source = ipv4.destination(view, at);
  const destination = ipv4.source(view, at);
  const quoteBytes = Math.min(undoOffload(view, bytes, at, length), MAX_ERROR_BYTES - ERROR_HEADER_BYTES);
  const outer = at - ERROR_HEADER_BYTES;
  const l4 = at - icmp.ICMP_HEADER_BYTES;
  const total = ERROR_HEADER_BYTES + quoteBytes;
  ipv4.writeHeader(view, bytes, outer, total, ipv4.PROTO_ICMP, source, destination, TOS_INTERNETWORK_CONTROL);
  bytes[l4] = icmp.DESTINATION_UNREACHABLE;
  bytes[l4 + 1] = code;
  view.setInt32(l4 + 2, 0); // checksum and the unused half
  view.setUint16(l4 + 6, mtu);
  storeFull(bytes, l4 + icmp.ICMP_CHECKSUM, sum(bytes, l4, icmp.ICMP_HEADER_BYTES + quoteBytes));
  vnet.clear(bytes, outer);
  into.offset = outer;
  into.length = total;
}

/**
 * Writes, at `at`, an ICMP port unreachable for a UDP flow that is cut while no packet of it is at hand: it quotes a
 * datagram without data. Needs 38 bytes before `at`.
 *
 * @param source whom the quoted datagram came from, and so who is told
 * @param destination whom it was sent to, and so who tells
 * @param ports of the quoted datagram, source << 16 | destination
 */
export function buildPortUnreachable(
  memory: PacketMemory,
  at: number,
  source: number,
  destination: number,
  ports: number,
  into: Answer,
): void {
  const { bytes, view } = memory;
  const l4 = at + ipv4.IPV4_HEADER_BYTES;
  const total = ipv4.IPV4_HEADER_BYTES + udp.UDP_HEADER_BYTES;
  ipv4.writeHeader(view, bytes, at, total, ipv4.PROTO_UDP, source, destination);
  view.setInt32(l4, ports);
  view.setInt32(l4 + 4, udp.UDP_HEADER_BYTES << 16); // no checksum
  vnet.clear(bytes, at);
  answerUnreachable(memory, at, total, icmp.PORT_UNREACHABLE, 0, into);
}

/**
 * Turns an echo request that is no fragment into its reply (RFC 1122 3.2.2.6): data, TOS, DF and identification are kept, IP
 * options are not. A wrong checksum stays as wrong as it was.
 */
export function answerEcho(memory: PacketMemory, at: number, length: number, into: Answer): void {
  const { bytes, view } = memory;
  const l4 = at + ipv4.headerLength(bytes, at);
  const icmpBytes = at + length - l4;
  const source = ipv4.destination(view, at);
  const destination = ipv4.source(view, at);
  const tos = ipv4.tos(bytes, at);
  // Without DF the reply may be fragmented on its way: the identification must then tell it from others. The request's does,
  // it being unique to (source, destination, protocol) and so are they, exchanged.
  const id = ipv4.identification(bytes, at);
  const fragment = ipv4.fragmentField(bytes, at);

  const typeAndCode = view.getUint16(l4);
  view.setUint16(l4, icmp.ECHO_REPLY << 8);
  if (vnet.isPartial(bytes, at, l4)) storeFull(bytes, l4 + icmp.ICMP_CHECKSUM, sum(bytes, l4, icmpBytes));
  else {
    adjustFull(bytes, l4 + icmp.ICMP_CHECKSUM, difference16(typeAndCode, icmp.ECHO_REPLY << 8));
    // The one case a difference cannot tell: a message of zeros, whose checksum is ffff (RFC 1624 section 3).
    if (view.getUint16(l4 + icmp.ICMP_CHECKSUM) === 0) {
      storeFull(bytes, l4 + icmp.ICMP_CHECKSUM, sum(bytes, l4, icmpBytes));
    }
  }

  const start = l4 - ipv4.IPV4_HEADER_BYTES;
  const total = ipv4.IPV4_HEADER_BYTES + icmpBytes;
  ipv4.writeHeader(view, bytes, start, total, ipv4.PROTO_ICMP, source, destination, tos);
  ipv4.setIdentification(view, start, id);
  ipv4.setFragmentField(view, start, fragment & ipv4.FLAG_DF);
  ipv4.storeChecksum(bytes, start);
  vnet.clear(bytes, start);
  into.offset = start;
  into.length = total;
}

/**
 * Makes of the packet at `at` what its sender put on the wire: the first segment of a super-packet, and its L4 checksum
 * in full form. The vnet header stays as it is and no longer describes the packet.
 *
 * @returns the length of the IP packet.
 */
function undoOffload(view: DataView, bytes: Uint8Array, at: number, length: number): number {
  const protocol = ipv4.protocol(bytes, at);
  if (protocol !== ipv4.PROTO_TCP && protocol !== ipv4.PROTO_UDP) return length;
  if (ipv4.isFragment(bytes, at)) return length; // no offload makes fragments
  const isTcp = protocol === ipv4.PROTO_TCP;
  const l4 = at + ipv4.headerLength(bytes, at);
  const segment = vnet.gsoSize(bytes, at);
  const wanted = isTcp ? vnet.GSO_TCPV4 : vnet.GSO_UDP_L4;
  let total = length;
  if (vnet.gsoType(bytes, at) === wanted && segment !== 0) {
    const headers = l4 - at + (isTcp ? tcp.dataOffset(bytes, l4) : udp.UDP_HEADER_BYTES);
    if (headers + segment < length) {
      total = headers + segment;
      ipv4.setTotalLength(view, at, total);
      ipv4.storeChecksum(bytes, at);
      // FIN and PSH are the last segment's.
      if (isTcp) bytes[l4 + 13]! &= ~(tcp.FIN | tcp.PSH);
      else view.setUint16(l4 + 4, udp.UDP_HEADER_BYTES + segment);
    }
  }
  const partial = vnet.isPartial(bytes, at, l4);
  if (total === length && !partial) return length;

  const checksumAt = l4 + (isTcp ? tcp.TCP_CHECKSUM : udp.UDP_CHECKSUM);
  if (!isTcp && !partial && view.getUint16(checksumAt) === 0) return total;
  const l4Bytes = isTcp ? at + total - l4 : udp.length(bytes, l4);
  const source = ipv4.source(view, at);
  const destination = ipv4.destination(view, at);
  view.setUint16(checksumAt, 0);
  const covered = pseudoHeaderSum(source, destination, protocol, l4Bytes) + sumPayload(view, l4, l4Bytes);
  if (isTcp) storeFull(bytes, checksumAt, covered);
  else udp.storeChecksum(bytes, l4, covered);
  return total;
}
