import type { Config } from '../../../lib/config/config.js';
import { parseConfig } from '../../../lib/config/load.js';

/** The small world of the model test: few clients, VIPs and backends, so that everything collides; and how it may change. */

export interface Setup {
  /** Addresses and ports of the snat pool; no addresses: no pool, and nothing is in mode snat. */
  readonly poolAddresses: number;
  readonly poolPorts: number;
  readonly tcpEntries: number;
  readonly anyEntries: number;
  readonly recovering: boolean;
  readonly seed: number;
  /** Connections of a service, of a backend, and of a client per second, where there are limits; 0: none. */
  readonly serviceLimit: number;
  readonly backendLimit: number;
  readonly clientRate: number;
}

export interface Backend {
  readonly address: string;
  readonly port: number;
  readonly maxConnections?: number;
  name: string;
  weight: number;
  isPresent: boolean;
}

export interface Service {
  readonly address: string;
  readonly port: number;
  readonly protocol: 'tcp' | 'udp';
  readonly algorithm: 'maglev' | 'random';
  readonly mode: 'dnat' | 'snat';
  readonly noBackend: 'reject' | 'drop';
  readonly onRemove: 'keep' | 'reset';
  readonly affinityMs: number;
  readonly sourceRanges: readonly string[];
  readonly maxConnections?: number;
  readonly newConnectionsPerSecond?: number;
  readonly backends: Backend[];
  name: string;
  isPresent: boolean;
}

export const TIMEOUTS = { tcp: 300_000, tcpSyn: 60_000, tcpFin: 10_000, any: 20_000 } as const;
export const DRAIN_MS = 50_000;
export const RECOVERY_MS = 40_000;
export const AFFINITY_MS = 100_000;
export const SEED = 'model';
export const TABLE_SIZE = 251;

export const VIPS = ['10.96.0.10', '10.96.0.11'] as const;
export const POOL = ['10.96.255.1', '10.96.255.2'] as const;
export const FIRST_POOL_PORT = 40_000;
/** The last is a backend too. */
export const CLIENTS = ['10.1.0.2', '10.1.0.3', '10.2.0.11'] as const;
/** Two of the pool and one that is not. */
export const CLIENT_PORTS = [40_000, 40_001, 5000] as const;
export const SERVICES = 7;

export class World {
  readonly setup: Setup;
  readonly services: readonly Service[];
  #isReversed = false;
  #full: Config | undefined;

  constructor(setup: Setup) {
    this.setup = setup;
    const mode = setup.poolAddresses > 0 ? 'snat' : 'dnat';
    const ofService = setup.serviceLimit > 0 ? { maxConnections: setup.serviceLimit } : {};
    const ofClient = setup.clientRate > 0 ? { newConnectionsPerSecond: setup.clientRate } : {};
    const services = [
      service('web', VIPS[0], 80, 'tcp', 8080, [11, 12, 13], ofService),
      service('two', VIPS[1], 80, 'tcp', 8080, [11, 12], ofClient),
      service('lots', VIPS[0], 81, 'tcp', 8080, [11, 12], {
        algorithm: 'random',
        onRemove: 'reset',
        noBackend: 'drop',
        ...ofService,
      }),
      service('nat', VIPS[1], 81, 'tcp', 8080, [11, 13], { mode }),
      service('dns', VIPS[0], 53, 'udp', 53, [11, 12], { ...ofService, ...ofClient }),
      service('lots-dns', VIPS[1], 53, 'udp', 53, [11, 12], { algorithm: 'random', mode, onRemove: 'reset' }),
      service('sticky', VIPS[1], 82, 'tcp', 8080, [12, 13], {
        algorithm: 'random',
        affinityMs: AFFINITY_MS,
        sourceRanges: ['10.1.0.0/16'],
      }),
    ];
    const limit = setup.backendLimit > 0 ? { maxConnections: setup.backendLimit } : {};
    this.services = services.map((each) => ({
      ...each,
      // One of them has no limit.
      backends: each.backends.map((backend) => (backend.address.endsWith('13') ? backend : { ...backend, ...limit })),
    }));
  }

