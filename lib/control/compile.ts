import { buildLookup, type LookupEntry } from '../balance/lookup.js';
import { compareIdentity } from '../balance/maglev.js';
import { keyFromString } from '../base/hash.js';
import { shared, sharedFrom } from '../base/shared-arrays.js';
import type { BackendConfig, Config, ServiceConfig } from '../config/config.js';
import {
  TIMEOUT_ANY,
  TIMEOUT_COUNT,
  TIMEOUT_SERVICE_ANY,
  TIMEOUT_SERVICE_TCP,
  TIMEOUT_SERVICE_TCP_GRACE,
  TIMEOUT_TCP,
  TIMEOUT_TCP_FIN,
  TIMEOUT_TCP_SYN,
} from '../conntrack/record.js';
import type { Snapshot } from '../datapath/snapshot.js';
import * as S from '../datapath/snapshot.js';
import type { TunnelSettings } from '../tunnel/encapsulation.js';
import { INNER_ETHERNET, INNER_IPV4 } from '../wire/geneve.js';
import { nodeSettings } from './compile-node.js';
import { type PlacedRanges, placeRanges } from './compile-ranges.js';
import type { BackendIdentity, Identities, ServiceIdentity } from './identity.js';
import { type MaglevTables, placeTables, type TableParts, tableKey } from './maglev-tables.js';
import { isAtNode, type ReturnEndpoint } from './network-plan.js';

/** What a snapshot is made of besides the configuration. */
export interface CompileState {
  /** Whether a backend of `service` is up, by its health. */
  isUp(backendId: number, service: ServiceConfig): boolean;
  /** Whether a command has taken new flows from a backend. By default none has. */
  isDrained?(backendId: number): boolean;
  /** The data path's clock: removals count from here. */
  readonly nowMs: number;
  /** What this one replaces. */
  readonly previous?: Predecessor;
  /** Of a node: the endpoints whose answers the kernel leads in; without it, that is not weir's affair. */
  readonly ledIn?: readonly ReturnEndpoint[];
}

/** What the next snapshot takes over from the last. */
export interface Predecessor {
  readonly snapshot: Pick<
    Snapshot,
    'version' | 'services' | 'backends' | 'cutAt' | 'counters' | 'vipIndex' | 'snatIndex' | 'ownSince'
  >;
  readonly tables?: MaglevTables;
  readonly ranges?: PlacedRanges;
  /** How long the flows of a backend are kept after its removal, ms, by backend id. */
  readonly drainMs: ReadonlyMap<number, number>;
}

/** A snapshot and what control must remember of it to make the next. */
export interface Compiled extends Predecessor {
  readonly snapshot: Snapshot;
  readonly tables: MaglevTables;
}

interface Choice {
  readonly id: number;
  readonly address: number;
  readonly port: number;
  readonly weight: number;
}

/** A configured service under its id. */
interface Part {
  readonly service: ServiceConfig;
  readonly identity: ServiceIdentity;
  readonly backends: readonly { readonly backend: BackendConfig; readonly identity: BackendIdentity }[];
  readonly choices: readonly Choice[];
  /** The `tableKey` of its Maglev table; null: it has none. */
  readonly table: string | null;
}

const MODES = { dnat: S.MODE_DNAT, snat: S.MODE_SNAT, dsr: S.MODE_DSR } as const;

/**
 * Turns a configuration into the data path's form. Pure but for `identities`, which gives ids to what it has not seen, and the
 * counters, of which an id given anew starts at 0, and the places of Maglev tables that the last snapshot does not use. Tables whose
 * backends, weights, protocol, size and seed are as before are not built again.
 */
