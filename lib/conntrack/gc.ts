import type { FlowTable } from './flow-table.js';
import {
  GC_DELETED,
  GC_INTERVAL_MS,
  GC_LAST_AT_MS,
  GC_LAST_DELETED,
  GC_LONGEST_SLICE_MS,
  GC_PASS_MS,
  GC_RUNS,
  GC_TOTAL_MS,
  headerDoubles,
  type TableMemory,
} from './memory.js';

/**
 * The garbage collector: takes expired records out of one or two flow tables. Nothing depends on it for correctness, since
 * lookups check expiry and a full table finds expired records by itself; it keeps the tables small and the figures honest.
 *
 * A pass looks at every record of every table once. It is done in slices between two batches of packets, so that none of them
 * waits for it:
 *
 *     idle --due, or a table over 90 %--> passing --slice, slice, ... last record--> idle, next due in `interval`
 *
 * The interval adapts to what the passes find (`nextInterval`). A table over 90 % asks for a pass at once; if it stays that
 * full because its records live, or fills up again, passes keep PRESSURE_PAUSE_MS between them.
 *
 * So does a limit that refused a connection while expired ones may have counted (`FlowTable.isPassWanted`), every WANTED_PAUSE_MS at
 * most. Such passes are extra: what they find says nothing of how long an interval lets gather, and changes neither it nor the next
 * one's time.
 */
export class GarbageCollector {
  readonly #tables: readonly FlowTable[];
  readonly #figures: Float64Array;
  readonly #isFixed: boolean;
  readonly #stopwatch: () => number;
  #dueMs: number;
  /** When pressure, or a table's wish, may next start a pass. */
  #pressureDueMs = Number.NEGATIVE_INFINITY;
  #wantedDueMs = Number.NEGATIVE_INFINITY;

  // Of the pass under way.
  #table = -1;
  #isExtra = false;
  #cursor = 0;
  #deletedHere = 0;
  #deleted = 0;
  #fuller = 0;
  #ratio = 0;
  #tookMs = 0;

  /**
   * @param nowMs the data path's clock
   * @param fixedIntervalMs `conntrack.gc.interval`; null: adaptive, from 5 min
   * @param stopwatch ms of CPU or wall time, for the figures alone
   */
  constructor(
    tables: readonly FlowTable[],
    nowMs: number,
    fixedIntervalMs: number | null = null,
    stopwatch: () => number = () => performance.now(),
  ) {
    this.#tables = tables;
    this.#figures = tables[0]!.figures;
    this.#isFixed = fixedIntervalMs !== null;
    this.#stopwatch = stopwatch;
    this.#figures[GC_INTERVAL_MS] = fixedIntervalMs ?? FIRST_INTERVAL_MS;
    this.#dueMs = nowMs + this.intervalMs;
  }

  /** From the end of the last pass to the start of the next, ms. */
  get intervalMs(): number {
    return this.#figures[GC_INTERVAL_MS]!;
  }

  /** When `slice` next has something to do, ms; in the past while a pass is under way. */
  get nextDueMs(): number {
    if (this.#table >= 0) return Number.NEGATIVE_INFINITY;
    return this.#isWanted() ? Math.min(this.#regularDueMs, this.#wantedDueMs) : this.#regularDueMs;
  }

  get #regularDueMs(): number {
    return this.#isPressed() ? Math.min(this.#dueMs, this.#pressureDueMs) : this.#dueMs;
  }

