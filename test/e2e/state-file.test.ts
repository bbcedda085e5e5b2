import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { backendAddress, type Lab, VIP, type WeirProcess } from '../../lib/lab/topology.js';
import { createGatewayLab } from '../support/gateway-lab.js';
import { needsRoot } from '../support/skip.js';

/**
 * A conntrack that outlives its process: transfers under way while weir is killed and started again, by SIGKILL in their middle and by
 * SIGTERM, for every mode and algorithm, up and down at once.
 */

t.setTimeout(900_000);

const SERVICES = (['dnat', 'snat'] as const).flatMap((mode, m) =>
  (['random', 'maglev'] as const).flatMap((algorithm, a) =>
    (['up', 'down'] as const).map((direction, d) => ({
      name: `${mode}-${algorithm}-${direction}`,
      mode,
      algorithm,
      direction,
      port: 5300 + m * 4 + a * 2 + d,
    })),
  ),
);

function configText(lab: Lab, drop: string[] = []): string {
  return [
    'snat: { addresses: [10.96.255.1] }',
    'admin: { listen: off }',
    `conntrack: { tcpEntries: 4096, anyEntries: 4096, stateFile: ${join(lab.dir, 'conntrack')} }`,
    'services:',
    ...SERVICES.filter(({ name }) => !drop.includes(name)).map(({ name, mode, algorithm, port }) => {
      const backends = lab.backends.map((b, i) => `{ name: ${b}, address: ${backendAddress(i + 1)}, port: ${port} }`);
      return `  - { name: ${name}, address: ${VIP}, port: ${port}, protocol: tcp, algorithm: ${algorithm}, mode: ${mode}, backends: [${backends.join(', ')}] }`;
    }),
    '',
  ].join('\n');
}

interface Transfer {
  readonly name: string;
  readonly done: ReturnType<Lab['exec']>;
}

/** Goes on for 1 MiB more once the file `end` is there. */
const SENDER = `
import os, socket, sys, time
address, port, direction, end = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
s = socket.create_connection((address, port), 60)
s.sendall(b'U' if direction == 'up' else b'D')
total, since, longest, last = 0, 0, 0.0, time.monotonic()
block = bytes(65536)
while since < 1 << 20:
    is_late = os.path.exists(end)
    n = s.send(block) if direction == 'up' else len(s.recv(65536))
    if n == 0: sys.exit('closed')
    now = time.monotonic()
    longest, last = max(longest, now - last), now
    total += n
    if is_late: since += n
    time.sleep(0.002)
if direction == 'up':
    s.shutdown(socket.SHUT_WR)
    answer = b''
    while True:
        part = s.recv(100)
        if not part: break
        answer += part
    assert int(answer) == total, (answer, total)
print('%d %.3f' % (total, longest))
`;

/** Counts what it is sent, or sends for as long as somebody reads. */
const SERVER = `
import selectors, socket, sys, threading
def serve(c):
    try:
        if c.recv(1) == b'U':
            total = 0
            while True:
                part = c.recv(65536)
                if not part: break
                total += len(part)
            c.sendall(str(total).encode())
        else:
            while True: c.sendall(bytes(65536))
    except OSError: pass
    c.close()
sel = selectors.DefaultSelector()
for port in map(int, sys.argv[1:]):
    l = socket.create_server(('', port), backlog=64)
    sel.register(l, selectors.EVENT_READ)
print('up', flush=True)
while True:
    for key, _ in sel.select():
        c, _ = key.fileobj.accept()
        threading.Thread(target=serve, args=(c,), daemon=True).start()
`;

/** @param end the file that ends them when it is there */
function startTransfers(lab: Lab, end: string): Transfer[] {
  return SERVICES.map(({ name, port, direction }) => {
    const args = ['-c', SENDER, VIP, String(port), direction, end];
    return { name, done: lab.exec('client', 'python3', args, { timeoutMs: 300_000 }) };
  });
}

