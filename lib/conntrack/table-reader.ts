import { hashWords4 } from '../base/hash.js';
import { RecordLists } from './lists.js';
import {
  COUNT,
  checkTable,
  EVICTED_CLOSING,
  EVICTED_EXPIRED,
  EVICTED_HALF_OPEN,
  FREE_HEAD,
  GC_DELETED,
  HIGH_WATER,
  headerDoubles,
  headerWords,
  INDEX_TAIL,
  INSERT_FAILURES,
  INSERTED,
  indexGeometry,
  indexOffset,
  recordsOffset,
  SECRET,
  type TableMemory,
} from './memory.js';
import {
  BACKEND,
  BACKEND_ID,
  CLASS_CLOSING,
  CLASS_HALF_OPEN,
  CLASS_MASK,
  CLIENT,
  COMMIT,
  EXPIRES,
  MARKS,
  PROTOCOL,
  RECORD_BYTES,
  RECORD_DOUBLES,
  RECORD_WORDS,
  RETURN,
  RX_BYTES,
  STATE,
  TX_PACKETS,
} from './record.js';
import { ExpirySweep } from './sweep.js';

/** How often `find` looks for a key that is not there. */
const FIND_TRIES = 3;

/** Memory with records in it. */
export interface Records {
  readonly words: Int32Array;
  readonly bytes: Uint8Array;
  readonly doubles: Float64Array;
}

/** What a table has done since it was made, and how full it is. */
export interface TableFigures {
  readonly capacity: number;
  /** Records in use, with those that have expired and were not reaped yet. */
  readonly count: number;
  readonly inserted: number;
  /** Inserts refused: full, and nothing to evict. */
  readonly insertFailures: number;
  readonly evictedExpired: number;
  readonly evictedClosing: number;
  readonly evictedHalfOpen: number;
  /** Records the garbage collector took out. */
  readonly collected: number;
}

/** Live records, counted. */
export interface Tally {
  live: number;
  /** By STATE_*. */
  readonly states: Float64Array;
  /** By backend id; 0: all that are beyond the array. */
  readonly backends: Float64Array;
  /** The same of those that are not closing. */
  readonly open: Float64Array;
  /** The same of those that reach their backend from another address than the client's. */
  readonly snatPorts: Float64Array;
}

/**
 * Another thread's view of a flow table: reads records while the data path writes them, without stopping it.
 *
 * A record is copied and its generation compared before and after: a copy is of one connection or there is none. Its fields
 * may still be of two neighbouring moments, as counters of a live flow are. What is a double is read as one, never in halves.
 */
export class TableReader {
  readonly capacity: number;

  /** The copy of the last record read. */
  readonly words = new Int32Array(RECORD_WORDS);
  readonly bytes = new Uint8Array(this.words.buffer);
  readonly halves = new Uint16Array(this.words.buffer);
  readonly doubles = new Float64Array(this.words.buffer);

  readonly #words: Int32Array;
  readonly #bytes: Uint8Array;
  readonly #doubles: Float64Array;
  readonly #header: Int32Array;
  readonly #figures: Float64Array;
  readonly #index: Int32Array;
  readonly #lists: RecordLists;

  /** @throws WeirError STATE_FILE when the memory holds no table of this build. */
  constructor(memory: TableMemory) {
    checkTable(memory);
    const records = memory.byteOffset + recordsOffset();
    this.capacity = memory.capacity;
    this.#words = new Int32Array(memory.buffer, records, memory.capacity * RECORD_WORDS);
    this.#bytes = new Uint8Array(memory.buffer, records, memory.capacity * RECORD_BYTES);
    this.#doubles = new Float64Array(memory.buffer, records, memory.capacity * RECORD_DOUBLES);
    this.#header = headerWords(memory);
    this.#figures = headerDoubles(memory);
    const { slots } = indexGeometry(memory.capacity);
    this.#index = new Int32Array(memory.buffer, memory.byteOffset + indexOffset(memory.capacity), slots + INDEX_TAIL);
    this.#lists = new RecordLists(this.#header, this.#words);
  }

