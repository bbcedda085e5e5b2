import { encodeRanges } from '../balance/ranges.js';
import { shared } from '../base/shared-arrays.js';
import type { AddressRange, ServiceConfig } from '../config/config.js';

/** The sets of source ranges of all services. */
export interface PlacedRanges {
  /** Blocks of balance/ranges.ts, one after the other. */
  readonly blocks: Uint32Array;
  /** Where the block of a list begins; lists of the same addresses share one. An empty list has none. */
  readonly at: ReadonlyMap<readonly AddressRange[], number>;
}

/**
 * Places the source ranges of `services`. Where all their lists are those of the last time - the configuration is the same, and a
 * backend's health has changed - the last result is good: a list of 100,000 takes a tenth of a second.
 */
export function placeRanges(services: readonly ServiceConfig[], previous: PlacedRanges | undefined): PlacedRanges {
  const lists = new Set(services.map(({ sourceRanges }) => sourceRanges).filter((list) => list.length > 0));
  if (previous?.at.size === lists.size && [...lists].every((list) => previous.at.has(list))) return previous;

  const at = new Map<readonly AddressRange[], number>();
  const placed: { block: Uint32Array; at: number }[] = [];
  let words = 0;
  for (const list of lists) {
    const block = encodeRanges(list);
    let place = placed.find((other) => isSame(other.block, block));
    if (place === undefined) {
      place = { block, at: words };
      placed.push(place);
      words += block.length;
    }
    at.set(list, place.at);
  }
  const blocks = shared(Uint32Array, words);
  for (const { block, at } of placed) blocks.set(block, at);
  return { blocks, at };
}

function isSame(a: Uint32Array, b: Uint32Array): boolean {
  return a.length === b.length && a.every((word, i) => word === b[i]);
}
