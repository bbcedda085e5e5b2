/** Picking one of a service's choices: integers in, the number of the choice out. */

/** The choice a flow hash leads to, in the table of `size` entries at `at`. */
export function pickMaglev(tables: Uint16Array, at: number, size: number, hash: number): number {
  return tables[at + (hash % size)]!;
}

/**
 * The choice one uniform 32-bit draw leads to: each with a probability of its weight over `total`, off by less than
 * total / 2^32.
 *
 * @param choices `[backend id, cumulative weight]` pairs
 * @param at first pair of the service
 * @param count its pairs, at least 1
 * @param total its last cumulative weight
 */
export function pickWeighted(choices: Int32Array, at: number, count: number, total: number, draw: number): number {
  const ticket = Math.floor(((draw >>> 0) * total) / 0x100000000);
  let low = 0;
  let high = count - 1;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (choices[(at + middle) * 2 + 1]! > ticket) high = middle;
    else low = middle + 1;
  }
  return low;
}

/**
 * The probabilities kube-proxy's chain of rules would have for the same shares: rule i is tried when those before it did not
 * match, so it matches with w(i) / (w(i) + ... + w(n)), 1/(n-i) for equal weights, and the last one always.
 */
export function probabilityChain(weights: readonly number[]): number[] {
  let rest = weights.reduce((sum, weight) => sum + weight, 0);
  return weights.map((weight) => {
    const probability = weight / rest;
    rest -= weight;
    return probability;
  });
}
