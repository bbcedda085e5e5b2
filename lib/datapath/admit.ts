import { AffinityTable } from '../balance/affinity.js';
import { flowHash } from '../balance/flow-hash.js';
import { pickWeighted } from '../balance/pick.js';
import { REASON } from '../base/reasons.js';
import { CAUSE_REPLACED } from '../conntrack/events.js';
import type { FlowTable } from '../conntrack/flow-table.js';
import { FLAGS, LB_LOOPBACK, RECORD_BYTES, TYPE_OUT, TYPE_SVC } from '../conntrack/record.js';
import { isReusable } from '../conntrack/tcp-tracker.js';
import { type AllocatedPort, allocatePort, type PortPool, type PortProbe } from '../nat/ports.js';
import { rewrite } from '../nat/rewrite.js';
import { PORT_UNREACHABLE } from '../wire/icmp.js';
import { PROTO_TCP } from '../wire/ipv4.js';
import * as tcp from '../wire/tcp.js';
import type { Core } from './core.js';
import type { DsrStage } from './dsr.js';
import { isInSourceRanges, LimitStage } from './limits.js';
import { choiceOfHash, ReplyPickUp } from './pick-up.js';
import type { Recollection, RecollectionQuery } from './recollection.js';
import {
  AFFINITY_SECONDS,
  BACKEND_ADDRESS,
  BACKEND_FLAGS,
  BACKEND_PORT,
  BACKEND_SERVICE,
  BACKEND_WORDS,
  CHOICES_AT,
  CHOICES_COUNT,
  CHOICES_WEIGHT,
  COUNTER_CONNECTIONS,
  COUNTER_ROWS,
  MAGLEV_SIZE,
  MODE_DSR,
  MODE_SNAT,
  NO_BACKEND_DROP,
  SERVICE_FLAGS,
  SERVICE_LIMITED,
  SERVICE_MAGLEV,
  SERVICE_MODE,
  SERVICE_WORDS,
  TAKES_NEW,
} from './snapshot.js';
import { STAT_PICKED_UP, STAT_STATELESS } from './stats.js';

/** From `pickUpReply`. */
export const SENT_STATELESS = -2;

/**
 * Admission: what happens to the first packet of a flow. The slow path: once per connection.
 *
 * 1. the client is inside sourceRanges and is no VIP or snat address itself (a reply to it would come back to weir);
 * 2. a packet from the middle of a TCP connection is picked up where the hash alone decides (dsr, and maglev without snat), else
 *    refused;
 * 3. a backend is chosen: by affinity, then by the algorithm; in dsr, whose flows must find their backend again, lots are drawn
 *    by the hash. Limits (limits.ts) may refuse a connection that begins, or lead it to another backend;
 * 4. its reply tuple must be free. Taken by a closing or expired flow: that one goes. Taken by a live one: another source
 *    port if there is an snat pool, else the next backend in order, else refused. The chosen backend being the client itself
 *    (hairpin) needs a source of weir's own in the same way. In dsr replies do not come here, so that only a hairpin is
 *    refused, and a packet that does not fit the tunnel;
 * 5. one record under two keys, in dsr under one. No room: a flow that the hash alone decides goes on without, any other is
 *    dropped.
 *
 * A refusal leaves nothing behind.
 */
export class Admission implements PortProbe {
  readonly #core: Core;
  readonly #dsr: DsrStage;
  readonly #pickUp: ReplyPickUp;
  readonly #limits: LimitStage;
  readonly #affinity: AffinityTable;
  readonly #port: AllocatedPort = { address: 0, port: 0 };
  #pool: PortPool = { addresses: new Int32Array(0), firstPort: 0, lastPort: 0 };

  // The backend being considered: work variables, so that nothing is allocated.
  #backendId = 0;
  #backendAddress = 0;
  #backendPort = 0;
  #returnAddress = 0;
  #returnPort = 0;
  /** Where the client was sent before, by affinity; 0: nowhere, or that is over. */
  #remembered = 0;

