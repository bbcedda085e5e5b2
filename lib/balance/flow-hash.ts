import { hashWords4 } from '../base/hash.js';

/**
 * The hash that selects a backend: over source address, source port (0 where the service has client affinity), destination
 * port and protocol, keyed by the configured seed. Not the VIP: a service reached by two VIPs sends a client the same way.
 * Every gateway with the same seed computes the same. Unsigned 32 bits.
 */
export function flowHash(
  k0: number,
  k1: number,
  source: number,
  sourcePort: number,
  destinationPort: number,
  protocol: number,
): number {
  return hashWords4(k0, k1, source, sourcePort, destinationPort, protocol);
}
