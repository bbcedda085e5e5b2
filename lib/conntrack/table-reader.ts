import {
  COUNT,
  checkTable,
  EVICTED_CLOSING,
  EVICTED_EXPIRED,
  EVICTED_HALF_OPEN,
  GC_DELETED,
  HIGH_WATER,
  headerDoubles,
  headerWords,
  INSERT_FAILURES,
  INSERTED,
  recordsOffset,
  type TableMemory,
} from './memory.js';
import {
  BACKEND_ID,
  CLASS_CLOSING,
  CLASS_MASK,
  CLIENT,
  COMMIT,
  EXPIRES,
  MARKS,
  RECORD_BYTES,
  RECORD_DOUBLES,
  RECORD_WORDS,
  RETURN,
  RX_BYTES,
  STATE,
  TX_PACKETS,
} from './record.js';

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

  /** Calls `visit` for each record that is live at `nowMs`; its fields are in `words`, `bytes` and `doubles`. */
  forEachLive(nowMs: number, visit: (record: number) => void): void {
    const end = Atomics.load(this.#header, HIGH_WATER);
    for (let record = 0; record < end; record++) {
      if (this.read(record) === 0 && this.doubles[EXPIRES]! > nowMs) visit(record);
    }
  }

  /** Connections that have not expired at `nowMs`. Looks at every record: some 10 ms for 500,000. */
  countLive(nowMs: number): number {
    const end = Atomics.load(this.#header, HIGH_WATER);
    let live = 0;
    for (let record = 0; record < end; record++) {
      const isLive = this.#words[record * RECORD_WORDS + COMMIT] !== 0;
      if (isLive && this.#doubles[record * RECORD_DOUBLES + EXPIRES]! > nowMs) live++;
    }
    return live;
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
