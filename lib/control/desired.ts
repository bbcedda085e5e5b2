import type { BackendConfig, Config, HealthConfig, ServiceConfig } from '../config/config.js';
import type { Snapshot } from '../datapath/snapshot.js';
import * as S from '../datapath/snapshot.js';
import { type Compiled, compile, type Predecessor } from './compile.js';
import { type BackendIdentity, Identities, type ServiceIdentity } from './identity.js';
import { type NetworkNeeds, NO_NEEDS, networkNeeds, type ReturnEndpoint } from './network-plan.js';
import { countedNames, PastCounts } from './past-counts.js';
import { mergeNeeds, needsWithout } from './retained-needs.js';
import type { Survivors } from './survivors.js';

/** What an earlier run has left. */
export interface Earlier {
  readonly survivors?: Survivors | undefined;
  readonly learned?: readonly ReturnEndpoint[];
}

/**
 * What weir is to do: a configuration, the ids its parts have, what health checks and commands say of its backends, and the
 * snapshot made of all that. A new one is first a `Proposal`; nothing changes until it is taken. What left the file is remembered
 * as long as flows need it (`forget`).
 *
 * A backend drained by command counts as one of weight 0, until a command ends that, or the file does: by giving the backend
 * another weight, or by leaving it out.
 */
export class Desired {
  readonly identities: Identities;
  /** Of a node: endpoints that are not in the file and whose answers are to be led in all the same; learned.ts. */
  learned: readonly ReturnEndpoint[];
  #config: Config;
  #compiled: Compiled;
  readonly #isUp: (backend: BackendIdentity) => boolean;
  readonly #isAssumedDown: (id: number) => boolean;
  /** Drained by command; with the weight they had in the file then. */
  #drained: Drained;
  /** What the kernel must lead in for flows that began under another configuration, and this one does not ask for. */
  #retained: NetworkNeeds;
  /** What others have counted under the names there are. */
  readonly past = new PastCounts();

  /**
   * @param nowMs the data path's clock
   * @param earlier what an earlier run has left: its connections, and of a node the endpoints it had learned (the first snapshot has
   *   no endpoint at all as led in, since the kernel's rules come later)
   * @param isUp whether a backend is up, by its health; asked about those only that are checked
   * @param forked of a fork: what the other one has
   */
  constructor(
    config: Config,
    nowMs: number,
    { survivors, learned = [] }: Earlier = {},
    isUp: (backend: BackendIdentity) => boolean = () => true,
    forked?: Forked,
  ) {
    this.#config = config;
    this.#isUp = isUp;
    this.#isAssumedDown = forked?.isAssumedDown ?? (() => false);
    this.learned = learned;
    this.identities = forked?.identities ?? survivors?.identities ?? new Identities();
    this.#drained = forked?.drained ?? new Map();
    this.#retained = forked?.retained ?? needsLeft(survivors?.needs ?? NO_NEEDS, config);
    this.#compiled = forked?.compiled ?? this.#compile(config, nowMs, this.#drained, survivors?.previous, []);
    if (forked === undefined) this.identities.rename(config.services);
  }