  /** Until when flows without a record may have replies that need picking up, of TCP and of the rest: set by a full table. */
  #statelessTcpUntilMs = Number.NEGATIVE_INFINITY;
  #statelessAnyUntilMs = Number.NEGATIVE_INFINITY;

  constructor(core: Core, dsr: DsrStage) {
    this.#core = core;
    this.#dsr = dsr;
    this.#pickUp = new ReplyPickUp(core);
    this.#limits = new LimitStage(core);
    this.#affinity = new AffinityTable(core.affinityEntries);
  }

  use(): void {
    const { snatAddresses, snatFirstPort, snatLastPort } = this.#core.snapshot;
    this.#pool = { addresses: snatAddresses, firstPort: snatFirstPort, lastPort: snatLastPort };
  }

  /**
   * Takes the packet in hand, which belongs to no record and is addressed to `service`, to its end.
   *
   * @returns the new record, or -1 when the packet was refused or went on without one.
   */
  admit(service: number): number {
    const { packet, snapshot } = this.#core;
    const row = service * SERVICE_WORDS;
    const { services } = snapshot;
    const isTcp = packet.protocol === PROTO_TCP;
    this.#core.noteChoice(service, 0);

    if (!isInSourceRanges(snapshot, row, packet.source)) {
      this.#core.drop(REASON['not-in-source-range']);
      return -1;
    }
    if (this.#core.isOwn(packet.source)) {
      this.#core.drop(REASON['hairpin-refused']);
      return -1;
    }

    const mode = services[row + SERVICE_MODE]!;
    const isMaglev = (services[row + SERVICE_FLAGS]! & SERVICE_MAGLEV) !== 0;
    const tcpFlags = isTcp ? tcp.flags(this.#core.bytes, packet.l4) : 0;
    const midStream = isTcp && !tcp.isOpeningSyn(tcpFlags);
    const isDsr = mode === MODE_DSR;
    const isByHash = isDsr || (isMaglev && mode !== MODE_SNAT);
    if (midStream && !isByHash) {
      this.#core.rejectTcp(REASON['rst-mid-stream'], REASON['unknown-flow']);
      return -1;
    }

    const wanted = this.#choose(service, row);
    if (wanted < 0) {
      this.#reject(row, REASON['rst-no-backend'], REASON['no-backend']);
      return -1;
    }
    // The middle of a connection is none that begins.
    const isLimited = !midStream && (services[row + SERVICE_FLAGS]! & SERVICE_LIMITED) !== 0;
    if (isLimited && !this.#limits.allowsClient(service, row)) {
      this.#core.drop(REASON['client-rate']);
      return -1;
    }
    const choice = isLimited ? this.#limits.withRoom(service, row, wanted) : wanted;
    if (choice < 0) {
      this.#reject(row, REASON['rst-connection-limit'], REASON['connection-limit']);
      return -1;
    }

    if (midStream && (tcpFlags & tcp.RST) !== 0) {
      this.#forwardLoneRst(service, row, choice, isDsr);
      return -1;
    }
    const refusal = isDsr
      ? this.#settleOneWay(row, choice)
      : this.#settleTuple(row, choice, mode, midStream, isLimited);
    if (refusal !== 0) {
      if (refusal === REASON['rst-mid-stream']) this.#core.rejectTcp(refusal, REASON['unknown-flow']);
      else this.#core.drop(refusal);
      return -1;
    }
    this.#core.noteChoice(service, this.#backendId);
    if (isDsr && !this.#dsr.accepts(this.#dsr.nodeOf(this.#backendId))) return -1;

    const record = this.#insert(service, isDsr ? TYPE_SVC : TYPE_OUT);
    if (record < 0) {
      const isFoundAgain = isByHash && choice === wanted && (isDsr || this.#isOfHash(row));
      if (isFoundAgain && this.#returnAddress === packet.source) {
        this.#core.stats[STAT_STATELESS]! += 1;
        const untilMs = this.#core.nowMs + snapshot.recoveryMs;
        if (isDsr) this.#forwardStateless(true, true);
        else {
          if (isTcp) this.#statelessTcpUntilMs = untilMs;
          else this.#statelessAnyUntilMs = untilMs;
          this.#forwardStateless(false, true);
        }
      } else this.#core.drop(REASON['table-full']);
      return -1;
    }
    if (midStream) this.#core.stats[STAT_PICKED_UP]! += 1;
    if (isLimited) this.#limits.opened(service, row);
    this.#remember(service, row, choice === wanted ? 0 : this.#remembered);
    return record;
  }

  /**
   * Makes the record that a reply without one must belong to, when exactly one maglev service can have sent it there: of TCP for
   * some time after a start without a table (docs/conntrack.md, Restarts), of every flow that was let through without a record.
   *
   * @returns the record; -1 when the packet is not such a reply; SENT_STATELESS when it is, and went on without a record, as a
   * lone RST does.
   */
  pickUpReply(): number {
    const core = this.#core;
    const picked = this.#pickUp;
    const { at, l4, protocol, destination, destinationPort, partial } = core.packet;
    const isTcp = protocol === PROTO_TCP;
    const isRecovering = isTcp && picked.isRecovering;
    if (!isRecovering && core.nowMs >= (isTcp ? this.#statelessTcpUntilMs : this.#statelessAnyUntilMs)) return -1;
    if (!picked.recognise()) return -1;
    const isLoneRst = isTcp && (tcp.flags(core.bytes, l4) & tcp.RST) !== 0;
    const record = isLoneRst ? -1 : picked.insert();
    if (record >= 0) return record;
    core.noteReply(picked.service, picked.backend);
    const ports = (picked.vipPort << 16) | destinationPort;
    rewrite(core.view, core.bytes, at, l4, protocol, picked.vip, destination, ports, partial);
    if (!isLoneRst) core.stats[STAT_STATELESS]! += 1;
    core.forward();
    return SENT_STATELESS;
  }

  recall(
    query: RecollectionQuery,
  ): Pick<Recollection, 'affinity' | 'limits' | 'statelessTcpUntilMs' | 'statelessAnyUntilMs'> {
    return {
      affinity: this.#affinity.peek(query.service, query.source),
      limits: this.#limits.recall(query),
      statelessTcpUntilMs: this.#statelessTcpUntilMs,
      statelessAnyUntilMs: this.#statelessAnyUntilMs,
    };
  }

  assume(query: RecollectionQuery, recollection: Recollection): void {
    const { affinity } = recollection;
    if (affinity === null) this.#affinity.forget(query.service, query.source);
    else this.#affinity.set(query.service, query.source, affinity.backend, affinity.untilMs);
    this.#limits.assume(query, recollection.limits);
    this.#statelessTcpUntilMs = recollection.statelessTcpUntilMs;
    this.#statelessAnyUntilMs = recollection.statelessAnyUntilMs;
  }

  /** A slice of AffinityTable.count. */
  countAffinity(...slice: Parameters<AffinityTable['count']>): number {
    return this.#affinity.count(...slice);
  }

  /** PortProbe: the reply tuple with this source is unowned, or its owner has expired. */
  isPortFree(address: number, port: number): boolean {
    return this.#freeReplyTuple(address, port, false);
  }

  /** The number of the choice within the service, -1 when no backend takes new flows. */
  #choose(service: number, row: number): number {
    const { packet, snapshot, nowMs, random } = this.#core;
    const { services, backends, choices } = snapshot;
    const count = services[row + CHOICES_COUNT]!;
    if (count === 0) return -1;
    const at = services[row + CHOICES_AT]!;
    this.#remembered = 0;
    if (services[row + AFFINITY_SECONDS] !== 0) {
      const remembered = this.#affinity.get(service, packet.source, nowMs);
      // An id may have been given to another service's backend since.
      if (
        remembered > 0 &&
        backends[remembered * BACKEND_WORDS + BACKEND_SERVICE] === service &&
        (backends[remembered * BACKEND_WORDS + BACKEND_FLAGS]! & TAKES_NEW) !== 0
      ) {
        this.#remembered = remembered;
        for (let i = 0; i < count; i++) if (choices[(at + i) * 2] === remembered) return i;
      }
    }
    const isByHash = services[row + MAGLEV_SIZE] !== 0 || services[row + SERVICE_MODE] === MODE_DSR;
    return isByHash
      ? this.#choiceOfHash(row)
      : pickWeighted(choices, at, count, services[row + CHOICES_WEIGHT]!, random());
  }

  /** The choice that the client's hash leads to. In dsr it draws the lots of `random` as well. */
  #choiceOfHash(row: number): number {
    const { packet, snapshot } = this.#core;
    const { source, sourcePort, destinationPort, protocol } = packet;
    return choiceOfHash(snapshot, row, source, sourcePort, destinationPort, protocol);
  }

  /** Whether the considered backend is the one that the hash leads to: neither another for a clash, nor one remembered. */
  #isOfHash(row: number): boolean {
    const { snapshot } = this.#core;
    return snapshot.choices[(snapshot.services[row + CHOICES_AT]! + this.#choiceOfHash(row)) * 2] === this.#backendId;
  }

  /** Loads the backend of a choice. */
  #consider(row: number, choice: number): void {
    const { snapshot } = this.#core;
    this.#backendId = snapshot.choices[(snapshot.services[row + CHOICES_AT]! + choice) * 2]!;
    const backend = this.#backendId * BACKEND_WORDS;
    this.#backendAddress = snapshot.backends[backend + BACKEND_ADDRESS]!;
    this.#backendPort = snapshot.backends[backend + BACKEND_PORT]!;
  }

  /**
   * Finds a backend and a source whose reply tuple is free, from `choice` on. The middle of a connection that would need a
   * source of weir's is refused: which one it had is lost. Returns 0 or the reason to refuse.
   *
   * @param isLimited only backends that have room are considered; that of `choice` has
   */
  #settleTuple(row: number, choice: number, mode: number, midStream: boolean, isLimited: boolean): number {
    const { packet, snapshot } = this.#core;
    const count = snapshot.services[row + CHOICES_COUNT]!;
    const hasPool = snapshot.snatAddresses.length !== 0;
    for (let tried = 0; tried < count; tried++) {
      this.#consider(row, (choice + tried) % count);
      if (isLimited && tried !== 0 && !this.#limits.hasRoom(this.#backendId)) continue;
      const hairpin = this.#backendAddress === packet.source;
      if (hairpin && mode !== MODE_SNAT && !hasPool) {
        if (tried === 0) return REASON['hairpin-refused'];
        continue;
      }
      this.#returnAddress = packet.source;
      this.#returnPort = packet.sourcePort;
      const isDirect = mode !== MODE_SNAT && !hairpin;
      if (isDirect && this.#freeReplyTuple(packet.source, packet.sourcePort, true)) return 0;
      if (!isDirect || hasPool) return midStream ? REASON['rst-mid-stream'] : this.#allocate();
    }
    return REASON['reply-tuple-clash'];
  }

  /** Nobody's replies come here: any source will do, but not the backend as its own client. */
  #settleOneWay(row: number, choice: number): number {
    const { packet } = this.#core;
    this.#consider(row, choice);
    this.#returnAddress = packet.source;
    this.#returnPort = packet.sourcePort;
    return this.#backendAddress === packet.source ? REASON['hairpin-refused'] : 0;
  }

  #allocate(): number {
    const { packet, random } = this.#core;
    const clientHash = flowHash(0, 0, packet.source, 0, 0, 0);
    if (!allocatePort(this.#pool, packet.sourcePort, clientHash, random, this, this.#port))
      return REASON['no-snat-port'];
    this.#returnAddress = this.#port.address;
    this.#returnPort = this.#port.port;
    return 0;
  }

  /**
   * Whether nothing live owns the tuple of the considered backend's replies to (address, port). An expired owner is
   * removed; a closing one only where `replaceClosing`, since an snat port stays taken until its entry is gone.
   */
  #freeReplyTuple(address: number, port: number, replaceClosing: boolean): boolean {
    const { packet, nowMs } = this.#core;
    const table = this.#core.tableOf(packet.protocol);
    const ports = (this.#backendPort << 16) | port;
    const hash = table.hash(this.#backendAddress, address, ports, packet.protocol);
    const reference = table.find(this.#backendAddress, address, ports, packet.protocol, hash);
    if (reference < 0) return true;
    const record = reference >> 1;
    if (!table.isExpired(record, nowMs) && !(replaceClosing && isReusable(table, record, nowMs))) return false;
    table.remove(record, CAUSE_REPLACED, nowMs);
    return true;
  }

  #insert(service: number, type: number): number {
    const { packet, nowMs } = this.#core;
    const table: FlowTable = this.#core.tableOf(packet.protocol);
    const record = table.insert(
      packet.protocol,
      type,
      packet.source,
      packet.destination,
      packet.ports,
      this.#backendAddress,
      this.#returnAddress,
      (this.#backendPort << 16) | this.#returnPort,
      service,
      this.#backendId,
      nowMs,
    );
    if (record >= 0 && this.#backendAddress === packet.source)
      table.bytes[record * RECORD_BYTES + FLAGS]! |= LB_LOOPBACK;
    return record;
  }

  /** @param home the backend the client belongs to, if that had no room; 0: the one it got */
  #remember(service: number, row: number, home: number): void {
    const { packet, snapshot, nowMs } = this.#core;
    const seconds = snapshot.services[row + AFFINITY_SECONDS]!;
    const backend = home === 0 ? this.#backendId : home;
    if (seconds !== 0) this.#affinity.set(service, packet.source, backend, nowMs + seconds * 1000);
    snapshot.counters[this.#backendId * COUNTER_ROWS + COUNTER_CONNECTIONS]! += 1;
  }

  /** No backend takes the flow: its client is told, unless the service is silent about that. */
  #reject(row: number, rst: number, reason: number): void {
    const { packet, snapshot } = this.#core;
    if ((snapshot.services[row + SERVICE_FLAGS]! & NO_BACKEND_DROP) !== 0) this.#core.drop(reason);
    else if (packet.protocol === PROTO_TCP) this.#core.rejectTcp(rst, reason);
    else this.#core.rejectUnreachable(PORT_UNREACHABLE, reason);
  }

  /** A lone RST is told to the backend that would have the flow, and leaves nothing behind. */
  #forwardLoneRst(service: number, row: number, choice: number, isDsr: boolean): void {
    this.#consider(row, choice);
    this.#core.noteChoice(service, this.#backendId);
    const { source, sourcePort } = this.#core.packet;
    if (this.#backendAddress === source) this.#core.drop(REASON['unknown-flow']);
    else if (isDsr) {
      if (this.#dsr.accepts(this.#dsr.nodeOf(this.#backendId))) this.#forwardStateless(true, false);
    } else if (!this.#freeReplyTuple(source, sourcePort, false)) this.#core.drop(REASON['reply-tuple-clash']);
    else this.#forwardStateless(false, false);
  }

  /** Rewrites for the considered backend without a record: the hash alone leads every packet of this flow there. */
  #forwardStateless(isDsr: boolean, startsFlow: boolean): void {
    const core = this.#core;
    const { at, l4, protocol, source, destination, ports, partial } = core.packet;
    const toBackend = (ports & ~0xffff) | this.#backendPort;
    rewrite(core.view, core.bytes, at, l4, protocol, source, this.#backendAddress, toBackend, partial);
    if (isDsr) this.#dsr.forward(this.#dsr.nodeOf(this.#backendId), source, destination, ports, protocol, startsFlow);
    else core.forward();
  }
}
