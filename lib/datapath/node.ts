import { lookup } from '../balance/lookup.js';
import { BATCH_PACKETS, TAKEOVER_IDLE_MS } from '../base/limits.js';
import { REASON } from '../base/reasons.js';
import { CAUSE_EXPIRED, CAUSE_REPLACED } from '../conntrack/events.js';
import type { FlowTable } from '../conntrack/flow-table.js';
import {
  CLIENT,
  DSR,
  FLAGS,
  ORIGINAL_PORTS,
  RECORD_BYTES,
  RECORD_DOUBLES,
  RECORD_WORDS,
  RX_SEEN,
  TX_PACKETS,
  TX_SEEN,
  TYPE_OUT,
  VIP,
} from '../conntrack/record.js';
import { isReusable } from '../conntrack/tcp-tracker.js';
import { type PacketBatch, packetOffset } from '../io/device.js';
import { makeQuote, parseQuote } from '../nat/icmp-error.js';
import { clampMss } from '../nat/mss.js';
import { rewrite } from '../nat/rewrite.js';
import * as icmp from '../wire/icmp.js';
import * as ipv4 from '../wire/ipv4.js';
import * as tcp from '../wire/tcp.js';
import { UDP_HEADER_BYTES } from '../wire/udp.js';
import { isPartial, VNET_HEADER_BYTES } from '../wire/vnet.js';
import { AnswerSizes } from './answer-size.js';
import { Core, type PipelineParts } from './core.js';
import { TunnelStage } from './decapsulate.js';
import { DirectConnections } from './direct.js';
import { DsrStage } from './dsr.js';
import { type AskForEndpoint, EndpointStage, type NamedVip } from './endpoints.js';
import { FragmentStage } from './fragments.js';
import { IcmpStage } from './icmp.js';
import { swapPorts } from './packet.js';
import { ReplyPickUp } from './pick-up.js';
import type { Pipeline } from './pipeline.js';
import { COUNTER_CONNECTIONS, COUNTER_ROWS, type Snapshot } from './snapshot.js';
import { STAT_BATCHES, STAT_PICKED_UP, STAT_REASONS, STAT_RX_BYTES, STAT_RX_PACKETS } from './stats.js';
import { trackPacket } from './track.js';
import { clearResult, type Results } from './verdict.js';

/**
 * The node's pipeline, on the host of dsr backends: the end of the gateways' tunnels, and the answers straight to the clients.
 *
 * ## The way of a connection
 *
 *     gateway --UDP, Geneve [C:c -> B:b, option V:v]--> socket --> weir --[C:c -> B:b]--> device --> kernel --> backend
 *     client <-------------[V:v -> C:c]-- kernel <-- device <-- weir <--[B:b -> C:c]-- device <-- kernel <-- backend
 *
 * Two inputs, the tunnel's socket and the device; the device is the only output. What is written to it is routed by the kernel: a
 * client's packet to the backend, which may be a process that listens on an address of this host or a container behind a bridge; an
 * answer to the client. Answers come in since policy rules lead the source address and port of each local endpoint into the
 * device, for forwarded packets and for those that processes of this host send. What the device wrote is looked up in the main
 * table (network-plan.ts), so that nothing comes round.
 *
 * Facts of the kernel that this relies on, each tried in a namespace:
 * - A packet with a local destination that comes from the device is delivered like any other; its answer is looked up by source
 *   address, protocol and port, and so is the answer of a UDP server that is bound to no address, except that the address is
 *   not chosen yet: its rule names `iif lo` and the port alone.
 * - What a local process sends arrives with its checksum in partial form and as super-packets, like on a gateway.
 * - Direct connections to a backend's own port match the same rules. They have no entry, are passed on as they are and leave by the main
 *   table with a source that is this host's own, which `accept_local` permits.
 *
 * ## State
 *
 * One record a flow, two-way (OUT) with the DSR flag, and both directions are seen, so that TCP is tracked in full:
 *
 *     original   client C:c -> VIP V:v              what the client believes; the option says it
 *     reply      backend B:b -> client C:c          what the backend answers; packets in the tunnel are this, reversed
 *
 * Packets from the tunnel are found by the reply key, whose reverse they are: with or without an option, and whatever it says. The option
 * makes a record where there is none, so that with `option: always` any packet of the client brings back what a lost process knew.
 *
 *     packet from the tunnel          entry                     what happens
 *     with V:v                        none, or expired          recorded, delivered; an RST is delivered without
 *     with V:v                        of V:v                    tracked, delivered; a SYN on a closed one begins anew
 *     with V:v                        of another, in use        dropped, reply-tuple-clash: answers could not be told apart
 *     with V:v                        of another, closing or    replaced; an RST is delivered and replaces nothing
 *                                     idle for TAKEOVER_IDLE_MS
 *     without                         any                       tracked, delivered
 *     without                         none, or expired          delivered as it is, not-tracked: its answer leaves untranslated
 *
 *     packet of a backend             its own                   tracked, leaves with V:v as source
 *                                     none                      passed on as it is: a direct connection
 *
 * While the table is young a packet of a backend without an entry may be one of a connection that the last process knew, and the
 * client waits for it: it is recognised by the hash, as on the gateway (pick-up.ts). Here a direct connection must not be taken for one:
 * direct.ts. The first packet of a flow to an endpoint whose answers are not led in yet waits for that: endpoints.ts.
 *
 * An entry of the same client and VIP with another backend is replaced without a question: a client has one connection from a port
 * to a VIP, and the gateway knows best where it is now.
 *
 * Invariants: nothing of a tunnel is written but an inner packet that was judged like any packet of the device; nothing is ever sent
 * through the socket; nothing is answered, since the backend's kernel does that. Fragments follow their first one in both
 * directions. ICMP errors of the backend's side are translated as on the gateway, and those that come through the tunnel were, there;
 * what these say about the path to a client is heeded here as well: answer-size.ts.
 *
 * Rejected: a tunnel device of the kernel (its options are beyond reach without a program in the kernel), a raw socket for
 * answers (it would cut super-packets), the VIP on a local interface (the kernel would answer for it), and prefetching as the
 * gateway does: the flows of one host fit its cache.
 */
