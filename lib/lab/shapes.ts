import { WeirError } from '../base/errors.js';
import {
  backendAddress,
  CLIENT_ADDRESS,
  CLIENT_ROUTER_ADDRESS,
  GATEWAY_ADDRESS,
  gatewayAddress,
  MAX_BACKENDS,
  MAX_GATEWAYS,
  ROUTER_ADDRESS,
  SERVICE_NET,
} from './addresses.js';
import { must } from './process.js';

/*
 * inline: the gateway is the only way, there and back.
 *
 *                              PREFIX-gw
 *   PREFIX-client         +-------------------+
 *  +-----------+          |       weir0       |         PREFIX-b1
 *  |           |   veth   |  VIP 10.96.0.10   |  veth  +--------------+
 *  |    eth0 --+----------+- client     br0 --+----+---+- eth0        |
 *  | 10.1.0.2  |          |  10.1.0.1         |    |   |  10.2.0.11   |
 *  +-----------+          |         10.2.0.1  |    |   +--------------+
 *   default via           +-------------------+    +---- PREFIX-b2 10.2.0.12
 *   10.1.0.1                                       +---- PREFIX-b3 10.2.0.13, default via 10.2.0.1
 *
 * one-arm: gateways are hosts of the LAN like any other, and what backends answer does not come past them.
 *
 *                             PREFIX-router                   PREFIX-gw
 *   PREFIX-client         +-------------------+             +-----------------+
 *  +-----------+          |                   |        +----+- eth0   weir0   |
 *  |           |   veth   |                   |  veth  |    | 10.2.0.1        |
 *  |    eth0 --+----------+- client     br0 --+--------+    +-----------------+
 *  | 10.1.0.2  |          |  10.1.0.1         |        +---- PREFIX-gw2 10.2.0.2
 *  +-----------+          |       10.2.0.254  |        +---- PREFIX-b1 10.2.0.11
 *   default via           +-------------------+        +---- PREFIX-b2 10.2.0.12
 *   10.1.0.1               VIPs: via 10.2.0.1, .2      +---- PREFIX-b3 10.2.0.13, all: default via 10.2.0.254
 *
 * Of several gateways the router picks one per connection, by a hash of addresses and ports (ECMP).
 *
 * Either way one namespace is the hub: it routes between client and LAN, the LAN is a bridge in it, and its end of each link
 * is named by the role at the other end. Without weir the client reaches the backends directly.
 *
 * The LAN has two routers, gateway and router, and one of them often sends back where it received from. The kernel would tell
 * hosts of shorter ways (ICMP redirects), and with strict reverse path filtering refuse answers that come by another way than
 * requests left; neither is wanted. The VIP is routed to the gateways, an address of no interface: nobody asks for it by ARP.
 */

export type Shape = 'inline' | 'one-arm';

/** Of /proc/sys/net/ipv4. */
type Settings = Readonly<Record<string, number | string>>;

export interface Plan {
  /** The role of the namespace that all others are linked to. */
  readonly hub: string;
  /** Of the hub on the LAN: everybody's default route there. */
  readonly hubAddress: string;
  readonly gateways: readonly string[];
  readonly backends: readonly string[];
  /** Addresses of the hosts on the LAN other than the hub, by role. */
  readonly lan: Readonly<Record<string, string>>;
  /** What the hub sends VIPs to by a route; where it has them itself, nothing. */
  readonly nextHops: readonly string[];
}

/** @throws WeirError USAGE when a shape has no room for as many */
export function makePlan(shape: Shape, gatewayCount: number, backendCount: number): Plan {
  if (!(backendCount >= 0 && backendCount <= MAX_BACKENDS)) {
    throw new WeirError('USAGE', `a lab has up to ${MAX_BACKENDS} backends, not ${backendCount}`);
  }
  const room = shape === 'inline' ? 1 : MAX_GATEWAYS;
  if (!(gatewayCount >= 1 && gatewayCount <= room)) {
    throw new WeirError('USAGE', `a lab of shape ${shape} has 1 to ${room} gateways, not ${gatewayCount}`);
  }
  const gateways = Array.from({ length: gatewayCount }, (_, i) => (i === 0 ? 'gw' : `gw${i + 1}`));
  const backends = Array.from({ length: backendCount }, (_, i) => `b${i + 1}`);
  const lan = Object.fromEntries(backends.map((role, i) => [role, backendAddress(i + 1)]));
  if (shape === 'inline') return { hub: 'gw', hubAddress: GATEWAY_ADDRESS, gateways, backends, lan, nextHops: [] };
  const armed = Object.fromEntries(gateways.map((role, i) => [role, gatewayAddress(i + 1)]));
  return {
    hub: 'router',
    hubAddress: ROUTER_ADDRESS,
    gateways,
    backends,
    lan: { ...armed, ...lan },
    nextHops: Object.values(armed),
  };
}