export function compile(config: Config, identities: Identities, state: CompileState): Compiled {
  const { previous } = state;
  const parts = config.services.map((service): Part => {
    const identity = identities.service(service);
    const backends = service.backends.map((backend) => ({ backend, identity: identities.backend(identity, backend) }));
    const choices = choicesOf(service, backends, state);
    const hasTable = service.algorithm === 'maglev' && choices.length > 0;
    const parts = { backends: choices, protocol: identity.protocol };
    const table = hasTable ? tableKey(parts, config.maglev.tableSize, config.seed) : null;
    return { service, identity, backends, choices, table };
  });

  const services = shared(Int32Array, identities.serviceRows * S.SERVICE_WORDS);
  const backends = shared(Int32Array, identities.backendRows * S.BACKEND_WORDS);
  const cutAt = shared(Float64Array, identities.backendRows);
  const counters = previous?.snapshot.counters;
  keepRemoved(services, backends, cutAt, previous?.snapshot);

  const choiceRows: number[] = [];
  const ranges = placeRanges(config.services, previous?.ranges);
  const key = keyFromString(config.seed);
  const tables = placeTables(tablesOf(parts), config.maglev.tableSize, key, previous?.tables);
  const drainMs = new Map<number, number>();
  for (const { service, identity, backends: members, choices, table } of parts) {
    const row = identity.id * S.SERVICE_WORDS;
    services[row + S.SERVICE_VIP] = identity.vip;
    services[row + S.SERVICE_PORT] = identity.port;
    services[row + S.SERVICE_PROTOCOL] = identity.protocol;
    services[row + S.SERVICE_MODE] = MODES[service.mode];
    services[row + S.SERVICE_FLAGS] =
      (service.noBackend === 'drop' ? S.NO_BACKEND_DROP : 0) |
      (service.algorithm === 'maglev' ? S.SERVICE_MAGLEV : 0) |
      (isLimited(service) ? S.SERVICE_LIMITED : 0);
    services[row + S.CHOICES_AT] = choiceRows.length / 2;
    services[row + S.CHOICES_COUNT] = choices.length;
    services[row + S.RANGES_AT] = ranges.at.get(service.sourceRanges) ?? 0;
    services[row + S.RANGES_COUNT] = service.sourceRanges.length;
    services[row + S.AFFINITY_SECONDS] = Math.ceil(service.affinityMs / 1000);
    services[row + S.SERVICE_CONNECTIONS] = service.maxConnections ?? 0;
    services[row + S.CLIENT_CONNECTIONS] = service.newConnectionsPerSecond ?? 0;
    let cumulative = 0;
    for (const choice of choices) {
      cumulative += choice.weight;
      choiceRows.push(choice.id, cumulative);
    }
    services[row + S.CHOICES_WEIGHT] = cumulative;
    services[row + S.MAGLEV_AT] = table === null ? 0 : tables.at.get(table)!;
    services[row + S.MAGLEV_SIZE] = table === null ? 0 : tables.size;
    for (const { backend, identity: member } of members) {
      const at = member.id * S.BACKEND_WORDS;
      if (counters !== undefined && identities.isRegiven(member.id)) clearCounters(counters, member.id);
      backends[at + S.BACKEND_ADDRESS] = member.address;
      backends[at + S.BACKEND_PORT] = member.port;
      backends[at + S.BACKEND_SERVICE] = identity.id;
      backends[at + S.BACKEND_NODE] = backend.node.word;
      backends[at + S.BACKEND_CONNECTIONS] = backend.maxConnections ?? 0;
      backends[at + S.BACKEND_FLAGS] = 0;
      cutAt[member.id] = Number.POSITIVE_INFINITY;
      drainMs.set(member.id, keptMs(service));
    }
    for (const choice of choices) backends[choice.id * S.BACKEND_WORDS + S.BACKEND_FLAGS] = S.TAKES_NEW;
  }
  setDeadlines(cutAt, drainMs, parts, backends, state);

  const isNode = config.role === 'node';
  const version = (previous?.snapshot.version ?? 0) + 1;
  const own = {
    vipIndex: vipIndex(isNode ? [] : config.services),
    snatIndex: buildLookup((isNode ? [] : config.snat.addresses).map(({ word }) => entry(word, 0, 0, 1))),
  };
  const snapshot: Snapshot = {
    version,
    services,
    backends,
    cutAt,
    leaving: sharedFrom(Int32Array, idsLeaving(cutAt)),
    choices: sharedFrom(Int32Array, choiceRows),
    maglev: tables.memory,
    serviceIndex: buildLookup(parts.map(({ identity: { vip, port, protocol, id } }) => entry(vip, port, protocol, id))),
    ...own,
    ownSince: hasSameAddresses(own, previous?.snapshot) ? previous!.snapshot.ownSince : version,
    endpointIndex: endpointIndex(isNode ? partsAtNode(config, parts) : parts, isNode ? 'dsr' : 'dnat'),
    tunnel: tunnelOf(config),
    nodeIndex: isNode ? buildLookup([]) : nodeIndex(services, backends),
    node: isNode ? nodeSettings(config, parts.flatMap(membersOf), state.ledIn ?? null) : null,
    ranges: ranges.blocks,
    snatAddresses: sharedFrom(
      Int32Array,
      config.snat.addresses.map(({ word }) => word),
    ),
    snatFirstPort: config.snat.firstPort,
    snatLastPort: config.snat.lastPort,
    timeouts: timeoutsOf(config),
    hashKey0: key.k0,
    hashKey1: key.k1,
    dropUntracked: config.network.untracked === 'drop',
    recoveryMs: config.conntrack.recoveryMs,
    counters: countersFor(identities.backendRows, counters),
  };
  return { snapshot, tables, ranges, drainMs: mergeDrain(previous?.drainMs, drainMs) };
}

