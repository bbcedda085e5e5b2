import { EARLIEST, EARLIEST_SINCE, SWEEP_CURSOR } from './memory.js';
import { EXPIRES, RECORD_DOUBLES } from './record.js';

/** Records looked at per insert into a full table: about 0.5 us. */
const SWEEP_RECORDS = 128;

/** Up to here a sweep goes through the whole table in one insert: about 15 us, once per expiry. */
const SMALL_TABLE = 4096;

/**
 * Finds what has expired in a full table.
 *
 * There is no order by expiry: keeping one would cost every packet. A sweep goes round the table, SWEEP_RECORDS per insert
 * (tables of up to SMALL_TABLE records: all of it, so that an expired record is always found), and remembers the earliest
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
  readonly #doubles: Float64Array;
  readonly #capacity: number;
  readonly #records: number;

  constructor(header: Int32Array, figures: Float64Array, doubles: Float64Array, capacity: number) {
    this.#header = header;
    this.#figures = figures;
    this.#doubles = doubles;
    this.#capacity = capacity;
    this.#records = sweepRecords(capacity);
  }

  /** Goes on with the search; -1 when it finds no expired record in its time. Every record must be in use. */
  next(nowMs: number): number {
    const header = this.#header;
    const figures = this.#figures;
    const doubles = this.#doubles;
    let record = header[SWEEP_CURSOR]!;
    for (let left = this.#records; left > 0; left--) {
      if (record === 0) {
        const earliest = Math.min(figures[EARLIEST]!, figures[EARLIEST_SINCE]!);
        if (earliest > nowMs) break;
        figures[EARLIEST] = earliest;
        figures[EARLIEST_SINCE] = Number.POSITIVE_INFINITY;
      }
      const expiresMs = doubles[record * RECORD_DOUBLES + EXPIRES]!;
      const found = expiresMs <= nowMs ? record : -1;
      if (found < 0 && expiresMs < figures[EARLIEST_SINCE]!) figures[EARLIEST_SINCE] = expiresMs;
      record++;
      if (record === this.#capacity) {
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

/** Records that a search looks at. */
export function sweepRecords(capacity: number): number {
  return capacity <= SMALL_TABLE ? 2 * capacity : SWEEP_RECORDS;
}
