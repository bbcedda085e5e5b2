import type { Config, ServiceConfig } from '../../config/config.js';
import { overheadBytes } from '../../tunnel/encapsulation.js';
import { parseIpv4 } from '../../wire/address.js';
import { INNER_ETHERNET, INNER_IPV4 } from '../../wire/geneve.js';
import { desiredNetwork, networkNeeds } from '../network-plan.js';
import { formatSysctl, readSysctl, type Sysctl } from '../sysctl.js';
import { usesTunnel } from '../tunnel-plan.js';
import { Check, type Finding } from './finding.js';
import type { Interface, NetworkFacts, Taken } from './network-facts.js';
import { holds } from './prefix.js';

/** Room that MSS clamping leaves for the headers of IPv4 and TCP. */
const HEADER_BYTES = 40;

/** Whether weir, at its start, makes a setting by itself. */
export function canMend(config: Config, canSetSysctls: boolean): boolean {
  return config.network.manage && canSetSysctls;
}

/** @param mends as `canMend` says */
export function checkSettings(config: Config, facts: NetworkFacts, mends: boolean): Finding[] {
  const { sysctls } = desiredNetwork(config, { ...facts.kernel, pathFilters: facts.pathFilters });
  const named: readonly [string, string][] = [
    ['ip-forward', 'ip_forward'],
    ['early-demux', 'early_demux'],
    ['device-filter', 'rp_filter'],
    ['accept-local', 'accept_local'],
  ];
  return named.flatMap(([name, ending]) => {
    const settings = sysctls.filter(({ path }) => path.at(-1)!.endsWith(ending)).flatMap((each) => presentOf(each));
    if (settings.length === 0) return [];
    return [checkSetting(new Check(name, `without it ${settings[0]!.setting.without}`), settings, mends)];
  });
}

interface Setting {
  readonly setting: Sysctl;
  readonly present: number;
}

/** Those of a device that does not exist yet will be what `default` says. */
function presentOf(setting: Sysctl): Setting[] {
  const present = readSysctl(setting.path);
  if (present !== null) return [{ setting, present }];
  if (setting.path[2] !== 'conf') return [];
  const path = setting.path.map((step, i) => (i === 3 ? 'default' : step));
  const inherited = readSysctl(path);
  return inherited === null ? [] : [{ setting: { ...setting, path }, present: inherited }];
}

function checkSetting(check: Check, settings: readonly Setting[], mends: boolean): Finding {
  const wrong = settings.filter(({ setting, present }) => setting.value !== present);
  const show = (list: readonly Setting[]): string =>
    list.map(({ setting: { path }, present }) => formatSysctl({ path, value: present })).join(' ');
  if (wrong.length === 0) return check.ok(show(settings));
  if (mends) return check.ok(`${show(wrong)}: weir run sets it, and back at its end`);
  const mend = wrong.map(({ setting }) => `sysctl -w ${formatSysctl(setting)}`).join(' && ');
  const found = `${show(wrong)}, and weir cannot or may not change it (in a container: --sysctl)`;
  return wrong.some(({ setting }) => setting.required) ? check.fail(found, mend) : check.warn(found, mend);
}

/** Strict filters of the interfaces that packets of clients and backends come in by. */
export function checkPathFilters(config: Config, { pathFilters, interfaces }: NetworkFacts): Finding {
  const check = new Check(
    'rp-filter',
    'where it is strict (1), direct connections to a backend’s own port are dropped, and so are packets that come by another way than answers go',
  );
  const all = pathFilters.get('all') ?? 0;
  const strict = interfaces
    .map(({ name }) => name)
    .filter((name) => name !== 'lo' && name !== config.device.name && pathFilters.has(name))
    .filter((name) => Math.max(all, pathFilters.get(name)!) === 1);
  if (strict.length === 0) return check.ok('not strict anywhere');
  const names = all === 1 ? ['all'] : strict;
  const settings = names.map((name) => formatSysctl({ path: ['net', 'ipv4', 'conf', name, 'rp_filter'], value: 2 }));
  return check.warn(`strict on ${strict.join(', ')}`, settings.map((each) => `sysctl -w ${each}`).join(' && '));
}

