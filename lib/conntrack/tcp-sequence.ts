import type { FlowTable } from './flow-table.js';
import {
  RECORD_BYTES,
  RECORD_WORDS,
  RX_END,
  RX_WINDOW,
  SCALES,
  STATE,
  SYN_RECV,
  TX_ACKED,
  TX_END,
  TX_WINDOW,
} from './record.js';

/**
 * Sequence numbers of a TCP connection, as far as they must be known to judge an RST, a FIN and the end of a handshake.
 *
 * Per direction: END, the sequence after the last byte sent; ACKED, the first that the peer has not acknowledged; WINDOW, the
 * last window sent, unscaled (one of a SYN is stored as if scaled, RFC 7323 2.2). So the peer of TX accepts [TX_ACKED,
 * TX_ACKED + RX_WINDOW << scale), and has at most TX_END. All differences are modulo 2^32.
 *
 *  - An RST is plausible in that window (RFC 9293 3.10.7.4), or anywhere up to END: what is in flight moves the window on
 *    before the RST arrives. An endpoint that follows RFC 5961 answers one that is not exact with a challenge ACK, which passes
 *    like any ACK, as does the RST that answers it. To a SYN, an RST of the backend must acknowledge it.
 *  - Data moves END if it begins not behind END or in the window, or at its very end: who has filled the window sends its ACKs
 *    from there. An ACK moves ACKED if it acknowledges what was sent or may have been (the tracker may have missed packets:
 *    fragments do not count here). Old retransmissions move nothing. SACK changes no field that is looked at, so it needs no
 *    care.
 *  - Before the connection is established ACKED stays behind the SYN and the SYN-ACK, also when data that came with them is
 *    acknowledged: repeats are known by it.
 *  - GSO super-packets count by their payload, as one long segment.
 */

/** Moves END, ACKED and WINDOW by a segment that has an ACK. `length` counts payload and FIN. */
export function followSequence(
  table: FlowTable,
  record: number,
  isReply: boolean,
  seq: number,
  ack: number,
  window: number,
  length: number,
): void {
  const { words, halves, bytes } = table;
  const side = isReply ? 1 : 0;
  const own = record * RECORD_WORDS + TX_END + 2 * side;
  const peer = record * RECORD_WORDS + RX_END - 2 * side;
  const ownWindow = record * (RECORD_BYTES / 2) + TX_WINDOW + side;
  const ownEnd = words[own]!;
  const peerEnd = words[peer]!;
  const peerAcked = words[peer + 1]!;
  if (((seq - ownEnd) | 0) > 0 && (seq - words[own + 1]!) >>> 0 > windowOver(table, record, isReply)) return;
  if (((ack - peerEnd) | 0) > 0) {
    if ((ack - peerAcked) >>> 0 > windowOver(table, record, !isReply)) return;
    words[peer] = ack;
  }
  const end = (seq + length) | 0;
  if (((end - ownEnd) | 0) > 0) words[own] = end;
  if (((ack - peerAcked) | 0) >= 0) {
    if (bytes[record * RECORD_BYTES + STATE] !== SYN_RECV) words[peer + 1] = ack;
    halves[ownWindow] = window;
  }
}

/** Whether a segment says something new, or again, about where both ends are: it can be trusted with a change of state. */
export function isInOrder(
  table: FlowTable,
  record: number,
  isReply: boolean,
  seq: number,
  ack: number,
  length: number,
): boolean {
  const { words } = table;
  const own = record * RECORD_WORDS + (isReply ? RX_END : TX_END);
  const peer = record * RECORD_WORDS + (isReply ? TX_END : RX_END);
  if (((seq + length - words[own + 1]!) | 0) < 0) return false;
  if (((seq - words[own]!) | 0) > 0 && (seq - words[own + 1]!) >>> 0 > windowOver(table, record, isReply)) return false;
  // In a handshake exactly what was sent; later an older ACK may come late, by as much as is on its way at once.
  const isHandshake = table.bytes[record * RECORD_BYTES + STATE] === SYN_RECV;
  const slack = isHandshake ? 0 : Math.max(ACK_SLACK, windowOver(table, record, !isReply));
  return (ack - words[peer + 1]! + slack) >>> 0 <= (words[peer]! - words[peer + 1]! + slack) >>> 0;
}

/** Whether the peer of a direction may have its window around `seq`. */
export function isInWindow(table: FlowTable, record: number, isReply: boolean, seq: number): boolean {
  const { words } = table;
  const own = record * RECORD_WORDS + (isReply ? RX_END : TX_END);
  const acked = words[own + 1]!;
  const offset = (seq - acked) >>> 0;
  return offset < windowOver(table, record, isReply) || offset <= (words[own]! - acked) >>> 0;
}

/** The window that a direction may fill, in bytes: its peer's. */
function windowOver({ halves, bytes }: FlowTable, record: number, isReply: boolean): number {
  const window = halves[record * (RECORD_BYTES / 2) + (isReply ? TX_WINDOW : RX_WINDOW)]!;
  return window << ((bytes[record * RECORD_BYTES + SCALES]! >>> (isReply ? 4 : 0)) & 0xf);
}

/** With Fast Open (RFC 7413) the SYN has data, of which all, some or nothing is acknowledged. */
export function acknowledgesSyn(table: FlowTable, record: number, ack: number): boolean {
  const word = record * RECORD_WORDS;
  const acked = table.words[word + TX_ACKED]!;
  return (ack - acked) >>> 0 <= (table.words[word + TX_END]! - acked) >>> 0;
}

/** The window of a SYN, which is never scaled, in units of the connection's. */
export function scaled(window: number, scale: number): number {
  return (window + (1 << scale) - 1) >>> scale;
}

/** How far behind the highest acknowledgement one may come at least (as Linux's MAXACKWINDOW). */
const ACK_SLACK = 66_000;
