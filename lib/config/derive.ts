import { formatEndpoint } from '../wire/address.js';
import { PROTO_TCP, PROTO_UDP } from '../wire/ipv4.js';
import type { BackendConfig, Config, HealthConfig, ServiceConfig, TimeoutsMs } from './config.js';
import { parseDuration } from './duration.js';
import type { WrittenConfig, WrittenService } from './schema.js';
import { toAddress, toListen, toPortRange, toRange } from './text-forms.js';

/** The used form of a file that passed the schema and the rules. */
export function deriveConfig(written: WrittenConfig): Config {
  const { conntrack, snat, tunnel, admin } = written;
  const ports = toPortRange(snat.ports);
  return deepFreeze({
    role: written.role,
    device: written.device,
    network: written.network,
    seed: written.seed,
    maglev: written.maglev,
    conntrack: {
      tcpEntries: conntrack.tcpEntries,
      anyEntries: conntrack.anyEntries,
      timeoutsMs: deriveTimeouts(conntrack.timeouts),
      gcIntervalMs: conntrack.gc.interval === 'auto' ? null : toMs(conntrack.gc.interval),
      recoveryMs: toMs(conntrack.recovery),
      stateFile: conntrack.stateFile ?? null,
    },
    snat: { addresses: snat.addresses.map(toAddress), firstPort: ports.first, lastPort: ports.last },
    tunnel: {
      address: tunnel.address === undefined ? null : toAddress(tunnel.address),
      port: tunnel.port,
      vni: tunnel.vni,
      inner: tunnel.inner,
      option: tunnel.option,
      clampMss: tunnel.clampMss,
      peers: tunnel.peers.map(toRange),
    },
    admin: { socket: admin.socket, listen: toListen(admin.listen), dashboard: admin.dashboard },
    services: written.services.map(deriveService),
  });
}

function deriveTimeouts(timeouts: WrittenConfig['conntrack']['timeouts']): TimeoutsMs {
  return {
    tcp: toMs(timeouts.tcp),
    tcpSyn: toMs(timeouts.tcpSyn),
    tcpFin: toMs(timeouts.tcpFin),
    any: toMs(timeouts.any),
    serviceTcp: toMs(timeouts.serviceTcp),
    serviceAny: toMs(timeouts.serviceAny),
    serviceTcpGrace: toMs(timeouts.serviceTcpGrace),
  };
}

function deriveService(service: WrittenService): ServiceConfig {
  return {
    name: service.name,
    address: toAddress(service.address),
    port: service.port,
    protocol: service.protocol,
    protocolNumber: service.protocol === 'tcp' ? PROTO_TCP : PROTO_UDP,
    algorithm: service.algorithm,
    mode: service.mode,
    affinityMs: service.affinity === undefined ? 0 : toMs(service.affinity.clientIp),
    sourceRanges: service.sourceRanges.map(toRange),
    maxConnections: service.maxConnections ?? null,
    newConnectionsPerSecond: service.newConnectionsPerSecond ?? null,
    noBackend: service.noBackend,
    onRemove: service.onRemove,
    drainMs: toMs(service.drainTimeout),
    icmpEcho: service.icmpEcho,
    health: service.health === undefined ? null : deriveHealth(service.health),
    // Without checks it takes a replay's timeline to say that a backend is down, and that is a fact.
    allDown: service.allDown ?? (service.health === undefined ? 'reject' : 'use-all'),
    backends: service.backends.map(deriveBackend),
  };
}

function deriveHealth(health: NonNullable<WrittenService['health']>): HealthConfig {
  const { rise, fall } = health;
  const timing = { intervalMs: toMs(health.interval), timeoutMs: toMs(health.timeout), rise, fall };
  if (health.type === 'icmp') return { type: 'icmp', ...timing };
  const port = health.port ?? null;
  if (health.type === 'tcp') return { type: 'tcp', port, ...timing };
  const { path, host = null, status, body = null } = health;
  return { type: 'http', port, path, host, status, body, ...timing };
}

function deriveBackend(backend: WrittenService['backends'][number]): BackendConfig {
  const address = toAddress(backend.address);
  return {
    name: backend.name ?? formatEndpoint(address.word, backend.port),
    address,
    port: backend.port,
    weight: backend.weight,
    maxConnections: backend.maxConnections ?? null,
    node: backend.node === undefined ? address : toAddress(backend.node),
  };
}

/** The schema has checked the text. */
function toMs(duration: string): number {
  return parseDuration(duration)!;
}

function deepFreeze<T>(value: T): T {
  if (typeof value === 'object' && value !== null) for (const part of Object.values(value)) deepFreeze(part);
  return Object.freeze(value);
}
