import fc from 'fast-check';
import t from 'tap';
import { AffinityTable } from '../../lib/balance/affinity.js';
import { ClientRates } from '../../lib/balance/client-rates.js';
import { flowHash } from '../../lib/balance/flow-hash.js';
import { maglevTable } from '../../lib/balance/maglev.js';
import {
  pickMaglev,
  pickMaglevWhere,
  pickWeighted,
  pickWeightedWhere,
  probabilityChain,
} from '../../lib/balance/pick.js';
import { type AddressSpan, contains, encodeRanges, mergeRanges } from '../../lib/balance/ranges.js';
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

t.test('what is passed over leaves exact shares to the others', async (t) => {
  const weights = [1, 2, 3, 4];
  const choices = choicesOf(weights, 3);
  const steps = 1 << 14;
  const counts = [0, 0, 0, 0];
  for (let i = 0; i < steps; i++) counts[pickWeightedWhere(choices, 3, 4, i * 2 ** 18, (choice) => choice !== 1)]!++;
  const wanted = weights.map((weight, i) => (i === 1 ? 0 : (weight * steps) / 8));
  t.ok(
    counts.every((count, i) => Math.abs(count - wanted[i]!) <= 1),
    counts.join(' '),
  );
  fc.assert(
    fc.property(
      fc.array(fc.record({ weight: fc.integer({ min: 1, max: 65535 }), isTaken: fc.boolean() }), { minLength: 1 }),
      fc.nat(5),
      fc.nat(0xffffffff),
      (members, skip, draw) => {
        const all = choicesOf(
          members.map(({ weight }) => weight),
          skip,
        );
        const accepts = (choice: number): boolean => !members[choice]!.isTaken;
        const free = members.flatMap(({ weight, isTaken }, i) => (isTaken ? [] : [{ weight, i }]));
        const left = choicesOf(
          free.map(({ weight }) => weight),
          0,
        );
        const total = free.reduce((sum, { weight }) => sum + weight, 0);
        const wanted = free.length === 0 ? -1 : free[pickWeighted(left, 0, free.length, total, draw)]!.i;
        return pickWeightedWhere(all, skip, members.length, draw, accepts) === wanted;
      },
    ),
  );
});

