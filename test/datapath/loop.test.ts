import t from 'tap';
import { ManualClock } from '../../lib/base/clock.js';
import { readHistogram } from '../../lib/base/histogram.js';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import { GarbageCollector } from '../../lib/conntrack/gc.js';
import { allocateTable } from '../../lib/conntrack/memory.js';
import { runLoop } from '../../lib/datapath/loop.js';
import * as STATS from '../../lib/datapath/stats.js';
import { Tap } from '../../lib/datapath/tap.js';
import { makeResults } from '../../lib/datapath/verdict.js';
import { MemoryDevice } from '../../lib/io/memory-device.js';

/** Runs the loop over batches of `[packets, ms they take]`, and an end. */
function run(...batches: readonly (readonly [number, number])[]): Float64Array {
  const clock = new ManualClock(1000);
  const stats = STATS.allocateStats();
  const device = new MemoryDevice();
  let next = 0;
  device.receive = () => batches[next]?.[0] ?? -1;
  const pipeline = {
    results: makeResults(1),
    row: 0,
    nowMs: 0,
    use() {},
    process: () => clock.advance(batches[next]![1]),
    flushDue: () => Number.POSITIVE_INFINITY,
  };
  const control = {
    pending: () => {
      next++;
      return false;
    },
    handle: () => true,
  };
  const collector = new GarbageCollector([new FlowTable(allocateTable(16))], 1000);
  runLoop({ device, pipeline, tap: new Tap(device), collector, clock, control, stats });
  return stats;
}

t.test('batches are counted by their packets and by their time; a wake-up without packets is none', async (t) => {
  const stats = run([1, 0.003], [3, 0.004], [64, 1.5], [0, 0], [64, 700]);
  const sizes = readHistogram(stats, STATS.STAT_BATCH_SIZES, 0, 6);
  t.strictSame(
    sizes.buckets.map(({ count }) => count),
    [1, 1, 2, 2, 2, 2, 4],
  );
  t.strictSame([sizes.count, sizes.sum], [4, 132]);
  const times = readHistogram(stats, STATS.STAT_BATCH_TIMES, 2, 19, 1e-6);
  const upTo = (seconds: number): number => times.buckets.find(({ bound }) => bound >= seconds)!.count;
  t.strictSame([upTo(4e-6), upTo(5e-6), upTo(1e-3), upTo(2e-3), upTo(0.5), times.count], [1, 2, 2, 3, 3, 4]);
  t.equal(stats[STATS.STAT_IDLE_WAKEUPS], 1);
  t.ok(Math.abs(stats[STATS.STAT_SLOWEST_BATCH_MS]! - 700) < 1e-6);
});
