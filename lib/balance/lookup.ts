import { shared } from '../base/shared-arrays.js';

/**
 * Exact lookup of (address, port, protocol) -> a positive integer, in one flat Int32Array that can live in shared memory:
 * open addressing with linear probing, at most half full, built once and then only read. O(1) at 10,000 services.
 *
 *     slot: | address | port << 8 | protocol | value, 0 = empty |
 */

const SLOT_WORDS = 3;

export interface LookupEntry {
  readonly address: number;
  readonly port: number;
  readonly protocol: number;
  /** Not 0. */
  readonly value: number;
}

/** Builds the table over shared memory. A later entry of the same key replaces an earlier one. */
export function buildLookup(entries: readonly LookupEntry[]): Int32Array {
  let slots = 2;
  while (slots < entries.length * 2) slots *= 2;
  const table = shared(Int32Array, slots * SLOT_WORDS);
  const mask = slots - 1;
  for (const { address, port, protocol, value } of entries) {
    const key = (port << 8) | protocol;
    let slot = mix(address, key) & mask;
    while (table[slot * SLOT_WORDS + 2] !== 0 && !holds(table, slot, address | 0, key)) slot = (slot + 1) & mask;
    table[slot * SLOT_WORDS] = address;
    table[slot * SLOT_WORDS + 1] = key;
    table[slot * SLOT_WORDS + 2] = value;
  }
  return table;
}

/** The value of a key, or 0. `address` may be signed or unsigned. */
export function lookup(table: Int32Array, address: number, port: number, protocol: number): number {
  const mask = table.length / SLOT_WORDS - 1;
  const key = (port << 8) | protocol;
  const word = address | 0;
  let at = (mix(word, key) & mask) * SLOT_WORDS;
  for (;;) {
    const value = table[at + 2]!;
    if (value === 0 || (table[at] === word && table[at + 1] === key)) return value;
    at += SLOT_WORDS;
    if (at === table.length) at = 0;
  }
}

function holds(table: Int32Array, slot: number, address: number, key: number): boolean {
  return table[slot * SLOT_WORDS] === address && table[slot * SLOT_WORDS + 1] === key;
}

/** Keys come from the configuration, not from the network: no secret is needed. */
function mix(address: number, key: number): number {
  let h = Math.imul(address, 0x9e3779b1) ^ Math.imul(key, 0x85ebca6b);
  h = Math.imul(h ^ (h >>> 15), 0x2c1b3c6d);
  return h ^ (h >>> 12);
}
