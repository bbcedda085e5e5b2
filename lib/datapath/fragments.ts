import { BATCH_PACKETS } from '../base/limits.js';
import { REASON } from '../base/reasons.js';
import { trackAny } from '../conntrack/any-tracker.js';
import { type DatagramMemory, FragmentTracker, restoreFragment } from '../conntrack/fragments.js';
import { COMMIT, RECORD_BYTES, RECORD_WORDS, STATE } from '../conntrack/record.js';
import { refreshTcp } from '../conntrack/tcp-tracker.js';
import { packetOffset } from '../io/device.js';
import { rewriteAddresses, rewriteIdentification } from '../nat/rewrite.js';
import * as ipv4 from '../wire/ipv4.js';
import type { Core } from './core.js';
import type { DsrStage } from './dsr.js';
import { STAT_REASONS } from './stats.js';
import { DIRECTION_REPLY, DROP, FORWARD, PASS, REPLY } from './verdict.js';

/** What became of a first fragment, and so becomes of the others of its datagram. */
export interface Decision {
  readonly verdict: number;
  /** Of a drop. */
  readonly reason: number;
  /** The addresses and the identification it left with. */
  readonly source: number;
  readonly destination: number;
  readonly id: number;
  readonly service: number;
  readonly backend: number;
  readonly direction: number;
  /** The node it left for through a tunnel, 0: none; and the ports it came with. */
  readonly node: number;
  readonly ports: number;
  /** Its record, to be counted for while it lives under the same generation; -1: none. */
  readonly record: number;
  readonly generation: number;
}

/** Rule 7: the stage for fragments of TCP and UDP. The first goes the way of whole packets, then leads the others. */
export class FragmentStage {
  readonly #core: Core;
  readonly #dsr: DsrStage;
  readonly #tracker: FragmentTracker<Decision>;

  constructor(core: Core, dsr: DsrStage) {
    this.#core = core;
    this.#dsr = dsr;
    this.#tracker = new FragmentTracker(core.memoryEntries);
  }

  /**
   * The first fragment in hand has come to its end: remembers which, and takes those that came too early to the same.
   *
   * @param id the datagram's identification
   */
  lead(id: number): void {
    const { packet, nowMs } = this.#core;
    const { source, destination, protocol } = packet;
    const decision = this.#decisionInHand();
    this.#tracker.remember(source, destination, protocol, id, decision, nowMs);
    for (const fragment of this.#tracker.release(source, destination, protocol, id)) {
      const slot = this.#core.output.take();
      if (slot < 0) {
        this.#core.stats[STAT_REASONS + REASON['fragment-limit']]! += 1;
        continue;
      }
      // Not a packet of this batch: its account goes to the spare row.
      packet.row = BATCH_PACKETS;
      packet.slot = slot;
      packet.at = packetOffset(this.#core.output.memory, slot);
      restoreFragment(fragment, this.#core.bytes, packet.at);
      packet.load(this.#core.view, this.#core.bytes);
      this.#apply(decision);
    }
  }

  /** A fragment that is not the first. */
  follow(): void {
    const core = this.#core;
    const { packet, bytes, view, nowMs } = core;
    const id = ipv4.identification(bytes, packet.at);
    const decision = this.#tracker.lookup(packet.source, packet.destination, packet.protocol, id, nowMs);
    if (decision !== undefined) {
      this.#apply(decision);
      return;
    }
    const refusal = this.#tracker.hold(view, bytes, packet.at, packet.length, nowMs);
    if (refusal === 0) core.hold();
    else core.drop(refusal);
  }

  recall(source: number, destination: number, protocol: number, id: number): DatagramMemory<Decision> {
    return this.#tracker.recall(source, destination, protocol, id);
  }

  assume(datagram: DatagramMemory<Decision>): void {
    this.#tracker.assume(datagram);
  }

  /** Throws away what has waited too long; returns when to call again, ms. */
  expire(): number {
    const count = this.#tracker.expire(this.#core.nowMs);
    this.#core.stats[STAT_REASONS + REASON['fragment-expired']]! += count;
    return this.#tracker.nextDueMs;
  }

  /** From the account of the first fragment; its slot still holds it as it left. */
  #decisionInHand(): Decision {
    const { results, packet, view, bytes } = this.#core;
    const { row } = packet;
    const verdict = results.verdict[row]!;
    const reason = results.reason[row]!;
    const service = results.service[row]!;
    const forwarded = verdict === FORWARD;
    const record = forwarded ? this.#core.lastRecord : -1;
    const table = this.#core.tableOf(packet.protocol);
    return {
      verdict: verdict === REPLY ? DROP : verdict,
      reason: verdict === REPLY ? afterAnswer(reason, service) : reason,
      source: forwarded ? ipv4.source(view, packet.at) : 0,
      destination: forwarded ? ipv4.destination(view, packet.at) : 0,
      id: forwarded ? ipv4.identification(bytes, packet.at) : 0,
      service,
      backend: results.backend[row]!,
      direction: results.direction[row]!,
      node: forwarded ? this.#core.lastNode : 0,
      ports: packet.ports,
      record,
      generation: record < 0 ? 0 : table.words[record * RECORD_WORDS + COMMIT]!,
    };
  }

  #apply(decision: Decision): void {
    const core = this.#core;
    const { packet, results, nowMs } = core;
    results.service[packet.row] = decision.service;
    results.backend[packet.row] = decision.backend;
    results.direction[packet.row] = decision.direction;
    if (decision.verdict !== FORWARD && decision.verdict !== PASS) {
      core.drop(decision.reason);
      return;
    }
    // An address that has become weir's own since: it would come back, and follow again.
    if (core.isOwn(decision.verdict === PASS ? packet.destination : decision.destination)) {
      core.drop(REASON['unknown-flow']);
      return;
    }
    if (decision.verdict === PASS) {
      core.pass();
      return;
    }
    const { record, node, ports } = decision;
    const { protocol } = packet;
    if (node !== 0 && !this.#dsr.accepts(node)) return;
    const table = core.tableOf(protocol);
    const isSame = record >= 0 && table.words[record * RECORD_WORDS + COMMIT] === decision.generation;
    if (isSame && !table.isExpired(record, nowMs)) {
      const isReply = decision.direction === DIRECTION_REPLY;
      const { timeouts } = core.snapshot;
      if (protocol === ipv4.PROTO_TCP) refreshTcp(table, record, nowMs, timeouts);
      else trackAny(table, record, isReply, nowMs, timeouts);
      core.account(table, record, isReply);
      results.state[packet.row] = table.bytes[record * RECORD_BYTES + STATE]!;
    }
    rewriteAddresses(core.view, core.bytes, packet.at, decision.source, decision.destination);
    rewriteIdentification(core.view, core.bytes, packet.at, decision.id);
    if (node === 0) core.forward();
    else {
      const startsFlow = protocol !== ipv4.PROTO_TCP;
      this.#dsr.forward(node, packet.source, packet.destination, ports, protocol, startsFlow);
    }
  }
}

/** The rest of a datagram whose first fragment was answered is dropped for what the answer said. */
function afterAnswer(reason: number, service: number): number {
  switch (reason) {
    case REASON['rst-mid-stream']:
      return REASON['unknown-flow'];
    case REASON['rst-no-backend']:
      return REASON['no-backend'];
    case REASON['rst-connection-limit']:
      return REASON['connection-limit'];
    case REASON['rst-unknown-port']:
      return REASON['unknown-port'];
    case REASON['frag-needed']:
      return REASON['mtu-exceeded'];
    default:
      return service === 0 ? REASON['unknown-port'] : REASON['no-backend'];
  }
}
