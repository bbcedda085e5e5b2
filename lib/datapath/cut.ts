import { CAUSE_CUT } from '../conntrack/events.js';
import type { FlowTable } from '../conntrack/flow-table.js';
import {
  BACKEND,
  BACKEND_ID,
  CLIENT,
  COMMIT,
  ESTABLISHED,
  MARK_SYN_PENDING,
  MARK_SYN_SEEN,
  MARK_WINDOWS,
  MARKS,
  ORIGINAL_PORTS,
  PROTOCOL,
  RECORD_BYTES,
  RECORD_WORDS,
  REPLIED,
  REPLY_PORTS,
  RETURN,
  RX_END,
  STATE,
  SYN_SENT,
  TX_END,
  TYPE,
  TYPE_SVC,
  VIP,
} from '../conntrack/record.js';
import { packetOffset } from '../io/device.js';
import { type Answer, buildPortUnreachable, buildRst } from '../nat/answer.js';
import { PROTO_TCP } from '../wire/ipv4.js';
import { ACK, RST } from '../wire/tcp.js';
import type { Core } from './core.js';
import type { DsrStage } from './dsr.js';
import { isOwnAddress } from './own-address.js';
import { swapPorts } from './packet.js';
import type { Snapshot } from './snapshot.js';
import { STAT_CUT, STAT_TX_BYTES, STAT_TX_PACKETS } from './stats.js';

/** Records looked at in one call, and as how many of them the end of one counts: a fraction of a millisecond. */
const SLICE_RECORDS = 2048;
const END_COST = 8;

/**
 * Ends the flows of backends whose time is over: `cutAt` in the snapshot, the drain time after a removal, or the removal itself
 * under `onRemove: reset`; and flows whose backend or client has become an address of weir's own.
 *
 * Both ends of a TCP connection get an RST that lies exactly where their window begins, since anything else is only a challenge to
 * them (RFC 5961): everything weir has seen from the one was sent on to the other before. A UDP client gets an ICMP port
 * unreachable. These are not answers and do not count to their limits.
 *
 *     waiting --earliest cutAt has come--> sweeping, in slices --end of the tables--> waiting for the next
 *
 * Connections that were picked up in the middle have no sequence numbers to go by: their entry is dropped, and the next packet of
 * the client meets another backend, which resets it. Of a one-way entry the client's own numbers tell what either end expects, as
 * long as nothing is under way to the client.
 *
 * A backend whose SYN-ACK was not seen gets an RST without ACK, since there is nothing known to acknowledge.
 */
export class CutStage {
  readonly #core: Core;
  readonly #dsr: DsrStage;
  readonly #answer: Answer = { offset: 0, length: 0 };
  /** Everything due up to here has been swept. */
  #sweptMs = Number.NEGATIVE_INFINITY;
  #dueMs = Number.POSITIVE_INFINITY;
  #sweepingMs = 0;
  #cutAt: Float64Array = new Float64Array(0);
  #ownSince = 0;
  /** Of both tables, TCP's first; -1: not sweeping. */
  #cursor = -1;

  constructor(core: Core, dsr: DsrStage) {
    this.#core = core;
    this.#dsr = dsr;
  }

