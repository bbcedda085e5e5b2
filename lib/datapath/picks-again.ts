import {
  BACKEND_ID,
  CLIENT,
  FLAGS,
  PROTOCOL,
  RECORD_BYTES,
  RECORD_WORDS,
  RETURN,
  SEEN_NON_SYN,
  SERVICE,
  STATE,
  TYPE,
  TYPE_SVC,
  UNREPLIED,
} from '../conntrack/record.js';
import type { Records } from '../conntrack/table-reader.js';
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

/**
 * Whether a live flow will pick a backend again with its next packet from the client, of TCP with its next SYN: its backend takes
 * no new flows and it never got further than its first packets; or the mode of its service has changed, where any packet
 * does. A SYN on a connection that is closing begins anew besides.
 */
export function picksAgain(table: Records, record: number, snapshot: Snapshot): boolean {
  if (hasOtherWay(table, record, snapshot)) return true;
  const at = record * RECORD_BYTES;
  const isSettled =
    table.bytes[at + PROTOCOL] === PROTO_TCP
      ? (table.bytes[at + FLAGS]! & SEEN_NON_SYN) !== 0
      : table.bytes[at + STATE] !== UNREPLIED;
  if (isSettled) return false;
  const backend = table.words[record * RECORD_WORDS + BACKEND_ID]!;
  return (snapshot.backends[backend * BACKEND_WORDS + BACKEND_FLAGS]! & TAKES_NEW) === 0;
}

/**
 * Whether the mode of the flow's service has changed so that its packets go another way now: it is one-way, and its backend is no
 * node's any more; or its answers came through the gateway with the client as destination, and are a node's now. Answers to an snat
 * address go on coming, and so does what is drained go on as it was.
 */
export function hasOtherWay({ words, bytes }: Records, record: number, snapshot: Snapshot): boolean {
  const { tunnel, services, cutAt } = snapshot;
  const word = record * RECORD_WORDS;
  const isOneWay = bytes[record * RECORD_BYTES + TYPE] === TYPE_SVC;
  if (isOneWay && tunnel.address === 0) return true;
  const isDsr = services[words[word + SERVICE]! * SERVICE_WORDS + SERVICE_MODE] === MODE_DSR;
  if (isOneWay === isDsr || cutAt[words[word + BACKEND_ID]!] !== Number.POSITIVE_INFINITY) return false;
  return isOneWay || words[word + RETURN] === words[word + CLIENT];
}
