/**
 * Histograms of fixed size as rows of an array of counters, so that one thread adds while another reads, and adding allocates nothing:
 *
 *     | HISTOGRAM_BUCKETS counts, of values up to 1, 2, 4, 8 ... | count of larger ones | sum of the values |
 *
 * Buckets hold what falls between two bounds, not what lies below: whoever shows them adds them up.
 */
export const HISTOGRAM_BUCKETS = 20;

const LARGER = HISTOGRAM_BUCKETS;
const SUM = HISTOGRAM_BUCKETS + 1;

/** Rows one histogram takes. */
export const HISTOGRAM_ROWS = HISTOGRAM_BUCKETS + 2;

/** Counts a value in the histogram that begins at row `at`. */
export function observe(rows: Float64Array, at: number, value: number): void {
  const bucket = value <= 1 ? 0 : Math.min(32 - Math.clz32(Math.ceil(value) - 1), LARGER);
  rows[at + bucket]! += 1;
  rows[at + SUM]! += value;
}

/** A histogram as it is at one moment. */
export interface Histogram {
  /** Values up to `bound`, those of the lower buckets among them. */
  readonly buckets: readonly { readonly bound: number; readonly count: number }[];
  readonly count: number;
  readonly sum: number;
}

/**
 * Reads the histogram that begins at row `at`, while it is written: `sum` may be one value ahead or behind.
 *
 * @param first the bucket to begin with: those below are counted into it
 * @param last the bucket to end with; larger values are in `count` alone
 * @param scale what one unit of the values is in those of the bounds and the sum
 */
export function readHistogram(rows: Float64Array, at: number, first: number, last: number, scale = 1): Histogram {
  const buckets: { bound: number; count: number }[] = [];
  let count = 0;
  for (let bucket = 0; bucket <= LARGER; bucket++) {
    count += rows[at + bucket]!;
    if (bucket >= first && bucket <= last) buckets.push({ bound: 2 ** bucket * scale, count });
  }
  return { buckets, count, sum: rows[at + SUM]! * scale };
}