  get pool(): readonly string[] {
    return POOL.slice(0, this.setup.poolAddresses);
  }

  /** Other names for everything in the file, in another order: nothing that matters. */
  rearrange(generation: number): void {
    this.#isReversed = !this.#isReversed;
    for (const each of this.services.filter(({ isPresent }) => isPresent)) {
      each.name = `${each.name.split('-v')[0]}-v${generation}`;
      for (const backend of each.backends.filter(({ isPresent }) => isPresent))
        backend.name = `${backend.name.split('-v')[0]}-v${generation}`;
    }
  }

  /** What is in the file now. */
  config(): Config {
    this.#full ??= this.#parse();
    const { services, ...rest } = this.#full;
    const parsed = this.services.map((each, i) => ({ each, parsed: services[i]! }));
    return {
      ...rest,
      services: this.#arrange(parsed.filter(({ each }) => each.isPresent)).map(({ each, parsed }) => ({
        ...parsed,
        name: each.name,
        backends: this.#arrange(
          each.backends
            .map(({ name, weight, isPresent }, i) => ({ ...parsed.backends[i]!, name, weight, isPresent }))
            .filter(({ isPresent }) => isPresent),
        ),
      })),
    };
  }

  #arrange<T>(all: T[]): T[] {
    return this.#isReversed ? all.reverse() : all;
  }

  /** With everything in it. Parsing takes longer than all the rest of a run: changes are made to what came of it. */
  #parse(): Config {
    const { poolPorts } = this.setup;
    const { config, problems } = parseConfig(
      JSON.stringify({
        seed: SEED,
        maglev: { tableSize: TABLE_SIZE },
        conntrack: { timeouts: seconds(TIMEOUTS), recovery: `${RECOVERY_MS / 1000}s` },
        snat: { addresses: this.pool, ports: `${FIRST_POOL_PORT}-${FIRST_POOL_PORT + poolPorts - 1}` },
        services: this.services.map(({ isPresent: _, affinityMs, backends, ...service }) => ({
          ...service,
          drainTimeout: `${DRAIN_MS / 1000}s`,
          ...(affinityMs > 0 ? { affinity: { clientIp: `${affinityMs / 1000}s` } } : {}),
          backends: backends.map(({ isPresent: _, ...backend }) => backend),
        })),
      }),
    );
    if (config === null) throw new Error(JSON.stringify(problems));
    return config;
  }
}

/** `tcp 10.96.0.10:80 10.2.0.11:8080`: a backend of a service. */
export function keyOf(service: Service, backend: Backend): string {
  return `${keyOfService(service)} ${endpointOf(backend)}`;
}

export function keyOfService(service: Service): string {
  return `${service.protocol} ${endpointOf(service)}`;
}

export function endpointOf({ address, port }: { readonly address: string; readonly port: number }): string {
  return `${address}:${port}`;
}

export function splitEndpoint(endpoint: string): [address: string, port: number] {
  const [address, port] = endpoint.split(':');
  return [address!, Number(port)];
}

function service(
  name: string,
  address: string,
  port: number,
  protocol: 'tcp' | 'udp',
  backendPort: number,
  hosts: readonly number[],
  more: Partial<Service>,
): Service {
  return {
    name,
    address,
    port,
    protocol,
    algorithm: 'maglev',
    mode: 'dnat',
    noBackend: 'reject',
    onRemove: 'keep',
    affinityMs: 0,
    sourceRanges: [],
    isPresent: true,
    backends: hosts.map((host) => ({
      name: `b${host - 10}`,
      address: `10.2.0.${host}`,
      port: backendPort,
      weight: 1,
      isPresent: true,
    })),
    ...more,
  };
}

function seconds(timeouts: Readonly<Record<string, number>>): Record<string, string> {
  return Object.fromEntries(Object.entries(timeouts).map(([name, ms]) => [name, `${ms / 1000}s`]));
}
