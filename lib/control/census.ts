import { STATE_NAMES } from '../conntrack/record.js';
import type { TableReader, Tally } from '../conntrack/table-reader.js';

/** The live connections of the tables, counted by one walk over all records. */
export interface Census {
  /** Per table, in the order given. */
  readonly live: readonly number[];
  /** Per table, by STATE_*. */
  readonly states: readonly Float64Array[];
  /** By backend id; under 0 those whose backend means nothing any more. */
  readonly backends: Float64Array;
  /** Those of them that are not closing, as limits count. */
  readonly open: Float64Array;
  /** Those of them that reach their backend from an snat address: each has a port of it. */
  readonly snatPorts: Float64Array;
}

/** Records counted between two rests: some 2 ms. */
const SLICE_RECORDS = 8192;

/**
 * Counts them, in steps for whoever has other things to do. Connections come and go meanwhile, as in a list.
 *
 * @param backendRows ids are below this
 * @param alsoVisit called with the records of each step
 */
export function* censusInSteps(
  readers: readonly TableReader[],
  nowMs: number,
  backendRows: number,
  alsoVisit?: (reader: TableReader, first: number, count: number) => void,
): Generator<void, Census> {
  const backends = new Float64Array(Math.max(1, backendRows));
  const open = new Float64Array(backends.length);
  const snatPorts = new Float64Array(backends.length);
  const tallies: Tally[] = [];
  for (const reader of readers) {
    const tally = { live: 0, states: new Float64Array(STATE_NAMES.length), backends, open, snatPorts };
    for (let first = 0; first < reader.highWater; first += SLICE_RECORDS) {
      reader.tally(first, SLICE_RECORDS, nowMs, tally);
      alsoVisit?.(reader, first, SLICE_RECORDS);
      yield;
    }
    tallies.push(tally);
  }
  return {
    live: tallies.map(({ live }) => live),
    states: tallies.map(({ states }) => states),
    backends,
    open,
    snatPorts,
  };
}