export class Node implements Pipeline {
  readonly #core: Core;
  readonly #tunnel: TunnelStage;
  readonly #endpoints: EndpointStage;
  readonly #fragments: FragmentStage;
  readonly #icmp: IcmpStage;
  readonly #picked: ReplyPickUp;
  readonly #direct = new DirectConnections();
  readonly #sizes: AnswerSizes;
  readonly #quote = makeQuote();

  /** @param ask of endpoints that traffic teaches; undefined: the network needs nothing for them */
  constructor(parts: PipelineParts, ask?: AskForEndpoint) {
    this.#core = new Core(parts);
    this.#tunnel = new TunnelStage(this.#core, (named) => this.#arrive(named));
    this.#endpoints = new EndpointStage(this.#core, ask);
    // The stages a node has in common with the gateway ask it about one-way records, of which there are none here.
    const dsr = new DsrStage(this.#core);
    this.#fragments = new FragmentStage(this.#core, dsr);
    this.#icmp = new IcmpStage(this.#core, dsr, false);
    this.#picked = new ReplyPickUp(this.#core);
    this.#sizes = new AnswerSizes(this.#core);
  }

  get results(): Results {
    return this.#core.results;
  }

  get row(): number {
    return this.#core.packet.row;
  }

  get nowMs(): number {
    return this.#core.nowMs;
  }

  use(snapshot: Snapshot): void {
    this.#core.use(snapshot);
  }

  process(batch: PacketBatch, nowMs: number): void {
    const core = this.#core;
    core.nowMs = nowMs;
    core.stats[STAT_BATCHES]! += 1;
    for (let row = 0; row < batch.count; row++) {
      clearResult(core.results, row);
      const slot = batch.slot[row]!;
      const offset = batch.offset[row]!;
      const length = batch.length[row]!;
      const datagramBytes = batch.datagramBytes[row]!;
      if (datagramBytes === 0) this.#fromDevice(row, slot, offset, length);
      else this.#tunnel.receive(row, slot, offset, length, datagramBytes, batch.peer[row]!, batch.tos[row]!);
    }
    this.#tunnel.settle();
  }

  /** Held fragments, and packets that waited for their endpoint: because it is led in now, or for too long. */
  flushDue(nowMs: number): number {
    const core = this.#core;
    const { packet, output, bytes, view } = core;
    core.nowMs = nowMs;
    for (let waiting = this.#endpoints.next(); waiting !== undefined; waiting = this.#endpoints.next()) {
      const slot = output.take();
      if (slot < 0) {
        core.stats[STAT_REASONS + REASON['device-write']]! += 1;
        continue;
      }
      packet.row = BATCH_PACKETS;
      packet.slot = slot;
      packet.at = packetOffset(output.memory, slot);
      bytes.set(waiting.bytes, packet.at - VNET_HEADER_BYTES);
      packet.load(view, bytes);
      this.#arriveWhole(waiting, true);
    }
    return Math.min(this.#fragments.expire(), this.#endpoints.nextDueMs);
  }

  /** An IP packet of the device: a backend's answer; in a replay, what the socket would have received as well. */
  #fromDevice(row: number, slot: number, at: number, length: number): void {
    const core = this.#core;
    const { packet, bytes, view, stats } = core;
    const reason = ipv4.check(bytes, at, length);
    if (reason === 0 && this.#isTunnelled(at)) {
      const l4 = at + ipv4.headerLength(bytes, at);
      const payload = l4 + UDP_HEADER_BYTES;
      const end = l4 + view.getUint16(l4 + 4);
      const peer = ipv4.source(view, at);
      this.#tunnel.receive(row, slot, payload, end - payload, ipv4.totalLength(bytes, at), peer, ipv4.tos(bytes, at));
      return;
    }
    this.#tunnel.settle();
    stats[STAT_RX_PACKETS]! += 1;
    stats[STAT_RX_BYTES]! += length;
    packet.row = row;
    packet.slot = slot;
    packet.at = at;
    if (reason !== 0) {
      core.drop(reason);
      return;
    }
    packet.load(view, bytes);
    core.lastRecord = -1;
    if (packet.protocol === ipv4.PROTO_ICMP) this.#icmp.process();
    else if (packet.protocol !== ipv4.PROTO_TCP && packet.protocol !== ipv4.PROTO_UDP) core.pass();
    else if (ipv4.fragmentOffset(bytes, at) !== 0) this.#fragments.follow();
    else {
      const isFragment = ipv4.isFragment(bytes, at);
      const id = ipv4.identification(bytes, at);
      packet.ports = tcp.ports(view, packet.l4);
      packet.partial = isPartial(bytes, at, packet.l4);
      packet.leads = isFragment;
      // weir does not reassemble: of a tunnelled packet in fragments none can be used.
      if (isFragment && this.#isToTunnel(at)) core.drop(REASON['geneve-malformed']);
      else this.#reply();
      if (isFragment) this.#fragments.lead(id);
    }
  }

  /** UDP to the tunnel's end, whole. */
  #isTunnelled(at: number): boolean {
    const { bytes } = this.#core;
    return ipv4.protocol(bytes, at) === ipv4.PROTO_UDP && !ipv4.isFragment(bytes, at) && this.#isToTunnel(at);
  }

  #isToTunnel(at: number): boolean {
    const { bytes, view, snapshot } = this.#core;
    const { address, port } = snapshot.tunnel;
    if (ipv4.destination(view, at) !== address || ipv4.protocol(bytes, at) !== ipv4.PROTO_UDP) return false;
    return (tcp.ports(view, at + ipv4.headerLength(bytes, at)) & 0xffff) === port;
  }

