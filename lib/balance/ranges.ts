/** Sets of IPv4 addresses as sorted, disjoint `[first, last]` pairs of unsigned words. */

export interface AddressSpan {
  readonly first: number;
  readonly last: number;
}

/** Sorts and merges spans, overlapping or adjacent ones into one. Returns the pairs flat. */
export function mergeRanges(spans: readonly AddressSpan[]): number[] {
  const merged: number[] = [];
  for (const { first, last } of [...spans].sort((a, b) => a.first - b.first)) {
    const end = merged.length - 1;
    if (end > 0 && first <= merged[end]! + 1) merged[end] = Math.max(merged[end]!, last);
    else merged.push(first, last);
  }
  return merged;
}

/**
 * Whether `address` (signed or unsigned) lies in one of the `count` pairs from pair `at` on: 17 steps at 100,000.
 */
export function contains(ranges: Uint32Array, at: number, count: number, address: number): boolean {
  const word = address >>> 0;
  let low = at;
  let high = at + count;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (ranges[middle * 2 + 1]! < word) low = middle + 1;
    else high = middle;
  }
  return low < at + count && ranges[low * 2]! <= word;
}