/** That the name of the device is free, or weir's. */
export function checkDevice(config: Config, { interfaces, kernel }: NetworkFacts): Finding {
  const { name } = config.device;
  const check = new Check(
    'device',
    'weir makes its device anew at each start; the name must be free, or that of a TUN device',
  );
  const present = interfaces.find((each) => each.name === name);
  if (present === undefined) return check.ok(`${name} does not exist yet`);
  if (kernel.links.get(name)?.carrier && present.kind === 'tun') return check.ok(`${name} is held by a running weir`);
  if (present.kind === 'tun') return check.ok(`${name} exists, and nobody holds it`);
  return check.fail(`${name} exists and is no TUN device`, `ip link del ${name}`);
}

/** VIPs and snat addresses must be nobody's: neither this host's nor a neighbour's. */
export function checkAddresses(config: Config, facts: NetworkFacts): Finding[] {
  if (config.role === 'node') return [];
  return networkNeeds(config).addresses.map((address) => {
    const check = new Check(
      `vip ${address}`,
      'the kernel routes a VIP to weir only if no host on the link has it, this one included',
    );
    const holder = facts.interfaces.find(({ addresses }) =>
      addresses.some(({ text }) => text.startsWith(`${address}/`)),
    );
    if (holder !== undefined) {
      const { text } = holder.addresses.find((each) => each.text.startsWith(`${address}/`))!;
      return check.fail(
        `${holder.name} has it as its own: packets end there`,
        `ip address del ${text} dev ${holder.name}`,
      );
    }
    if (facts.kernel.hops.get(address)?.local) {
      return check.fail('a local route makes it this host’s own', `ip route del local ${address} table local`);
    }
    const answer = facts.owners.get(address);
    if (answer === undefined) return check.ok('on no link; routers lead to it');
    if ('problem' in answer)
      return check.skip(`its link could not be asked who has it (${answer.problem}; it takes CAP_NET_RAW)`);
    if (answer.owner !== null) {
      return check.fail(
        `${answer.owner} on the link answers for it`,
        `ip address del ${address}/32 dev INTERFACE   # on that host`,
      );
    }
    return checkProxyArp(check, address, facts);
  });
}

/** An address out of a link's own network is asked for by ARP, and weir's device answers none. */
function checkProxyArp(check: Check, address: string, { interfaces, proxyArp }: NetworkFacts): Finding {
  const word = parseIpv4(address);
  const link = interfaces.find(({ addresses }) =>
    addresses.some((prefix) => prefix.length < 32 && holds(prefix, word)),
  );
  if (link === undefined || proxyArp.has(link.name) || proxyArp.has('all')) return check.ok('nobody else has it');
  return check.warn(
    `it lies in the network of ${link.name}, where hosts ask for it by ARP and get no answer`,
    `sysctl -w ${formatSysctl({ path: ['net', 'ipv4', 'conf', link.name, 'proxy_arp'], value: 1 })}`,
  );
}

/** The way to each backend, or in mode dsr to its node. */
export function checkRoutes(config: Config, facts: NetworkFacts): Finding[] {
  const seen = new Set<string>();
  return config.services.flatMap((service) =>
    service.backends.flatMap((backend) => {
      const isTunnelled = service.mode === 'dsr' && config.role === 'gateway';
      const target = isTunnelled ? backend.node.text : backend.address.text;
      if (config.role === 'node' && !isAtThisNode(config, service, backend.node.word)) return [];
      if (seen.has(target)) return [];
      seen.add(target);
      return [checkRoute(config, facts, target, isTunnelled ? `node ${target}` : `backend ${target}`)];
    }),
  );
}

function isAtThisNode({ tunnel }: Config, { mode }: ServiceConfig, node: number): boolean {
  return mode === 'dsr' && node === tunnel.address?.word;
}

function checkRoute(
  config: Config,
  { kernel, interfaces, routes }: NetworkFacts,
  address: string,
  name: string,
): Finding {
  const check = new Check(`route ${name}`, 'what weir sends there is routed by the kernel');
  const hop = kernel.hops.get(address);
  const word = parseIpv4(address);
  if (hop === undefined) {
    const down = interfaces.find(({ isUp, addresses }) => !isUp && addresses.some((prefix) => holds(prefix, word)));
    if (down !== undefined) return check.fail(`its interface ${down.name} is down`, `ip link set dev ${down.name} up`);
    const refusal = routes
      .filter(({ refusal, to }) => refusal !== null && holds(to, word))
      .sort((a, b) => b.to.length - a.to.length)[0];
    if (refusal !== undefined) {
      const route = `${refusal.refusal} ${refusal.to.text}`;
      return check.fail(`a route refuses it: ${route}`, `ip route del ${route} table ${refusal.table}`);
    }
    return check.fail('there is none', `ip route add ${address}/32 via ROUTER`);
  }
  if (hop.dev === config.device.name && config.role === 'gateway') {
    return check.fail(`it leads back into ${hop.dev}`, `ip route del ${address} dev ${hop.dev}`);
  }
  if (config.role === 'gateway' && hop.local) return check.ok('this host itself');
  return check.ok(`by ${hop.dev}`);
}