const AWAIT_SERVER = `
import socket, sys, time
for _ in range(200):
    try: socket.create_connection(('127.0.0.1', int(sys.argv[1])), 1).close(); sys.exit(0)
    except OSError: time.sleep(0.05)
sys.exit('no server')
`;

async function startServers(lab: Lab): Promise<void> {
  const ports = SERVICES.map(({ port }) => String(port));
  for (const role of lab.backends) {
    lab.spawn(role, `server-${role}`, 'python3', ['-c', SERVER, ...ports]);
    await lab.exec(role, 'python3', ['-c', AWAIT_SERVER, ports.at(-1)!], { timeoutMs: 30_000 });
  }
}

interface Flow {
  readonly service: string;
  readonly client: string;
  readonly packets: { readonly original: number };
}

/**
 * Waits until all transfers are well under way.
 *
 * @param earlier flows of transfers that have ended, which may be listed still
 * @returns the flow of each service
 */
async function underWay(weir: WeirProcess, earlier: readonly Flow[] = []): Promise<Map<string, Flow>> {
  const isEarlier = (flow: Flow): boolean => earlier.some((other) => isSame(flow, other));
  for (;;) {
    const flows = (await flowsOf(weir)).filter((flow) => flow.packets.original > 100 && !isEarlier(flow));
    if (flows.length === SERVICES.length) return new Map(flows.map((flow) => [flow.service, flow]));
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

async function flowsOf(weir: WeirProcess): Promise<Flow[]> {
  const { stdout } = await weir.command(['ct', 'list', '-o', 'json']);
  return JSON.parse(stdout);
}

function isSame(flow: Flow, other: Flow): boolean {
  return flow.service === other.service && flow.client === other.client;
}

t.test('transfers go on after kill -9 and after SIGTERM', needsRoot(t, 'ip', 'python3'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  await startServers(lab);
  let weir = await lab.startWeir(configText(lab));
  for (const signal of ['SIGKILL', 'SIGTERM'] as const) {
    const earlier = await flowsOf(weir);
    const end = join(lab.dir, `end-${signal}`);
    const transfers = startTransfers(lab, end);
    const before = await underWay(weir, earlier);
    await weir.stop(signal);
    weir = await lab.startWeir(configText(lab));
    t.comment(`${signal}: ready again after ${Math.round(weir.readyMs)} ms`);
    const after = await flowsOf(weir);
    writeFileSync(end, '');
    for (const { name, done } of transfers) {
      const { stdout, stderr, status } = await done;
      t.equal(status, 0, `${signal} ${name}: ${stderr.slice(-200)}`);
      const [bytes, pause] = stdout.trim().split(' ').map(Number);
      t.ok(bytes! > 1 << 20, `${signal} ${name}: ${(bytes! / 1e6).toFixed(0)} MB, longest pause ${pause} s`);
      const flow = before.get(name)!;
      const since = after.find((other) => isSame(other, flow));
      t.ok(since !== undefined && since.packets.original >= flow.packets.original, 'its record is the same');
    }
  }
  t.equal(await weir.stop(), 0);
});

t.test('what left the file while weir was away is drained', needsRoot(t, 'ip', 'python3'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  await startServers(lab);
  let weir = await lab.startWeir(configText(lab));
  const end = join(lab.dir, 'end');
  const transfers = startTransfers(lab, end);
  await underWay(weir);
  await weir.stop('SIGKILL');
  const gone = ['dnat-random-down', 'snat-maglev-up'];
  weir = await lab.startWeir(configText(lab, gone));
  const { stdout } = await weir.command(['services', '-o', 'json']);
  const removed = (JSON.parse(stdout) as { name: string; removed: boolean }[]).filter((each) => each.removed);
  t.equal(removed.length, gone.length);
  writeFileSync(end, '');
  for (const { name, done } of transfers) {
    const { status, stderr } = await done;
    t.equal(status, 0, `${name}: ${stderr.slice(-200)}`);
  }
  t.equal(await weir.stop(), 0);
});
