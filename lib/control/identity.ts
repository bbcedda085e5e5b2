import { LRUCache } from 'lru-cache';
import { formatEndpoint } from '../wire/address.js';

/**
 * Ids for services and backends: what conntrack records hold, and rows of a snapshot. Given by identity - (VIP, port,
 * protocol), and (address, port, protocol) within a service - so that neither order nor name nor weight moves a flow, and kept for
 * removed ones as long as their flows may live. Ids begin at 1.
 */
export interface ServiceIdentity {
  readonly id: number;
  readonly vip: number;
  readonly port: number;
  readonly protocol: number;
  /** As the file calls it that is in use, or last was. */
  name: string;
}

export interface BackendIdentity {
  readonly id: number;
  readonly service: number;
  readonly address: number;
  readonly port: number;
  name: string;
}

/** What of a configured service makes its identity, and its name. */
export interface NamedService {
  readonly name: string;
  readonly address: { readonly word: number };
  readonly port: number;
  readonly protocolNumber: number;
}

/** The same of a backend. */
export interface NamedBackend {
  readonly name: string;
  readonly address: { readonly word: number };
  readonly port: number;
}

/** Names that nobody has any more, of which so many are remembered. */
const FORMER_NAMES = 10_000;

export class Identities {
  readonly #services = new Map<string, ServiceIdentity>();
  readonly #backends = new Map<string, BackendIdentity>();
  readonly #serviceRows: (ServiceIdentity | undefined)[] = [undefined];
  readonly #backendRows: (BackendIdentity | undefined)[] = [undefined];
  readonly #freeServices: number[] = [];
  readonly #freeBackends: number[] = [];
  /** Were another backend's before; until a file comes into use that has them. */
  readonly #regiven = new Set<number>();
  /** What services were called, and backends, as `service/backend`. */
  readonly #former = new LRUCache<string, true>({ max: FORMER_NAMES });

  /** The same ids for the same identities, from now on apart: neither's new ones are the other's. */
  copy(): Identities {
    const copy = new Identities();
    for (const [key, service] of this.#services) copy.#services.set(key, { ...service });
    for (const [key, backend] of this.#backends) copy.#backends.set(key, { ...backend });
    for (const service of copy.#services.values()) copy.#serviceRows[service.id] = service;
    for (const backend of copy.#backends.values()) copy.#backendRows[backend.id] = backend;
    copy.#serviceRows.length = this.#serviceRows.length;
    copy.#backendRows.length = this.#backendRows.length;
    copy.#freeServices.push(...this.#freeServices);
    copy.#freeBackends.push(...this.#freeBackends);
    for (const id of this.#regiven) copy.#regiven.add(id);
    return copy;
  }

  /** Ids are below this. */
  get serviceRows(): number {
    return this.#serviceRows.length;
  }

  get backendRows(): number {
    return this.#backendRows.length;
  }

  /** The identity of a configured service; made when it is new. One that is there keeps the name it has. */
  service({ name, address, port, protocolNumber }: NamedService): ServiceIdentity {
    const key = `${formatEndpoint(address.word, port)}/${protocolNumber}`;
    let identity = this.#services.get(key);
    if (identity === undefined) {
      const id = this.#freeServices.pop() ?? this.#serviceRows.length;
      identity = { id, vip: address.word, port, protocol: protocolNumber, name };
      this.#services.set(key, identity);
      this.#serviceRows[id] = identity;
    }
    return identity;
  }

  /** The identity of a backend of `service`; likewise. */
  backend(service: ServiceIdentity, { name, address, port }: NamedBackend): BackendIdentity {
    const key = `${service.id}/${formatEndpoint(address.word, port)}`;
    let identity = this.#backends.get(key);
    if (identity === undefined) {
      const free = this.#freeBackends.pop();
      const id = free ?? this.#backendRows.length;
      if (free !== undefined) this.#regiven.add(free);
      identity = { id, service: service.id, address: address.word, port, name };
      this.#backends.set(key, identity);
      this.#backendRows[id] = identity;
    }
    return identity;
  }

  /** Calls services and their backends as a file does that has come into use. */
  rename(services: readonly (NamedService & { readonly backends: readonly NamedBackend[] })[]): void {
    for (const service of services) {
      const identity = this.service(service);
      const before = identity.name;
      if (before !== service.name) this.#former.set(before, true);
      identity.name = service.name;
      for (const backend of service.backends) {
        const member = this.backend(identity, backend);
        if (member.name !== backend.name) this.#former.set(`${before}/${member.name}`, true);
        member.name = backend.name;
        this.#regiven.delete(member.id);
      }
    }
  }

  /** The backend of a service, configured or removed, that has an id. */
  findBackend(service: number, address: number, port: number): BackendIdentity | undefined {
    return this.#backends.get(`${service}/${formatEndpoint(address, port)}`);
  }

  /** Whether an id was given anew, to whomever, and no file that has its owner has come into use since. */
  isRegiven(id: number): boolean {
    return this.#regiven.has(id);
  }

  serviceById(id: number): ServiceIdentity | undefined {
    return this.#serviceRows[id];
  }

  backendById(id: number): BackendIdentity | undefined {
    return this.#backendRows[id];
  }

  /** Those of the file and removed ones that connections still use. */
  listServices(): ServiceIdentity[] {
    return this.#serviceRows.filter((row) => row !== undefined);
  }

  listBackends(): BackendIdentity[] {
    return this.#backendRows.filter((row) => row !== undefined);
  }

  serviceName(id: number): string | undefined {
    return this.#serviceRows[id]?.name;
  }

  backendName(id: number): string | undefined {
    return this.#backendRows[id]?.name;
  }

  /** Whether a service was called so lately. */
  wasService(name: string): boolean {
    return this.#former.has(name);
  }

  /** Whether a backend was, of this service or of any. */
  wasBackend(name: string, service?: string): boolean {
    if (service !== undefined) return this.#former.has(`${service}/${name}`);
    for (const former of this.#former.keys()) if (former.endsWith(`/${name}`)) return true;
    return false;
  }

  /** Gives up the id of a removed backend that no flow holds any more; it will be another's. */
  forgetBackend(id: number): void {
    const identity = this.#backendRows[id];
    if (identity === undefined) return;
    this.#former.set(`${this.serviceName(identity.service)}/${identity.name}`, true);
    this.#backends.delete(`${identity.service}/${formatEndpoint(identity.address, identity.port)}`);
    this.#backendRows[id] = undefined;
    this.#freeBackends.push(id);
  }

  /** The same for a removed service, after all its backends. */
  forgetService(id: number): void {
    const identity = this.#serviceRows[id];
    if (identity === undefined) return;
    this.#former.set(identity.name, true);
    this.#services.delete(`${formatEndpoint(identity.vip, identity.port)}/${identity.protocol}`);
    this.#serviceRows[id] = undefined;
    this.#freeServices.push(id);
  }
}
