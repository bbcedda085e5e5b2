import { ACK, FIN, isOpeningSyn, RST, SYN } from '../wire/tcp.js';
import type { FlowTable } from './flow-table.js';
import {
  BACKEND_ID,
  CLASS_CLOSING,
  CLASS_ESTABLISHED,
  CLASS_HALF_OPEN,
  CLOSED,
  CLOSING,
  ESTABLISHED,
  EXPIRES,
  FLAGS,
  MARK_SYN_PENDING,
  MARK_SYN_SEEN,
  MARK_WINDOWS,
  MARKS,
  OPENING_SYN,
  PENDING_OFFER,
  PENDING_SYN,
  RECORD_BYTES,
  RECORD_DOUBLES,
  RECORD_WORDS,
  RX_ACKED,
  RX_CLOSING,
  RX_END,
  RX_FLAGS_SEEN,
  RX_WINDOW,
  SCALE_NONE,
  SCALES,
  SEEN_NON_SYN,
  STATE,
  STATE_FREE,
  SYN_RECV,
  SYN_SENT,
  TIMEOUT_SERVICE_TCP,
  TIMEOUT_SERVICE_TCP_GRACE,
  TIMEOUT_TCP,
  TIMEOUT_TCP_FIN,
  TIMEOUT_TCP_SYN,
  TX_ACKED,
  TX_BYTES,
  TX_CLOSING,
  TX_END,
  TX_FLAGS_SEEN,
  TX_PACKETS,
  TX_SEEN,
  TX_WINDOW,
  TYPE,
  TYPE_SVC,
} from './record.js';
import { acknowledgesSyn, followSequence, isInOrder, isInWindow, scaled } from './tcp-sequence.js';

/**
 * The TCP tracker: what a packet does to the record of its connection. It judges, it never refuses: every packet is forwarded,
 * and the endpoints decide. weir only has to know when a connection is established, closing and gone, and not to be told lies.
 *
 * ## Two-way entries (OUT)
 *
 *     from  packet                 SYN_SENT    SYN_RECV    ESTABLISHED   CLOSING     CLOSED
 *     c     SYN, same sequence     SYN_SENT    SYN_RECV    ESTABLISHED a (new entry) (new entry)
 *     c     SYN, other sequence    SYN_SENT    SYN_SENT    ESTABLISHED a (new entry) (new entry)
 *     b     SYN-ACK of the SYN     SYN_RECV    SYN_RECV    ESTABLISHED b CLOSING     CLOSED
 *     b     SYN-ACK of another       -           -         ESTABLISHED   CLOSING     CLOSED
 *     c     ACK or data, in order  SYN_SENT    ESTABLISHED ESTABLISHED   CLOSING     CLOSED
 *     c     ACK or data, implaus.  SYN_SENT    SYN_RECV    ESTABLISHED   CLOSING     CLOSED
 *     b     ACK or data            SYN_SENT    SYN_RECV    ESTABLISHED   CLOSING     CLOSED
 *     c     FIN, in order          SYN_SENT    ESTABLISHED TxClosing   c CLOSING     CLOSED
 *     b     FIN, in order          SYN_SENT    RxClosing   RxClosing   c CLOSING     CLOSED
 *     c, b  FIN, implausible       as an implausible ACK
 *     c, b  RST, plausible         CLOSED      CLOSED      CLOSED        CLOSED      CLOSED
 *     b     RST to a SYN (a)         -           -         CLOSED          -           -
 *     c, b  RST, implausible         -           -           -             -           -
 *     c     SYN-ACK                  -           -           -             -           -
 *     b     SYN                      -           -           -             -           -
 *     timer                        tcpSyn      tcpSyn      tcp           tcpFin      tcpFin
 *
 *     c client, b backend; "-": nothing at all changes; everything else sets the state's timer anew, and SeenNonSyn if it has no
 *     SYN and is no RST. a: the SYN is remembered, unless it is the entry's own, late. b: if it acknowledges a remembered SYN,
 *     SYN_RECV: both ends have begun anew (the old connection ended out of sight). An RST that does so refuses the new connection,
 *     and knows of no old one. c: CLOSING when the other's FIN was seen as well. A lone FIN keeps the `tcp` timer: half-closed
 *     connections may go on for long.
 *
 * A SYN for a CLOSING, CLOSED or expired entry does not come here: the pipeline removes the entry and opens another
 * (`isReusable`). It cannot do that to an ESTABLISHED one, or anybody could cut connections with one forged SYN.
 *
 * ## Picked up in the middle (after a restart, or from another gateway)
 *
 * No SYN was seen, so no sequence number can be judged and none is. SYN_SENT until a reply is seen (SYN_RECV until a packet
 * of the client is, where a reply came first), on the tcpSyn timer, then ESTABLISHED. An entry opened by a FIN stays on
 * tcpFin until the other side sends data. An RST only shortens the timer to tcpFin, and the next other packet sets it anew (RFC
 * 7857, REQ-3): a forged one costs nothing while the connection is in use.
 *
 * ## One-way entries (SVC: dsr, the gateway never sees the replies)
 *
 *     SYN_SENT --first non-SYN--> ESTABLISHED --FIN--> CLOSING (both closing flags)
 *     tcpSyn                      serviceTcp           serviceTcpGrace, anew with each packet
 *
 * RSTs as above. Half-open until the third packet: two forged ones would else take a place that cannot be evicted. TX_END and
 * RX_END follow the client's numbers, unjudged, and begin anew with each SYN: an RST that ends the flow by decree is made of them,
 * and nothing else.
 *
 * How numbers are judged is tcp-sequence.ts's business.
 *
 * Rejected: dropping implausible packets, as Linux does with INVALID: each mistake there is a stall (nf_conntrack_tcp_be_liberal
 * exists for a reason), and an endpoint judges better. Rejected: reopening a CLOSED entry on data: a real RST's sender is gone.
 */

