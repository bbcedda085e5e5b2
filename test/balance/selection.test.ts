import fc from 'fast-check';
import t from 'tap';
import { AffinityTable } from '../../lib/balance/affinity.js';
import { flowHash } from '../../lib/balance/flow-hash.js';
import { pickMaglev, pickWeighted, probabilityChain } from '../../lib/balance/pick.js';
import { type AddressSpan, contains, mergeRanges } from '../../lib/balance/ranges.js';
import { keyFromString } from '../../lib/base/hash.js';
import { below, seededRandom } from '../../lib/base/random.js';

/** `[id, cumulative weight]` pairs after `skip` pairs of somebody else. */
function choicesOf(weights: readonly number[], skip: number): Int32Array {
  const pairs = new Int32Array((skip + weights.length) * 2).fill(77);
  let cumulative = 0;
  weights.forEach((weight, i) => {
    cumulative += weight;
    pairs[(skip + i) * 2] = 100 + i;
    pairs[(skip + i) * 2 + 1] = cumulative;
  });
  return pairs;
}

t.test('pickWeighted agrees with exact arithmetic on every draw', async () => {
  fc.assert(
    fc.property(
      fc.array(fc.integer({ min: 1, max: 65535 }), { minLength: 1, maxLength: 60 }),
      fc.nat(5),
      fc.nat(0xffffffff),
      (weights, skip, draw) => {
        const total = weights.reduce((sum, weight) => sum + weight, 0);
        const ticket = Number((BigInt(draw) * BigInt(total)) >> 32n);
        const choices = choicesOf(weights, skip);
        const wanted = weights.findIndex((_, i) => choices[(skip + i) * 2 + 1]! > ticket);
        return pickWeighted(choices, skip, weights.length, total, draw) === wanted;
      },
    ),
    { numRuns: 2000 },
  );
});

t.test('pickWeighted at the largest weights there can be, whose sum is past 2^31', async (t) => {
  const weights = new Array<number>(65535).fill(65535);
  const choices = choicesOf(weights, 0);
  const total = choices[choices.length - 1]!;
  t.ok(total < 0, 'the sum is stored as a negative word');
  t.equal(pickWeighted(choices, 0, 65535, total, 0), 0);
  t.equal(pickWeighted(choices, 0, 65535, total, 0x80000000), 32767);
  t.equal(pickWeighted(choices, 0, 65535, total, 0xffffffff), 65534);
});

t.test('pickWeighted is uniform over the weights', async (t) => {
  const weights = [1, 2, 3, 4];
  const choices = choicesOf(weights, 3);
  const random = seededRandom(11);
  const counts = [0, 0, 0, 0];
  for (let i = 0; i < 100_000; i++) counts[pickWeighted(choices, 3, 4, 10, random())]!++;
  const chiSquare = counts.reduce((sum, n, i) => sum + (n - weights[i]! * 10_000) ** 2 / (weights[i]! * 10_000), 0);
  t.ok(chiSquare < 16.3, `chi-square ${chiSquare.toFixed(1)} at 3 degrees of freedom (p = 0.001: 16.27)`);
  // Every draw there is, in steps: the shares of the 32-bit draws are equal to within one.
  const steps = 1 << 16;
  const even = [0, 0, 0];
  for (let i = 0; i < steps; i++) even[pickWeighted(choicesOf([5, 5, 5], 0), 0, 3, 15, i * 65536)]!++;
  t.ok(Math.max(...even) - Math.min(...even) <= 1, even.join(' '));
});

t.test('pickMaglev stays in its own table', async (t) => {
  const tables = Uint16Array.from([9, 9, 0, 1, 2, 9]);
  t.equal(pickMaglev(tables, 2, 3, 0), 0);
  t.equal(pickMaglev(tables, 2, 3, 5), 2);
  t.equal(pickMaglev(tables, 2, 3, 0xffffffff), 0xffffffff % 3);
});

