import { lookup } from '../balance/lookup.js';
import { BATCH_PACKETS } from '../base/limits.js';
import { REASON } from '../base/reasons.js';
import { CAUSE_CUT, CAUSE_REPLACED } from '../conntrack/events.js';
import type { FlowTable } from '../conntrack/flow-table.js';
import {
  BACKEND,
  BACKEND_ID,
  CLIENT,
  ORIGINAL_PORTS,
  RECORD_BYTES,
  RECORD_WORDS,
  REPLY_PORTS,
  RETURN,
  TYPE,
  TYPE_SVC,
  VIP,
} from '../conntrack/record.js';
import { isReusable } from '../conntrack/tcp-tracker.js';
import type { PacketBatch } from '../io/device.js';
import { rewrite } from '../nat/rewrite.js';
import { PORT_UNREACHABLE, PROTOCOL_UNREACHABLE } from '../wire/icmp.js';
import * as ipv4 from '../wire/ipv4.js';
import * as tcp from '../wire/tcp.js';
import { isPartial } from '../wire/vnet.js';
import { Admission, SENT_STATELESS } from './admit.js';
import { Core, type PipelineParts } from './core.js';
import { CutStage } from './cut.js';
import { DsrStage } from './dsr.js';
import { FragmentStage } from './fragments.js';
import { IcmpStage } from './icmp.js';
import { swapPorts } from './packet.js';
import { hasOtherWay, picksAgain } from './picks-again.js';
import type { Pipeline } from './pipeline.js';
import type { Recollection, RecollectionQuery } from './recollection.js';
import type { Snapshot } from './snapshot.js';
import { STAT_BATCHES, STAT_CUT, STAT_RX_BYTES, STAT_RX_PACKETS } from './stats.js';
import { trackPacket } from './track.js';
import { clearResult, type Results } from './verdict.js';

/** What the first pass found a packet to be. */
const BAD = 0;
const TCP_FLOW = 1;
const UDP_FLOW = 2;
const FRAGMENT = 3;
const ICMP = 4;
const OTHER = 5;

/**
 * The gateway's pipeline: a batch of packets in, each rewritten in place and transmitted, answered, passed on, held or dropped
 * with one reason. Runs to completion, allocates nothing for packets of known flows, never throws.
 *
 *     check -> (touch) -> conntrack --hit--> track -> rewrite -> forward
 *                             |miss                            \-- dsr: into the tunnel -> forward
 *                             +-- to a VIP: service -> admit -> insert -> rewrite -> forward
 *                             +-- to an snat address: drop
 *                             +-- else: pass
 *
 * Two passes over the batch. The first judges headers, hashes tuples and loads the index slot of each; the second loads the
 * records those slots name. Neither depends on another packet, so that the cache misses of a batch overlap instead of queueing
 * up; the rewriting pass then finds everything in cache. It looks the tuple up anew, since a packet before it in the batch may
 * have changed the table.
 *
 * Invariant: nothing leaves with a VIP as destination. A packet to a VIP is rewritten to a backend or ends here; passing on
 * is for other destinations; a client that is a VIP is never admitted; backends are no VIPs (the config is refused).
 */
export class Gateway implements Pipeline {
  readonly #core: Core;
  readonly #dsr: DsrStage;
  readonly #admission: Admission;
  readonly #fragments: FragmentStage;
  readonly #icmp: IcmpStage;
  readonly #cuts: CutStage;

  readonly #kind = new Uint8Array(BATCH_PACKETS);
  readonly #reason = new Uint8Array(BATCH_PACKETS);
  readonly #hash = new Int32Array(BATCH_PACKETS);
  readonly #hint = new Int32Array(BATCH_PACKETS);

  /** Keeps the touching loads alive: an optimiser may not drop what is summed up here. */
  touched = 0;

  constructor(parts: PipelineParts) {
    this.#core = new Core(parts);
    this.#dsr = new DsrStage(this.#core);
    this.#admission = new Admission(this.#core, this.#dsr);
    this.#fragments = new FragmentStage(this.#core, this.#dsr);
    this.#icmp = new IcmpStage(this.#core, this.#dsr, true);
    this.#cuts = new CutStage(this.#core, this.#dsr);
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
    this.#dsr.use();
    this.#admission.use();
    this.#cuts.use();
  }

