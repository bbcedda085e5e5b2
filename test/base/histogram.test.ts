import t from 'tap';
import { HISTOGRAM_BUCKETS, HISTOGRAM_ROWS, observe, readHistogram } from '../../lib/base/histogram.js';

t.test('a value is counted in the lowest bucket whose bound it does not exceed', async (t) => {
  for (const [value, bucket] of [
    [0, 0],
    [0.2, 0],
    [1, 0],
    [1.01, 1],
    [2, 1],
    [2.5, 2],
    [4, 2],
    [64, 6],
    [65, 7],
    [2 ** 19, 19],
    [2 ** 19 + 0.5, HISTOGRAM_BUCKETS],
    [1e15, HISTOGRAM_BUCKETS],
  ] as const) {
    const rows = new Float64Array(HISTOGRAM_ROWS);
    observe(rows, 0, value);
    t.equal(rows[bucket], 1, `${value} is in bucket ${bucket}`);
    t.equal(rows[HISTOGRAM_ROWS - 1], value);
  }
});

t.test('what is read adds up, within its rows', async (t) => {
  const rows = new Float64Array(3 * HISTOGRAM_ROWS);
  for (const value of [1, 2, 3, 3, 50, 1e9]) observe(rows, HISTOGRAM_ROWS, value);
  t.strictSame(readHistogram(rows, HISTOGRAM_ROWS, 1, 3), {
    buckets: [
      { bound: 2, count: 2 },
      { bound: 4, count: 4 },
      { bound: 8, count: 4 },
    ],
    count: 6,
    sum: 1e9 + 59,
  });
  t.equal(readHistogram(rows, HISTOGRAM_ROWS, 0, 0, 1e-6).buckets[0]!.bound, 1e-6);
  const others = [...rows.subarray(0, HISTOGRAM_ROWS), ...rows.subarray(2 * HISTOGRAM_ROWS)];
  t.ok(others.every((count) => count === 0));
});
