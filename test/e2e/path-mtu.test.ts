import { createHash, randomBytes } from 'node:crypto';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t, { type Test } from 'tap';
import { must } from '../../lib/lab/process.js';
import { CLIENT_ADDRESS, HTTP_PORT, type Lab, VIP } from '../../lib/lab/topology.js';
import { createGatewayLab, gatewayConfig, PORTS } from '../support/gateway-lab.js';
import { needsRoot } from '../support/skip.js';

/*
 * The lab with one hop more on either side. Both ends believe in 1500 bytes; something between them has only 1400.
 *
 *     b3 ----------- client ------------ gw: weir --- br0 --- b1 ----------- b2
 *     far client     router                                   router         far backend
 *     10.9.0.2       10.9.0.1, 10.1.0.2                       10.2.0.11,     10.8.0.2
 *                                                             10.8.0.1
 */
const FAR_CLIENT = '10.9.0.2';
const FAR_BACKEND = '10.8.0.2';
const SNAT_ADDRESS = '10.96.255.1';
const WIDE = 1500;
const NARROW = 1400;
const DOWN_BYTES = 8 << 20;
const UP_BYTES = 4 << 20;

interface Bottleneck {
  readonly name: string;
  /** `ip` commands by namespace. */
  readonly set: (mtu: number) => Readonly<Record<string, readonly string[]>>;
  /** What is too wide for it: packets to the client, packets to the backend. */
  readonly down: boolean;
  readonly up: boolean;
}

const BOTTLENECKS: readonly Bottleneck[] = [
  {
    name: 'a router before the client',
    set: (mtu) => ({ client: [`route change 10.9.0.0/24 dev far mtu ${mtu}`] }),
    down: true,
    up: false,
  },
  {
    name: 'the gateway’s link to the clients',
    set: (mtu) => ({ gw: [`link set client mtu ${mtu}`], client: [`link set eth0 mtu ${mtu}`] }),
    down: true,
    up: true,
  },
  {
    name: 'a router before the backend',
    set: (mtu) => ({ b1: [`route change 10.8.0.0/24 dev far mtu ${mtu}`] }),
    down: false,
    up: true,
  },
  {
    name: 'the gateway’s link to the backends',
    set: (mtu) => ({ gw: [`link set b1 mtu ${mtu}`, `link set br0 mtu ${mtu}`], b1: [`link set eth0 mtu ${mtu}`] }),
    down: true,
    up: true,
  },
];

async function ip(lab: Lab, role: string, ...commands: string[]): Promise<string> {
  return await must('ip', ['-n', lab.namespace(role), '-batch', '-'], { input: `${commands.join('\n')}\n` });
}

async function createFarLab(): Promise<Lab> {
  const lab = await createGatewayLab();
  const plug = async (host: string, address: string, router: string, inner: string): Promise<void> => {
    await ip(lab, 'gw', `link del ${host}`);
    await ip(
      lab,
      router,
      `link add far type veth peer name eth0 netns ${lab.namespace(host)}`,
      `addr add ${inner}/24 dev far`,
      'link set far up',
    );
    await ip(lab, host, `addr add ${address}/24 dev eth0`, 'link set eth0 up', `route add default via ${inner}`);
    await lab.exec(router, 'sysctl', ['-qw', 'net.ipv4.ip_forward=1']);
  };
  await plug('b3', FAR_CLIENT, 'client', '10.9.0.1');
  await plug('b2', FAR_BACKEND, 'b1', '10.8.0.1');
  await ip(lab, 'gw', `route add 10.9.0.0/24 via ${CLIENT_ADDRESS}`, 'route add 10.8.0.0/24 via 10.2.0.11');
  return lab;
}

/**
 * The path MTU that a host has learned, 1500 when it was told of nothing. A kernel believes an error only if it quotes a
 * packet of one of its own sockets, so that this also says whether the error came translated.
 */
async function learned(lab: Lab, role: string, to: string): Promise<number> {
  return Number(/ mtu (\d+)/.exec(await ip(lab, role, `route get ${to}`))?.[1] ?? WIDE);
}

