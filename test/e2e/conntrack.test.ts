import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import t, { type Test } from 'tap';
import { CLIENT_ADDRESS, type Lab, VIP, type WeirProcess } from '../../lib/lab/topology.js';
import { createGatewayLab, gatewayConfig, IPERF_PORT, PORTS } from '../support/gateway-lab.js';
import { Load } from '../support/load.js';
import { needsRoot } from '../support/skip.js';

/** How long half-closed connections go on. 30 by hand; in between, what says the same in the time a test may take. */
const HALF_CLOSED_SECONDS = Number(process.env.WEIR_E2E_SECONDS ?? 8);

const ALGORITHMS = ['maglev', 'random'] as const;
const MODES = ['dnat', 'snat'] as const;
const ORDERS = ['server', 'client', 'reset'];
const FIRST_PORT = 41000;

t.setTimeout(900_000);

async function until(test: () => boolean | Promise<boolean>): Promise<void> {
  for (let left = 300; !(await test()); left--) {
    if (left === 0) throw new Error('what was waited for did not come about');
    await sleep(50);
  }
}

async function ask<T>(weir: WeirProcess, ...command: string[]): Promise<T> {
  const { stdout } = await weir.command([...command, '-o', 'json']);
  return JSON.parse(stdout) as T;
}

interface Stats {
  readonly tables: {
    readonly tcp: {
      readonly records: number;
      readonly inserted: number;
      readonly evicted: { readonly halfOpen: number };
      readonly states: Readonly<Record<string, number>>;
    };
  };
  readonly drops: Readonly<Record<string, number>>;
}

const stats = async (weir: WeirProcess): Promise<Stats> => ask(weir, 'ct', 'stats');

/** A sum over namespaces of a counter of /proc/net/netstat. */
async function counted(lab: Lab, roles: readonly string[], name: string): Promise<number> {
  const each = await Promise.all(
    roles.map(async (role) => {
      const { stdout } = await lab.exec(role, 'cat', ['/proc/net/netstat']);
      const [names, values] = stdout.split('\n').filter((line) => line.startsWith('TcpExt:'));
      return Number(values!.split(' ')[names!.split(' ').indexOf(name)]);
    }),
  );
  return each.reduce((sum, value) => sum + value);
}

/**
 * One source port, again and again: connect, request, answer, closed. Who closes first is the order; `reset` is the client,
 * without a farewell.
 */
const REUSING_CLIENT = `
import errno, json, re, socket, struct, sys, time
source, own, host, port, order, count = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5], int(sys.argv[6])
request = b'GET / HTTP/1.1\\r\\nHost: lab\\r\\n' + (b'Connection: close\\r\\n' if order == 'server' else b'') + b'\\r\\n'
slowest, backends = 0, {}
for i in range(count):
    asked = time.monotonic()
    while True:
        s = socket.socket()
        s.settimeout(10)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((source, own))
        began = time.monotonic()
        try:
            s.connect((host, port))
            break
        except OSError as e:
            # The connection before waits for the ACK of its FIN: nothing was sent yet.
            if e.errno != errno.EADDRNOTAVAIL or began > asked + 5: raise
            s.close()
            time.sleep(0.0001)
    slowest = max(slowest, time.monotonic() - began)
    s.sendall(request)
    answer = b''
    while not answer.endswith(b'}\\n'):
        part = s.recv(65536)
        assert part, answer
        answer += part
    name = re.search(rb'"backend":"(\\w+)"', answer)[1].decode()
    backends[name] = backends.get(name, 0) + 1
    if order == 'client': s.shutdown(socket.SHUT_WR)
    if order == 'reset': s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    else: assert s.recv(1) == b''
    s.close()
print(json.dumps({'slowestMs': slowest * 1000, 'backends': backends}))
`;

/** A veth hands on what two processors send in any order. A wire does not: an ACK must not be overtaken by the next SYN. */
async function keepOrder(lab: Lab): Promise<void> {
  for (const role of ['client', 'gw', ...lab.backends]) {
    const script = 'for f in /sys/class/net/*/queues/rx-0/rps_cpus; do echo 1 >$f || true; done';
    await lab.exec(role, 'sh', ['-c', script]);
  }
}

