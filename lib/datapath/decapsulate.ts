import { contains } from '../balance/ranges.js';
import { REASON } from '../base/reasons.js';
import { packetOffset } from '../io/device.js';
import { Coalescer } from '../tunnel/coalesce.js';
import { mergeEcn } from '../tunnel/ecn.js';
import { checkGeneve, makeGeneveContent } from '../wire/geneve.js';
import * as ipv4 from '../wire/ipv4.js';
import * as tcp from '../wire/tcp.js';
import * as vnet from '../wire/vnet.js';
import type { Core } from './core.js';
import type { NamedVip } from './endpoints.js';
import { STAT_RX_BYTES, STAT_RX_PACKETS } from './stats.js';

/**
 * The end of the tunnel: datagrams in, packets of clients out, neighbouring segments of one flow joined on a device that takes
 * super-packets (coalesce.ts).
 *
 *     row of one datagram       | headroom | geneve | packet |                      stays where it is
 *     row of joined datagrams   | headroom | geneve | packet | geneve | packet | ...   each packet is copied into a slot
 *
 * One packet is in hand, its slot the stage's. The next segment is added to it; anything else sends it on its way first, so
 * that packets leave in the order they came. `settle` at the end of a batch.
 *
 * What is refused: datagrams of others than the peers (`not-in-source-range`); what `checkGeneve` and `ipv4.check` refuse; a
 * tunnel within the tunnel, which would come back to this socket, or reach another node in this one's name, and a congestion
 * mark on a packet that cannot carry it (`geneve-malformed`).
 */
export class TunnelStage {
  readonly #core: Core;
  readonly #arrive: (named: NamedVip) => void;
  readonly #coalescer: Coalescer;
  readonly #joins: boolean;
  readonly #content = makeGeneveContent();

  /** Of the packet in hand; -1: there is none. */
  #slot = -1;
  #row = 0;
  readonly #named: NamedVip = { isThere: false, vip: 0, vipPort: 0 };

  /** @param arrive takes the packet that the core then has in hand to its end */
  constructor(core: Core, arrive: (named: NamedVip) => void) {
    this.#core = core;
    this.#arrive = arrive;
    this.#coalescer = new Coalescer(core.output.memory);
    this.#joins = core.output.features.vnetHeader;
  }

  /** Takes a row of datagrams, and its slot. */
  receive(
    row: number,
    slot: number,
    offset: number,
    length: number,
    datagramBytes: number,
    peer: number,
    tos: number,
  ): void {
    if (length <= datagramBytes) {
      this.#datagram(row, slot, offset, length, peer, tos, true);
      return;
    }
    for (let from = 0; from < length; from += datagramBytes) {
      this.#datagram(row, slot, offset + from, Math.min(datagramBytes, length - from), peer, tos, false);
    }
    this.#core.output.release(slot);
  }

  /** Sends the packet in hand on its way. */
  settle(): void {
    if (this.#slot < 0) return;
    const { packet, view, bytes } = this.#core;
    this.#coalescer.finish();
    packet.row = this.#row;
    packet.slot = this.#slot;
    packet.at = this.#coalescer.at;
    packet.load(view, bytes);
    this.#slot = -1;
    this.#arrive(this.#named);
  }

  /** @param isOwner whether the slot is this datagram's alone */
  #datagram(
    row: number,
    slot: number,
    offset: number,
    length: number,
    peer: number,
    tos: number,
    isOwner: boolean,
  ): void {
    const core = this.#core;
    const { bytes, packet, output, stats } = core;
    stats[STAT_RX_PACKETS]! += 1;
    stats[STAT_RX_BYTES]! += length;
    const content = this.#content;
    const reason = this.#judge(offset, length, peer, tos);
    if (reason !== 0) {
      packet.row = row;
      packet.slot = slot;
      if (isOwner) core.drop(reason);
      else core.refuse(reason);
      return;
    }
    const total = ipv4.totalLength(bytes, content.inner);
    if (this.#joins && this.#isSameVip() && this.#coalescer.append(content.inner, total)) {
      if (isOwner) output.release(slot);
      return;
    }
    this.settle();
    let own = slot;
    let at = content.inner;
    if (!isOwner) {
      own = output.take();
      if (own < 0) {
        packet.row = row;
        core.refuse(REASON['device-write']);
        return;
      }
      at = packetOffset(output.memory, own);
      bytes.copyWithin(at, content.inner, content.inner + total);
    }
    vnet.clear(bytes, at);
    this.#slot = own;
    this.#row = row;
    this.#named.isThere = content.hasVip;
    this.#named.vip = content.vip;
    this.#named.vipPort = content.vipPort;
    this.#coalescer.begin(own, at, total);
  }

  /** @returns 0, or the reason to drop the datagram; `content` then tells what is in it */
  #judge(offset: number, length: number, peer: number, tos: number): number {
    const { bytes, view, snapshot } = this.#core;
    const content = this.#content;
    const { peers } = snapshot.node!;
    if (peers !== null && !contains(peers, 0, peer)) return REASON['not-in-source-range'];
    const malformed = checkGeneve(bytes, view, offset, length, content);
    if (malformed !== 0) return malformed;
    const { inner } = content;
    const refusal = ipv4.check(bytes, inner, content.innerLength);
    if (refusal !== 0) return refusal;
    if (ipv4.protocol(bytes, inner) === ipv4.PROTO_UDP && ipv4.fragmentOffset(bytes, inner) === 0) {
      const ports = tcp.ports(view, inner + ipv4.headerLength(bytes, inner));
      if ((ports & 0xffff) === snapshot.tunnel.port) return REASON['geneve-malformed'];
    }
    return mergeEcn(view, bytes, inner, tos) ? 0 : REASON['geneve-malformed'];
  }

  #isSameVip(): boolean {
    const { hasVip, vip, vipPort } = this.#content;
    const named = this.#named;
    return this.#slot >= 0 && named.isThere === hasVip && named.vip === vip && named.vipPort === vipPort;
  }
}