/**
 * The first packet of a new record, from the client: a SYN, or one from the middle of a connection.
 *
 * @param seq sequence number, `ack` acknowledgement, `window` unscaled, all as in the header
 * @param payloadBytes without the TCP header; of all segments, for a super-packet
 * @param windowScale the option's shift, -1 when there is none
 * @param timeouts ms by TIMEOUT_* row
 */
export function openTcp(
  table: FlowTable,
  record: number,
  tcpFlags: number,
  seq: number,
  ack: number,
  window: number,
  payloadBytes: number,
  windowScale: number,
  nowMs: number,
  timeouts: Float64Array,
): void {
  const at = record * RECORD_BYTES;
  table.bytes[at + TX_FLAGS_SEEN] = tcpFlags;
  table.bytes[at + STATE] = SYN_SENT;
  table.setExpiry(record, nowMs + timeouts[TIMEOUT_TCP_SYN]!);
  if (table.bytes[at + TYPE] === TYPE_SVC) {
    table.words[record * RECORD_WORDS + TX_END] = seq;
    trackOneWay(table, record, tcpFlags, seq, ack, payloadBytes, nowMs, timeouts);
  } else trackTwoWay(table, record, false, tcpFlags, seq, ack, window, payloadBytes, windowScale, nowMs, timeouts);
}

