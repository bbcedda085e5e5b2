import type { Clock } from '../base/clock.js';
import { CAUSE_REPLACED, EVENT_CREATED } from './events.js';
import type { FlowTable } from './flow-table.js';
import {
  BACKEND,
  BACKEND_ID,
  CLASS_CLOSING,
  CLASS_ESTABLISHED,
  CLASS_HALF_OPEN,
  CLASS_MASK,
  CLIENT,
  CLOSED,
  CLOSING,
  CREATED,
  ESTABLISHED,
  EXPIRES,
  FLAGS,
  MARK_SYN_SEEN,
  MARK_WINDOWS,
  MARKS,
  ORIGINAL_PORTS,
  PROTOCOL,
  RECORD_BYTES,
  RECORD_DOUBLES,
  RECORD_WORDS,
  REPLIED,
  REPLY_PORTS,
  RETURN,
  RX_BYTES,
  RX_PACKETS,
  RX_SEEN,
  SCALES,
  SERVICE,
  STATE,
  SYN_RECV,
  SYN_SENT,
  TIMEOUT_ANY,
  TIMEOUT_SERVICE_ANY,
  TIMEOUT_SERVICE_TCP,
  TIMEOUT_SERVICE_TCP_GRACE,
  TIMEOUT_TCP,
  TIMEOUT_TCP_FIN,
  TIMEOUT_TCP_SYN,
  TX_END,
  TX_FLAGS_SEEN,
  TX_PACKETS,
  TX_SEEN,
  TX_WINDOW,
  TYPE,
  TYPE_SVC,
  VIP,
} from './record.js';
import { isReusable } from './tcp-tracker.js';

/**
 * Taking in records that another table has tracked: `weir ct import`.
 *
 *     the tuples here          the record
 *     both free, or expired    is inserted
 *     one connection's, both   is this connection: it takes the place of what is here if it is ahead of that, else nothing changes
 *     anybody else's           is refused; but whoever is closing gives way, as to a client that uses a port again
 *
 * Ahead is who has counted more packets in one direction and not fewer in the other: a copy made before the one that is
 * here, and every copy of a connection that has gone on here, is behind. So a second import brings what has changed since the
 * first, and the same one twice changes nothing.
 *
 * Class and lists are this table's own business and follow from the state; so do the words about SYNs on an established
 * record, which are not taken over.
 */

/** What became of a record. */
export const ADOPTED = 0;
export const UPDATED = 1;
export const EXISTS = 2;
export const TUPLE_TAKEN = 3;
export const TABLE_FULL = 4;

/** Records outside a table, one after the other, in the layout of record.ts; COMMIT and the links mean nothing. */
export class RecordRows {
  readonly words: Int32Array;
  readonly bytes: Uint8Array;
  readonly halves: Uint16Array;
  readonly doubles: Float64Array;

  /** @param words the whole of a buffer, RECORD_WORDS each */
  constructor(words: Int32Array) {
    this.words = words;
    this.bytes = new Uint8Array(words.buffer);
    this.halves = new Uint16Array(words.buffer);
    this.doubles = new Float64Array(words.buffer);
  }

  get count(): number {
    return this.words.length / RECORD_WORDS;
  }
}

/**
 * Takes rows in, in their order, until they or the time is out; at least one. A record takes 1.5 us, but some 30 while this code
 * is new to the machine: a number of records would bound nothing.
 *
 * @param clock the table's; EXPIRES is of it
 * @returns what became of each that was taken
 */
export function adoptSome(table: FlowTable, rows: RecordRows, clock: Clock, budgetMs: number): Uint8Array {
  const { count } = rows;
  const outcomes = new Uint8Array(count);
  const nowMs = clock.nowMs();
  let row = 0;
  do {
    outcomes[row] = adopt(table, rows, row, nowMs);
    row++;
  } while (row < count && clock.nowMs() - nowMs < budgetMs);
  return outcomes.slice(0, row);
}

/** The timer (TIMEOUT_*) that bounds how long a record in this state may live without a packet. */
export function timerOf(type: number, state: number): number {
  switch (state) {
    case SYN_SENT:
    case SYN_RECV:
      return TIMEOUT_TCP_SYN;
    case ESTABLISHED:
      return type === TYPE_SVC ? TIMEOUT_SERVICE_TCP : TIMEOUT_TCP;
    case CLOSING:
      return type === TYPE_SVC ? TIMEOUT_SERVICE_TCP_GRACE : TIMEOUT_TCP_FIN;
    case CLOSED:
      return TIMEOUT_TCP_FIN;
    default:
      return type === TYPE_SVC ? TIMEOUT_SERVICE_ANY : TIMEOUT_ANY;
  }
}

/** The class (CLASS_*) that the trackers give a record in this state. `packets`: the client's so far. */
export function classOf(type: number, state: number, packets: number): number {
  if (state === CLOSING || state === CLOSED) return CLASS_CLOSING;
  if (type === TYPE_SVC) return state !== SYN_SENT && packets > 2 ? CLASS_ESTABLISHED : CLASS_HALF_OPEN;
  return state === ESTABLISHED || state === REPLIED ? CLASS_ESTABLISHED : CLASS_HALF_OPEN;
}

