import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import dgram from 'node:dgram';
import { once } from 'node:events';
import { closeSync, writeFileSync } from 'node:fs';
import { setImmediate as turn } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import t, { type Test } from 'tap';
import { seededRandom } from '../../lib/base/random.js';
import { REASON_NAMES } from '../../lib/base/reasons.js';
import { parseConfig } from '../../lib/config/load.js';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import { allocateTable } from '../../lib/conntrack/memory.js';
import { compile } from '../../lib/control/compile.js';
import { Identities } from '../../lib/control/identity.js';
import { Gateway } from '../../lib/datapath/gateway.js';
import { allocateStats, STAT_TX_PACKETS } from '../../lib/datapath/stats.js';
import { PacketBatch, packetOffset } from '../../lib/io/device.js';
import { ErrorSocket } from '../../lib/io/error-socket.js';
import type { MemoryPacket } from '../../lib/io/memory-device.js';
import { openDevice } from '../../lib/io/open.js';
import { openTun } from '../../lib/io/tun.js';
import { createWake } from '../../lib/io/wake.js';
import { tunnelled, untunnel } from '../fixtures/geneve.js';
import { partial, pattern, tcp, udp, verifyChecksums } from '../fixtures/packets.js';
import { needsRoot } from '../support/skip.js';

/**
 * What the pipeline writes for dsr, through a real TUN and a real kernel. The file runs itself twice more, each time in a network
 * namespace of its own, which ends with it:
 *
 *     gateway: pipeline -> TUN -> kernel -> 192.0.2.1 -- veth -- 192.0.2.7 -> UDP socket: node
 */

const FILE = fileURLToPath(import.meta.url);
const { WEIR_TEST_ROLE: role } = process.env;

const CONFIG = `
tunnel: { address: 192.0.2.1 }
services:
  - { name: web, address: 10.96.0.10, port: 80, mode: dsr, backends: [{ address: 10.2.0.11, port: 8080, node: 192.0.2.7 }] }
  - { name: dns, address: 10.96.0.10, port: 53, protocol: udp, mode: dsr, backends: [{ address: 10.2.0.11, port: 53, node: 192.0.2.7 }] }
`;
const client = { src: '10.1.0.2', sport: 40000, dst: '10.96.0.10', dport: 80 };

/** What the node tells of the datagrams it got: the inner packet of each, in hexadecimal, and what was wrong with it. */
interface Arrived {
  readonly inner: string;
  readonly problem: string;
}

if (role === 'gateway') runGateway();
else if (role === 'node') runNode();
else {
  t.setTimeout(900_000);
  const options = { ...needsRoot(t, 'unshare', 'nsenter', 'ip'), timeout: 110_000 };
  t.test('through a kernel', options, async (t) => {
    const env = { ...process.env, WEIR_TEST_ROLE: 'gateway', TAP_TIMEOUT: '100' };
    await t.spawn('unshare', ['--net', '--', process.execPath, ...process.execArgv, FILE], { env, timeout: 100_000 });
  });
}

function runGateway(): void {
  writeFileSync('/proc/sys/net/ipv6/conf/default/disable_ipv6', '1');
  writeFileSync('/proc/sys/net/ipv4/ip_forward', '1');
  ip('link set lo up');
  for (const engine of ['io_uring', 'readwrite'] as const) {
    for (const segmentation of [true, false]) {
      t.test(`${engine}, UDP segmentation ${segmentation ? 'on' : 'off'}`, (t) => testWrites(t, engine, segmentation));
    }
  }
}

