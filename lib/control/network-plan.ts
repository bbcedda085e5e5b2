import { MAX_ENDPOINT_RULES } from '../base/limits.js';
import type { BackendConfig, Config, ServiceConfig } from '../config/config.js';
import { PROTO_ICMP, PROTO_TCP, PROTO_UDP } from '../wire/ipv4.js';
import { formatRoute, formatRule, type Hop, type Link, MAIN_TABLE, type Route, type Rule } from './iproute.js';
import { formatSysctl, type Sysctl } from './sysctl.js';
import { deviceAddress, tunnelNotes, usesTunnel } from './tunnel-plan.js';

/**
 * The kernel's side of weir: what leads packets into the device, and keeps them from coming back.
 *
 *     client -> VIP          main: VIP dev weir0                    weir, original direction
 *     weir0  -> backend      rule 1000: iif weir0 lookup main       out
 *     backend -> client      rule 1002: from BACKEND ... lookup T   table T: default dev weir0; weir, reply direction
 *     weir0  -> client       rule 1000                              out, with the VIP as source
 *
 * On a node packets of clients come through the tunnel's socket and not by a route; the rest is the same:
 *
 *     weir0  -> backend      rule 1000, or local: an address of this host
 *     backend -> client      rule 1002: from ADDRESS ... lookup T   also where the backend is a process of this host; of its
 *                            rule 1002: iif lo, UDP and its port    datagrams the address may not be chosen yet
 *     weir0  -> client       rule 1000                              out, with the VIP as source
 *
 * Invariants:
 * - What weir writes is looked up in main and nowhere else. Rule 1001 ends the search there: what main cannot route would
 *   otherwise fall through to the return path, and a passed packet without a route would come back until its TTL is used up.
 * - Behind every route to the device lies a blackhole. A route dies with its device, the blackhole does not, so that nobody's
 *   packets pass untranslated while weir is away; it asks for nothing and stands in no new weir's way.
 * - The way to a VIP is no wider than those to its dnat backends. Of a packet that fits the device but not the link behind it,
 *   the kernel would complain to the client by quoting what weir made of it, which says nothing to the client; so it has to
 *   complain before. All other errors come to weir: of the way to a client, to the VIP; of routers between, by the return path.
 * - Everything carries WEIR_PROTOCOL, so that any later weir recognises it.
 *
 * Rejected: netlink by hand (an operator can read and repeat what iproute2 does), firewall marks (they need nftables on the
 * backend side), and addresses on the device (the kernel would answer for the VIP itself).
 */

/** After `local` (0), before `main` (32766). */
export const BYPASS_PRIORITY = 1000;
export const BYPASS_END_PRIORITY = 1001;
export const RETURN_PRIORITY = 1002;

/** Where a backend's replies come from. */
export interface ReturnEndpoint {
  readonly address: string;
  readonly port: number;
  /** 6 or 17. */
  readonly protocol: number;
}

/** What packets must lead into the device. */
export interface NetworkNeeds {
  /** VIPs and snat addresses, as text. */
  readonly addresses: readonly string[];
  /** Backends of dnat services. */
  readonly endpoints: readonly ReturnEndpoint[];
}

export const NO_NEEDS: NetworkNeeds = { addresses: [], endpoints: [] };

/** What the host looks like around weir. */
export interface Surroundings {
  /** By address, of VIPs, snat addresses and backends. */
  readonly hops: ReadonlyMap<string, Hop>;
  readonly links: ReadonlyMap<string, Link>;
  /** `rp_filter` by interface; `all` is one of them. */
  readonly pathFilters: ReadonlyMap<string, number>;
}

/** All that `run` sees to, in the order in which it does. */
export interface DesiredNetwork {
  readonly sysctls: readonly Sysctl[];
  readonly device: string;
  readonly mtu: number;
  /** The device's own, or null: it needs none. */
  readonly deviceAddress: string | null;
  /** Of the table of the return path. */
  readonly tableRoutes: readonly Route[];
  readonly rules: readonly Rule[];
  /** To VIPs and snat addresses. */
  readonly addressRoutes: readonly Route[];
  /** What an operator should know: one sentence each. */
  readonly notes: readonly string[];
}

