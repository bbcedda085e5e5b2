import type { BackendConfig, ServiceConfig } from '../config/config.js';
import * as S from '../datapath/snapshot.js';
import { formatIpv4 } from '../wire/address.js';
import { PROTO_TCP } from '../wire/ipv4.js';
import type { Census } from './census.js';
import type { Desired } from './desired.js';
import type { BackendHealth, HealthChecker } from './health/checker.js';
import type { BackendIdentity } from './identity.js';
import type { BackendView, CountsView, HealthView, ServiceView } from './view.js';

/** Where is known what services have. */
export interface ServiceSources {
  readonly desired: Desired;
  readonly checker: Pick<HealthChecker, 'healthOf'>;
}

/** A service with its backends: those of the file in its order, then removed ones. */
export interface ListedService {
  readonly id: number;
  /** null: it has left the file. */
  readonly written: ServiceConfig | null;
  readonly members: readonly { readonly identity: BackendIdentity; readonly written: BackendConfig | null }[];
}

/** The services of the file in its order, then removed ones that connections still use. */
export function* listServices(desired: Desired): Generator<ListedService, void, void> {
  const removed = new Map<number, ListedService['members'][number][]>();
  for (const identity of desired.removedBackends()) {
    const members = removed.get(identity.service) ?? [];
    members.push({ identity, written: null });
    removed.set(identity.service, members);
  }
  for (const { service, id, backends } of desired.configured()) {
    const members = backends.map(({ backend, id }) => ({
      identity: desired.identities.backendById(id)!,
      written: backend,
    }));
    yield { id, written: service, members: [...members, ...(removed.get(id) ?? [])] };
  }
  for (const { id } of desired.removedServices()) yield { id, written: null, members: removed.get(id) ?? [] };
}

/** @param census what is live; backends that came after it have nothing yet */
export function viewService(
  { id, written, members }: ListedService,
  sources: ServiceSources,
  census: Census,
): ServiceView {
  const backends = members.map((member) => viewBackend(member, sources, census));
  const common = { open: backends.reduce((sum, { open }) => sum + open, 0), backends };
  if (written !== null) {
    return {
      name: written.name,
      address: written.address.text,
      port: written.port,
      protocol: written.protocol,
      algorithm: written.algorithm,
      mode: written.mode,
      removed: false,
      maxConnections: written.maxConnections,
      newConnectionsPerSecond: written.newConnectionsPerSecond,
      ...common,
    };
  }
  const { name, vip, port, protocol } = sources.desired.identities.serviceById(id)!;
  const { services } = sources.desired.snapshot;
  const row = id * S.SERVICE_WORDS;
  return {
    name,
    address: formatIpv4(vip),
    port,
    protocol: protocol === PROTO_TCP ? 'tcp' : 'udp',
    algorithm: services[row + S.SERVICE_FLAGS]! & S.SERVICE_MAGLEV ? 'maglev' : 'random',
    mode: ['dnat', 'snat', 'dsr'][services[row + S.SERVICE_MODE]!]!,
    removed: true,
    maxConnections: null,
    newConnectionsPerSecond: null,
    ...common,
  };
}

function viewBackend(
  { identity, written }: ListedService['members'][number],
  { desired, checker }: ServiceSources,
  census: Census,
): BackendView {
  const { id, name, address, port } = identity;
  const removed = written === null;
  const weight = written?.weight ?? 0;
  const { counters, backends } = desired.snapshot;
  const counts = counters.subarray(id * S.COUNTER_ROWS, (id + 1) * S.COUNTER_ROWS);
  const health = checker.healthOf(identity);
  const drainedBy = removed ? 'removal' : weight === 0 ? 'weight' : desired.isDrained(identity) ? 'command' : null;
  return {
    name,
    address: formatIpv4(address),
    port,
    weight,
    state: drainedBy !== null ? 'draining' : health?.isUp === false ? 'down' : 'active',
    drainedBy,
    takesNew: (backends[id * S.BACKEND_WORDS + S.BACKEND_FLAGS]! & S.TAKES_NEW) !== 0,
    removed,
    health: health === undefined ? null : viewHealth(health),
    ...viewCounts(counts),
    flows: census.backends[id] ?? 0,
    open: census.open[id] ?? 0,
    maxConnections: written?.maxConnections ?? null,
    snatPorts: census.snatPorts[id] ?? 0,
  };
}

/** @param counts COUNTER_* rows */
export function viewCounts(counts: Float64Array): CountsView {
  return {
    signals: { refused: counts[S.COUNTER_REFUSED]!, unanswered: counts[S.COUNTER_UNANSWERED]! },
    connections: counts[S.COUNTER_CONNECTIONS]!,
    closed: counts[S.COUNTER_CLOSED]!,
    packets: { original: counts[S.COUNTER_TX_PACKETS]!, reply: counts[S.COUNTER_RX_PACKETS]! },
    bytes: { original: counts[S.COUNTER_TX_BYTES]!, reply: counts[S.COUNTER_RX_BYTES]! },
  };
}

function viewHealth({ isUp, forMs, reason, last }: BackendHealth): HealthView {
  return { state: isUp ? 'up' : 'down', seconds: forMs / 1000, reason, last };
}