/** A further packet of a record; before `account` has counted it. Parameters as for `openTcp`. */
export function trackTcp(
  table: FlowTable,
  record: number,
  isReply: boolean,
  tcpFlags: number,
  seq: number,
  ack: number,
  window: number,
  payloadBytes: number,
  windowScale: number,
  nowMs: number,
  timeouts: Float64Array,
): void {
  const at = record * RECORD_BYTES;
  const { bytes } = table;
  bytes[at + (isReply ? RX_FLAGS_SEEN : TX_FLAGS_SEEN)]! |= tcpFlags;
  if (
    (tcpFlags & (SYN | FIN | RST | ACK)) === ACK &&
    bytes[at + STATE] === ESTABLISHED &&
    (bytes[at + MARKS]! & MARK_WINDOWS) !== 0
  ) {
    followSequence(table, record, isReply, seq, ack, window, payloadBytes);
    table.setExpiry(record, nowMs + timeouts[TIMEOUT_TCP]!);
    return;
  }
  if (bytes[at + TYPE] === TYPE_SVC) {
    trackOneWay(table, record, tcpFlags, seq, ack, payloadBytes, nowMs, timeouts);
    return;
  }
  if (bytes[at + STATE] === STATE_FREE) {
    bytes[at + STATE] = SYN_RECV;
    table.setExpiry(record, nowMs + timeouts[TIMEOUT_TCP_SYN]!);
  }
  trackTwoWay(table, record, isReply, tcpFlags, seq, ack, window, payloadBytes, windowScale, nowMs, timeouts);
}

/** Counts a packet, of TCP or anything else. `bytes` is the IP total length. */
export function account(table: FlowTable, record: number, isReply: boolean, bytes: number, nowMs: number): void {
  const side = isReply ? 1 : 0;
  const double = record * RECORD_DOUBLES + side;
  table.doubles[double + TX_PACKETS]! += 1;
  table.doubles[double + TX_BYTES]! += bytes;
  table.words[record * RECORD_WORDS + side + TX_SEEN] = nowMs / 1000;
}

/** Whether a SYN of the client starts a fresh connection in place of this record. */
export function isReusable(table: FlowTable, record: number, nowMs: number): boolean {
  const state = table.bytes[record * RECORD_BYTES + STATE]!;
  return state === CLOSING || state === CLOSED || table.isExpired(record, nowMs);
}

function trackOneWay(
  table: FlowTable,
  record: number,
  tcpFlags: number,
  seq: number,
  ack: number,
  payloadBytes: number,
  nowMs: number,
  timeouts: Float64Array,
): void {
  const at = record * RECORD_BYTES;
  const { bytes } = table;
  if ((tcpFlags & RST) !== 0) {
    shorten(table, record, nowMs, timeouts);
    return;
  }
  followOneWay(table, record, tcpFlags, seq, ack, payloadBytes);
  if ((tcpFlags & SYN) === 0) {
    bytes[at + FLAGS]! |= SEEN_NON_SYN;
    if (bytes[at + STATE] === SYN_SENT) bytes[at + STATE] = ESTABLISHED;
    if ((tcpFlags & FIN) !== 0) {
      bytes[at + FLAGS]! |= TX_CLOSING | RX_CLOSING;
      bytes[at + STATE] = CLOSING;
      table.setClass(record, CLASS_CLOSING, nowMs);
    } else if (bytes[at + STATE] === ESTABLISHED && table.doubles[record * RECORD_DOUBLES + TX_PACKETS]! >= 2) {
      table.setClass(record, CLASS_ESTABLISHED, nowMs);
    }
  }
  refreshTcp(table, record, nowMs, timeouts);
}

/** Of a one-way entry: TX_END is where the client goes on, RX_END where it expects its backend to. */
function followOneWay(
  table: FlowTable,
  record: number,
  tcpFlags: number,
  seq: number,
  ack: number,
  payloadBytes: number,
): void {
  const { words, bytes } = table;
  const word = record * RECORD_WORDS;
  const marks = record * RECORD_BYTES + MARKS;
  const isSyn = isOpeningSyn(tcpFlags);
  const end = seq + payloadBytes + ((tcpFlags & (SYN | FIN)) === 0 ? 0 : 1);
  if (isSyn || ((end - words[word + TX_END]!) | 0) > 0) words[word + TX_END] = end;
  if (isSyn) bytes[marks]! |= MARK_SYN_PENDING;
  if ((tcpFlags & ACK) === 0) return;
  const isFirst =
    (bytes[record * RECORD_BYTES + FLAGS]! & SEEN_NON_SYN) === 0 || (bytes[marks]! & MARK_SYN_PENDING) !== 0;
  if (isFirst || ((ack - words[word + RX_END]!) | 0) > 0) words[word + RX_END] = ack;
  bytes[marks]! &= ~MARK_SYN_PENDING;
}