  process(batch: PacketBatch, nowMs: number): void {
    const core = this.#core;
    core.nowMs = nowMs;
    core.stats[STAT_BATCHES]! += 1;
    this.#examine(batch);
    this.#touch(batch.count);

    const { results, packet, bytes } = core;
    for (let row = 0; row < batch.count; row++) {
      clearResult(results, row);
      packet.row = row;
      packet.slot = batch.slot[row]!;
      packet.at = batch.offset[row]!;
      const kind = this.#kind[row]!;
      if (kind === BAD) {
        core.drop(this.#reason[row]!);
        continue;
      }
      packet.load(core.view, bytes);
      core.lastRecord = -1;
      core.lastNode = 0;
      if (kind <= UDP_FLOW) {
        packet.ports = tcp.ports(core.view, packet.l4);
        packet.hash = this.#hash[row]!;
        packet.partial = isPartial(bytes, packet.at, packet.l4);
        this.#flow();
      } else if (kind === FRAGMENT) this.#fragment();
      else if (kind === ICMP) this.#icmp.process();
      else this.#other();
    }
  }

  /** Held fragments that waited too long, and flows whose backend's drain time is over. */
  flushDue(nowMs: number): number {
    this.#core.nowMs = nowMs;
    this.#dsr.listen();
    return Math.min(this.#fragments.expire(), this.#cuts.run());
  }

  /** What it knows besides tables and snapshot that bears on a packet. Changes nothing. */
  recall(query: RecollectionQuery): Recollection {
    const core = this.#core;
    const { source, destination, protocol, identification, nodes } = query;
    const datagram = this.#fragments.recall(source, destination, protocol, identification);
    const { node } = datagram.decided?.decision ?? { node: 0 };
    return {
      ...this.#admission.recall(query),
      recoveringSince: core.recoveringSince,
      answers: core.limiter.recall(source),
      pathMtus: this.#dsr.recall(node === 0 ? nodes : [...nodes, node]),
      datagram,
    };
  }

  /** Goes on, for that packet, from what another gateway has recalled; recoveringSince is a part it was made of. */
  assume(query: RecollectionQuery, recollection: Recollection): void {
    this.#admission.assume(query, recollection);
    this.#core.limiter.assume(query.source, recollection.answers);
    this.#dsr.assume(recollection.pathMtus);
    this.#fragments.assume(recollection.datagram);
  }

  /** A slice of AffinityTable.count. */
  countAffinity(...slice: Parameters<Admission['countAffinity']>): number {
    return this.#admission.countAffinity(...slice);
  }

  /** First pass: headers, hashes, index slots. */
  #examine(batch: PacketBatch): void {
    const { bytes, view, stats } = this.#core;
    const { count } = batch;
    let octets = 0;
    for (let row = 0; row < count; row++) {
      const at = batch.offset[row]!;
      octets += batch.length[row]!;
      this.#hint[row] = -1;
      const reason = ipv4.check(bytes, at, batch.length[row]!);
      if (reason !== 0) {
        this.#kind[row] = BAD;
        this.#reason[row] = reason;
        continue;
      }
      const protocol = ipv4.protocol(bytes, at);
      if (protocol === ipv4.PROTO_TCP || protocol === ipv4.PROTO_UDP) {
        if (ipv4.isFragment(bytes, at)) {
          this.#kind[row] = FRAGMENT;
          continue;
        }
        const table = this.#core.tableOf(protocol);
        const ports = tcp.ports(view, at + ipv4.headerLength(bytes, at));
        const hash = table.hash(ipv4.source(view, at), ipv4.destination(view, at), ports, protocol);
        this.#kind[row] = protocol === ipv4.PROTO_TCP ? TCP_FLOW : UDP_FLOW;
        this.#hash[row] = hash;
        this.#hint[row] = table.touch(hash);
      } else this.#kind[row] = protocol === ipv4.PROTO_ICMP ? ICMP : OTHER;
    }
    stats[STAT_RX_PACKETS]! += count;
    stats[STAT_RX_BYTES]! += octets;
  }

  /** Second pass: the records. */
  #touch(count: number): void {
    if (count === 1) return;
    const { tcp: tcpTable, any } = this.#core;
    let sum = 0;
    for (let row = 0; row < count; row++) {
      const hint = this.#hint[row]!;
      if (hint >= 0) sum += (this.#kind[row] === TCP_FLOW ? tcpTable : any).touchRecord(hint);
    }
    this.touched = (this.touched + sum) | 0;
  }

  /** TCP or UDP with its ports at hand: the whole packet, or the first fragment. */
  #flow(): void {
    const { packet, nowMs } = this.#core;
    const table = this.#core.tableOf(packet.protocol);
    const reference = table.find(packet.source, packet.destination, packet.ports, packet.protocol, packet.hash);
    if (reference < 0) {
      this.#unknown(table);
      return;
    }
    const record = reference >> 1;
    const isReply = (reference & 1) !== 0;
    if (table.isExpired(record, nowMs) || (!isReply && this.#startsAnew(table, record))) {
      table.remove(record, CAUSE_REPLACED, nowMs);
      this.#unknown(table);
      return;
    }
    if (nowMs >= this.#core.snapshot.cutAt[table.words[record * RECORD_WORDS + BACKEND_ID]!]!) {
      this.#cut(table, record, isReply);
      return;
    }
    this.#follow(table, record, isReply, false);
  }

  /** Whether a packet from the client must not use the record its tuple has. */
  #startsAnew(table: FlowTable, record: number): boolean {
    const { packet, bytes, snapshot, nowMs } = this.#core;
    if (packet.protocol === ipv4.PROTO_TCP && !hasOtherWay(table, record, snapshot)) {
      if (!tcp.isOpeningSyn(tcp.flags(bytes, packet.l4))) return false;
      if (isReusable(table, record, nowMs)) return true;
    }
    return picksAgain(table, record, snapshot);
  }