/** Of every namespace. */
export function rolesOf({ hub, lan }: Plan): string[] {
  return ['client', hub, ...Object.keys(lan)];
}

export interface Site {
  /** The full name of the namespace of a role. */
  readonly namespace: (role: string) => string;
  /** Of every link. */
  readonly mtu: number;
}

/** @throws WeirError LAB_FAILED when the kernel refuses something */
export async function build(plan: Plan, { namespace, mtu }: Site): Promise<void> {
  const { hub, lan } = plan;
  const roles = rolesOf(plan);
  const ip = (role: string, commands: readonly string[]): Promise<string> => batch(['-n', namespace(role)], commands);
  await batch(
    [],
    roles.map((role) => `netns add ${namespace(role)}`),
  );
  // Devices take over what `default` says when they are made.
  await Promise.all(roles.map((role) => set(namespace(role), settingsOf(plan, role))));
  await batch(
    [],
    roles
      .filter((role) => role !== hub)
      .map(
        (role) =>
          `link add ${role} mtu ${mtu} netns ${namespace(hub)} type veth peer name eth0 mtu ${mtu} netns ${namespace(role)}`,
      ),
  );
  await ip(hub, [
    'link set lo up',
    `addr add ${CLIENT_ROUTER_ADDRESS}/24 dev client`,
    'link set client up',
    `link add br0 mtu ${mtu} type bridge`,
    `addr add ${plan.hubAddress}/24 dev br0`,
    'link set br0 up',
    ...Object.keys(lan).map((role) => `link set ${role} master br0 up`),
    ...(plan.nextHops.length === 0 ? [] : [routeToGateways(plan.nextHops)]),
  ]);
  const plug = (role: string, address: string, router: string): Promise<string> =>
    ip(role, [
      'link set lo up',
      `addr add ${address}/24 dev eth0`,
      'link set eth0 up',
      `route add default via ${router}`,
    ]);
  await Promise.all([
    plug('client', CLIENT_ADDRESS, CLIENT_ROUTER_ADDRESS),
    ...Object.entries(lan).map(([role, address]) => plug(role, address, plan.hubAddress)),
  ]);
}

/** The `ip` command by which a router sends what is for VIPs to some gateways, and to no others. */
export function routeToGateways(addresses: readonly string[]): string {
  return `route replace ${SERVICE_NET} ${addresses.map((address) => `nexthop via ${address}`).join(' ')}`;
}

function settingsOf({ hub, gateways, nextHops }: Plan, role: string): Settings {
  const everybody = both('rp_filter', 0);
  // Many short connections from one address: all ports, and those in TIME_WAIT again.
  if (role === 'client') return { ...everybody, ip_local_port_range: '1024 65535', tcp_tw_reuse: 1 };
  const routers = { ...everybody, ...both('send_redirects', 0) };
  // By addresses and ports. By addresses alone one client would know one gateway.
  const spread = nextHops.length > 1 ? { fib_multipath_hash_policy: 1 } : {};
  if (role === hub) return { ip_forward: 1, ...routers, ...spread };
  // Whether a host on the LAN forwards is for weir to say.
  return gateways.includes(role) ? { ip_forward: 0, ...routers } : everybody;
}

function both(name: string, value: number): Record<string, number> {
  return { [`conf/all/${name}`]: value, [`conf/default/${name}`]: value };
}

async function set(namespace: string, settings: Settings): Promise<void> {
  const script = Object.entries(settings).map(([name, value]) => `echo ${value} > /proc/sys/net/ipv4/${name}`);
  await must('ip', ['netns', 'exec', namespace, 'sh', '-ec', script.join('\n')]);
}

function batch(options: readonly string[], commands: readonly string[]): Promise<string> {
  return must('ip', [...options, '-batch', '-'], { input: commands.map((command) => `${command}\n`).join('') });
}
