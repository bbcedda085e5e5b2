import { WeirError } from '../base/errors.js';
import type { Config } from '../config/config.js';
import { PROTO_TCP } from '../wire/ipv4.js';
import {
  execute,
  executeRemovals,
  formatRoute,
  formatRule,
  type KernelState,
  type Link,
  MAIN_TABLE,
  type Route,
  type Rule,
  readKernel,
  sayCommand,
} from './iproute.js';
import {
  addAddress,
  type DesiredNetwork,
  desiredNetwork,
  type NetworkNeeds,
  type NetworkPlan,
  NO_NEEDS,
  networkNeeds,
  planNetwork,
  type ReturnEndpoint,
} from './network-plan.js';
import { formatSysctl, listConfigured, readSysctl, type Sysctl, writeSysctl } from './sysctl.js';
import { tunnelAddresses } from './tunnel-plan.js';

/**
 * The set-up of network-plan.ts, brought about: the kernel is read before each change and only differences are made. So a
 * start after kill -9 adopts what fits and removes the rest, a reload repairs what somebody broke, and a second run does
 * nothing. Additions come before removals, and the return path before the way in: no packet meets half of it.
 *
 * What belongs to another weir that is alive in this namespace, told by a device that is not ours behind the same table or
 * address, is left alone.
 */

/** What a change came to. */
export interface NetworkReport {
  /** The commands that were executed; empty: everything was as it should be. */
  readonly commands: readonly string[];
  readonly notes: readonly string[];
}

/** Commands that were not executed, in steps. */
export interface NetworkPreview {
  readonly steps: readonly (readonly string[])[];
  /** Of the first step. */
  readonly notes: readonly string[];
}

/**
 * What leads from the set-up of one configuration to that of another on this host, neither of which need be there.
 *
 * @throws WeirError MISSING_TOOL
 */
export async function compareNetworks(before: Config, after: Config): Promise<NetworkReport> {
  if (!after.network.manage) return { commands: [], notes: [] };
  const addresses = [before, after].flatMap((config) => [...relevantAddresses(config, NO_NEEDS)]);
  const around = { ...(await readKernel(new Set(addresses))), pathFilters: readPathFilters() };
  const [from, to] = [desiredNetwork(before, around), desiredNetwork(after, around)];
  const settings = new Set(from.sysctls.map(formatSysctl));
  return {
    commands: [
      ...to.sysctls.map(formatSysctl).flatMap((setting) => (settings.has(setting) ? [] : [`sysctl -w ${setting}`])),
      ...difference(to, linkOf(from), installedBy(from)).map(sayCommand),
    ],
    notes: to.notes,
  };
}

/**
 * What `run` would do for this configuration on this host, whether or not some of it is there already. Needs no permission.
 *
 * @throws WeirError MISSING_TOOL
 */
export async function describeNetwork(config: Config): Promise<NetworkPlan> {
  const { hops, links } = await readKernel(relevantAddresses(config, NO_NEEDS));
  const plan = planNetwork(desiredNetwork(config, { hops, links, pathFilters: readPathFilters() }));
  if (config.role !== 'node') return plan;
  const learning =
    'endpoints that the file does not have are learned from the tunnel: they get rules of their own while they are used';
  return { ...plan, notes: [...plan.notes, learning] };
}

/** The addresses whose way out decides about rules and notes. */
function relevantAddresses(config: Config, retained: NetworkNeeds): Set<string> {
  const needs = networkNeeds(config);
  const endpoints = [...needs.endpoints, ...retained.endpoints];
  return new Set([...needs.addresses, ...endpoints.map(({ address }) => address), ...tunnelAddresses(config)]);
}

function readPathFilters(): Map<string, number> {
  const filters = new Map<string, number>();
  for (const name of listConfigured()) {
    const value = readSysctl(['net', 'ipv4', 'conf', name, 'rp_filter']);
    if (value !== null) filters.set(name, value);
  }
  return filters;
}

interface Installed {
  readonly routes: readonly Route[];
  readonly rules: readonly Rule[];
}

/**
 * The endpoints of TCP that are not in the file and whose answers are led into the device, by an earlier weir that died without taking it
 * back.
 *
 * @throws WeirError MISSING_TOOL
 */