  /**
   * Begins a pass if one is due, or goes on with it: looks at about `maxRecords` records, fewer where many are to be
   * removed (a removal counts as REMOVAL_COST records).
   *
   * @returns whether there is more to do at once.
   */
  slice(nowMs: number, maxRecords: number): boolean {
    if (this.#table < 0) {
      if (nowMs < this.nextDueMs) return false;
      this.#begin(nowMs);
    }
    const startedMs = this.#stopwatch();
    let budget = maxRecords;
    while (budget > 0 && this.#table < this.#tables.length) {
      const table = this.#tables[this.#table]!;
      const count = Math.min(CHUNK_RECORDS, budget);
      const removed = table.reap(this.#cursor, count, nowMs);
      this.#deletedHere += removed;
      this.#cursor += count;
      budget -= count + removed * REMOVAL_COST;
      if (this.#cursor >= table.highWater) this.#finishTable(table);
    }
    const tookMs = this.#stopwatch() - startedMs;
    this.#tookMs += tookMs;
    this.#figures[GC_TOTAL_MS]! += tookMs;
    if (tookMs > this.#figures[GC_LONGEST_SLICE_MS]!) this.#figures[GC_LONGEST_SLICE_MS] = tookMs;
    if (this.#table < this.#tables.length) return true;
    this.#finish(nowMs);
    return false;
  }

  #begin(nowMs: number): void {
    this.#isExtra = nowMs < this.#regularDueMs;
    for (const table of this.#tables) table.isPassWanted = false;
    this.#table = 0;
    this.#cursor = 0;
    this.#deletedHere = 0;
    this.#deleted = 0;
    this.#tookMs = 0;
    this.#ratio = 0;
    this.#fuller = 0;
    for (let i = 1; i < this.#tables.length; i++) {
      if (fullness(this.#tables[i]!) > fullness(this.#tables[this.#fuller]!)) this.#fuller = i;
    }
  }

  #finishTable(table: FlowTable): void {
    if (this.#table === this.#fuller) this.#ratio = this.#deletedHere / table.capacity;
    table.figures[GC_DELETED]! += this.#deletedHere;
    this.#deleted += this.#deletedHere;
    this.#deletedHere = 0;
    this.#cursor = 0;
    this.#table++;
  }

  #finish(nowMs: number): void {
    this.#table = -1;
    const figures = this.#figures;
    if (!this.#isExtra) {
      if (!this.#isFixed) figures[GC_INTERVAL_MS] = nextInterval(figures[GC_INTERVAL_MS]!, this.#ratio);
      this.#dueMs = nowMs + figures[GC_INTERVAL_MS]!;
      this.#pressureDueMs = nowMs + PRESSURE_PAUSE_MS;
    }
    this.#wantedDueMs = nowMs + WANTED_PAUSE_MS;
    figures[GC_RUNS]! += 1;
    figures[GC_PASS_MS] = this.#tookMs;
    figures[GC_LAST_DELETED] = this.#deleted;
    figures[GC_LAST_AT_MS] = nowMs;
  }

  #isWanted(): boolean {
    for (let i = 0; i < this.#tables.length; i++) if (this.#tables[i]!.isPassWanted) return true;
    return false;
  }

  #isPressed(): boolean {
    for (let i = 0; i < this.#tables.length; i++) if (fullness(this.#tables[i]!) > PRESSURE) return true;
    return false;
  }
}

/** What the garbage collector has done, for metrics. */
export interface CollectionFigures {
  readonly runs: number;
  readonly intervalMs: number;
  /** Time of the last full pass, of the longest slice, and of all there were. */
  readonly lastPassMs: number;
  readonly longestSliceMs: number;
  readonly totalMs: number;
  /** Records the last full pass deleted, and when it ended (ms of the data path's clock; 0: never). */
  readonly lastDeleted: number;
  readonly lastAtMs: number;
}

/** Reads the figures from another thread. `memory` is that of the collector's first table. */
export function readCollectionFigures(memory: TableMemory): CollectionFigures {
  const figures = headerDoubles(memory);
  return {
    runs: figures[GC_RUNS]!,
    intervalMs: figures[GC_INTERVAL_MS]!,
    lastPassMs: figures[GC_PASS_MS]!,
    longestSliceMs: figures[GC_LONGEST_SLICE_MS]!,
    totalMs: figures[GC_TOTAL_MS]!,
    lastDeleted: figures[GC_LAST_DELETED]!,
    lastAtMs: figures[GC_LAST_AT_MS]!,
  };
}

/**
 * The interval after a pass that deleted `ratio` of the fuller table's capacity, as Cilium adapts it: shorter by that share
 * (at most 90 %) above a quarter, half as long again below a twentieth, unchanged between and when nothing was found; in whole
 * seconds from 10 s to 12 h.
 */
export function nextInterval(currentMs: number, ratio: number): number {
  let nextMs = currentMs;
  if (ratio > 0.25) nextMs = currentMs * (1 - Math.min(ratio, 0.9));
  else if (ratio > 0 && ratio < 0.05) nextMs = currentMs * 1.5;
  return Math.min(Math.max(Math.round(nextMs / 1000) * 1000, MIN_INTERVAL_MS), MAX_INTERVAL_MS);
}

function fullness(table: FlowTable): number {
  return table.count / table.capacity;
}

const FIRST_INTERVAL_MS = 300_000;
const MIN_INTERVAL_MS = 10_000;
const MAX_INTERVAL_MS = 12 * 3_600_000;

const PRESSURE = 0.9;
const PRESSURE_PAUSE_MS = MIN_INTERVAL_MS;
const WANTED_PAUSE_MS = 1000;

/** How often a slice looks at its budget. */
const CHUNK_RECORDS = 256;

/** A removal misses the cache in both keys' slots: about this many looks at records in a row. */
const REMOVAL_COST = 8;
