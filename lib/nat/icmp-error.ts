import { REASON } from '../base/reasons.js';
import { adjustFull, difference32, fold, storeFull, sum } from '../wire/checksum.js';
import * as icmp from '../wire/icmp.js';
import * as ipv4 from '../wire/ipv4.js';
import { ports as portsOf, TCP_CHECKSUM } from '../wire/tcp.js';
import * as vnet from '../wire/vnet.js';
import { adjustUdp, rewriteAddresses } from './rewrite.js';

/**
 * ICMP errors belong to the flow they quote (RFC 5508 section 4).
 *
 * An error travels back to whoever sent the packet it quotes, and quotes it as it was at the place that complains: behind
 * weir, translated; before weir, not. The receiver only believes an error that quotes a packet as it sent it itself. So the
 * quote is turned back into what its sender sent, and the error gets the receiver's address:
 *
 *     the flow           client C:c -> VIP V:v    |weir|    R:r -> B:b backend        (dnat: R:r is C:c; snat: of the pool)
 *
 *     backend side       something behind weir complains about a packet of the client
 *       arrives          outer  X -> R                      quote  R:r -> B:b
 *       leaves           outer  X -> C  (V -> C if X is B)  quote  C:c -> V:v
 *
 *     client side        something before weir complains about a packet of the backend
 *       arrives          outer  X -> V                      quote  V:v -> C:c
 *       leaves           outer  X -> B  (R -> B if X is C)  quote  B:b -> R:r
 *
 * Which flow, in the caller's terms: the quoted tuple with its two ends exchanged is the tuple that a packet in the other
 * direction has. Backend side: B:b -> R:r, the record's reply key. Client side: C:c -> V:v, its original key.
 *
 * A router's outer source X is kept, as it says where the trouble is; the backend's own must not be seen by a client that
 * only knows V, and becomes V. In snat the same holds for the client, which the backend only knows as R.
 *
 * Checksums. The outer ICMP checksum covers everything and is verified before anything is believed, so it can be computed
 * anew. Those within the quote are adjusted by difference: routers change TTLs, and some quote the header with the old
 * checksum; what was right stays right and what was not is no worse. The quote may end after 8 bytes of L4: there a
 * TCP checksum is not quoted, a UDP checksum is. Next-hop MTU, pointer and code are untouched, and so are multi-part extensions
 * (RFC 4884), which lie beyond the quoted datagram.
 *
 * Rejected: verifying the quoted checksums (above); looking at TCP sequence numbers here: RFC 5927 4.1 asks for it, and the
 * 8 bytes hold the number (`tcp.sequence(view, quote.l4)`), but only the flow's record knows the window.
 */

/** What an ICMP error quotes; owned by the caller and reused. Offsets are into the packet memory, addresses signed words. */
export interface Quote {
  /** Of the quoted IPv4 header. */
  at: number;
  /** Of the quoted L4 header, of which 8 bytes are there at least. */
  l4: number;
  /** Where the quoted datagram, or what is quoted of it, ends; extensions may follow. */
  end: number;
  /** Where the ICMP message ends. */
  messageEnd: number;
  protocol: number;
  source: number;
  destination: number;
  /** source port << 16 | destination port; of an echo message, its identifier in both halves. */
  ports: number;
}

/** An empty quote to parse into. */
export function makeQuote(): Quote {
  return { at: 0, l4: 0, end: 0, messageEnd: 0, protocol: 0, source: 0, destination: 0, ports: 0 };
}

const QUOTED_L4_BYTES = 8;

/** RFC 4884 3: with extensions, at least this much of the datagram is quoted, zero-padded. */
const EXTENDED_QUOTE_BYTES = 128;

/**
 * Reads the quote of the ICMP error at `at`, which `ipv4.check()` accepted, `icmp.isError()` knows and which is no fragment.
 *
 * @param l4 of the ICMP header
 * @param end of the packet, as its total length says
 * @returns 0, or the id of a reason. `icmp-malformed`: the ICMP checksum is wrong, the quoted header is short or
 * contradicts itself, or less than 8 bytes follow it. `icmp-unknown-flow`: the message is well-formed but no flow of weir's
 * can be meant, since it quotes a fragment other than the first, a protocol without ports, an ICMP error (which nobody may
 * complain about), or a packet of another sender than the one it is addressed to.
 */
