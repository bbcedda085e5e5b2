import type { FlowTable } from './flow-table.js';
import {
  CLASS_ESTABLISHED,
  RECORD_BYTES,
  RECORD_DOUBLES,
  REPLIED,
  STATE,
  TIMEOUT_ANY,
  TIMEOUT_SERVICE_ANY,
  TX_PACKETS,
  TYPE,
  TYPE_SVC,
  UNREPLIED,
} from './record.js';

/**
 * UDP, and whatever else has no connections of its own.
 *
 *                 first packet              first reply
 *     (no entry) -------------> UNREPLIED -------------> REPLIED
 *
 * Every packet in either direction sets the timer anew: `any`, or `serviceAny` for one-way (SVC) entries, which stay UNREPLIED
 * for good. An entry may be evicted (half-open) until its first reply, a one-way one until its third packet.
 */

/** The first packet of a new record. */
export function openAny(table: FlowTable, record: number, nowMs: number, timeouts: Float64Array): void {
  const at = record * RECORD_BYTES;
  table.bytes[at + STATE] = UNREPLIED;
  table.setExpiry(record, nowMs + timeouts[table.bytes[at + TYPE] === TYPE_SVC ? TIMEOUT_SERVICE_ANY : TIMEOUT_ANY]!);
}

/** A further packet; before `account` has counted it. */
export function trackAny(
  table: FlowTable,
  record: number,
  isReply: boolean,
  nowMs: number,
  timeouts: Float64Array,
): void {
  const at = record * RECORD_BYTES;
  const { bytes } = table;
  if (bytes[at + TYPE] === TYPE_SVC) {
    // The packets before this one.
    if (table.doubles[record * RECORD_DOUBLES + TX_PACKETS]! >= 2) table.setClass(record, CLASS_ESTABLISHED, nowMs);
    table.setExpiry(record, nowMs + timeouts[TIMEOUT_SERVICE_ANY]!);
    return;
  }
  if (isReply && bytes[at + STATE] !== REPLIED) {
    bytes[at + STATE] = REPLIED;
    table.setClass(record, CLASS_ESTABLISHED, nowMs);
  }
  table.setExpiry(record, nowMs + timeouts[TIMEOUT_ANY]!);
}
