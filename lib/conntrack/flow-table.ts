import { hashWords4 } from '../base/hash.js';
import { allocateEvents, CAUSE_EVICTED, CAUSE_EXPIRED, EVENT_CLOSED, EventWriter } from './events.js';
import { RecordLists } from './lists.js';
import {
  COUNT,
  checkTable,
  EARLIEST_SINCE,
  EVICTED_CLOSING,
  EVICTED_EXPIRED,
  EVICTED_HALF_OPEN,
  FREE_HEAD,
  GENERATION,
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
import { OpenCounts } from './open-counts.js';
import {
  BACKEND,
  BACKEND_ID,
  CLASS_CLOSING,
  CLASS_ESTABLISHED,
  CLASS_HALF_OPEN,
  CLASS_MASK,
  CLIENT,
  COMMIT,
  CREATED,
  EXPIRES,
  MARK_SYN_SEEN,
  MARKS,
  NEXT,
  ORIGINAL_PORTS,
  PROTOCOL,
  RECORD_BYTES,
  RECORD_DOUBLES,
  RECORD_WORDS,
  REPLY_PORTS,
  RETURN,
  SERVICE,
  STATE,
  SYN_SENT,
  TX_END,
  TYPE,
  TYPE_SVC,
  VIP,
} from './record.js';
import { ExpirySweep } from './sweep.js';

/**
 * The flow table: up to `capacity` records of one connection each, found by either of their two keys.
 *
 * ## Index
 *
 * Open addressing with linear probing over 32-bit slots, at most half of them used, so that one cache line holds 16 candidates.
 *
 *     slot:  | tag: hash bits, then the low 8 bits of the home slot | record + 1 | side |      0: empty
 *
 * The side says which of the record's keys the slot stands for: 0 the original, 1 the reply key. A foreign tag costs no look
 * at the record. The home bits in it serve twice: neighbours with other homes differ in them for certain, and they give a
 * slot's home back from where it lies. That is what a removal needs to shift the slots behind it up (no tombstones, no
 * rehashing), and why a key is never put more than 254 slots from its home. At half load the odds of needing to are below 1e-20
 * a key; the insert fails then, as if the table were full. Nothing wraps: the index ends in a tail of slots that are no one's
 * home.
 *
 * ## Records
 *
 * Free records are a list through NEXT; those never used lie above HIGH_WATER. COMMIT is written last and cleared first, with
 * atomic stores: for other threads, and for a start after a crash with the memory in a file, a record without it does not exist.
 *
 * ## Classes and eviction
 *
 * Every record has a class: established, half-open or closing. Half-open and closing ones are on a list in the order of their
 * joining it; trackers move them with `setClass`. An insert into a full table evicts
 *
 *  1. a record that has expired,
 *  2. the head of the closing list,
 *  3. the head of the half-open list,
 *
 * and otherwise fails: established records are never evicted.
 *
 * How expired ones are found is written in sweep.ts.
 *
 * One writer: the thread of the data path. Others attach with a TableReader, or watch what happens here by an EventReader.
 */
export class FlowTable {
  readonly capacity: number;

  /** The records; record r begins at word r * RECORD_WORDS, byte r * RECORD_BYTES, and so on. */
  readonly words: Int32Array;
  readonly bytes: Uint8Array;
  readonly halves: Uint16Array;
  readonly doubles: Float64Array;

  /** Told the id of a backend that answered a SYN with an RST, that had not answered it when the record ended; whose record ended. */
  onRefused: (backend: number) => void = ignore;
  onUnanswered: (backend: number) => void = ignore;
  onClosed: (backend: number) => void = ignore;

  /** Open connections by service and backend. */
  readonly open = new OpenCounts();

  /** Asks the garbage collector to look for what has expired (gc.ts). */
  isPassWanted = false;

  /** The doubles of the header: counters and the garbage collector's figures (memory.ts). */
  readonly figures: Float64Array;

  readonly #events: EventWriter;
  readonly #header: Int32Array;
  readonly #lists: RecordLists;
  readonly #index: Int32Array;
  readonly #secret0: number;
  readonly #secret1: number;
  readonly #factor: number;
  readonly #shift: number;
  readonly #referenceBits: number;
  readonly #referenceMask: number;
  readonly #sweep: ExpirySweep;

  /**
   * @param events where what happens to records is told; by default nobody can watch
   * @throws WeirError STATE_FILE when the memory holds no table of this build.
   */
  constructor(memory: TableMemory, events = new EventWriter(allocateEvents(2))) {
    checkTable(memory);
    this.#events = events;
    const { buffer, byteOffset, capacity } = memory;
    const { slots, factor, shift } = indexGeometry(capacity);
    const records = byteOffset + recordsOffset();
    this.capacity = capacity;
    this.words = new Int32Array(buffer, records, capacity * RECORD_WORDS);
    this.bytes = new Uint8Array(buffer, records, capacity * RECORD_BYTES);
    this.halves = new Uint16Array(buffer, records, capacity * (RECORD_BYTES / 2));
    this.doubles = new Float64Array(buffer, records, capacity * RECORD_DOUBLES);
    this.figures = headerDoubles(memory);
    this.#header = headerWords(memory);
    this.#lists = new RecordLists(this.#header, this.words);
    this.#index = new Int32Array(buffer, byteOffset + indexOffset(capacity), slots + INDEX_TAIL);
    this.#secret0 = this.#header[SECRET]!;
    this.#secret1 = this.#header[SECRET + 1]!;
    this.#factor = factor;
    this.#shift = shift;
    this.#referenceBits = 32 - Math.clz32(capacity * 2 + 1);
    this.#referenceMask = (1 << this.#referenceBits) - 1;
    this.#sweep = new ExpirySweep(this.#header, this.figures, this.words, this.doubles);
  }

  /** Records in use, with those that have expired and were not reaped yet. */
  get count(): number {
    return this.#header[COUNT]!;
  }

  /** Records from here on were never used. */
  get highWater(): number {
    return this.#header[HIGH_WATER]!;
  }

  /** Makes `open` right for records that are there already, whose ids it has room for. */
  recount(): void {
    this.open.recount(this.words, this.bytes, this.highWater);
  }

  /** How many records are on the list of a class (CLASS_HALF_OPEN or CLASS_CLOSING). */
  listLength(list: number): number {
    return this.#lists.length(list);
  }

  /** Whether anybody is there to be told what happens to records. */
  get isWatched(): boolean {
    return this.#events.isWatched;
  }

  /** Tells watchers of a record, an EVENT_* and its detail; only for when there are any. */
  tell(kind: number, detail: number, record: number, nowMs: number): void {
    this.#events.write(kind, detail, this.words, record, nowMs);
  }

  /** The hash of a key, as `find` and `touch` take it: a signed word. */
  hash(source: number, destination: number, ports: number, protocol: number): number {
    return hashWords4(this.#secret0, this.#secret1, source, destination, ports, protocol) | 0;
  }

  /**
   * Loads a key's home slot, so that it is in cache when `find` comes.
   *
   * @returns the record in that slot, most likely the key's, for `touchRecord`; -1 when the slot is empty.
   */
  touch(hash: number): number {
    const slot = this.#index[Math.imul(hash >>> 4, this.#factor) >>> this.#shift]!;
    return ((slot & this.#referenceMask) >>> 1) - 1;
  }

  /** Loads both cache lines of a record. The sum returned means nothing; whoever adds it up keeps the loads alive. */
  touchRecord(record: number): number {
    const word = record * RECORD_WORDS;
    return (this.words[word]! + this.words[word + TX_END]!) | 0;
  }

  /**
   * Finds the record of a key. Expired ones are found too: see `isExpired`.
   *
   * @param ports source << 16 | destination
   * @param hash what `hash` says of the same four
   * @returns record << 1 | side: 0 for the original key, 1 for the reply key; -1 when there is none.
   */
  find(source: number, destination: number, ports: number, protocol: number, hash: number): number {
    const index = this.#index;
    const { words, bytes } = this;
    let at = Math.imul(hash >>> 4, this.#factor) >>> this.#shift;
    const tag = ((hash << 8) | (at & 0xff)) << this.#referenceBits;
    for (;;) {
      const slot = index[at]!;
      if (slot === 0) return -1;
      if ((slot ^ tag) >>> this.#referenceBits === 0) {
        const reference = (slot & this.#referenceMask) - 2;
        const record = reference >> 1;
        const word = record * RECORD_WORDS + (reference & 1) * BACKEND;
        if (
          words[word] === (source | 0) &&
          words[word + 1] === (destination | 0) &&
          words[word + 2] === (ports | 0) &&
          bytes[record * RECORD_BYTES + PROTOCOL] === protocol
        ) {
          return reference;
        }
      }
      at++;
    }
  }

  isExpired(record: number, nowMs: number): boolean {
    return this.doubles[record * RECORD_DOUBLES + EXPIRES]! <= nowMs;
  }

  /** A number that is this record's alone while it lives; 0 when it does not. */
  generation(record: number): number {
    return this.words[record * RECORD_WORDS + COMMIT]!;
  }

  /** As TableReader.read, for the thread that owns the table: the record itself, or -1 when it is not live. */
  read(record: number): number {
    return this.words[record * RECORD_WORDS + COMMIT] === 0 ? -1 : record;
  }

  /**
   * Makes a record of a connection, half-open; counters, flags and marks are zero, and it has expired until `setExpiry` says
   * otherwise: a tracker's `open...` must follow. When the table is full something less worth having is evicted.
   *
   * Neither key may be in the table. TYPE_SVC has the original key only.
   *
   * @returns the record, or -1 when there is no room.
   */
  insert(
    protocol: number,
    type: number,
    client: number,
    vip: number,
    originalPorts: number,
    backend: number,
    returnAddress: number,
    replyPorts: number,
    service: number,
    backendId: number,
    nowMs: number,
  ): number {
    const record = this.#take(nowMs);
    if (record < 0) {
      this.figures[INSERT_FAILURES]! += 1;
      return -1;
    }
    const { words, bytes } = this;
    const word = record * RECORD_WORDS;
    for (let i = word; i < word + RECORD_WORDS; i++) words[i] = 0;
    words[word + CLIENT] = client;
    words[word + VIP] = vip;
    words[word + ORIGINAL_PORTS] = originalPorts;
    words[word + BACKEND] = backend;
    words[word + RETURN] = returnAddress;
    words[word + REPLY_PORTS] = replyPorts;
    words[word + SERVICE] = service;
    words[word + BACKEND_ID] = backendId;
    words[word + CREATED] = nowMs / 1000;
    bytes[record * RECORD_BYTES + PROTOCOL] = protocol;
    bytes[record * RECORD_BYTES + TYPE] = type;
    bytes[record * RECORD_BYTES + MARKS] = CLASS_HALF_OPEN;
    this.doubles[record * RECORD_DOUBLES + EXPIRES] = nowMs;

    if (!this.#enter(record, nowMs)) {
      this.#release(record);
      this.figures[INSERT_FAILURES]! += 1;
      return -1;
    }
    this.figures[INSERTED]! += 1;
    this.open.add(service, backendId, 1);
    const header = this.#header;
    let generation = (header[GENERATION]! + 1) | 0;
    if (generation === 0) generation = 1;
    header[GENERATION] = generation;
    Atomics.store(words, word + COMMIT, generation);
    return record;
  }

  /**
   * Takes up a record that is in memory already, with its COMMIT, but not in the index, in a list or in `count`: for making a table
   * whole (restore.ts). False, and nothing done, when one of its keys is another's. Its ids are an earlier run's: it is not in `open`.
   */
  recover(record: number, nowMs: number): boolean {
    const { words, bytes } = this;
    const word = record * RECORD_WORDS;
    const protocol = bytes[record * RECORD_BYTES + PROTOCOL]!;
    const sides = bytes[record * RECORD_BYTES + TYPE] === TYPE_SVC ? 1 : 2;
    for (let key = word; key < word + sides * BACKEND; key += BACKEND) {
      const [source, destination, ports] = [words[key]!, words[key + 1]!, words[key + 2]!];
      const hash = this.hash(source, destination, ports, protocol);
      if (this.find(source, destination, ports, protocol, hash) >= 0) return false;
    }
    if (!this.#enter(record, nowMs)) return false;
    this.setExpiry(record, this.doubles[record * RECORD_DOUBLES + EXPIRES]!);
    return true;
  }

  /**
   * Takes a live record out, under both keys.
   *
   * @param cause CAUSE_*, for watchers. Of a record that has expired it is that, whoever comes upon it.
   */
  remove(record: number, cause: number, nowMs: number): void {
    const { words, bytes } = this;
    if (this.isWatched) {
      this.tell(EVENT_CLOSED, this.isExpired(record, nowMs) ? CAUSE_EXPIRED : cause, record, nowMs);
    }
    const word = record * RECORD_WORDS;
    const isOpening = bytes[record * RECORD_BYTES + STATE] === SYN_SENT;
    if (isOpening && bytes[record * RECORD_BYTES + MARKS]! & MARK_SYN_SEEN)
      this.onUnanswered(words[word + BACKEND_ID]!);
    this.onClosed(words[word + BACKEND_ID]!);
    Atomics.store(words, word + COMMIT, 0);
    const protocol = bytes[record * RECORD_BYTES + PROTOCOL]!;
    const hash = this.hash(words[word + CLIENT]!, words[word + VIP]!, words[word + ORIGINAL_PORTS]!, protocol);
    this.#displace(hash, record << 1);
    if (bytes[record * RECORD_BYTES + TYPE] !== TYPE_SVC) {
      const replyHash = this.hash(words[word + BACKEND]!, words[word + RETURN]!, words[word + REPLY_PORTS]!, protocol);
      this.#displace(replyHash, (record << 1) | 1);
    }
    const list = bytes[record * RECORD_BYTES + MARKS]! & CLASS_MASK;
    if (list !== CLASS_ESTABLISHED) this.#lists.unlink(record, list);
    if (list !== CLASS_CLOSING) this.open.add(words[word + SERVICE]!, words[word + BACKEND_ID]!, -1);
    this.#release(record);
    this.#header[COUNT]! -= 1;
  }

  /** Sets when a record expires, ms. The only way to: the sweep relies on it (sweep.ts). */
  setExpiry(record: number, expiresMs: number): void {
    this.doubles[record * RECORD_DOUBLES + EXPIRES] = expiresMs;
    if (expiresMs < this.figures[EARLIEST_SINCE]!) this.figures[EARLIEST_SINCE] = expiresMs;
  }

  /** Moves a record to another class (CLASS_*), to the end of that one's list; does nothing when it is in it. */
  setClass(record: number, to: number, nowMs: number): void {
    const at = record * RECORD_BYTES + MARKS;
    const marks = this.bytes[at]!;
    const from = marks & CLASS_MASK;
    if (from === to) return;
    if (from !== CLASS_ESTABLISHED) this.#lists.unlink(record, from);
    this.bytes[at] = (marks & ~CLASS_MASK) | to;
    if (to !== CLASS_ESTABLISHED) this.#lists.append(record, to, nowMs);
    if (from !== CLASS_CLOSING && to !== CLASS_CLOSING) return;
    const word = record * RECORD_WORDS;
    this.open.add(this.words[word + SERVICE]!, this.words[word + BACKEND_ID]!, to === CLASS_CLOSING ? -1 : 1);
  }

  /** Removes what has expired among `count` records from `first` on. Returns how many that were. */
  reap(first: number, count: number, nowMs: number): number {
    const { words, doubles } = this;
    const end = Math.min(first + count, this.highWater);
    let removed = 0;
    for (let record = first; record < end; record++) {
      if (doubles[record * RECORD_DOUBLES + EXPIRES]! > nowMs || words[record * RECORD_WORDS + COMMIT] === 0) continue;
      this.remove(record, CAUSE_EXPIRED, nowMs);
      removed++;
    }
    return removed;
  }

  /** False: none of the records has expired. */
  mayHoldExpired(nowMs: number): boolean {
    return this.#sweep.mayFind(nowMs);
  }

  /**
   * Removes one record that has expired, if a short search finds one; the next goes on from there. In a table that has never used
   * more than 4096 records it finds one if there is one.
   */
  reapNext(nowMs: number): boolean {
    const record = this.#sweep.next(nowMs);
    if (record >= 0) this.remove(record, CAUSE_EXPIRED, nowMs);
    return record >= 0;
  }

  /** A record nobody uses, by eviction if need be; -1 when there is none. */
  #take(nowMs: number): number {
    const header = this.#header;
    if (header[FREE_HEAD] === -1) {
      const fresh = header[HIGH_WATER]!;
      if (fresh < this.capacity) {
        header[HIGH_WATER] = fresh + 1;
        return fresh;
      }
      if (!this.#evict(nowMs)) return -1;
    }
    const record = header[FREE_HEAD]!;
    header[FREE_HEAD] = this.words[record * RECORD_WORDS + NEXT]!;
    return record;
  }

  #release(record: number): void {
    this.words[record * RECORD_WORDS + NEXT] = this.#header[FREE_HEAD]!;
    this.#header[FREE_HEAD] = record;
  }

  #evict(nowMs: number): boolean {
    let counter = EVICTED_EXPIRED;
    let record = this.#sweep.next(nowMs);
    if (record < 0) {
      counter = EVICTED_CLOSING;
      record = this.#lists.leastWorth(CLASS_CLOSING, nowMs);
    }
    if (record < 0) {
      counter = EVICTED_HALF_OPEN;
      record = this.#lists.leastWorth(CLASS_HALF_OPEN, nowMs);
    }
    if (record < 0) return false;
    this.figures[counter]! += 1;
    this.remove(record, CAUSE_EVICTED, nowMs);
    return true;
  }

  /** Puts a record into the index under its keys, into the list of its class, and counts it; false: no room near a home. */
  #enter(record: number, nowMs: number): boolean {
    const { words, bytes } = this;
    const word = record * RECORD_WORDS;
    const protocol = bytes[record * RECORD_BYTES + PROTOCOL]!;
    const hash = this.hash(words[word + CLIENT]!, words[word + VIP]!, words[word + ORIGINAL_PORTS]!, protocol);
    if (!this.#place(hash, record << 1)) return false;
    if (bytes[record * RECORD_BYTES + TYPE] !== TYPE_SVC) {
      const replyHash = this.hash(words[word + BACKEND]!, words[word + RETURN]!, words[word + REPLY_PORTS]!, protocol);
      if (!this.#place(replyHash, (record << 1) | 1)) {
        this.#displace(hash, record << 1);
        return false;
      }
    }
    const list = bytes[record * RECORD_BYTES + MARKS]! & CLASS_MASK;
    if (list !== CLASS_ESTABLISHED) this.#lists.append(record, list, nowMs);
    this.#header[COUNT]! += 1;
    return true;
  }

  /** Puts a reference into the index; false when the next free slot is too far from its home. */
  #place(hash: number, reference: number): boolean {
    const index = this.#index;
    const home = Math.imul(hash >>> 4, this.#factor) >>> this.#shift;
    for (let at = home; at < home + INDEX_TAIL - 1; at++) {
      if (index[at] !== 0) continue;
      index[at] = (((hash << 8) | (home & 0xff)) << this.#referenceBits) | (reference + 2);
      return true;
    }
    return false;
  }

  /** Takes a reference out of the index and closes the gap: each slot behind it moves up unless that is above its home. */
  #displace(hash: number, reference: number): void {
    const index = this.#index;
    const bits = this.#referenceBits;
    let gap = Math.imul(hash >>> 4, this.#factor) >>> this.#shift;
    const wanted = (((hash << 8) | (gap & 0xff)) << bits) | (reference + 2);
    while (index[gap] !== wanted) gap++;
    for (let at = gap + 1; ; at++) {
      const slot = index[at]!;
      if (slot === 0) break;
      const distance = (at - (slot >>> bits)) & 0xff;
      if (at - distance > gap) continue;
      index[gap] = slot;
      gap = at;
    }
    index[gap] = 0;
  }
}

function ignore(): void {}
