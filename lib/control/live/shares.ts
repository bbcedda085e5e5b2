import type { Snapshot } from '../../datapath/snapshot.js';
import * as S from '../../datapath/snapshot.js';

/** Which share of new connections goes to each backend, by backend id. Counted once for each snapshot. */
export class Shares {
  #version = -1;
  readonly #shares = new Map<number, number>();
  readonly #counted = new Set<number>();

  /** @param service its id @returns 0 to 1 */
  shareOf(snapshot: Snapshot, service: number, backend: number): number {
    if (snapshot.version !== this.#version) {
      this.#version = snapshot.version;
      this.#shares.clear();
      this.#counted.clear();
    }
    if (!this.#counted.has(service)) {
      this.#counted.add(service);
      this.#count(snapshot, service);
    }
    return this.#shares.get(backend) ?? 0;
  }

  #count({ services, choices, maglev }: Snapshot, service: number): void {
    const row = service * S.SERVICE_WORDS;
    const count = services[row + S.CHOICES_COUNT]!;
    const first = services[row + S.CHOICES_AT]!;
    const parts = new Float64Array(count);
    const size = services[row + S.MAGLEV_SIZE]!;
    if (size > 0) {
      const at = services[row + S.MAGLEV_AT]!;
      for (let slot = at; slot < at + size; slot++) parts[maglev[slot]!]! += 1;
    } else {
      for (let i = 0; i < count; i++) {
        const before = i === 0 ? 0 : choices[2 * (first + i) - 1]!;
        parts[i] = choices[2 * (first + i) + 1]! - before;
      }
    }
    const all = size > 0 ? size : services[row + S.CHOICES_WEIGHT]!;
    for (let i = 0; i < count; i++) this.#shares.set(choices[2 * (first + i)]!, parts[i]! / all);
  }
}
