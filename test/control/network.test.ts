import { execFileSync, spawnSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import type { Config } from '../../lib/config/config.js';
import { parseConfig } from '../../lib/config/load.js';
import { formatRoute, formatRule, type Hop, type Link } from '../../lib/control/iproute.js';
import {
  type DesiredNetwork,
  desiredNetwork,
  formatPlan,
  networkNeeds,
  planNetwork,
  type Surroundings,
} from '../../lib/control/network-plan.js';

/*
 *     eth0 10.1.0.0/24 -- gateway -- br0 10.2.0.0/24: 10.2.0.11 ...
 */
function around(overrides: Partial<Record<keyof Surroundings, Record<string, unknown>>> = {}): Surroundings {
  const hops: Record<string, unknown> = { ...overrides.hops };
  const links = { weir0: { mtu: 1500 }, br0: { mtu: 1500 }, eth0: { mtu: 1500 }, ...overrides.links };
  for (let i = 1; i < 255; i++) hops[`10.2.0.${i}`] ??= { dev: 'br0', local: false };
  return {
    hops: new Map(Object.entries(hops) as [string, Hop][]),
    links: new Map(Object.entries(links) as unknown as [string, Link][]),
    pathFilters: new Map(Object.entries({ all: 0, default: 0, lo: 0, ...overrides.pathFilters }) as [string, number][]),
  };
}

function configOf(text: string): Config {
  const { config, problems } = parseConfig(text);
  if (config === null) throw new Error(JSON.stringify(problems));
  return config;
}

const service = (name: string, address: string, rest: string): string =>
  `  - { name: ${name}, address: ${address}, ${rest} }\n`;

const WEB = configOf(`
services:
${service('web', '10.96.0.10', 'port: 80, protocol: tcp, backends: [{address: 10.2.0.11, port: 8080}, {address: 10.2.0.12, port: 8080}]')}
${service('web-tls', '10.96.0.10', 'port: 443, protocol: tcp, backends: [{address: 10.2.0.11, port: 8080}]')}
${service('dns', '10.96.0.11', 'port: 53, protocol: udp, backends: [{address: 10.2.0.11, port: 5353}, {address: 10.2.0.11, port: 5354}]')}
`);

function rules(desired: DesiredNetwork): string[] {
  return desired.rules.map((rule) => formatRule(rule, true).replace(' protocol 196', ''));
}

t.test('the commands of a set-up, in order', async (t) => {
  t.equal(
    formatPlan(planNetwork(desiredNetwork(WEB, around()))),
    `# device (weir run makes it; by hand: ip tuntap add dev weir0 mode tun)
sysctl -w net.ipv4.conf.weir0.accept_local=1
sysctl -w net.ipv4.conf.weir0.rp_filter=0
sysctl -w net.ipv6.conf.weir0.disable_ipv6=1
ip link set dev weir0 mtu 1500 up

# settings
sysctl -w net.ipv4.ip_forward=1
sysctl -w net.ipv4.ip_early_demux=0
sysctl -w net.ipv4.tcp_early_demux=0
sysctl -w net.ipv4.udp_early_demux=0

# return path: its table
ip route replace blackhole default metric 65535 table 10096 proto 196
ip route replace default dev weir0 table 10096 proto 196

# return path: its rules; what comes out of the device never goes back in
ip rule add priority 1000 iif weir0 lookup main protocol 196
ip rule add priority 1001 iif weir0 unreachable protocol 196
ip rule add priority 1002 from 10.2.0.11 ipproto tcp sport 8080 lookup 10096 protocol 196
ip rule add priority 1002 from 10.2.0.12 ipproto tcp sport 8080 lookup 10096 protocol 196
ip rule add priority 1002 from 10.2.0.11 ipproto udp lookup 10096 protocol 196
ip rule add priority 1002 iif br0 ipproto icmp lookup 10096 protocol 196

# virtual and snat addresses
ip route replace blackhole 10.96.0.10 metric 65535 proto 196
ip route replace 10.96.0.10 dev weir0 proto 196
ip route replace blackhole 10.96.0.11 metric 65535 proto 196
ip route replace 10.96.0.11 dev weir0 proto 196
`,
  );
  const empty = desiredNetwork(configOf('{}'), around());
  t.same(rules(empty), ['priority 1000 iif weir0 lookup main', 'priority 1001 iif weir0 unreachable']);
  t.same(empty.addressRoutes, []);
});

t.test('names and numbers come from the configuration', async (t) => {
  const config = configOf('device: { name: lb.1, mtu: 9000 }\nnetwork: { table: 77 }');
  const desired = desiredNetwork(config, around());
  t.match(formatPlan(planNetwork(desired)), 'ip link set dev lb.1 mtu 9000 up\n');
  t.match(formatPlan(planNetwork(desired)), 'sysctl -w net/ipv4/conf/lb.1/rp_filter=0\n', 'dots of its own');
  t.same(desired.tableRoutes.map(formatRoute), [
    'blackhole default metric 65535 table 77 proto 196',
    'default dev lb.1 table 77 proto 196',
  ]);
});

t.test('snat needs its addresses, dsr nothing: their replies do not ask for rules', async (t) => {
  const config = configOf(`
snat: { addresses: [10.96.255.1, 10.96.255.2] }
tunnel: { address: 192.0.2.1 }
services:
${service('a', '10.96.0.10', 'port: 80, protocol: tcp, mode: snat, backends: [{address: 10.2.0.11, port: 80}]')}
${service('b', '10.96.0.20', 'port: 80, protocol: tcp, mode: dsr, backends: [{address: 10.2.0.12, port: 80}]')}
`);
  t.same(networkNeeds(config), {
    addresses: ['10.96.255.1', '10.96.255.2', '10.96.0.10', '10.96.0.20'],
    endpoints: [],
  });
  t.equal(desiredNetwork(config, around()).rules.length, 2);
});

/** A node at 10.2.0.11 with a process there and a container behind docker0. */
const NODE = configOf(`
role: node
tunnel: { address: 10.2.0.11 }
services:
${service('web', '10.96.0.10', 'port: 80, mode: dsr, backends: [{address: 10.2.0.11, port: 8080}, {address: 10.2.0.12, port: 8080}]')}
${service('box', '10.96.0.10', 'port: 81, mode: dsr, backends: [{address: 172.17.0.2, port: 80, node: 10.2.0.11}]')}
${service('dns', '10.96.0.10', 'port: 53, protocol: udp, mode: dsr, backends: [{address: 10.2.0.11, port: 5353}]')}
${service('log', '10.96.0.10', 'port: 514, protocol: udp, mode: dsr, backends: [{address: 172.17.0.2, port: 514, node: 10.2.0.11}]')}
${service('old', '10.96.0.12', 'port: 80, backends: [{address: 10.2.0.11, port: 9090}]')}
`);
const HOME = { hops: { '10.2.0.11': { dev: 'lo', local: true }, '172.17.0.2': { dev: 'docker0', local: false } } };

t.test('a gateway of tunnels', async (t) => {
  const config = configOf(`
tunnel: { address: 10.2.0.1 }
services:
${service('a', '10.96.0.10', 'port: 80, mode: dsr, backends: [{address: 172.17.0.2, port: 80, node: 10.2.0.11}, {address: 10.2.0.12, port: 80}]')}
`);
  const local = { '10.2.0.1': { dev: 'lo', local: true } };
  const desired = (overrides: Parameters<typeof around>[0]): DesiredNetwork =>
    desiredNetwork(config, around(overrides));
  t.same(desired({ hops: local }).notes, []);
  t.equal(desired({ hops: local }).sysctls.find(({ path }) => path[4] === 'accept_local')?.required, true);
  t.equal(desiredNetwork(WEB, around()).sysctls.find(({ path }) => path[4] === 'accept_local')?.required, false);
  t.match(desired({}).notes, [/^tunnel\.address 10\.2\.0\.1 is no address of this host/]);
  t.same(desired({ hops: local, links: { br0: { mtu: 1450 } } }).notes, [
    'br0 has an MTU of 1450, weir0 of 1500: set device.mtu to 1450',
  ]);
  const lost = around({ hops: { ...local, '10.2.0.12': { dev: 'weir0', local: false } } });
  (lost.hops as Map<string, Hop>).delete('10.2.0.11');
  t.same(desiredNetwork(config, lost).notes, [
    'there is no route to node 10.2.0.11',
    'the route to node 10.2.0.12 leads back into weir0',
  ]);

  t.equal(desired({ hops: local }).deviceAddress, null);
  for (const all of [1, 2]) {
    const strict = desired({ hops: local, pathFilters: { all } });
    t.match(formatPlan(planNetwork(strict)), 'ip address replace 10.2.0.1/32 dev weir0 scope host\n');
    t.equal(desiredNetwork(NODE, around({ ...HOME, pathFilters: { all } })).deviceAddress, '10.2.0.11');
    t.equal(desiredNetwork(WEB, around({ pathFilters: { all } })).deviceAddress, null);
  }
});

t.test('beyond 64 endpoints the rules are per interface', async (t) => {
  const backends = (count: number): string =>
    Array.from({ length: count }, (_, i) => `{address: 10.2.0.${10 + (i >> 1)}, port: ${8080 + (i & 1)}}`).join(', ');
  const config = (count: number, network = ''): Config =>
    configOf(
      `${network}\nservices:\n${service('a', '10.96.0.10', `port: 80, protocol: tcp, backends: [${backends(count)}]`)}`,
    );
  const twoSides = around({ hops: { '10.2.0.10': { dev: 'vlan9', local: false } } });
  t.equal(rules(desiredNetwork(config(64), twoSides)).length, 2 + 64 + 2);
  const interfaces = ['priority 1002 iif br0 lookup 10096', 'priority 1002 iif vlan9 lookup 10096'];
  t.same(rules(desiredNetwork(config(65), twoSides)).slice(2), interfaces);
  t.same(rules(desiredNetwork(config(4, 'network: { returnPath: interface }'), twoSides)).slice(2), interfaces);
  const local = around({ hops: { '10.2.0.10': { dev: 'lo', local: true } } });
  t.same(
    rules(desiredNetwork(config(65), local)).slice(2),
    [
      'priority 1002 from 10.2.0.10 ipproto tcp sport 8080 lookup 10096',
      'priority 1002 from 10.2.0.10 ipproto tcp sport 8081 lookup 10096',
      'priority 1002 from 10.2.0.10 ipproto icmp lookup 10096',
      'priority 1002 iif br0 lookup 10096',
    ],
    'a backend on the gateway itself keeps its own: never iif lo',
  );
});

t.test('the way to a VIP is as wide as the narrowest to its dnat backends', async (t) => {
  const widths = (config: Config, overrides: Parameters<typeof around>[0]): (number | undefined)[] =>
    desiredNetwork(config, around(overrides))
      .addressRoutes.filter(({ dev }) => dev !== null)
      .map(({ mtu }) => mtu);
  t.same(widths(WEB, {}), [undefined, undefined]);
  t.same(widths(WEB, { links: { br0: { mtu: 9000 } } }), [undefined, undefined]);
  t.same(widths(WEB, { links: { br0: { mtu: 1400 } } }), [1400, 1400]);
  const byRoute = { '10.2.0.12': { dev: 'br0', local: false, mtu: 1300 } };
  t.same(widths(WEB, { hops: byRoute, links: { br0: { mtu: 1400 } } }), [1300, 1400], '10.2.0.12 is web’s alone');
  t.same(widths(WEB, { hops: { '10.2.0.12': undefined } }), [undefined, undefined]);
  const snat = configOf(`
snat: { addresses: [10.96.255.1] }
services:
${service('a', '10.96.0.10', 'port: 80, protocol: tcp, mode: snat, backends: [{address: 10.2.0.11, port: 80}]')}
`);
  t.same(widths(snat, { links: { br0: { mtu: 1400 } } }), [undefined, undefined], 'errors to its address come to weir');
  t.equal(
    formatRoute({ to: '10.96.0.10', dev: 'weir0', table: 254, src: null, mtu: 1400 }),
    '10.96.0.10 dev weir0 mtu 1400 proto 196',
  );
});

t.test('a node leads in what its own backends answer, and no VIP', async (t) => {
  const desired = desiredNetwork(NODE, around(HOME));
  t.same(rules(desired), [
    'priority 1000 iif weir0 lookup main',
    'priority 1001 iif weir0 unreachable',
    'priority 1002 from 10.2.0.11 ipproto tcp sport 8080 lookup 10096',
    'priority 1002 from 172.17.0.2 ipproto tcp sport 80 lookup 10096',
    'priority 1002 iif lo ipproto udp sport 5353 lookup 10096',
    'priority 1002 from 172.17.0.2 ipproto udp lookup 10096',
    'priority 1002 from 10.2.0.11 ipproto icmp lookup 10096',
    'priority 1002 iif docker0 ipproto icmp lookup 10096',
  ]);
  t.same(desired.addressRoutes, []);
  t.same(desired.tableRoutes.map(formatRoute), [
    'blackhole default metric 65535 table 10096 proto 196',
    'default dev weir0 table 10096 proto 196 src 10.2.0.11',
  ]);
  t.same(desired.sysctls, desiredNetwork(WEB, around()).sysctls, 'settings are a gateway’s');
  t.same(desired.notes, []);
  const learned = [{ address: '10.2.0.11', port: 9000, protocol: 17 }];
  const more = rules(desiredNetwork(NODE, around(HOME), { addresses: [], endpoints: learned }));
  t.same(
    more.filter((text) => !rules(desired).includes(text)),
    ['priority 1002 iif lo ipproto udp sport 9000 lookup 10096'],
  );
});

t.test('strict filtering at a node that answers datagrams alone', async (t) => {
  const dns = configOf(`
role: node
tunnel: { address: 10.2.0.11 }
services:
${service('dns', '10.96.0.10', 'port: 53, protocol: udp, mode: dsr, backends: [{address: 10.2.0.11, port: 5353}]')}
`);
  t.match(desiredNetwork(dns, around({ ...HOME, pathFilters: { eth0: 1 } })).notes, [/rp_filter is strict on eth0:/]);
});

t.test('UDP servers at two addresses of this host', async (t) => {
  const hops = { ...HOME.hops, '10.2.0.12': { dev: 'lo', local: true } };
  const learned = [{ address: '10.2.0.12', port: 9000, protocol: 17 }];
  const desired = desiredNetwork(NODE, around({ hops }), { addresses: [], endpoints: learned });
  t.same(desired.tableRoutes.map(formatRoute)[1], 'default dev weir0 table 10096 proto 196', 'none can be chosen');
  t.match(desired.notes, [/UDP servers at 10\.2\.0\.11, 10\.2\.0\.12 must bind to their address/]);
});

t.test('what flows still need stays, without a route in main', async (t) => {
  const desired = desiredNetwork(WEB, around(), {
    addresses: ['10.96.0.10', '10.96.0.99'],
    endpoints: [
      { address: '10.2.0.11', port: 8080, protocol: 6 },
      { address: '10.2.0.13', port: 8080, protocol: 6 },
    ],
  });
  const more = rules(desired).filter((text) => !rules(desiredNetwork(WEB, around())).includes(text));
  t.same(more, [
    'priority 1002 from 10.2.0.13 ipproto tcp sport 8080 lookup 10096',
    'priority 1002 to 10.96.0.99 lookup 10096',
  ]);
  t.same(desired.addressRoutes, desiredNetwork(WEB, around()).addressRoutes);
});

t.test('rp_filter: the larger of all and device counts', async (t) => {
  const device = (all: number): number | undefined =>
    desiredNetwork(WEB, around({ pathFilters: { all } })).sysctls.find(({ path }) => path[4] === 'rp_filter')?.value;
  t.equal(device(0), 0);
  t.equal(device(1), 2, 'strict everywhere: loose for the device, and nobody else is touched');
  t.equal(device(2), 0);
});

t.test('notes: what the operator should know', async (t) => {
  const notes = (overrides: Parameters<typeof around>[0]): readonly string[] =>
    desiredNetwork(WEB, around(overrides)).notes;
  t.same(notes({}), []);
  t.match(notes({ hops: { '10.96.0.10': { dev: 'lo', local: true } } }), [/10\.96\.0\.10 is an address of this host/]);
  t.match(notes({ hops: { '10.2.0.12': undefined } }), []);
  t.match(notes({ hops: { '10.2.0.11': { dev: 'weir0', local: false } } }), [/10\.2\.0\.11 leads back into weir0/]);
  t.match(notes({ pathFilters: { eth0: 1, br0: 2, weir0: 1, default: 1 } }), [/rp_filter is strict on eth0:/]);
  t.match(notes({ pathFilters: { all: 1, eth0: 0, br0: 2 } }), [/strict on eth0:/]);
  const far = configOf(
    `services:\n${service('a', '10.96.0.10', 'port: 80, protocol: tcp, backends: [{address: 192.0.2.7, port: 80}]')}`,
  );
  t.match(desiredNetwork(far, around()).notes, ['there is no route to backend 192.0.2.7']);
});

t.test('in a network namespace of its own', async (t) => {
  const enter = process.getuid?.() === 0 ? ['-nm'] : ['-Urnm'];
  const able = spawnSync('unshare', [...enter, 'ip', 'tuntap', 'add', 'dev', 'weir-probe', 'mode', 'tun'], {
    encoding: 'utf8',
  });
  if (able.status !== 0) {
    t.plan(0, `cannot make a TUN device in a namespace: ${able.error?.message ?? able.stderr.trim()}`);
    return;
  }
  t.match(execFileSync('ip', ['-V'], { encoding: 'utf8' }), /iproute2/);
  const inside = fileURLToPath(new URL('./network-kernel.ts', import.meta.url));
  await t.spawn('unshare', [...enter, process.execPath, '--import=tsx', inside], {}, 'network-kernel');
});
