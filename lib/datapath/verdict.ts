/** What became of a packet. Integers on the data path, names in replay, explain and capture. */
export const FORWARD = 0;
export const REPLY = 1;
export const PASS = 2;
export const DROP = 3;
export const HOLD = 4;
export const VERDICT_NAMES = ['forward', 'reply', 'pass', 'drop', 'hold'] as const;

export const DIRECTION_NONE = 0;
export const DIRECTION_ORIGINAL = 1;
export const DIRECTION_REPLY = 2;
export const DIRECTION_NAMES = ['none', 'original', 'reply'] as const;

/**
 * The pipeline's account of the last batch, row by row; zero where nothing is known. One spare row is at the end, for packets
 * that are not of the batch.
 */
export interface Results {
  readonly verdict: Uint8Array;
  readonly reason: Uint8Array;
  readonly direction: Uint8Array;
  readonly service: Int32Array;
  readonly backend: Int32Array;
  /** STATE_* after the packet. */
  readonly state: Uint8Array;
  /** 1: its flow begins with it. Set, and cleared by whoever reads it: most of the time nobody does. */
  readonly isNew: Uint8Array;
}

export function makeResults(capacity: number): Results {
  return {
    verdict: new Uint8Array(capacity),
    reason: new Uint8Array(capacity),
    direction: new Uint8Array(capacity),
    service: new Int32Array(capacity),
    backend: new Int32Array(capacity),
    state: new Uint8Array(capacity),
    isNew: new Uint8Array(capacity),
  };
}

/** Forgets what a row said of an earlier packet; its verdict is always written. */
export function clearResult(results: Results, row: number): void {
  results.reason[row] = 0;
  results.direction[row] = 0;
  results.service[row] = 0;
  results.backend[row] = 0;
  results.state[row] = 0;
}
