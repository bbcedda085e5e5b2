import { randomFillSync } from 'node:crypto';
import { WeirError } from '../base/errors.js';
import type { HashKey } from '../base/hash.js';
import { RECORD_BYTES } from './record.js';

/**
 * The memory of one flow table: a header, the records, and the index. It is only bytes handed in, so that the table may live
 * in memory shared between threads or in a mapped file, and any thread can attach to it.
 *
 *     | header 256 B | capacity x 128 B records | (slots + 256) x 4 B index |
 *
 * At 4 to 4.5 slots per record a connection takes 144 to 146 bytes, all told; 1.25 KB a table come on top.
 *
 * Zero is the empty state of everything but the header. Nothing here fills the memory: a page is committed when the first
 * record or slot in it is used, and records are used from the bottom up (HIGH_WATER), so that a large table costs nothing
 * while it is empty.
 */
export interface TableMemory {
  readonly buffer: SharedArrayBuffer | ArrayBuffer;
  /** Where the header begins: a multiple of 8, of 64 for records that fill cache lines. */
  readonly byteOffset: number;
  /** Records there is room for. */
  readonly capacity: number;
}

export const HEADER_BYTES = 256;

/** Slots behind the last home slot: a probe neither wraps around nor leaves the index, and ends at a slot that stays empty. */
export const INDEX_TAIL = 256;

/** More would leave no room for a tag beside the record number in a slot. */
export const MAX_CAPACITY = 0x7fffff;

// Header, as words.
export const MAGIC = 0;
export const LAYOUT = 1;
export const CAPACITY = 2;
/** Records from here on were never used. */
export const HIGH_WATER = 3;
/** The hash secret, two words. */
export const SECRET = 4;
export const COUNT = 6;
/** First record of the free list (by NEXT), -1: none. */
export const FREE_HEAD = 7;
/** The last value given to a COMMIT. */
export const GENERATION = 8;
/** Head, tail and length of the lists of CLASS_HALF_OPEN and CLASS_CLOSING. */
export const LISTS = 9;
export const LIST_WORDS = 3;
/** The record the search for an expired one goes on at. */
export const SWEEP_CURSOR = 15;

// Header, as doubles.
/** No record expires before the lesser of these two (flow-table.ts, "Finding what has expired"). */
export const EARLIEST = 10;
export const EARLIEST_SINCE = 11;
export const INSERTED = 12;
export const INSERT_FAILURES = 13;
export const EVICTED_EXPIRED = 14;
export const EVICTED_CLOSING = 15;
export const EVICTED_HALF_OPEN = 16;
// The garbage collector's, in the header of its first table; GC_DELETED in each.
export const GC_DELETED = 17;
export const GC_RUNS = 18;
export const GC_INTERVAL_MS = 19;
/** CPU time of the last full pass, and the longest slice so far. */
export const GC_PASS_MS = 20;
export const GC_LONGEST_SLICE_MS = 21;
/** Records the last full pass deleted, over all tables, and when it ended (ms of the data path's clock). */
export const GC_LAST_DELETED = 22;
export const GC_LAST_AT_MS = 23;
/** CPU time of all passes. */
export const GC_TOTAL_MS = 24;

const MAGIC_WORD = 0x72696577; // "weir", little-endian
/** Changes with the header, the record or the index. */
const LAYOUT_WORD = 0x00010000 | RECORD_BYTES;

const PAGE_BYTES = 65536;

/** How the index is cut: a home slot is `(hash >>> 4) * factor >>> shift`. */
export interface IndexGeometry {
  readonly slots: number;
  readonly factor: number;
  readonly shift: number;
}

/**
 * Slots for two keys per record at a load of at most one half, in steps of an eighth: a power of two would waste up to half
 * the budget, and an exact count would need a 64-bit product for each lookup.
 */
export function indexGeometry(capacity: number): IndexGeometry {
  const wanted = capacity * 4;
  const doublings = Math.max(0, 32 - Math.clz32(wanted - 1) - 4);
  const factor = Math.ceil(wanted / 2 ** doublings);
  return { slots: factor << doublings, factor, shift: 28 - doublings };
}

export function recordsOffset(): number {
  return HEADER_BYTES;
}

export function indexOffset(capacity: number): number {
  return HEADER_BYTES + capacity * RECORD_BYTES;
}

