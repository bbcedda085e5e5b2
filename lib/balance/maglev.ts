import { type HashKey, hashWords4 } from '../base/hash.js';

/**
 * Maglev consistent hashing (Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load Balancer", NSDI 2016, section 3.4).
 *
 * Each backend has a permutation of the table's slots, `(offset + n * skip) mod size`, made of two independent hashes of its identity;
 * size is prime, so that every skip visits every slot. The backends take turns, in the order of their identities; at its turn
 * a backend claims the first slot of its permutation that is still free, until the table is full.
 *
 * Weights are relative turns: in round r a backend plays when `r * weight` has reached its target, which then grows by the
 * largest weight. The heaviest plays in every round, one of half its weight in every second; all play in the first, so that
 * whoever has a weight has a slot (as long as there are fewer backends than slots).
 *
 * The table depends on the set of backends, the size and the key, on nothing else: gateways that share a configuration choose
 * alike, and a backend that leaves gives its slots away while almost all others keep theirs.
 *
 * Rejected: several turns in a row for a heavy backend, which clusters its claims early and disturbs more; repeating a backend
 * under several identities, whose memory grows with the weights.
 */

/** A backend's identity, and its share. The protocol is part of the identity too, and common to all of a table. */
export interface MaglevBackend {
  /** IPv4 word, signed or unsigned. */
  readonly address: number;
  readonly port: number;
  /** A positive integer. */
  readonly weight: number;
}

/** The order of identities: by unsigned address, then port. */
export function compareIdentity(
  a: { readonly address: number; readonly port: number },
  b: { readonly address: number; readonly port: number },
): number {
  return (a.address >>> 0) - (b.address >>> 0) || a.port - b.port;
}

/**
 * The table of a set of backends.
 *
 * @param backends In any order, at most 65535, each identity once.
 * @param size A prime: one of MAGLEV_TABLE_SIZES.
 * @returns For each slot the index in `backends` of its owner; all 0 when there are no backends, so ask for their number first.
 */
export function maglevTable(
  backends: readonly MaglevBackend[],
  protocol: number,
  size: number,
  key: HashKey,
): Uint16Array {
  const table = new Uint16Array(size);
  fillMaglev(table, backends, protocol, key);
  return table;
}

/** Fills `table`, whose length is the size, as maglevTable does; it may lie in shared memory. */
export function fillMaglev(
  table: Uint16Array,
  backends: readonly MaglevBackend[],
  protocol: number,
  key: HashKey,
): void {
  const count = backends.length;
  if (count === 0) {
    table.fill(0);
    return;
  }
  const size = table.length;
  const order = Array.from(backends, (_, i) => i).sort((a, b) => compareIdentity(backends[a]!, backends[b]!));
  const slots = new Int32Array(count);
  const skips = new Int32Array(count);
  const weights = new Float64Array(count);
  const targets = new Float64Array(count);
  let maxWeight = 0;
  for (let i = 0; i < count; i++) {
    const { address, port, weight } = backends[order[i]!]!;
    slots[i] = hashWords4(key.k0, key.k1, address, port, protocol, 1) % size;
    skips[i] = (hashWords4(key.k0, key.k1, address, port, protocol, 2) % (size - 1)) + 1;
    weights[i] = weight;
    if (weight > maxWeight) maxWeight = weight;
  }

  const free = new Uint8Array(size).fill(1);
  let left = size;
  for (let round = 1; left > 0; round++) {
    for (let i = 0; i < count && left > 0; i++) {
      if (round * weights[i]! < targets[i]!) continue;
      targets[i]! += maxWeight;
      const skip = skips[i]!;
      let slot = slots[i]!;
      while (free[slot] === 0) {
        slot += skip;
        if (slot >= size) slot -= size;
      }
      free[slot] = 0;
      table[slot] = order[i]!;
      left--;
      slot += skip;
      slots[i] = slot >= size ? slot - size : slot;
    }
  }
}