/** Everything but the common case: handshakes, closings, and entries without sequence numbers. */
function trackTwoWay(
  table: FlowTable,
  record: number,
  isReply: boolean,
  tcpFlags: number,
  seq: number,
  ack: number,
  window: number,
  payloadBytes: number,
  windowScale: number,
  nowMs: number,
  timeouts: Float64Array,
): void {
  const at = record * RECORD_BYTES;
  const { bytes } = table;
  if ((tcpFlags & RST) !== 0) {
    trackReset(table, record, isReply, tcpFlags, seq, ack, nowMs, timeouts);
    return;
  }
  if ((tcpFlags & SYN) !== 0) {
    const counts = isReply
      ? (tcpFlags & ACK) !== 0 && trackSynAck(table, record, seq, ack, window, payloadBytes, windowScale, nowMs)
      : isOpeningSyn(tcpFlags) && trackSyn(table, record, seq, window, payloadBytes, windowScale);
    if (counts) refreshTcp(table, record, nowMs, timeouts);
    return;
  }

  bytes[at + FLAGS]! |= SEEN_NON_SYN;
  const isFin = (tcpFlags & FIN) !== 0;
  const marks = bytes[at + MARKS]!;
  const state = bytes[at + STATE]!;
  // Between the SYN and its SYN-ACK nothing is plausible; of a connection picked up, everything is.
  let isPlausible = (marks & MARK_SYN_SEEN) === 0;
  if ((marks & MARK_WINDOWS) !== 0) {
    const length = payloadBytes + (isFin ? 1 : 0);
    isPlausible = (tcpFlags & ACK) !== 0 && isInOrder(table, record, isReply, seq, ack, length);
    if ((tcpFlags & ACK) !== 0) followSequence(table, record, isReply, seq, ack, window, length);
    if (isPlausible && state === SYN_RECV && !isReply) establish(table, record, nowMs);
  } else if (isPlausible) {
    const isAfterFin = (bytes[at + FLAGS]! & (RX_CLOSING | TX_CLOSING)) !== 0 && payloadBytes === 0;
    if (state === (isReply ? SYN_SENT : SYN_RECV) && !isAfterFin) establish(table, record, nowMs);
  }
  if (isFin && isPlausible && state !== CLOSED) {
    bytes[at + FLAGS]! |= isReply ? RX_CLOSING : TX_CLOSING;
    if ((bytes[at + FLAGS]! & (RX_CLOSING | TX_CLOSING)) === (RX_CLOSING | TX_CLOSING)) {
      bytes[at + STATE] = CLOSING;
      table.setClass(record, CLASS_CLOSING, nowMs);
    }
  }
  refreshTcp(table, record, nowMs, timeouts);
}

/** A client's SYN. Always counts: repeats keep the timer running. */
function trackSyn(
  table: FlowTable,
  record: number,
  seq: number,
  window: number,
  payloadBytes: number,
  windowScale: number,
): boolean {
  const at = record * RECORD_BYTES;
  const word = record * RECORD_WORDS;
  const { bytes, words } = table;
  const state = bytes[at + STATE]!;
  const scale = windowScale < 0 ? SCALE_NONE : windowScale;
  if (state === ESTABLISHED) {
    // One of this connection that was sent twice, and overtaken, says nothing new.
    const isOwn = (bytes[at + MARKS]! & MARK_WINDOWS) !== 0 && words[word + OPENING_SYN] === ((seq + 1) | 0);
    if (isOwn) return true;
    words[word + PENDING_SYN] = seq + 1;
    words[word + PENDING_OFFER] = (window << 16) | (((payloadBytes + 15) >>> 4) << 4) | scale;
    bytes[at + MARKS]! |= MARK_SYN_PENDING;
  } else if (state === SYN_SENT || state === SYN_RECV) {
    const isRepeat = (bytes[at + MARKS]! & MARK_SYN_SEEN) !== 0 && words[word + TX_ACKED] === ((seq + 1) | 0);
    if (!isRepeat) startHandshake(table, record, (seq + 1) | 0, (seq + 1 + payloadBytes) | 0, window, scale);
    else if (state === SYN_SENT) offerWindow(table, record, window, scale); // a repeat may come with fewer options
  }
  return true;
}

