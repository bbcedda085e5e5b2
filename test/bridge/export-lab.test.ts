import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t, { type Test } from 'tap';
import { toIptables } from '../../lib/bridge/iptables.js';
import { kernelView } from '../../lib/bridge/kernel-view.js';
import { toNft } from '../../lib/bridge/nft.js';
import { parseConfig } from '../../lib/config/load.js';
import { waitForLine } from '../../lib/lab/process.js';
import { Lab, VIP } from '../../lib/lab/topology.js';
import { goodnessOfFit, homogeneity, tail } from '../support/chi-square.js';
import { needsRoot } from '../support/skip.js';

/*
 *   client 10.1.0.2 --- gw: iptables | nft | weir --- b1: one server on 10.2.0.101 to 10.2.0.107, which answers with
 *                                                         "ITS ADDRESS, THE CLIENT'S"
 *
 * The same file, said three ways; the same connections through each; shares compared with what the weights say, and with one another.
 */

const CONNECTIONS = Number(process.env.WEIR_SHARE_CONNECTIONS ?? 10_000);

/** All in all some 40 comparisons: a false alarm in less than one of a million runs. */
const TOO_UNLIKELY = 1e-8;

const SERVER = `
import select, socket, sys
addresses = sys.argv[1:]
poll = select.epoll()
sockets = {}
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for address in addresses:
        s = socket.socket(socket.AF_INET, kind)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        s.bind((address, 8080))
        if kind == socket.SOCK_STREAM: s.listen(4096)
        s.setblocking(False)
        sockets[s.fileno()] = (s, kind, address)
        poll.register(s.fileno(), select.EPOLLIN)
print('ready', flush=True)
while True:
    for fd, _ in poll.poll():
        s, kind, address = sockets[fd]
        while True:
            try:
                if kind == socket.SOCK_STREAM:
                    c, peer = s.accept()
                    c.send(f'{address} {peer[0]}'.encode())
                    c.close()
                else:
                    _, peer = s.recvfrom(64)
                    s.sendto(f'{address} {peer[0]}'.encode(), peer)
            except BlockingIOError: break
            except OSError: pass
`;

/** Counts what answers say: one connection per source port, two hundred at a time. Jobs come, and counts go, as JSON. */
const CLIENT = `
import collections, json, select, socket, sys
def run(protocol, host, port, source, first, count, silence_ms):
    counts, lost, ports = collections.Counter(), collections.Counter(), iter(range(first, first + count))
    poll, waiting = select.poll(), {}
    def begin():
        for source_port in ports:
            s = socket.socket(socket.AF_INET, socket.SOCK_STREAM if protocol == 'tcp' else socket.SOCK_DGRAM)
            s.setblocking(False)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind((source, source_port))
            s.connect_ex((host, port))
            if protocol == 'udp': s.send(b'x')
            waiting[s.fileno()] = s
            poll.register(s.fileno(), select.POLLIN)
            return
    for _ in range(200): begin()
    while waiting:
        ready = poll.poll(silence_ms)
        if not ready:
            lost['silence'] += len(waiting)
            break
        for fd, _ in ready:
            s = waiting.pop(fd)
            poll.unregister(fd)
            try: counts[s.recv(64).decode()] += 1
            except OSError as error: lost[error.strerror] += 1
            s.close()
            begin()
    return {'counts': counts, 'lost': lost}
print(json.dumps([run(**job) for job in json.load(sys.stdin)]))
`;

const addresses = Array.from({ length: 7 }, (_, i) => `10.2.0.${101 + i}`);

interface Round {
  readonly port: number;
  readonly protocol: 'tcp' | 'udp';
  readonly weights: readonly number[];
}

const ones = (n: number): number[] => new Array<number>(n).fill(1);

