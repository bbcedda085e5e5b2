import { EARLIEST, EARLIEST_SINCE, HIGH_WATER, SWEEP_CURSOR } from './memory.js';
import { COMMIT, EXPIRES, RECORD_DOUBLES, RECORD_WORDS } from './record.js';

/** Records looked at in one search: about 0.5 us. */
const SWEEP_RECORDS = 128;

/** Up to here a sweep goes through all records in one search: about 15 us, once per expiry. */
const SMALL_TABLE = 4096;

/**
 * Finds what has expired: for an insert into a full table, and for a limit that has been reached.
 *
 * There is no order by expiry: keeping one would cost every packet. A sweep goes round the records that were ever used, some of them
 * per search (up to SMALL_TABLE of them: all, so that an expired record is always found), and remembers the earliest
 * expiry it saw. While that has not come no sweep is needed, and a table full of live records refuses at once. The invariant:
 *
 *     no record expires before min(EARLIEST, EARLIEST_SINCE)
 *
 * EARLIEST is what the last full round saw; EARLIEST_SINCE the least of what this round saw and of all expiries set since
 * it began, which is why they are only set by `FlowTable.setExpiry`. Rejected: a timer wheel (two list moves a packet) and a heap.
 *
 * All of its state is in the table's memory.
 */
export class ExpirySweep {
  readonly #header: Int32Array;
  readonly #figures: Float64Array;
  readonly #words: Int32Array;
  readonly #doubles: Float64Array;

  constructor(header: Int32Array, figures: Float64Array, words: Int32Array, doubles: Float64Array) {
    this.#header = header;
    this.#figures = figures;
    this.#words = words;
    this.#doubles = doubles;
  }

  /** Whether there is a connection in this record. */
  protected isUsed(record: number): boolean {
    return this.#words[record * RECORD_WORDS + COMMIT] !== 0;
  }

  /** Whether there may be an expired record: by what sweeps have seen, none is known to be. */
  mayFind(nowMs: number): boolean {
    return Math.min(this.#figures[EARLIEST]!, this.#figures[EARLIEST_SINCE]!) <= nowMs;
  }

  /** Goes on with the search; -1 when it finds no expired record in its time. */
  next(nowMs: number): number {
    const header = this.#header;
    const figures = this.#figures;
    const doubles = this.#doubles;
    if (!this.mayFind(nowMs)) return -1;
    const end = header[HIGH_WATER]!;
    let record = header[SWEEP_CURSOR]!;
    for (let left = end <= SMALL_TABLE ? 2 * end : SWEEP_RECORDS; left > 0; left--) {
      if (record === 0) {
        const earliest = Math.min(figures[EARLIEST]!, figures[EARLIEST_SINCE]!);
        if (earliest > nowMs) break;
        figures[EARLIEST] = earliest;
        figures[EARLIEST_SINCE] = Number.POSITIVE_INFINITY;
      }
      const expiresMs = doubles[record * RECORD_DOUBLES + EXPIRES]!;
      const isUsed = this.isUsed(record);
      const found = isUsed && expiresMs <= nowMs ? record : -1;
      if (isUsed && found < 0 && expiresMs < figures[EARLIEST_SINCE]!) figures[EARLIEST_SINCE] = expiresMs;
      record++;
      if (record === end) {
        record = 0;
        figures[EARLIEST] = figures[EARLIEST_SINCE]!;
        figures[EARLIEST_SINCE] = Number.POSITIVE_INFINITY;
      }
      if (found >= 0) {
        header[SWEEP_CURSOR] = record;
        return found;
      }
    }
    header[SWEEP_CURSOR] = record;
    return -1;
  }
}
