import t from 'tap';
import { below, seededRandom } from '../../lib/base/random.js';

t.test('a seed repeats, and another seed differs', async (t) => {
  const a = seededRandom(1);
  const b = seededRandom(1);
  const c = seededRandom(2);
  const first = Array.from({ length: 100 }, a);
  t.same(Array.from({ length: 100 }, b), first);
  t.notSame(Array.from({ length: 100 }, c), first);
});

t.test('draws are uniform within chance', async (t) => {
  const random = seededRandom(7);
  const counts = new Array<number>(7).fill(0);
  for (let i = 0; i < 70_000; i++) counts[below(random, 7)]!++;
  const chiSquare = counts.reduce((sum, n) => sum + (n - 10_000) ** 2 / 10_000, 0);
  t.ok(chiSquare < 22.5, `chi-square ${chiSquare} at 6 degrees of freedom (p = 0.001: 22.46)`);
});
