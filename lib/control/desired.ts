import type { BackendConfig, Config, ServiceConfig } from '../config/config.js';
import type { Snapshot } from '../datapath/snapshot.js';
import * as S from '../datapath/snapshot.js';
import { formatIpv4 } from '../wire/address.js';
import { type Compiled, compile } from './compile.js';
import { type BackendIdentity, Identities, type ServiceIdentity } from './identity.js';
import { type NetworkNeeds, networkNeeds, type ReturnEndpoint } from './network-plan.js';
import type { Survivors } from './survivors.js';

/** What an earlier run has left. */
export interface Earlier {
  readonly survivors?: Survivors | undefined;
  readonly learned?: readonly ReturnEndpoint[];
}

/**
 * What weir is to do: a configuration, the ids its parts have, and the snapshot made of them. A new configuration is first
 * a `Proposal`; nothing changes until it is taken. What left the file is remembered as long as flows need it (`forget`).
 */
export class Desired {
  readonly identities: Identities;
  /** Of a node: endpoints that are not in the file and whose answers are to be led in all the same; learned.ts. */
  learned: readonly ReturnEndpoint[];
  #config: Config;
  #compiled: Compiled;
  #isUp: (backendId: number) => boolean;

  /**
   * @param nowMs the data path's clock
   * @param earlier what an earlier run has left: its connections, and of a node the endpoints it had learned (the first snapshot has
   *   no endpoint at all as led in, since the kernel's rules come later)
   * @param isUp whether a backend may have new flows, by its health
   */
  constructor(
    config: Config,
    nowMs: number,
    { survivors, learned = [] }: Earlier = {},
    isUp: (backendId: number) => boolean = () => true,
  ) {
    this.#config = config;
    this.#isUp = isUp;
    this.learned = learned;
    this.identities = survivors?.identities ?? new Identities();
    const previous = survivors === undefined ? {} : { previous: survivors.previous };
    this.#compiled = compile(config, this.identities, { isUp, nowMs, ...previous, ...this.#ledIn(config, []) });
  }

  get config(): Config {
    return this.#config;
  }

  get snapshot(): Snapshot {
    return this.#compiled.snapshot;
  }

  propose(config: Config, nowMs: number): Proposal {
    const ledIn = this.#ledIn(config, [...networkNeeds(config).endpoints, ...this.learned]);
    return {
      config,
      compiled: compile(config, this.identities, { isUp: this.#isUp, nowMs, previous: this.#compiled, ...ledIn }),
    };
  }

  /** Where somebody else sees to the network, a node does not know and does not ask. */
  #ledIn({ role, network }: Config, ledIn: readonly ReturnEndpoint[]): { ledIn?: readonly ReturnEndpoint[] } {
    return role === 'node' && network.manage ? { ledIn } : {};
  }

  take({ config, compiled }: Proposal): void {
    this.#config = config;
    this.#compiled = compiled;
  }

  /** Services of the last snapshot that are not in the file. */
  removedServices({ snapshot }: Compiled = this.#compiled): ServiceIdentity[] {
    const removed: ServiceIdentity[] = [];
    for (let id = 1; id * S.SERVICE_WORDS < snapshot.services.length; id++) {
      const identity = this.identities.serviceById(id);
      if (identity && snapshot.services[id * S.SERVICE_WORDS + S.SERVICE_FLAGS]! & S.SERVICE_REMOVED) {
        removed.push(identity);
      }
    }
    return removed;
  }

  /** Backends of the last snapshot that are not in the file. */
  removedBackends({ snapshot }: Compiled = this.#compiled): BackendIdentity[] {
    const removed: BackendIdentity[] = [];
    for (let id = 1; id < snapshot.cutAt.length; id++) {
      const identity = this.identities.backendById(id);
      if (identity && snapshot.cutAt[id] !== Number.POSITIVE_INFINITY) removed.push(identity);
    }
    return removed;
  }

  /** What the kernel must lead into the device besides what the file says: for flows whose service or backend has left it. */
  retainedNeeds(compiled: Compiled = this.#compiled): NetworkNeeds {
    const { services } = compiled.snapshot;
    const isNode = this.#config.role === 'node';
    const mode = isNode ? S.MODE_DSR : S.MODE_DNAT;
    const removed = this.removedBackends(compiled)
      .filter(({ id, service }) => {
        const isLedIn = services[service * S.SERVICE_WORDS + S.SERVICE_MODE] === mode;
        return isLedIn && (!isNode || this.#isHere(compiled, id));
      })
      .map(({ address, port, service }) => ({
        address: formatIpv4(address),
        port,
        protocol: services[service * S.SERVICE_WORDS + S.SERVICE_PROTOCOL]!,
      }));
    return {
      addresses: isNode ? [] : this.removedServices(compiled).map(({ vip }) => formatIpv4(vip)),
      endpoints: [...removed, ...this.learned],
    };
  }

  /** Whether a backend's tunnel ends at this node. */
  #isHere({ snapshot }: Compiled, backend: number): boolean {
    return snapshot.backends[backend * S.BACKEND_WORDS + S.BACKEND_NODE] === snapshot.tunnel.address;
  }

  /**
   * Forgets removed backends that no flow uses, and removed services without backends; their ids will be others'.
   *
   * @param flows live flows by backend id, counted since the last snapshot came into use
   * @returns how many were forgotten and how many are still kept
   */
  forget(flows: Float64Array): { readonly forgotten: number; readonly kept: number } {
    const { identities } = this;
    let forgotten = 0;
    const keptServices = new Set<number>();
    const removed = this.removedBackends();
    for (const { id, service } of removed) {
      if (flows[id]! > 0) {
        keptServices.add(service);
        continue;
      }
      identities.forgetBackend(id);
      forgotten++;
    }
    const kept = removed.length - forgotten;
    for (const { id } of this.removedServices()) {
      if (keptServices.has(id)) continue;
      identities.forgetService(id);
      forgotten++;
    }
    return { forgotten, kept };
  }

  /** The configured services with their ids, each followed by its configured backends with theirs. */
  configured(): { service: ServiceConfig; id: number; backends: { backend: BackendConfig; id: number }[] }[] {
    return this.#config.services.map((service) => {
      const identity = this.identities.service(service);
      const backends = service.backends.map((backend) => ({
        backend,
        id: this.identities.backend(identity, backend).id,
      }));
      return { service, id: identity.id, backends };
    });
  }
}

/** A configuration that could be used next. */
export interface Proposal {
  readonly config: Config;
  readonly compiled: Compiled;
}
