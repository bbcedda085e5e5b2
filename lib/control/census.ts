import { BACKEND_ID, CLASS_CLOSING, CLASS_MASK, MARKS, STATE, STATE_NAMES } from '../conntrack/record.js';
import type { TableReader } from '../conntrack/table-reader.js';

/** The live connections of the tables, counted by one walk over all records. */
export interface Census {
  /** Per table, in the order given. */
  readonly live: readonly number[];
  /** Per table, by STATE_*. */
  readonly states: readonly Float64Array[];
  /** By backend id; and those of them that are not closing, as limits count. */
  readonly backends: Float64Array;
  readonly open: Float64Array;
}

/** @param backendRows ids are below this; a record with another is counted under 0 */
export function takeCensus(readers: readonly TableReader[], nowMs: number, backendRows: number): Census {
  const backends = new Float64Array(Math.max(1, backendRows));
  const open = new Float64Array(backends.length);
  const live: number[] = [];
  const states: Float64Array[] = [];
  for (const reader of readers) {
    const { words, bytes } = reader;
    const ofState = new Float64Array(STATE_NAMES.length);
    let count = 0;
    reader.forEachLive(nowMs, () => {
      count++;
      const id = words[BACKEND_ID]!;
      const backend = id > 0 && id < backendRows ? id : 0;
      ofState[bytes[STATE]!]! += 1;
      backends[backend]! += 1;
      if ((bytes[MARKS]! & CLASS_MASK) !== CLASS_CLOSING) open[backend]! += 1;
    });
    live.push(count);
    states.push(ofState);
  }
  return { live, states, backends, open };
}