const ROUNDS: readonly Round[] = [
  { port: 1001, protocol: 'udp', weights: ones(1) },
  { port: 1002, protocol: 'udp', weights: ones(2) },
  { port: 1003, protocol: 'tcp', weights: ones(3) },
  { port: 1007, protocol: 'udp', weights: ones(7) },
  { port: 1008, protocol: 'udp', weights: [1, 2, 0, 5, 3] },
];

/** Of the service with seven, once the third has left the file. */
const REMOVED = 2;

function configOf(removed?: number): string {
  const service = (name: string, port: number, protocol: string, more: string, weights: readonly number[]): string => {
    const backends = weights
      .map((weight, i) => `{ name: b${i + 1}, address: ${addresses[i]}, port: 8080, weight: ${weight} }`)
      .filter((_, i) => port !== 1007 || i !== removed);
    return `  - { name: ${name}, address: ${VIP}, port: ${port}, protocol: ${protocol}, algorithm: random, ${more} backends: [${backends}] }`;
  };
  return [
    'snat: { addresses: [10.96.255.1] }',
    'admin: { listen: off }',
    'services:',
    ...ROUNDS.map(({ port, protocol, weights }) => service(`n${port}`, port, protocol, '', weights)),
    service('snat', 1020, 'tcp', 'mode: snat,', ones(2)),
    service('sticky', 1021, 'tcp', 'affinity: { clientIp: 1h },', ones(7)),
    service('others-only', 1022, 'tcp', 'sourceRanges: [192.0.2.0/24],', ones(2)),
    service('ours-too', 1023, 'tcp', 'sourceRanges: [192.0.2.0/24, 10.1.0.0/24],', ones(2)),
    service('nobody', 1024, 'tcp', '', []),
    service('nobody-udp', 1024, 'udp', '', [0]),
    service('silent', 1025, 'tcp', 'noBackend: drop,', []),
    service('single', 1026, 'tcp', '', ones(1)),
    '',
  ].join('\n');
}

function rulesOf(write: typeof toNft, text: string): string {
  const { config } = parseConfig(text);
  return write(kernelView(config!).services);
}

interface Answers {
  readonly counts: Readonly<Record<string, number>>;
  readonly lost: Readonly<Record<string, number>>;
}

/** What a client is told to do: `count` connections, from its own address and from as many ports. */
interface Job {
  readonly protocol: 'tcp' | 'udp';
  readonly port: number;
  readonly count: number;
  readonly source: string;
  readonly silenceMs?: number;
}

/** Of one client, no two services meet at one port: their flows would share a reply tuple. */
function firstPort({ port, count }: Job): number {
  return count < 100 ? 20_000 + (port - 1000) * 50 : 20_000;
}

async function connect(lab: Lab, role: string, jobs: readonly Job[]): Promise<Answers[]> {
  const input = jobs.map(({ silenceMs = 3000, ...job }) => ({
    ...job,
    host: VIP,
    first: firstPort({ ...job }),
    silence_ms: silenceMs,
  }));
  const { stdout, stderr } = await lab.exec(role, 'python3', ['-S', '-c', CLIENT], { input: JSON.stringify(input) });
  if (stderr !== '') throw new Error(stderr);
  return JSON.parse(stdout) as Answers[];
}

const REFUSED = { 'Connection refused': 3 };
const SILENCE = { silence: 3 };

/** What becomes of a few connections to the services that are no lots, by port. */
const FATES: readonly (readonly [string, number, 'tcp' | 'udp', Answers['lost']])[] = [
  ['snat', 1020, 'tcp', {}],
  ['affinity', 1021, 'tcp', {}],
  ['not in sourceRanges: dropped', 1022, 'tcp', SILENCE],
  ['in sourceRanges', 1023, 'tcp', {}],
  ['no backend: RST', 1024, 'tcp', REFUSED],
  ['no backend: unreachable', 1024, 'udp', REFUSED],
  ['no backend, drop', 1025, 'tcp', SILENCE],
  ['a port that nobody serves', 1099, 'tcp', REFUSED],
];

