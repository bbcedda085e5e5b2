import { HISTOGRAM_ROWS } from '../base/histogram.js';
import { REASON_COUNT } from '../base/reasons.js';

/**
 * What the data path counts, in one Float64Array over shared memory: the data path adds, the main thread reads. Doubles
 * count exactly to 2^53 and are read whole on every 64-bit machine.
 */
export const STAT_RX_PACKETS = 0;
export const STAT_RX_BYTES = 1;
export const STAT_TX_PACKETS = 2;
export const STAT_TX_BYTES = 3;
export const STAT_BATCHES = 4;
export const STAT_FORWARDED = 5;
/** Packets of new flows forwarded without a record, since the table was full. */
export const STAT_STATELESS = 6;
/** Connections picked up in the middle: after a start without a table, or a move between gateways. */
export const STAT_PICKED_UP = 7;
/** Flows cut because their backend's drain time ended. */
export const STAT_CUT = 8;
/** Wake-ups without a packet: control messages and time-outs. */
export const STAT_IDLE_WAKEUPS = 9;
/** Longest time from a batch's arrival to the end of its last packet, ms. */
export const STAT_SLOWEST_BATCH_MS = 10;
/** One row per reason from here on, by its id. */
export const STAT_REASONS = 11;
/** Histograms (base/histogram.ts): packets in a batch, and µs from its arrival to the end of its last packet. */
export const STAT_BATCH_SIZES = STAT_REASONS + REASON_COUNT;
export const STAT_BATCH_TIMES = STAT_BATCH_SIZES + HISTOGRAM_ROWS;
export const STAT_COUNT = STAT_BATCH_TIMES + HISTOGRAM_ROWS;

export function allocateStats(): Float64Array {
  return new Float64Array(new SharedArrayBuffer(STAT_COUNT * 8));
}