/** Bytes a table of `capacity` records takes. */
export function tableBytes(capacity: number): number {
  return indexOffset(capacity) + (indexGeometry(capacity).slots + INDEX_TAIL) * 4;
}

/** A key nobody outside can know. */
export function randomSecret(): HashKey {
  const [k0, k1] = randomFillSync(new Int32Array(2));
  return { k0: k0!, k1: k1! };
}

/**
 * Memory for an empty table, shareable between threads. `secret` keys its hash: random in live use, seeded in a replay.
 *
 * @param capacity 1 to MAX_CAPACITY
 */
export function allocateTable(capacity: number, secret: HashKey = randomSecret()): TableMemory {
  if (!Number.isInteger(capacity) || capacity < 1 || capacity > MAX_CAPACITY) {
    throw new RangeError(`a flow table holds 1 to ${MAX_CAPACITY} records, not ${capacity}`);
  }
  const memory = { buffer: allocateShared(tableBytes(capacity)), byteOffset: 0, capacity };
  formatTable(memory, secret);
  return memory;
}

/** Makes an empty table of zeroed memory: writes its header. */
export function formatTable(memory: TableMemory, secret: HashKey): void {
  const header = headerWords(memory);
  header[MAGIC] = MAGIC_WORD;
  header[LAYOUT] = LAYOUT_WORD;
  header[CAPACITY] = memory.capacity;
  header[SECRET] = secret.k0;
  header[SECRET + 1] = secret.k1;
  header[FREE_HEAD] = -1;
  for (let list = 0; list < 2; list++) {
    header[LISTS + list * LIST_WORDS] = -1;
    header[LISTS + list * LIST_WORDS + 1] = -1;
  }
  const figures = headerDoubles(memory);
  figures[EARLIEST] = Number.POSITIVE_INFINITY;
  figures[EARLIEST_SINCE] = Number.POSITIVE_INFINITY;
}

/**
 * Makes the header that of an empty table again, but for its secret, the last generation and the high-water mark: whoever is killed
 * in the middle of it has lost no record.
 */
export function reformatTable(memory: TableMemory): void {
  const header = headerWords(memory);
  const [k0, k1] = [header[SECRET]!, header[SECRET + 1]!];
  header.fill(0, COUNT, GENERATION);
  header.fill(0, GENERATION + 1);
  formatTable(memory, k0 === 0 && k1 === 0 ? randomSecret() : { k0, k1 });
}

/** @throws WeirError STATE_FILE when the memory holds no table of this build and this capacity. */
export function checkTable(memory: TableMemory): void {
  const header = headerWords(memory);
  const mistake =
    header[MAGIC] !== MAGIC_WORD
      ? 'is no conntrack table'
      : header[LAYOUT] !== LAYOUT_WORD
        ? 'was written by another version of weir'
        : header[CAPACITY] !== memory.capacity
          ? `holds ${header[CAPACITY]} records, not ${memory.capacity}`
          : '';
  if (mistake !== '') throw new WeirError('STATE_FILE', `the memory ${mistake}`, 'Start with an empty table.');
}

export function headerWords(memory: TableMemory): Int32Array {
  return new Int32Array(memory.buffer, memory.byteOffset, HEADER_BYTES / 4);
}

export function headerDoubles(memory: TableMemory): Float64Array {
  return new Float64Array(memory.buffer, memory.byteOffset, HEADER_BYTES / 8);
}

/**
 * Large tables take a WebAssembly memory's buffer, for its alignment alone: it begins on a page, where the bytes of a
 * SharedArrayBuffer begin 16 behind one (malloc's header), so that each record would lie across three cache lines. At 1M
 * records in random order that was measured as 66 ns a packet against 34.
 */
function allocateShared(bytes: number): SharedArrayBuffer {
  if (bytes >= 8 * PAGE_BYTES) {
    const pages = Math.ceil(bytes / PAGE_BYTES);
    try {
      return new WebAssembly.Memory({ initial: pages, maximum: pages, shared: true }).buffer;
    } catch {
      // The address space is limited (ulimit -v): slower is better than not at all.
    }
  }
  return new SharedArrayBuffer(bytes);
}

/** Node has it, its types do not. */
declare const WebAssembly: {
  Memory: new (limits: { initial: number; maximum: number; shared: true }) => { readonly buffer: SharedArrayBuffer };
};
