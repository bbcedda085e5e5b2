import { BATCH_PACKETS } from '../base/limits.js';
import type { PacketBatch, PacketOutput } from '../io/device.js';
import * as ipv4 from '../wire/ipv4.js';
import * as vnet from '../wire/vnet.js';
import {
  CaptureRingWriter,
  ENTRY_DATAGRAM,
  ENTRY_FLAGS,
  ENTRY_IN,
  ENTRY_NEW,
  ENTRY_OUT,
  ENTRY_PARTIAL,
  GSO,
  KIND,
  ORIGINAL_BYTES,
  OUTCOME,
  OUTCOME_BACKEND,
  OUTCOME_SERVICE,
  PACKET_NUMBER,
  PEER,
} from './capture-ring.js';
import type { Pipeline } from './pipeline.js';
import type { Results } from './verdict.js';

/** What is captured; plain values, to be handed to the data path. */
export interface CaptureRequest {
  readonly ring: SharedArrayBuffer;
  /** Ids; null: of any. */
  readonly services: Int32Array | null;
  readonly backends: Int32Array | null;
  /** Packets to or from it, on either side of the translation; port -1: any. */
  readonly client: { readonly address: number; readonly mask: number; readonly port: number } | null;
  /** The most that is captured of a packet. */
  readonly snapBytes: number;
}

/** Bytes of one batch that are kept until it is known what became of them; what is beyond is lost. */
const STAGE_BYTES = 8 * 1024 * 1024;

/** Packets out of one batch, likewise. */
const STAGE_OUT = 4 * BATCH_PACKETS;

/** The row of what is sent outside a batch. */
const NO_ROW = -1;

/**
 * Between the pipeline and the device: while somebody captures, both sides of each packet are copied for it. Without, it is one
 * test for each packet sent and two for each batch.
 *
 * A packet is rewritten where it lies, and what it belongs to is known when the pipeline is through with it. So a batch is copied
 * aside before (`before`), each packet sent is as it goes (`transmit`), and when it is known what became of them (`after`) those that
 * were asked for go into the ring: each packet in, followed by what it caused to be sent.
 */
export class Tap implements PacketOutput {
  readonly memory;
  readonly features;
  isOn = false;

  readonly #output: PacketOutput;
  #pipeline: Pipeline | undefined;
  #request!: CaptureRequest;
  #writer!: CaptureRingWriter;
  /** Packets in that were captured. */
  #number = 0;

  #stage = new Uint8Array(0);
  #used = 0;
  #isInBatch = false;
  // Of the packets in, by row: what `before` saw. A length of -1: it could not be kept.
  readonly #inAt = new Int32Array(BATCH_PACKETS);
  readonly #inLength = new Int32Array(BATCH_PACKETS);
  readonly #inGso = new Int32Array(BATCH_PACKETS);
  readonly #inPartial = new Uint8Array(BATCH_PACKETS);
  // Of the packets out, in order.
  #outs = 0;
  readonly #outRow = new Int32Array(STAGE_OUT);
  readonly #outAt = new Int32Array(STAGE_OUT);
  readonly #outLength = new Int32Array(STAGE_OUT);
  readonly #outOriginal = new Int32Array(STAGE_OUT);
  readonly #outGso = new Int32Array(STAGE_OUT);
  readonly #outPartial = new Uint8Array(STAGE_OUT);
  readonly #outService = new Int32Array(STAGE_OUT);
  readonly #outBackend = new Int32Array(STAGE_OUT);

  constructor(output: PacketOutput) {
    this.#output = output;
    this.memory = output.memory;
    this.features = output.features;
  }

  /** @param pipeline that sends through this */
  attach(pipeline: Pipeline): void {
    this.#pipeline = pipeline;
  }

