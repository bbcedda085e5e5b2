import { networkInterfaces } from 'node:os';
import { WeirError } from '../../base/errors.js';
import type { Config, ServiceConfig } from '../../config/config.js';
import { allocateTable } from '../../conntrack/memory.js';
import { TableReader } from '../../conntrack/table-reader.js';
import { emptyRecollection, type Recollection, type RecollectionQuery } from '../../datapath/recollection.js';
import { Desired } from '../desired.js';
import { findBackend } from '../find-backend.js';
import { askRoutes, type Ends } from '../iproute.js';

/** What a packet would meet: a configuration in use, with its tables and all else that decides, or what might be instead. */
export interface Scene {
  readonly desired: Desired;
  readonly readers: { readonly tcp: TableReader; readonly any: TableReader };
  /** The data path's clock. */
  readonly nowMs: number;
  /** What the data path knows besides. */
  recall(query: RecollectionQuery): Promise<Recollection>;
  /** Why a backend is down; undefined: that is not known. */
  downReason(backend: number): string | undefined;
  /** Where the kernel would send packets that leave; null: nobody can tell. */
  routes(packets: readonly Ends[]): Promise<readonly (string | null)[]>;
  /** Of this host. */
  readonly localAddresses: ReadonlySet<string>;
  readonly assumed: Assumed;
}

/** What is assumed of backends, by their ids. */
export interface Assumed {
  /** As a command names it: `web/b1`. */
  readonly without: ReadonlyMap<number, string>;
  readonly down: ReadonlyMap<number, string>;
}

export const NOTHING_ASSUMED: Assumed = { without: new Map(), down: new Map() };

/**
 * The same as if backends had left the file, or had failed their checks.
 *
 * @param without backends as `SERVICE/BACKEND`, and so is `down`
 * @throws WeirError USAGE when a name means nothing
 */
export function assume(scene: Scene, without: readonly string[], down: readonly string[]): Scene {
  if (without.length === 0 && down.length === 0) return scene;
  const { desired, nowMs } = scene;
  const assumed = { without: backendsNamed(desired, without), down: backendsNamed(desired, down) };
  const fork = desired.fork((id) => assumed.down.has(id));
  fork.take(fork.propose(leaveOut(fork, assumed.without), nowMs));
  return { ...scene, desired: fork, assumed };
}

/** A weir that has just begun with a configuration: nothing has come to it yet. Packets leave by this host's own routes. */
export function sceneOfFile(config: Config): Scene {
  const reader = new TableReader(allocateTable(1));
  return {
    desired: new Desired(config, 0),
    readers: { tcp: reader, any: reader },
    nowMs: 0,
    recall: async () => emptyRecollection(),
    downReason: () => undefined,
    routes: (packets) => routesFrom(null, packets),
    localAddresses: addressesHere(),
    assumed: NOTHING_ASSUMED,
  };
}

export function addressesHere(): Set<string> {
  return new Set(
    Object.values(networkInterfaces()).flatMap((addresses = []) => addresses.map(({ address }) => address)),
  );
}

/** @param device they come out of; null: the host's own packets */
export async function routesFrom(device: string | null, packets: readonly Ends[]): Promise<readonly (string | null)[]> {
  if (packets.length === 0) return [];
  return askRoutes(packets, device).catch(() => packets.map(() => null));
}

function backendsNamed(desired: Desired, names: readonly string[]): Map<number, string> {
  return new Map(
    names.map((name) => {
      const slash = name.indexOf('/');
      if (slash < 0) throw new WeirError('USAGE', `"${name}" names no backend`, 'Name it as SERVICE/BACKEND.');
      const member = findBackend(desired, name.slice(0, slash), name.slice(slash + 1));
      return [member.identity.id, `${name.slice(0, slash)}/${member.name}`];
    }),
  );
}

function leaveOut({ config, identities }: Desired, without: ReadonlyMap<number, string>): Config {
  if (without.size === 0) return config;
  const services = config.services.map((service): ServiceConfig => {
    const identity = identities.service(service);
    const backends = service.backends.filter((backend) => !without.has(identities.backend(identity, backend).id));
    return { ...service, backends };
  });
  return { ...config, services };
}
