import { RecordRows } from './adopt.js';
import { CAUSE_EXPIRED } from './events.js';
import { FlowTable } from './flow-table.js';
import { allocateTable } from './memory.js';
import {
  BACKEND,
  BACKEND_ID,
  CLASS_CLOSING,
  CLASS_ESTABLISHED,
  CLASS_MASK,
  CLIENT,
  COMMIT,
  EXPIRES,
  MARKS,
  NEXT,
  OPENING_SYN,
  ORIGINAL_PORTS,
  PENDING_OFFER,
  PENDING_SYN,
  PREVIOUS,
  PROTOCOL,
  QUEUED_AT,
  RECORD_BYTES,
  RECORD_WORDS,
  REPLY_PORTS,
  RETURN,
  SCALES,
  SERVICE,
  TX_FLAGS_SEEN,
  TYPE,
  VIP,
} from './record.js';
import type { ExpirySweep } from './sweep.js';
import type { TableReader } from './table-reader.js';

/** A key that was looked for, and the record it led to here; addresses are signed words. */
export interface LookedUp {
  readonly source: number;
  readonly destination: number;
  /** Source << 16 | destination. */
  readonly ports: number;
  readonly protocol: number;
  /** As of FlowTable.find. */
  readonly reference: number;
}

/**
 * A table of its own over one that another thread writes: for trying out what a packet would do, with the code that does it.
 *
 * What is asked for and not here is looked up below, and copied the first time it is found. So it looks like a copy of the whole
 * table, at the price of the records that are touched: a million below cost nothing. Whatever is changed is changed here alone; what is
 * removed here is gone, though it is still there below.
 *
 * `insert` and `reapNext` find what they would find below. How many connections are open is for whoever knows it to say
 * (`open.assume`); copies are among them.
 */
export class OverlayTable extends FlowTable {
  /** Keys, in the order in which they were asked for. */
  readonly lookedUp: LookedUp[] = [];
  /** Records, in the order in which they were removed, and made. */
  readonly removed: number[] = [];
  readonly inserted: number[] = [];

  readonly #below: TableReader;
  /** By record below, the one here. */
  readonly #copies = new Map<number, number>();
  /** By record here, the one it was copied from, and what that was. */
  readonly #origins = new Map<number, { readonly below: number; readonly rows: RecordRows }>();
  /** Records below that would not be there any more. */
  readonly #gone = new Set<number>();
  #sweep: ExpirySweep;

  /** @param capacity for all records that may be touched */
  constructor(below: TableReader, capacity: number) {
    super(allocateTable(capacity));
    this.#below = below;
    this.#sweep = this.#sweepBelow();
  }

  override find(source: number, destination: number, ports: number, protocol: number, hash: number): number {
    let reference = super.find(source, destination, ports, protocol, hash);
    if (reference < 0) {
      const below = this.#below.find(source, destination, ports, protocol);
      const isNew = below >= 0 && !this.#copies.has(below >> 1) && !this.#gone.has(below >> 1);
      if (isNew) reference = (this.#copy(below >> 1) << 1) | (below & 1);
    }
    this.lookedUp.push({ source, destination, ports, protocol, reference });
    return reference;
  }

  override insert(...record: Parameters<FlowTable['insert']>): number {
    if (!this.#findRoom(record[10])) return -1;
    const inserted = super.insert(...record);
    if (inserted >= 0) this.inserted.push(inserted);
    return inserted;
  }

  override remove(record: number, cause: number, nowMs: number): void {
    this.removed.push(record);
    const origin = this.#origins.get(record);
    if (origin !== undefined) this.#gone.add(origin.below);
    super.remove(record, cause, nowMs);
  }

  override mayHoldExpired(nowMs: number): boolean {
    return this.#sweep.mayFind(nowMs);
  }

  override reapNext(nowMs: number): boolean {
    const below = this.#sweep.next(nowMs);
    if (below < 0) return false;
    this.#gone.add(below);
    const copy = this.#copies.get(below);
    const { words, bytes } = this.#below;
    if (copy !== undefined) this.remove(copy, CAUSE_EXPIRED, nowMs);
    else if (this.#below.read(below) === 0 && (bytes[MARKS]! & CLASS_MASK) !== CLASS_CLOSING) {
      this.open.add(words[SERVICE]!, words[BACKEND_ID]!, -1);
    }
    return true;
  }

  /** Begins anew: nothing is here. */
  clear(): void {
    for (let record = 0; record < this.highWater; record++) {
      if (this.generation(record) !== 0) super.remove(record, CAUSE_EXPIRED, 0);
    }
    for (const list of [this.lookedUp, this.removed, this.inserted]) list.length = 0;
    for (const known of [this.#copies, this.#origins, this.#gone]) known.clear();
    this.#sweep = this.#sweepBelow();
  }

  /** The copy of a record below, if that still is of this generation; -1: it is not. */
  copyOf(record: number, generation: number): number {
    const known = this.#copies.get(record);
    if (known !== undefined) return known;
    return this.#below.read(record) === 0 && this.#below.words[COMMIT] === generation ? this.#copy(record) : -1;
  }

  /** What a record was before anything happened to it here: the only row; undefined for one that was made here. */
  originalOf(record: number): RecordRows | undefined {
    return this.#origins.get(record)?.rows;
  }

  #sweepBelow(): ExpirySweep {
    return this.#below.sweep((record) => this.#gone.has(record));
  }

  /** As FlowTable does, where nobody uses a record any more, or somebody can be evicted. */
  #findRoom(nowMs: number): boolean {
    if (this.#below.hasFreeRecord || this.#gone.size > 0) return true;
    return this.#sweep.next(nowMs) >= 0 || this.#below.hasLesserRecord;
  }

  /** Copies the record that the reader has just read. */
  #copy(below: number): number {
    const { words, bytes, doubles } = this.#below;
    const record = super.insert(
      bytes[PROTOCOL]!,
      bytes[TYPE]!,
      words[CLIENT]!,
      words[VIP]!,
      words[ORIGINAL_PORTS]!,
      words[BACKEND]!,
      words[RETURN]!,
      words[REPLY_PORTS]!,
      words[SERVICE]!,
      words[BACKEND_ID]!,
      0,
    );
    const word = record * RECORD_WORDS;
    const byte = record * RECORD_BYTES;
    for (let i = 0; i < RECORD_WORDS; i++) if (!OWN_WORDS.has(i)) this.words[word + i] = words[i]!;
    for (let i = TX_FLAGS_SEEN; i <= SCALES; i++) this.bytes[byte + i] = bytes[i]!;
    const marks = bytes[MARKS]!;
    this.setClass(record, marks & CLASS_MASK, 0);
    this.bytes[byte + MARKS] = marks;
    if ((marks & CLASS_MASK) === CLASS_ESTABLISHED) for (const i of SYN_WORDS) this.words[word + i] = words[i]!;
    this.setExpiry(record, doubles[EXPIRES]!);
    // Whoever counts the connections below has counted it.
    if ((marks & CLASS_MASK) !== CLASS_CLOSING) this.open.add(words[SERVICE]!, words[BACKEND_ID]!, -1);
    this.#copies.set(below, record);
    this.#origins.set(record, { below, rows: new RecordRows(words.slice()) });
    return record;
  }
}

/** Words that are the table's, or hold bytes that are. */
const OWN_WORDS = new Set([MARKS >> 2, PREVIOUS, NEXT, COMMIT, QUEUED_AT]);

/** Words of an established record, which is on no list, that tell of the SYNs which came to it. */
const SYN_WORDS = [OPENING_SYN, PENDING_SYN, PENDING_OFFER];