  /** Looks for the next deadline in a new snapshot. A VIP that is new to it may be a live flow's backend: that is due at once. */
  use(): void {
    const { cutAt, leaving, ownSince } = this.#core.snapshot;
    // A deadline set while a sweep for others went on, or in its very millisecond.
    const isMissed = leaving.some((id) => cutAt[id]! <= this.#sweptMs && cutAt[id] !== this.#cutAt[id]);
    this.#cutAt = cutAt;
    const ownIsNew = ownSince !== this.#ownSince;
    this.#ownSince = ownSince;
    // Ids may mean others now: a sweep under way begins anew.
    if (ownIsNew || isMissed || this.#cursor >= 0) this.#sweptMs = Number.NEGATIVE_INFINITY;
    this.#cursor = -1;
    this.#schedule();
    if (ownIsNew) this.#dueMs = Number.NEGATIVE_INFINITY;
  }

  /** Does what is due, a slice of it; returns when to call again, ms. */
  run(): number {
    const { nowMs, tcp, any } = this.#core;
    if (this.#cursor < 0) {
      if (nowMs < this.#dueMs) return this.#dueMs;
      this.#cursor = 0;
      this.#sweepingMs = nowMs;
    }
    const total = tcp.highWater + any.highWater;
    for (let left = SLICE_RECORDS; left > 0 && this.#cursor < total; this.#cursor++) {
      const inTcp = this.#cursor < tcp.highWater;
      const cost = this.#visit(inTcp ? tcp : any, inTcp ? this.#cursor : this.#cursor - tcp.highWater);
      if (cost === 0) return nowMs;
      left -= cost;
    }
    if (this.#cursor < total) return nowMs;
    this.#cursor = -1;
    this.#sweptMs = this.#sweepingMs;
    this.#schedule();
    return this.#dueMs;
  }

  #schedule(): void {
    this.#dueMs = Number.POSITIVE_INFINITY;
    const { cutAt, leaving } = this.#core.snapshot;
    for (const id of leaving) {
      const atMs = cutAt[id]!;
      if (atMs > this.#sweptMs && atMs < this.#dueMs) this.#dueMs = atMs;
    }
  }

  /** Ends a flow whose time is over. Returns what that cost, in records; 0 when there was no slot for the packets: to be tried again. */
  #visit(table: FlowTable, record: number): number {
    const { words } = table;
    const word = record * RECORD_WORDS;
    if (words[word + COMMIT] === 0) return 1;
    if (!isOver(this.#core.snapshot, words, word, this.#sweepingMs)) return 1;
    if (!table.isExpired(record, this.#core.nowMs)) {
      if (this.tell(table, record) < 0) return 0;
      this.#core.stats[STAT_CUT]! += 1;
    }
    table.remove(record, CAUSE_CUT, this.#core.nowMs);
    return END_COST;
  }

  /** Tells the ends of a flow that it is over. Returns in how many packets, -1 when there was no slot for them. */
  tell(table: FlowTable, record: number): number {
    const at = record * RECORD_BYTES;
    const state = table.bytes[at + STATE]!;
    if (table.bytes[at + PROTOCOL] !== PROTO_TCP) return state === REPLIED ? this.#tellUnreachable(table, record) : 0;
    const hasNumbers = (table.bytes[at + MARKS]! & (state === SYN_SENT ? MARK_SYN_SEEN : MARK_WINDOWS)) !== 0;
    const isReached = table.bytes[at + TYPE] === TYPE_SVC ? this.#core.snapshot.tunnel.address !== 0 : hasNumbers;
    return state <= ESTABLISHED && isReached ? this.#resetBoth(table, record) : 0;
  }

  /** Tells the backend of a one-way TCP flow, whose client gets an answer to its packet, that the flow is over. */
  tellNode(table: FlowTable, record: number): void {
    const { output, snapshot } = this.#core;
    if (table.bytes[record * RECORD_BYTES + STATE]! > ESTABLISHED || snapshot.tunnel.address === 0) return;
    const slot = output.take();
    if (slot >= 0) this.#resetBackend(slot, table, record);
  }

  #resetBoth(table: FlowTable, record: number): number {
    const { words } = table;
    const word = record * RECORD_WORDS;
    const { output } = this.#core;
    const first = output.take();
    const second = output.take();
    if (second < 0) {
      if (first >= 0) output.release(first);
      return -1;
    }
    const toClient = swapPorts(words[word + ORIGINAL_PORTS]!);
    const sequence = words[word + RX_END]!;
    this.#buildRst(
      first,
      words[word + VIP]!,
      words[word + CLIENT]!,
      toClient,
      sequence,
      words[word + TX_END]!,
      RST | ACK,
    );
    this.#send(first);
    this.#resetBackend(second, table, record);
    return 2;
  }

  #resetBackend(slot: number, table: FlowTable, record: number): void {
    const { words } = table;
    const word = record * RECORD_WORDS;
    const toBackend = swapPorts(words[word + REPLY_PORTS]!);
    const sequence = words[word + TX_END]!;
    const isOneWay = table.bytes[record * RECORD_BYTES + TYPE] === TYPE_SVC;
    const isOpening =
      table.bytes[record * RECORD_BYTES + STATE] === SYN_SENT ||
      (isOneWay && (table.bytes[record * RECORD_BYTES + MARKS]! & MARK_SYN_PENDING) !== 0);
    const [source, backend] = [words[word + RETURN]!, words[word + BACKEND]!];
    if (isOpening) this.#buildRst(slot, source, backend, toBackend, sequence, 0, RST);
    else this.#buildRst(slot, source, backend, toBackend, sequence, words[word + RX_END]!, RST | ACK);
    if (isOneWay) this.#wrap(table, record);
    this.#send(slot);
  }

  #buildRst(
    slot: number,
    source: number,
    destination: number,
    ports: number,
    sequence: number,
    ack: number,
    flags: number,
  ): void {
    const { memory } = this.#core.output;
    const at = packetOffset(memory, slot);
    buildRst(memory, at, source, destination, ports, sequence, ack, flags, this.#answer);
  }

  /** Puts what was built into the tunnel to the flow's node. */
  #wrap({ words }: FlowTable, record: number): void {
    const answer = this.#answer;
    const word = record * RECORD_WORDS;
    const end = answer.offset + answer.length;
    answer.offset = this.#dsr.wrap(
      answer.offset,
      answer.length,
      this.#dsr.nodeOf(words[word + BACKEND_ID]!),
      words[word + CLIENT]!,
      words[word + VIP]!,
      words[word + ORIGINAL_PORTS]!,
      PROTO_TCP,
    );
    answer.length = end - answer.offset;
  }

  #tellUnreachable(table: FlowTable, record: number): number {
    const { words } = table;
    const word = record * RECORD_WORDS;
    const { output } = this.#core;
    const slot = output.take();
    if (slot < 0) return -1;
    const at = packetOffset(output.memory, slot);
    const ports = words[word + ORIGINAL_PORTS]!;
    buildPortUnreachable(output.memory, at, words[word + CLIENT]!, words[word + VIP]!, ports, this.#answer);
    this.#send(slot);
    return 1;
  }

  #send(slot: number): void {
    const { output, stats } = this.#core;
    const { offset, length } = this.#answer;
    stats[STAT_TX_PACKETS]! += 1;
    stats[STAT_TX_BYTES]! += length;
    output.transmit(slot, offset, length);
  }
}

/**
 * Whether a flow is to be cut: the time of its backend has come, or one of its ends has become weir's own, and what is sent there
 * would come back.
 *
 * @param word where its record begins
 */
export function isOver(snapshot: Snapshot, words: Int32Array, word: number, atMs: number): boolean {
  if (snapshot.cutAt[words[word + BACKEND_ID]!]! <= atMs) return true;
  return isOwnAddress(snapshot, words[word + BACKEND]!) || isOwnAddress(snapshot, words[word + CLIENT]!);
}