function isLimited({ maxConnections, newConnectionsPerSecond, backends }: ServiceConfig): boolean {
  const limits = [maxConnections, newConnectionsPerSecond, ...backends.map((backend) => backend.maxConnections)];
  return limits.some((limit) => limit !== null);
}

/** The backends that take new flows, by identity: the order Maglev and the lots depend on. */
function choicesOf(service: ServiceConfig, members: Part['backends'], state: CompileState): Choice[] {
  const willing = members.filter(({ backend, identity }) => backend.weight > 0 && !state.isDrained?.(identity.id));
  const up = willing.filter(({ identity }) => state.isUp(identity.id, service));
  const taking = up.length === 0 && service.allDown === 'use-all' ? willing : up;
  return taking
    .map(({ backend: { weight }, identity: { id, address, port } }) => ({ id, address, port, weight }))
    .sort(compareIdentity);
}

/** What each Maglev table is made of. Services with the same backends share one. */
function tablesOf(parts: readonly Part[]): Map<string, TableParts> {
  const wanted = new Map<string, TableParts>();
  for (const { table, identity, choices } of parts) {
    if (table !== null) wanted.set(table, { backends: choices, protocol: identity.protocol });
  }
  return wanted;
}

/** Rows of what the configuration no longer has: their flows go on by the records, and must find them as they were. */
function keepRemoved(
  services: Int32Array,
  backends: Int32Array,
  cutAt: Float64Array,
  previous: Predecessor['snapshot'] | undefined,
): void {
  cutAt.fill(Number.POSITIVE_INFINITY);
  if (previous === undefined) return;
  services.set(previous.services);
  backends.set(previous.backends);
  cutAt.set(previous.cutAt);
  for (let row = 0; row < services.length; row += S.SERVICE_WORDS) {
    services[row + S.SERVICE_FLAGS]! |= S.SERVICE_REMOVED;
    services[row + S.CHOICES_COUNT] = 0;
    services[row + S.MAGLEV_SIZE] = 0;
  }
  for (let row = 0; row < backends.length; row += S.BACKEND_WORDS) backends[row + S.BACKEND_FLAGS] = 0;
}

/**
 * A backend that left with this snapshot is cut after the drain time its service has now, or last had; one that left before keeps
 * its deadline.
 */
function setDeadlines(
  cutAt: Float64Array,
  configured: ReadonlyMap<number, number>,
  parts: readonly Part[],
  backends: Int32Array,
  { nowMs, previous }: CompileState,
): void {
  const serviceDrainMs = new Map(parts.map(({ service, identity }) => [identity.id, keptMs(service)]));
  for (const [id, lastDrainMs] of previous?.drainMs ?? []) {
    if (configured.has(id) || cutAt[id] !== Number.POSITIVE_INFINITY) continue;
    cutAt[id] = nowMs + (serviceDrainMs.get(backends[id * S.BACKEND_WORDS + S.BACKEND_SERVICE]!) ?? lastDrainMs);
  }
}

/** Nothing counts in the row of a backend that was not there. */
function clearCounters(counters: Float64Array, id: number): void {
  counters.fill(0, id * S.COUNTER_ROWS, (id + 1) * S.COUNTER_ROWS);
}

/** How long flows outlive their backend's removal. */
function keptMs({ onRemove, drainMs }: ServiceConfig): number {
  return onRemove === 'reset' ? 0 : drainMs;
}

function mergeDrain(
  before: ReadonlyMap<number, number> | undefined,
  now: ReadonlyMap<number, number>,
): ReadonlyMap<number, number> {
  return new Map([...(before ?? []), ...now]);
}

function vipIndex(services: readonly ServiceConfig[]): Int32Array {
  const bits = new Map<number, number>();
  for (const { address, icmpEcho } of services) {
    bits.set(address.word, (bits.get(address.word) ?? S.VIP_KNOWN) | (icmpEcho ? S.VIP_ECHO : 0));
  }
  return buildLookup([...bits].map(([address, value]) => entry(address, 0, 0, value)));
}

