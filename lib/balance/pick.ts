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

/** Slots of a Maglev table that are looked at for a backend that may be taken. */
const TRIED_SLOTS = 128;

/**
 * The choice a Maglev table has for a hash among those that `accepts` takes, or -1 when there is none: that of the first slot on the
 * hash's way through the table, which begins at its own and goes on in steps that are its own too. The flows of a backend that is
 * passed over so go to all others in proportion, while no other flow moves (as in consistent hashing with bounded loads, Mirrokni et
 * al. 2016). After TRIED_SLOTS slots the choices follow in their order: nearly none may be taken then.
 *
 * Rejected: the slots one after the other, since what lies beside a backend's slots is not the others in proportion.
 *
 * @param size 2 at least; other parameters as for `pickMaglev`
 * @param count Number of choices of the service.
 * @param accepts Asked about choices, of some several times.
 */
export function pickMaglevWhere(
  table: Uint16Array,
  at: number,
  size: number,
  hash: number,
  count: number,
  accepts: (choice: number) => boolean,
): number {
  let slot = hash % size;
  const step = 1 + (Math.floor(hash / size) % (size - 1));
  let choice = 0;
  for (let left = TRIED_SLOTS; left > 0; left--) {
    choice = table[at + slot]!;
    if (accepts(choice)) return choice;
    slot += step;
    if (slot >= size) slot -= size;
  }
  for (let left = count; left > 0; left--) {
    choice = choice + 1 === count ? 0 : choice + 1;
    if (accepts(choice)) return choice;
  }
  return -1;
}

/**
 * The choice a draw falls on among those that `accepts` takes, in proportion to their weights, or -1 when there is none. After a
 * first draw that fell on one that may not be taken, a second one here gives each of the others its exact share.
 *
 * Parameters as for `pickWeighted`.
 */
export function pickWeightedWhere(
  choices: Int32Array,
  at: number,
  count: number,
  draw: number,
  accepts: (choice: number) => boolean,
): number {
  let total = 0;
  for (let i = 0; i < count; i++) if (accepts(i)) total += weightOf(choices, at, i);
  let ticket = scale(draw, total);
  for (let i = 0; i < count; i++) {
    if (!accepts(i)) continue;
    ticket -= weightOf(choices, at, i);
    if (ticket < 0) return i;
  }
  return -1;
}

function weightOf(choices: Int32Array, at: number, choice: number): number {
  const before = choice === 0 ? 0 : choices[(at + choice) * 2 - 1]!;
  return (choices[(at + choice) * 2 + 1]! - before) >>> 0;
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
