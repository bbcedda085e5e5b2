import { hashWords4 } from '../base/hash.js';

/**
 * The hash that selects a backend, an unsigned 32-bit integer: over the source address, the source port (0 with client affinity, so
 * that all flows of a client agree), the destination port and the protocol. Not over the VIP: flows of one client to
 * several VIPs of the same backends stay together. Keyed with the seed, so that every gateway agrees.
 *
 * @param source IPv4 word, signed or unsigned.
 */
export function flowHash(
  key0: number,
  key1: number,
  source: number,
  sourcePort: number,
  destinationPort: number,
  protocol: number,
): number {
  return hashWords4(key0, key1, source, sourcePort, destinationPort, protocol);
}