/** Of configurations, which never change: a reload asks for both of its several times. */
const needsOf = new WeakMap<Config, NetworkNeeds>();

/**
 * What a configuration needs by itself, without duplicates. dsr answers come to no gateway but to the backend's node, snat's to the
 * snat address.
 */
export function networkNeeds(config: Config): NetworkNeeds {
  let needs = needsOf.get(config);
  if (needs === undefined) {
    needs = findNeeds(config);
    needsOf.set(config, needs);
  }
  return needs;
}

function findNeeds(config: Config): NetworkNeeds {
  const addresses = new Set(config.snat.addresses.map(({ text }) => text));
  const endpoints = new Map<string, ReturnEndpoint>();
  const isNode = config.role === 'node';
  for (const service of config.services) {
    if (!isNode) addresses.add(service.address.text);
    for (const backend of service.backends) {
      if (isNode ? !isAtNode(config, service, backend) : service.mode !== 'dnat') continue;
      const { address, port } = backend;
      const protocol = service.protocolNumber;
      endpoints.set(`${address.text} ${port} ${protocol}`, { address: address.text, port, protocol });
    }
  }
  return { addresses: [...addresses], endpoints: [...endpoints.values()] };
}

/** Whether a backend is one that this node ends the tunnel for. */
export function isAtNode({ tunnel }: Config, { mode }: ServiceConfig, { node }: BackendConfig): boolean {
  return mode === 'dsr' && node.word === tunnel.address?.word;
}

/**
 * The whole network set-up for a configuration. Pure.
 *
 * @param retained what flows need that outlive their service or backend in the file. An address that is not configured any
 *   more is led in by rule instead of route: weir passes what belongs to no flow, and a route in main would bring it back.
 */
export function desiredNetwork(config: Config, around: Surroundings, retained = NO_NEEDS): DesiredNetwork {
  const { name: device, mtu } = config.device;
  const { table } = config.network;
  const widths = pathWidths(config, around);
  const needs = networkNeeds(config);
  const returnPath = returnRules(config, mergeEndpoints(needs.endpoints, retained.endpoints), around);
  const kept = retained.addresses.filter((address) => !needs.addresses.includes(address));
  const allPathFilter = around.pathFilters.get('all') ?? 0;
  const notes = [...addressNotes(needs.addresses, around), ...returnPath.notes, ...tunnelNotes(config, around)];
  return {
    sysctls: desiredSysctls(device, allPathFilter, usesTunnel(config)),
    device,
    mtu,
    deviceAddress: deviceAddress(config, allPathFilter),
    tableRoutes: [
      { to: 'default', dev: null, table, src: null },
      { to: 'default', dev: device, table, src: returnPath.source },
    ],
    rules: [
      rule({ priority: BYPASS_PRIORITY, iif: device, table: MAIN_TABLE }),
      rule({ priority: BYPASS_END_PRIORITY, iif: device, table: 0 }),
      ...returnPath.rules,
      ...kept.map((to) => rule({ to, table })),
    ],
    addressRoutes: needs.addresses.flatMap((to) => [
      { to, dev: null, table: MAIN_TABLE, src: null },
      { to, dev: device, table: MAIN_TABLE, src: null, ...widths.get(to) },
    ]),
    notes: [...new Set(notes)],
  };
}

/** By VIP, where the device's own MTU is too much. */
function pathWidths({ device, services }: Config, { hops, links }: Surroundings): Map<string, { mtu: number }> {
  const widths = new Map<string, { mtu: number }>();
  for (const { address: vip, mode, backends } of services) {
    if (mode !== 'dnat') continue;
    for (const { address } of backends) {
      const hop = hops.get(address.text);
      if (hop === undefined || hop.dev === device.name) continue;
      const mtu = hop.mtu ?? links.get(hop.dev)?.mtu ?? device.mtu;
      if (mtu < (widths.get(vip.text)?.mtu ?? device.mtu)) widths.set(vip.text, { mtu });
    }
  }
  return widths;
}

