import '../support/plain-children.js';
/*
 * The set-up in a real kernel; network.test.ts runs this file in a namespace that dies with it:
 *
 *     c0 10.1.0.1/24 <- clients      this namespace      br0 10.2.0.1/24 -> backends
 *
 * No packet is sent: `ip route get ... iif` asks the kernel what it would do with one.
 */
import { type ChildProcess, execFileSync, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import t from 'tap';
import type { Config } from '../../lib/config/config.js';
import { parseConfig } from '../../lib/config/load.js';
import { askRoutes, execute, executeRemovals, readKernel } from '../../lib/control/iproute.js';
import {
  cleanNetwork,
  compareNetworks,
  describeNetwork,
  leftEndpoints,
  NetworkSetup,
} from '../../lib/control/network.js';
import { formatPlan, NO_NEEDS } from '../../lib/control/network-plan.js';
import { readSysctl, writeSysctl } from '../../lib/control/sysctl.js';

function ip(command: string): string {
  return execFileSync('ip', command.split(' '), { encoding: 'utf8' });
}

function configOf({ backends = ['10.2.0.11'], vip = '10.96.0.10', extra = '' } = {}): Config {
  const list = backends.map((address) => `{ address: ${address}, port: 8080 }`).join(', ');
  const { config, problems } = parseConfig(`
${extra}
services:
  - { name: web, address: ${vip}, port: 80, protocol: tcp, backends: [${list}] }
  - { name: dns, address: ${vip}, port: 53, protocol: udp, backends: [{ address: 10.2.0.12, port: 53 }] }
`);
  if (config === null) throw new Error(JSON.stringify(problems));
  return config;
}

function nodeConfig(): Config {
  const { config, problems } = parseConfig(`
role: node
tunnel: { address: 10.2.0.1 }
services:
  - { name: web, address: 10.96.0.10, port: 80, mode: dsr, backends: [{ address: 10.2.0.1, port: 8080 }] }
  - { name: box, address: 10.96.0.10, port: 81, mode: dsr, backends: [{ address: 10.2.0.11, port: 80, node: 10.2.0.1 }] }
  - { name: dns, address: 10.96.0.10, port: 53, protocol: udp, mode: dsr, backends: [{ address: 10.2.0.1, port: 53 }] }
`);
  if (config === null) throw new Error(JSON.stringify(problems));
  return config;
}

/** Everything that could be left behind, as text. */
function state(): string {
  const rules = ip('-4 rule show').split('\n');
  const routes = ip('-4 route show table all').split('\n');
  return [...rules, ...routes.filter((line) => !line.includes('table local'))].sort().join('\n');
}

/** Which device a packet that came in on `iif` leaves by, or the kernel's answer. */
function way(iif: string, from: string, to: string, rest = ''): string {
  const { stdout, stderr } = spawnSync(
    'ip',
    ['route', 'get', to, 'from', from, 'iif', iif, ...rest.split(' ').filter(Boolean)],
    {
      encoding: 'utf8',
    },
  );
  return / dev (\S+)/.exec(stdout)?.[1] ?? stderr.replace('RTNETLINK answers: ', '').trim();
}

function addDevice(name = 'weir0'): void {
  ip(`tuntap add dev ${name} mode tun`);
}

ip('link set lo up');
for (const [name, address] of [
  ['c0', '10.1.0.1/24'],
  ['br0', '10.2.0.1/24'],
]) {
  ip(`link add ${name} type veth peer name ${name}-peer`);
  ip(`addr add ${address} dev ${name}`);
  ip(`link set ${name} up`);
  ip(`link set ${name}-peer up`);
}
for (const name of ['all', 'default', 'c0', 'br0']) writeSysctl(['net', 'ipv4', 'conf', name, 'rp_filter'], 0);
const FORWARD = ['net', 'ipv4', 'ip_forward'];
const EARLY_DEMUX = ['net', 'ipv4', 'ip_early_demux'];
writeSysctl(FORWARD, 0);
writeSysctl(EARLY_DEMUX, 1);
const untouched = state();

t.test('apply, apply again, remove', async (t) => {
  addDevice();
  const setup = new NetworkSetup(configOf());
  const started = performance.now();
  const first = await setup.apply();
  t.comment(`set up in ${(performance.now() - started).toFixed(1)} ms`);
  t.same(first.notes, []);
  t.match(first.commands[0], /^sysctl -w net\.ipv4/);
  t.same((await setup.apply()).commands, [], 'a second run does nothing');
  t.same((await new NetworkSetup(configOf()).apply()).commands, [], 'nor does another process');

  t.equal(readSysctl(FORWARD), 1);
  t.equal(readSysctl(EARLY_DEMUX), 0);
  t.equal(readSysctl(['net', 'ipv4', 'conf', 'weir0', 'accept_local']), 1);
  t.equal(readSysctl(['net', 'ipv6', 'conf', 'weir0', 'disable_ipv6']), 1);

  t.equal(way('c0', '10.1.0.2', '10.96.0.10', 'ipproto tcp sport 4000 dport 80'), 'weir0', 'client -> VIP');
  t.equal(way('weir0', '10.1.0.2', '10.2.0.11', 'ipproto tcp sport 4000 dport 8080'), 'br0', 'weir -> backend');
  t.equal(way('br0', '10.2.0.11', '10.1.0.2', 'ipproto tcp sport 8080 dport 4000'), 'weir0', 'backend -> client');
  t.equal(way('weir0', '10.96.0.10', '10.1.0.2', 'ipproto tcp sport 80 dport 4000'), 'c0', 'weir -> client');
  t.equal(way('br0', '10.2.0.11', '10.1.0.2', 'ipproto tcp sport 22 dport 4000'), 'c0', 'another port of the backend');
  t.equal(way('br0', '10.2.0.12', '10.1.0.2', 'ipproto udp sport 999 dport 4000'), 'weir0', 'udp, whatever the port');
  t.equal(way('br0', '10.2.0.99', '10.1.0.2', 'ipproto icmp'), 'weir0', 'an error of a router between');
  t.equal(way('weir0', '10.2.0.11', '10.1.0.2', 'ipproto tcp sport 8080 dport 4000'), 'c0', 'a passed packet');
  t.match(way('weir0', '10.2.0.11', '192.0.2.9', 'ipproto tcp sport 8080 dport 4000'), /unreachable/, 'never back in');
  t.match(way('weir0', '192.0.2.9', '10.2.0.11', 'ipproto tcp sport 8080 dport 8080'), 'br0');

  const removal = await setup.remove();
  t.ok(removal.commands.includes('sysctl -w net.ipv4.ip_forward=0'));
  t.equal(readSysctl(FORWARD), 0, 'settings have their values back');
  t.equal(readSysctl(EARLY_DEMUX), 1);
  t.equal(state(), untouched, 'nothing is left');
  t.same((await setup.remove()).commands, [], 'removing twice is fine');
  ip('link del weir0');
});

t.test('a reload makes differences only, and repairs', async (t) => {
  addDevice();
  const setup = new NetworkSetup(configOf());
  await setup.apply();
  t.same((await setup.update(configOf({ backends: ['10.2.0.11', '10.2.0.13'] }))).commands, [
    'ip rule add priority 1002 from 10.2.0.13 ipproto tcp sport 8080 lookup 10096 protocol 196',
  ]);
  const retained = { addresses: ['10.96.0.10'], endpoints: [{ address: '10.2.0.13', port: 8080, protocol: 6 }] };
  t.same((await setup.update(configOf({ vip: '10.96.0.77' }), retained)).commands, [
    'ip rule add priority 1002 to 10.96.0.10 lookup 10096 protocol 196',
    'ip route replace blackhole 10.96.0.77 metric 65535 proto 196',
    'ip route replace 10.96.0.77 dev weir0 proto 196',
    'ip route del 10.96.0.10 dev weir0 proto 196',
    'ip route del blackhole 10.96.0.10 metric 65535 proto 196',
  ]);
  t.equal(way('c0', '10.1.0.2', '10.96.0.10', 'ipproto tcp sport 4000 dport 80'), 'weir0', 'kept flows still come in');
  t.match(way('weir0', '10.1.0.2', '10.96.0.10', 'ipproto tcp sport 4000 dport 80'), /unreachable/, 'and do not loop');
  t.same((await setup.update(configOf({ vip: '10.96.0.77' }))).commands, [
    'ip rule del priority 1002 from 10.2.0.13 ipproto tcp sport 8080 lookup 10096 protocol 196',
    'ip rule del priority 1002 to 10.96.0.10 lookup 10096 protocol 196',
  ]);
  ip('link set weir0 down');
  ip('rule del priority 1000');
  const repair = await setup.update(configOf({ vip: '10.96.0.77', extra: 'device: { mtu: 1400 }' }));
  t.same(repair.commands, [
    'ip link set dev weir0 mtu 1400 up',
    'ip route replace default dev weir0 table 10096 proto 196',
    'ip rule add priority 1000 iif weir0 lookup main protocol 196',
    'ip route replace 10.96.0.77 dev weir0 proto 196',
  ]);
  await Promise.all([
    setup.update(configOf()),
    setup.update(configOf({ vip: '10.96.0.78' })),
    setup.update(configOf()),
  ]);
  t.same((await setup.apply()).commands, [], 'calls queue up');
  await setup.remove();
  t.equal(state(), untouched);
  ip('link del weir0');
});

t.test('a preview tells the commands of the updates that follow it', async (t) => {
  addDevice();
  const before = configOf({ backends: ['10.2.0.11', '10.2.0.13'] });
  const after = configOf({
    backends: ['10.2.0.11', '10.2.0.14'],
    vip: '10.96.0.20',
    extra: 'network: { untracked: drop }',
  });
  const setup = new NetworkSetup(before);
  await setup.apply();
  await execute(['rule del priority 1001 iif weir0 unreachable protocol 196']);
  const endpoints = [{ address: '10.2.0.13', port: 8080, protocol: 6 }];
  const needs = [{ addresses: ['10.96.0.10'], endpoints }, { addresses: [], endpoints }, NO_NEEDS];
  const installed = state();
  const { steps, notes } = await setup.preview(after, needs);
  t.equal(state(), installed, 'nothing was done');
  const done: (readonly string[])[] = [];
  for (const retained of needs) done.push((await setup.update(after, retained)).commands);
  t.strictSame(steps, done);
  t.ok(
    steps.every((commands) => commands.length > 0),
    'and each has some',
  );
  t.strictSame(notes, []);
  t.strictSame((await setup.preview(after, [NO_NEEDS])).steps, [[]], 'there is nothing left to do');
  const unmanaged = configOf({ extra: 'network: { manage: false }' });
  t.strictSame(await setup.preview(unmanaged, [NO_NEEDS]), { steps: [[]], notes: [] });

  const compared = await compareNetworks(before, after);
  t.ok(compared.commands.includes('ip route replace 10.96.0.20 dev weir0 proto 196'), compared.commands.join('\n'));
  t.ok(compared.commands.includes('ip route del 10.96.0.10 dev weir0 proto 196'));
  t.strictSame((await compareNetworks(before, before)).commands, []);
  const ends = (source: string, destination: string) => ({ source, destination });
  const routes = await askRoutes(
    [ends('10.1.0.2', '10.2.0.11'), ends('192.0.2.9', '192.0.2.10'), ends('10.96.0.20', '10.1.0.2')],
    'weir0',
  );
  t.match(routes, [/^10\.2\.0\.11 from 10\.1\.0\.2 dev br0$/, /unreachable/, / dev c0$/]);
  t.match(await askRoutes([ends('', '10.2.0.11')], null), [/^10\.2\.0\.11 dev br0 src 10\.2\.0\.1/]);
  await setup.remove();
  ip('link del weir0');
});

t.test('a link behind weir that is narrower than its device', async (t) => {
  addDevice();
  const setup = new NetworkSetup(configOf());
  await setup.apply();
  for (const [change, mtu] of [
    ['link set br0 mtu 1400', ' mtu 1400'],
    ['route add 10.2.0.11 dev br0 mtu 1300', ' mtu 1300'],
    ['link set br0 mtu 1500', null],
    ['route del 10.2.0.11', ''],
  ] as const) {
    ip(change);
    const commands = mtu === null ? [] : [`ip route replace 10.96.0.10 dev weir0${mtu} proto 196`];
    t.same((await setup.apply()).commands, commands, change);
    t.same((await setup.apply()).commands, []);
    if (mtu !== null) t.equal(/ mtu \d+/.exec(ip('route show 10.96.0.10'))?.[0] ?? '', mtu);
  }
  await setup.remove();
  t.equal(state(), untouched);
  ip('link del weir0');
});

t.test('kill -9: the device is gone, the rest holds the line', async (t) => {
  addDevice();
  await new NetworkSetup(configOf({ backends: ['10.2.0.11', '10.2.0.13'], extra: 'network: { table: 500 }' })).apply();
  ip('link del weir0');
  const reply = 'ipproto tcp sport 8080 dport 4000';
  t.match(way('br0', '10.2.0.11', '10.1.0.2', reply), /Invalid argument/, 'a blackhole: no reply passes untranslated');
  t.match(way('c0', '10.1.0.2', '10.96.0.10'), /Invalid argument/);

  addDevice();
  const again = new NetworkSetup(configOf({ extra: 'network: { table: 500 }' }));
  const { commands } = await again.apply();
  t.same(
    commands.filter((command) => !command.startsWith('sysctl')),
    [
      'ip link set dev weir0 mtu 1500 up',
      'ip route replace default dev weir0 table 500 proto 196',
      'ip route replace 10.96.0.10 dev weir0 proto 196',
      'ip rule del priority 1002 from 10.2.0.13 ipproto tcp sport 8080 lookup 500 protocol 196',
    ],
    'a start adopts what fits',
  );
  t.equal(way('br0', '10.2.0.11', '10.1.0.2', reply), 'weir0');
  ip('link del weir0');

  addDevice();
  const other = new NetworkSetup(configOf());
  await other.apply();
  t.ok(
    (await readKernel()).rules.every(({ table }) => table !== 500),
    'a start with another table leaves nothing of the old one',
  );
  t.ok((await readKernel()).routes.every(({ table }) => table !== 500));
  ip('link del weir0');

  const cleaned = (await cleanNetwork('weir0')).commands.filter((command) => command.includes('ipproto'));
  t.ok(cleaned.length > 0 && cleaned.every((command) => / ipproto (tcp|udp|icmp) /.test(command)), 'protocols by name');
  t.equal(state(), untouched, 'weir net --clean');
  t.same((await cleanNetwork('weir0')).commands, []);
});

t.test('with a stateFile the blackholes and what leads to them outlive SIGTERM', async (t) => {
  addDevice();
  const setup = new NetworkSetup(configOf({ extra: 'conntrack: { stateFile: /run/weir/conntrack }' }));
  await setup.apply();
  await setup.remove();
  ip('link del weir0');
  t.equal(readSysctl(FORWARD), 1);
  t.match(way('br0', '10.2.0.11', '10.1.0.2', 'ipproto tcp sport 8080 dport 4000'), /Invalid argument/);
  t.match(way('c0', '10.1.0.2', '10.96.0.10'), /Invalid argument/);
  t.ok((await readKernel()).rules.every(({ iif }) => iif !== 'weir0'));
  await cleanNetwork('weir0');
  t.equal(state(), untouched);
  writeSysctl(FORWARD, 0);
});

t.test('a node: answers of processes of this host', async (t) => {
  addDevice();
  const config = nodeConfig();
  const setup = new NetworkSetup(config);
  await setup.apply();
  /** Of what a local process sends, `from` once it has chosen. */
  const out = (rest: string): string => ip(`route get 10.1.0.2 ${rest}`).split('\n')[0]!;
  t.match(out('from 10.2.0.1 ipproto tcp sport 8080 dport 4000'), / dev weir0 /);
  t.match(out('from 10.2.0.1 ipproto tcp sport 22 dport 4000'), / dev c0 /, 'another port');
  t.match(out('from 10.2.0.1 ipproto udp sport 53 dport 4000'), / dev weir0 /);
  t.match(out('ipproto udp sport 53 dport 4000'), / dev weir0 .*src 10\.2\.0\.1 /, 'bound to no address');
  t.match(out('ipproto udp sport 54 dport 4000'), / dev c0 /);
  t.match(out('from 10.2.0.1 ipproto icmp'), / dev weir0 /);
  t.equal(way('br0', '10.2.0.11', '10.1.0.2', 'ipproto tcp sport 80 dport 4000'), 'weir0', 'of a container');
  t.equal(way('weir0', '10.1.0.2', '10.2.0.1', 'ipproto tcp sport 4000 dport 8080'), 'lo', 'clients’ packets arrive');
  t.equal(way('weir0', '10.96.0.10', '10.1.0.2', 'ipproto tcp sport 80 dport 4000'), 'c0', 'and answers leave');
  t.equal(way('weir0', '10.2.0.1', '10.1.0.2', 'ipproto tcp sport 8080 dport 4000'), 'c0', 'direct ones too');

  const taught = { address: '10.1.0.1', port: 9000, protocol: 17 };
  const other = { address: '10.1.0.1', port: 9001, protocol: 6 };
  t.same((await setup.update(config, { addresses: [], endpoints: [taught, other] })).commands, [
    'ip route replace default dev weir0 table 10096 proto 196',
    'ip rule add priority 1002 from 10.1.0.1 ipproto tcp sport 9001 lookup 10096 protocol 196',
    'ip rule add priority 1002 iif lo ipproto udp sport 9000 lookup 10096 protocol 196',
    'ip rule add priority 1002 from 10.1.0.1 ipproto icmp lookup 10096 protocol 196',
  ]);
  t.match(out('ipproto udp sport 53 dport 4000'), / dev weir0 /, 'the route was replaced, not removed');
  t.same((await setup.update(config, { addresses: [], endpoints: [taught, other] })).commands, []);
  t.same(await leftEndpoints(config), [other], 'what a weir that was killed had learned');
  await setup.remove();
  t.equal(state(), untouched);
  t.same(await leftEndpoints(config), []);
  ip('link del weir0');
});

t.test('another weir that is alive is left alone', async (t) => {
  addDevice();
  addDevice('weir1');
  const one = new NetworkSetup(configOf());
  const two = new NetworkSetup(
    configOf({ vip: '10.97.0.10', extra: 'device: { name: weir1 }\nnetwork: { table: 10097 }' }),
  );
  await one.apply();
  const before = state();
  await two.apply();
  t.same((await one.apply()).commands, []);
  await two.remove();
  t.equal(state(), before);
  t.same((await one.apply()).commands, [], 'the first lacks nothing');
  await one.remove();
  t.equal(state(), untouched);
  ip('link del weir0');
  ip('link del weir1');
});

t.test('the printed commands do the same by hand', async (t) => {
  addDevice();
  const config = configOf({ extra: 'network: { manage: false }' });
  t.same(await new NetworkSetup(config).apply(), { commands: [], notes: [] }, 'manage: false does nothing');
  t.equal(state(), untouched);
  const script = formatPlan(await describeNetwork(config));
  execFileSync('sh', ['-e'], { input: script, stdio: ['pipe', 'pipe', 'inherit'] });
  t.same((await new NetworkSetup(configOf()).apply()).commands, []);
  t.same((await new NetworkSetup(config).remove()).commands, []);
  await cleanNetwork('weir0');
  t.equal(state(), untouched);
  ip('link del weir0');
  writeSysctl(FORWARD, 0);
});

t.test('strict reverse path filters', async (t) => {
  addDevice();
  const all = ['net', 'ipv4', 'conf', 'all', 'rp_filter'];
  writeSysctl(all, 1);
  const setup = new NetworkSetup(configOf());
  t.match((await setup.apply()).notes, [/strict on br0, br0-peer, c0, c0-peer: direct/]);
  t.equal(readSysctl(all), 1, 'the host keeps its policy');
  t.equal(way('weir0', '10.1.0.2', '10.2.0.11', 'ipproto tcp sport 4000 dport 8080'), 'br0', 'weir’s packets pass');
  t.equal(way('c0', '10.1.0.2', '10.96.0.10', 'ipproto tcp sport 4000 dport 80'), 'weir0');
  t.equal(way('br0', '10.2.0.11', '10.1.0.2', 'ipproto tcp sport 8080 dport 4000'), 'weir0');
  t.match(way('c0', '10.1.0.2', '10.2.0.11', 'ipproto tcp sport 4000 dport 8080'), /Invalid/, 'what the note is about');
  writeSysctl(all, 0);
  t.equal(way('c0', '10.1.0.2', '10.2.0.11', 'ipproto tcp sport 4000 dport 8080'), 'br0');
  await setup.remove();
  t.equal(state(), untouched);
  ip('link del weir0');
});

t.test('tunnels under a reverse path filter for all', async (t) => {
  addDevice();
  const all = ['net', 'ipv4', 'conf', 'all', 'rp_filter'];
  const { config } = parseConfig(`
tunnel: { address: 10.2.0.1 }
services:
  - { name: web, address: 10.96.0.10, port: 80, mode: dsr, backends: [{ address: 10.2.0.11, port: 8080 }] }
`);
  const setup = new NetworkSetup(config!);
  await setup.apply();
  const tunnel = (): string => way('weir0', '10.2.0.1', '10.2.0.11', 'ipproto udp sport 40000 dport 6081');
  t.equal(tunnel(), 'br0');
  t.notMatch(ip('address show weir0'), '10.2.0.1');
  for (const value of [1, 2]) {
    writeSysctl(all, value);
    t.match(tunnel(), /Invalid/, 'what the address is for');
    t.ok((await setup.apply()).commands.includes('ip address replace 10.2.0.1/32 dev weir0 scope host'));
    t.same((await setup.apply()).commands, []);
    t.equal(tunnel(), 'br0');
    t.equal(way('c0', '10.1.0.2', '10.96.0.10', 'ipproto tcp sport 4000 dport 80'), 'weir0');
    writeSysctl(all, 0);
    t.ok((await setup.apply()).commands.includes('ip address del 10.2.0.1/32 dev weir0'));
  }
  await setup.remove();
  t.equal(state(), untouched);
  ip('link del weir0');
});

t.test('failures are one sentence', async (t) => {
  const setup = new NetworkSetup(configOf());
  await t.rejects(setup.apply(), { code: 'NETWORK_SETUP', message: 'there is no device weir0' });
  t.equal(state(), untouched);
  addDevice();
  const path = process.env.PATH;
  process.env.PATH = '/nonexistent';
  await t.rejects(setup.apply(), { code: 'MISSING_TOOL', message: 'ip is not installed' });
  process.env.PATH = path;
  await t.rejects(execute(['link set dev weir0 up', 'route replace 10.96.0.10 dev nosuch']), {
    code: 'NETWORK_SETUP',
    message: 'ip route replace 10.96.0.10 dev nosuch: Cannot find device "nosuch"',
  });
  await t.rejects(executeRemovals(['rule del priority 7', 'route del 10.96.0.10', 'nonsense', 'link del nosuch']), {
    message: /^ip nonsense: Object "nonsense" is unknown/,
  });
  ip('link set dev weir0 up');

  const holder = spawn(process.execPath, ['-e', HOLD_DEVICE], { stdio: ['ignore', 'pipe', 'inherit'] });
  t.teardown(() => holder.kill());
  await once(holder.stdout, 'data');
  await t.rejects(cleanNetwork('weir0'), { code: 'ALREADY_RUNNING' });
  await stop(holder);
  await cleanNetwork('weir0');
  t.equal(state(), untouched);
  writeSysctl(FORWARD, 0);
});

t.test('settings that cannot be made', async (t) => {
  const mounted = spawnSync('sh', ['-c', 'mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys']);
  if (mounted.status !== 0) {
    t.plan(0, '/proc/sys cannot be made read-only here');
    return;
  }
  const setup = new NetworkSetup(configOf());
  await t.rejects(setup.apply(), {
    code: 'NETWORK_SETUP',
    message: /^cannot set .*net\.ipv4\.ip_forward=1.* \(EROFS\); without it: .*the kernel forwards nothing/,
    remedy: /--sysctl/,
  });
  t.equal(state(), untouched);
  spawnSync('mount', ['-o', 'remount,rw,bind', '/proc/sys']);
  writeSysctl(FORWARD, 1);
  writeSysctl(EARLY_DEMUX, 1);
  spawnSync('mount', ['-o', 'remount,ro,bind', '/proc/sys']);
  const { notes, commands } = await setup.apply();
  t.match(
    notes,
    [/^cannot set net\.ipv4\.conf\.weir0\.accept_local=1 net\.ipv4\.ip_early_demux=0 \(EROFS\)/],
    'the rest is worth one note',
  );
  t.ok(commands.length > 0);
  await setup.remove();
  t.equal(state(), untouched);
});

/** Attaches to weir0 until it is killed. */
const HOLD_DEVICE = `
  import('koffi').then(({ default: koffi }) => {
    const libc = koffi.load(null);
    const fd = libc.func('open', 'int', ['str', 'int'])('/dev/net/tun', 2);
    const request = Buffer.alloc(40);
    request.write('weir0');
    request.writeUInt16LE(0x1001, 16);
    if (libc.func('ioctl', 'int', ['int', 'ulong', 'void *'])(fd, 0x400454ca, request) !== 0) process.exit(1);
    console.log('held');
    setInterval(() => {}, 1000);
  });
`;

async function stop(child: ChildProcess): Promise<void> {
  const ended = once(child, 'exit');
  child.kill('SIGKILL');
  await ended;
}
