import { fillMaglev, type MaglevBackend } from '../balance/maglev.js';
import type { HashKey } from '../base/hash.js';
import { shared } from '../base/shared-arrays.js';

/**
 * The Maglev tables of a snapshot, in places of one shared memory. The tables that the next snapshot has as well stay where they are, and
 * new ones are written to places that the last one does not use, while the data path reads those it does: of a thousand services
 * 32 MB, which to copy for every change of one backend's health takes longer than all else.
 *
 *     memory   | web | dns | - | mail | - | - |        places of `size` entries; - is free
 *
 * Invariant: nothing is written to a place of the snapshot in use. It holds as long as one snapshot is made from the one in use at a time,
 * and is in use before another is made; so whoever tries a change out (`Desired.fork`) does not own the memory, and gets another
 * when the first new table is made. What is tried out is never put to use itself.
 */
export interface MaglevTables {
  readonly memory: Uint16Array;
  /** Of each table, in entries. */
  readonly size: number;
  /** Where each begins, by its `tableKey`. */
  readonly at: ReadonlyMap<string, number>;
  /** Whether free places may be written to. */
  readonly isOwn: boolean;
}

/** What a table is made of: backends sorted by identity. */
export interface TableParts {
  readonly backends: readonly MaglevBackend[];
  readonly protocol: number;
}

/** @param wanted by `tableKey` @param previous those of the snapshot in use */
export function placeTables(
  wanted: ReadonlyMap<string, TableParts>,
  size: number,
  key: HashKey,
  previous: MaglevTables | undefined,
): MaglevTables {
  const last = previous?.size === size ? previous : undefined;
  const missing = [...wanted.keys()].filter((name) => !last?.at.has(name));
  const places = missing.length === 0 ? [] : last?.isOwn ? freePlaces(last, missing.length) : undefined;
  const inPlace = last !== undefined && places !== undefined;
  const memory = inPlace ? last.memory : allocate((wanted.size + spare(wanted.size)) * size, previous?.isOwn ?? true);
  const at = new Map<string, number>();
  let next = 0;
  for (const [name, { backends, protocol }] of wanted) {
    const from = last?.at.get(name);
    const to = inPlace ? (from ?? places[next++]!) : size * next++;
    at.set(name, to);
    const place = memory.subarray(to, to + size);
    if (from === undefined) fillMaglev(place, backends, protocol, key);
    else if (!inPlace) place.set(last!.memory.subarray(from, from + size));
  }
  return { memory, size, at, isOwn: inPlace ? last.isOwn : true };
}

/** What is only tried out reaches no other thread, and is the collector's alone. */
function allocate(entries: number, isForUse: boolean): Uint16Array {
  return isForUse ? shared(Uint16Array, entries) : new Uint16Array(entries);
}

/** Equal of tables that are equal. */
export function tableKey({ backends, protocol }: TableParts, size: number, seed: string): string {
  return `${seed}/${size}/${protocol}/${backends.map(({ address, port, weight }) => `${address}:${port}*${weight}`).join()}`;
}

/** So that most changes find room; memory that is not written to costs nothing. */
function spare(tables: number): number {
  return tables === 0 ? 0 : 1 + (tables >> 3);
}

function freePlaces({ memory, size, at }: MaglevTables, count: number): number[] | undefined {
  const taken = new Set(at.values());
  const places: number[] = [];
  for (let place = 0; place < memory.length && places.length < count; place += size) {
    if (!taken.has(place)) places.push(place);
  }
  return places.length === count ? places : undefined;
}
