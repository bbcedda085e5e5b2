import '../../support/plain-children.js';
/*
 * A host in order, broken in one way at a time; doctor.test.ts runs this file in namespaces that die with it:
 *
 *     c0 10.1.0.1/24 <- clients      this namespace      br0 10.2.0.1/24 -> backends, nodes
 *                                                        br1 10.3.0.1/24 -> one more backend
 *
 * Each time doctor must complain of that one thing, what it prints as its mending is executed as it stands, and doctor must be content.
 */
import { spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import type { Finding } from '../../../lib/control/doctor/finding.js';

const WEIR = fileURLToPath(new URL('../../../bin/weir.js', import.meta.url));
const folder = mkdtempSync(join(tmpdir(), 'weir-doctor-'));

/** One shell for all of a test, so that what changes a shell (limits) counts for what it starts. */
class Shell {
  readonly #child = spawn('sh', [], { stdio: ['pipe', 'pipe', 'inherit'] });
  readonly #lines = createInterface({ input: this.#child.stdout })[Symbol.asyncIterator]();

  /** @returns the exit code of the last command */
  async run(script: string): Promise<number> {
    this.#child.stdin.write(`{ ${script}\n} >/dev/null </dev/null\necho "ended $?"\n`);
    const { value = '' } = await this.#lines.next();
    return Number(/^ended (\d+)$/.exec(value)?.[1] ?? Number.NaN);
  }

  close(): void {
    this.#child.stdin.end();
  }
}

const sh = new Shell();

async function must(script: string): Promise<void> {
  const code = await sh.run(script);
  if (code !== 0) throw new Error(`exit ${code}: ${script}`);
}

interface Examination {
  readonly code: number;
  readonly findings: readonly Finding[];
  /** Those that are not in order. */
  readonly complaints: readonly Finding[];
}

async function examine(config: string): Promise<Examination> {
  const out = join(folder, 'findings.json');
  const code = await sh.run(`'${process.execPath}' '${WEIR}' doctor -c '${config}' -o json >'${out}'`);
  const findings = JSON.parse(readFileSync(out, 'utf8')) as Finding[];
  return { code, findings, complaints: findings.filter(({ status }) => status !== 'ok') };
}

function file(name: string, text: string): string {
  const path = join(folder, name);
  writeFileSync(path, text);
  return path;
}

const GATEWAY = `
tunnel: { address: 10.2.0.1 }
snat: { addresses: [10.96.255.1] }
services:
  - { name: web, address: 10.96.0.10, port: 80, backends: [{ address: 10.2.0.11, port: 8080 }, { address: 10.3.0.11, port: 8080 }] }
  - { name: out, address: 10.96.0.20, port: 80, mode: snat, backends: [{ address: 10.2.0.12, port: 8080 }] }
  - { name: video, address: 10.96.0.80, port: 443, mode: dsr, backends: [{ address: 10.4.0.11, port: 8443, node: 10.2.0.21 }] }
`;
const gateway = file('gateway.yaml', GATEWAY);
const byHand = file('by-hand.yaml', `network: { manage: false }\n${GATEWAY}`);
const stateful = file('stateful.yaml', `conntrack: { stateFile: ${folder}/small/table }\n${GATEWAY}`);
const onLink = file(
  'on-link.yaml',
  'services: [{ name: web, address: 10.1.0.80, port: 80, backends: [{ address: 10.2.0.11, port: 8080 }] }]',
);
const node = file('node.yaml', 'role: node\ntunnel: { address: 10.9.0.1 }\n');

interface Fault {
  readonly title: string;
  readonly config?: string;
  /** Makes it. */
  readonly cause: string;
  /** The check that must complain. */
  readonly name: string;
  readonly status: 'warn' | 'fail';
  readonly found: RegExp;
  /** What it prints to be done. */
  readonly mend: RegExp | string;
  /** Takes away what the cause had besides. */
  readonly after?: string;
  /** Without it there is no mending even for this root: a command that then fails. */
  readonly needs?: string;
}

/** Binds a port, and says so by a file. */
function occupy(code: string): string {
  const script = `${code}; setInterval(() => {}, 1000)`;
  return `rm -f '${folder}/up'; '${process.execPath}' -e "${script}" & until [ -e '${folder}/up' ]; do sleep 0.05; done`;
}
const UP = `() => require('fs').writeFileSync('${folder}/up', '')`;

t.setTimeout(900_000);

const FAULTS: readonly Fault[] = [
  {
    title: 'no /dev/net/tun',
    cause: 'mount -t tmpfs tmpfs /dev/net',
    name: 'tun',
    status: 'fail',
    found: /ENOENT, though the kernel has the driver/,
    mend: 'mkdir -p /dev/net && mknod -m 666 /dev/net/tun c 10 200',
    after: 'umount /dev/net',
  },
  {
    title: 'forwarding is off, and weir may not switch it on',
    config: byHand,
    cause: 'sysctl -w net.ipv4.ip_forward=0',
    name: 'ip-forward',
    status: 'fail',
    found: /ip_forward=0, and weir cannot or may not/,
    mend: 'sysctl -w net.ipv4.ip_forward=1',
  },
  {
    title: 'early demux is on',
    config: byHand,
    cause: 'sysctl -w net.ipv4.ip_early_demux=1 net.ipv4.udp_early_demux=1',
    name: 'early-demux',
    status: 'warn',
    found: /ip_early_demux=1 net\.ipv4\.udp_early_demux=1,/,
    mend: 'sysctl -w net.ipv4.ip_early_demux=0 && sysctl -w net.ipv4.udp_early_demux=0',
  },
  {
    title: 'new devices get a strict filter',
    config: byHand,
    cause: 'sysctl -w net.ipv4.conf.default.rp_filter=1',
    name: 'device-filter',
    status: 'fail',
    found: /default\.rp_filter=1/,
    mend: 'sysctl -w net.ipv4.conf.default.rp_filter=0',
  },
  {
    title: 'a strict reverse path filter',
    cause: 'sysctl -w net.ipv4.conf.c0.rp_filter=1',
    name: 'rp-filter',
    status: 'warn',
    found: /strict on c0$/,
    mend: 'sysctl -w net.ipv4.conf.c0.rp_filter=2',
  },
  {
    title: 'the VIP is an address of this host',
    cause: 'ip address add 10.96.0.10/32 dev c0',
    name: 'vip 10.96.0.10',
    status: 'fail',
    found: /c0 has it as its own/,
    mend: 'ip address del 10.96.0.10/32 dev c0',
  },
  {
    title: 'an snat address is local by a route',
    cause: 'ip route add local 10.96.255.1 dev lo',
    name: 'vip 10.96.255.1',
    status: 'fail',
    found: /a local route/,
    mend: 'ip route del local 10.96.255.1 table local',
  },
  {
    title: 'a VIP on a link, where nobody answers for it',
    config: onLink,
    cause: 'sysctl -w net.ipv4.conf.c0.proxy_arp=0',
    name: 'vip 10.1.0.80',
    status: 'warn',
    found: /in the network of c0/,
    mend: 'sysctl -w net.ipv4.conf.c0.proxy_arp=1',
  },
  {
    title: 'the interface towards a backend is down',
    cause: 'ip link set br1 down',
    name: 'route backend 10.3.0.11',
    status: 'fail',
    found: /br1 is down/,
    mend: 'ip link set dev br1 up',
  },
  {
    title: 'a route that refuses a backend',
    cause: 'ip route add unreachable 10.3.0.11',
    name: 'route backend 10.3.0.11',
    status: 'fail',
    found: /unreachable 10\.3\.0\.11/,
    mend: 'ip route del unreachable 10.3.0.11 table 254',
  },
  {
    title: 'a link that is too narrow for tunnels',
    cause: 'ip link set br0 mtu 1400',
    name: 'mtu node 10.2.0.21',
    status: 'fail',
    found: /br0 takes 1400, device\.mtu is 1500/,
    mend: 'ip link set dev br0 mtu 1500',
  },
  {
    title: 'nftables translates a VIP',
    cause:
      "nft add table ip n && nft 'add chain ip n pre { type nat hook prerouting priority -100; }' && " +
      "nft 'add rule ip n pre ip daddr { 10.96.0.0/24, 10.97.0.1-10.97.0.9 } tcp dport { 80, 8080 } dnat to 10.2.0.99:80'",
    name: 'nat',
    status: 'fail',
    found: /chain ip n pre translates 10\.96\.0\.10:80/,
    mend: /^nft delete rule ip n pre handle \d+$/,
    after: 'nft delete table ip n',
  },
  {
    title: 'iptables translates a VIP',
    cause: 'iptables -t nat -A PREROUTING -d 10.96.0.20/32 -p tcp --dport 80 -j DNAT --to 10.2.0.99:80',
    name: 'nat',
    status: 'fail',
    found: /chain ip nat PREROUTING translates 10\.96\.0\.20:80/,
    mend: /^nft delete rule ip nat PREROUTING handle \d+$/,
    after: 'nft flush ruleset',
  },
  {
    title: 'a firewall that forwards nothing',
    cause:
      "nft add table inet guard && nft 'add chain inet guard fence { type filter hook forward priority 0; policy drop; }' && " +
      "nft 'add rule inet guard fence ct state established,related accept' && nft 'add rule inet guard fence iifname docker0 oifname docker0 accept'",
    name: 'forward-policy',
    status: 'fail',
    found: /chain inet guard fence refuses packets of weir0/,
    mend: `nft insert rule inet guard fence iifname '"weir0"' accept && nft insert rule inet guard fence oifname '"weir0"' accept`,
    after: 'nft flush ruleset',
  },
  {
    title: 'iptables forwards nothing',
    cause:
      'iptables -P FORWARD DROP && iptables -N OTHER && iptables -A FORWARD -j OTHER && iptables -A OTHER -i eth9 -o eth8 -j ACCEPT',
    name: 'forward-policy',
    status: 'fail',
    found: /chain ip filter FORWARD refuses/,
    mend: /^nft insert rule ip filter FORWARD iifname '"weir0"' accept && /,
    after: 'nft flush ruleset',
  },
  {
    title: 'a firewall that drops what is in state invalid',
    cause:
      "nft add table inet guard && nft 'add chain inet guard fence { type filter hook forward priority 0; }' && " +
      "nft 'add rule inet guard fence ct state invalid drop'",
    name: 'invalid',
    status: 'fail',
    found: /chain inet guard fence drops/,
    mend: /^nft insert rule inet guard fence iifname '"weir0"' accept && nft insert/,
    after: 'nft flush ruleset',
  },
  {
    title: 'a rule leads answers of backends elsewhere',
    cause: 'ip route add default dev c0 table 7 && ip rule add priority 500 from 10.2.0.0/24 lookup 7',
    name: 'policy-rules',
    status: 'fail',
    found: /priority 500 from 10\.2\.0\.0\/24 lookup 7 is asked for answers of 10\.2\.0\.11/,
    mend: 'ip rule del priority 500 from 10.2.0.0/24 lookup 7 && ip rule add priority 1500 from 10.2.0.0/24 lookup 7',
    after: 'ip rule del priority 1500 && ip route flush table 7',
  },
  {
    title: 'a rule leads packets for a VIP elsewhere',
    cause: 'ip route add 10.96.0.0/16 dev c0 table 7 && ip rule add priority 5000 to 10.96.0.80/30 lookup 7',
    name: 'policy-rules',
    status: 'fail',
    found: /priority 5000 to 10\.96\.0\.80\/30 lookup 7 is asked for 10\.96\.0\.80 before main/,
    mend: 'ip rule add priority 4999 to 10.96.0.80 lookup main',
    after: 'ip rule del priority 4999 && ip rule del priority 5000 && ip route flush table 7',
  },
  {
    title: 'a process has the port of tunnels',
    config: node,
    cause: occupy(`require('dgram').createSocket('udp4').bind(6081, '0.0.0.0', ${UP})`),
    name: 'tunnel-port',
    status: 'fail',
    found: /UDP 10\.9\.0\.1:6081 is taken, by process \d+/,
    mend: /^kill \d+$/,
  },
  {
    title: 'the node has not the address it is known by',
    config: node,
    cause: 'ip address del 10.9.0.1/32 dev lo',
    name: 'tunnel-address',
    status: 'fail',
    found: /10\.9\.0\.1 is no address of this host/,
    mend: 'ip address add 10.9.0.1/32 dev lo',
  },
  {
    title: 'another program has the port of the metrics',
    cause: occupy(`require('net').createServer().listen(9650, '127.0.0.1', ${UP})`),
    name: 'admin-listen',
    status: 'fail',
    found: /9650: EADDRINUSE, by process \d+/,
    mend: /^kill \d+$/,
  },
  {
    title: 'the name of the device is taken',
    cause: 'ip link add weir0 type veth peer name other',
    name: 'device',
    status: 'fail',
    found: /weir0 exists and is no TUN device/,
    mend: 'ip link del weir0',
  },
  {
    title: 'no room for the table',
    config: stateful,
    cause: `mkdir -p '${folder}/small' && mount -t tmpfs -o size=1m tmpfs '${folder}/small'`,
    name: 'state-file',
    status: 'fail',
    found: /are needed for .*table/,
    mend: /^mount -o remount,size=\d+M \$\(stat -c %m .*\)$/,
    after: `umount '${folder}/small'`,
  },
  {
    title: 'few open files',
    cause: 'ulimit -n 200',
    name: 'open-files',
    status: 'fail',
    found: /200 may be open; 256 are needed/,
    mend: 'ulimit -n 256',
    needs: "sh -c 'ulimit -n 200 && ulimit -n 256' 2>/dev/null",
  },
];

t.before(async () => {
  await must('ip link set lo up && ip address add 10.9.0.1/32 dev lo');
  for (const [name, address] of [
    ['c0', '10.1.0.1/24'],
    ['br0', '10.2.0.1/24'],
    ['br1', '10.3.0.1/24'],
  ]) {
    await must(
      `ip link add ${name} type veth peer name ${name}-peer && ip address add ${address} dev ${name} && ` +
        `ip link set ${name} up && ip link set ${name}-peer up`,
    );
  }
  await must(
    'for each in all default c0 br0 br1 c0-peer br0-peer br1-peer; do sysctl -w net.ipv4.conf.$each.rp_filter=0; done',
  );
  await must(
    'sysctl -w net.ipv4.ip_forward=1 net.ipv4.ip_early_demux=0 net.ipv4.tcp_early_demux=0 net.ipv4.udp_early_demux=0 ' +
      'net.ipv4.conf.default.accept_local=1 net.ipv4.conf.c0.proxy_arp=1',
  );
});

t.teardown(() => {
  sh.close();
  rmSync(folder, { recursive: true, force: true });
});

t.test('a host in order', async (t) => {
  for (const config of [gateway, byHand, stateful, onLink, node]) {
    const { code, complaints } = await examine(config);
    t.strictSame([code, complaints], [0, []], config);
  }
});

for (const { title, config = gateway, cause, name, status, found, mend, after, needs } of FAULTS) {
  t.test(title, async (t) => {
    if (needs !== undefined && (await sh.run(needs)) !== 0) {
      t.plan(0, 'this root may not raise limits (CAP_SYS_RESOURCE)');
      return;
    }
    await must(cause);
    const broken = await examine(config);
    t.equal(broken.code, status === 'fail' ? 1 : 0);
    const [complaint, ...others] = broken.complaints.filter((each) => each.status !== 'skip');
    t.match(complaint, { name, status, found, mend });
    t.strictSame(others, [], 'and of nothing else');
    t.ok(complaint!.why.length > 20);

    await must(complaint!.mend!);
    if (/^kill /.test(complaint!.mend!)) await sh.run('wait');
    t.strictSame(await examine(config).then(({ code, complaints }) => [code, complaints]), [0, []], 'mended');
    if (after !== undefined) await must(after);
  });
}

t.test('a neighbour answers for a VIP', async (t) => {
  await must(
    `unshare -n sh -c 'until ip link set c0-peer up 2>/dev/null; do sleep 0.05; done; ip address add 10.1.0.80/24 dev c0-peer; exec sleep 1000' & neighbour=$!`,
  );
  // Before it is in a namespace of its own, a move to it goes well and nowhere.
  await must('until [ "$(readlink /proc/$neighbour/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done');
  await must('ip link set c0-peer netns $neighbour');
  await must('until nsenter -n -t $neighbour ip -4 address show dev c0-peer | grep -q 10.1.0.80; do sleep 0.05; done');
  const { code, complaints } = await examine(onLink);
  t.equal(code, 1);
  t.match(complaints, [{ name: 'vip 10.1.0.80', status: 'fail', found: /^[0-9a-f:]{17} on the link answers for it$/ }]);
  await must(
    complaints[0]!
      .mend!.replace('INTERFACE', 'c0-peer')
      .replace(/^/, 'nsenter -n -t $neighbour ')
      .replace('/32', '/24'),
  );
  t.strictSame((await examine(onLink)).complaints, []);
  await sh.run('kill $neighbour; wait');
});
