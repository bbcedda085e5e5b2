/**
 * The conntrack record: 128 bytes, two cache lines. The first holds all that a packet of a known flow needs; the second,
 * bookkeeping. One writer (the data path); other threads may read, and use COMMIT to know that they read a whole one.
 *
 *     word  0 CLIENT          original source address           8,9 EXPIRES      f64 ms, absolute
 *           1 VIP             original destination               10 SERVICE      id, shown as RevNAT
 *           2 ORIGINAL_PORTS  source << 16 | destination         11 BACKEND_ID
 *           3 BACKEND         reply source address               12 PREVIOUS     list links: record numbers, -1 at the ends
 *           4 RETURN          reply destination: the client,     13 NEXT         (the free list uses NEXT)
 *                             or an snat address                 14 COMMIT       generation while live, 0 while not
 *           5 REPLY_PORTS     source << 16 | destination         15 CREATED      u32 seconds
 *           6 bytes: PROTOCOL, TYPE, STATE, FLAGS
 *           7 bytes: MARKS, TX_FLAGS_SEEN, RX_FLAGS_SEEN, SCALES (tx << 4 | rx)
 *     ---- 64 ----
 *          16 TX_SEEN  u32 seconds, last packet from the client  24,25 TX_BYTES    f64
 *          17 RX_SEEN  u32 seconds, last from the backend        26,27 RX_BYTES    f64
 *          18 TX_WINDOW, RX_WINDOW  u16 each: last, unscaled     28 TX_END      sequence after the last byte sent
 *          19 QUEUED_AT u32 seconds: when it joined its list     29 TX_ACKED    first sequence the peer has not acknowledged
 *       20,21 TX_PACKETS  f64                                    30 RX_END
 *       22,23 RX_PACKETS  f64                                    31 RX_ACKED
 *
 * Addresses are one word: IPv4. IPv6 flows will have a table of their own with a longer record; everything from word 6 on
 * keeps its meaning there.
 */

export const RECORD_BYTES = 128;
export const RECORD_WORDS = RECORD_BYTES / 4;

// Word offsets (Int32Array), from record * RECORD_WORDS.
export const CLIENT = 0;
export const VIP = 1;
export const ORIGINAL_PORTS = 2;
export const BACKEND = 3;
export const RETURN = 4;
export const REPLY_PORTS = 5;
export const SERVICE = 10;
export const BACKEND_ID = 11;
export const PREVIOUS = 12;
export const NEXT = 13;
export const COMMIT = 14;
export const CREATED = 15;
export const TX_SEEN = 16;
export const RX_SEEN = 17;
export const QUEUED_AT = 19;
export const TX_END = 28;
export const TX_ACKED = 29;
export const RX_END = 30;
export const RX_ACKED = 31;

// An established entry does not use these words, being on no list: they tell of the SYNs that come to it.
/** Sequence after the SYN it began with, if MARK_WINDOWS. */
export const OPENING_SYN = NEXT;
/** Sequence after the SYN that came last. */
export const PENDING_SYN = QUEUED_AT;
/** Its window << 16 | the 16ths of its data, rounded up, << 4 | its scale nibble. */
export const PENDING_OFFER = PREVIOUS;

// Byte offsets (Uint8Array), from record * RECORD_BYTES.
export const PROTOCOL = 24;
export const TYPE = 25;
export const STATE = 26;
export const FLAGS = 27;
export const MARKS = 28;
export const TX_FLAGS_SEEN = 29;
export const RX_FLAGS_SEEN = 30;
export const SCALES = 31;

// Half-word offsets (Uint16Array), from record * RECORD_BYTES / 2.
export const TX_WINDOW = 36;
export const RX_WINDOW = 37;

// Double offsets (Float64Array), from record * RECORD_BYTES / 8.
export const RECORD_DOUBLES = RECORD_BYTES / 8;
export const EXPIRES = 4;
export const TX_PACKETS = 10;
export const RX_PACKETS = 11;
export const TX_BYTES = 12;
export const RX_BYTES = 13;

/** TYPE: a one-way service entry (dsr: the gateway never sees the replies), or a two-way one. */
export const TYPE_SVC = 1;
export const TYPE_OUT = 2;
export const TYPE_NAMES: readonly string[] = ['', 'SVC', 'OUT'];

/** STATE. The first five are TCP's, the last two everything else's. */
export const STATE_FREE = 0;
export const SYN_SENT = 1;
export const SYN_RECV = 2;
export const ESTABLISHED = 3;
export const CLOSING = 4;
export const CLOSED = 5;
export const UNREPLIED = 6;
export const REPLIED = 7;
export const STATE_NAMES: readonly string[] = [
  '',
  'SYN_SENT',
  'SYN_RECV',
  'ESTABLISHED',
  'CLOSING',
  'CLOSED',
  'UNREPLIED',
  'REPLIED',
];

/** FLAGS: the bits of Cilium's struct ct_entry, so that dumps compare. */
export const RX_CLOSING = 0x01;
export const TX_CLOSING = 0x02;
export const LB_LOOPBACK = 0x08;
export const SEEN_NON_SYN = 0x10;
export const DSR = 0x80;
export const FLAG_NAMES: ReadonlyArray<readonly [bit: number, name: string]> = [
  [RX_CLOSING, 'RxClosing'],
  [TX_CLOSING, 'TxClosing'],
  [SEEN_NON_SYN, 'SeenNonSyn'],
  [LB_LOOPBACK, 'LBLoopback'],
  [DSR, 'DSR'],
];

/**
 * MARKS. The low two bits are the record's class: which records a full table may evict (flow-table.ts). The others are the
 * TCP tracker's.
 */
export const CLASS_MASK = 0x03;
export const CLASS_ESTABLISHED = 0;
export const CLASS_HALF_OPEN = 1;
export const CLASS_CLOSING = 2;
/** The client's SYN was seen: TX_END and TX_ACKED hold. Without it the flow was picked up in the middle. */
export const MARK_SYN_SEEN = 0x04;
/** The handshake was seen: all sequence fields, windows and scales hold. */
export const MARK_WINDOWS = 0x08;
/** PENDING_SYN and PENDING_OFFER hold; of a one-way entry: the next packet tells where a new connection begins. */
export const MARK_SYN_PENDING = 0x10;

/** A nibble of SCALES before the SYN-ACK: the client offered no window scaling (RFC 7323). */
export const SCALE_NONE = 15;

/** A table and the thread that owns it index conntrack timeouts by these rows of a Float64Array, in ms. */
export const TIMEOUT_TCP = 0;
export const TIMEOUT_TCP_SYN = 1;
export const TIMEOUT_TCP_FIN = 2;
export const TIMEOUT_ANY = 3;
export const TIMEOUT_SERVICE_TCP = 4;
export const TIMEOUT_SERVICE_ANY = 5;
export const TIMEOUT_SERVICE_TCP_GRACE = 6;
export const TIMEOUT_COUNT = 7;
