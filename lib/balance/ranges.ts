/**
 * Sets of IPv4 addresses, in flat arrays that can live in shared memory: built once, then only read.
 *
 * A set is a block of words. Its spans are sorted and disjoint, so that one binary search finds the only one an address can lie in.
 * To keep that short, the distance from the first address to the last is cut into equal buckets, one or two a span, and an index
 * says where in the spans each begins:
 *
 *     | FIRST | SHIFT | BUCKETS | index: BUCKETS + 1 words | spans: first, last, first, last, ... | 1, 0 |
 *
 *     bucket of an address = (address - FIRST) >>> SHIFT        index[b]: the first span that ends in bucket b or behind it
 *
 * The last span, of no address, ends searches behind all others. Of 100,000 spans that are spread evenly, over all addresses or over a
 * /8, a search looks at two or three; of those that lie together while others are far away, at 17 at most, as without an index.
 *
 * Ranges only allow: nested and overlapping ones are their union, and no prefix takes precedence over another, longer or shorter.
 * Rejected: a trie of bytes, a node for nearly each of many scattered addresses.
 */

export interface AddressSpan {
  /** Unsigned. */
  readonly first: number;
  readonly last: number;
}

const FIRST = 0;
const SHIFT = 1;
const BUCKETS = 2;
const INDEX = 3;

/** 256 KiB of index. */
const MAX_BUCKETS = 1 << 16;

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

/** The block of a set. @param spans at least one; in any order, overlapping as they like */
export function encodeRanges(spans: readonly AddressSpan[]): Uint32Array {
  const merged = mergeRanges(spans);
  const base = merged[0]!.first;
  const width = merged.at(-1)!.last - base;
  let shift = 0;
  while (width >>> shift >= Math.min(2 * merged.length, MAX_BUCKETS)) shift++;
  const buckets = (width >>> shift) + 1;

  const pairs = INDEX + buckets + 1;
  const block = new Uint32Array(pairs + (merged.length + 1) * 2);
  block[FIRST] = base;
  block[SHIFT] = shift;
  block[BUCKETS] = buckets;
  let span = 0;
  for (let bucket = 0; bucket <= buckets; bucket++) {
    const start = base + bucket * 2 ** shift;
    while (span < merged.length && merged[span]!.last < start) span++;
    block[INDEX + bucket] = span;
  }
  let at = pairs;
  for (const { first, last } of merged) {
    block[at++] = first;
    block[at++] = last;
  }
  block[at] = 1;
  return block;
}

/** Whether an address, signed or unsigned, lies in the set whose block begins at word `at`. */
export function contains(blocks: Uint32Array, at: number, address: number): boolean {
  const word = address >>> 0;
  const buckets = blocks[at + BUCKETS]!;
  const bucket = ((word - blocks[at + FIRST]!) >>> 0) >>> blocks[at + SHIFT]!;
  if (bucket >= buckets) return false;
  const index = at + INDEX + bucket;
  const pairs = at + INDEX + buckets + 1;
  let low = blocks[index]!;
  let high = blocks[index + 1]!;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (blocks[pairs + middle * 2 + 1]! < word) low = middle + 1;
    else high = middle;
  }
  return blocks[pairs + low * 2]! <= word && word <= blocks[pairs + low * 2 + 1]!;
}