/** Enters SYN_SENT with the sequence numbers of a client's SYN; what the backend sent before means nothing now. */
function startHandshake(
  table: FlowTable,
  record: number,
  acked: number,
  end: number,
  window: number,
  scale: number,
): void {
  const at = record * RECORD_BYTES;
  const word = record * RECORD_WORDS;
  const { bytes, words } = table;
  bytes[at + STATE] = SYN_SENT;
  bytes[at + FLAGS]! &= ~(RX_CLOSING | TX_CLOSING | SEEN_NON_SYN);
  bytes[at + MARKS]! &= ~(MARK_WINDOWS | MARK_SYN_PENDING | MARK_SYN_SEEN);
  words[word + TX_ACKED] = acked;
  words[word + TX_END] = end;
  words[word + RX_ACKED] = 0;
  words[word + RX_END] = 0;
  table.halves[record * (RECORD_BYTES / 2) + RX_WINDOW] = 0;
  offerWindow(table, record, window, scale);
  bytes[at + MARKS]! |= MARK_SYN_SEEN;
}

function offerWindow(table: FlowTable, record: number, window: number, scale: number): void {
  table.halves[record * (RECORD_BYTES / 2) + TX_WINDOW] = window;
  table.bytes[record * RECORD_BYTES + SCALES] = scale << 4;
}

/** A backend's SYN-ACK. Returns whether it counts: not in a handshake whose SYN it does not acknowledge. */
function trackSynAck(
  table: FlowTable,
  record: number,
  seq: number,
  ack: number,
  window: number,
  payloadBytes: number,
  windowScale: number,
  nowMs: number,
): boolean {
  const at = record * RECORD_BYTES;
  const word = record * RECORD_WORDS;
  const { bytes, words } = table;
  if (bytes[at + STATE] === ESTABLISHED) {
    if (!acknowledgesPending(table, record, ack)) return true;
    const offer = words[word + PENDING_OFFER]!;
    startHandshake(table, record, words[word + PENDING_SYN]!, ack, offer >>> 16, offer & 0xf);
    table.setClass(record, CLASS_HALF_OPEN, nowMs);
  }
  const state = bytes[at + STATE]!;
  if (state !== SYN_SENT && state !== SYN_RECV) return true;
  if ((bytes[at + MARKS]! & MARK_SYN_SEEN) === 0 || !acknowledgesSyn(table, record, ack)) return false;
  const isRepeat = state === SYN_RECV && words[word + RX_ACKED] === ((seq + 1) | 0);
  if (isRepeat) return true;

  words[word + RX_ACKED] = seq + 1;
  words[word + RX_END] = seq + 1 + payloadBytes;
  const half = record * (RECORD_BYTES / 2);
  const before = bytes[at + SCALES]! >>> 4;
  let tx = before;
  let rx = windowScale;
  if (tx === SCALE_NONE || rx < 0) {
    tx = 0;
    rx = 0;
  }
  // A second SYN-ACK may refuse the scaling that the first took (SYN cookies).
  const txWindow = table.halves[half + TX_WINDOW]!;
  table.halves[half + TX_WINDOW] = scaled(state === SYN_SENT ? txWindow : Math.min(txWindow << before, 0xffff), tx);
  table.halves[half + RX_WINDOW] = scaled(window, rx);
  bytes[at + SCALES] = (tx << 4) | rx;
  bytes[at + MARKS]! |= MARK_WINDOWS;
  bytes[at + STATE] = SYN_RECV;
  return true;
}