async function forget(lab: Lab): Promise<void> {
  await Promise.all(['b3', 'b2'].map((role) => ip(lab, role, 'route flush cache')));
}

/** With DF set, from 1500 bytes down to what is said to fit. Prints the payload's size, of which the echo came back. */
const UDP_CLIENT = `
import errno, socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
s.connect((sys.argv[1], int(sys.argv[2])))
s.settimeout(0.5)
size = 1472
for attempt in range(20):
    try:
        s.send(bytes(size))
        print(size if len(s.recv(65535)) == size else 'cut')
        break
    except socket.timeout:
        pass
    except OSError as e:
        if e.errno != errno.EMSGSIZE: raise
        size = s.getsockopt(socket.IPPROTO_IP, 14) - 28  # IP_MTU
`;

async function checkPath(t: Test, lab: Lab, mode: 'dnat' | 'snat', { down, up }: Bottleneck): Promise<void> {
  const toClient = mode === 'dnat' ? FAR_CLIENT : SNAT_ADDRESS;
  const curl = async (...args: string[]): Promise<string[]> => {
    const command = ['-sS', '-m', '20', '-w', '\n%{time_total}', ...args];
    const { stdout, stderr } = await lab.exec('b3', 'curl', command);
    if (stderr !== '') t.fail(stderr);
    return stdout.split('\n').filter(Boolean);
  };
  const url = `http://${VIP}:${PORTS[mode]}`;
  await forget(lab);
  const file = join(lab.dir, 'got');
  const [downSeconds] = await curl('-o', file, `${url}/bytes/${DOWN_BYTES}`);
  const sums = await Promise.all([
    lab.exec('b3', 'sha256sum', [file]),
    lab.exec('b2', 'curl', ['-sS', `http://127.0.0.1:${HTTP_PORT}/sha256/${DOWN_BYTES}`]),
  ]);
  t.equal(sums[0].stdout.split(' ')[0], JSON.parse(sums[1].stdout).sha256, `${mode}: ${DOWN_BYTES} bytes come down`);
  t.equal(await learned(lab, 'b2', toClient), down ? NARROW : WIDE, 'the backend knows how wide the path is');

  await forget(lab);
  const bytes = randomBytes(UP_BYTES);
  writeFileSync(file, bytes);
  const [answer, upSeconds] = await curl('-T', file, `${url}/upload`);
  t.equal(JSON.parse(answer!).sha256, createHash('sha256').update(bytes).digest('hex'), `${UP_BYTES} go up`);
  t.equal(await learned(lab, 'b3', VIP), up ? NARROW : WIDE, 'the client knows how wide the path is');

  await forget(lab);
  const port = mode === 'dnat' ? PORTS.echoDnat : PORTS.echoSnat;
  const udp = await lab.exec('b3', 'python3', ['-c', UDP_CLIENT, VIP, String(port)]);
  t.equal(udp.stdout + udp.stderr, `${(up ? NARROW : WIDE) - 28}\n`, 'UDP with DF is told as well');
  t.comment(`${mode}: down in ${downSeconds} s, up in ${upSeconds} s`);
}

t.setTimeout(900_000);

t.test('path MTU discovery', needsRoot(t, 'ip', 'curl', 'python3', 'sha256sum'), async (t) => {
  const lab = await createFarLab();
  t.teardown(() => lab.destroy());
  const set = async (bottleneck: Bottleneck, mtu: number): Promise<void> => {
    for (const [role, commands] of Object.entries(bottleneck.set(mtu))) await ip(lab, role, ...commands);
  };
  const config = gatewayConfig(lab, { backends: [FAR_BACKEND] });
  const weir = await lab.startWeir(config);
  for (const bottleneck of BOTTLENECKS) {
    await t.test(bottleneck.name, async (t) => {
      await set(bottleneck, NARROW);
      await weir.reload(config);
      for (const mode of ['dnat', 'snat'] as const) await checkPath(t, lab, mode, bottleneck);
      await set(bottleneck, WIDE);
    });
  }
  t.equal(await weir.stop(), 0);
});