t.test('one source port, 1,000 times', needsRoot(t, 'ip', 'python3', 'ss'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  await keepOrder(lab);
  // Without a TIME_WAIT of its own, the client may use its port again at once.
  await lab.exec('client', 'sysctl', ['-qw', 'net.ipv4.tcp_max_tw_buckets=0']);
  const everywhere = ['client', ...lab.backends];
  const weir = await lab.startWeir(gatewayConfig(lab));
  for (const algorithm of ALGORITHMS) {
    await weir.reload(gatewayConfig(lab, { algorithm }));
    const { inserted } = (await stats(weir)).tables.tcp;
    const repeated = await counted(lab, everywhere, 'TCPSynRetrans');
    for (const mode of MODES) {
      const clients = ORDERS.map((order, i) => {
        const args = [CLIENT_ADDRESS, String(FIRST_PORT + i), VIP, String(PORTS[mode]), order, '1000'];
        return lab.exec('client', 'python3', ['-c', REUSING_CLIENT, ...args], { timeoutMs: 120_000 });
      });
      for (const [i, { stdout, stderr }] of (await Promise.all(clients)).entries()) {
        const name = `${algorithm}, ${mode}, ${ORDERS[i]} closes`;
        t.equal(stderr, '', name);
        const { slowestMs, backends } = JSON.parse(stdout);
        t.comment(`${name}: the slowest connect took ${slowestMs.toFixed(1)} ms`);
        t.ok(slowestMs < 900, 'no connect waited for a second SYN');
        const used = lab.backends.filter((backend) => backends[backend] > 200);
        t.equal(used.length, algorithm === 'random' ? 3 : 1, JSON.stringify(backends));
      }
      const waiting = lab.backends.map((role) => lab.exec(role, 'ss', ['-Htn', 'state', 'time-wait']));
      const sockets = (await Promise.all(waiting)).map(({ stdout }) => stdout).join('');
      t.match(sockets, /:8080 .*:41000/, 'the server that closes has the last one in TIME_WAIT');
    }
    t.equal((await counted(lab, everywhere, 'TCPSynRetrans')) - repeated, 0, 'no SYN or SYN-ACK was sent twice');
    t.equal((await stats(weir)).tables.tcp.inserted - inserted, 6000, 'each was a connection of its own');
  }
  t.equal(await weir.stop(), 0);
});

/** `down`: the client says no more, and is sent pieces. `up`: the server says no more, and is sent pieces. */
const HALF_CLOSING = `
import hashlib, socket, sys, threading, time
pause, count = float(sys.argv[1]), int(sys.argv[2])
def send(s):
    for i in range(count):
        time.sleep(pause)
        s.sendall(bytes([i]) * 100000)
def receive(s):
    return hashlib.sha256(b''.join(iter(lambda: s.recv(65536), b''))).hexdigest()
def serve(s):
    with s:
        way = s.recv(4).decode().strip()
        if way == 'down':
            assert s.recv(1) == b''
            send(s)
        else:
            s.shutdown(socket.SHUT_WR)
            print(receive(s), flush=True)
if len(sys.argv) == 4:
    server = socket.create_server(('', int(sys.argv[3])))
    print('ready', flush=True)
    while True:
        threading.Thread(target=serve, args=(server.accept()[0],)).start()
host, port, way = sys.argv[3], int(sys.argv[4]), sys.argv[5]
with socket.create_connection((host, port)) as s:
    s.sendall(way.ljust(4).encode())
    if way == 'down':
        s.shutdown(socket.SHUT_WR)
        print(receive(s))
    else:
        assert s.recv(1) == b''
        send(s)
`;

