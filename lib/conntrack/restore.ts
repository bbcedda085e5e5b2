import { PROTO_TCP } from '../wire/ipv4.js';
import { classOf } from './adopt.js';
import { FlowTable } from './flow-table.js';
import {
  FREE_HEAD,
  HIGH_WATER,
  headerWords,
  INDEX_TAIL,
  indexGeometry,
  indexOffset,
  reformatTable,
  type TableMemory,
} from './memory.js';
import {
  CLASS_CLOSING,
  CLASS_ESTABLISHED,
  CLASS_MASK,
  CLOSED,
  COMMIT,
  CREATED,
  EXPIRES,
  MARKS,
  NEXT,
  PROTOCOL,
  QUEUED_AT,
  RECORD_BYTES,
  RECORD_DOUBLES,
  RECORD_WORDS,
  REPLIED,
  RX_BYTES,
  STATE,
  SYN_SENT,
  TX_PACKETS,
  TYPE,
  TYPE_OUT,
  TYPE_SVC,
  UNREPLIED,
} from './record.js';

/**
 * A table whose writer is gone: it stopped, or was killed between any two stores.
 *
 * Only the records are trusted, and those one by one. An insert stores COMMIT after everything else of a record, a removal
 * clears it first: what has its COMMIT is a connection's record, before a packet, after it, or in its middle. In its middle the
 * trackers leave nothing that the next packet does not mend (a MARK_* is stored after what it vouches for), but for one thing:
 * the class follows the state by a store of its own, and is therefore made to fit here. Index, lists, free list and counts take
 * many stores to change: they are made anew from the records, as everything in the header is but the secret, the last generation
 * and the high-water mark, which an insert raises first.
 *
 * A record is given up when it has expired, or when it cannot be one of weir's: a value out of its range, or a key that another
 * record has already. The first is its normal end; the second is damage, and counted as such.
 */
export interface Restored {
  /** Connections the table goes on with. */
  readonly kept: number;
  readonly expired: number;
  readonly damaged: number;
}

/** The longest a configured timeout can be. */
const MAX_LIFETIME_MS = 8760 * 3_600_000;

/**
 * Makes the table whole. To be called before anybody else attaches to it, on memory that was a table of this build and capacity.
 * Being killed in the middle of it does no harm.
 *
 * @param isTcp whether it is the table of TCP or that of everything else
 * @param nowMs of the clock that the records' times are of
 */
export function restoreTable(memory: TableMemory, isTcp: boolean, nowMs: number): Restored {
  const header = headerWords(memory);
  const used = header[HIGH_WATER]! >= 0 ? Math.min(header[HIGH_WATER]!, memory.capacity) : memory.capacity;
  reformatTable(memory);
  new Int32Array(
    memory.buffer,
    memory.byteOffset + indexOffset(memory.capacity),
    indexGeometry(memory.capacity).slots + INDEX_TAIL,
  ).fill(0);
  const table = new FlowTable(memory);
  const { words, bytes, doubles } = table;

  let expired = 0;
  let damaged = 0;
  const established: number[] = [];
  const listed: number[] = [];
  for (let record = 0; record < used; record++) {
    if (words[record * RECORD_WORDS + COMMIT] === 0) continue;
    if (table.isExpired(record, nowMs)) expired++;
    else if (!isSound(table, record, isTcp, nowMs)) damaged++;
    else {
      const at = record * RECORD_BYTES;
      const packets = doubles[record * RECORD_DOUBLES + TX_PACKETS]!;
      const fitting = classOf(bytes[at + TYPE]!, bytes[at + STATE]!, packets);
      bytes[at + MARKS] = (bytes[at + MARKS]! & ~CLASS_MASK) | fitting;
      (fitting === CLASS_ESTABLISHED ? established : listed).push(record);
      continue;
    }
    words[record * RECORD_WORDS + COMMIT] = 0;
  }
  // The lists are in the order of joining.
  const joinedAt = (record: number): number => words[record * RECORD_WORDS + QUEUED_AT]! >>> 0;
  listed.sort((a, b) => joinedAt(a) - joinedAt(b));

  let kept = 0;
  let highWater = 0;
  for (const record of [...established, ...listed]) {
    if (table.recover(record, nowMs)) {
      kept++;
      highWater = Math.max(highWater, record + 1);
    } else {
      words[record * RECORD_WORDS + COMMIT] = 0;
      damaged++;
    }
  }
  header[HIGH_WATER] = highWater;
  for (let record = highWater - 1; record >= 0; record--) {
    if (words[record * RECORD_WORDS + COMMIT] !== 0) continue;
    words[record * RECORD_WORDS + NEXT] = header[FREE_HEAD]!;
    header[FREE_HEAD] = record;
  }
  return { kept, expired, damaged };
}

function isSound({ words, bytes, doubles }: FlowTable, record: number, isTcp: boolean, nowMs: number): boolean {
  const at = record * RECORD_BYTES;
  const type = bytes[at + TYPE]!;
  const state = bytes[at + STATE]!;
  const counters = doubles.subarray(record * RECORD_DOUBLES + TX_PACKETS, record * RECORD_DOUBLES + RX_BYTES + 1);
  return (
    (type === TYPE_OUT || type === TYPE_SVC) &&
    (bytes[at + PROTOCOL] === PROTO_TCP) === isTcp &&
    state >= (isTcp ? SYN_SENT : UNREPLIED) &&
    state <= (isTcp ? CLOSED : REPLIED) &&
    (bytes[at + MARKS]! & CLASS_MASK) <= CLASS_CLOSING &&
    doubles[record * RECORD_DOUBLES + EXPIRES]! <= nowMs + MAX_LIFETIME_MS &&
    words[record * RECORD_WORDS + CREATED]! >>> 0 <= nowMs / 1000 &&
    counters.every((count) => count >= 0 && Number.isFinite(count))
  );
}
