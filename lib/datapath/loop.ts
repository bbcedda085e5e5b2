import type { Clock } from '../base/clock.js';
import { observe } from '../base/histogram.js';
import type { GarbageCollector } from '../conntrack/gc.js';
import type { BatchDevice } from '../io/device.js';
import type { Pipeline } from './pipeline.js';
import { STAT_BATCH_SIZES, STAT_BATCH_TIMES, STAT_IDLE_WAKEUPS, STAT_SLOWEST_BATCH_MS } from './stats.js';
import type { Tap } from './tap.js';

/** Records a pass of the garbage collector looks at between two batches: well under 1 ms. */
const GC_SLICE_RECORDS = 2048;

/** How the loop hears of the main thread. */
export interface Control {
  /** Whether messages wait; called once per batch, so it must cost nothing. */
  pending(): boolean;
  /** Handles the messages that wait. Returns false when the loop is to end. */
  handle(): boolean;
}

export interface LoopParts {
  readonly device: BatchDevice;
  readonly pipeline: Pipeline;
  /** What the pipeline sends through. */
  readonly tap: Tap;
  readonly collector: GarbageCollector;
  readonly clock: Clock;
  readonly control: Control;
  readonly stats: Float64Array;
}

/**
 * The data path's whole life: wait, read a batch, run it through the pipeline, write it (with the next wait), collect a slice
 * of garbage, hear the main thread. Blocks in the device while there is nothing to do. Returns when told to stop or when
 * a device with an end has reached it.
 *
 * @throws WeirError DEVICE_FAILED from the device.
 */
export function runLoop({ device, pipeline, tap, collector, clock, control, stats }: LoopParts): void {
  let nowMs = clock.nowMs();
  let flushAtMs = pipeline.flushDue(nowMs);
  for (;;) {
    const collecting = collector.slice(nowMs, GC_SLICE_RECORDS);
    const waitMs = collecting ? 0 : Math.max(0, Math.min(flushAtMs, collector.nextDueMs) - nowMs);
    const count = device.receive(waitMs);
    nowMs = clock.nowMs();
    if (count > 0) {
      if (tap.isOn) tap.before(device.rx);
      pipeline.process(device.rx, nowMs);
      if (tap.isOn) tap.after(device.rx, nowMs);
      const tookMs = clock.nowMs() - nowMs;
      observe(stats, STAT_BATCH_SIZES, count);
      observe(stats, STAT_BATCH_TIMES, tookMs * 1000);
      if (tookMs > stats[STAT_SLOWEST_BATCH_MS]!) stats[STAT_SLOWEST_BATCH_MS] = tookMs;
    } else if (count < 0) return;
    else stats[STAT_IDLE_WAKEUPS]! += 1;
    const hasNews = control.pending();
    if (hasNews && !control.handle()) return;
    if (nowMs >= flushAtMs || count > 0 || hasNews) flushAtMs = pipeline.flushDue(nowMs);
  }
}