export async function leftEndpoints(config: Config): Promise<ReturnEndpoint[]> {
  const { rules } = ownedBy(config.device.name, await readKernel());
  const configured = networkNeeds(config).endpoints;
  const left: ReturnEndpoint[] = [];
  for (const { from, sport, protocol, table } of rules) {
    if (table !== config.network.table || protocol !== PROTO_TCP || from === null || sport === null) continue;
    const isConfigured = configured.some(
      (each) => each.address === from && each.port === sport && each.protocol === protocol,
    );
    if (!isConfigured) left.push({ address: from, port: sport, protocol });
  }
  return left;
}

/** What carries weir's number and belongs to no other weir that is alive. */
function ownedBy(device: string, { routes, rules }: Installed): Installed {
  const others = routes.filter(({ dev }) => dev !== null && dev !== device);
  const places = new Set(others.map(({ to, table }) => `${to} ${table}`));
  const devices = new Set(others.map(({ dev }) => dev));
  const tables = new Set(others.map(({ table }) => table).filter((table) => table !== MAIN_TABLE));
  return {
    routes: routes.filter((route) => !others.includes(route) && !places.has(`${route.to} ${route.table}`)),
    rules: rules.filter(({ iif, table }) => !tables.has(table) && !(iif !== null && devices.has(iif))),
  };
}

/** The set-up of one running weir. With `network.manage: false` it does nothing. Calls are executed one after the other. */
export class NetworkSetup {
  #config: Config;
  #retained = NO_NEEDS;
  #last: Promise<unknown> = Promise.resolve();
  /** Before its first change there is nothing of its own to take away. */
  #hasBegun = false;
  /** Settings weir has changed, with the values they had. */
  readonly #before = new Map<string, { readonly setting: Sysctl; readonly value: number }>();

  constructor(config: Config) {
    this.#config = config;
  }

