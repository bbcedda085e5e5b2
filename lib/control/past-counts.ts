import { COUNTER_ROWS } from '../datapath/snapshot.js';
import type { Identities } from './identity.js';

/**
 * What has been counted under a name of service and backend by others than those who have it now, so that what is shown under a name
 * never falls while somebody has it:
 *
 *     shown under a name = past(name) + the counters of all who have it
 *
 * The counters are those of ids (snapshot.ts). Whoever is forgotten leaves its counts behind, and so does whoever is given another name;
 * there it begins with none of them, and the number may be negative for that. A name that nobody has is forgotten as well.
 */
export class PastCounts {
  readonly #rows = new Map<string, Float64Array>();

  /** COUNTER_* rows; undefined: nothing. */
  of(name: string): Float64Array | undefined {
    return this.#rows.get(name);
  }

  /** A backend that has a name is about to be forgotten. */
  keep(name: string, counters: Float64Array, id: number): void {
    this.#add(name, counters, id, 1);
  }

  /** Names have changed. @param before of those who had one already, by id */
  follow(before: ReadonlyMap<number, string>, after: ReadonlyMap<number, string>, counters: Float64Array): void {
    for (const [id, name] of after) {
      const former = before.get(id);
      if (former === undefined || former === name) continue;
      this.#add(former, counters, id, 1);
      this.#add(name, counters, id, -1);
    }
    this.dropUnused(after);
  }

  dropUnused(names: ReadonlyMap<number, string>): void {
    if (this.#rows.size === 0) return;
    const used = new Set(names.values());
    for (const name of this.#rows.keys()) if (!used.has(name)) this.#rows.delete(name);
  }

  #add(name: string, counters: Float64Array, id: number, sign: number): void {
    const row = this.#rows.get(name) ?? new Float64Array(COUNTER_ROWS);
    this.#rows.set(name, row);
    for (let i = 0; i < COUNTER_ROWS; i++) row[i]! += sign * (counters[id * COUNTER_ROWS + i] ?? 0);
  }
}

/** The name that a backend's counts are shown under. */
export function countedName(service: string, backend: string): string {
  return `${service}/${backend}`;
}

/** The same of all that have an id, by that. */
export function countedNames(identities: Identities): Map<number, string> {
  const names = new Map<number, string>();
  for (let id = 1; id < identities.backendRows; id++) {
    const identity = identities.backendById(id);
    if (identity !== undefined) names.set(id, countedName(identities.serviceName(identity.service)!, identity.name));
  }
  return names;
}