function rule(fields: Partial<Rule> & Pick<Rule, 'table'>): Rule {
  return { priority: RETURN_PRIORITY, from: null, to: null, iif: null, protocol: null, sport: null, ...fields };
}

/** Both, without duplicates. */
export function mergeEndpoints(a: readonly ReturnEndpoint[], b: readonly ReturnEndpoint[]): readonly ReturnEndpoint[] {
  if (b.length === 0) return a;
  const all = new Map([...a, ...b].map((e) => [`${e.address} ${e.port} ${e.protocol}`, e]));
  return [...all.values()];
}

/**
 * Per endpoint, or per interface where those would be too many for a list that the kernel walks. A backend on this very
 * host always gets rules of its own: `iif lo` alone would match everything that starts here.
 *
 * A datagram of a local process is looked up before it is fragmented, and if its socket is bound to no address, before it has one:
 * there the port tells it, and the route the address, as far as one is enough.
 */
function returnRules(config: Config, endpoints: readonly ReturnEndpoint[], { hops, pathFilters }: Surroundings) {
  const { table, returnPath } = config.network;
  const { name: device } = config.device;
  const perEndpoint = returnPath === 'auto' && endpoints.length <= MAX_ENDPOINT_RULES;
  const tcp: Rule[] = [];
  const udp = new Map<string, Rule>();
  const icmp = new Map<string, Rule>();
  const interfaces = new Set<string>();
  const datagramSources = new Set<string>();
  const notes = new Set<string>();
  for (const { address, port, protocol } of endpoints) {
    const hop = hops.get(address);
    if (hop === undefined) notes.add(`there is no route to backend ${address}`);
    else if (hop.dev === device) notes.add(`the route to backend ${address} leads back into ${device}`);
    else if (hop.local) icmp.set(address, rule({ from: address, protocol: PROTO_ICMP, table }));
    else interfaces.add(hop.dev);
    if (!perEndpoint && hop?.local !== true) continue;
    if (protocol === PROTO_TCP) tcp.push(rule({ from: address, protocol, sport: port, table }));
    else if (hop?.local) {
      datagramSources.add(address);
      udp.set(`lo ${port}`, rule({ iif: 'lo', protocol: PROTO_UDP, sport: port, table }));
    } else udp.set(address, rule({ from: address, protocol: PROTO_UDP, table }));
  }
  if (datagramSources.size > 1) {
    notes.add(
      `UDP servers at ${list([...datagramSources])} must bind to their address: what sockets bound to none send has another source`,
    );
  }
  const byInterface = [...interfaces]
    .sort()
    .map((iif) => rule({ iif, table, protocol: perEndpoint ? PROTO_ICMP : null }));
  if (tcp.length > 0 || datagramSources.size > 0) {
    const strict = strictInterfaces(device, pathFilters);
    if (strict.length > 0) {
      notes.add(
        `rp_filter is strict on ${list(strict)}: direct connections from there to a backend’s own port are dropped ` +
          '(2, loose, lets them pass)',
      );
    }
  }
  const source = datagramSources.size === 1 ? [...datagramSources][0]! : null;
  return { rules: [...tcp, ...udp.values(), ...icmp.values(), ...byInterface], source, notes: [...notes] };
}

/** The kernel takes the larger value of an interface's own and that of `all`. */
function strictInterfaces(device: string, pathFilters: Surroundings['pathFilters']): string[] {
  const all = pathFilters.get('all') ?? 0;
  return [...pathFilters]
    .filter(([name, value]) => !['all', 'default', 'lo', device].includes(name) && Math.max(all, value) === 1)
    .map(([name]) => name);
}

function addressNotes(addresses: readonly string[], { hops }: Surroundings): string[] {
  return addresses
    .filter((address) => hops.get(address)?.local)
    .map((address) => `${address} is an address of this host: the kernel keeps its packets and weir never sees them`);
}

