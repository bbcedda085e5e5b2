import { randomFillSync } from 'node:crypto';

/** A source of uniform 32-bit unsigned integers. Handed in wherever weir draws lots, so that a replay repeats. */
export type Random = () => number;

/**
 * xoshiro128** (Blackman and Vigna, 2018): small, fast, and good enough for drawing backends and ports. Not for secrets.
 * A single 32-bit seed is spread over the state with splitmix32, as the authors advise.
 */
export function seededRandom(seed: number): Random {
  let z = seed | 0;
  const next = (): number => {
    z = (z + 0x9e3779b9) | 0;
    let t = z ^ (z >>> 16);
    t = Math.imul(t, 0x21f0aaad);
    t ^= t >>> 15;
    t = Math.imul(t, 0x735a2d97);
    return t ^ (t >>> 15);
  };
  let a = next();
  let b = next();
  let c = next();
  let d = next() | 1; // the all-zero state is the one fixed point
  return () => {
    const result = Math.imul(rotateLeft(Math.imul(b, 5), 7), 9);
    const t = b << 9;
    c ^= a;
    d ^= b;
    b ^= c;
    a ^= d;
    c ^= t;
    d = rotateLeft(d, 11);
    return result >>> 0;
  };
}

/** A generator seeded from the operating system: for live use. */
export function systemRandom(): Random {
  return seededRandom(randomFillSync(new Int32Array(1))[0]!);
}

/** A uniform integer in `[0, n)` from one draw, `1 <= n <= 2^32`; the bias is below n / 2^32. */
export function below(random: Random, n: number): number {
  return Math.floor((random() * n) / 0x100000000);
}

function rotateLeft(x: number, k: number): number {
  return (x << k) | (x >>> (32 - k));
}
