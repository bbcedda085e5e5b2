import { LRUCache } from 'lru-cache';
import { MIN_PATH_MTU, PATH_MTU_ENTRIES, PATH_MTU_LIFETIME_MS } from '../base/limits.js';

/** What a node's path is believed to take, and until when. */
export interface Lowered {
  readonly mtu: number;
  readonly expiresMs: number;
}

/**
 * The path MTU towards each node: the device's, unless a router has said less within the last ten minutes (RFC 1191 6.3 asks for as
 * much before a larger one is tried again). Only nodes of the configuration are told to it, and never is one believed that
 * is below what every host takes.
 */
export class PathMtus {
  readonly #lowered: LRUCache<number, Lowered>;

  constructor(max = PATH_MTU_ENTRIES) {
    this.#lowered = new LRUCache({ max });
  }

  /** @param deviceMtu what holds where nothing else is known */
  towards(node: number, deviceMtu: number, nowMs: number): number {
    if (this.#lowered.size === 0) return deviceMtu;
    const entry = this.#lowered.get(node);
    if (entry === undefined) return deviceMtu;
    if (nowMs < entry.expiresMs) return Math.min(entry.mtu, deviceMtu);
    this.#lowered.delete(node);
    return deviceMtu;
  }

  /** A router on the way to the node takes no more than `mtu`. Only that or less is believed while a narrower one is known. */
  lower(node: number, mtu: number, nowMs: number): void {
    const believed = Math.max(mtu, MIN_PATH_MTU);
    if (believed > this.towards(node, Number.POSITIVE_INFINITY, nowMs)) return;
    this.#lowered.set(node, { mtu: believed, expiresMs: nowMs + PATH_MTU_LIFETIME_MS });
  }

  /** What is believed of a node's path, though its time may be over. */
  recall(node: number): Lowered | undefined {
    return this.#lowered.peek(node);
  }

  /** Believes what others have recalled. */
  assume(node: number, lowered: Lowered): void {
    this.#lowered.set(node, lowered);
  }
}
