import { spawnSync } from 'node:child_process';
import { readdirSync, readlinkSync } from 'node:fs';
import { createServer } from 'node:net';
import type { Config } from '../../config/config.js';
import { probeArp } from '../../io/arp-probe.js';
import { close } from '../../io/syscalls.js';
import { openTunnelSocket } from '../../io/tunnel-socket.js';
import { parseIpv4 } from '../../wire/address.js';
import { type KernelState, MAIN_TABLE, type Row, readKernel, readRows, WEIR_PROTOCOL } from '../iproute.js';
import { networkNeeds } from '../network-plan.js';
import { listConfigured, readSysctl } from '../sysctl.js';
import { type Firewall, parseRuleset } from './firewall.js';
import { readText } from './host-facts.js';
import { holds, type Prefix, parsePrefix } from './prefix.js';

/** What is true of this network namespace around a configuration. */
export interface NetworkFacts {
  readonly kernel: KernelState;
  readonly interfaces: readonly Interface[];
  /** In the order in which the kernel asks them; weir's own are left out. */
  readonly rules: readonly ForeignRule[];
  /** Of every table; weir's own are left out. */
  readonly routes: readonly ForeignRoute[];
  readonly pathFilters: ReadonlyMap<string, number>;
  /** Interfaces that answer ARP for what is routed elsewhere. */
  readonly proxyArp: ReadonlySet<string>;
  /** null: why it could not be read is in `firewallProblem`. */
  readonly firewall: Firewall | null;
  readonly firewallProblem: string;
  /** Of nf_conntrack; null: it does not run in this namespace. */
  readonly kernelConntrack: { readonly count: number; readonly max: number } | null;
  /** VIPs that somebody answered for, by address; of those that could not be asked about, why. */
  readonly owners: ReadonlyMap<string, { readonly owner: string | null } | { readonly problem: string }>;
  /** Why the tunnel's port cannot be taken, and who has it; null: it can, or nobody wants to. */
  readonly tunnelPort: Taken | null;
  readonly listen: Taken | null;
}

export interface Interface {
  readonly name: string;
  readonly index: number;
  readonly isUp: boolean;
  readonly mtu: number;
  /** Of Ethernet; others have none that ARP asks for. */
  readonly hardwareAddress: string | null;
  /** `geneve`, `veth`, ...; empty: an ordinary one. */
  readonly kind: string;
  /** UDP port of a tunnel device; 0: none. */
  readonly port: number;
  readonly addresses: readonly Prefix[];
}

export interface ForeignRule {
  readonly priority: number;
  readonly table: number;
  readonly from: Prefix | null;
  readonly to: Prefix | null;
  readonly iif: string | null;
  /** Besides these there is something that only a packet can tell: a mark, a protocol, a user. */
  readonly isPartial: boolean;
  /** For `ip rule del`. */
  readonly text: string;
}

export interface ForeignRoute {
  readonly to: Prefix;
  readonly table: number;
  readonly dev: string | null;
  /** `unreachable`, `blackhole`, `prohibit`; null: it leads somewhere. */
  readonly refusal: string | null;
}

export interface Taken {
  readonly problem: string;
  /** Of the process that has it; null: not seen. */
  readonly pid: number | null;
}

/** How long an answer to ARP may take. */
const ARP_WAIT_MS = 250;

/** @throws WeirError MISSING_TOOL, NETWORK_SETUP */
export async function readNetworkFacts(config: Config): Promise<NetworkFacts> {
  const needs = networkNeeds(config);
  const nodes = config.services.flatMap(({ backends }) => backends.flatMap((b) => [b.address.text, b.node.text]));
  const own = config.tunnel.address === null ? [] : [config.tunnel.address.text];
  const kernel = await readKernel(new Set([...needs.addresses, ...nodes, ...own]));
  const { rows } = await readRows(['address show', 'rule show', 'route show table all'], true);
  const interfaces = rows.filter(({ ifname }) => ifname !== undefined).map(toInterface);
  const isRunning = kernel.links.get(config.device.name)?.carrier === true;
  const firewall = readFirewall();
  const vips = new Set(config.services.map(({ address }) => address.text));
  return {
    kernel,
    interfaces,
    rules: rows
      .filter((row) => row.priority !== undefined && Number(row.protocol) !== WEIR_PROTOCOL)
      .map(toForeignRule),
    routes: rows.filter(isIpv4Route).map(toForeignRoute),
    pathFilters: readSettings('rp_filter'),
    proxyArp: new Set([...readSettings('proxy_arp')].filter(([, value]) => value === 1).map(([name]) => name)),
    ...('problem' in firewall
      ? { firewall: null, firewallProblem: firewall.problem }
      : { firewall: firewall.rules, firewallProblem: '' }),
    kernelConntrack: readKernelConntrack(),
    owners: config.role === 'node' ? new Map() : askOwners([...vips], interfaces),
    tunnelPort: isRunning ? null : readTunnelPort(config),
    listen: isRunning ? null : await readListen(config),
  };
}

