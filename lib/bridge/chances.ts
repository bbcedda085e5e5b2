/**
 * Weights as kernel rules say them. Rules are asked one after the other, and the last takes the rest, so each is given the chance that it
 * takes what those before it have left:
 *
 *     rule i of n:   w[i] / (w[i] + ... + w[n-1])        of equal weights 1/n, 1/(n-1), ..., 1/2, and no condition
 *
 * which multiplies out to w[i] / (w[0] + ... + w[n-1]) for each. The probability is text with 10 decimals, as kube-proxy writes it; the
 * kernel keeps 31 bits of it, so that no share is off by more than one in 10^9.
 */

const DECIMALS = 10;

/** Of equal weights: the chain of n rules is the end of that of any more. */
const ONE_OF: string[] = [];

/**
 * The probability of each rule but the last, which has no condition.
 *
 * @param weights above 0, in the order of the rules
 */
export function chain(weights: readonly number[]): string[] {
  const count = weights.length;
  if (weights.every((weight) => weight === weights[0])) {
    for (let n = ONE_OF.length; n <= count; n++) ONE_OF.push((1 / n).toFixed(DECIMALS));
    return Array.from({ length: Math.max(0, count - 1) }, (_, i) => ONE_OF[count - i]!);
  }
  let rest = weights.reduce((sum, weight) => sum + weight, 0);
  return weights.slice(0, -1).map((weight) => {
    const chance = weight / rest;
    rest -= weight;
    return chance.toFixed(DECIMALS);
  });
}

/** The numbers of a lot that mean one choice, both ends included. */
export interface Tickets {
  readonly first: number;
  readonly last: number;
}

/**
 * The same for one lot of `total` numbers, from 0 on: as few as keep the proportions.
 *
 * @param weights above 0, whole
 */
export function lot(weights: readonly number[]): { readonly total: number; readonly tickets: readonly Tickets[] } {
  const unit = weights.reduce(commonDivisor, 0) || 1;
  let total = 0;
  const tickets = weights.map((weight) => {
    const first = total;
    total += weight / unit;
    return { first, last: total - 1 };
  });
  return { total, tickets };
}

function commonDivisor(a: number, b: number): number {
  return b === 0 ? a : commonDivisor(b, a % b);
}