function fateJobs(source: string): Job[] {
  return FATES.map(([, port, protocol, lost]) => ({
    protocol,
    port,
    source,
    count: Object.keys(lost).length > 0 ? 3 : 40,
    ...(lost === SILENCE ? { silenceMs: 300 } : {}),
  }));
}

function checkFates(t: Test, answers: readonly Answers[], source: string): void {
  FATES.forEach(([name, , , lost], i) => {
    t.strictSame(answers[i]!.lost, lost, name);
  });
  const isSeen = (answer: string): boolean => answer.endsWith(` ${source}`);
  t.notOk(Object.keys(answers[0]!.counts).some(isSeen), 'snat hides the client');
  t.strictSame(Object.values(answers[1]!.counts), [40], 'affinity: one backend has them all');
}

async function checkHairpin(t: Test, lab: Lab): Promise<void> {
  const source = addresses[0]!;
  const [answers] = await connect(lab, 'b1', [{ protocol: 'tcp', port: 1026, count: 3, source }]);
  t.strictSame(answers!.lost, {}, 'hairpin: a backend reaches itself by the VIP');
  t.notOk(
    Object.keys(answers!.counts).some((answer) => answer.endsWith(` ${source}`)),
    'from elsewhere',
  );
}

t.setTimeout(900_000);

t.test('the chi-square of tables', async (t) => {
  for (const [x, df] of [
    [3.841, 1],
    [5.991, 2],
    [12.592, 6],
    [21.026, 12],
  ] as const)
    t.ok(Math.abs(tail(x, df) - 0.05) < 1e-4, `${x} of ${df}`);
  t.ok(Math.abs(tail(23.928, 1) / 1e-6 - 1) < 0.01);
  t.ok(goodnessOfFit([5000, 5000], [1, 1]) > 0.99);
  t.ok(goodnessOfFit([5300, 4700], [1, 1]) < TOO_UNLIKELY, 'shares that are 3 % off are found out');
  t.ok(goodnessOfFit([3333, 1667, 5000], [1, 1, 1]) < TOO_UNLIKELY);
  t.ok(homogeneity([ones(7).map(() => 1428), [1728, 1128, 1428, 1428, 1428, 1428, 1428]]) < TOO_UNLIKELY);
});

