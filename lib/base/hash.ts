/**
 * Keyed hashes of 32-bit words. Two uses, two keys: the flow table's index is keyed with a per-process secret, so that
 * nobody outside can aim packets at one chain; selection is keyed with the configured seed, so that every gateway agrees.
 *
 * HalfSipHash-1-3 (Aumasson and Bernstein; the 32-bit variant that Linux uses for its hash tables): ~20 ns for five
 * words in V8, where 64-bit SipHash would need two words per lane. Rejected: multiply-xorshift mixers, whose collisions
 * do not depend on the key.
 */

/** A 64-bit key as two words. */
export interface HashKey {
  readonly k0: number;
  readonly k1: number;
}

/** The hash of exactly four words, an unsigned 32-bit integer. Allocation-free. */
export function hashWords4(k0: number, k1: number, a: number, b: number, c: number, d: number): number {
  let v0 = k0;
  let v1 = k1;
  let v2 = k0 ^ 0x6c796765;
  let v3 = k1 ^ 0x74656462;
  // One compression round per word, then the length word, then three finalisation rounds.
  for (let i = 0; i < 8; i++) {
    const m = i === 0 ? a : i === 1 ? b : i === 2 ? c : i === 3 ? d : i === 4 ? 0x10000000 : 0;
    v3 ^= m;
    v0 = (v0 + v1) | 0;
    v1 = ((v1 << 5) | (v1 >>> 27)) ^ v0;
    v0 = (v0 << 16) | (v0 >>> 16);
    v2 = (v2 + v3) | 0;
    v3 = ((v3 << 8) | (v3 >>> 24)) ^ v2;
    v0 = (v0 + v3) | 0;
    v3 = ((v3 << 7) | (v3 >>> 25)) ^ v0;
    v2 = (v2 + v1) | 0;
    v1 = ((v1 << 13) | (v1 >>> 19)) ^ v2;
    v2 = (v2 << 16) | (v2 >>> 16);
    v0 ^= m;
    if (i === 4) v2 ^= 0xff;
  }
  return (v1 ^ v3) >>> 0;
}

/** FNV-1a over the UTF-8 bytes of a string, then mixed: turns names and seeds into words. Start-up use only. */
export function hashString(text: string, salt = 0): number {
  let h = 0x811c9dc5 ^ salt;
  for (const byte of new TextEncoder().encode(text)) h = Math.imul(h ^ byte, 0x01000193);
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
  return (h ^ (h >>> 16)) >>> 0;
}

/** The key a configured seed stands for. */
export function keyFromString(seed: string): HashKey {
  return { k0: hashString(seed, 1) | 0, k1: hashString(seed, 2) | 0 };
}