type OwnAddresses = Pick<Snapshot, 'vipIndex' | 'snatIndex'>;

function hasSameAddresses(a: OwnAddresses, b: OwnAddresses | undefined): boolean {
  return b !== undefined && isSame(a.vipIndex, b.vipIndex) && isSame(a.snatIndex, b.snatIndex);
}

function isSame(a: Int32Array, b: Int32Array): boolean {
  return a.length === b.length && a.every((word, i) => word === b[i]);
}

function idsLeaving(cutAt: Float64Array): number[] {
  const ids: number[] = [];
  for (let id = 0; id < cutAt.length; id++) if (cutAt[id] !== Number.POSITIVE_INFINITY) ids.push(id);
  return ids;
}

/** Those backends of each service that a node answers for. */
function partsAtNode(config: Config, parts: readonly Part[]): Part[] {
  return parts.map((part) => ({
    ...part,
    backends: part.backends.filter(({ backend }) => isAtNode(config, part.service, backend)),
  }));
}

function membersOf({ identity: { id, protocol }, backends }: Part) {
  return backends.map(({ identity: { id: backend, address, port } }) => ({
    service: id,
    backend,
    address,
    port,
    protocol,
  }));
}

/** @param mode of services that replies may be picked up for */
function endpointIndex(parts: readonly Part[], mode: ServiceConfig['mode']): Int32Array {
  const owners = new Map<string, { backend: BackendIdentity; protocol: number; maglev: number[] }>();
  for (const { service, identity, backends } of parts) {
    for (const { identity: backend } of backends) {
      const key = `${backend.address}:${backend.port}/${identity.protocol}`;
      const owner = owners.get(key) ?? { backend, protocol: identity.protocol, maglev: [] };
      if (service.algorithm === 'maglev' && service.mode === mode) owner.maglev.push(identity.id);
      owners.set(key, owner);
    }
  }
  return buildLookup(
    [...owners.values()].map(({ backend: { address, port }, protocol, maglev }) =>
      entry(address, port, protocol, maglev.length === 1 ? maglev[0]! : -1),
    ),
  );
}

function tunnelOf({ tunnel, device }: Config): TunnelSettings {
  return {
    address: (tunnel.address?.word ?? 0) | 0,
    port: tunnel.port,
    vni: tunnel.vni,
    inner: tunnel.inner === 'ethernet' ? INNER_ETHERNET : INNER_IPV4,
    isOptionAlways: tunnel.option === 'always',
    mtu: device.mtu,
  };
}

/** Nodes of removed backends too, while flows to them are kept. */
function nodeIndex(services: Int32Array, backends: Int32Array): Int32Array {
  const nodes: LookupEntry[] = [];
  for (let at = S.BACKEND_WORDS; at < backends.length; at += S.BACKEND_WORDS) {
    const service = backends[at + S.BACKEND_SERVICE]! * S.SERVICE_WORDS;
    if (services[service + S.SERVICE_MODE] === S.MODE_DSR) nodes.push(entry(backends[at + S.BACKEND_NODE]!, 0, 0, 1));
  }
  return buildLookup(nodes);
}

function timeoutsOf({ conntrack: { timeoutsMs } }: Config): Float64Array {
  const timeouts = shared(Float64Array, TIMEOUT_COUNT);
  timeouts[TIMEOUT_TCP] = timeoutsMs.tcp;
  timeouts[TIMEOUT_TCP_SYN] = timeoutsMs.tcpSyn;
  timeouts[TIMEOUT_TCP_FIN] = timeoutsMs.tcpFin;
  timeouts[TIMEOUT_ANY] = timeoutsMs.any;
  timeouts[TIMEOUT_SERVICE_TCP] = timeoutsMs.serviceTcp;
  timeouts[TIMEOUT_SERVICE_ANY] = timeoutsMs.serviceAny;
  timeouts[TIMEOUT_SERVICE_TCP_GRACE] = timeoutsMs.serviceTcpGrace;
  return timeouts;
}

/** Room to grow, so that most reloads keep the array; a larger one takes the counts along. */
function countersFor(rows: number, previous: Float64Array | undefined): Float64Array {
  const wanted = rows * S.COUNTER_ROWS;
  if (previous !== undefined && previous.length >= wanted) return previous;
  const counters = shared(Float64Array, Math.max(64, 2 * rows) * S.COUNTER_ROWS);
  if (previous !== undefined) counters.set(previous);
  return counters;
}

function entry(address: number, port: number, protocol: number, value: number): LookupEntry {
  return { address, port, protocol, value };
}