  /** A packet of a live flow: track, count, translate, send. */
  #follow(table: FlowTable, record: number, isReply: boolean, isNew: boolean): void {
    const core = this.#core;
    const { packet, bytes, view } = core;
    const word = record * RECORD_WORDS;
    const { words } = table;
    const isOneWay = table.bytes[record * RECORD_BYTES + TYPE] === TYPE_SVC;
    const node = isOneWay ? this.#dsr.nodeOf(words[word + BACKEND_ID]!) : 0;
    if (isOneWay && !isNew) {
      core.noteFlow(table, record, false);
      if (!this.#dsr.accepts(node)) return;
    }
    trackPacket(core, table, record, isReply, isNew);
    // Either direction leaves as the reverse of the other's key.
    const source = words[word + (isReply ? VIP : RETURN)]!;
    const destination = words[word + (isReply ? CLIENT : BACKEND)]!;
    const ports = swapPorts(words[word + (isReply ? ORIGINAL_PORTS : REPLY_PORTS)]!);
    rewrite(view, bytes, packet.at, packet.l4, packet.protocol, source, destination, ports, packet.partial);
    if (!isOneWay) {
      core.forward();
      return;
    }
    const startsFlow = isNew || packet.protocol !== ipv4.PROTO_TCP || (tcp.flags(bytes, packet.l4) & tcp.SYN) !== 0;
    this.#dsr.forward(node, packet.source, packet.destination, packet.ports, packet.protocol, startsFlow);
  }

  /** No record: a new flow, something for weir to refuse, or not weir's. */
  #unknown(table: FlowTable): void {
    const core = this.#core;
    const { packet } = core;
    if (core.vipBits(packet.destination) !== 0) {
      const service = lookup(core.snapshot.serviceIndex, packet.destination, packet.destinationPort, packet.protocol);
      if (service !== 0) {
        const record = this.#admission.admit(service);
        if (record >= 0) this.#follow(table, record, false, true);
      } else if (packet.protocol === ipv4.PROTO_TCP) {
        core.rejectTcp(REASON['rst-unknown-port'], REASON['unknown-port']);
      } else core.rejectUnreachable(PORT_UNREACHABLE, REASON['unknown-port']);
      return;
    }
    if (core.isSnatAddress(packet.destination)) {
      core.drop(REASON['untracked-reply']);
      return;
    }
    const picked = this.#admission.pickUpReply();
    if (picked >= 0) {
      this.#follow(table, picked, true, false);
      return;
    }
    if (picked !== SENT_STATELESS) core.passUntracked();
  }

  /** The drain time of the flow's backend is over, and the sweep has not come to it yet: it ends here, and both ends are told. */
  #cut(table: FlowTable, record: number, isReply: boolean): void {
    const core = this.#core;
    const isTcp = core.packet.protocol === ipv4.PROTO_TCP;
    core.noteFlow(table, record, isReply);
    const isOneWay = table.bytes[record * RECORD_BYTES + TYPE] === TYPE_SVC;
    // A client's datagram is served anew by another backend; of a one-way flow the packet knows the numbers best.
    const told = (isTcp && !isOneWay) || isReply ? this.#cuts.tell(table, record) : 0;
    if (isTcp && isOneWay) this.#cuts.tellNode(table, record);
    table.remove(record, CAUSE_CUT, core.nowMs);
    core.stats[STAT_CUT]! += 1;
    if (!isTcp) {
      if (isReply) core.drop(REASON['untracked-reply']);
      else this.#unknown(table);
    } else if (told > 0) core.answered(REASON['rst-mid-stream']);
    else core.rejectTcp(REASON['rst-mid-stream'], REASON['unknown-flow']);
  }

  /** A fragment of TCP or UDP. */
  #fragment(): void {
    const core = this.#core;
    const { packet, bytes, view } = core;
    if (ipv4.fragmentOffset(bytes, packet.at) !== 0) {
      this.#fragments.follow();
      return;
    }
    const id = ipv4.identification(bytes, packet.at);
    packet.leads = true;
    packet.ports = tcp.ports(view, packet.l4);
    packet.hash = core.tableOf(packet.protocol).hash(packet.source, packet.destination, packet.ports, packet.protocol);
    this.#flow();
    this.#fragments.lead(id);
  }

  /** A protocol weir does not balance. */
  #other(): void {
    const core = this.#core;
    const { packet } = core;
    if (core.vipBits(packet.destination) !== 0) {
      core.rejectUnreachable(PROTOCOL_UNREACHABLE, REASON['unsupported-protocol']);
    } else if (core.isSnatAddress(packet.destination)) core.drop(REASON['untracked-reply']);
    else core.pass();
  }
}
