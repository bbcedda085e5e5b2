import { BACKEND_ID, RECORD_WORDS, SERVICE } from '../../conntrack/record.js';
import type { Records, TableReader } from '../../conntrack/table-reader.js';
import { isOver } from '../../datapath/cut.js';
import { picksAgain } from '../../datapath/picks-again.js';
import type { Snapshot } from '../../datapath/snapshot.js';
import type { FlowFates } from './plan-view.js';

/** Records counted in a step: 1 ms. */
const SLICE_RECORDS = 8192;

const KEPT = 0;
const MOVED = 1;
const CUT_LATER = 2;
const CUT = 3;
const FATES = 4;

/** What would become of the live connections, by one walk over all records. */
export class FateCount {
  /** By backend id: live ones. */
  readonly backends: Float64Array;
  readonly #services: Float64Array;

  constructor(serviceRows: number, backendRows: number) {
    this.#services = new Float64Array(Math.max(1, serviceRows) * FATES);
    this.backends = new Float64Array(Math.max(1, backendRows));
  }

  /** Those of a service; of all. */
  of(service: number): FlowFates {
    return fatesOf(this.#services.subarray(service * FATES, (service + 1) * FATES));
  }

  total(): FlowFates {
    const sums = new Float64Array(FATES);
    this.#services.forEach((count, i) => {
      sums[i % FATES]! += count;
    });
    return fatesOf(sums);
  }

  note(service: number, backend: number, fate: number): void {
    const isKnown = service >= 0 && (service + 1) * FATES <= this.#services.length;
    this.#services[(isKnown ? service : 0) * FATES + fate]! += 1;
    this.backends[backend >= 0 && backend < this.backends.length ? backend : 0]! += 1;
  }
}

/**
 * Counts in steps, while the data path goes on: of what changes meanwhile it may have seen either.
 *
 * @param after null: nothing becomes of any (a node keeps what it has)
 * @param nowMs when `after` would come into use
 */
export function* countFates(
  readers: readonly TableReader[],
  before: Snapshot,
  after: Snapshot | null,
  nowMs: number,
  counts: FateCount,
): Generator<void, void> {
  const visit = (records: Records, record: number): void => {
    const word = record * RECORD_WORDS;
    const fate = after === null ? KEPT : fateOf(records, record, before, after, nowMs);
    counts.note(records.words[word + SERVICE]!, records.words[word + BACKEND_ID]!, fate);
  };
  for (const reader of readers) {
    for (let first = 0; first < reader.highWater; first += SLICE_RECORDS) {
      reader.visitLive(first, SLICE_RECORDS, nowMs, visit);
      yield;
    }
  }
}

/** What it would come to in any case is not the reload's doing. */
function fateOf(records: Records, record: number, before: Snapshot, after: Snapshot, nowMs: number): number {
  const word = record * RECORD_WORDS;
  const { words } = records;
  if (isOver(after, words, word, nowMs)) return isOver(before, words, word, nowMs) ? KEPT : CUT;
  if (picksAgain(records, record, after)) return picksAgain(records, record, before) ? KEPT : MOVED;
  return after.cutAt[words[word + BACKEND_ID]!]! === Number.POSITIVE_INFINITY ? KEPT : CUT_LATER;
}

function fatesOf(counts: Float64Array): FlowFates {
  const [kept, moved, cutLater, cut] = [counts[KEPT]!, counts[MOVED]!, counts[CUT_LATER]!, counts[CUT]!];
  return { live: kept + moved + cutLater + cut, kept, moved, cutLater, cut };
}
