import { BACKEND_ID, CLASS_CLOSING, CLASS_MASK, COMMIT, MARKS, RECORD_BYTES, RECORD_WORDS, SERVICE } from './record.js';

/**
 * How many open connections each service and each backend has, for limits: the records of a table that are not closing, by the ids
 * in them. A connection counts from its record's making, half-open as it is then, to the end of that, or until it is closing
 * (CLASS_CLOSING): after both FINs or a valid RST the backend has nothing to do with it any more.
 *
 * Only the table changes counts, where it changes itself: an insert, a removal for whatever cause, a change of class. An invariant,
 * between any two calls of it:
 *
 *     services[id] = the records of this service whose class is not CLASS_CLOSING; and so for backends
 *
 * Records that have expired count while they are there; `FlowTable.reapNext` finds them.
 */
export class OpenCounts {
  /** By id; to be read. */
  services: Int32Array = new Int32Array(0);
  backends: Int32Array = new Int32Array(0);

  /** Makes room for ids below these; before there are records of them. */
  fit(services: number, backends: number): void {
    if (services > this.services.length) this.services = grown(this.services, services);
    if (backends > this.backends.length) this.backends = grown(this.backends, backends);
  }

  add(service: number, backend: number, count: number): void {
    this.services[service]! += count;
    this.backends[backend]! += count;
  }

  /** Takes these for the numbers, by id, and all others for 0. */
  assume(services: readonly (readonly [id: number, count: number])[], backends: typeof services): void {
    this.services.fill(0);
    this.backends.fill(0);
    for (const [id, count] of services) this.services[id] = count;
    for (const [id, count] of backends) this.backends[id] = count;
  }

  /** Counts the records that are there already, of memory that another thread or an earlier run has filled. */
  recount(words: Int32Array, bytes: Uint8Array, highWater: number): void {
    this.services.fill(0);
    this.backends.fill(0);
    for (let record = 0; record < highWater; record++) {
      const word = record * RECORD_WORDS;
      if (words[word + COMMIT] === 0) continue;
      if ((bytes[record * RECORD_BYTES + MARKS]! & CLASS_MASK) === CLASS_CLOSING) continue;
      this.add(words[word + SERVICE]!, words[word + BACKEND_ID]!, 1);
    }
  }
}

/** Room for twice as many, so that most reloads need none. */
function grown(counts: Int32Array, wanted: number): Int32Array {
  const larger = new Int32Array(Math.max(64, 2 * wanted));
  larger.set(counts);
  return larger;
}
