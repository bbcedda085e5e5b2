import { setImmediate } from 'node:timers/promises';
import type { Clock } from '../../base/clock.js';
import { WeirError } from '../../base/errors.js';
import type { Config } from '../../config/config.js';
import type { TableReader } from '../../conntrack/table-reader.js';
import * as S from '../../datapath/snapshot.js';
import { formatIpv4 } from '../../wire/address.js';
import type { Compiled } from '../compile.js';
import { Desired } from '../desired.js';
import { protocolName } from '../flows.js';
import type { ServiceIdentity } from '../identity.js';
import { compareNetworks, type NetworkSetup } from '../network.js';
import type { NetworkNeeds } from '../network-plan.js';
import { inSteps } from '../pace.js';
import { fixedChanges, requireReloadable } from '../reloadable.js';
import { judge } from '../reloader.js';
import { usedNeeds } from '../retained-needs.js';
import { compareSettings, pairServices, type ServicePair } from './config-diff.js';
import { countFates, FateCount } from './fates.js';
import type { FlowFates, NetworkChanges, PlanView, ServicePlan } from './plan-view.js';
import { compareSlots } from './slots.js';

/**
 * What a reload would change, found out by going its way up to where it could not turn back:
 *
 *     judge -> requireReloadable -> propose            the reload's own functions, on a fork of what weir is to do
 *     kernel                                           what NetworkSetup would execute
 *     publish                                          instead: every live connection is looked at under both snapshots, by the
 *                                                      functions that decide about it in the data path
 *     forget what no flow uses                         on the fork
 *
 * It tells what the reload would do at this moment. To be run between two reloads (Reloader.inTurn), as one is.
 */
export interface PlanParts {
  readonly desired: Desired;
  readonly readers: { readonly tcp: TableReader; readonly any: TableReader };
  readonly clock: Clock;
  readonly network: Pick<NetworkSetup, 'preview'>;
  /** Clients that affinity remembers, by the id of their backend. */
  countAffinity(): Promise<ReadonlyMap<number, number>>;
  /** By the data path so far: while packets flow, counting rests. */
  packetsRead(): number;
}

/** Slot tables compared between two pauses: a few ms. */
const SLICE_SERVICES = 64;

/** @param path of the file, for messages. @throws WeirError: a RefusedConfig */
export async function planReload(
  path: string,
  text: string,
  against: PlanView['against'],
  parts: PlanParts,
): Promise<PlanView> {
  const { desired, readers, clock, network } = parts;
  const config = judge(path, text);
  const { draft, pairs } = draftOf(path, against, desired.config, config);
  if (draft.refusal !== null) return draft;

  const nowMs = clock.nowMs();
  const fork = desired.fork();
  const before = fork.compiled;
  const proposal = fork.propose(config, nowMs);
  const after = proposal.compiled;
  const isNode = config.role === 'node';
  const counts = new FateCount(fork.identities.serviceRows, fork.identities.backendRows);
  const tables = [readers.tcp, readers.any];
  const fates = countFates(tables, before.snapshot, isNode ? null : after.snapshot, nowMs, counts);
  await inSteps(fates, parts.packetsRead);
  const affinity = hasAffinity(before) ? await parts.countAffinity() : new Map<number, number>();

  const released = fork.releasedBy(proposal);
  fork.take(proposal);
  const drainsEnded = released.map(({ service, name }) => `${fork.identities.serviceName(service)}/${name}`);
  const removed = byPlace(fork.removedServices());
  const needs = [fork.retainedNeeds()];
  fork.forget(counts.backends, await inSteps(usedNeeds(tables, fork.retained, nowMs), parts.packetsRead));
  needs.push(fork.retainedNeeds(), { addresses: [], endpoints: fork.learned });
  const lost = lostClients(affinity, before.snapshot, after.snapshot);
  const services = await planServices(pairs, fork, before, after, {
    flows: (id) => counts.of(id),
    affinityLost: (id) => lost.get(id) ?? 0,
    removed,
  });
  const changes = await previewNetwork(network, config, needs);
  return settle({ ...draft, services, drainsEnded, flows: counts.total(), ...changes });
}

/** The same for two files, neither of which need be in use. Backends count as up, and there are no connections. */
export async function compareFiles(path: string, config: Config, fromPath: string, from: Config): Promise<PlanView> {
  const { draft, pairs } = draftOf(path, { path: fromPath, version: null }, from, config);
  if (draft.refusal !== null) return draft;
  const desired = new Desired(from, 0);
  const before = desired.compiled;
  const proposal = desired.propose(config, 0);
  desired.take(proposal);
  const unknown = { flows: () => null, affinityLost: () => null, removed: byPlace(desired.removedServices()) };
  const services = await planServices(pairs, desired, before, proposal.compiled, unknown);
  const { commands, notes } = await compareNetworks(from, config).catch(nobodyToAsk);
  return settle({ ...draft, services, network: { commands, later: [], notes } });
}

/** What the files alone say; whole, when the reload would be refused. */
function draftOf(
  path: string,
  against: PlanView['against'],
  before: Config,
  after: Config,
): { readonly draft: PlanView; readonly pairs: readonly ServicePair[] } {
  const fixed = fixedChanges(before, after);
  const isFixed = (key: string): boolean => fixed.some((each) => key === each || key.startsWith(`${each}.`));
  const settings = compareSettings(before, after).map((change) => ({ ...change, restart: isFixed(change.key) }));
  const pairs = pairServices(before, after);
  const services = pairs.filter(({ change }) => change !== 'same').map((pair) => servicePlan(pair));
  const refusal = refusalOf(() => requireReloadable(before, after));
  const unknown = { drainsEnded: [], flows: null, network: null };
  return { draft: settle({ path, against, changes: false, refusal, settings, services, ...unknown }), pairs };
}