function adopt(table: FlowTable, rows: RecordRows, row: number, nowMs: number): number {
  const { words, bytes } = rows;
  const word = row * RECORD_WORDS;
  const protocol = bytes[row * RECORD_BYTES + PROTOCOL]!;
  const type = bytes[row * RECORD_BYTES + TYPE]!;
  const original = findKey(table, words, word + CLIENT, protocol);
  const reply = type === TYPE_SVC ? -1 : findKey(table, words, word + BACKEND, protocol);

  const record = original >> 1;
  const isSame =
    original >= 0 &&
    (original & 1) === 0 &&
    table.bytes[record * RECORD_BYTES + TYPE] === type &&
    (type === TYPE_SVC || reply === original + 1);
  if (isSame && !table.isExpired(record, nowMs)) {
    if (!isAhead(rows, row, table, record)) return EXISTS;
    fill(table, record, rows, row, nowMs);
    return UPDATED;
  }
  // Both are looked at before either goes: a refusal changes nothing.
  if (original >= 0 && !isReusable(table, record, nowMs)) return TUPLE_TAKEN;
  if (reply >= 0 && !isReusable(table, reply >> 1, nowMs)) return TUPLE_TAKEN;
  if (original >= 0) table.remove(record, CAUSE_REPLACED, nowMs);
  if (reply >= 0 && reply >> 1 !== record) table.remove(reply >> 1, CAUSE_REPLACED, nowMs);

  const added = table.insert(
    protocol,
    type,
    words[word + CLIENT]!,
    words[word + VIP]!,
    words[word + ORIGINAL_PORTS]!,
    words[word + BACKEND]!,
    words[word + RETURN]!,
    words[word + REPLY_PORTS]!,
    words[word + SERVICE]!,
    words[word + BACKEND_ID]!,
    nowMs,
  );
  if (added < 0) return TABLE_FULL;
  fill(table, added, rows, row, nowMs);
  if (table.isWatched) table.tell(EVENT_CREATED, 0, added, nowMs);
  return ADOPTED;
}

/** The reference of the key whose three words begin at `at`. */
function findKey(table: FlowTable, words: Int32Array, at: number, protocol: number): number {
  const source = words[at]!;
  const destination = words[at + 1]!;
  const ports = words[at + 2]!;
  return table.find(source, destination, ports, protocol, table.hash(source, destination, ports, protocol));
}

function isAhead(rows: RecordRows, row: number, table: FlowTable, record: number): boolean {
  const theirs = row * RECORD_DOUBLES;
  const ours = record * RECORD_DOUBLES;
  const tx = rows.doubles[theirs + TX_PACKETS]! - table.doubles[ours + TX_PACKETS]!;
  const rx = rows.doubles[theirs + RX_PACKETS]! - table.doubles[ours + RX_PACKETS]!;
  return tx >= 0 && rx >= 0 && tx + rx > 0;
}

/** Everything of a record but its tuples and ids, which it has, and its class, links and COMMIT, which are the table's. */
function fill(table: FlowTable, record: number, rows: RecordRows, row: number, nowMs: number): void {
  const from = row * RECORD_BYTES;
  const to = record * RECORD_BYTES;
  const { bytes } = table;
  const state = rows.bytes[from + STATE]!;
  const marks = rows.bytes[from + MARKS]! & (MARK_SYN_SEEN | MARK_WINDOWS);
  bytes[to + STATE] = state;
  bytes[to + FLAGS] = rows.bytes[from + FLAGS]!;
  bytes[to + MARKS] = (bytes[to + MARKS]! & CLASS_MASK) | marks;
  for (let i = TX_FLAGS_SEEN; i <= SCALES; i++) bytes[to + i] = rows.bytes[from + i]!;

  const word = record * RECORD_WORDS;
  const source = row * RECORD_WORDS;
  table.words[word + CREATED] = rows.words[source + CREATED]!;
  table.words[word + TX_SEEN] = rows.words[source + TX_SEEN]!;
  table.words[word + RX_SEEN] = rows.words[source + RX_SEEN]!;
  for (let i = 0; i < 4; i++) table.words[word + TX_END + i] = rows.words[source + TX_END + i]!;
  const half = record * (RECORD_BYTES / 2) + TX_WINDOW;
  for (let i = 0; i < 2; i++) table.halves[half + i] = rows.halves[row * (RECORD_BYTES / 2) + TX_WINDOW + i]!;

  const double = record * RECORD_DOUBLES;
  for (let i = TX_PACKETS; i <= RX_BYTES; i++) table.doubles[double + i] = rows.doubles[row * RECORD_DOUBLES + i]!;
  const type = bytes[to + TYPE]!;
  table.setClass(record, classOf(type, state, table.doubles[double + TX_PACKETS]!), nowMs);
  table.setExpiry(record, rows.doubles[row * RECORD_DOUBLES + EXPIRES]!);
}