  /** A packet that came through the tunnel and is loaded. */
  #arrive(named: NamedVip): void {
    const core = this.#core;
    const { packet, bytes } = core;
    core.lastRecord = -1;
    if (packet.protocol === ipv4.PROTO_ICMP) this.#arriveIcmp();
    else if (packet.protocol !== ipv4.PROTO_TCP && packet.protocol !== ipv4.PROTO_UDP) core.pass();
    else if (!ipv4.isFragment(bytes, packet.at)) this.#arriveWhole(named, false);
    else if (ipv4.fragmentOffset(bytes, packet.at) !== 0) this.#fragments.follow();
    else {
      const id = ipv4.identification(bytes, packet.at);
      this.#arriveWhole(named, true);
      this.#fragments.lead(id);
    }
  }

  /** TCP or UDP with its ports at hand. @param hasWaited it goes on now, whether or not its endpoint's answers are led in */
  #arriveWhole({ isThere, vip, vipPort }: Readonly<NamedVip>, hasWaited: boolean): void {
    const core = this.#core;
    const { packet, view } = core;
    packet.ports = tcp.ports(view, packet.l4);
    const table = core.tableOf(packet.protocol);
    const record = this.#findRecord(table);
    if (record === FOREIGN) {
      this.#refuseClash(isThere);
      return;
    }
    const isFresh = record < 0 || this.#startsAnew(table, record);
    if (record >= 0 && isThere && !this.#isOf(table, record, vip, vipPort)) {
      if (!isFresh && !this.#mayTakeOver(table, record)) {
        this.#refuseClash(true);
        return;
      }
      this.#begin(table, record, vip, vipPort, hasWaited);
    } else if (!isFresh) {
      if (this.#isMistaken(table, record)) {
        core.drop(REASON['unknown-flow']);
        return;
      }
      trackPacket(core, table, record, false, false);
      core.forward();
    } else if (isThere) this.#begin(table, record, vip, vipPort, hasWaited);
    else if (record >= 0) {
      // The option is missing from a SYN, and the entry still knows.
      const word = record * RECORD_WORDS;
      this.#begin(table, record, table.words[word + VIP]!, table.words[word + ORIGINAL_PORTS]! & 0xffff, hasWaited);
    } else core.pass();
  }

  /** The record of the tunnelled packet in hand; -1: none; FOREIGN: something else has its tuple. One that expired is removed. */
  #findRecord(table: FlowTable): number {
    const { packet, nowMs } = this.#core;
    const ports = swapPorts(packet.ports);
    const hash = table.hash(packet.destination, packet.source, ports, packet.protocol);
    const reference = table.find(packet.destination, packet.source, ports, packet.protocol, hash);
    if (reference < 0) return -1;
    const record = reference >> 1;
    if (table.isExpired(record, nowMs)) {
      table.remove(record, CAUSE_EXPIRED, nowMs);
      return -1;
    }
    return (reference & 1) === 0 ? FOREIGN : record;
  }

  #startsAnew(table: FlowTable, record: number): boolean {
    const { packet, bytes, nowMs } = this.#core;
    if (packet.protocol !== ipv4.PROTO_TCP || !tcp.isOpeningSyn(tcp.flags(bytes, packet.l4))) return false;
    return isReusable(table, record, nowMs);
  }

  #isOf(table: FlowTable, record: number, vip: number, vipPort: number): boolean {
    const word = record * RECORD_WORDS;
    return table.words[word + VIP] === vip && (table.words[word + ORIGINAL_PORTS]! & 0xffff) === vipPort;
  }

  /** Whether an entry gives way to a flow of another VIP. It counts its last packets in whole seconds. */
  #mayTakeOver(table: FlowTable, record: number): boolean {
    const { nowMs } = this.#core;
    const word = record * RECORD_WORDS;
    const seenSeconds = Math.max(table.words[word + TX_SEEN]! >>> 0, table.words[word + RX_SEEN]! >>> 0);
    return isReusable(table, record, nowMs) || nowMs - seenSeconds * 1000 >= TAKEOVER_IDLE_MS;
  }

  /** Its answers would be taken for those of another flow. */
  #refuseClash(isThere: boolean): void {
    if (isThere) this.#core.drop(REASON['reply-tuple-clash']);
    else this.#core.pass();
  }

  /** The packet in hand begins a flow to the VIP. @param before its reply tuple's record up to now, -1: none */
  #begin(table: FlowTable, before: number, vip: number, vipPort: number, hasWaited: boolean): void {
    const core = this.#core;
    const { packet, bytes, nowMs, snapshot, stats } = core;
    const flags = packet.protocol === ipv4.PROTO_TCP ? tcp.flags(bytes, packet.l4) : tcp.SYN;
    const isReset = (flags & tcp.RST) !== 0;
    if (!isReset && !hasWaited && this.#endpoints.mustWait(vip, vipPort)) return;
    const service = lookup(snapshot.serviceIndex, vip, vipPort, packet.protocol);
    const backend = this.#backendOf(service);
    if (isReset) {
      core.noteChoice(service, backend);
      core.forward();
      return;
    }
    if (before >= 0) table.remove(before, CAUSE_REPLACED, nowMs);
    const originalPorts = (packet.ports & ~0xffff) | vipPort;
    this.#forget(table, packet.source, vip, originalPorts);
    const record = table.insert(
      packet.protocol,
      TYPE_OUT,
      packet.source,
      vip,
      originalPorts,
      packet.destination,
      packet.source,
      swapPorts(packet.ports),
      service,
      backend,
      nowMs,
    );
    if (record < 0) {
      core.noteChoice(service, backend);
      core.drop(REASON['table-full']);
      return;
    }
    table.bytes[record * RECORD_BYTES + FLAGS]! |= DSR;
    if ((flags & tcp.SYN) === 0) stats[STAT_PICKED_UP]! += 1;
    snapshot.counters[backend * COUNTER_ROWS + COUNTER_CONNECTIONS]! += 1;
    trackPacket(core, table, record, false, true);
    core.forward();
  }

  /** The id of the packet's destination among the backends of a service; 0: the configuration does not have it. */
  #backendOf(service: number): number {
    const { packet, snapshot } = this.#core;
    const { memberIndex, members } = snapshot.node!;
    const first = lookup(memberIndex, packet.destination, packet.destinationPort, packet.protocol);
    if (first === 0 || service === 0) return 0;
    for (let row = first - 1; members[row * 2] !== 0; row++)
      if (members[row * 2] === service) return members[row * 2 + 1]!;
    return 0;
  }

  /** The client has moved from another backend. */
  #forget(table: FlowTable, client: number, vip: number, ports: number): void {
    const { packet, nowMs } = this.#core;
    const hash = table.hash(client, vip, ports, packet.protocol);
    const reference = table.find(client, vip, ports, packet.protocol, hash);
    if (reference >= 0) table.remove(reference >> 1, CAUSE_REPLACED, nowMs);
  }

  /** Goes on as it came: an error that the gateway translated, or a message to the backend itself. */
  #arriveIcmp(): void {
    const core = this.#core;
    const { packet, bytes, view, nowMs } = core;
    const quote = this.#quote;
    const isError = !ipv4.isFragment(bytes, packet.at) && icmp.isError(icmp.type(bytes, packet.l4));
    if (isError && parseQuote(view, bytes, packet.at, packet.l4, packet.at + packet.length, quote) === 0) {
      const table = core.tableOf(quote.protocol);
      const hash = table.hash(quote.source, quote.destination, quote.ports, quote.protocol);
      const reference = table.find(quote.source, quote.destination, quote.ports, quote.protocol, hash);
      if (reference >= 0 && !table.isExpired(reference >> 1, nowMs)) {
        core.noteFlow(table, reference >> 1, false);
        if ((reference & 1) !== 0) this.#sizes.heed(packet.l4, quote, table, reference >> 1);
        core.forward();
        return;
      }
    }
    core.pass();
  }

  /** TCP or UDP from a backend, the whole packet or the first fragment. */
  #reply(): void {
    const core = this.#core;
    const { packet, bytes, view, snapshot, nowMs } = core;
    const table = core.tableOf(packet.protocol);
    const hash = table.hash(packet.source, packet.destination, packet.ports, packet.protocol);
    const reference = table.find(packet.source, packet.destination, packet.ports, packet.protocol, hash);
    let record = (reference & 1) === 0 ? -1 : reference >> 1;
    if (record >= 0 && table.isExpired(record, nowMs)) {
      table.remove(record, CAUSE_EXPIRED, nowMs);
      record = -1;
    }
    if (record < 0) record = this.#pickUpReply();
    if (record < 0) {
      core.passUntracked();
      return;
    }
    trackPacket(core, table, record, true, false);
    const word = record * RECORD_WORDS;
    const { at, l4, protocol, partial } = packet;
    const ports = swapPorts(table.words[word + ORIGINAL_PORTS]!);
    rewrite(view, bytes, at, l4, protocol, table.words[word + VIP]!, table.words[word + CLIENT]!, ports, partial);
    if (protocol === ipv4.PROTO_TCP && (tcp.flags(bytes, l4) & tcp.SYN) !== 0) {
      clampMss(view, bytes, l4, snapshot.node!.mssLimit, partial);
    }
    this.#sizes.fit(packet.destination);
    core.forward();
  }

  /** A connection that was under way before this process began may speak up at the backend's end first. */
  #pickUpReply(): number {
    const { tcp: table, packet, bytes } = this.#core;
    const picked = this.#picked;
    if (!picked.isRecovering || packet.protocol !== ipv4.PROTO_TCP || this.#direct.has(packet)) return -1;
    if ((tcp.flags(bytes, packet.l4) & tcp.SYN) !== 0) {
      this.#direct.add(packet);
      return -1;
    }
    const record = picked.recognise() ? picked.insert() : -1;
    if (record >= 0) table.bytes[record * RECORD_BYTES + FLAGS]! |= DSR;
    return record;
  }

  /** The client resets what it has never heard of: the connection that was picked up is a direct one, and stays alive. */
  #isMistaken(table: FlowTable, record: number): boolean {
    const { packet, bytes, nowMs } = this.#core;
    if (packet.protocol !== ipv4.PROTO_TCP || (tcp.flags(bytes, packet.l4) & tcp.RST) === 0) return false;
    if (table.doubles[record * RECORD_DOUBLES + TX_PACKETS] !== 0) return false;
    this.#direct.addReverse(packet);
    table.remove(record, CAUSE_REPLACED, nowMs);
    return true;
  }
}

/** `#findRecord`: the tuple is the original key of a record. */
const FOREIGN = -2;
