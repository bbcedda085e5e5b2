import fc from 'fast-check';
import t from 'tap';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import { GarbageCollector, nextInterval, readCollectionFigures } from '../../lib/conntrack/gc.js';
import { allocateTable, GC_RUNS } from '../../lib/conntrack/memory.js';
import { TableReader } from '../../lib/conntrack/table-reader.js';
import { findFlow, insertFlow, makeTable } from './connection.js';

const SECOND = 1000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;

/** Fills a table with flows `from` to `to`, which expire at `expiresMs`. */
function fill(table: FlowTable, from: number, to: number, expiresMs: number): void {
  for (let n = from; n < to; n++) table.setExpiry(insertFlow(table, n, 6, 0), expiresMs);
}

/** Runs slices until the collector rests; returns how many. */
function run(collector: GarbageCollector, nowMs: number, maxRecords = 2048): number {
  let slices = 1;
  while (collector.slice(nowMs, maxRecords)) slices++;
  return slices;
}

t.test('the interval follows the share that was deleted', async (t) => {
  const vectors: ReadonlyArray<readonly [currentMs: number, ratio: number, nextMs: number]> = [
    [MINUTE, 0.1, MINUTE],
    [MINUTE, 0.2, MINUTE],
    [MINUTE, 0.25, MINUTE],
    [MINUTE, 0.4, 36 * SECOND],
    [MINUTE, 0.6, 24 * SECOND],
    [10 * SECOND, 0.01, 15 * SECOND],
    [10 * SECOND, 0.04, 15 * SECOND],
    [SECOND, 0.9, 10 * SECOND],
    [24 * HOUR, 0.01, 12 * HOUR],
    [MINUTE, 0, MINUTE],
    [MINUTE, 0.05, MINUTE],
    [10 * MINUTE, 1, MINUTE],
    [15 * SECOND, 0.01, 23 * SECOND],
    [5 * MINUTE, 0.26, 222 * SECOND],
  ];
  for (const [currentMs, ratio, nextMs] of vectors) {
    t.equal(nextInterval(currentMs, ratio), nextMs, `${currentMs / 1000} s, ${ratio} -> ${nextMs / 1000} s`);
  }
  fc.assert(
    fc.property(
      fc.integer({ min: 1, max: 100 * HOUR }),
      fc.double({ min: 0, max: 1, noNaN: true }),
      (currentMs, ratio) => {
        const nextMs = nextInterval(currentMs, ratio);
        return nextMs >= 10 * SECOND && nextMs <= 12 * HOUR && nextMs % 1000 === 0;
      },
    ),
  );
});

t.test('passes come by the interval, delete what has expired, and adapt', async (t) => {
  const memory = allocateTable(1000);
  const table = new FlowTable(memory);
  const any = makeTable(100);
  const collector = new GarbageCollector([table, any], 0, null, () => 0);
  t.equal(collector.intervalMs, 5 * MINUTE);
  t.equal(collector.nextDueMs, 5 * MINUTE);
  fill(table, 0, 400, 4 * MINUTE);
  fill(table, 400, 800, HOUR);
  fill(any, 0, 50, 4 * MINUTE);
  t.equal(collector.slice(5 * MINUTE - 1, 2048), false, 'not yet');
  t.equal(table.count, 800);
  run(collector, 5 * MINUTE);
  t.equal(table.count, 400);
  t.equal(any.count, 0, 'every table is collected');
  t.equal(findFlow(table, 0, 6), -1);
  t.ok(findFlow(table, 400, 6) >= 0);
  t.equal(collector.intervalMs, 3 * MINUTE, 'the fuller table lost 0.4 of its capacity');
  t.equal(collector.nextDueMs, 8 * MINUTE);
  t.match(readCollectionFigures(memory), { runs: 1, intervalMs: 3 * MINUTE, lastDeleted: 450, lastAtMs: 5 * MINUTE });
  t.equal(new TableReader(memory).figures().collected, 400);
  run(collector, 8 * MINUTE);
  t.equal(collector.intervalMs, 3 * MINUTE, 'nothing found: unchanged');
  table.setExpiry(findFlow(table, 500, 6) >> 1, 9 * MINUTE);
  run(collector, 11 * MINUTE);
  t.equal(collector.intervalMs, 4.5 * MINUTE, 'little found: longer');
  t.match(readCollectionFigures(memory), { runs: 3, lastDeleted: 1 });

  const fixed = new GarbageCollector([table], 0, 2 * SECOND);
  run(fixed, 2 * SECOND);
  fill(table, 1000, 1400, SECOND);
  run(fixed, 4 * SECOND);
  t.equal(fixed.intervalMs, 2 * SECOND, 'a fixed interval stays');
  t.equal(fixed.nextDueMs, 6 * SECOND);
});

t.test('the ratio is of the table that is fuller when the pass begins', async (t) => {
  const small = makeTable(100);
  const large = makeTable(1000);
  const collector = new GarbageCollector([large, small], 0);
  fill(large, 0, 300, SECOND);
  fill(small, 0, 60, HOUR);
  run(collector, 5 * MINUTE);
  t.equal(large.count, 0);
  t.equal(collector.intervalMs, 5 * MINUTE, 'small was fuller and lost nothing');
});

