import {
  BACKEND_ID,
  FLAGS,
  PROTOCOL,
  RECORD_BYTES,
  RECORD_WORDS,
  SEEN_NON_SYN,
  STATE,
  TYPE,
  TYPE_SVC,
  UNREPLIED,
} from '../conntrack/record.js';
import { PROTO_TCP } from '../wire/ipv4.js';
import { BACKEND_FLAGS, BACKEND_WORDS, type Snapshot, TAKES_NEW } from './snapshot.js';

/**
 * Whether a live flow will pick a backend again with its next packet from the client, of TCP with its next SYN: its backend takes
 * no new flows and it never got further than its first packets; or it is one-way, and there are no tunnels any more. A SYN on a
 * connection that is closing begins anew besides.
 *
 * @param table where record `record` lies: the flow table, or another thread's copy of it
 */
export function picksAgain(
  table: { readonly words: Int32Array; readonly bytes: Uint8Array },
  record: number,
  { backends, tunnel }: Snapshot,
): boolean {
  const at = record * RECORD_BYTES;
  if (table.bytes[at + TYPE] === TYPE_SVC && tunnel.address === 0) return true;
  const isSettled =
    table.bytes[at + PROTOCOL] === PROTO_TCP
      ? (table.bytes[at + FLAGS]! & SEEN_NON_SYN) !== 0
      : table.bytes[at + STATE] !== UNREPLIED;
  if (isSettled) return false;
  const backend = table.words[record * RECORD_WORDS + BACKEND_ID]!;
  return (backends[backend * BACKEND_WORDS + BACKEND_FLAGS]! & TAKES_NEW) === 0;
}
