import { LRUCache } from 'lru-cache';
import {
  FRAGMENT_ENTRIES,
  FRAGMENT_LIFETIME_MS,
  HELD_FRAGMENT_MS,
  HELD_FRAGMENTS,
  HELD_FRAGMENTS_PER_DATAGRAM,
} from '../base/limits.js';
import { REASON } from '../base/reasons.js';
import * as ipv4 from '../wire/ipv4.js';
import { VNET_HEADER_BYTES } from '../wire/vnet.js';

/**
 * Fragments follow their first one.
 *
 * Only the first fragment of a datagram carries ports, so only it can be given to a flow. What became of it, the *decision*,
 * is remembered under (source, destination, protocol, identification), and every other fragment of the datagram is treated
 * the same. weir does not reassemble: overlapping, repeated or missing fragments are the receiver's business.
 *
 *     first fragment -> pipeline decides -> remember(key, decision) -> release(key): those that came too early, in order
 *     other fragment -> lookup(key) -> found: treat alike
 *                                   -> not yet: hold(packet) -> released by the first, or expired after 1 s
 *
 * States of a key:
 *  - unknown: nothing is kept;
 *  - waiting: fragments are held, at most 64 of them and at most 1024 of all keys together; each leaves by `release`, or by
 *    `expire` one second after it came;
 *  - decided: for 30 s from the first fragment, the time a receiver keeps an incomplete datagram (RFC 1122 3.3.2 asks for
 *    60 to 120 s, Linux does 30). Other fragments do not prolong it. A new first fragment with the same key replaces the
 *    decision: identifications are used again (RFC 6864). At most 8192 keys, the least recently used one goes.
 *
 * The two live in two tables, so that a flood of first fragments never costs a held one, nor a flood of orphans a decision.
 * A flood of orphans does take the places of honest early fragments, for a second each: that is what the bound is for.
 *
 * A held fragment is a copy: its slot goes back to the device at once, so that orphans cannot starve it of slots. Memory:
 * 1024 x device MTU. This is the slow path; it allocates.
 *
 * One writer, the data path. Time is handed in: call `expire` first whenever the clock has moved.
 */
export class FragmentTracker<Decision> {
  readonly #decisions: LRUCache<string, Decided<Decision>>;
  readonly #waiting = new Map<string, HeldFragment[]>();
  /** All held fragments by arrival, which is also the order of their expiry. */
  readonly #held = new Set<HeldFragment>();
  /** What a tracker holds that this one goes on from, besides what it was given. */
  #heldElsewhere = 0;

  constructor(max = FRAGMENT_ENTRIES) {
    this.#decisions = new LRUCache({ max });
  }

  /** How many fragments are held. */
  get heldCount(): number {
    return this.#held.size;
  }