function text(value: unknown): string | null {
  return value === undefined ? null : String(value);
}

function toInterface(row: Row): Interface {
  const info = row.linkinfo as { info_kind?: string; info_data?: { port?: number } } | undefined;
  return {
    name: String(row.ifname),
    index: Number(row.ifindex),
    isUp: (row.flags as string[]).includes('UP'),
    mtu: Number(row.mtu),
    hardwareAddress: row.link_type === 'ether' || row.link_type === '[1]' ? String(row.address) : null,
    kind: info?.info_kind ?? '',
    port: Number(info?.info_data?.port ?? 0),
    addresses: ((row.addr_info ?? []) as Row[])
      .filter(({ family }) => family === 'inet')
      .map(({ local, prefixlen }) => parsePrefix(`${local}/${prefixlen}`)),
  };
}

/** What `ip -j rule` calls a selector, and how `ip rule` takes it. */
const PARTIAL_SELECTORS = ['fwmark', 'tos', 'ipproto', 'sport', 'dport', 'oif', 'uid_start', 'tun_id', 'not', 'l3mdev'];

function toForeignRule(row: Row): ForeignRule {
  const from = row.src === 'all' ? null : `${row.src}/${row.srclen ?? 32}`;
  const to = row.dst === undefined ? null : `${row.dst}/${row.dstlen ?? 32}`;
  const mark = row.fwmask === undefined ? row.fwmark : `${row.fwmark}/${row.fwmask}`;
  const isPartial = PARTIAL_SELECTORS.some((name) => row[name] !== undefined);
  return {
    priority: Number(row.priority),
    table: Number(row.table ?? 0),
    from: from === null ? null : parsePrefix(from),
    to: to === null ? null : parsePrefix(to),
    iif: text(row.iif),
    isPartial,
    text: [
      from === null ? '' : ` from ${from}`,
      to === null ? '' : ` to ${to}`,
      row.iif === undefined ? '' : ` iif ${row.iif}`,
      row.oif === undefined ? '' : ` oif ${row.oif}`,
      row.fwmark === undefined ? '' : ` fwmark ${mark}`,
      row.ipproto === undefined ? '' : ` ipproto ${String(row.ipproto).replace('ipproto-', '')}`,
      row.sport === undefined ? '' : ` sport ${row.sport}`,
      row.dport === undefined ? '' : ` dport ${row.dport}`,
      row.table === undefined ? '' : ` lookup ${row.table}`,
    ]
      .join('')
      .trim(),
  };
}

function isIpv4Route(row: Row): boolean {
  return (
    row.dst !== undefined &&
    row.priority === undefined &&
    !String(row.dst).includes(':') &&
    Number(row.protocol) !== WEIR_PROTOCOL &&
    row.pref === undefined
  );
}

/** rtnetlink(7): RTN_BLACKHOLE and what follows. */
const REFUSALS: Readonly<Record<number, string>> = { 6: 'blackhole', 7: 'unreachable', 8: 'prohibit', 9: 'throw' };

function toForeignRoute(row: Row): ForeignRoute {
  return {
    to: parsePrefix(row.dst === 'default' ? '0.0.0.0/0' : String(row.dst)),
    table: Number(row.table ?? MAIN_TABLE),
    dev: text(row.dev),
    refusal: REFUSALS[Number(row.type ?? 1)] ?? null,
  };
}

