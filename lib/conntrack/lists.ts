import { LIST_WORDS, LISTS } from './memory.js';
import { NEXT, PREVIOUS, QUEUED_AT, RECORD_WORDS, RX_SEEN, TX_SEEN } from './record.js';

/**
 * The half-open and the closing records of a flow table, each class on a list in the order of joining. The links are in the
 * records, heads, tails and lengths in the table's header, so that they are shared memory too. `list` is a CLASS_*.
 */
export class RecordLists {
  readonly #header: Int32Array;
  readonly #words: Int32Array;

  constructor(header: Int32Array, words: Int32Array) {
    this.#header = header;
    this.#words = words;
  }

  length(list: number): number {
    return this.#header[headOf(list) + LENGTH]!;
  }

  append(record: number, list: number, nowMs: number): void {
    const words = this.#words;
    const header = this.#header;
    const head = headOf(list);
    const last = header[head + TAIL]!;
    const word = record * RECORD_WORDS;
    words[word + PREVIOUS] = last;
    words[word + NEXT] = -1;
    words[word + QUEUED_AT] = nowMs / 1000;
    if (last < 0) header[head] = record;
    else words[last * RECORD_WORDS + NEXT] = record;
    header[head + TAIL] = record;
    header[head + LENGTH]! += 1;
  }

  unlink(record: number, list: number): void {
    const words = this.#words;
    const header = this.#header;
    const head = headOf(list);
    const previous = words[record * RECORD_WORDS + PREVIOUS]!;
    const next = words[record * RECORD_WORDS + NEXT]!;
    if (previous < 0) header[head] = next;
    else words[previous * RECORD_WORDS + NEXT] = next;
    if (next < 0) header[head + TAIL] = previous;
    else words[next * RECORD_WORDS + PREVIOUS] = previous;
    header[head + LENGTH]! -= 1;
  }

  /**
   * The record that goes first when room is needed, -1 when the list is empty: the head, unless it had packets in a later
   * second than it joined. Such a one goes to the tail, at most SECOND_CHANCES times, so that a scan does not push out one-way
   * flows that are in use.
   */
  leastWorth(list: number, nowMs: number): number {
    const words = this.#words;
    const head = headOf(list);
    for (let chances = SECOND_CHANCES; ; chances--) {
      const record = this.#header[head]!;
      if (record < 0 || chances === 0) return record;
      const word = record * RECORD_WORDS;
      const queuedAt = words[word + QUEUED_AT]! >>> 0;
      if (words[word + TX_SEEN]! >>> 0 <= queuedAt && words[word + RX_SEEN]! >>> 0 <= queuedAt) return record;
      this.unlink(record, list);
      this.append(record, list, nowMs);
    }
  }
}

const TAIL = 1;
const LENGTH = 2;

const SECOND_CHANCES = 4;

function headOf(list: number): number {
  return LISTS + (list - 1) * LIST_WORDS;
}