function trackReset(
  table: FlowTable,
  record: number,
  isReply: boolean,
  tcpFlags: number,
  seq: number,
  ack: number,
  nowMs: number,
  timeouts: Float64Array,
): void {
  const at = record * RECORD_BYTES;
  const { bytes } = table;
  const marks = bytes[at + MARKS]!;
  const state = bytes[at + STATE]!;
  const refusesPending =
    isReply && state === ESTABLISHED && (tcpFlags & ACK) !== 0 && acknowledgesPending(table, record, ack);
  if ((marks & MARK_SYN_SEEN) === 0 && !refusesPending) {
    shorten(table, record, nowMs, timeouts);
    return;
  }
  let isPlausible = refusesPending;
  if (!isPlausible && (!isReply || (marks & MARK_WINDOWS) !== 0)) isPlausible = isInWindow(table, record, isReply, seq);
  if (!isPlausible && isReply && state <= SYN_RECV) {
    isPlausible = (tcpFlags & ACK) !== 0 && acknowledgesSyn(table, record, ack);
  }
  if (!isPlausible) return;
  if (refusesPending || (isReply && state === SYN_SENT)) {
    table.onRefused(table.words[record * RECORD_WORDS + BACKEND_ID]!);
  }
  bytes[at + STATE] = CLOSED;
  table.setClass(record, CLASS_CLOSING, nowMs);
  refreshTcp(table, record, nowMs, timeouts);
}

/** Whether a SYN came to this established entry of which `ack` acknowledges all, some or nothing of the data (RFC 7413). */
function acknowledgesPending(table: FlowTable, record: number, ack: number): boolean {
  if ((table.bytes[record * RECORD_BYTES + MARKS]! & MARK_SYN_PENDING) === 0) return false;
  const word = record * RECORD_WORDS;
  return (ack - table.words[word + PENDING_SYN]!) >>> 0 <= (table.words[word + PENDING_OFFER]! & 0xfff0);
}

/** RFC 7857, REQ-3: an RST that cannot be judged. Never prolongs. */
function shorten(table: FlowTable, record: number, nowMs: number, timeouts: Float64Array): void {
  const expiresMs = nowMs + timeouts[TIMEOUT_TCP_FIN]!;
  if (expiresMs < table.doubles[record * RECORD_DOUBLES + EXPIRES]!) table.setExpiry(record, expiresMs);
}

function establish(table: FlowTable, record: number, nowMs: number): void {
  const word = record * RECORD_WORDS;
  table.bytes[record * RECORD_BYTES + STATE] = ESTABLISHED;
  table.setClass(record, CLASS_ESTABLISHED, nowMs);
  table.words[word + OPENING_SYN] = table.words[word + TX_ACKED]!;
}

/** Sets the timer of the record's state anew, as a packet that changes nothing else does: a fragment. */
export function refreshTcp(table: FlowTable, record: number, nowMs: number, timeouts: Float64Array): void {
  const at = record * RECORD_BYTES;
  const { bytes } = table;
  const state = bytes[at + STATE]!;
  let timer = TIMEOUT_TCP_FIN;
  if (bytes[at + TYPE] === TYPE_SVC) {
    if (state === SYN_SENT) timer = TIMEOUT_TCP_SYN;
    else timer = state === CLOSING ? TIMEOUT_SERVICE_TCP_GRACE : TIMEOUT_SERVICE_TCP;
  } else if (state === ESTABLISHED) timer = TIMEOUT_TCP;
  else if (state <= SYN_RECV) {
    const isPickedUpByFin =
      (bytes[at + MARKS]! & MARK_SYN_SEEN) === 0 && (bytes[at + FLAGS]! & (RX_CLOSING | TX_CLOSING)) !== 0;
    if (!isPickedUpByFin) timer = TIMEOUT_TCP_SYN;
  }
  table.setExpiry(record, nowMs + timeouts[timer]!);
}