function readSettings(setting: string): Map<string, number> {
  const values = new Map<string, number>();
  for (const name of listConfigured()) {
    const value = readSysctl(['net', 'ipv4', 'conf', name, setting]);
    if (value !== null) values.set(name, value);
  }
  return values;
}

function readFirewall(): { readonly rules: Firewall } | { readonly problem: string } {
  const { error, status, stdout, stderr } = spawnSync('nft', ['-j', 'list', 'ruleset'], {
    encoding: 'utf8',
    env: { ...process.env, PATH: `${process.env.PATH ?? ''}:/usr/sbin:/sbin` },
    maxBuffer: 64 << 20,
  });
  if (error !== undefined) return { problem: 'nft is not installed: rules of nftables and iptables were not seen' };
  if (status !== 0) return { problem: `nft may not be asked (${stderr.split('\n')[0]!.trim()}): as root it may` };
  const legacy = readText('/proc/net/ip_tables_names')?.trim().split('\n').join(', ') ?? '';
  return { rules: { ...parseRuleset(stdout), legacyTables: legacy } };
}

function readKernelConntrack(): NetworkFacts['kernelConntrack'] {
  const [count, max] = ['count', 'max'].map((name) => readSysctl(['net', 'netfilter', `nf_conntrack_${name}`]));
  return count == null || max == null ? null : { count, max };
}

/** Only where an address lies in a link's own network does anybody ask for it by ARP. */
function askOwners(vips: readonly string[], interfaces: readonly Interface[]): NetworkFacts['owners'] {
  const owners = new Map<string, { owner: string | null } | { problem: string }>();
  for (const vip of vips) {
    const word = parseIpv4(vip);
    for (const { index, isUp, hardwareAddress, addresses } of interfaces) {
      if (!isUp || hardwareAddress === null || !addresses.some((prefix) => prefix.length < 32 && holds(prefix, word)))
        continue;
      if (addresses.some(({ address }) => address === word)) continue;
      owners.set(vip, probeArp({ index, hardwareAddress }, word, ARP_WAIT_MS));
    }
  }
  return owners;
}

function readTunnelPort({ role, tunnel: { address, port } }: Config): Taken | null {
  if (role !== 'node' || address === null) return null;
  try {
    close(openTunnelSocket(address.word, port).fd);
    return null;
  } catch (error) {
    return { problem: (error as Error).message, pid: holderOf('udp', port) };
  }
}

function readListen({ admin: { listen } }: Config): Promise<Taken | null> {
  if (listen === null) return Promise.resolve(null);
  const server = createServer();
  return new Promise((resolve) => {
    server.once('error', ({ code = '' }: NodeJS.ErrnoException) =>
      resolve({ problem: `TCP ${listen.host}:${listen.port}: ${code}`, pid: holderOf('tcp', listen.port) }),
    );
    server.listen({ host: listen.host, port: listen.port }, () => server.close(() => resolve(null)));
  });
}

const LISTENING = '0A';

/** The process whose socket is bound to a port, as far as /proc shows it. */
function holderOf(protocol: 'tcp' | 'udp', port: number): number | null {
  const wanted = port.toString(16).toUpperCase().padStart(4, '0');
  const inodes = new Set<string>();
  for (const table of [protocol, `${protocol}6`]) {
    for (const line of (readText(`/proc/net/${table}`) ?? '').split('\n').slice(1)) {
      const [, local, , state, , , , , , inode] = line.trim().split(/\s+/);
      if (local?.endsWith(`:${wanted}`) && (protocol === 'udp' || state === LISTENING)) inodes.add(`socket:[${inode}]`);
    }
  }
  for (const pid of inodes.size === 0 ? [] : readdirSync('/proc').filter((name) => /^\d+$/.test(name))) {
    if (filesOf(pid).some((target) => inodes.has(target))) return Number(pid);
  }
  return null;
}

function filesOf(pid: string): string[] {
  try {
    return readdirSync(`/proc/${pid}/fd`).map((fd) => readlinkSync(`/proc/${pid}/fd/${fd}`));
  } catch {
    return []; // it is another user's, or has ended
  }
}
