import type { DeviceFeatures } from '../io/device.js';
import type { Recollection, RecollectionQuery } from './recollection.js';
import type { Snapshot } from './snapshot.js';
import type { CaptureRequest } from './tap.js';

/** What the main thread tells the data path. Posted on its port, followed by a wake-up. */
export type ToDataPath =
  /** Use this snapshot from the next batch on; answered with `applied`. */
  | { readonly type: 'snapshot'; readonly snapshot: Snapshot }
  /** Remove the records named (record numbers in the given table) if they still hold `commit`; answered with `flushed`. */
  | {
      readonly type: 'flush';
      readonly id: number;
      readonly table: 'tcp' | 'any';
      readonly records: Int32Array;
      readonly commits: Int32Array;
    }
  /** Take in records that were tracked elsewhere (conntrack/adopt.ts), as many as time allows; answered with `adopted`. */
  | {
      readonly type: 'adopt';
      readonly id: number;
      readonly table: 'tcp' | 'any';
      /** The whole of a buffer, RECORD_WORDS each. */
      readonly records: Int32Array;
    }
  /** Capture packets; null: no more. */
  | { readonly type: 'capture'; readonly request: CaptureRequest | null }
  /** Tell what is known besides tables and snapshot that bears on a packet; answered with `recalled`. */
  | { readonly type: 'recall'; readonly id: number; readonly query: RecollectionQuery }
  /** Count the clients that affinity remembers, a slice of them (balance/affinity.ts); answered with `affinity`. */
  | { readonly type: 'affinity'; readonly id: number; readonly end: number }
  /** Finish the batch, close the device, leave. */
  | { readonly type: 'stop' };

/** What the data path tells the main thread. */
export type FromDataPath =
  | { readonly type: 'ready'; readonly features: DeviceFeatures; readonly note: string }
  | { readonly type: 'applied'; readonly version: number }
  | { readonly type: 'flushed'; readonly id: number; readonly count: number }
  /** One of adopt.ts's outcomes for each record that was taken. */
  | { readonly type: 'adopted'; readonly id: number; readonly outcomes: Uint8Array }
  /** null: this is no gateway. */
  | { readonly type: 'recalled'; readonly id: number; readonly recollection: Recollection | null }
  | { readonly type: 'affinity'; readonly id: number; readonly slice: AffinitySlice }
  /** Traffic has taught a node an endpoint whose answers ought to be led in; a snapshot that has it is the answer. */
  | { readonly type: 'endpoint'; readonly address: number; readonly port: number; readonly protocol: number }
  | { readonly type: 'failed'; readonly code: string; readonly message: string; readonly remedy: string }
  | { readonly type: 'stopped' };

/** Clients by the id of their backend, and where the next slice ends; 0: nowhere. */
export interface AffinitySlice {
  readonly clients: ReadonlyMap<number, number>;
  readonly end: number;
}