  /**
   * Copies a record to `words`, `bytes` and `doubles`.
   *
   * @returns 0, its number there; -1 when it holds no connection, or one that came or went meanwhile.
   */
  read(record: number): number {
    if (record >= Atomics.load(this.#header, HIGH_WATER)) return -1;
    const from = record * RECORD_WORDS;
    const generation = Atomics.load(this.#words, from + COMMIT);
    if (generation === 0) return -1;
    for (let i = 0; i < RECORD_WORDS; i++) this.words[i] = this.#words[from + i]!;
    const double = record * RECORD_DOUBLES;
    this.doubles[EXPIRES] = this.#doubles[double + EXPIRES]!;
    for (let i = TX_PACKETS; i <= RX_BYTES; i++) this.doubles[i] = this.#doubles[double + i]!;
    return Atomics.load(this.#words, from + COMMIT) === generation ? 0 : -1;
  }

  /**
   * Finds the record of a key, as FlowTable.find does, and copies it. A removal meanwhile moves slots of the index towards their
   * home, so that one may pass the search unseen: a key that is not found is looked for again.
   *
   * @returns record << 1 | side; -1 when there is none
   */
  find(source: number, destination: number, ports: number, protocol: number): number {
    for (let tries = FIND_TRIES; tries > 0; tries--) {
      const reference = this.#probe(source, destination, ports, protocol);
      if (reference < 0 || this.read(reference >> 1) < 0) continue;
      const key = (reference & 1) * BACKEND;
      const isIts = this.words[key] === (source | 0) && this.words[key + 1] === (destination | 0);
      if (isIts && this.words[key + 2] === (ports | 0) && this.bytes[PROTOCOL] === protocol) return reference;
    }
    return -1;
  }

  #probe(source: number, destination: number, ports: number, protocol: number): number {
    const index = this.#index;
    const words = this.#words;
    const { factor, shift } = indexGeometry(this.capacity);
    const bits = 32 - Math.clz32(this.capacity * 2 + 1);
    const secret = this.#header;
    const hash = hashWords4(secret[SECRET]!, secret[SECRET + 1]!, source, destination, ports, protocol) | 0;
    let at = Math.imul(hash >>> 4, factor) >>> shift;
    const tag = ((hash << 8) | (at & 0xff)) << bits;
    for (; at < index.length; at++) {
      const slot = index[at]!;
      if (slot === 0) break;
      if ((slot ^ tag) >>> bits !== 0) continue;
      const reference = (slot & ((1 << bits) - 1)) - 2;
      const word = (reference >> 1) * RECORD_WORDS + (reference & 1) * BACKEND;
      if (words[word] === (source | 0) && words[word + 1] === (destination | 0) && words[word + 2] === (ports | 0))
        return reference;
    }
    return -1;
  }

  /** Whether an insert would find a record that nobody uses. */
  get hasFreeRecord(): boolean {
    return this.#header[FREE_HEAD] !== -1 || this.#header[HIGH_WATER]! < this.capacity;
  }

  /** Whether an insert may evict a live record: one is closing or half-open. */
  get hasLesserRecord(): boolean {
    return this.#lists.length(CLASS_CLOSING) > 0 || this.#lists.length(CLASS_HALF_OPEN) > 0;
  }

  /**
   * The table's search for what has expired, from where it stands: what this one finds the other would.
   *
   * @param isGone records that are to count as removed
   */
  sweep(isGone: (record: number) => boolean): ExpirySweep {
    return new SweepAhead(this.#header.slice(), this.#figures.slice(), this.#words, this.#doubles, isGone);
  }

  /** Calls `visit` for each record that is live at `nowMs`; its fields are in `words`, `bytes` and `doubles`. */
  forEachLive(nowMs: number, visit: (record: number) => void): void {
    const end = Atomics.load(this.#header, HIGH_WATER);
    for (let record = 0; record < end; record++) {
      if (this.read(record) === 0 && this.doubles[EXPIRES]! > nowMs) visit(record);
    }
  }

  /** Records from here on were never used. */
  get highWater(): number {
    return Atomics.load(this.#header, HIGH_WATER);
  }

  /**
   * Adds up the live ones among `count` records from `first` on, where they lie: copies would cost ten times as much. One that
   * changes meanwhile counts as it was or as it is, or as a mixture of both.
   */
  tally(first: number, count: number, nowMs: number, into: Tally): void {
    const words = this.#words;
    const { states, backends, open, snatPorts } = into;
    const end = Math.min(first + count, this.highWater);
    for (let record = first; record < end; record++) {
      const word = record * RECORD_WORDS;
      if (words[word + COMMIT] === 0 || this.#doubles[record * RECORD_DOUBLES + EXPIRES]! <= nowMs) continue;
      const id = words[word + BACKEND_ID]! >>> 0;
      const backend = id < backends.length ? id : 0;
      into.live++;
      states[this.#bytes[record * RECORD_BYTES + STATE]!]! += 1;
      backends[backend]! += 1;
      if ((this.#bytes[record * RECORD_BYTES + MARKS]! & CLASS_MASK) !== CLASS_CLOSING) open[backend]! += 1;
      if (words[word + RETURN] !== words[word + CLIENT]) snatPorts[backend]! += 1;
    }
  }

  /** Calls `visit` for the live ones among `count` records from `first` on, where they lie, as for `tally`. */
  visitLive(first: number, count: number, nowMs: number, visit: (records: Records, record: number) => void): void {
    const records = { words: this.#words, bytes: this.#bytes, doubles: this.#doubles };
    const end = Math.min(first + count, this.highWater);
    for (let record = first; record < end; record++) {
      const isUsed = this.#words[record * RECORD_WORDS + COMMIT] !== 0;
      if (isUsed && this.#doubles[record * RECORD_DOUBLES + EXPIRES]! > nowMs) visit(records, record);
    }
  }

  figures(): TableFigures {
    const figures = this.#figures;
    return {
      capacity: this.capacity,
      count: this.#header[COUNT]!,
      inserted: figures[INSERTED]!,
      insertFailures: figures[INSERT_FAILURES]!,
      evictedExpired: figures[EVICTED_EXPIRED]!,
      evictedClosing: figures[EVICTED_CLOSING]!,
      evictedHalfOpen: figures[EVICTED_HALF_OPEN]!,
      collected: figures[GC_DELETED]!,
    };
  }
}

/** Has state of its own, and removes nothing. */
class SweepAhead extends ExpirySweep {
  readonly #isGone: (record: number) => boolean;

  constructor(
    header: Int32Array,
    figures: Float64Array,
    words: Int32Array,
    doubles: Float64Array,
    isGone: (record: number) => boolean,
  ) {
    super(header, figures, words, doubles);
    this.#isGone = isGone;
  }

  protected override isUsed(record: number): boolean {
    return super.isUsed(record) && !this.#isGone(record);
  }
}