function list(names: readonly string[]): string {
  return names.length <= 4 ? names.join(', ') : `${names.slice(0, 3).join(', ')} and ${names.length - 3} more`;
}

/**
 * @param allPathFilter where the host is strict everywhere (1), the device's own 0 would not count, but 2 does: loose finds a
 *   route back to every client that can be answered at all, and leaves the host's policy as it is.
 * @param hasTunnel what leaves has an address of the host as its source
 */
function desiredSysctls(device: string, allPathFilter: number, hasTunnel: boolean): Sysctl[] {
  const conf = ['net', 'ipv4', 'conf', device];
  const earlyDemux = 'a VIP that a local program used to serve loses new connections for a minute';
  return [
    {
      path: [...conf, 'accept_local'],
      value: 1,
      required: hasTunnel,
      without: 'packets that carry one of this host’s own addresses as source are dropped',
    },
    {
      path: [...conf, 'rp_filter'],
      value: allPathFilter === 1 ? 2 : 0,
      required: true,
      without: 'the kernel drops what weir sends',
    },
    {
      path: ['net', 'ipv6', 'conf', device, 'disable_ipv6'],
      value: 1,
      required: false,
      // The kernel sends a few packets of its own into the device, which count as dropped: a container could not help it.
      without: null,
    },
    { path: ['net', 'ipv4', 'ip_forward'], value: 1, required: true, without: 'the kernel forwards nothing' },
    { path: ['net', 'ipv4', 'ip_early_demux'], value: 0, required: false, without: earlyDemux },
    { path: ['net', 'ipv4', 'tcp_early_demux'], value: 0, required: false, without: earlyDemux },
    { path: ['net', 'ipv4', 'udp_early_demux'], value: 0, required: false, without: earlyDemux },
  ];
}

/** A part of the set-up, as `weir net` prints it. */
export interface NetworkSection {
  readonly title: string;
  readonly commands: readonly string[];
}

export interface NetworkPlan {
  readonly sections: readonly NetworkSection[];
  readonly notes: readonly string[];
}

/** Every command of a set-up from nothing, in order, for a shell. */
export function planNetwork(desired: DesiredNetwork): NetworkPlan {
  const { device, mtu, deviceAddress, sysctls, tableRoutes, rules, addressRoutes, notes } = desired;
  const addRoute = (route: Route): string => `ip route replace ${formatRoute(route)}`;
  const set = (setting: Sysctl): string => `sysctl -w ${formatSysctl(setting)}`;
  const isOfDevice = ({ path }: Sysctl): boolean => path[3] === device;
  return {
    sections: [
      {
        title: `device (weir run makes it; by hand: ip tuntap add dev ${device} mode tun)`,
        commands: [
          ...sysctls.filter(isOfDevice).map(set),
          `ip link set dev ${device} mtu ${mtu} up`,
          ...(deviceAddress === null ? [] : [`ip ${addAddress(deviceAddress, device)}`]),
        ],
      },
      { title: 'settings', commands: sysctls.filter((each) => !isOfDevice(each)).map(set) },
      { title: 'return path: its table', commands: tableRoutes.map(addRoute) },
      {
        title: 'return path: its rules; what comes out of the device never goes back in',
        commands: rules.map((each) => `ip rule add ${formatRule(each, true)}`),
      },
      { title: 'virtual and snat addresses', commands: addressRoutes.map(addRoute) },
    ].filter(({ commands }) => commands.length > 0),
    notes,
  };
}

/** For ip. Of scope host: nobody takes it as the source of what goes anywhere else. */
export function addAddress(address: string, device: string): string {
  return `address replace ${address}/32 dev ${device} scope host`;
}

/** A plan as a shell script. */
export function formatPlan({ sections, notes }: NetworkPlan): string {
  const blocks = sections.map(({ title, commands }) => [`# ${title}`, ...commands].join('\n'));
  if (notes.length > 0) blocks.push(notes.map((note) => `# note: ${note}`).join('\n'));
  return `${blocks.join('\n\n')}\n`;
}