t.test('a half-closed connection outlives tcpFin', needsRoot(t, 'ip', 'python3'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  // By lot: what has lost its record is refused.
  const weir = await lab.startWeir(
    gatewayConfig(lab, { algorithm: 'random', conntrack: '{ timeouts: { tcpFin: 2s } }' }),
  );
  const pause = 2.5;
  const count = Math.max(2, Math.floor(HALF_CLOSED_SECONDS / pause));
  const script = ['-c', HALF_CLOSING, String(pause), String(count)];
  const server = lab.spawn('b1', 'half-closing', 'python3', [...script, String(IPERF_PORT)]);
  const said = (): string[] => readFileSync(server.logPath, 'utf8').split('\n').slice(0, -1);
  await until(() => said()[0] === 'ready');

  const clients = [PORTS.iperf, PORTS.iperfSnat].flatMap((port) =>
    ['down', 'up'].map((way) =>
      lab.exec('client', 'python3', [...script, VIP, String(port), way], { timeoutMs: 120_000 }),
    ),
  );
  await sleep(1000 * (pause + 1));
  const flows = await ask<{ service: string; state: string; flags: string[] }[]>(weir, 'ct', 'list');
  t.same(
    flows.map(({ service, state, flags }) => `${service} ${state} ${flags.join(' ')}`).sort(),
    ['iperf', 'iperf-snat'].flatMap((service) => [
      `${service} ESTABLISHED RxClosing SeenNonSyn`,
      `${service} ESTABLISHED TxClosing SeenNonSyn`,
    ]),
  );
  const pieces = Array.from({ length: count }, (_, i) => Buffer.alloc(100_000, i));
  const whole = createHash('sha256').update(Buffer.concat(pieces)).digest('hex');
  const ended = await Promise.all(clients);
  t.same(
    ended.map(({ stdout, stderr }) => stdout + stderr),
    [`${whole}\n`, '', `${whole}\n`, ''],
    'all pieces came down',
  );
  t.same(said().slice(1), [whole, whole], 'and up');
  t.equal(await weir.stop(), 0);
});

/** SYNs of hosts that do not exist, evenly over the time given. */
const FLOOD = `
import socket, struct, sys, time
host, port, count, seconds = socket.inet_aton(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
ip = struct.Struct('!BBHHHBBH4s4s')
tcp = struct.Struct('!HHIIBBHHH')
began = time.monotonic()
for i in range(count):
    if i % 64 == 0: time.sleep(max(0, began + seconds * i / count - time.monotonic()))
    source, sport = 0xc6120000 + i * 7919 % 0x20000, 1024 + i % 60000
    # The pseudo-header, then the fixed fields of the segment.
    total = (source >> 16) + (source & 0xffff) + (host[0] << 8 | host[1]) + (host[2] << 8 | host[3]) + 6 + 20
    total += sport + port + (i >> 16) + (i & 0xffff) + 0x5002 + 64240
    while total >> 16: total = (total & 0xffff) + (total >> 16)
    segment = tcp.pack(sport, port, i, 0, 0x50, 2, 64240, total ^ 0xffff, 0)
    s.sendto(ip.pack(0x45, 0, 40, 0, 0x4000, 64, 6, 0, source.to_bytes(4, 'big'), host) + segment, (sys.argv[1], 0))
print(count / (time.monotonic() - began))
`;

function residentKiB({ pid }: WeirProcess): number {
  return Number(/^VmRSS:\s+(\d+) kB$/m.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))![1]);
}

async function iperf(t: Test, lab: Lab, seconds: number): Promise<number> {
  const { stdout, status } = await lab.exec('client', 'iperf3', [
    '-c',
    VIP,
    '-p',
    String(PORTS.iperf),
    '-t',
    String(seconds),
    '-J',
  ]);
  const { end, error } = JSON.parse(stdout);
  t.equal(status, 0, `iperf3: ${error ?? 'alive to the end'}`);
  return end.sum_received.bits_per_second / 1e9;
}

