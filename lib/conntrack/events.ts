import { RECORD_WORDS } from './record.js';

/**
 * What happens to records, told to whoever watches: a ring of entries in memory shared between threads, each a copy of a record as
 * it was at a moment, with what happened to it then.
 *
 *     | header 64 B | entries x 144 B |         header:  word 0 WATCHERS, 1 BEGUN, 2 DONE
 *
 *     entry:  word  0 to 31  the record      32  kind | detail << 8      34,35  f64 ms of the data path's clock
 *
 * ## Nobody watches
 *
 * Then nothing is written at all. Readers raise WATCHERS while they are there; whatever has something to tell looks at that one
 * word first, without an atomic operation: seeing it a moment late is as good as having come a moment later. The memory is that of
 * an ordinary SharedArrayBuffer, so that its pages are committed when the first entries come to lie in them.
 *
 * ## One writer, any number of readers
 *
 * The writer waits for nobody. Events are numbered from 0 (mod 2^32); event n lies in entry n mod entries. BEGUN and DONE count the
 * events whose writing has begun, and is done:
 *
 *     write event n:   BEGUN = n + 1;   the entry;   DONE = n + 1
 *     read event n:    n < DONE?        copy it;     BEGUN <= n + entries?
 *
 * The entry of n is first touched again for event n + entries, and BEGUN is past that number before. So a copy is whole if
 * BEGUN has not come that far once it is made; otherwise the reader was overtaken. The events from its own up to the oldest that is still
 * whole are lost to it, and their number is exact. It skips an eighth of the ring besides, which counts as lost too: at the
 * writer's heels it would be overtaken again at once.
 *
 * Rejected: a sequence number in each entry, which says no more than the two counters do; a queue that makes the writer wait or
 * allocate; messages on the Worker's port, which cost the data path a structured clone each.
 */

/** Kinds of events. The record is as the event left it; of a closed one, as it last was. */
export const EVENT_CREATED = 1;
/** The detail is the former STATE. */
export const EVENT_STATE = 2;
/** The detail is a CAUSE_*. */
export const EVENT_CLOSED = 3;
export const EVENT_NAMES = ['', 'created', 'state', 'closed'] as const;

/** Why a record was taken out of its table (docs/conntrack.md, Watching). */
export const CAUSE_EXPIRED = 1;
export const CAUSE_REPLACED = 2;
export const CAUSE_EVICTED = 3;
export const CAUSE_FLUSHED = 4;
export const CAUSE_CUT = 5;
export const CAUSE_NAMES: readonly string[] = ['', 'expired', 'replaced', 'evicted', 'flushed', 'cut'];

const HEADER_WORDS = 16;
const WATCHERS = 0;
const BEGUN = 1;
const DONE = 2;

const ENTRY_WORDS = RECORD_WORDS + 4;
const WHAT = RECORD_WORDS;
const AT = RECORD_WORDS + 2;

/** What a gateway that opens and closes 20,000 TCP connections a second has to tell in 80 ms; 1.2 MB. */
const DEFAULT_ENTRIES = 8192;

/** Memory of an empty ring. @param entries a power of two, 2 at least */
export function allocateEvents(entries = DEFAULT_ENTRIES): SharedArrayBuffer {
  return new SharedArrayBuffer((HEADER_WORDS + entries * ENTRY_WORDS) * 4);
}

/** The data path's end of a ring. */
export class EventWriter {
  readonly #words: Int32Array;
  readonly #doubles: Float64Array;
  readonly #mask: number;

  constructor(memory: SharedArrayBuffer) {
    this.#words = new Int32Array(memory);
    this.#doubles = new Float64Array(memory);
    this.#mask = entriesOf(memory) - 1;
  }

  /** Whether anybody is there to be told. To be asked before `write`. */
  get isWatched(): boolean {
    return this.#words[WATCHERS] !== 0;
  }

  /** Copies a record of the table whose words these are. */
  write(kind: number, detail: number, words: Int32Array, record: number, nowMs: number): void {
    const ring = this.#words;
    const number = ring[DONE]!;
    const next = (number + 1) | 0;
    const to = HEADER_WORDS + (number & this.#mask) * ENTRY_WORDS;
    const from = record * RECORD_WORDS;
    Atomics.store(ring, BEGUN, next);
    for (let i = 0; i < RECORD_WORDS; i++) ring[to + i] = words[from + i]!;
    ring[to + WHAT] = kind | (detail << 8);
    this.#doubles[(to + AT) >>> 1] = nowMs;
    Atomics.store(ring, DONE, next);
  }
}

/** A reader of a ring, from the moment of its making on: the ring is written as long as there is one. */
export class EventReader {
  /** The event last read: EVENT_*, its detail, when it happened, and the record. */
  kind = 0;
  detail = 0;
  atMs = 0;
  readonly words = new Int32Array(ENTRY_WORDS);
  readonly bytes = new Uint8Array(this.words.buffer);
  readonly doubles = new Float64Array(this.words.buffer);

  readonly #ring: Int32Array;
  readonly #entries: number;
  #next: number;

  constructor(memory: SharedArrayBuffer) {
    this.#ring = new Int32Array(memory);
    this.#entries = entriesOf(memory);
    Atomics.add(this.#ring, WATCHERS, 1);
    this.#next = Atomics.load(this.#ring, DONE);
  }

  /**
   * Reads the next event.
   *
   * @returns how many were lost before it; -1 when there is none (then none was lost either).
   */
  read(): number {
    const ring = this.#ring;
    const { words } = this;
    for (let lost = 0; ; ) {
      const number = this.#next;
      if (Atomics.load(ring, DONE) === number) return -1;
      const from = HEADER_WORDS + (number & (this.#entries - 1)) * ENTRY_WORDS;
      for (let i = 0; i < ENTRY_WORDS; i++) words[i] = ring[from + i]!;
      const behind = ((Atomics.load(ring, BEGUN) - number) | 0) - this.#entries;
      if (behind <= 0) {
        this.#next = (number + 1) | 0;
        this.kind = words[WHAT]! & 0xff;
        this.detail = words[WHAT]! >>> 8;
        this.atMs = this.doubles[AT / 2]!;
        return lost;
      }
      const skipped = behind + (this.#entries >>> 3);
      lost += skipped;
      this.#next = (number + skipped) | 0;
    }
  }

  /** Ends the reading; once. */
  close(): void {
    Atomics.sub(this.#ring, WATCHERS, 1);
  }
}

function entriesOf(memory: SharedArrayBuffer): number {
  return (memory.byteLength / 4 - HEADER_WORDS) / ENTRY_WORDS;
}