async function testWrites(t: Test, engine: 'io_uring' | 'readwrite', segmentation: boolean): Promise<void> {
  const node = await startNode();
  const tun = openTun('weir0', { offload: true });
  const wake = createWake();
  const errors = new ErrorSocket();
  t.equal(errors.problem, '');
  writeFileSync('/proc/sys/net/ipv4/conf/weir0/accept_local', '1');
  writeFileSync('/proc/sys/net/ipv4/conf/weir0/rp_filter', '0');
  ip('link set weir0 up');
  const udpSegmentation = segmentation && tun.udpSegmentation;
  const { fd, vnetHeader } = tun;
  const { device } = openDevice({ fd, vnetHeader, udpSegmentation, mtu: 1500, wakeFd: wake.fd, engine });
  const stats = allocateStats();
  const gateway = new Gateway({
    tcp: new FlowTable(allocateTable(64)),
    any: new FlowTable(allocateTable(64)),
    output: device,
    random: seededRandom(1),
    stats,
    errors,
  });
  gateway.use(compile(parseConfig(CONFIG).config!, new Identities(), { isUp: () => true, nowMs: 0 }).snapshot);

  const send = ({ bytes, vnet = new Uint8Array(10) }: MemoryPacket): number => {
    const batch = new PacketBatch(1);
    const slot = device.take();
    const at = packetOffset(device.memory, slot);
    device.memory.bytes.set(vnet, at - 10);
    device.memory.bytes.set(bytes, at);
    batch.slot[0] = slot;
    batch.offset[0] = at;
    batch.length[0] = bytes.length;
    batch.count = 1;
    const before = stats[STAT_TX_PACKETS]!;
    gateway.process(batch, 1);
    device.receive(0);
    return stats[STAT_TX_PACKETS]! - before;
  };
  /** Sends one packet and gives back the datagrams that it arrived as. */
  const exchange = async (
    packet: MemoryPacket,
    datagrams: number,
  ): Promise<{ writes: number; arrived: readonly Arrived[] }> => {
    node.send(datagrams);
    await heard(node);
    const writes = send(packet);
    return { writes, arrived: await heard(node) };
  };
  const intact = (arrived: readonly Arrived[]): Uint8Array[] => {
    for (const { problem } of arrived) if (problem !== '') t.equal(problem, '');
    return arrived.map(({ inner }) => Buffer.from(inner, 'hex'));
  };

  const syn = await exchange({ bytes: tcp({ ...client, flags: 'S', seq: 999 }) }, 1);
  t.same(intact(syn.arrived), [Buffer.from(tcp({ ...client, dst: '10.2.0.11', dport: 8080, flags: 'S', seq: 999 }))]);

  for (let round = 0; round < 20; round++) {
    const seq = 1000 + round * 61_000;
    const stream = { ...client, flags: 'PA', seq, ack: 1, payload: 61_000 };
    const { writes, arrived } = await exchange(partial(tcp(stream), 1398), 44);
    if (writes !== (udpSegmentation ? 1 : 44)) t.equal(writes, udpSegmentation ? 1 : 44);
    const pieces = intact(arrived);
    const bySequence = pieces.map((piece) => new DataView(piece.buffer, piece.byteOffset).getUint32(24) - seq);
    if (bySequence.some((from, i) => from !== i * 1398)) t.same(bySequence, 'in order');
    if (!Buffer.concat(pieces.map((piece) => piece.subarray(40))).equals(pattern(61_000))) t.fail('another stream');
  }
  const query = { ...client, sport: 5000, dport: 53 };
  const cut = await exchange(partial(udp({ ...query, payload: 5000 }), 1200), 5);
  t.ok(Buffer.concat(intact(cut.arrived).map((piece) => piece.subarray(28))).equals(pattern(5000)), 'UDP datagrams');
  t.equal(cut.writes, udpSegmentation ? 1 : 5);
  const loose = await exchange({ bytes: udp({ ...query, id: 7, df: false, payload: 1450 }) }, 2);
  t.same(
    intact(loose.arrived).map((piece) => piece.length),
    [1436, 62],
    'fragments of what does not fit',
  );
  t.equal(device.writeErrors, 0);

  // The way to the node gets narrower. The kernel tells the sender of the outer packets, which it takes for itself.
  ip('link set veth0 mtu 1400');
  const large = { bytes: tcp({ ...client, flags: 'A', payload: 1390 }) };
  const sendLarge = (): string => {
    send(large);
    return REASON_NAMES[gateway.results.reason[0]!]!;
  };
  t.equal(sendLarge(), 'none');
  let nowMs = 1000;
  for (; sendLarge() === 'none' && nowMs < 1_000_000; nowMs += 1000) {
    await turn();
    gateway.flushDue(nowMs);
  }
  t.equal(sendLarge(), 'frag-needed', `heard after ${nowMs / 1000 - 1} more`);
  const narrow = await exchange(partial(tcp({ ...client, flags: 'A', payload: 2600 }), 1398), 3);
  t.same(
    intact(narrow.arrived).map((piece) => piece.length),
    [1338, 1338, 44],
  );
  ip('link set veth0 mtu 1500');

  errors.close();
  device.close();
  closeSync(tun.fd);
  wake.close();
  node.disconnect();
  await once(node, 'exit');
}

/** The next word from the node: what arrived, nothing yet when it has only begun to listen. */
async function heard(node: ChildProcess): Promise<readonly Arrived[]> {
  for (;;) {
    const [{ arrived }] = (await once(node, 'message')) as [{ arrived?: readonly Arrived[] }];
    if (arrived !== undefined) return arrived; // the loader of its source has something to say as well
  }
}

/** Starts the other side and connects it. */
async function startNode(): Promise<ChildProcess> {
  const env = { ...process.env, WEIR_TEST_ROLE: 'node' };
  const argv = ['--net', '--', process.execPath, ...process.execArgv, FILE];
  const node = spawn('unshare', argv, { env, stdio: ['ignore', 'inherit', 'inherit', 'ipc'] });
  await heard(node);
  ip(`link add veth0 type veth peer name eth0 netns ${node.pid}`);
  ip('addr add 192.0.2.1/24 dev veth0');
  ip('link set veth0 up');
  const inNode = (command: string): void => {
    execFileSync('nsenter', ['-t', String(node.pid), '-n', 'ip', ...command.split(' ')]);
  };
  inNode('addr add 192.0.2.7/24 dev eth0');
  inNode('link set eth0 up');
  return node;
}

/** Waits for as many datagrams as it is told, each time, and tells what they were. */
function runNode(): void {
  const socket = dgram.createSocket('udp4');
  let wanted = 0;
  let arrived: Arrived[] = [];
  socket.bind(6081, '0.0.0.0', () => process.send!({ arrived }));
  socket.on('message', (payload, { address, port }) => {
    arrived.push(judge(payload, address, port));
    if (arrived.length < wanted) return;
    process.send!({ arrived });
    arrived = [];
  });
  process.on('message', (count: number) => {
    wanted = count;
    process.send!({ arrived });
  });
  process.on('disconnect', () => socket.close());
}

function judge(payload: Buffer, address: string, port: number): Arrived {
  try {
    const { inner, src, vip } = untunnel(tunnelled({ src: address, dst: '192.0.2.7', sport: port }, payload));
    const problems = verifyChecksums(inner);
    if (src !== '192.0.2.1' || !vip?.startsWith('10.96.0.10:')) problems.push(`from ${src} for ${vip}`);
    return { inner: Buffer.from(inner).toString('hex'), problem: problems.join(', ') };
  } catch (error) {
    return { inner: '', problem: String(error) };
  }
}

function ip(command: string): void {
  execFileSync('ip', command.split(' '), { stdio: ['ignore', 'ignore', 'inherit'] });
}
