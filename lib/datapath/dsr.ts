import { flowHash } from '../balance/flow-hash.js';
import { lookup } from '../balance/lookup.js';
import { MAX_PACKET_BYTES } from '../base/limits.js';
import { REASON } from '../base/reasons.js';
import { ERROR_AT } from '../io/error-socket.js';
import { makeQuote, parseQuote, type Quote } from '../nat/icmp-error.js';
import { Cutter, FRAGMENTS, TCP_SEGMENTS, UDP_DATAGRAMS } from '../tunnel/cut.js';
import { encapsulate, makeTunnelRoute, overheadBytes, tunnelSourcePort } from '../tunnel/encapsulation.js';
import { type Lowered, PathMtus } from '../tunnel/path-mtu.js';
import { storeFull, sumPayload } from '../wire/checksum.js';
import * as icmp from '../wire/icmp.js';
import * as ipv4 from '../wire/ipv4.js';
import * as tcp from '../wire/tcp.js';
import * as udp from '../wire/udp.js';
import * as vnet from '../wire/vnet.js';
import type { Core } from './core.js';
import { BACKEND_NODE, BACKEND_WORDS } from './snapshot.js';

/** How the packet in hand goes through the tunnel; otherwise a kind of pieces (cut.ts). */
const WHOLE = -1;
const TOO_BIG = -2;
const FRAGMENTED_DATAGRAMS = -3;

/** How often errors that the kernel has kept are asked for, and how many are heard then. */
const LISTEN_INTERVAL_MS = 100;
const ERRORS_AT_ONCE = 16;

/**
 * Direct server return, the gateway's half: what leaves for a backend of a dsr service is put into a tunnel to the backend's node,
 * translated already. Two steps, with the flow's bookkeeping in between:
 *
 *     accepts   the packet as it came: does it fit, as it is or in pieces? If not, its sender is told
 *     forward   the packet as the backend is to see it: headers in the headroom, or pieces in slots of their own
 *
 * So a packet that is refused leaves no trace in its flow, and the error quotes what the client sent.
 *
 *     the packet                                        what becomes of it
 *     TCP super-packet                                  segments, as long as they were meant to be or as fit
 *     UDP super-packet whose datagrams fit              datagrams
 *       that do not, without DF                         datagrams, each in fragments
 *     fits                                              goes as it is
 *     does not, without DF                              fragments of it
 *     does not, with DF                                 frag-needed from the VIP, unless nobody may be told
 *
 * A TCP packet above the device's MTU is a super-packet also where no vnet header says so, as in a capture: nothing else is that
 * large. Super-packets are cut to fit without a word to their sender, even where its segments do not: they are cut here in any
 * case.
 */
export class DsrStage {
  readonly #core: Core;
  readonly #cutter: Cutter;
  readonly #mtus: PathMtus;
  readonly #route = makeTunnelRoute();
  readonly #quote = makeQuote();
  #listenAtMs = Number.NEGATIVE_INFINITY;
  #overheadBytes = 0;

  // What `accepts` found out about the packet in hand.
  #kind = WHOLE;
  #pieceBytes = 0;
  #fragmentBytes = 0;

  constructor(core: Core) {
    this.#core = core;
    this.#cutter = new Cutter(core.output);
    this.#mtus = new PathMtus(core.memoryEntries);
  }

  use(): void {
    this.#overheadBytes = overheadBytes(this.#core.snapshot.tunnel.inner);
  }

  /** The node of a backend, an address word. */
  nodeOf(backend: number): number {
    return this.#core.snapshot.backends[backend * BACKEND_WORDS + BACKEND_NODE]!;
  }

