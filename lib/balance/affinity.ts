import { LRUCache } from 'lru-cache';

/** Clients remembered at once; the least recently connected is forgotten first. */
const AFFINITY_CLIENTS = 65_536;

interface Entry {
  backend: number;
  expiresMs: number;
}

/**
 * Client affinity: (service, client address) -> the backend of the client's last new flow. Only new flows ask, so a list
 * ordered by use is fine here. Time is handed in.
 */
export class AffinityTable {
  readonly #entries = new LRUCache<number, Entry>({ max: AFFINITY_CLIENTS });

  /** The backend id, or 0 when the client is not known or was away too long. */
  get(service: number, client: number, nowMs: number): number {
    const entry = this.#entries.get(keyOf(service, client));
    return entry !== undefined && nowMs < entry.expiresMs ? entry.backend : 0;
  }

  set(service: number, client: number, backend: number, expiresMs: number): void {
    const key = keyOf(service, client);
    const entry = this.#entries.get(key);
    if (entry === undefined) this.#entries.set(key, { backend, expiresMs });
    else {
      entry.backend = backend;
      entry.expiresMs = expiresMs;
    }
  }
}

/** Exact: service ids stay far below 2^21. */
function keyOf(service: number, client: number): number {
  return service * 0x100000000 + (client >>> 0);
}
