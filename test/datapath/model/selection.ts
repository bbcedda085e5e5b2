import { flowHash } from '../../../lib/balance/flow-hash.js';
import { maglevTable } from '../../../lib/balance/maglev.js';
import { keyFromString } from '../../../lib/base/hash.js';
import { addressWord } from '../../fixtures/packets.js';
import type { Outcome } from '../../support/pipeline.js';
import { type Flow, type Flows, isClosing } from './flows.js';
import type { Packet } from './packets.js';
import { isOpening } from './tcp.js';
import {
  type Backend,
  endpointOf,
  FIRST_POOL_PORT,
  keyOf,
  keyOfService,
  SEED,
  type Service,
  splitEndpoint,
  TABLE_SIZE,
  type World,
} from './world.js';

/** Where a new flow may go, and the sources it may have towards there; or why it may not. */
export type Route = { readonly backend: Backend; readonly sources: readonly string[] } | { readonly refusal: string };

/**
 * Rules 3 and 4: which backend a new flow gets, and which source. Where lots are drawn there are several routes; the one that was
 * taken must be among them.
 */
export class Selection {
  readonly #world: World;
  readonly #flows: Flows;
  readonly #down = new Set<string>();
  readonly #sticky = new Map<string, { backendKey: string; untilMs: number }>();
  /** The pool address a client's flows begin with, once it showed. */
  readonly #firstAddress = new Map<string, string>();

  constructor(world: World, flows: Flows) {
    this.#world = world;
    this.#flows = flows;
  }

  setHealth(service: Service, backend: Backend, isUp: boolean): void {
    if (isUp) this.#down.delete(keyOf(service, backend));
    else this.#down.add(keyOf(service, backend));
  }

  takesNew(service: Service, backend: Backend): boolean {
    return service.isPresent && backend.isPresent && backend.weight > 0 && !this.#down.has(keyOf(service, backend));
  }

  /** The backends that take new flows, by identity. */
  choices(service: Service): Backend[] {
    return service.backends
      .filter((backend) => this.takesNew(service, backend))
      .sort((a, b) => addressWord(a.address) - addressWord(b.address) || a.port - b.port);
  }

  /** Those of the choices that may be chosen: one, or any where lots are drawn. */
  starts(client: string, service: Service, choices: readonly Backend[], nowMs: number): Backend[] {
    const sticky = this.#sticky.get(`${keyOfService(service)} ${splitEndpoint(client)[0]}`);
    if (service.affinityMs > 0 && sticky !== undefined && sticky.untilMs > nowMs) {
      const again = choices.find((backend) => keyOf(service, backend) === sticky.backendKey);
      if (again) return [again];
    }
    return service.algorithm === 'random' ? [...choices] : [this.hashed(client, service, choices)];
  }

