import {
  BACKEND_ID,
  FLAGS,
  PROTOCOL,
  RECORD_BYTES,
  RECORD_WORDS,
  SEEN_NON_SYN,
  SERVICE,
  STATE,
  TYPE,
  TYPE_SVC,
  UNREPLIED,
} from '../conntrack/record.js';
import { PROTO_TCP } from '../wire/ipv4.js';
import {
  BACKEND_FLAGS,
  BACKEND_WORDS,
  MODE_DSR,
  SERVICE_MODE,
  SERVICE_WORDS,
  type Snapshot,
  TAKES_NEW,
} from './snapshot.js';

/** Where records lie: the flow table, or another thread's copy of one. */
interface Records {
  readonly words: Int32Array;
  readonly bytes: Uint8Array;
}

/**
 * Whether a live flow will pick a backend again with its next packet from the client, of TCP with its next SYN: its backend takes
 * no new flows and it never got further than its first packets; or it is one-way and has no tunnel any more, where any packet
 * does. A SYN on a connection that is closing begins anew besides.
 */
export function picksAgain(table: Records, record: number, snapshot: Snapshot): boolean {
  if (hasNoTunnel(table, record, snapshot)) return true;
  const at = record * RECORD_BYTES;
  const isSettled =
    table.bytes[at + PROTOCOL] === PROTO_TCP
      ? (table.bytes[at + FLAGS]! & SEEN_NON_SYN) !== 0
      : table.bytes[at + STATE] !== UNREPLIED;
  if (isSettled) return false;
  const backend = table.words[record * RECORD_WORDS + BACKEND_ID]!;
  return (snapshot.backends[backend * BACKEND_WORDS + BACKEND_FLAGS]! & TAKES_NEW) === 0;
}

/** Whether a flow is one-way, and the configuration has no tunnel for it any more: its backend is no node's now. */
export function hasNoTunnel({ words, bytes }: Records, record: number, snapshot: Snapshot): boolean {
  if (bytes[record * RECORD_BYTES + TYPE] !== TYPE_SVC) return false;
  const { tunnel, services, cutAt } = snapshot;
  const word = record * RECORD_WORDS;
  if (tunnel.address === 0) return true;
  const isDrained = cutAt[words[word + BACKEND_ID]!] !== Number.POSITIVE_INFINITY;
  return !isDrained && services[words[word + SERVICE]! * SERVICE_WORDS + SERVICE_MODE] !== MODE_DSR;
}
