import type { PacketBatch } from '../io/device.js';
import type { Snapshot } from './snapshot.js';
import type { Results } from './verdict.js';

/** A pipeline as the run loop and a replay drive it: the gateway's, or the node's. */
export interface Pipeline {
  /** Row i tells what became of packet i of the last batch. */
  readonly results: Results;

  /** The row of the packet in hand, BATCH_PACKETS where it is none of the batch; and the moment it is looked at. */
  readonly row: number;
  readonly nowMs: number;

  /** Makes `snapshot` the configuration from the next batch on. */
  use(snapshot: Snapshot): void;

  /** Takes every packet of the batch to its end. `nowMs` is one moment for all of them. */
  process(batch: PacketBatch, nowMs: number): void;

  /** Work that is due by time alone. To be called after `use` as well. Returns when to call again, ms. */
  flushDue(nowMs: number): number;
}