  /**
   * Where a connection may begin whose choice, by lot, hash or affinity, is one of `starts`: there if there is room, else with the next
   * in the Maglev table, or with any.
   */
  withRoom(client: string, service: Service, choices: readonly Backend[], starts: readonly Backend[]): Backend[] {
    const { maxConnections = Number.POSITIVE_INFINITY, algorithm } = service;
    const open = [...this.#flows].filter((flow) => flow.service === service && !isClosing(flow)).length;
    if (open >= maxConnections) return [];
    const [only, another] = starts;
    if (another === undefined && this.hasRoom(service, only!)) return [only!];
    if (algorithm === 'random') return choices.filter((backend) => this.hasRoom(service, backend));
    const next = this.#ring(client, service, choices).find((backend) => this.hasRoom(service, backend));
    return next === undefined ? [] : [next];
  }

  hasRoom(service: Service, backend: Backend): boolean {
    const { maxConnections = Number.POSITIVE_INFINITY } = backend;
    const key = keyOf(service, backend);
    return [...this.#flows].filter((flow) => flow.backendKey === key && !isClosing(flow)).length < maxConnections;
  }

  /**
   * A new flow has been made: its client is remembered.
   *
   * @param isElsewhere where it belongs there was no room, and it goes on belonging there
   */
  stick({ client, service, backendKey }: Flow, isElsewhere: boolean, nowMs: number): void {
    if (service.affinityMs === 0) return;
    const key = `${keyOfService(service)} ${splitEndpoint(client)[0]}`;
    const home = isElsewhere ? this.#sticky.get(key)! : { backendKey };
    this.#sticky.set(key, { backendKey: home.backendKey, untilMs: nowMs + service.affinityMs });
  }

  /** Whether affinity has sent the client to the only one of `starts`. */
  isSticky(client: string, service: Service, starts: readonly Backend[], nowMs: number): boolean {
    const sticky = this.#sticky.get(`${keyOfService(service)} ${splitEndpoint(client)[0]}`);
    const isLive = service.affinityMs > 0 && sticky !== undefined && sticky.untilMs > nowMs;
    return isLive && starts.length === 1 && sticky.backendKey === keyOf(service, starts[0]!);
  }

  /** What Maglev chooses; its tables have tests of their own. */
  hashed(client: string, service: Service, choices: readonly Backend[]): Backend {
    return this.#ring(client, service, choices)[0]!;
  }

  /** Its table, in the order in which the client's flow goes through it. */
  #ring(client: string, { protocol, port }: Service, choices: readonly Backend[]): Backend[] {
    const number = protocol === 'tcp' ? 6 : 17;
    const members = choices.map(({ address, port, weight }) => ({ address: addressWord(address), port, weight }));
    const name = [number, ...members.map((member) => `${member.address}:${member.port}*${member.weight}`)].join();
    let table = tables.get(name);
    if (table === undefined) {
      table = maglevTable(members, number, TABLE_SIZE, KEY);
      tables.set(name, table);
    }
    const [address, clientPort] = splitEndpoint(client);
    const hash = flowHash(KEY.k0, KEY.k1, addressWord(address), clientPort, port, number);
    const step = 1 + (Math.floor(hash / TABLE_SIZE) % (TABLE_SIZE - 1));
    return Array.from(table, (_, i) => choices[table[(hash + i * step) % TABLE_SIZE]!]!);
  }

  /** Where a flow goes whose lot or hash is `start`; of the others, those that have room if it begins. */
  route(packet: Packet, service: Service, choices: readonly Backend[], start: Backend, begins: boolean): Route {
    const { protocol, source } = packet;
    const hasPool = this.#world.pool.length > 0;
    if (service.mode === 'snat') return this.#translated(packet, start);
    const first = choices.indexOf(start);
    for (const backend of [...choices.slice(first), ...choices.slice(0, first)]) {
      if (begins && backend !== start && !this.hasRoom(service, backend)) continue;
      const isHairpin = backend.address === splitEndpoint(source)[0];
      if (isHairpin && hasPool) return this.#translated(packet, backend);
      if (isHairpin && backend === start) return { refusal: 'hairpin-refused' };
      if (isHairpin) continue;
      const owner = this.owner(protocol, backend, source);
      if (owner === undefined || isClosing(owner)) return { backend, sources: [source] };
      if (hasPool) return this.#translated(packet, backend);
    }
    return { refusal: 'reply-tuple-clash' };
  }

  /** Whose packets those of this backend to this source would be. */
  owner(protocol: string, backend: Backend, source: string): Flow | undefined {
    return this.#flows.find(protocol, endpointOf(backend), source)?.[0];
  }

  /** The source that was taken, if it may be; any of them, if nothing was sent. */
  sourceOf(sources: readonly string[], { protocol, source }: Packet, backend: Backend, { out }: Outcome): string {
    if (out.length === 0 || sources.includes(source)) return sources[0]!;
    const { bytes } = out[0]!;
    const taken = `${bytes.subarray(12, 16).join('.')}:${(bytes[20]! << 8) | bytes[21]!}`;
    if (!sources.includes(taken)) throw new Error(`source ${taken} is none of ${sources}`);
    const isFirst = this.#world.pool.every((address) => this.#freePorts(protocol, backend, address).length > 0);
    if (isFirst) this.#firstAddress.set(splitEndpoint(source)[0], splitEndpoint(taken)[0]);
    return taken;
  }

  /** The sources of the pool that a flow to this backend may have; which one it had is lost in its middle. */
  #translated({ protocol, source, segment }: Packet, backend: Backend): Route {
    if (segment && !isOpening(segment)) return { refusal: 'rst-mid-stream' };
    const { pool } = this.#world;
    const [client, clientPort] = splitEndpoint(source);
    const first = this.#firstAddress.get(client);
    const sources = (first === undefined ? pool : [first]).flatMap((start) => {
      const order = [start, ...pool.filter((each) => each !== start)];
      const address = order.find((each) => this.#freePorts(protocol, backend, each).length > 0);
      if (address === undefined) return [];
      const free = this.#freePorts(protocol, backend, address);
      return (free.includes(clientPort) ? [clientPort] : free).map((port) => `${address}:${port}`);
    });
    return sources.length > 0 ? { backend, sources } : { refusal: 'no-snat-port' };
  }

  #freePorts(protocol: string, backend: Backend, address: string): number[] {
    const ports = Array.from({ length: this.#world.setup.poolPorts }, (_, i) => FIRST_POOL_PORT + i);
    return ports.filter((port) => this.owner(protocol, backend, `${address}:${port}`) === undefined);
  }
}

const KEY = keyFromString(SEED);
const tables = new Map<string, Uint16Array>();
