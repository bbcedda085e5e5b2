import '../support/plain-children.js';
/*
 * docs/install.md, block by block, on hosts that begin as a Debian with nothing in it; install.test.ts runs this file in a mount namespace
 * of its own. In place of what a page cannot have done here:
 *
 *     npm ci              has been done in this checkout, which the archive is then made of
 *     systemctl ...       left out: nothing here is process 1
 */
import { execFileSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import t, { type Test } from 'tap';
import { makeBareRoot } from '../support/bare-root.js';
import { ENVIRONMENT, Host, type Running, wire } from '../support/hosts.js';
import { NotifyReceiver } from '../support/notify-receiver.js';

t.setTimeout(900_000);

const CHECKOUT = fileURLToPath(new URL('../..', import.meta.url));
const folder = mkdtempSync(join(tmpdir(), 'weir-install-'));
const base = join(folder, 'base');

interface Block {
  readonly roles: readonly string[];
  readonly script: string;
}

const page = readFileSync(join(CHECKOUT, 'docs/install.md'), 'utf8');
const blocks: Block[] = [...page.matchAll(/^```sh ?(.*)\n([\s\S]*?)^```$/gm)].map(([, words, script]) => ({
  roles: words!.split(' '),
  script: script!,
}));
const done = new Set<Block>();

/** The next blocks of exactly these roles that have not been taken yet. */
function take(roles: string, count = 1): string[] {
  const found = blocks.filter((each) => !done.has(each) && each.roles.join(' ') === roles).slice(0, count);
  if (found.length !== count) throw new Error(`the page has no ${count} more blocks "sh ${roles}"`);
  for (const each of found) done.add(each);
  return found.map(({ script }) => script);
}

function skipSystemd(script: string): string {
  return script.replace(/^systemctl .*\n/gm, '');
}

const hosts: Host[] = [];

async function newHost(name: string, lower: string | null = base): Promise<Host> {
  const host = await Host.create(name, lower, folder);
  hosts.push(host);
  return host;
}

async function must(t: Test, host: Host, script: string): Promise<string> {
  const { code, stdout, stderr } = await host.run(script);
  t.equal(code, 0, `${host.name}: ${script.trim().split('\n')[0]}`);
  if (code !== 0) t.comment(`${stdout}\n${stderr}`);
  return stdout;
}

async function startWeir(host: Host, script: string): Promise<Running> {
  const weir = host.start(['sh', '-ec', `exec ${script}`]);
  await weir.waitFor('"ready"');
  return weir;
}

const SERVER = `require('http').createServer((request, response) => {
  response.end(process.argv[1] + ' saw ' + request.socket.remoteAddress.replace('::ffff:', '') + '\\n');
}).listen(8080, () => console.log('listening'))`;

async function serve(host: Host): Promise<void> {
  await host.start([process.execPath, '-e', SERVER, host.name]).waitFor('listening');
}

async function settle(t: Test, host: Host, ...commands: string[]): Promise<void> {
  await must(t, host, commands.join('\n'));
}

/** In the range that systemd takes them from. */
const DYNAMIC_USER = '61200';

const CONFIGURE_SERVICE = `ip address add 10.2.0.1/32 dev lo
cat >/etc/weir/weir.yaml <<END
tunnel: { address: 10.2.0.1 }
conntrack: { stateFile: /run/weir/conntrack, tcpEntries: 1024, anyEntries: 1024 }
services:
  - { name: web, address: 10.96.0.10, port: 80, health: { type: tcp }, backends: [{ address: 10.2.0.12, port: 8080 }] }
  - { name: video, address: 10.96.0.80, port: 80, mode: dsr, backends: [{ address: 10.2.0.11, port: 8080 }] }
END`;

/** The values of each key, in order. */
function readUnit(path: string): Map<string, string[]> {
  const values = new Map<string, string[]>();
  for (const [, key, value] of readFileSync(path, 'utf8').matchAll(/^(\w+)=(.*)$/gm)) {
    values.set(key!, [...(values.get(key!) ?? []), value!]);
  }
  return values;
}

/** The system calls that lines of SystemCallFilter= leave, by what this systemd's groups are. */
function expandFilter(lines: readonly string[]): Set<string> {
  const members = (name: string): string[] => {
    if (!name.startsWith('@')) return [name];
    const text = execFileSync('systemd-analyze', ['syscall-filter', name], { encoding: 'utf8' });
    return [...text.matchAll(/^ {4}(@?\w[\w-]*|@[\w-]+)$/gm)].flatMap(([, each]) => members(each!));
  };
  const allowed = new Set<string>();
  for (const line of lines) {
    const names = line.replace(/^~/, '').split(' ').flatMap(members);
    for (const name of names) line.startsWith('~') ? allowed.delete(name) : allowed.add(name);
  }
  return allowed;
}

t.teardown(async () => {
  for (const host of hosts) await host.close();
  // The inner ones first; packages that are kept between runs are mounted there, too.
  const mounts = [...readFileSync('/proc/self/mounts', 'utf8').matchAll(/^\S+ (\S+)/gm)].map(([, at]) => at!);
  for (const at of mounts.reverse()) if (at.startsWith(folder)) execFileSync('umount', ['--lazy', at]);
  rmSync(folder, { recursive: true, force: true });
});

t.test('a bare Debian, packages, an archive', async (t) => {
  makeBareRoot(base);
  const { version } = JSON.parse(readFileSync(join(CHECKOUT, 'package.json'), 'utf8')) as { version: string };
  const archives = new Set([...page.matchAll(/weir-[\w.-]*\.tar\.gz/g)].map(([name]) => name));
  t.strictSame([...archives], [`weir-${version}-linux-x64.tar.gz`], 'the page has the version of this checkout');

  const [build] = take('build');
  t.match(build, /^npm ci\nnpm run release /);
  const archive = join(base, 'root', [...archives][0]!);
  mkdirSync(join(base, 'root'), { recursive: true });
  execFileSync('npm', ['run', 'release', '--', archive], { cwd: CHECKOUT, stdio: 'ignore' });

  const [packages, unpack] = take('gateway', 2);
  t.match(packages, /^apt-get update\napt-get install /);
  const environment = Object.entries(ENVIRONMENT).map(([name, value]) => `${name}=${value}`);
  const inBase = (script: string): string =>
    execFileSync('chroot', [base, 'env', '-i', ...environment, 'sh', '-ec', `cd /root; ${script}`], {
      encoding: 'utf8',
      stdio: ['ignore', 'pipe', 'inherit'],
    });
  t.throws(() => inBase('command -v node || command -v curl || command -v ip'), 'it is bare');
  t.match(inBase(packages!), /^v2\d\.\d+\.\d+$/m);
  t.throws(() => inBase('command -v gcc || command -v npm'), 'no compiler, no npm');
  t.equal(inBase(unpack!), `${version}\n`);
  execFileSync('sh', ['-ec', `umount '${base}/var/cache/apt/archives' '${base}/proc'`]);
});

/*
 *   client 10.1.0.2 ---- eth0 10.1.0.1 gateway 10.2.0.1 eth1 ---- b1 10.2.0.11, b2 10.2.0.12
 */
t.test('dnat, upgrade, uninstall', async (t) => {
  const [hub, client, gateway] = [await newHost('hub', null), await newHost('client'), await newHost('gateway')];
  const backends = [await newHost('b1', null), await newHost('b2', null)];
  await wire(hub, {
    clients: [
      { host: client, dev: 'eth0', address: '10.1.0.2/24' },
      { host: gateway, dev: 'eth0', address: '10.1.0.1/24' },
    ],
    servers: [
      { host: gateway, dev: 'eth1', address: '10.2.0.1/24' },
      ...backends.map((host, i) => ({ host, dev: 'eth0', address: `10.2.0.1${i + 1}/24` })),
    ],
  });
  await settle(t, client, 'ip route add default via 10.1.0.1');
  for (const host of backends) {
    await settle(t, host, 'ip route add default via 10.2.0.1');
    await serve(host);
  }

  const [configure, doctor] = take('gateway', 2);
  t.match(await must(t, gateway, configure!), /is valid: 1 service, 2 backends/);
  const findings = await must(t, gateway, doctor!);
  t.notMatch(findings, /^(warn|fail|skip)/m, 'every line says ok');

  const [run] = take('gateway background');
  let weir = await startWeir(gateway, run!);
  const [curl] = take('client');
  const seen = new Set<string>();
  for (let i = 0; i < 24; i++) seen.add(await must(t, client, curl!));
  t.strictSame([...seen].sort(), ['b1 saw 10.1.0.2\n', 'b2 saw 10.1.0.2\n'], 'both answer, and see the client');
  const [look] = take('gateway');
  t.match(await must(t, gateway, look!), /web .*10\.96\.0\.10:80.*[\s\S]*ESTABLISHED|CLOSING[\s\S]*forward/);

  await must(
    t,
    gateway,
    "nft add table inet filter && nft 'add chain inet filter forward { type filter hook forward priority 0; policy drop; }'",
  );
  t.match((await gateway.run(doctor!)).stdout, /^fail {2}forward-policy /m);
  const [firewall] = take('firewall');
  await must(t, gateway, firewall!);
  t.notMatch(await must(t, gateway, doctor!), /^(warn|fail|skip)/m);
  t.match(await must(t, client, curl!), / saw 10\.1\.0\.2\n/);

  const [upgrade] = take('upgrade');
  await must(t, gateway, skipSystemd(upgrade!));
  t.equal(await weir.stop(), 0);
  weir = await startWeir(gateway, run!);
  t.match(await must(t, client, curl!), / saw 10\.1\.0\.2\n/, 'the new one serves');
  t.equal(await weir.stop(), 0);

  const [uninstall] = take('uninstall');
  await must(t, gateway, uninstall!);
  const left = await must(t, gateway, 'ip rule; ip route show table all; ls /opt /usr/local/bin /etc');
  t.notMatch(left, /weir(?!\.old)|proto 196|10\.96\.0/);
});

t.test('as the unit runs it', async (t) => {
  const host = await newHost('service');
  await must(t, host, CONFIGURE_SERVICE);
  const unit = readUnit(join(host.root!, 'opt/weir/conf/weir.service'));
  const only = (key: string): string => unit.get(key)!.at(-1)!;
  t.equal(only('DynamicUser'), 'yes');
  t.equal(only('ExecReload'), '/bin/kill -HUP $MAINPID');
  const capabilities = (key: string): string =>
    only(key)
      .split(' ')
      .map((name) => `+${name.slice('CAP_'.length).toLowerCase()}`)
      .join(',');
  const runtime = `/run/${only('RuntimeDirectory')}`;
  await must(t, host, `mkdir -p ${runtime} && chown ${DYNAMIC_USER} ${runtime}`);
  const manager = await NotifyReceiver.bind(join(host.root!, 'run/notify'));
  t.teardown(() => manager.close());
  await must(t, host, 'chmod 666 /run/notify');

  const trace = join(folder, 'trace');
  const privileges = [
    ...['--reuid', DYNAMIC_USER, '--regid', DYNAMIC_USER, '--clear-groups', '--no-new-privs'],
    ...['--inh-caps', capabilities('AmbientCapabilities'), '--ambient-caps', capabilities('AmbientCapabilities')],
    ...['--bounding-set', `-all,${capabilities('CapabilityBoundingSet')}`],
  ];
  const weir = host.start(['setpriv', ...privileges, ...only('ExecStart').split(' ')], {
    by: ['strace', '--follow-forks', '--quiet=all', '--output', trace],
    env: { NOTIFY_SOCKET: '/run/notify', WATCHDOG_USEC: '10000000' },
  });
  await weir.waitFor('"ready"');
  const ready = await manager.datagram((line) => line === 'READY=1');
  await manager.datagram((line) => line === 'WATCHDOG=1');
  const { pid } = JSON.parse(await must(t, host, 'weir status -o json')) as { pid: number };
  process.kill(pid, 'SIGHUP');
  const { at } = await manager.datagram((line) => line === 'RELOADING=1', ready.at);
  await manager.datagram((line) => line === 'READY=1', at);
  t.match(weir.output(), /engine io_uring/);
  process.kill(pid, 'SIGTERM');
  await manager.datagram((line) => line === 'STOPPING=1');
  t.equal(await weir.ended, 0);
  t.notMatch(await must(t, host, 'ip rule'), /weir0/, 'it has taken its rules away');

  // From the program's own start on: what setpriv does is systemd's part.
  const text = readFileSync(trace, 'utf8');
  const calls = text.slice(text.search(/execve\("\/usr\/local\/bin\/weir"/));
  const used = new Set([...calls.matchAll(/^\d+ +(?:<\.\.\. )?(\w+)(?:\(| resumed)/gm)].map(([, name]) => name!));
  t.ok(used.has('io_uring_enter') && used.has('clone3') && used.size > 40, `${used.size} system calls`);
  const allowed = expandFilter(unit.get('SystemCallFilter')!);
  t.strictSame([...used].filter((name) => !allowed.has(name)).sort(), [], 'all of them pass the filter');
  const families = new Set([...calls.matchAll(/ socket\((AF_\w+)/g)].map(([, name]) => name!));
  const open = only('RestrictAddressFamilies').split(' ');
  t.strictSame(
    [...families].filter((name) => !open.includes(name)),
    [],
    'and all sockets are of the families it may have',
  );
});

/*
 *   client 10.1.0.2 ---- eth0 10.1.0.1 router 10.2.0.254 eth1 ---- gateway 10.2.0.1, b1 10.2.0.11, b2 10.2.0.12
 */
t.test('dsr', async (t) => {
  const [hub, client, router] = [await newHost('hub2', null), await newHost('client2'), await newHost('router', null)];
  const gateway = await newHost('gateway2');
  const nodes = [await newHost('b1-node'), await newHost('b2-node')];
  await wire(hub, {
    clients: [
      { host: client, dev: 'eth0', address: '10.1.0.2/24' },
      { host: router, dev: 'eth0', address: '10.1.0.1/24' },
    ],
    servers: [
      { host: router, dev: 'eth1', address: '10.2.0.254/24' },
      { host: gateway, dev: 'eth0', address: '10.2.0.1/24' },
      ...nodes.map((host, i) => ({ host, dev: 'eth0', address: `10.2.0.1${i + 1}/24` })),
    ],
  });
  await settle(t, client, 'ip route add default via 10.1.0.1');
  await settle(
    t,
    router,
    'sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.send_redirects=0',
    'ip route add 10.96.0.0/16 via 10.2.0.1',
  );
  for (const host of [gateway, ...nodes]) await settle(t, host, 'ip route add default via 10.2.0.254');

  const [configure] = take('gateway dsr');
  t.notMatch(await must(t, gateway, configure!), /^(warn|fail|skip)/m);
  const [run] = take('gateway dsr background');
  await startWeir(gateway, run!);
  const [configureNode] = take('node');
  const [runNode] = take('node background');
  for (const node of nodes) {
    t.notMatch(await must(t, node, configureNode!), /^(warn|fail|skip)/m);
    await startWeir(node, runNode!);
    await serve(node);
  }
  const [curl] = take('client dsr');
  const seen = new Set<string>();
  for (let i = 0; i < 24; i++) seen.add(await must(t, client, curl!));
  t.strictSame(
    [...seen].sort(),
    ['b1-node saw 10.1.0.2\n', 'b2-node saw 10.1.0.2\n'],
    'both answer, and see the client',
  );
  const list = JSON.parse(await must(t, gateway, 'weir ct list -o json')) as {
    type: string;
    packets: { reply: number };
  }[];
  t.ok(
    list.length >= 24 && list.every(({ type, packets }) => type === 'SVC' && packets.reply === 0),
    'answers go past the gateway',
  );
});

t.test('no block of the page was left out', async (t) => {
  const left = blocks.filter((each) => !done.has(each)).map(({ roles }) => roles.join(' '));
  t.strictSame(left, ['systemd', 'uninstall systemd']);
});
