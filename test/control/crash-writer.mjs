/*
 * Keeps a state file's tables busy until it is killed: crash-writer.mjs PATH SEED. It says `ready` when STEADY connections
 * are established and everything else of the tables comes and goes: handshakes, FINs, RSTs, datagrams, expiry, eviction,
 * collection.
 *
 * Plain JavaScript on the built weir, since it is started by the hundred.
 */
import { seededRandom } from '../../dist/base/random.js';
import { openAny, trackAny } from '../../dist/conntrack/any-tracker.js';
import { CAUSE_REPLACED } from '../../dist/conntrack/events.js';
import { FlowTable } from '../../dist/conntrack/flow-table.js';
import { GarbageCollector } from '../../dist/conntrack/gc.js';
import { TYPE_OUT } from '../../dist/conntrack/record.js';
import { account, isReusable, openTcp, trackTcp } from '../../dist/conntrack/tcp-tracker.js';
import { openStateFile } from '../../dist/control/state-file.js';
import { bootClock } from '../../dist/io/boot-clock.js';

const [path, seed] = process.argv.slice(2);
const STEADY = 50;
const SIZES = { tcpEntries: 300, anyEntries: 150 };
const TIMEOUTS = Float64Array.of(60_000, 5, 2, 5, 60_000, 5, 5);
const [FIN, SYN, RST, ACK] = [1, 2, 4, 16];
const [CLIENT, VIP, BACKEND] = [0x0a010002, 0x0a60000a, 0x0a02000b];

const clock = bootClock();
const log = { info() {}, warn() {}, error() {} };
const { tables } = openStateFile(path, SIZES, clock.nowMs(), log);
const [tcp, any] = [new FlowTable(tables.tcp), new FlowTable(tables.any)];
const random = seededRandom(Number(seed));
const collector = new GarbageCollector([tcp, any], clock.nowMs(), 1);
let nowMs = clock.nowMs();

function find(table, protocol, flow) {
  const ports = (flow << 16) | 80;
  return table.find(CLIENT, VIP, ports, protocol, table.hash(CLIENT, VIP, ports, protocol)) >> 1;
}

function insert(table, protocol, flow) {
  const [ports, reply] = [(flow << 16) | 80, (8080 << 16) | flow];
  return table.insert(protocol, TYPE_OUT, CLIENT, VIP, ports, BACKEND, CLIENT, reply, 1, 1, nowMs);
}

/** Sequence numbers are a function of the flow; the client sends one byte at a time and never more. */
function segment(record, flow, isReply, flags, payload = 0) {
  const [own, peer] = isReply ? [7000, flow * 10] : [flow * 10, 7000];
  const seq = own + ((flags & SYN) !== 0 ? 0 : 1);
  trackTcp(tcp, record, isReply, flags, seq, peer + 1, 60_000, payload, -1, nowMs, TIMEOUTS);
  account(tcp, record, isReply, 40 + payload, nowMs);
}

function open(flow) {
  const record = insert(tcp, 6, flow);
  if (record >= 0) openTcp(tcp, record, SYN, flow * 10, 0, 60_000, 0, -1, nowMs, TIMEOUTS);
  return record;
}

function churn() {
  const flow = 1000 + (random() % 400);
  if (random() % 3 === 0) {
    const record = find(any, 17, flow);
    if (record >= 0) trackAny(any, record, random() % 2 === 0, nowMs, TIMEOUTS);
    else {
      const made = insert(any, 17, flow);
      if (made >= 0) openAny(any, made, nowMs, TIMEOUTS);
    }
    return;
  }
  let record = find(tcp, 6, flow);
  if (record >= 0 && isReusable(tcp, record, nowMs)) {
    tcp.remove(record, CAUSE_REPLACED, nowMs);
    record = -1;
  }
  if (record < 0) record = open(flow);
  if (record < 0) return;
  const fate = random() % 6;
  if (fate > 0) segment(record, flow, true, SYN | ACK);
  if (fate > 1) segment(record, flow, false, ACK, 1);
  if (fate > 2) segment(record, flow, true, ACK | FIN);
  if (fate > 3) segment(record, flow, false, ACK | FIN);
  if (fate > 4) segment(record, flow, false, RST);
}

for (let flow = 0; flow < STEADY; flow++) {
  const record = find(tcp, 6, flow) >= 0 ? find(tcp, 6, flow) : open(flow);
  segment(record, flow, true, SYN | ACK);
  segment(record, flow, false, ACK);
}
let isReady = false;
const parent = process.ppid;
for (let round = 0; process.ppid === parent; round++) {
  nowMs = clock.nowMs();
  for (let i = 0; i < 50; i++) churn();
  for (let flow = 0; flow < STEADY; flow++) segment(find(tcp, 6, flow), flow, round % 2 === 0, ACK, 1);
  collector.slice(nowMs, 64);
  if (round < 200 || isReady) continue;
  isReady = true;
  process.stdout.write('ready\n');
}