t.test(
  'one file as iptables rules, as nft rules, and run',
  needsRoot(t, 'ip', 'iptables', 'nft', 'python3'),
  async (t) => {
    const lab = await Lab.create({ prefix: `weir-t${process.pid}`, backends: 1 });
    t.teardown(() => lab.destroy());
    const must = async (role: string, command: string, args: readonly string[], input = ''): Promise<string> => {
      const { stdout, stderr, status } = await lab.exec(role, command, args, { input });
      if (status !== 0) throw new Error(`${command} ${args.join(' ')}: ${stderr}`);
      return stdout;
    };
    await must('b1', 'ip', ['-batch', '-'], addresses.map((each) => `address add ${each}/24 dev eth0\n`).join(''));
    const server = lab.spawn('b1', 'server', 'python3', ['-S', '-c', SERVER, ...addresses]);
    await waitForLine(server, 'the server', (line) => line === 'ready');
    // Or a bridge would translate by itself, and not send back where it received from.
    await must('gw', 'sh', ['-c', 'f=/proc/sys/net/bridge/bridge-nf-call-iptables; [ ! -e $f ] || echo 0 > $f']);
    // Refusals are rules of forwarding: the kernel must know where to forward.
    await must('gw', 'ip', ['route', 'add', `${VIP}/32`, 'dev', 'lo']);

    const rows = new Map<string, number[][]>();
    let host = 10;
    // Each round has a client of its own: what the kernel remembers of others is not for it.
    const newClients = async (count: number): Promise<string[]> => {
      const clients = Array.from({ length: count }, () => `10.1.0.${++host}`);
      await must('client', 'ip', ['-batch', '-'], clients.map((each) => `address add ${each}/24 dev eth0\n`).join(''));
      return clients;
    };
    const compare = (t: Test, name: string, { weights }: Round, { counts, lost }: Answers, source: string): void => {
      t.strictSame(lost, {}, `${name}: everybody is answered`);
      const used = weights
        .map((weight, i) => ({ weight, count: counts[`${addresses[i]} ${source}`] ?? 0 }))
        .filter(({ weight }) => weight > 0);
      const row = used.map(({ count }) => count);
      const total = row.reduce((sum, count) => sum + count, 0);
      t.equal(total, CONNECTIONS, 'by backends with a weight, who see the client');
      t.ok(
        goodnessOfFit(
          row,
          used.map(({ weight }) => weight),
        ) > TOO_UNLIKELY,
        `${name}: ${row}`,
      );
      rows.set(name, [...(rows.get(name) ?? []), row]);
    };
    const play = async (t: Test, change: (text: string) => Promise<unknown>): Promise<void> => {
      const [own, ...clients] = await newClients(1 + ROUNDS.length);
      const jobs = ROUNDS.map(({ protocol, port }, i) => ({ protocol, port, count: CONNECTIONS, source: clients[i]! }));
      const answers = await connect(lab, 'client', [...jobs, ...fateJobs(own!)]);
      ROUNDS.forEach((round, i) => {
        compare(t, `${round.weights}`, round, answers[i]!, clients[i]!);
      });
      checkFates(t, answers.slice(ROUNDS.length), own!);
      await checkHairpin(t, lab);
      await change(configOf(REMOVED));
      const [source] = (await newClients(1)) as [string];
      const round = {
        port: 1007,
        protocol: 'udp',
        weights: ones(7).map((one, i) => (i === REMOVED ? 0 : one)),
      } as const;
      const [answer] = await connect(lab, 'client', [
        { protocol: round.protocol, port: round.port, count: CONNECTIONS, source },
      ]);
      compare(t, 'one of 7 removed', round, answer!, source);
    };

    await t.test('iptables', async (t) => {
      const unload = 'iptables-save | grep -v WEIR- | iptables-restore';
      const rules = rulesOf(toIptables, configOf());
      const before = await must('gw', 'iptables-save', ['-t', 'nat']);
      await must('gw', 'iptables-restore', ['--test'], rules);
      await must('gw', 'iptables-restore', ['--noflush'], rules);
      await play(t, async (text) => {
        await must('gw', 'sh', ['-c', unload]);
        await must('gw', 'iptables-restore', ['--noflush'], rulesOf(toIptables, text));
      });
      await must('gw', 'sh', ['-c', unload]);
      t.notMatch(await must('gw', 'iptables-save', []), /WEIR/, `nothing is left; before: ${before.length} bytes`);
      await must('gw', 'iptables', ['-t', 'nat', '-F']);
    });

    await t.test('nft', async (t) => {
      const load = async (text: string): Promise<void> => {
        const path = join(lab.dir, 'weir.nft');
        writeFileSync(path, rulesOf(toNft, text));
        await must('gw', 'nft', ['-c', '-f', path]);
        await must('gw', 'nft', ['-f', path]);
      };
      await load(configOf());
      await load(configOf());
      await play(t, load);
      await must('gw', 'nft', ['delete', 'table', 'ip', 'weir']);
      t.notMatch(await must('gw', 'nft', ['list', 'ruleset']), /table ip weir/);
    });

    await t.test('weir', async (t) => {
      await must('gw', 'ip', ['route', 'del', `${VIP}/32`, 'dev', 'lo']);
      const weir = await lab.startWeir(configOf());
      await play(t, (text) => weir.reload(text));
      t.equal(await weir.stop(), 0);
    });

    for (const [name, each] of rows) {
      t.equal(each.length, 3, name);
      if (each[0]!.length > 1)
        t.ok(homogeneity(each) > TOO_UNLIKELY, `${name}: the three are alike: ${each.join(' | ')}`);
    }
  },
);