  /** Captures from the next batch on; null: no more. */
  use(request: CaptureRequest | null): void {
    this.isOn = request !== null;
    if (request === null) return;
    // Kept for the next capture: what this thread lets go of is not collected for hours.
    if (this.#stage.length === 0) this.#stage = new Uint8Array(STAGE_BYTES);
    this.#request = request;
    this.#writer = new CaptureRingWriter(request.ring);
    this.#number = 0;
  }

  transmit(slot: number, offset: number, length: number): void {
    if (this.isOn) this.#sees(offset, length);
    this.#output.transmit(slot, offset, length);
  }

  release(slot: number): void {
    this.#output.release(slot);
  }

  take(): number {
    return this.#output.take();
  }

  /** Keeps the packets of a batch as they came. */
  before(batch: PacketBatch): void {
    const { bytes } = this.memory;
    this.#used = 0;
    this.#outs = 0;
    this.#isInBatch = true;
    const { isNew } = this.#pipeline!.results;
    for (let row = 0; row < batch.count; row++) {
      const at = batch.offset[row]!;
      isNew[row] = 0;
      this.#inGso[row] = gsoOf(bytes, at);
      this.#inPartial[row] = bytes[at - vnet.VNET_HEADER_BYTES]! & vnet.NEEDS_CSUM;
      this.#inAt[row] = this.#used;
      this.#inLength[row] = this.#keep(at, batch.length[row]!);
    }
  }

  /** Hands over what was asked for, now that `results` tell what became of the batch. */
  after(batch: PacketBatch, nowMs: number): void {
    const { results } = this.#pipeline!;
    this.#isInBatch = false;
    for (let row = 0; row < batch.count; row++)
      if (this.#wants(batch, results, row)) this.#hand(batch, results, row, nowMs);
    for (let out = 0; out < this.#outs; out++) {
      if (this.#outRow[out] === BATCH_PACKETS && this.#wantsLoose(out)) this.#handOut(out, 0, nowMs);
    }
  }

  /** A packet on its way out. */
  #sees(offset: number, length: number): void {
    if (!this.#isInBatch) {
      this.#used = 0;
      this.#outs = 0;
    }
    const out = this.#outs;
    if (out === STAGE_OUT) {
      this.#writer.lose(1);
      return;
    }
    const { bytes } = this.memory;
    const at = this.#used;
    const kept = this.#keep(offset, length);
    if (kept < 0) {
      this.#writer.lose(1);
      return;
    }
    this.#outs = out + 1;
    const { results, row } = this.#pipeline!;
    this.#outRow[out] = this.#isInBatch ? row : NO_ROW;
    this.#outService[out] = this.#isInBatch ? results.service[row]! : 0;
    this.#outBackend[out] = this.#isInBatch ? results.backend[row]! : 0;
    this.#outAt[out] = at;
    this.#outLength[out] = kept;
    this.#outOriginal[out] = length;
    this.#outGso[out] = gsoOf(bytes, offset);
    this.#outPartial[out] = bytes[offset - vnet.VNET_HEADER_BYTES]! & vnet.NEEDS_CSUM;
    if (!this.#isInBatch && this.#wantsLoose(out)) this.#handOut(out, 0, this.#pipeline!.nowMs);
  }

  /** Copies a packet aside. @returns the bytes that were kept of it; -1: there is no room */
  #keep(offset: number, length: number): number {
    const kept = Math.min(length, this.#request.snapBytes);
    if (this.#used + kept > this.#stage.length) return -1;
    this.#stage.set(this.memory.bytes.subarray(offset, offset + kept), this.#used);
    this.#used += kept;
    return kept;
  }

  #wants({ datagramBytes }: PacketBatch, results: Results, row: number): boolean {
    const { services, backends, client } = this.#request;
    if (services !== null && !services.includes(results.service[row]!)) return false;
    if (backends !== null && !backends.includes(results.backend[row]!)) return false;
    if (client === null) return true;
    if (datagramBytes[row] === 0 && this.#isOfClient(this.#inAt[row]!, this.#inLength[row]!)) return true;
    for (let out = 0; out < this.#outs; out++) {
      if (this.#outRow[out] === row && this.#isOfClient(this.#outAt[out]!, this.#outLength[out]!)) return true;
    }
    return false;
  }

  /** What no packet of the batch was: a fragment that was held before; or something weir sent by itself, of which nobody says whose it is. */
  #wantsLoose(out: number): boolean {
    const { services, backends, client } = this.#request;
    if (services !== null && !services.includes(this.#outService[out]!)) return false;
    if (backends !== null && !backends.includes(this.#outBackend[out]!)) return false;
    return client === null || this.#isOfClient(this.#outAt[out]!, this.#outLength[out]!);
  }

  #isOfClient(at: number, length: number): boolean {
    const { address, mask, port } = this.#request.client!;
    if (length < ipv4.IPV4_HEADER_BYTES) return false;
    const bytes = this.#stage;
    const source = word(bytes, at + 12);
    const destination = word(bytes, at + 16);
    const isFrom = ((source ^ address) & mask) === 0;
    const isTo = ((destination ^ address) & mask) === 0;
    if (port < 0) return isFrom || isTo;
    const l4 = at + ipv4.headerLength(bytes, at);
    if (l4 + 4 > at + length || ipv4.fragmentOffset(bytes, at) !== 0) return false;
    const ports = word(bytes, l4);
    return (isFrom && ports >>> 16 === port) || (isTo && (ports & 0xffff) === port);
  }

  #hand({ length, datagramBytes, peer }: PacketBatch, results: Results, row: number, nowMs: number): void {
    const { entry } = this.#writer;
    const number = ++this.#number;
    entry[PACKET_NUMBER] = number;
    entry[OUTCOME] =
      results.verdict[row]! |
      (results.reason[row]! << 8) |
      (results.direction[row]! << 16) |
      (results.state[row]! << 24);
    entry[OUTCOME_SERVICE] = results.service[row]!;
    entry[OUTCOME_BACKEND] = results.backend[row]!;
    entry[PEER] = peer[row]!;
    const kept = this.#inLength[row]!;
    const whole = length[row]!;
    if (datagramBytes[row] === 0) {
      entry[KIND] = ENTRY_IN;
      entry[GSO] = this.#inGso[row]!;
      entry[ORIGINAL_BYTES] = whole;
      entry[ENTRY_FLAGS] =
        (results.isNew[row] !== 0 ? ENTRY_NEW : 0) | (this.#inPartial[row] !== 0 ? ENTRY_PARTIAL : 0);
      if (kept < 0) this.#writer.lose(1);
      else this.#writer.write(this.#stage, this.#inAt[row]!, kept, nowMs);
    } else {
      entry[KIND] = ENTRY_DATAGRAM;
      entry[GSO] = 0;
      entry[ENTRY_FLAGS] = results.isNew[row] !== 0 ? ENTRY_NEW : 0;
      for (let from = 0; from < whole; from += datagramBytes[row]!) {
        const bytes = Math.min(datagramBytes[row]!, whole - from);
        const there = Math.min(bytes, kept - from);
        entry[ORIGINAL_BYTES] = bytes;
        if (there <= 0) this.#writer.lose(1);
        else this.#writer.write(this.#stage, this.#inAt[row]! + from, there, nowMs);
      }
    }
    for (let out = 0; out < this.#outs; out++) if (this.#outRow[out] === row) this.#handOut(out, number, nowMs);
  }

  #handOut(out: number, number: number, nowMs: number): void {
    const { entry } = this.#writer;
    entry[KIND] = ENTRY_OUT;
    entry[PACKET_NUMBER] = number;
    entry[ORIGINAL_BYTES] = this.#outOriginal[out]!;
    entry[GSO] = this.#outGso[out]!;
    entry[OUTCOME_SERVICE] = this.#outService[out]!;
    entry[OUTCOME_BACKEND] = this.#outBackend[out]!;
    entry[ENTRY_FLAGS] = this.#outPartial[out] !== 0 ? ENTRY_PARTIAL : 0;
    this.#writer.write(this.#stage, this.#outAt[out]!, this.#outLength[out]!, nowMs);
  }
}

function gsoOf(bytes: Uint8Array, at: number): number {
  return vnet.gsoType(bytes, at) | (vnet.gsoSize(bytes, at) << 8);
}

/** Four bytes as a signed word, wherever they lie. */
function word(bytes: Uint8Array, at: number): number {
  return (bytes[at]! << 24) | (bytes[at + 1]! << 16) | (bytes[at + 2]! << 8) | bytes[at + 3]!;
}