/**
 * The links that packets of tunnels leave by. What is narrower towards dnat backends weir passes on to clients by itself: the route to
 * a VIP has the `mtu` of the narrowest.
 */
export function checkWidths(config: Config, { kernel, interfaces }: NetworkFacts): Finding[] {
  if (!usesTunnel(config)) return [];
  const { mtu } = config.device;
  const nodes = new Set(
    config.services.flatMap(({ mode, backends }) => (mode === 'dsr' ? backends.map(({ node }) => node.text) : [])),
  );
  const inner = mtu - overheadBytes(config.tunnel.inner === 'ethernet' ? INNER_ETHERNET : INNER_IPV4);
  const room = `tunnelled packets of up to ${inner} bytes, an MSS of ${inner - HEADER_BYTES}`;
  return [...nodes].flatMap((node) => {
    const hop = kernel.hops.get(node);
    if (hop === undefined || hop.local || hop.dev === config.device.name) return [];
    const check = new Check(
      `mtu node ${node}`,
      'tunnels fill device.mtu and have DF set: what does not fit the link is lost until a router complains',
    );
    const width = hop.mtu ?? interfaces.find(({ name }) => name === hop.dev)?.mtu ?? mtu;
    if (width >= mtu) return [check.ok(`${hop.dev} takes ${width}: ${room}`)];
    const found = `${hop.dev} takes ${width}, device.mtu is ${mtu}: set device.mtu to ${width} in the file, or, if the network carries more, the link’s`;
    const mend =
      hop.mtu === undefined
        ? `ip link set dev ${hop.dev} mtu ${mtu}`
        : `ip route change ${node} dev ${hop.dev} mtu ${mtu}`;
    return [check.fail(found, mend)];
  });
}

/** That `tunnel.address` is this host's, and at a node that its port is free. */
export function checkTunnel(config: Config, { kernel, interfaces, tunnelPort }: NetworkFacts): Finding[] {
  const { address, port } = config.tunnel;
  if (address === null || !(config.role === 'node' || usesTunnel(config))) return [];
  const isNode = config.role === 'node';
  const own = new Check(
    'tunnel-address',
    isNode ? 'it is where gateways send what they tunnel' : 'what routers say about the path to nodes is sent there',
  );
  const mend = `ip address add ${address.text}/32 dev lo`;
  const isOwn = kernel.hops.get(address.text)?.local === true;
  const found = `${address.text} is no address of this host`;
  const findings = [isOwn ? own.ok(address.text) : isNode ? own.fail(found, mend) : own.warn(found, mend)];
  if (!isNode || !isOwn) return findings;
  const check = new Check('tunnel-port', 'a node takes tunnelled packets from this UDP port');
  return [...findings, checkPort(check, `UDP ${address.text}:${port}`, tunnelPort, geneveDevice(interfaces, port))];
}

function geneveDevice(interfaces: readonly Interface[], port: number): string | undefined {
  return interfaces.find((each) => each.kind === 'geneve' && (each.port === port || each.port === 0))?.name;
}

export function checkListen({ admin: { listen } }: Config, { listen: taken }: NetworkFacts): Finding[] {
  if (listen === null) return [];
  const check = new Check('admin-listen', 'metrics and health are served there');
  return [checkPort(check, `TCP ${listen.host}:${listen.port}`, taken)];
}

function checkPort(check: Check, place: string, taken: Taken | null, device?: string): Finding {
  if (taken === null) return check.ok(`${place} is free, or weir’s`);
  if (taken.pid !== null) return check.fail(`${taken.problem}, by process ${taken.pid}`, `kill ${taken.pid}`);
  if (device !== undefined)
    return check.fail(`${taken.problem}, by the kernel’s device ${device}`, `ip link del ${device}`);
  return check.fail(
    `${taken.problem}; by whom could not be seen`,
    `fuser -k ${place.split(':')[1]}/${place.slice(0, 3).toLowerCase()}`,
  );
}