t.test('a Maglev table without some of its backends', async (t) => {
  const backends = Array.from({ length: 5 }, (_, i) => ({ address: 0x0a020000 + i, port: 80, weight: 1 + (i & 1) }));
  const size = 251;
  const table = maglevTable(backends, 6, size, { k0: 1, k1: 2 });
  const random = seededRandom(5);
  const moved = [0, 0, 0, 0, 0];
  for (let i = 0; i < 100_000; i++) {
    const hash = random();
    const choice = pickMaglevWhere(table, 0, size, hash, 5, (each) => each !== 2);
    if (table[hash % size] === 2) moved[choice]!++;
    else if (choice !== table[hash % size]) t.fail('a flow moved whose backend may be taken');
  }
  const slots = [0, 1, 2, 3, 4].map((choice) => table.filter((each) => each === choice).length);
  const total = moved.reduce((sum, count) => sum + count, 0);
  const rest = size - slots[2]!;
  const chiSquare = [0, 1, 3, 4].reduce((sum, choice) => {
    const wanted = (total * slots[choice]!) / rest;
    return sum + (moved[choice]! - wanted) ** 2 / wanted;
  }, 0);
  t.ok(chiSquare < 16.3, `chi-square ${chiSquare.toFixed(1)} at 3 degrees of freedom (p = 0.001: 16.27): ${moved}`);

  const some = fc.array(fc.boolean(), { minLength: 7, maxLength: 7 });
  fc.assert(
    fc.property(
      fc.array(fc.nat(6), { minLength: 2, maxLength: 300 }),
      fc.nat(3),
      fc.nat(0xffffffff),
      some,
      (slots, at, hash, accepted) => {
        const tables = Uint16Array.from([...Array<number>(at).fill(99), ...slots, ...Array<number>(at).fill(99)]);
        const found = pickMaglevWhere(tables, at, slots.length, hash, 7, (choice) => accepted[choice]!);
        const first = slots[hash % slots.length]!;
        if (accepted[first]) return found === first;
        return found === -1 ? !accepted.includes(true) : accepted[found]!;
      },
    ),
  );
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

/** Anywhere, close together, and single addresses; of CIDR blocks, all there can be. */
const someSpans = fc.array(
  fc.oneof(
    anySpan,
    fc.nat(60).chain((first) => fc.nat(6).map((length): AddressSpan => ({ first, last: first + length }))),
    fc.nat(300).map((n): AddressSpan => ({ first: 0xfffffed3 + n, last: 0xfffffed3 + n })),
    fc.tuple(fc.nat(0xffffffff), fc.nat(32)).map(([address, prefix]): AddressSpan => {
      const size = 2 ** (32 - prefix);
      const first = Math.floor(address / size) * size;
      return { first, last: first + size - 1 };
    }),
  ),
  { minLength: 1, maxLength: 40 },
);

t.test('a set of ranges has the addresses that one of its ranges has', async (t) => {
  const probes = fc.array(fc.oneof(fc.nat(0xffffffff), fc.nat(70)));
  fc.assert(
    fc.property(someSpans, probes, fc.array(fc.nat(0xffffffff), { maxLength: 3 }), (spans, anywhere, others) => {
      const merged = mergeRanges(spans);
      const areApart = merged.every(({ first }, i) => i === 0 || first > merged[i - 1]!.last + 1);
      const blocks = new Uint32Array([...others, ...encodeRanges(spans), ...others]);
      const edges = spans
        .flatMap(({ first, last }) => [first - 1, first, last, last + 1])
        .filter((n) => n >= 0 && n <= 0xffffffff);
      return (
        areApart &&
        [0, 1, 0xffffffff, ...anywhere, ...edges].every((address) => {
          const wanted = spans.some(({ first, last }) => first <= address && address <= last);
          return (
            contains(blocks, others.length, address) === wanted &&
            contains(blocks, others.length, address | 0) === wanted
          );
        })
      );
    }),
    { numRuns: 2000 },
  );
  const halves = [
    { first: 8, last: 15 },
    { first: 0, last: 7 },
  ];
  t.same(mergeRanges(halves), [{ first: 0, last: 15 }], 'neighbours become one');
  const everyone = encodeRanges([{ first: 0, last: 0xffffffff }]);
  t.ok([0, 1, 0x7fffffff, 0x80000000, 0xffffffff].every((address) => contains(everyone, 0, address)));
});

t.test('a hundred thousand ranges', async (t) => {
  for (const [apart, length] of [
    [40_000, 256],
    [2, 1],
  ] as const) {
    const spans = Array.from({ length: 100_000 }, (_, i) => ({ first: 77 + i * apart, last: 76 + i * apart + length }));
    const block = encodeRanges(spans.toReversed());
    t.ok(block.byteLength < 1_100_000, `${block.byteLength} bytes`);
    for (const i of [0, 1, 49_999, 99_999]) {
      t.notOk(contains(block, 0, 76 + i * apart));
      t.ok(contains(block, 0, 77 + i * apart));
      t.ok(contains(block, 0, 76 + i * apart + length));
      t.notOk(contains(block, 0, 77 + i * apart + length));
    }
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

t.test('a client opens a second’s worth at once, then one at a time', async (t) => {
  const rates = new ClientRates();
  const opens = (nowMs: number, client = 7, service = 1): boolean => {
    const isAllowed = rates.allows(service, client, client, 3, nowMs);
    if (isAllowed) rates.count(service, client, client, 3, nowMs);
    return isAllowed;
  };
  t.same(
    [0, 0, 0, 0, 333, 334, 335, 667].map((ms) => opens(ms)),
    [true, true, true, false, false, true, false, true],
  );
  t.same([opens(667, 8), opens(667, 7, 2)], [true, true], 'others have theirs');
  t.same(
    [60_000, 60_000, 60_000, 60_000].map((ms) => opens(ms)),
    [true, true, true, false],
    'a pause saves up no more than that',
  );
});

t.test('the rate of a client is that of a bucket of tokens', async () => {
  const steps = fc.array(fc.tuple(fc.nat(2), fc.oneof(fc.constant(0), fc.nat(40), fc.nat(3000))), { maxLength: 100 });
  fc.assert(
    fc.property(steps, fc.oneof(fc.integer({ min: 1, max: 9 }), fc.nat(999_999)), fc.nat(1e9), (run, rate, startMs) => {
      const perSecond = rate + 1;
      const rates = new ClientRates();
      const buckets = [0, 1, 2].map(() => ({ tokens: perSecond, atMs: startMs }));
      let nowMs = startMs;
      return run.every(([client, ms]) => {
        nowMs += ms;
        const bucket = buckets[client]!;
        bucket.tokens = Math.min(perSecond, bucket.tokens + ((nowMs - bucket.atMs) * perSecond) / 1000);
        bucket.atMs = nowMs;
        const isAllowed = rates.allows(1, client, 0, perSecond, nowMs);
        // Either may be right within what the tolerance is for.
        const isClose = Math.abs(bucket.tokens - 1) < 0.02;
        if (isAllowed !== bucket.tokens >= 1 && !isClose) return false;
        if (isAllowed) {
          rates.count(1, client, 0, perSecond, nowMs);
          bucket.tokens -= 1;
        }
        return true;
      });
    }),
  );
});

t.test('forged sources take the room of those whose bucket is full first', async (t) => {
  const rates = new ClientRates();
  for (let client = 1; client <= 4; client++) rates.count(1, client, 9, 1, client);
  rates.count(1, 5, 9, 1, 5);
  t.ok(rates.allows(1, 1, 9, 1, 6), 'forgotten: it may');
  for (const client of [2, 3, 4, 5]) t.notOk(rates.allows(1, client, 9, 1, 6));
  rates.count(1, 6, 9, 1, 1002);
  t.notOk(rates.allows(1, 3, 9, 1, 1002), 'it took the place of one that is full again');
});
