import { SNAT_PORT_TRIES } from '../base/limits.js';
import { below, type Random } from '../base/random.js';

/**
 * The snat port allocator. It keeps no table of its own: a port is taken while a conntrack entry owns the reply tuple it
 * would make, so that no port is ever given to two live flows and a freed one is free at once. The key of a port is thereby
 * (backend, port, protocol): 32768 ports per snat address *and* backend endpoint.
 *
 * At most 1 + 32 lookups per address: O(1) whatever the fill. The price: at 99 % use an
 * address is given up with ports left.
 */
export interface PortPool {
  readonly addresses: Int32Array;
  readonly firstPort: number;
  readonly lastPort: number;
}

/**
 * Says whether (snat address, port) is free towards the backend the caller is thinking of. May remove an entry that
 * has expired.
 */
export interface PortProbe {
  isPortFree(address: number, port: number): boolean;
}

/** What `allocatePort` found; owned by the caller and reused. */
export interface AllocatedPort {
  address: number;
  port: number;
}

/**
 * Finds a source address and port: the client's own port if it lies inside the pool and is free, else one random try,
 * then upwards with wrap-around; then the next address. `clientHash` picks the first address.
 *
 * @returns false when every try was taken.
 */
export function allocatePort(
  pool: PortPool,
  clientPort: number,
  clientHash: number,
  random: Random,
  probe: PortProbe,
  into: AllocatedPort,
): boolean {
  const addresses = pool.addresses.length;
  const span = pool.lastPort - pool.firstPort + 1;
  for (let k = 0; k < addresses; k++) {
    const address = pool.addresses[((clientHash >>> 0) + k) % addresses]!;
    into.address = address;
    if (clientPort >= pool.firstPort && clientPort <= pool.lastPort && probe.isPortFree(address, clientPort)) {
      into.port = clientPort;
      return true;
    }
    let port = pool.firstPort + below(random, span);
    for (let tries = 0; tries <= SNAT_PORT_TRIES; tries++) {
      if (probe.isPortFree(address, port)) {
        into.port = port;
        return true;
      }
      port = port === pool.lastPort ? pool.firstPort : port + 1;
    }
  }
  return false;
}