interface Consequences {
  flows(service: number): FlowFates | null;
  affinityLost(service: number): number | null;
  /** Services that have left the file, now or earlier, by address, port and protocol. */
  readonly removed: ReadonlyMap<string, ServiceIdentity>;
}

/** The services that something changes for, of their own or as a consequence of something else. */
async function planServices(
  pairs: readonly ServicePair[],
  fork: Desired,
  before: Compiled,
  after: Compiled,
  { flows, affinityLost, removed }: Consequences,
): Promise<ServicePlan[]> {
  const plans: ServicePlan[] = [];
  for (const [i, pair] of pairs.entries()) {
    if (i % SLICE_SERVICES === SLICE_SERVICES - 1) await setImmediate();
    const id = pair.after === undefined ? removed.get(keyOf(pair.before!))!.id : fork.identities.service(pair.after).id;
    const isInBoth = pair.before !== undefined && pair.after !== undefined;
    const plan = servicePlan(pair, isInBoth ? compareSlots(before, after, id) : null, flows(id), affinityLost(id));
    if (plan.change !== 'same' || isAffected(plan)) plans.push(plan);
  }
  const left = new Set(pairs.map(({ before, after }) => keyOf((after ?? before)!)));
  for (const [key, { id, name, vip, port, protocol }] of removed) {
    if (left.has(key)) continue;
    const place = { name, address: formatIpv4(vip), port, protocol: protocolName(protocol) };
    const plan: ServicePlan = { ...place, ...NOTHING_CHANGED, flows: flows(id), affinityLost: affinityLost(id) };
    if (isAffected(plan)) plans.push(plan);
  }
  return plans;
}

/** Of a service that left the file earlier and has connections. */
const NOTHING_CHANGED = { change: 'same', fields: [], backends: [], slots: null } as const;

function servicePlan(
  { before, after, change, fields, backends }: ServicePair,
  slots: ServicePlan['slots'] = null,
  flows: FlowFates | null = null,
  affinityLost: number | null = null,
): ServicePlan {
  const { name, address, port, protocol } = (after ?? before)!;
  return { name, address: address.text, port, protocol, change, fields, backends, slots, flows, affinityLost };
}

function isAffected({ slots, flows, affinityLost }: ServicePlan): boolean {
  return (slots?.changed ?? 0) > 0 || (flows?.moved ?? 0) + (flows?.cut ?? 0) > 0 || (affinityLost ?? 0) > 0;
}

function keyOf({ address, port, protocolNumber }: NonNullable<ServicePair['before']>): string {
  return `${address.word | 0}:${port}/${protocolNumber}`;
}

function byPlace(services: readonly ServiceIdentity[]): Map<string, ServiceIdentity> {
  return new Map(services.map((each) => [`${each.vip | 0}:${each.port}/${each.protocol}`, each]));
}

function hasAffinity({ snapshot: { services } }: Compiled): boolean {
  for (let row = 0; row < services.length; row += S.SERVICE_WORDS)
    if (services[row + S.AFFINITY_SECONDS] !== 0) return true;
  return false;
}

/** By service: clients whose backend takes new flows before, and does not after, or is not asked for any more. */
function lostClients(clients: ReadonlyMap<number, number>, before: S.Snapshot, after: S.Snapshot): Map<number, number> {
  const takesNew = ({ backends }: S.Snapshot, backend: number): boolean =>
    (backends[backend * S.BACKEND_WORDS + S.BACKEND_FLAGS]! & S.TAKES_NEW) !== 0;
  const lost = new Map<number, number>();
  for (const [backend, count] of clients) {
    const service = before.backends[backend * S.BACKEND_WORDS + S.BACKEND_SERVICE]!;
    const isAskedFor = after.services[service * S.SERVICE_WORDS + S.AFFINITY_SECONDS] !== 0;
    if (takesNew(before, backend) && !(isAskedFor && takesNew(after, backend))) {
      lost.set(service, (lost.get(service) ?? 0) + count);
    }
  }
  return lost;
}

/** A kernel that refuses refuses the reload. */
async function previewNetwork(
  network: PlanParts['network'],
  config: Config,
  needs: readonly NetworkNeeds[],
): Promise<Pick<PlanView, 'network' | 'refusal'>> {
  try {
    const { steps, notes } = await network.preview(config, needs);
    const [first, second, last] = steps as [readonly string[], readonly string[], readonly string[]];
    return { network: { commands: [...first, ...second], later: last, notes }, refusal: null };
  } catch (error) {
    return { network: null, refusal: asRefusal(error) };
  }
}

function refusalOf(step: () => void): PlanView['refusal'] {
  try {
    step();
    return null;
  } catch (error) {
    return asRefusal(error);
  }
}

/** @throws what is no WeirError */
function asRefusal(error: unknown): PlanView['refusal'] {
  if (!(error instanceof WeirError)) throw error;
  const { code, message, remedy } = error;
  return { code, message, remedy };
}

function nobodyToAsk(error: unknown): Pick<NetworkChanges, 'commands' | 'notes'> {
  const { message } = error as Error;
  return { commands: [], notes: [`routes and rules were not compared: ${message}`] };
}

function settle(view: PlanView): PlanView {
  const { settings, services, drainsEnded, network } = view;
  const changes =
    settings.length + services.length + drainsEnded.length > 0 || (network !== null && network.commands.length > 0);
  return { ...view, changes };
}