t.test('a SYN flood harms no connection', needsRoot(t, 'ip', 'python3', 'iperf3'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  const entries = 4096;
  await lab.exec('gw', 'ip', ['route', 'add', '198.18.0.0/15', 'via', CLIENT_ADDRESS]); // where SYN-ACKs are not heard
  lab.spawn('b1', 'iperf3', 'iperf3', ['-s']);
  const weir = await lab.startWeir(gatewayConfig(lab, { conntrack: `{ tcpEntries: ${entries} }` }));
  const send = (times: number): Promise<string> =>
    lab
      .exec('client', 'python3', ['-c', FLOOD, VIP, String(PORTS.dnat), String(times * entries), '1'])
      .then(({ stdout, stderr }) => `${Math.round(Number(stdout))} SYNs a second ${stderr}`);
  /** Until so many have come through: on processors that are all taken, the device's queue overflows. */
  const flood = async (times: number): Promise<string> => {
    const inserted = async (): Promise<number> => (await stats(weir)).tables.tcp.inserted;
    const enough = (await inserted()) + times * entries;
    const rates = [await send(times)];
    while ((await inserted()) < enough) rates.push(await send(1));
    return rates.join(', then ');
  };
  const alone = await iperf(t, lab, 2);
  await flood(2); // what is used for the first time is committed
  const beforeKiB = residentKiB(weir);
  for (const algorithm of ALGORITHMS) {
    await weir.reload(gatewayConfig(lab, { algorithm, conntrack: `{ tcpEntries: ${entries} }` }));
    const before = await stats(weir);
    const load = new Load(
      lab,
      `${VIP}:${PORTS.dnat}`,
      '--kept',
      '50',
      '--parallel',
      algorithm === 'maglev' ? '1' : '0',
    );
    await until(() => load.report?.kept.open === 50);
    const transfer = iperf(t, lab, 4);
    await sleep(500);
    for (const times of [5, 10]) {
      const rate = await flood(times);
      const { records } = (await stats(weir)).tables.tcp;
      t.ok(records <= entries, `${times} times the table, ${rate}: ${records} records`);
    }
    t.comment(`${algorithm}: iperf3 ${(await transfer).toFixed(2)} Gb/s, ${alone.toFixed(2)} without the flood`);
    load.stop();
    await load.ended;
    const { failed, errors, ok } = load.report!;
    t.same({ failed, errors }, { failed: 0, errors: {} }, 'no connection was lost');
    if (algorithm === 'maglev') t.ok(ok > 0, `${ok} new ones were made meanwhile`);
    const after = await stats(weir);
    const evicted = after.tables.tcp.evicted.halfOpen - before.tables.tcp.evicted.halfOpen;
    t.ok(evicted > 10 * entries, `${evicted} half-open records made room`);
    t.equal(after.drops['table-full'] ?? 0, 0);
  }
  const grewKiB = residentKiB(weir) - beforeKiB;
  t.ok(grewKiB < 32 * 1024, `its memory grew by ${grewKiB} KiB`);
  t.equal(await weir.stop(), 0);
});

t.test('a table full of live connections', needsRoot(t, 'ip', 'curl'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  const config = (algorithm: 'maglev' | 'random'): string =>
    gatewayConfig(lab, { algorithm, conntrack: '{ tcpEntries: 64 }' });
  const weir = await lab.startWeir(config('maglev'));
  const get = async (port: number, ...more: string[]): Promise<string> => {
    const args = ['-sS', '-m', '1', '-o', '/dev/null', '-w', '%{http_code} %{size_download}\\n', ...more];
    return (await lab.exec('client', 'curl', [...args, `http://${VIP}:${port}/bytes/300000`])).stdout;
  };
  const load = new Load(lab, `${VIP}:${PORTS.dnat}`, '--kept', '64', '--parallel', '0');
  await until(async () => (await stats(weir)).tables.tcp.states.ESTABLISHED === 64);

  for (let i = 0; i < 10; i++) t.equal(await get(PORTS.dnat, '-m', '10'), '200 300000\n', 'maglev needs no record');
  const { traffic } = await ask<{ traffic: { stateless: number } }>(weir, 'status');
  t.ok(traffic.stateless > 0, `${traffic.stateless} packets without one`);
  t.equal((await stats(weir)).drops['table-full'] ?? 0, 0);
  t.equal(await get(PORTS.snat), '000 0\n', 'snat does');
  const refused = (await stats(weir)).drops['table-full']!;
  t.ok(refused > 0, `and is refused: ${refused}`);
  await weir.reload(config('random'));
  t.equal(await get(PORTS.dnat), '000 0\n', 'and so is who draws lots');
  t.ok((await stats(weir)).drops['table-full']! > refused);

  load.stop();
  await load.ended;
  const { failed, kept } = load.report!;
  t.same([failed, kept.open], [0, 0], 'those in the table never felt it');
  t.equal(await get(PORTS.dnat), '200 300000\n', 'closed ones make room');
  t.equal(await weir.stop(), 0);
});
