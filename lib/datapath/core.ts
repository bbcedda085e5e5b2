import { lookup } from '../balance/lookup.js';
import { BATCH_PACKETS } from '../base/limits.js';
import type { Random } from '../base/random.js';
import { REASON } from '../base/reasons.js';
import type { FlowTable } from '../conntrack/flow-table.js';
import { IdentificationTable } from '../conntrack/identifications.js';
import { BACKEND_ID, RECORD_BYTES, RECORD_WORDS, SERVICE, STATE } from '../conntrack/record.js';
import { account } from '../conntrack/tcp-tracker.js';
import type { PacketOutput } from '../io/device.js';
import type { ErrorSocket } from '../io/error-socket.js';
import { type Answer, answerRst, answerUnreachable, mayAnswer } from '../nat/answer.js';
import { AnswerLimiter } from '../nat/rate-limit.js';
import { rewriteIdentification } from '../nat/rewrite.js';
import { FRAGMENTATION_NEEDED } from '../wire/icmp.js';
import * as ipv4 from '../wire/ipv4.js';
import { isOwnAddress } from './own-address.js';
import { CurrentPacket } from './packet.js';
import {
  BACKEND_WORDS,
  COUNTER_CLOSED,
  COUNTER_REFUSED,
  COUNTER_ROWS,
  COUNTER_RX_BYTES,
  COUNTER_RX_PACKETS,
  COUNTER_TX_BYTES,
  COUNTER_TX_PACKETS,
  COUNTER_UNANSWERED,
  SERVICE_WORDS,
  type Snapshot,
} from './snapshot.js';
import { STAT_FORWARDED, STAT_REASONS, STAT_TX_BYTES, STAT_TX_PACKETS } from './stats.js';
import { DIRECTION_ORIGINAL, DIRECTION_REPLY, DROP, FORWARD, HOLD, makeResults, PASS, REPLY } from './verdict.js';

/** What a pipeline is made of; tests and replay hand in memory devices and seeded randomness. */
export interface PipelineParts {
  /** Connections of TCP, and of everything else. */
  readonly tcp: FlowTable;
  readonly any: FlowTable;
  readonly output: PacketOutput;
  readonly random: Random;
  readonly stats: Float64Array;
  /** Until when (the pipeline's clock, ms) replies without an entry may be picked up; -Infinity: never. */
  readonly recoveringSince?: number;
  /** Clients whose affinity is remembered at once; default AFFINITY_ENTRIES. */
  readonly affinityEntries?: number;
  /** What else there is to remember, of each kind at most this many: for a pipeline that only sees a packet. */
  readonly memoryEntries?: number;
  /** Of a gateway on a live device: errors about its tunnels that the kernel keeps. */
  readonly errors?: ErrorSocket;
}

/**
 * What the stages of a pipeline share: the packet in hand, the snapshot in use, and the ways a packet can end. Every packet
 * ends in exactly one of `forward`, `pass`, `drop`, `hold` or an answer, each of which gives its slot back.
 */
export class Core {
  readonly packet = new CurrentPacket();
  readonly results = makeResults(BATCH_PACKETS + 1);
  readonly tcp: FlowTable;
  readonly any: FlowTable;
  readonly output: PacketOutput;
  readonly bytes: Uint8Array;
  readonly view: DataView;
  readonly random: Random;
  readonly stats: Float64Array;
  readonly limiter: AnswerLimiter;
  readonly recoveringSince: number;
  readonly affinityEntries: number | undefined;
  readonly memoryEntries: number | undefined;
  readonly errors: ErrorSocket | undefined;

  snapshot!: Snapshot;
  nowMs = 0;
  /** The record the packet in hand belongs to, -1: none. */
  lastRecord = -1;
  /** The node it left for through a tunnel, 0: none. */
  lastNode = 0;

  readonly #answer: Answer = { offset: 0, length: 0 };
  readonly #identifications: IdentificationTable;

  constructor(parts: PipelineParts) {
    this.tcp = parts.tcp;
    this.any = parts.any;
    this.output = parts.output;
    this.bytes = parts.output.memory.bytes;
    this.view = parts.output.memory.view;
    this.random = parts.random;
    this.stats = parts.stats;
    this.errors = parts.errors;
    this.recoveringSince = parts.recoveringSince ?? Number.NEGATIVE_INFINITY;
    this.affinityEntries = parts.affinityEntries;
    this.memoryEntries = parts.memoryEntries;
    this.limiter = new AnswerLimiter(parts.memoryEntries);
    this.#identifications = new IdentificationTable(parts.memoryEntries);
    this.tcp.onRefused = (backend) => this.#count(backend, COUNTER_REFUSED);
    this.tcp.onUnanswered = (backend) => this.#count(backend, COUNTER_UNANSWERED);
    for (const table of [this.tcp, this.any]) table.onClosed = (backend) => this.#count(backend, COUNTER_CLOSED);
  }

