import { BACKEND_ID, STATE, STATE_NAMES } from '../conntrack/record.js';
import type { TableReader } from '../conntrack/table-reader.js';

/** The live connections of the tables, counted by one walk over all records. */
export interface Census {
  /** Per table, in the order given. */
  readonly live: readonly number[];
  /** Per table, by STATE_*. */
  readonly states: readonly Float64Array[];
  /** By backend id. */
  readonly backends: Float64Array;
}

/** @param backendRows ids are below this; a record with another is counted under 0 */
export function takeCensus(readers: readonly TableReader[], nowMs: number, backendRows: number): Census {
  const backends = new Float64Array(Math.max(1, backendRows));
  const live: number[] = [];
  const states: Float64Array[] = [];
  for (const reader of readers) {
    const { words, bytes } = reader;
    const ofState = new Float64Array(STATE_NAMES.length);
    let count = 0;
    reader.forEachLive(nowMs, () => {
      count++;
      const backend = words[BACKEND_ID]!;
      ofState[bytes[STATE]!]! += 1;
      backends[backend > 0 && backend < backendRows ? backend : 0]! += 1;
    });
    live.push(count);
    states.push(ofState);
  }
  return { live, states, backends };
}