t.test('the probability chain gives each backend its share', async (t) => {
  t.same(probabilityChain([1, 1, 1, 1]), [1 / 4, 1 / 3, 1 / 2, 1]);
  t.same(probabilityChain([]), []);
  t.same(probabilityChain([0, 2, 0, 2]), [0, 1 / 2, 0, 1]);
  fc.assert(
    fc.property(fc.array(fc.integer({ min: 1, max: 65535 }), { minLength: 1, maxLength: 30 }), (weights) => {
      const total = weights.reduce((sum, weight) => sum + weight, 0);
      let reached = 1;
      const isFair = probabilityChain(weights).every((probability, i) => {
        const share = reached * probability;
        reached -= share;
        return Math.abs(share - weights[i]! / total) < 1e-9;
      });
      return isFair && probabilityChain(weights).at(-1) === 1;
    }),
  );
});

t.test('the flow hash covers what it should, with the seed as key', async (t) => {
  const { k0, k1 } = keyFromString('JLfvgnHc2kaSUFaI');
  const hash = flowHash(k0, k1, 0xc0000201, 40_000, 80, 6);
  t.equal(hash, 3590059483, 'the same on every gateway, for ever');
  t.equal(flowHash(k0, k1, 0xc0000201 | 0, 40_000, 80, 6), hash, 'the sign of a word says nothing');
  t.not(flowHash(k0, k1, 0xc0000202, 40_000, 80, 6), hash);
  t.not(flowHash(k0, k1, 0xc0000201, 40_001, 80, 6), hash);
  t.not(flowHash(k0, k1, 0xc0000201, 40_000, 81, 6), hash);
  t.not(flowHash(k0, k1, 0xc0000201, 40_000, 80, 17), hash);
  t.not(flowHash(k0, k1 + 1, 0xc0000201, 40_000, 80, 6), hash);
  const buckets = new Array<number>(16).fill(0);
  for (let port = 1; port <= 32_000; port++) buckets[flowHash(k0, k1, 0x0a000001, port, 80, 6) % 16]!++;
  const chiSquare = buckets.reduce((sum, n) => sum + (n - 2000) ** 2 / 2000, 0);
  t.ok(chiSquare < 37.7, `neighbouring ports spread: chi-square ${chiSquare.toFixed(1)} (p = 0.001 at 15: 37.7)`);
});

const anySpan = fc
  .tuple(fc.nat(0xffffffff), fc.oneof(fc.nat(3), fc.nat(0xffffffff)))
  .map(([first, length]): AddressSpan => ({ first, last: Math.min(first + length, 0xffffffff) }));

t.test('merged ranges hold the same addresses, sorted and apart', async (t) => {
  const near = fc.nat(60).chain((first) => fc.nat(6).map((length): AddressSpan => ({ first, last: first + length })));
  fc.assert(
    fc.property(fc.array(fc.oneof(anySpan, near), { maxLength: 30 }), fc.array(fc.nat(0xffffffff)), (spans, probes) => {
      const merged = mergeRanges(spans);
      const areApart = merged.every(({ first }, i) => i === 0 || first > merged[i - 1]!.last + 1);
      const flat = new Uint32Array([1, 2, ...merged.flatMap(({ first, last }) => [first, last]), 5, 9]);
      const edges = spans
        .flatMap(({ first, last }) => [first - 1, first, last, last + 1])
        .filter((n) => n >= 0 && n <= 0xffffffff);
      return (
        areApart &&
        [...probes, ...edges, ...Array(70).keys()].every((address) => {
          const wanted = spans.some(({ first, last }) => first <= address && address <= last);
          return (
            contains(flat, 1, merged.length, address) === wanted &&
            contains(flat, 1, merged.length, address | 0) === wanted
          );
        })
      );
    }),
    { numRuns: 300 },
  );
  t.same(
    mergeRanges([
      { first: 8, last: 15 },
      { first: 0, last: 7 },
    ]),
    [{ first: 0, last: 15 }],
    'neighbours become one',
  );
  t.equal(contains(new Uint32Array(0), 0, 0, 5), false);
});

