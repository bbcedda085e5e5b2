import { createHash } from 'node:crypto';
import type { BackendConfig, Config, ServiceConfig } from '../config/config.js';
import { formatDuration } from '../config/duration.js';
import type { Fault } from '../config/faults.js';
import { chain, lot, type Tickets } from './chances.js';

/**
 * A configuration as NAT rules of the kernel can say it, before it is written in the language of one tool or another.
 *
 * Said by rules: who is served (VIP, port, protocol, sourceRanges), by whom and how often (weights), from which source address (dnat, snat,
 * and masquerading for a backend that is its own client), to whom again (affinity), and what the others get (noBackend, unknown ports).
 *
 * Refused: what would make rules serve other clients, or by other backends, than weir does. The rest is lost with a warning: what
 * changes how a backend is picked, though not how often, or what happens beside the forwarding.
 */
export interface KernelView {
  readonly services: readonly KernelService[];
  readonly refusals: readonly Fault[];
  readonly losses: readonly Fault[];
}

export interface KernelService {
  readonly config: ServiceConfig;
  /** 16 characters, made of its identity alone. */
  readonly hash: string;
  /** Those with a weight. */
  readonly backends: readonly KernelBackend[];
}

export interface KernelBackend {
  readonly config: BackendConfig;
  readonly hash: string;
  /** That the rules take it which have not taken one before it; the last has none. */
  readonly probability: string | null;
  /** Its numbers in the service's lot. */
  readonly tickets: Tickets;
}

/** The bit of a packet's mark that asks for masquerading: that of kube-proxy, where it means the same. */
export const MASQUERADE_MARK = '0x4000';

const DEFAULT_DRAIN_MS = 300_000;

/** Services that a warning about many names. */
const NAMED = 5;

export function kernelView(config: Config): KernelView {
  const refusals = config.services.flatMap(refuse);
  if (config.role === 'node')
    refusals.unshift({ path: ['role'], message: 'node: it ends tunnels, which no rule does' });
  return { services: config.services.map(viewService), refusals, losses: listLosses(config) };
}

function refuse(service: ServiceConfig, i: number): Fault[] {
  const faults: Fault[] = [];
  const fault = (path: readonly PropertyKey[], message: string): void => {
    faults.push({ path: ['services', i, ...path], message });
  };
  if (service.mode === 'dsr') fault(['mode'], 'dsr: rules cannot tunnel to a node; dnat and snat can be exported');
  if (service.health !== null) fault(['health'], 'rules probe nobody, and go on sending to a backend that is down');
  if (service.maxConnections !== null)
    fault(['maxConnections'], 'rules do not know what weir calls open, and would count refused connections as well');
  if (service.newConnectionsPerSecond !== null)
    fault(
      ['newConnectionsPerSecond'],
      'kube-proxy’s rules have nothing that counts by client; set a limit beside them',
    );
  service.backends.forEach(({ maxConnections }, j) => {
    if (maxConnections !== null)
      fault(['backends', j, 'maxConnections'], 'rules cannot pass over a backend that has enough');
  });
  return faults;
}

function listLosses({ services }: Config): Fault[] {
  const losses: Fault[] = [];
  const lose = (key: string, isLost: (service: ServiceConfig) => boolean, message: string): void => {
    const first = services.findIndex(isLost);
    if (first < 0) return;
    const names = services.filter(isLost).map(({ name }) => name);
    const more = names.length > NAMED ? ` and ${names.length - NAMED} more` : '';
    losses.push({
      path: ['services', first, key],
      message: `${message} (${names.slice(0, NAMED).join(', ')}${more})`,
    });
  };
  lose('algorithm', ({ algorithm }) => algorithm === 'maglev', MAGLEV);
  lose('mode', ({ mode }) => mode === 'snat', SNAT);
  lose('affinity', ({ affinityMs }) => affinityMs % 1000 !== 0, 'affinity is rounded up to whole seconds');
  lose('onRemove', ({ onRemove }) => onRemove === 'reset', 'reset: rules cut no connection of a backend that leaves');
  lose('drainTimeout', ({ drainMs }) => drainMs !== DEFAULT_DRAIN_MS, DRAIN);
  lose('icmpEcho', ({ icmpEcho }) => icmpEcho, 'rules answer no echo request to a VIP');
  return losses;
}

const MAGLEV = 'maglev: rules draw by lot; shares are the same, but not the choice of each connection';
const SNAT = 'snat: backends see an address of this host instead of snat.addresses';
const DRAIN = 'rules cut no connection: those of a removed backend go on until they end';

function viewService(config: ServiceConfig): KernelService {
  const identity = `${config.address.text}:${config.port}/${config.protocol}`;
  const active = config.backends.filter(({ weight }) => weight > 0);
  const weights = active.map(({ weight }) => weight);
  const probabilities = chain(weights);
  const { tickets } = lot(weights);
  return {
    config,
    hash: shortHash(identity),
    backends: active.map((backend, i) => ({
      config: backend,
      hash: shortHash(`${identity}${backend.address.text}:${backend.port}`),
      probability: probabilities[i] ?? null,
      tickets: tickets[i]!,
    })),
  };
}

const BASE32 = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ234567';
const HASH_LETTERS = 16;

/** As kube-proxy names its chains: the first letters of the base32 (RFC 4648) of the SHA-256. */
export function shortHash(text: string): string {
  const digest = createHash('sha256').update(text).digest();
  let letters = '';
  for (let bit = 0; letters.length < HASH_LETTERS; bit += 5) {
    const at = bit >> 3;
    const pair = (digest[at]! << 8) | digest[at + 1]!;
    letters += BASE32[(pair >> (11 - (bit & 7))) & 31];
  }
  return letters;
}

/** How long an affinity lasts, in the whole seconds that rules count in. */
export function affinitySeconds({ affinityMs }: ServiceConfig): number {
  return Math.ceil(affinityMs / 1000);
}

/** `web 10.96.0.10:80/tcp, random, dnat, affinity 3h`: the line above a service's rules. */
export function summary({ config, backends }: KernelService): string {
  const { name, address, port, protocol, mode, affinityMs } = config;
  const parts = [`${plain(name)} ${address.text}:${port}/${protocol}`, mode];
  if (affinityMs > 0) parts.push(`affinity ${formatDuration(affinityMs)}`);
  if (backends.length === 0) parts.push(`no backend: ${config.noBackend}`);
  return parts.join(', ');
}

/** A name that may stand between quotes in either language; nothing there can be escaped. @param most characters */
export function quoted(text: string, most: number): string {
  const name = plain(text);
  return `"${name.length > most ? `${name.slice(0, most - 3)}...` : name}"`;
}

function plain(text: string): string {
  return text.replace(/[^\x20-\x7e]|["\\]/g, '_');
}