t.test('a pass is sliced', async (t) => {
  const table = makeTable(100_000);
  fill(table, 0, 40_000, HOUR);
  const collector = new GarbageCollector([table], 0);
  t.equal(collector.slice(5 * MINUTE, 2048), true);
  t.ok(collector.nextDueMs < 5 * MINUTE, 'the rest is due');
  t.equal(run(collector, 5 * MINUTE), Math.ceil(40_000 / 2048) - 1, 'only what was ever used is looked at');
  for (let n = 0; n < 40_000; n++) table.setExpiry(n, 6 * MINUTE);
  let slices = 0;
  let least = table.count;
  for (let more = true; more; slices++) {
    more = collector.slice(HOUR, 2048);
    if (least - table.count > 512) t.fail('too much for one slice');
    least = table.count;
  }
  t.equal(table.count, 0);
  t.ok(slices > 100, 'removals count for more');
  // What comes in during a pass, before or behind its place, is not its concern.
  fill(table, 0, 10_000, 100 * HOUR);
  collector.slice(50 * HOUR, 1);
  fill(table, 20_000, 40_000, HOUR);
  run(collector, 50 * HOUR, 1000);
  t.ok(table.count >= 10_000);
});

t.test('a table over 90 % asks for a pass at once, but not again and again', async (t) => {
  const table = makeTable(1000);
  const collector = new GarbageCollector([table], 0);
  fill(table, 0, 900, SECOND);
  t.equal(collector.slice(2 * SECOND, 2048), false);
  t.equal(table.count, 900, '90 % is not over it');
  fill(table, 900, 901, SECOND);
  t.ok(collector.nextDueMs <= 2 * SECOND);
  run(collector, 2 * SECOND);
  t.equal(table.count, 0);

  fill(table, 0, 950, HOUR);
  t.equal(collector.nextDueMs, 12 * SECOND, 'the pause after a pass');
  t.equal(collector.slice(12 * SECOND - 1, 2048), false);
  let passes = 0;
  for (let nowMs = 12 * SECOND; nowMs < 112 * SECOND; nowMs += 10) {
    const before = table.figures[GC_RUNS];
    run(collector, nowMs);
    if (table.figures[GC_RUNS] !== before) passes++;
  }
  t.equal(passes, 10, 'without progress: one in 10 s');
});

t.test('a million entries: less than 100 ms a pass, slices below 1 ms', async (t) => {
  const memory = allocateTable(1_000_000);
  const table = new FlowTable(memory);
  fill(table, 0, 1_000_000, HOUR);
  const collector = new GarbageCollector([table], 0, 10 * SECOND, () => process.cpuUsage().user / 1000);
  // The best of a few: what another process takes from the cache is not the collector's time.
  let bestMs = Number.POSITIVE_INFINITY;
  for (let pass = 1; pass <= 4; pass++) {
    run(collector, pass * 100 * SECOND);
    bestMs = Math.min(bestMs, readCollectionFigures(memory).lastPassMs);
  }
  t.ok(bestMs < 100, `${bestMs.toFixed(1)} ms`);
  for (let n = 0; n < 1_000_000; n += 3) table.setExpiry(n, 0);
  const took: number[] = [];
  for (let more = true; more; ) {
    const startedMs = performance.now();
    more = collector.slice(10 * MINUTE, 2048);
    took.push(performance.now() - startedMs);
  }
  took.sort((a, b) => a - b);
  const typical = took[Math.floor(took.length * 0.9)]!;
  t.ok(typical < 1, `9 of 10 slices with removals take at most ${typical.toFixed(3)} ms`);
  t.equal(table.count, 666_666);
});

t.test(
  'a pass that is wanted is made at once, once a second at most, and changes nothing about the others',
  async (t) => {
    const memory = allocateTable(1000);
    const table = new FlowTable(memory);
    const any = makeTable(100);
    const collector = new GarbageCollector([table, any], 0, null, () => 0);
    fill(any, 0, 40, SECOND);
    fill(table, 0, 10, SECOND);
    t.equal(collector.slice(2 * SECOND, 2048), false);
    t.equal(any.count, 40, 'nobody wants one');
    any.isPassWanted = true;
    t.ok(collector.nextDueMs <= 2 * SECOND);
    run(collector, 2 * SECOND);
    t.same([table.count, any.count, any.isPassWanted], [0, 0, false], 'of all tables');
    t.equal(collector.intervalMs, 5 * MINUTE, 'the interval is as before');
    fill(any, 0, 40, 2 * SECOND);
    any.isPassWanted = true;
    t.equal(collector.nextDueMs, 3 * SECOND);
    t.equal(collector.slice(3 * SECOND - 1, 2048), false, 'too soon');
    run(collector, 3 * SECOND);
    t.equal(any.count, 0);
    t.equal(collector.nextDueMs, 5 * MINUTE, 'and so is the time of the next');
    fill(any, 0, 40, 4 * MINUTE);
    any.isPassWanted = true;
    run(collector, 5 * MINUTE);
    t.equal(collector.intervalMs, 3 * MINUTE, 'one that was due anyway is none of these');
  },
);