t.test('a hundred thousand ranges', async (t) => {
  const spans = Array.from({ length: 100_000 }, (_, i) => ({ first: i * 40_000, last: i * 40_000 + 255 }));
  const flat = Uint32Array.from(mergeRanges(spans.toReversed()).flatMap(({ first, last }) => [first, last]));
  t.equal(flat.length, 200_000);
  for (const i of [0, 1, 49_999, 99_999]) {
    t.ok(contains(flat, 0, 100_000, i * 40_000 + 255));
    t.notOk(contains(flat, 0, 100_000, i * 40_000 + 256));
  }
});

t.test('affinity lasts until its deadline, which a new flow moves', async (t) => {
  const table = new AffinityTable();
  t.equal(table.get(1, 0x0a000001, 0), 0);
  table.set(1, 0x0a000001, 5, 1000);
  t.equal(table.get(1, 0x0a000001, 999), 5);
  t.equal(table.get(2, 0x0a000001, 0), 0, 'another service');
  t.equal(table.get(1, 0x0a000002, 0), 0, 'another client');
  table.set(1, 0x0a000001, 6, 2000);
  t.equal(table.get(1, 0x0a000001, 1500), 6);
  t.equal(table.get(1, 0x0a000001, 2000), 0, 'over');
  t.equal(table.size, 0, 'and forgotten');
  table.set(1, -1, 7, 10);
  t.equal(table.get(1, 0xffffffff, 0), 7, 'the sign of a word says nothing');
});

t.test('affinity is bounded: the client longest without a flow goes first', async (t) => {
  const table = new AffinityTable(3);
  for (const client of [1, 2, 3]) table.set(1, client, client, 100);
  table.get(1, 1, 0);
  table.set(1, 4, 4, 100);
  t.equal(table.size, 3);
  t.same(
    [1, 2, 3, 4].map((client) => table.get(1, client, 0)),
    [1, 0, 3, 4],
  );
});

t.test('affinity: a look that is no use, and clients counted in slices', async (t) => {
  const table = new AffinityTable(100);
  const backends = new Map<number, number>();
  const random = seededRandom(3);
  for (let i = 0; i < 2000; i++) {
    const client = below(random, 150);
    if (below(random, 5) === 0) {
      table.forget(1, client);
      backends.delete(client);
    } else {
      const backend = 1 + below(random, 3);
      table.set(1, client, backend, 1000 + client);
      backends.set(client, backend);
    }
  }
  const alive = [...backends].filter(([client]) => table.peek(1, client) !== null);
  t.equal(alive.length, table.size, 'peek knows those that were not pushed out');
  t.strictSame(table.peek(1, alive[0]![0]), { backend: alive[0]![1], untilMs: 1000 + alive[0]![0] });
  t.equal(table.peek(2, alive[0]![0]), null);

  const wanted = new Map<number, number>();
  for (const [client, backend] of alive) {
    if (client > 50) wanted.set(backend, (wanted.get(backend) ?? 0) + 1);
  }
  for (const limit of [1, 7, 1000]) {
    const counted = new Map<number, number>();
    let slices = 0;
    let end = Number.POSITIVE_INFINITY;
    for (; end > 0; slices++) end = table.count(end, limit, 1050, counted);
    t.strictSame(counted, wanted, `by ${limit}, without those whose time is over`);
    t.equal(slices, Math.max(1, Math.ceil(table.size / limit)));
  }
  t.equal(new AffinityTable().count(Number.POSITIVE_INFINITY, 10, 0, new Map()), 0);

  const small = new AffinityTable(2);
  for (const client of [1, 2]) small.set(1, client, client, 100);
  small.peek(1, 1);
  small.set(1, 3, 3, 100);
  t.equal(small.peek(1, 1), null, 'whoever was only looked at goes first nevertheless');
});