  /** When `expire` next has something to do, ms; Infinity while nothing is held. */
  get nextDueMs(): number {
    for (const fragment of this.#held) return fragment.expiresMs;
    return Number.POSITIVE_INFINITY;
  }

  /**
   * Remembers what became of a first fragment. The key is the datagram's as it arrived, before any rewriting: addresses as
   * signed words, protocol, identification.
   */
  remember(source: number, destination: number, protocol: number, id: number, decision: Decision, nowMs: number): void {
    this.#decisions.set(keyOfDatagram(source, destination, protocol, id), {
      decision,
      expiresMs: nowMs + FRAGMENT_LIFETIME_MS,
    });
  }

  /** The decision that holds for a fragment which is not the first, or undefined when its first has not come. */
  lookup(source: number, destination: number, protocol: number, id: number, nowMs: number): Decision | undefined {
    const key = keyOfDatagram(source, destination, protocol, id);
    const entry = this.#decisions.get(key);
    if (entry === undefined) return undefined;
    if (nowMs < entry.expiresMs) return entry.decision;
    this.#decisions.delete(key);
    return undefined;
  }

  /**
   * Copies the fragment of `length` bytes at `at`, and the vnet header before it, until its first one comes. The slot may
   * be given back.
   *
   * @returns 0, or the id of `fragment-limit`: too many are held, in all or of this datagram.
   */
  hold(view: DataView, bytes: Uint8Array, at: number, length: number, nowMs: number): number {
    if (this.#held.size + this.#heldElsewhere >= HELD_FRAGMENTS) return REASON['fragment-limit'];
    const key = keyOfDatagram(
      ipv4.source(view, at),
      ipv4.destination(view, at),
      ipv4.protocol(bytes, at),
      ipv4.identification(bytes, at),
    );
    const siblings = this.#waiting.get(key);
    if (siblings !== undefined && siblings.length >= HELD_FRAGMENTS_PER_DATAGRAM) return REASON['fragment-limit'];
    const fragment: HeldFragment = {
      key,
      expiresMs: nowMs + HELD_FRAGMENT_MS,
      length,
      bytes: bytes.slice(at - VNET_HEADER_BYTES, at + length),
    };
    if (siblings === undefined) this.#waiting.set(key, [fragment]);
    else siblings.push(fragment);
    this.#held.add(fragment);
    return 0;
  }

  /**
   * Takes out what waited for the first fragment of this datagram, in order of arrival; an empty list when nothing did.
   * `restoreFragment` puts each into a slot, where it is a packet like any other.
   */
  release(source: number, destination: number, protocol: number, id: number): readonly HeldFragment[] {
    if (this.#held.size === 0) return NONE;
    const key = keyOfDatagram(source, destination, protocol, id);
    const fragments = this.#waiting.get(key);
    if (fragments === undefined) return NONE;
    this.#waiting.delete(key);
    for (const fragment of fragments) this.#held.delete(fragment);
    return fragments;
  }

  /** All that bears on the fragments of one datagram, and changes nothing. */
  recall(source: number, destination: number, protocol: number, id: number): DatagramMemory<Decision> {
    const key = keyOfDatagram(source, destination, protocol, id);
    const held = this.#waiting.get(key) ?? NONE;
    return { key, decided: this.#decisions.peek(key) ?? null, held, heldElsewhere: this.#held.size - held.length };
  }

  /** Goes on from what another tracker has recalled, and holds nothing else. */
  assume({ key, decided, held, heldElsewhere }: DatagramMemory<Decision>): void {
    if (decided === null) this.#decisions.delete(key);
    else this.#decisions.set(key, decided);
    this.#waiting.clear();
    this.#held.clear();
    if (held.length > 0) this.#waiting.set(key, [...held]);
    for (const fragment of held) this.#held.add(fragment);
    this.#heldElsewhere = heldElsewhere;
  }

  /** Throws away the fragments that have waited HELD_FRAGMENT_MS. Returns how many: each is a `fragment-expired`. */
  expire(nowMs: number): number {
    let count = 0;
    for (const fragment of this.#held) {
      if (nowMs < fragment.expiresMs) break;
      this.#held.delete(fragment);
      const siblings = this.#waiting.get(fragment.key)!;
      siblings.shift(); // the oldest of all is the oldest of its datagram
      if (siblings.length === 0) this.#waiting.delete(fragment.key);
      count++;
    }
    return count;
  }
}

interface Decided<Decision> {
  readonly decision: Decision;
  readonly expiresMs: number;
}

/** What is known of one datagram's fragments. */
export interface DatagramMemory<Decision> {
  readonly key: string;
  readonly decided: Decided<Decision> | null;
  /** In the order of their arrival. */
  readonly held: readonly HeldFragment[];
  /** Held of all other datagrams. */
  readonly heldElsewhere: number;
}

/** A fragment that waits, or has been released. */
export interface HeldFragment {
  readonly key: string;
  readonly expiresMs: number;
  /** Of the packet, from the IP header. */
  readonly length: number;
  /** vnet header and packet. */
  readonly bytes: Uint8Array;
}

/** Copies a released fragment, with its vnet header, to where a packet at `at` lies. */
export function restoreFragment(fragment: HeldFragment, bytes: Uint8Array, at: number): void {
  bytes.set(fragment.bytes, at - VNET_HEADER_BYTES);
}

const NONE: readonly HeldFragment[] = [];

/** 88 bits in six UTF-16 units: exact, and hashed by the engine with a secret of its own. */
export function keyOfDatagram(source: number, destination: number, protocol: number, id: number): string {
  return String.fromCharCode(source >>> 16, source & 0xffff, destination >>> 16, destination & 0xffff, protocol, id);
}
