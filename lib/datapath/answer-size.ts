import { MAX_PACKET_BYTES, MAX_UDP_SEGMENTS } from '../base/limits.js';
import type { FlowTable } from '../conntrack/flow-table.js';
import { MARK_WINDOWS, MARKS, RECORD_BYTES, RECORD_WORDS, RX_ACKED, RX_END } from '../conntrack/record.js';
import type { Quote } from '../nat/icmp-error.js';
import { rewriteIdentification } from '../nat/rewrite.js';
import { PathMtus } from '../tunnel/path-mtu.js';
import { adjustFull, difference16, fold, pseudoHeaderSum } from '../wire/checksum.js';
import * as icmp from '../wire/icmp.js';
import * as ipv4 from '../wire/ipv4.js';
import * as tcp from '../wire/tcp.js';
import { UDP_HEADER_BYTES } from '../wire/udp.js';
import * as vnet from '../wire/vnet.js';
import type { Core } from './core.js';

/**
 * Path MTU towards clients, on a node. A backend in a container hears of a narrow path like any host, and sends less. A process of the
 * node's own host does not: when the kernel takes note of an error (RFC 1191) it looks up the way to the client without ports, so
 * that the policy rules, which name the backend's port, do not match. What it learns is kept with the route in `main`, while answers
 * go on leaving by the one in weir's table, and the same segment would be sent until the connection is given up.
 *
 * So what routers say is remembered here as well, by client, for ten minutes, and answers are made to fit on their way out:
 *
 *     TCP super-packet                  its segments are to be shorter: one number in the vnet header
 *     TCP segment                       becomes a super-packet of such segments, which the kernel cuts
 *     TCP, no vnet header on the device DF is taken off, and the kernel makes fragments, as routers did before RFC 1191
 *     UDP                               the same, with an identification that fragments can be told apart by
 *
 * An error is believed if the flow it quotes has an entry, the segment is one the client has not acknowledged (RFC 5927), and what got
 * stuck was larger than what the router takes. At less than 576 bytes nobody is believed.
 *
 * Rejected: routes with an `mtu` for such clients in weir's table (a process to be started for every client, and for whoever can
 * name one); rules without ports (every other service of the host would then learn nothing).
 */
export class AnswerSizes {
  readonly #core: Core;
  readonly #mtus = new PathMtus();
  #identification = 0;

  constructor(core: Core) {
    this.#core = core;
  }

  /** Notes what an ICMP error says about the path to the client of a record. @param l4 of the ICMP header */
  heed(l4: number, quote: Quote, table: FlowTable, record: number): void {
    const { bytes, view, nowMs } = this.#core;
    if (icmp.type(bytes, l4) !== icmp.DESTINATION_UNREACHABLE) return;
    if (icmp.code(bytes, l4) !== icmp.FRAGMENTATION_NEEDED) return;
    const mtu = icmp.nextHopMtu(view, l4);
    if (mtu >= ipv4.totalLength(bytes, quote.at)) return;
    if (quote.protocol === ipv4.PROTO_TCP && !isUnderWay(table, record, tcp.sequence(view, quote.l4))) return;
    this.#mtus.lower(quote.destination, mtu, nowMs);
  }

  /** Makes the answer in hand, as it is to leave, pass the path to its client. Fragments pass as they are. */
  fit(client: number): void {
    const { packet, bytes, view, output, nowMs } = this.#core;
    const mtu = this.#mtus.towards(client, MAX_PACKET_BYTES, nowMs);
    const { at, l4, length, protocol } = packet;
    const gso = vnet.gsoType(bytes, at);
    if ((gso === 0 && length <= mtu) || ipv4.isFragment(bytes, at)) return;
    const isTcp = protocol === ipv4.PROTO_TCP;
    const headers = l4 - at + (isTcp ? tcp.dataOffset(bytes, l4) : UDP_HEADER_BYTES);
    const room = mtu - headers;
    if (gso !== 0 && vnet.gsoSize(bytes, at) <= room) return;
    if (!isTcp || !output.features.vnetHeader || l4 - at !== ipv4.IPV4_HEADER_BYTES) this.#allowFragments();
    else if (gso !== 0) vnet.setGsoSize(view, at, room);
    else {
      const sum = pseudoHeaderSum(ipv4.source(view, at), ipv4.destination(view, at), protocol, length - (l4 - at));
      view.setUint16(l4 + tcp.TCP_CHECKSUM, fold(sum));
      vnet.describeTcpSegments(view, at, headers, room);
    }
  }

  #allowFragments(): void {
    const { packet, bytes, view } = this.#core;
    const { at } = packet;
    const field = ipv4.fragmentField(bytes, at);
    if ((field & ipv4.FLAG_DF) === 0) return;
    ipv4.setFragmentField(view, at, field & ~ipv4.FLAG_DF);
    adjustFull(bytes, ipv4.checksumOffset(at), difference16(field, field & ~ipv4.FLAG_DF));
    // Where DF is set the kernel often leaves it 0. A super-packet takes as many as it has datagrams.
    this.#identification = (this.#identification + MAX_UDP_SEGMENTS) & 0xffff;
    rewriteIdentification(view, bytes, at, this.#identification);
  }
}

/** Whether the backend has sent a segment of this sequence, and the client has not acknowledged it, as far as is known. */
function isUnderWay(table: FlowTable, record: number, sequence: number): boolean {
  if ((table.bytes[record * RECORD_BYTES + MARKS]! & MARK_WINDOWS) === 0) return true;
  const word = record * RECORD_WORDS;
  const { words } = table;
  return ((sequence - words[word + RX_ACKED]!) | 0) >= 0 && ((words[word + RX_END]! - sequence) | 0) > 0;
}
