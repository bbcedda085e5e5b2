import { LRUCache } from 'lru-cache';
import { FRAGMENT_ENTRIES, FRAGMENT_LIFETIME_MS } from '../base/limits.js';
import { keyOfDatagram } from './fragments.js';

/**
 * Identifications of fragmented datagrams after translation.
 *
 * Fragments are put together by (source, destination, protocol, identification). Each sender keeps these apart for itself, but
 * translation brings together what several have sent: clients behind one snat address, backends behind one VIP, VIPs before one
 * backend. Two datagrams with the same identification would then be mixed up by their receiver, so the one that comes later
 * leaves with another (RFC 6864 5.3.1). All that do not meet keep theirs.
 *
 * A datagram holds its identification as long as its first fragment is remembered. At most as many are known as there are
 * decisions of first fragments; one writer, the data path; it allocates, being the slow path.
 */
export class IdentificationTable {
  readonly #holders: LRUCache<string, Holder>;

  constructor(max = FRAGMENT_ENTRIES) {
    this.#holders = new LRUCache({ max });
  }

  /**
   * The identification that the datagram (source, destination, protocol, id), as it arrived, is to have between two other
   * addresses. Addresses are signed words.
   */
  claim(
    source: number,
    destination: number,
    protocol: number,
    id: number,
    newSource: number,
    newDestination: number,
    nowMs: number,
  ): number {
    const datagram = keyOfDatagram(source, destination, protocol, id);
    let candidate = id;
    for (let tries = 0; tries < MAX_TRIES; tries++) {
      const key = keyOfDatagram(newSource, newDestination, protocol, candidate);
      const holder = this.#holders.get(key);
      if (holder === undefined || holder.datagram === datagram || holder.untilMs <= nowMs) {
        this.#holders.set(key, { datagram, untilMs: nowMs + FRAGMENT_LIFETIME_MS });
        return candidate;
      }
      candidate = (candidate + STEP) & 0xffff;
    }
    return id;
  }
}

interface Holder {
  /** The key it arrived under. */
  readonly datagram: string;
  readonly untilMs: number;
}

/** Odd, so that every identification is reached; large, since senders count upwards from where they are. */
const STEP = 0x5555;

/** With 8192 of 65,536 taken at most, 16 in a row are a sign of nothing but ill will. */
const MAX_TRIES = 16;