export function parseQuote(
  view: DataView,
  bytes: Uint8Array,
  at: number,
  l4: number,
  end: number,
  into: Quote,
): number {
  if (fold(sum(bytes, l4, end - l4)) !== 0xffff && !vnet.isPartial(bytes, at, l4)) return REASON['icmp-malformed'];

  const quote = l4 + icmp.ICMP_HEADER_BYTES;
  if (end - quote < ipv4.IPV4_HEADER_BYTES + QUOTED_L4_BYTES || bytes[quote]! >> 4 !== 4)
    return REASON['icmp-malformed'];
  const header = ipv4.headerLength(bytes, quote);
  const quotedTotal = ipv4.totalLength(bytes, quote);
  const shortest = header + QUOTED_L4_BYTES;
  if (header < ipv4.IPV4_HEADER_BYTES || quotedTotal < shortest || end - quote < shortest)
    return REASON['icmp-malformed'];
  if (ipv4.fragmentOffset(bytes, quote) !== 0) return REASON['icmp-unknown-flow'];

  const quotedL4 = quote + header;
  const protocol = ipv4.protocol(bytes, quote);
  into.at = quote;
  into.l4 = quotedL4;
  into.end = quote + Math.min(quotedTotal, quotedBytes(bytes, l4, end - quote));
  into.messageEnd = end;
  into.protocol = protocol;
  into.source = ipv4.source(view, quote);
  into.destination = ipv4.destination(view, quote);
  if (into.source !== ipv4.destination(view, at)) return REASON['icmp-unknown-flow'];
  switch (protocol) {
    case ipv4.PROTO_TCP:
    case ipv4.PROTO_UDP:
      into.ports = portsOf(view, quotedL4);
      return 0;
    case ipv4.PROTO_ICMP: {
      const type = icmp.type(bytes, quotedL4);
      if (type !== icmp.ECHO_REQUEST && type !== icmp.ECHO_REPLY) return REASON['icmp-unknown-flow'];
      const identifier = view.getUint16(quotedL4 + 4);
      into.ports = (identifier << 16) | identifier;
      return 0;
    }
    default:
      return REASON['icmp-unknown-flow'];
  }
}

/**
 * Translates the error whose quote was parsed: another outer source and destination, and other addresses and ports in the
 * quote; every checksum follows. The length stays. Ports of quoted echo messages are not changed.
 *
 * @param quotedPorts source port << 16 | destination port, as they are to be
 */
export function translateError(
  view: DataView,
  bytes: Uint8Array,
  at: number,
  l4: number,
  quote: Quote,
  source: number,
  destination: number,
  quotedSource: number,
  quotedDestination: number,
  quotedPorts: number,
): void {
  rewriteAddresses(view, bytes, at, source, destination);
  translateQuote(view, bytes, quote, quotedSource, quotedDestination, quotedPorts);

  view.setUint16(l4 + icmp.ICMP_CHECKSUM, 0);
  storeFull(bytes, l4 + icmp.ICMP_CHECKSUM, sum(bytes, l4, quote.messageEnd - l4));
  vnet.clear(bytes, at);
}

function translateQuote(
  view: DataView,
  bytes: Uint8Array,
  quote: Quote,
  source: number,
  destination: number,
  ports: number,
): void {
  let difference = rewriteAddresses(view, bytes, quote.at, source, destination);
  if (quote.protocol === ipv4.PROTO_ICMP) return;
  difference += difference32(quote.ports, ports);
  view.setInt32(quote.l4, ports);
  if (quote.protocol === ipv4.PROTO_UDP) adjustUdp(bytes, quote.l4, difference);
  else if (quote.l4 + TCP_CHECKSUM + 2 <= quote.end) adjustFull(bytes, quote.l4 + TCP_CHECKSUM, difference);
}

/**
 * How much of the datagram the message of which `available` bytes follow the ICMP header quotes. The length attribute of
 * RFC 4884 says so in words, where there is one; routers from before it leave the byte zero, or not.
 */
function quotedBytes(bytes: Uint8Array, l4: number, available: number): number {
  const type = icmp.type(bytes, l4);
  const hasLength =
    type === icmp.DESTINATION_UNREACHABLE || type === icmp.TIME_EXCEEDED || type === icmp.PARAMETER_PROBLEM;
  if (!hasLength) return available;
  const claimed = bytes[l4 + 5]! << 2;
  return claimed >= EXTENDED_QUOTE_BYTES && claimed <= available ? claimed : available;
}