  /** Whether the packet in hand, as it came, can go to a node. If not, this was its end: it was answered or dropped. */
  accepts(node: number): boolean {
    const core = this.#core;
    const { tunnel } = core.snapshot;
    if (tunnel.address === 0) {
      core.drop(REASON['unknown-flow']);
      return false;
    }
    const room = this.#mtus.towards(node, tunnel.mtu, core.nowMs) - this.#overheadBytes;
    this.#plan(room);
    if (this.#kind !== TOO_BIG) return true;
    core.rejectTooBig(room);
    return false;
  }

  /**
   * Sends the packet in hand, translated, to a node that `accepts` was asked about.
   *
   * @param client of the flow it belongs to, as are the next three
   * @param ports the client's << 16 | the VIP's
   * @param startsFlow the node must be told the VIP whatever the configuration says
   */
  forward(node: number, client: number, vip: number, ports: number, protocol: number, startsFlow: boolean): void {
    const core = this.#core;
    const { packet, snapshot, output } = core;
    const { tunnel } = snapshot;
    const { at, length } = packet;
    const kind = this.#kind;
    const route = this.#aim(node, client, vip, ports, protocol, startsFlow);
    core.lastNode = node;
    if (packet.partial && (kind === WHOLE || kind === FRAGMENTS)) this.#completeChecksum();
    if (kind === WHOLE) {
      core.forward(encapsulate(output.memory, at, length, tunnel, route));
      return;
    }
    if (kind === FRAGMENTS && ipv4.fragmentOffset(core.bytes, at) === 0) core.distinguish();
    const cutter = this.#cutter;
    const isSent =
      kind === FRAGMENTED_DATAGRAMS
        ? cutter.sendFragmented(at, length, this.#pieceBytes, this.#fragmentBytes, tunnel, route)
        : cutter.send(kind, at, length, this.#pieceBytes, tunnel, route);
    if (isSent) core.forwarded(cutter.writes, cutter.bytes);
    else core.drop(REASON['device-write']);
  }

  /**
   * Puts a small packet that weir made into the tunnel to a node; parameters as for `forward`.
   *
   * @returns the offset it is to be sent from.
   */
  wrap(at: number, length: number, node: number, client: number, vip: number, ports: number, protocol: number): number {
    const { output, snapshot } = this.#core;
    const route = this.#aim(node, client, vip, ports, protocol, false);
    return encapsulate(output.memory, at, length, snapshot.tunnel, route);
  }

  /**
   * What an ICMP error at `at` says about the path to a node is remembered; errors about anything else mean nothing here.
   *
   * @param l4 of the ICMP header
   * @param quote of the error, parsed
   */
  heed(view: DataView, bytes: Uint8Array, at: number, l4: number, quote: Quote): void {
    const { tunnel, nodeIndex } = this.#core.snapshot;
    if (ipv4.destination(view, at) !== tunnel.address || quote.protocol !== ipv4.PROTO_UDP) return;
    if (icmp.type(bytes, l4) !== icmp.DESTINATION_UNREACHABLE) return;
    if (icmp.code(bytes, l4) !== icmp.FRAGMENTATION_NEEDED) return;
    if ((quote.ports & 0xffff) !== tunnel.port || lookup(nodeIndex, quote.destination, 0, 0) === 0) return;
    const mtu = icmp.nextHopMtu(view, l4);
    if (mtu < ipv4.totalLength(bytes, quote.at)) this.#mtus.lower(quote.destination, mtu, this.#core.nowMs);
  }

  /** Hears what the kernel has kept of such errors, the tunnel's address being the host's. To be called while there is traffic. */
  listen(): void {
    const { nowMs, snapshot, errors } = this.#core;
    if (errors === undefined || nowMs < this.#listenAtMs || snapshot.tunnel.address === 0) return;
    this.#listenAtMs = nowMs + LISTEN_INTERVAL_MS;
    const { bytes, view } = errors;
    for (let left = ERRORS_AT_ONCE; left > 0; left--) {
      const length = errors.receive();
      if (length === 0) return;
      if (ipv4.check(bytes, ERROR_AT, length) !== 0 || ipv4.isFragment(bytes, ERROR_AT)) continue;
      const l4 = ERROR_AT + ipv4.headerLength(bytes, ERROR_AT);
      const end = ERROR_AT + ipv4.totalLength(bytes, ERROR_AT);
      if (parseQuote(view, bytes, ERROR_AT, l4, end, this.#quote) === 0)
        this.heed(view, bytes, ERROR_AT, l4, this.#quote);
    }
  }

  /** What routers have said about the paths to some nodes. */
  recall(nodes: readonly number[]): [node: number, lowered: Lowered][] {
    return nodes.flatMap((node): [number, Lowered][] => {
      const lowered = this.#mtus.recall(node);
      return lowered === undefined ? [] : [[node, lowered]];
    });
  }

  assume(pathMtus: readonly (readonly [node: number, lowered: Lowered])[]): void {
    for (const [node, lowered] of pathMtus) this.#mtus.assume(node, lowered);
  }

  #plan(room: number): void {
    const { packet, bytes, snapshot } = this.#core;
    const { at, l4, length, protocol } = packet;
    const gso = vnet.gsoType(bytes, at);
    this.#kind = WHOLE;
    if (gso === 0 && length <= room) return;

    const isFragment = ipv4.isFragment(bytes, at);
    let datagramBytes = length;
    if (!isFragment && protocol === ipv4.PROTO_TCP && (gso === vnet.GSO_TCPV4 || length > snapshot.tunnel.mtu)) {
      const headers = l4 - at + tcp.dataOffset(bytes, l4);
      const meant = gso === vnet.GSO_TCPV4 ? vnet.gsoSize(bytes, at) : 0;
      this.#pieceBytes = Math.min(meant || MAX_PACKET_BYTES, room - headers);
      if (length - headers > this.#pieceBytes) this.#kind = TCP_SEGMENTS;
      return;
    }
    if (!isFragment && protocol === ipv4.PROTO_UDP && gso === vnet.GSO_UDP_L4) {
      const headers = l4 - at + udp.UDP_HEADER_BYTES;
      this.#pieceBytes = vnet.gsoSize(bytes, at);
      if (this.#pieceBytes > 0 && length - headers > this.#pieceBytes) {
        this.#kind = UDP_DATAGRAMS;
        datagramBytes = headers + this.#pieceBytes;
      }
    }
    if (datagramBytes <= room) return;
    if ((ipv4.fragmentField(bytes, at) & ipv4.FLAG_DF) !== 0) this.#kind = TOO_BIG;
    else {
      this.#fragmentBytes = (room - (l4 - at)) & ~7;
      if (this.#kind === UDP_DATAGRAMS) this.#kind = FRAGMENTED_DATAGRAMS;
      else {
        this.#kind = FRAGMENTS;
        this.#pieceBytes = this.#fragmentBytes;
      }
    }
  }

  #aim(node: number, client: number, vip: number, ports: number, protocol: number, startsFlow: boolean) {
    const { hashKey0, hashKey1, tunnel } = this.#core.snapshot;
    const route = this.#route;
    const vipPort = ports & 0xffff;
    route.node = node;
    route.sourcePort = tunnelSourcePort(flowHash(hashKey0, hashKey1, client, ports >>> 16, vipPort, protocol));
    route.hasVip = startsFlow || tunnel.isOptionAlways;
    route.vip = vip;
    route.vipPort = vipPort;
    return route;
  }

  /** Nobody behind the tunnel could complete it: to the kernel it is part of a datagram's payload. */
  #completeChecksum(): void {
    const { packet, bytes, view } = this.#core;
    const { at, l4, length, protocol } = packet;
    if (protocol === ipv4.PROTO_TCP) storeFull(bytes, l4 + tcp.TCP_CHECKSUM, sumPayload(view, l4, at + length - l4));
    else udp.storeChecksum(bytes, l4, sumPayload(view, l4, udp.length(bytes, l4)));
  }
}