  /**
   * Another one that is the same and goes its own way: for trying a proposal out. Nothing that becomes of it is seen here.
   *
   * @param isAssumedDown of backends, by their ids: they count as down, whether or not they are checked
   */
  fork(isAssumedDown: (id: number) => boolean = () => false): Desired {
    const identities = this.identities.copy();
    const own = ({ id }: BackendIdentity): BackendIdentity => identities.backendById(id)!;
    const isUp = ({ id }: BackendIdentity): boolean => {
      const known = this.identities.backendById(id);
      return known === undefined || this.#isUp(known);
    };
    return new Desired(this.#config, 0, { learned: this.learned }, isUp, {
      identities,
      isAssumedDown,
      drained: new Map([...this.#drained].map(([backend, weight]) => [own(backend), weight])),
      retained: this.#retained,
      // It may not write to the tables of the snapshot in use.
      compiled: { ...this.#compiled, tables: { ...this.#compiled.tables, isOwn: false } },
    });
  }

  get config(): Config {
    return this.#config;
  }

  get snapshot(): Snapshot {
    return this.#compiled.snapshot;
  }

  /** The snapshot, and what the next will be made of. */
  get compiled(): Compiled {
    return this.#compiled;
  }

  /** @param config the one in use when something else has changed */
  propose(config: Config, nowMs: number): Proposal {
    const drained = this.#stillDrained(config);
    const ledIn = [...networkNeeds(config).endpoints, ...this.learned];
    const retained = needsLeft(mergeNeeds(networkNeeds(this.#config), this.#retained), config);
    return { config, drained, retained, compiled: this.#compile(config, nowMs, drained, this.#compiled, ledIn) };
  }

  /** Puts a proposal to use; only now are its parts called as it calls them. */
  take({ config, drained, retained, compiled }: Proposal): void {
    const names = config === this.#config ? null : countedNames(this.identities);
    this.#config = config;
    this.#drained = drained;
    this.#retained = retained;
    this.#compiled = compiled;
    this.identities.rename(config.services);
    if (names !== null) this.past.follow(names, countedNames(this.identities), compiled.snapshot.counters);
  }

  isDrained(backend: BackendIdentity): boolean {
    return this.#drained.has(backend);
  }

  /** Drained backends that a proposal gives back, since the file says something else of them. */
  releasedBy({ drained }: Proposal): BackendIdentity[] {
    return [...this.#drained.keys()].filter((backend) => !drained.has(backend));
  }

  /** What a command says of a configured backend. Shows in the next proposal. */
  setDrained(backend: BackendIdentity, weight: number, isDrained: boolean): void {
    const drained = new Map(this.#drained);
    if (isDrained) drained.set(backend, weight);
    else drained.delete(backend);
    this.#drained = drained;
  }

  /** The configured backends that are to be checked. */
  checked(): { service: ServiceIdentity; backend: BackendIdentity; check: HealthConfig }[] {
    return this.#config.services.flatMap((service) => {
      const { health } = service;
      if (health === null) return [];
      const identity = this.identities.service(service);
      return service.backends.map((backend) => ({
        service: identity,
        backend: this.identities.backend(identity, backend),
        check: health,
      }));
    });
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

  /** What of earlier configurations flows may need of the kernel. */
  get retained(): NetworkNeeds {
    return this.#retained;
  }

  /** What the kernel must lead into the device besides what the file says. */
  retainedNeeds({ retained }: Pick<Proposal, 'retained'> = this): NetworkNeeds {
    return { addresses: retained.addresses, endpoints: [...retained.endpoints, ...this.learned] };
  }

  /**
   * Forgets removed backends that no flow uses, and removed services without backends; their ids will be others'. And what is
   * retained of the network, but for what flows use.
   *
   * @param flows live flows by backend id, counted since the last snapshot came into use
   * @param used of `retained`, found since then
   * @returns how many backends and services were forgotten and how many are still kept
   */
  forget(flows: Float64Array, used: NetworkNeeds): { readonly forgotten: number; readonly kept: number } {
    const { identities } = this;
    this.#retained = used;
    let forgotten = 0;
    const keptServices = new Set<number>();
    const removed = this.removedBackends();
    const names = removed.length === 0 ? null : countedNames(identities);
    for (const { id, service } of removed) {
      if (flows[id]! > 0) {
        keptServices.add(service);
        continue;
      }
      this.past.keep(names!.get(id)!, this.snapshot.counters, id);
      identities.forgetBackend(id);
      forgotten++;
    }
    const kept = removed.length - forgotten;
    for (const { id } of this.removedServices()) {
      if (keptServices.has(id)) continue;
      identities.forgetService(id);
      forgotten++;
    }
    if (forgotten > 0) this.past.dropUnused(countedNames(identities));
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

  /** @param ledIn of a node; where somebody else sees to the network, it does not know and does not ask */
  #compile(
    config: Config,
    nowMs: number,
    drained: Drained,
    previous: Predecessor | undefined,
    ledIn: readonly ReturnEndpoint[],
  ): Compiled {
    const identityOf = (id: number): BackendIdentity => this.identities.backendById(id)!;
    return compile(config, this.identities, {
      isUp: (id, { health }) => !this.#isAssumedDown(id) && (health === null || this.#isUp(identityOf(id))),
      isDrained: (id) => drained.has(identityOf(id)),
      nowMs,
      ...(previous === undefined ? {} : { previous }),
      ...(config.role === 'node' && config.network.manage ? { ledIn } : {}),
    });
  }

  #stillDrained(config: Config): Drained {
    const drained = new Map<BackendIdentity, number>();
    if (this.#drained.size === 0) return drained;
    for (const service of config.services) {
      const identity = this.identities.service(service);
      for (const backend of service.backends) {
        const member = this.identities.backend(identity, backend);
        if (this.#drained.get(member) === backend.weight) drained.set(member, backend.weight);
      }
    }
    return drained;
  }
}

type Drained = ReadonlyMap<BackendIdentity, number>;

/** Needs that a configuration does not see to. A node's VIPs are its gateways' affair. */
function needsLeft(needs: NetworkNeeds, config: Config): NetworkNeeds {
  const left = needsWithout(needs, networkNeeds(config));
  return config.role === 'node' ? { ...left, addresses: [] } : left;
}

/** What a fork goes on from. */
interface Forked {
  readonly identities: Identities;
  readonly drained: Drained;
  readonly retained: NetworkNeeds;
  readonly compiled: Compiled;
  isAssumedDown(id: number): boolean;
}

/** What could be used next. */
export interface Proposal {
  readonly config: Config;
  readonly drained: Drained;
  readonly retained: NetworkNeeds;
  readonly compiled: Compiled;
}