  /** Makes `snapshot` the configuration in use; counts go on where its counters are new. */
  use(snapshot: Snapshot): void {
    const before = this.snapshot as Snapshot | undefined;
    // Where they have grown, with what was counted while they did.
    const counted = before?.counters;
    if (counted !== undefined && counted.length !== snapshot.counters.length) snapshot.counters.set(counted);
    this.snapshot = snapshot;
    const { services, backends } = snapshot;
    for (const table of [this.tcp, this.any]) {
      table.open.fit(services.length / SERVICE_WORDS, backends.length / BACKEND_WORDS);
      if (before === undefined) table.recount();
    }
  }

  tableOf(protocol: number): FlowTable {
    return protocol === ipv4.PROTO_TCP ? this.tcp : this.any;
  }

  /** The VIP_* bits of an address, 0 when it is no VIP. */
  vipBits(address: number): number {
    return lookup(this.snapshot.vipIndex, address, 0, 0);
  }

  isSnatAddress(address: number): boolean {
    return lookup(this.snapshot.snatIndex, address, 0, 0) !== 0;
  }

  /** Whether what is sent to this address comes back: it is a VIP or an snat address. */
  isOwn(address: number): boolean {
    return isOwnAddress(this.snapshot, address);
  }

  /** Notes which flow the packet belongs to, for whoever watches. */
  noteFlow(table: FlowTable, record: number, isReply: boolean): void {
    const { results, packet } = this;
    const word = record * RECORD_WORDS;
    this.lastRecord = record;
    results.direction[packet.row] = isReply ? DIRECTION_REPLY : DIRECTION_ORIGINAL;
    results.service[packet.row] = table.words[word + SERVICE]!;
    results.backend[packet.row] = table.words[word + BACKEND_ID]!;
    results.state[packet.row] = table.bytes[record * RECORD_BYTES + STATE]!;
  }

  /** The same for a packet that has no record. */
  noteChoice(service: number, backend: number): void {
    const { results, packet } = this;
    results.direction[packet.row] = DIRECTION_ORIGINAL;
    results.service[packet.row] = service;
    results.backend[packet.row] = backend;
  }

  /** The same for a reply that has no record. */
  noteReply(service: number, backend: number): void {
    this.noteChoice(service, backend);
    this.results.direction[this.packet.row] = DIRECTION_REPLY;
  }

  /** Counts the packet in hand for its flow, and for the flow's backend. */
  account(table: FlowTable, record: number, isReply: boolean): void {
    const { packet, nowMs } = this;
    const { counters } = this.snapshot;
    const row = table.words[record * RECORD_WORDS + BACKEND_ID]! * COUNTER_ROWS;
    account(table, record, isReply, packet.length, nowMs);
    counters[row + (isReply ? COUNTER_RX_PACKETS : COUNTER_TX_PACKETS)]! += 1;
    counters[row + (isReply ? COUNTER_RX_BYTES : COUNTER_TX_BYTES)]! += packet.length;
  }

  /** Sends the rewritten packet on, with what was put before it. */
  forward(at = this.packet.at): void {
    const { packet, stats } = this;
    const length = packet.at + packet.length - at;
    if (packet.leads) this.distinguish();
    this.results.verdict[packet.row] = FORWARD;
    stats[STAT_FORWARDED]! += 1;
    stats[STAT_TX_PACKETS]! += 1;
    stats[STAT_TX_BYTES]! += length;
    this.output.transmit(packet.slot, at, length);
  }

  /** The packet was sent on in other slots. */
  forwarded(writes: number, bytes: number): void {
    const { packet, stats } = this;
    this.results.verdict[packet.row] = FORWARD;
    stats[STAT_FORWARDED]! += 1;
    stats[STAT_TX_PACKETS]! += writes;
    stats[STAT_TX_BYTES]! += bytes;
    this.output.release(packet.slot);
  }

  /** Sends the packet on as it came (rule 8). */
  pass(): void {
    const { packet, stats } = this;
    this.#settle(PASS, REASON['not-tracked']);
    stats[STAT_TX_PACKETS]! += 1;
    stats[STAT_TX_BYTES]! += packet.length;
    this.output.transmit(packet.slot, packet.at, packet.length);
  }

