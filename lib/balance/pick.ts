/** Picks of one backend out of a service's choices, given the numbers that decide. Pure, allocation-free. */

/**
 * The choice a Maglev table has for a hash.
 *
 * @param at Where the service's table begins in `table`, which holds many; `size` is its length, above 0.
 */
export function pickMaglev(table: Uint16Array, at: number, size: number, hash: number): number {
  return table[at + (hash % size)]!;
}

/**
 * The choice a draw falls on, in proportion to the weights: a draw belongs to the first choice whose cumulative weight exceeds
 * `floor(draw * total / 2^32)`. Multiplying keeps every share within one part in 2^32 of exact; a remainder would favour the
 * first choices.
 *
 * @param choices `[backend id, cumulative weight]` pairs; the service's begin at pair `at`. Cumulative weights are unsigned.
 * @param count Number of pairs, above 0.
 * @param total The last cumulative weight, signed or unsigned, up to 2^32 - 1.
 * @param draw A uniform unsigned 32-bit integer.
 * @returns The number of the choice, 0 to `count - 1`.
 */
export function pickWeighted(choices: Int32Array, at: number, count: number, total: number, draw: number): number {
  const ticket = scale(draw, total >>> 0);
  let low = 0;
  let high = count - 1;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (choices[(at + middle) * 2 + 1]! >>> 0 > ticket) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** `floor(draw * total / 2^32)`, exact: the product has 64 bits, a double only 53. */
function scale(draw: number, total: number): number {
  const low = (draw & 0xffff) * total;
  const high = (draw >>> 16) * total;
  return Math.floor((high + Math.floor(low / 0x10000)) / 0x10000);
}

/**
 * The chain kube-proxy writes for random selection: rule i is reached only when those before it did not match, so it must match
 * with probability w(i) / (w(i) + ... + w(n)); the last is "the rest", 1. With equal weights that is 1/n, 1/(n-1), ..., 1.
 * Backends without weight get 0 and are left out by whoever prints the chain.
 */
export function probabilityChain(weights: readonly number[]): number[] {
  let rest = weights.reduce((sum, weight) => sum + weight, 0);
  return weights.map((weight) => {
    const probability = weight === 0 ? 0 : weight / rest;
    rest -= weight;
    return probability;
  });
}
