import { LRUCache } from 'lru-cache';
import { DIRECT_CONNECTIONS } from '../base/limits.js';
import type { CurrentPacket } from './packet.js';

/**
 * Connections known to be direct ones, to a backend's own address, while replies are picked up by the hash: a packet of
 * theirs looks like a reply whose record was lost. A SYN-ACK without a record tells them, since the SYN of any other came through the
 * tunnel and made one; and so does a client that answers the first packet which was taken for a reply with an RST.
 */
export class DirectConnections {
  readonly #tuples = new LRUCache<string, true>({ max: DIRECT_CONNECTIONS });

  /** The packet in hand is of one, from its backend. */
  add({ source, destination, ports }: CurrentPacket): void {
    this.#tuples.set(keyOf(source, destination, ports), true);
  }

  /** The same of a packet to the backend. */
  addReverse({ source, destination, ports }: CurrentPacket): void {
    this.#tuples.set(keyOf(destination, source, (ports << 16) | (ports >>> 16)), true);
  }

  /** Whether the packet in hand is of one, from its backend. */
  has({ source, destination, ports }: CurrentPacket): boolean {
    return this.#tuples.has(keyOf(source, destination, ports));
  }
}

function keyOf(source: number, destination: number, ports: number): string {
  return String.fromCharCode(
    source >>> 16,
    source & 0xffff,
    destination >>> 16,
    destination & 0xffff,
    ports >>> 16,
    ports & 0xffff,
  );
}