  /** Rule 8: a direct connection to a backend keeps working, unless the configuration says otherwise. */
  passUntracked(): void {
    const { packet, snapshot } = this;
    const refused =
      snapshot.dropUntracked && lookup(snapshot.endpointIndex, packet.source, packet.sourcePort, packet.protocol) !== 0;
    if (refused) this.drop(REASON['untracked-reply']);
    else this.pass();
  }

  /** Drops what does not have the slot for itself: it stays whose it is. */
  refuse(reason: number): void {
    this.#settle(DROP, reason);
  }

  drop(reason: number): void {
    this.#settle(DROP, reason);
    this.output.release(this.packet.slot);
  }

  /** The packet was copied elsewhere and will come back. */
  hold(): void {
    this.results.verdict[this.packet.row] = HOLD;
    this.output.release(this.packet.slot);
  }

  /** The packet has been answered in other slots than its own. */
  answered(reason: number): void {
    this.#settle(REPLY, reason);
    this.output.release(this.packet.slot);
  }

  /** Answers with an RST, or drops by `otherwise` when no answer is due. */
  rejectTcp(reason: number, otherwise: number): void {
    if (this.#mayAnswer(otherwise)) {
      answerRst(this.output.memory, this.packet.at, this.packet.length, this.#answer);
      this.#sendAnswer(reason);
    }
  }

  /** Answers with an ICMP unreachable of `code` from the packet's destination, or drops by `otherwise`. */
  rejectUnreachable(code: number, otherwise: number): void {
    if (this.#mayAnswer(otherwise)) {
      answerUnreachable(this.output.memory, this.packet.at, this.packet.length, code, 0, this.#answer);
      this.#sendAnswer(REASON.unreachable);
    }
  }

  /** Answers that no more than `mtu` bytes get through, or drops. */
  rejectTooBig(mtu: number): void {
    if (this.#mayAnswer(REASON['mtu-exceeded'])) {
      const { memory } = this.output;
      answerUnreachable(memory, this.packet.at, this.packet.length, FRAGMENTATION_NEEDED, mtu, this.#answer);
      this.#sendAnswer(REASON['frag-needed']);
    }
  }

  /** Sends what `build` made of the packet, or drops it by `otherwise` when no answer is due. */
  answer(
    build: (memory: Core['output']['memory'], at: number, length: number, into: Answer) => void,
    reason: number,
    otherwise: number,
  ): void {
    if (this.#mayAnswer(otherwise)) {
      build(this.output.memory, this.packet.at, this.packet.length, this.#answer);
      this.#sendAnswer(reason);
    }
  }

  /** Gives the first fragment in hand, or what is to be fragmented, rewritten already, an identification of its own where it now goes. */
  distinguish(): void {
    const { packet, view, bytes, nowMs } = this;
    const { at, source, destination, protocol } = packet;
    const id = ipv4.identification(bytes, at);
    const newSource = ipv4.source(view, at);
    const newDestination = ipv4.destination(view, at);
    const claimed = this.#identifications.claim(source, destination, protocol, id, newSource, newDestination, nowMs);
    rewriteIdentification(view, bytes, at, claimed);
  }

  /** RFC 1122 3.2.2, weir's own addresses and the rate limits; drops the packet itself when the answer is no. */
  #mayAnswer(otherwise: number): boolean {
    const { packet } = this;
    if (!mayAnswer(this.bytes, this.view, packet.at) || this.isOwn(packet.source)) {
      this.drop(otherwise);
      return false;
    }
    if (!this.limiter.allow(packet.source, this.nowMs)) {
      this.drop(REASON['rate-limited']);
      return false;
    }
    return true;
  }

  #sendAnswer(reason: number): void {
    const answer = this.#answer;
    this.#settle(REPLY, reason);
    this.stats[STAT_TX_PACKETS]! += 1;
    this.stats[STAT_TX_BYTES]! += answer.length;
    this.output.transmit(this.packet.slot, answer.offset, answer.length);
  }

  #count(backend: number, counter: number): void {
    this.snapshot.counters[backend * COUNTER_ROWS + counter]! += 1;
  }

  #settle(verdict: number, reason: number): void {
    const { results, packet } = this;
    results.verdict[packet.row] = verdict;
    results.reason[packet.row] = reason;
    this.stats[STAT_REASONS + reason]! += 1;
  }
}
