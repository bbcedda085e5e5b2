/** Sets of IPv4 addresses as sorted, disjoint `[first, last]` pairs of unsigned words, both ends included. */

export interface AddressSpan {
  /** Unsigned. */
  readonly first: number;
  readonly last: number;
}

/** The same addresses in the fewest spans, sorted: overlapping and adjacent ones become one. O(n log n). */
export function mergeRanges(spans: readonly AddressSpan[]): AddressSpan[] {
  const merged: { first: number; last: number }[] = [];
  for (const { first, last } of [...spans].sort((a, b) => a.first - b.first)) {
    const top = merged.at(-1);
    if (top === undefined || first > top.last + 1) merged.push({ first, last });
    else if (last > top.last) top.last = last;
  }
  return merged;
}

/**
 * Whether an address, signed or unsigned, lies in one of `count` pairs that begin at pair `at` and are merged: binary search,
 * 17 steps for 100,000 ranges.
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
