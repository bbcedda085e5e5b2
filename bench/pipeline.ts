import { bench, run, summary } from 'mitata';
import { maglevTable } from '../lib/balance/maglev.js';
import { BATCH_PACKETS } from '../lib/base/limits.js';
import { seededRandom } from '../lib/base/random.js';
import { parseConfig } from '../lib/config/load.js';
import { FlowTable } from '../lib/conntrack/flow-table.js';
import { allocateTable } from '../lib/conntrack/memory.js';
import { RECORD_WORDS } from '../lib/conntrack/record.js';
import { compile } from '../lib/control/compile.js';
import { Identities } from '../lib/control/identity.js';
import { Gateway } from '../lib/datapath/gateway.js';
import { allocateStats } from '../lib/datapath/stats.js';
import { Tap } from '../lib/datapath/tap.js';
import { heapMemory, PacketBatch, type PacketOutput, packetOffset } from '../lib/io/device.js';
import { adjustFull, difference32, fold, sum } from '../lib/wire/checksum.js';
import * as ipv4 from '../lib/wire/ipv4.js';
import * as tcp from '../lib/wire/tcp.js';

/**
 * The pipeline in memory: `npm run bench`. Packets of established flows in random order, 64 a batch, rewritten as in live use but for
 * the system calls. The floor to compare with reads the same headers and touches the same records, and does nothing else.
 */

const CONFIG = `
services:
  - name: web
    address: 10.96.0.10
    port: 80
    protocol: tcp
    backends: [${Array.from({ length: 10 }, (_, i) => `{ address: 10.2.0.${i + 11}, port: 8080 }`).join(', ')}]
`;

const PACKET_BYTES = 40;
const VIP = 0x0a60000a;

class NullOutput implements PacketOutput {
  readonly memory = heapMemory(BATCH_PACKETS, 256);
  readonly features = { engine: 'memory', vnetHeader: false, udpSegmentation: false };
  transmit(): void {}
  release(): void {}
  take(): number {
    return -1;
  }
}

/** A pipeline with `flows` established connections, and a batch that can be filled with packets of any of them. */
function established(flows: number) {
  const output = new NullOutput();
  const tap = new Tap(output);
  const tcpTable = new FlowTable(allocateTable(Math.max(1024, flows)));
  const { config } = parseConfig(CONFIG);
  const gateway = new Gateway({
    tcp: tcpTable,
    any: new FlowTable(allocateTable(1024)),
    output: tap,
    random: seededRandom(1),
    stats: allocateStats(),
  });
  const { snapshot } = compile(config!, new Identities(), { isUp: () => true, nowMs: 0 });
  gateway.use(snapshot);

  // One template packet per flow: client 11.x.y.z, ports spread.
  const templates = new Uint8Array(flows * PACKET_BYTES);
  const view = new DataView(templates.buffer);
  for (let flow = 0; flow < flows; flow++) {
    const at = flow * PACKET_BYTES;
    ipv4.writeHeader(view, templates, at, PACKET_BYTES, ipv4.PROTO_TCP, 0x0b000000 + (flow >>> 2), VIP);
    const l4 = at + 20;
    view.setInt32(l4, ((1024 + ((flow & 3) << 10) + (flow % 1021)) << 16) | 80);
    view.setInt32(l4 + 4, 1);
    view.setUint16(l4 + 12, (5 << 12) | tcp.SYN);
    view.setUint16(l4 + 14, 65535);
  }

  const batch = new PacketBatch(BATCH_PACKETS);
  batch.count = BATCH_PACKETS;
  const { bytes } = output.memory;
  for (let i = 0; i < BATCH_PACKETS; i++) {
    batch.slot[i] = i;
    batch.offset[i] = packetOffset(output.memory, i);
    batch.length[i] = PACKET_BYTES;
  }
  const load = (row: number, flow: number): void => {
    const from = flow * PACKET_BYTES;
    const to = batch.offset[row]!;
    for (let k = 0; k < PACKET_BYTES; k++) bytes[to + k] = templates[from + k]!;
  };

  const records = new Int32Array(flows);
  for (let flow = 0; flow < flows; flow += BATCH_PACKETS) {
    batch.count = Math.min(BATCH_PACKETS, flows - flow);
    for (let row = 0; row < batch.count; row++) load(row, flow + row);
    gateway.process(batch, 1);
  }
  batch.count = BATCH_PACKETS;
  // The client's ACK comes next; records stay SYN_SENT without a reply, which costs the tracker no less.
  for (let flow = 0; flow < flows; flow++) {
    const at = flow * PACKET_BYTES;
    templates[at + 33] = tcp.ACK;
    view.setInt32(at + 24, 2);
    const s = ipv4.source(view, at);
    const ports = tcp.ports(view, at + 20);
    records[flow] = tcpTable.find(s, VIP, ports, 6, tcpTable.hash(s, VIP, ports, 6)) >> 1;
  }

  const order = new Int32Array(1 << 20);
  const random = seededRandom(2);
  for (let i = 0; i < order.length; i++) order[i] = random() % flows;
  let cursor = 0;
  const next = (): void => {
    for (let row = 0; row < BATCH_PACKETS; row++) load(row, order[cursor++ & (order.length - 1)]!);
  };
  let sink = 0;
  return {
    pipeline(): void {
      next();
      gateway.process(batch, 2);
    },
    floor(): number {
      const start = cursor;
      next();
      for (let row = 0; row < BATCH_PACKETS; row++) {
        const at = batch.offset[row]!;
        const { view } = output.memory;
        sink += ipv4.source(view, at) ^ ipv4.destination(view, at) ^ tcp.ports(view, at + 20);
        const word = records[order[(start + row) & (order.length - 1)]!]! * RECORD_WORDS;
        sink += tcpTable.words[word]! + tcpTable.words[word + 28]!;
      }
      return sink;
    },
  };
}

for (const [name, flows] of [
  ['1k', 1_000],
  ['100k', 100_000],
  ['1M', 1_000_000],
] as const) {
  const { pipeline, floor } = established(flows);
  summary(() => {
    bench(`floor, ${name} flows, 64 packets`, floor).baseline();
    bench(`pipeline, ${name} flows, 64 packets`, pipeline);
  });
}

const header = new Uint8Array(64).map((_, i) => i * 7);
bench('checksum of 20 bytes, whole', () => fold(sum(header, 0, 20)));
bench('checksum by difference', () => adjustFull(header, 10, difference32(0x0a000001, 0x0a000002)));

for (const [backends, size] of [
  [10, 16381],
  [100, 16381],
  [1000, 131071],
] as const) {
  const list = Array.from({ length: backends }, (_, i) => ({ address: 0x0a020000 + i, port: 80, weight: 1 }));
  bench(`maglev, ${backends} backends, table of ${size}`, () => maglevTable(list, 6, size, { k0: 1, k1: 2 }));
}

await run(process.argv.includes('--json') ? { format: 'json' } : {});