  /**
   * Makes the kernel as the configuration wants it; the device must exist.
   *
   * @param retained what flows of an earlier run need beyond the configuration
   * @throws WeirError NETWORK_SETUP, NO_PERMISSION, MISSING_TOOL
   */
  apply(retained = NO_NEEDS): Promise<NetworkReport> {
    return this.update(this.#config, retained);
  }

  /**
   * The same for a changed file. To be called before the snapshot that sends packets to new backends is published, and
   * again when the last flow of what was retained has gone.
   *
   * @throws WeirError as `apply`
   */
  update(config: Config, retained = NO_NEEDS): Promise<NetworkReport> {
    return this.#next(() => {
      this.#config = config;
      this.#retained = retained;
      return this.#reconcile();
    });
  }

  /**
   * What `update` would execute, and then again for each of these needs, one after the other; does nothing.
   *
   * @throws WeirError as `apply`
   */
  preview(config: Config, needs: readonly NetworkNeeds[]): Promise<NetworkPreview> {
    return this.#next(async () => {
      if (!config.network.manage) return { steps: needs.map(() => []), notes: [] };
      const device = config.device.name;
      const kernel = await readKernel(new Set(needs.flatMap((retained) => [...relevantAddresses(config, retained)])));
      const around = { ...kernel, pathFilters: readPathFilters() };
      let link = requireLink(kernel, device);
      let installed = ownedBy(device, kernel);
      const notes: string[] = [];
      const steps = needs.map((retained, i) => {
        const desired = desiredNetwork(config, around, retained);
        requireFreePlaces(device, desired, kernel.routes);
        const settings =
          i > 0 ? [] : desired.sysctls.filter(isToBeSet).map((each) => `sysctl -w ${formatSysctl(each)}`);
        const commands = difference(desired, link, installed).map(sayCommand);
        if (i === 0) notes.push(...desired.notes);
        link = linkOf(desired);
        installed = installedBy(desired);
        return [...settings, ...commands];
      });
      return { steps, notes };
    });
  }

  /**
   * Takes everything away and gives changed settings their values back. With a stateFile, flows are meant to outlive the
   * process: the blackholes, the rules that lead to them and the settings stay.
   *
   * @throws WeirError as `apply`, after having done what could be done
   */
  remove(): Promise<NetworkReport> {
    return this.#next(async () => {
      if (!this.#config.network.manage || !this.#hasBegun) return { commands: [], notes: [] };
      const { device, network, conntrack } = this.#config;
      const { routes, rules } = ownedBy(device.name, await readKernel());
      const stays = conntrack.stateFile !== null;
      const commands = [
        ...routes.filter((route) => !(stays && route.dev === null)).map(removeRoute),
        ...rules.filter((each) => !(stays && each.table === network.table)).map(removeRule),
      ];
      const restored = stays ? [] : this.#restoreSettings();
      await executeRemovals(commands);
      return { commands: [...restored, ...commands.map(sayCommand)], notes: [] };
    });
  }

  #next<T>(step: () => Promise<T>): Promise<T> {
    const result = this.#last.then(step);
    this.#last = result.catch(() => {});
    return result;
  }

  async #reconcile(): Promise<NetworkReport> {
    const config = this.#config;
    if (!config.network.manage) return { commands: [], notes: [] };
    const device = config.device.name;
    const kernel = await readKernel(relevantAddresses(config, this.#retained));
    const link = requireLink(kernel, device);
    const { hops, links } = kernel;
    const desired = desiredNetwork(config, { hops, links, pathFilters: readPathFilters() }, this.#retained);
    requireFreePlaces(device, desired, kernel.routes);
    this.#hasBegun = true;
    const settings = this.#applySettings(desired.sysctls);
    const commands = difference(desired, link, ownedBy(device, kernel));
    await execute(commands);
    return {
      commands: [...settings.done, ...commands.map(sayCommand)],
      notes: [...settings.notes, ...desired.notes],
    };
  }

  #applySettings(sysctls: readonly Sysctl[]): { done: string[]; notes: string[] } {
    const done: string[] = [];
    const failed: Sysctl[] = [];
    let why = '';
    for (const setting of sysctls.filter(isToBeSet)) {
      const value = readSysctl(setting.path)!;
      const error = writeSysctl(setting.path, setting.value);
      if (error !== null) {
        if (setting.without === null) continue;
        failed.push(setting);
        why = error;
        continue;
      }
      done.push(`sysctl -w ${formatSysctl(setting)}`);
      const name = setting.path.join('/');
      if (!this.#before.has(name)) this.#before.set(name, { setting, value });
    }
    if (failed.length === 0) return { done, notes: [] };
    const consequences = [...new Set(failed.map(({ without }) => without))].join('; ');
    const wanted = failed.map(formatSysctl).join(' ');
    const message = `cannot set ${wanted} (${why}); without it: ${consequences}`;
    if (!failed.some(({ required }) => required)) return { done, notes: [message] };
    const remedy = `Set it from outside (in a container: docker run --sysctl ${formatSysctl(failed[0]!)} …, or --privileged).`;
    throw new WeirError('NETWORK_SETUP', message, remedy);
  }

  /** What somebody else has changed since is theirs, and the device's own settings go with it. */
  #restoreSettings(): string[] {
    const done: string[] = [];
    for (const { setting, value } of this.#before.values()) {
      const { path } = setting;
      if (path[3] === this.#config.device.name || readSysctl(path) !== setting.value) continue;
      if (writeSysctl(path, value) === null) done.push(`sysctl -w ${formatSysctl({ path, value })}`);
    }
    this.#before.clear();
    return done;
  }
}

/**
 * `weir net --clean`: removes every route and rule that a weir left here. Settings stay: their former values died with it.
 *
 * @throws WeirError ALREADY_RUNNING when a process holds the device; as NetworkSetup otherwise
 */
export async function cleanNetwork(device: string): Promise<NetworkReport> {
  const kernel = await readKernel();
  const { routes, rules } = ownedBy(device, kernel);
  if (kernel.links.get(device)?.carrier) {
    throw new WeirError(
      'ALREADY_RUNNING',
      `a running weir holds ${device}`,
      'Stop it first; SIGTERM makes it clean up.',
    );
  }
  const commands = [...rules.map(removeRule), ...routes.map(removeRoute)];
  await executeRemovals(commands);
  return { commands: commands.map(sayCommand), notes: [] };
}

/**
 * Two weirs in one namespace need places of their own; who comes second must not take the first one's.
 *
 * @throws WeirError ALREADY_RUNNING
 */
function requireFreePlaces(device: string, desired: DesiredNetwork, routes: readonly Route[]): void {
  const wanted = [...desired.tableRoutes, ...desired.addressRoutes].filter(({ dev }) => dev === device);
  const taken = routes.find(
    (route) =>
      route.dev !== null &&
      route.dev !== device &&
      wanted.some(({ to, table }) => to === route.to && table === route.table),
  );
  if (taken === undefined) return;
  if (taken.table === MAIN_TABLE) {
    throw new WeirError(
      'ALREADY_RUNNING',
      `${taken.to} is served by another weir, on ${taken.dev}`,
      'Give each its own VIPs and snat addresses.',
    );
  }
  throw new WeirError(
    'ALREADY_RUNNING',
    `routing table ${taken.table} is used by another weir, on ${taken.dev}`,
    'Set network.table to another number; the two need other VIPs and backends, too.',
  );
}

function requireLink({ links }: KernelState, device: string): Link {
  const link = links.get(device);
  if (link !== undefined) return link;
  throw new WeirError(
    'NETWORK_SETUP',
    `there is no device ${device}`,
    'Has it been removed by hand? Start weir again.',
  );
}

/** Settings this kernel has not are nobody's concern. */
function isToBeSet({ path, value }: Sysctl): boolean {
  const present = readSysctl(path);
  return present !== null && present !== value;
}

/** The device as a set-up leaves it. */
function linkOf({ device, mtu, deviceAddress }: DesiredNetwork): Link {
  return { name: device, mtu, up: true, carrier: true, hostAddresses: deviceAddress === null ? [] : [deviceAddress] };
}

function installedBy({ tableRoutes, addressRoutes, rules }: DesiredNetwork): Installed {
  return { routes: [...tableRoutes, ...addressRoutes], rules };
}

function removeRoute(route: Route): string {
  return `route del ${formatRoute(route)}`;
}

function removeRule(each: Rule): string {
  return `rule del ${formatRule(each)}`;
}

/** The shortest way from what is installed to what is desired: additions in their order, then removals. */
function difference(desired: DesiredNetwork, link: Link, installed: Installed): string[] {
  const { device, mtu } = desired;
  const commands: string[] = [];
  if (link.mtu !== mtu || !link.up) commands.push(`link set dev ${device} mtu ${mtu} up`);
  const { deviceAddress } = desired;
  if (deviceAddress !== null && !link.hostAddresses.includes(deviceAddress)) {
    commands.push(addAddress(deviceAddress, device));
  }
  const haveRoutes = new Set(installed.routes.map(formatRoute));
  const haveRules = new Set(installed.rules.map((each) => formatRule(each)));
  const wantRules = new Set(desired.rules.map((each) => formatRule(each)));
  // A route that differs in its source or MTU alone is replaced in its place.
  const wantPlaces = new Set([...desired.tableRoutes, ...desired.addressRoutes].map(placeOf));
  const addRoutes = (routes: readonly Route[]): void => {
    for (const route of routes)
      if (!haveRoutes.has(formatRoute(route))) commands.push(`route replace ${formatRoute(route)}`);
  };
  addRoutes(desired.tableRoutes);
  for (const text of wantRules) if (!haveRules.has(text)) commands.push(`rule add ${text}`);
  addRoutes(desired.addressRoutes);
  for (const address of link.hostAddresses) {
    if (address !== deviceAddress) commands.push(`address del ${address}/32 dev ${device}`);
  }
  for (const text of haveRules) if (!wantRules.has(text)) commands.push(`rule del ${text}`);
  // A route that was replaced is gone already, and its removal would be the new one's.
  for (const route of installed.routes) if (!wantPlaces.has(placeOf(route))) commands.push(removeRoute(route));
  return commands;
}

function placeOf({ to, dev, table }: Route): string {
  return formatRoute({ to, dev, table, src: null });
}
