import { hashString } from '../base/hash.js';

/**
 * Maglev hashing (Eisenbud et al., NSDI 2016, section 3.4): a table of prime size M in which each backend owns close to its
 * share of the entries, and few entries change owner when a backend comes or goes.
 *
 * Each backend has a permutation of the entries, (offset + j * skip) mod M, from two hashes of its identity. The backends take
 * turns claiming the next free entry of their permutation. Weights are relative turns: each round adds a backend's weight to what
 * it is due, and a turn costs the largest weight of all, so the heaviest takes one every round.
 *
 * The order of turns is part of the result: callers hand the backends in by identity, never as the file lists them.
 */
export interface MaglevBackend {
  /** What the permutation is made from: the same text on every gateway. */
  readonly identity: string;
  /** Above 0. */
  readonly weight: number;
}

const FREE = 0xffff;

/**
 * Fills the table; an entry is the number of a backend in `backends`.
 *
 * @param size one of MAGLEV_TABLE_SIZES
 * @param seed of the gateway group: another seed, another table
 * @param backends 1 to 65535, sorted by identity
 */
export function buildMaglev(
  backends: readonly MaglevBackend[],
  size: number,
  seed: string,
  into = new Uint16Array(size),
): Uint16Array {
  const count = backends.length;
  const position = new Int32Array(count);
  const skip = new Int32Array(count);
  const due = new Float64Array(count);
  let heaviest = 0;
  for (const { weight } of backends) heaviest = Math.max(heaviest, weight);
  const seedWord = hashString(seed);
  for (let i = 0; i < count; i++) {
    const { identity } = backends[i]!;
    position[i] = hashString(identity, seedWord) % size;
    skip[i] = (hashString(identity, seedWord ^ 0x5bd1e995) % (size - 1)) + 1;
  }

  into.fill(FREE);
  let filled = 0;
  for (;;) {
    for (let i = 0; i < count; i++) {
      due[i]! += backends[i]!.weight;
      if (due[i]! < heaviest) continue;
      due[i]! -= heaviest;
      let entry = position[i]!;
      const step = skip[i]!;
      while (into[entry] !== FREE) {
        entry += step;
        if (entry >= size) entry -= size;
      }
      into[entry] = i;
      const next = entry + step;
      position[i] = next >= size ? next - size : next;
      if (++filled === size) return into;
    }
  }
}
