import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { Worker } from 'node:worker_threads';
import t from 'tap';
import { seededRandom } from '../../lib/base/random.js';
import { MAX_ENTRIES } from '../../lib/config/schema.js';
import { openAny, trackAny } from '../../lib/conntrack/any-tracker.js';
import { CAUSE_FLUSHED } from '../../lib/conntrack/events.js';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import {
  allocateTable,
  CAPACITY,
  checkTable,
  EVICTED_CLOSING,
  EVICTED_EXPIRED,
  EVICTED_HALF_OPEN,
  formatTable,
  headerWords,
  INSERT_FAILURES,
  indexGeometry,
  LAYOUT,
  MAGIC,
  MAX_CAPACITY,
  tableBytes,
} from '../../lib/conntrack/memory.js';
import {
  BACKEND_ID,
  CLASS_CLOSING,
  CLASS_ESTABLISHED,
  CLASS_HALF_OPEN,
  CLASS_MASK,
  COMMIT,
  CREATED,
  EXPIRES,
  MARKS,
  RECORD_BYTES,
  RECORD_DOUBLES,
  RECORD_WORDS,
  REPLIED,
  SERVICE,
  STATE,
  TX_BYTES,
  TX_PACKETS,
  TYPE_OUT,
  TYPE_SVC,
  UNREPLIED,
} from '../../lib/conntrack/record.js';
import { TableReader } from '../../lib/conntrack/table-reader.js';
import { account, openTcp, trackTcp } from '../../lib/conntrack/tcp-tracker.js';
import { ACK, SYN } from '../../lib/wire/tcp.js';
import { findFlow, insertFlow, makeTable, SECRET, TIMEOUTS } from './connection.js';

const HOUR = 3_600_000;

/** Flow `n`, live for `ttlMs`. */
function live(table: FlowTable, n: number, nowMs: number, ttlMs: number, list = CLASS_HALF_OPEN): number {
  const record = insertFlow(table, n, 6, nowMs);
  if (record < 0) return record;
  table.setExpiry(record, nowMs + ttlMs);
  table.setClass(record, list, nowMs);
  return record;
}

function collectGarbage(): void {
  setFlagsFromString('--expose-gc');
  (runInNewContext('gc') as () => void)();
}

t.test('memory: at most 160 bytes a connection, all told', async (t) => {
  for (const capacity of [
    100,
    1000,
    1023,
    1024,
    1025,
    4097,
    65_537,
    100_000,
    262_144,
    262_145,
    524_288,
    524_289,
    1_000_000,
    1_048_577,
    8_000_000,
    MAX_CAPACITY,
  ]) {
    const bytes = tableBytes(capacity);
    t.ok(bytes <= 160 * capacity, `${capacity} records: ${(bytes / capacity).toFixed(2)} bytes each`);
    const { slots, factor, shift } = indexGeometry(capacity);
    t.ok(slots >= capacity * 4, `${capacity}: the index is at most half full`);
    t.equal(Math.imul(0x0fffffff, factor) >>> shift, slots - 1, `${capacity}: the last home is the last slot`);
  }
  for (let capacity = 1; capacity < 3000; capacity++) {
    const { slots, factor, shift } = indexGeometry(capacity);
    if (slots < capacity * 4 || slots > capacity * 5 || Math.imul(0x0fffffff, factor) >>> shift !== slots - 1)
      t.fail(`${capacity}`);
  }
});

t.test('memory: reserved, not committed', async (t) => {
  collectGarbage();
  const before = process.memoryUsage().rss;
  const memory = allocateTable(1_000_000);
  const table = new FlowTable(memory);
  t.ok(process.memoryUsage().rss - before < 8e6, 'an empty table of 146 MB');
  for (let n = 0; n < 1000; n++) live(table, n, 0, HOUR);
  const used = process.memoryUsage().rss - before;
  t.ok(used < 24e6, `1000 connections in it: ${(used / 1e6).toFixed(1)} MB`);
  t.equal(memory.byteOffset % 64, 0);
});

t.test('memory: refused when it is not a table of this build', async (t) => {
  t.equal(MAX_ENTRIES, MAX_CAPACITY, 'the most that a configuration may ask for');
  for (const capacity of [0, -1, 1.5, MAX_CAPACITY + 1, Number.NaN])
    t.throws(() => allocateTable(capacity), RangeError);
  for (const [word, pattern] of [
    [MAGIC, /no conntrack table/],
    [LAYOUT, /another version/],
    [CAPACITY, /holds 11 records, not 10/],
  ] as const) {
    const memory = allocateTable(10);
    headerWords(memory)[word]! += 1;
    t.throws(() => checkTable(memory), { code: 'STATE_FILE', message: pattern });
    t.throws(() => new FlowTable(memory), { code: 'STATE_FILE' });
    t.throws(() => new TableReader(memory), { code: 'STATE_FILE' });
  }
  const secrets = [allocateTable(1), allocateTable(1)].map((memory) => new FlowTable(memory).hash(1, 2, 3, 4));
  t.not(secrets[0], secrets[1], 'every table has a secret of its own');
});

t.test('any bytes will do: an ArrayBuffer, at an offset', async (t) => {
  const memory = { buffer: new ArrayBuffer(tableBytes(50) + 128), byteOffset: 128, capacity: 50 };
  formatTable(memory, SECRET);
  const table = new FlowTable(memory);
  for (let n = 0; n < 50; n++) t.equal(live(table, n, 0, HOUR, CLASS_ESTABLISHED), n);
  t.equal(live(table, 99, 0, HOUR), -1);
  t.same(new Uint8Array(memory.buffer, 0, 128), new Uint8Array(128), 'nothing is written before it');
  const attached = new FlowTable(memory);
  t.equal(findFlow(attached, 17, 6), 17 << 1, 'and may be attached to again');
  t.equal(attached.count, 50);
});

t.test('a record is found under both keys, and gone under both', async (t) => {
  const table = makeTable(8);
  const nowMs = 2 ** 33 + 500;
  const record = table.insert(17, TYPE_OUT, -5, 6, 0xffff0035 | 0, 9, -10, (53 << 16) | 4, 21, 22, nowMs);
  const original = (ports: number, protocol: number): number =>
    table.find(-5, 6, ports, protocol, table.hash(-5, 6, ports, protocol));
  t.equal(original(0xffff0035 | 0, 17), record << 1);
  t.equal(original(0xffff0035 | 0, 6), -1, 'the protocol is part of the key');
  t.equal(original(0xffff0036 | 0, 17), -1);
  t.equal(table.find(9, -10, (53 << 16) | 4, 17, table.hash(9, -10, (53 << 16) | 4, 17)), (record << 1) | 1);
  t.equal(
    table.find(-5 >>> 0, 6, 0xffff0035, 17, table.hash(-5, 6, 0xffff0035, 17) >>> 0),
    record << 1,
    'unsigned words are the same',
  );
  t.equal(table.words[record * RECORD_WORDS + SERVICE], 21);
  t.equal(table.words[record * RECORD_WORDS + BACKEND_ID], 22);
  t.equal(table.words[record * RECORD_WORDS + CREATED], Math.floor(nowMs / 1000));
  t.equal(table.touch(table.hash(-5, 6, 0xffff0035 | 0, 17)), record);
  t.type(table.touchRecord(record), 'number');
  t.equal(table.read(record), record);
  const generation = table.generation(record);
  t.ok(generation !== 0);

  table.words.fill(77, record * RECORD_WORDS + 16, (record + 1) * RECORD_WORDS);
  table.remove(record, CAUSE_FLUSHED, 0);
  t.equal(original(0xffff0035 | 0, 17), -1);
  t.equal(table.find(9, -10, (53 << 16) | 4, 17, table.hash(9, -10, (53 << 16) | 4, 17)), -1);
  t.equal(table.touch(table.hash(-5, 6, 0xffff0035 | 0, 17)), -1);
  t.equal(table.count, 0);
  t.equal(table.read(record), -1);
  t.equal(table.generation(record), 0);

  t.equal(live(table, 1, nowMs, HOUR), record, 'the last one freed is used first: it is in cache');
  t.ok(table.generation(record) > generation, 'under a new generation');
  t.equal(table.doubles[record * RECORD_DOUBLES + TX_PACKETS], 0, 'counters begin anew');
  t.equal(table.words[record * RECORD_WORDS + 31], 0);

  const oneWay = insertFlow(table, 2, 6, nowMs, TYPE_SVC);
  t.equal(findFlow(table, 2, 6), oneWay << 1);
  t.equal(insertFlow(table, 2 + (1 << 16), 6, nowMs, TYPE_SVC) > 0, true);
  table.remove(oneWay, CAUSE_FLUSHED, 0);
  t.equal(findFlow(table, 2, 6), -1);
});

t.test('more keys in one home than a probe may go are refused, without harm', async (t) => {
  class OneHome extends FlowTable {
    override hash(): number {
      return -1; // the very last home: its probes run into the tail
    }
  }
  const table = new OneHome(allocateTable(1000, SECRET));
  let placed = 0;
  while (live(table, placed, 0, HOUR, CLASS_ESTABLISHED) >= 0) placed++;
  t.equal(placed, 127, '254 keys');
  t.equal(table.figures[INSERT_FAILURES], 1);
  t.equal(table.count, placed);
  for (let n = 0; n < placed; n++) t.equal(findFlow(table, n, 6) >> 1, n);
  t.equal(findFlow(table, placed, 6), -1, 'the refused one left no key behind');
  table.remove(60, CAUSE_FLUSHED, 0);
  t.ok(live(table, 500, 0, HOUR) >= 0);
  t.equal(table.count, placed);
});

t.test('a full table evicts the expired, then closing, then half-open ones, never the established', async (t) => {
  const table = makeTable(10);
  const nowMs = 50_000;
  for (let n = 0; n < 4; n++) live(table, n, nowMs, HOUR, CLASS_ESTABLISHED);
  live(table, 4, nowMs, HOUR, CLASS_HALF_OPEN);
  live(table, 5, nowMs, HOUR, CLASS_HALF_OPEN);
  live(table, 6, nowMs, HOUR, CLASS_CLOSING);
  live(table, 7, nowMs, HOUR, CLASS_CLOSING);
  live(table, 8, nowMs, 1000, CLASS_ESTABLISHED);
  live(table, 9, nowMs, 1000, CLASS_HALF_OPEN);
  const later = nowMs + 1000;
  for (let n = 10; n < 16; n++) t.ok(live(table, n, later, HOUR, CLASS_ESTABLISHED) >= 0, `flow ${n} finds room`);
  const gone = Array.from({ length: 10 }, (_, n) => n).filter((n) => findFlow(table, n, 6) < 0);
  t.same(gone, [4, 5, 6, 7, 8, 9]);
  t.equal(live(table, 16, later, HOUR), -1, 'the established are left, and stay');
  t.same(
    [EVICTED_EXPIRED, EVICTED_CLOSING, EVICTED_HALF_OPEN, INSERT_FAILURES].map((row) => table.figures[row]),
    [2, 2, 2, 1],
  );

  const order = makeTable(4);
  const evicted: number[] = [];
  live(order, 0, 0, HOUR, CLASS_HALF_OPEN);
  live(order, 1, 0, HOUR, CLASS_CLOSING);
  live(order, 2, 0, 10, CLASS_ESTABLISHED);
  live(order, 3, 0, HOUR, CLASS_HALF_OPEN);
  for (let n = 10; n < 14; n++) {
    live(order, n, 20, HOUR, CLASS_ESTABLISHED);
    for (let old = 0; old < 4; old++) if (findFlow(order, old, 6) < 0 && !evicted.includes(old)) evicted.push(old);
  }
  t.same(evicted, [2, 1, 0, 3], 'in this order, and the oldest of a class first');
});

t.test('a one-way flow in use is spared while others are not', async (t) => {
  const table = makeTable(100);
  const busy = live(table, 0, 0, HOUR);
  for (let n = 1; n < 100; n++) live(table, n, 0, HOUR);
  for (let n = 100; n < 2000; n++) {
    account(table, busy, false, 100, n * 1000);
    if (live(table, n, n * 1000, HOUR) < 0) t.fail(`flow ${n} finds no room`);
  }
  t.equal(findFlow(table, 0, 6), busy << 1);
});

t.test('a SYN flood of ten times the table never evicts an established flow', async (t) => {
  const capacity = 20_000;
  const table = makeTable(capacity);
  const nowMs = 1e9;
  const established = capacity - 500;
  for (let n = 0; n < established; n++) {
    const record = insertFlow(table, n, 6, nowMs);
    openTcp(table, record, SYN, n, 0, 65535, 0, 7, nowMs, TIMEOUTS);
    trackTcp(table, record, true, SYN | ACK, 5 * n, n + 1, 65535, 0, 7, nowMs, TIMEOUTS);
    trackTcp(table, record, false, ACK, n + 1, 5 * n + 1, 65535, 0, -1, nowMs, TIMEOUTS);
  }
  const flood = (from: number, to: number, atMs: number): number => {
    const startedMs = performance.now();
    for (let n = from; n < to; n++) {
      const record = insertFlow(table, n, 6, atMs);
      openTcp(table, record, SYN, n, 0, 65535, 0, 7, atMs, TIMEOUTS);
    }
    return ((performance.now() - startedMs) * 1000) / (to - from);
  };
  const us = flood(established, established + 10 * capacity, nowMs + 1000);
  const usLater = flood(1e6, 1e6 + 10 * capacity, nowMs + 120_000);
  t.ok(us < 25 && usLater < 25, `${us.toFixed(2)} and ${usLater.toFixed(2)} us each`);
  let kept = 0;
  for (let n = 0; n < established; n++) if (findFlow(table, n, 6) >= 0) kept++;
  t.equal(kept, established);
  t.equal(table.count, capacity);
  t.equal(table.figures[INSERT_FAILURES], 0);
});

t.test('a table full of live flows refuses at once, and finds the one that expires', async (t) => {
  const capacity = 100_000;
  const table = makeTable(capacity);
  for (let n = 0; n < capacity; n++) live(table, n, 0, HOUR + n, CLASS_ESTABLISHED);
  const refuse = (count: number, nowMs: number): number => {
    const startedMs = performance.now();
    for (let i = 0; i < count; i++) if (live(table, capacity + i, nowMs, HOUR) >= 0) t.fail('there is no room');
    return ((performance.now() - startedMs) * 1000) / count;
  };
  const us = refuse(20_000, HOUR - 1);
  t.ok(us < 10, `${us.toFixed(2)} us each`);
  t.ok(live(table, capacity, HOUR, 100 * HOUR, CLASS_ESTABLISHED) >= 0, 'the first one expires');
  t.equal(findFlow(table, 0, 6), -1);

  // Refreshed flows: their old expiries are stale, so a sweep must go round once, in bounded steps.
  for (let n = 1; n < capacity; n++) table.setExpiry(findFlow(table, n, 6) >> 1, 10 * HOUR);
  const usSweeping = refuse(2000, 2 * HOUR - 1);
  t.ok(usSweeping < 50, `${usSweeping.toFixed(2)} us each while sweeping`);
  const victim = findFlow(table, 70_000, 6) >> 1;
  table.setExpiry(victim, 3 * HOUR);
  let tries = 0;
  while (live(table, 200_000, 3 * HOUR, HOUR) < 0) tries++;
  t.ok(tries <= capacity / 128 + 1, `found in ${tries} inserts`);
  t.equal(findFlow(table, 70_000, 6), -1);
});

t.test('UDP: one-way until a reply, each packet sets the timer', async (t) => {
  const table = makeTable(8);
  const state = (record: number): number => table.bytes[record * RECORD_BYTES + STATE]!;
  const list = (record: number): number => table.bytes[record * RECORD_BYTES + MARKS]! & CLASS_MASK;
  const expires = (record: number): number => table.doubles[record * RECORD_DOUBLES + EXPIRES]!;
  const timeouts = TIMEOUTS.slice();
  timeouts[5] = 33_000;
  const record = insertFlow(table, 1, 17, 0);
  openAny(table, record, 0, timeouts);
  t.equal(state(record), UNREPLIED);
  for (let i = 1; i < 10; i++) trackAny(table, record, false, i * 1000, timeouts);
  t.equal(state(record), UNREPLIED);
  t.equal(list(record), CLASS_HALF_OPEN);
  t.notOk(table.isExpired(record, 9000 + 59_000), 'any - 1 s');
  t.ok(table.isExpired(record, 9000 + 61_000), 'any + 1 s');
  trackAny(table, record, true, 20_000, timeouts);
  t.equal(state(record), REPLIED);
  t.equal(list(record), CLASS_ESTABLISHED);
  t.equal(expires(record), 80_000);
  trackAny(table, record, false, 30_000, timeouts);
  t.equal(state(record), REPLIED);
  t.equal(expires(record), 90_000);

  const oneWay = insertFlow(table, 2, 17, 0, TYPE_SVC);
  openAny(table, oneWay, 0, timeouts);
  account(table, oneWay, false, 100, 0);
  t.notOk(table.isExpired(oneWay, 32_000), 'serviceAny - 1 s');
  t.ok(table.isExpired(oneWay, 34_000), 'serviceAny + 1 s');
  trackAny(table, oneWay, false, 1000, timeouts);
  account(table, oneWay, false, 100, 1000);
  t.equal(list(oneWay), CLASS_HALF_OPEN);
  trackAny(table, oneWay, false, 2000, timeouts);
  t.equal(list(oneWay), CLASS_ESTABLISHED, 'the third packet');
  t.equal(state(oneWay), UNREPLIED);
  t.equal(expires(oneWay), 35_000);
});

t.test('lookups, packets and churn leave nothing on the heap', async (t) => {
  const table = makeTable(5000);
  for (let n = 0; n < 4000; n++) live(table, n, 0, HOUR, CLASS_ESTABLISHED);
  const churn = (rounds: number): void => {
    for (let i = 0; i < rounds; i++) {
      const reference = findFlow(table, i % 4000, 6);
      trackTcp(table, reference >> 1, false, ACK, i, i, 500, 100, -1, i, TIMEOUTS);
      account(table, reference >> 1, false, 140, i);
      const record = insertFlow(table, 10_000 + i, 6, i);
      openTcp(table, record, SYN, i, 0, 500, 0, 7, i, TIMEOUTS);
      if (i % 3 === 0) table.remove(record, CAUSE_FLUSHED, i);
    }
  };
  churn(50_000);
  collectGarbage();
  const before = process.memoryUsage().heapUsed;
  churn(1_000_000);
  collectGarbage();
  const grown = process.memoryUsage().heapUsed - before;
  t.ok(grown < 300_000, `${grown} bytes after a million rounds`);
});

t.test('a reader sees what is live, as one connection each', async (t) => {
  const memory = allocateTable(100, SECRET);
  const table = new FlowTable(memory);
  const reader = new TableReader(memory);
  t.equal(reader.read(0), -1);
  for (let n = 0; n < 50; n++) account(table, live(table, n, 0, n < 10 ? 1000 : HOUR), false, 1e10 + n, 0);
  table.remove(20, CAUSE_FLUSHED, 0);
  let live500 = 0;
  reader.forEachLive(500, () => {
    live500++;
  });
  t.equal(live500, 49);
  const seen: number[] = [];
  reader.forEachLive(1000, (record) => {
    seen.push(record);
    if (reader.doubles[TX_BYTES] !== 1e10 + record || reader.words[SERVICE] !== 1) t.fail(`record ${record}`);
  });
  t.equal(seen.length, 39);
  t.equal(reader.read(20), -1);
  t.equal(reader.read(99), -1, 'never used');
  t.equal(reader.read(30), 0);
  t.equal(reader.words[COMMIT], table.generation(30));
  t.match(reader.figures(), {
    capacity: 100,
    count: 49,
    inserted: 50,
    insertFailures: 0,
    evictedExpired: 0,
    collected: 0,
  });
});

t.test('a reader on another thread never gets half a record', async (t) => {
  // The writer keeps client address and service id of each record equal; a torn copy would differ.
  const memory = allocateTable(64, SECRET);
  const table = new FlowTable(memory);
  const source = `
    const { workerData: { memory, modules, loader }, parentPort } = require('node:worker_threads');
    (async () => {
      (await import(loader)).register();
      const { TableReader } = await import(modules);
      const reader = new TableReader(memory);
      parentPort.postMessage('ready');
      let whole = 0, torn = 0;
      const until = Date.now() + 400;
      while (Date.now() < until) {
        for (let r = 0; r < 64; r++) {
          if (reader.read(r) < 0) continue;
          if (reader.words[0] === reader.words[10] && reader.words[2] === reader.words[0]) whole++;
          else torn++;
        }
      }
      parentPort.postMessage({ whole, torn });
    })();`;
  const modules = new URL('../../lib/conntrack/table-reader.ts', import.meta.url).href;
  const loader = import.meta.resolve('tsx/esm/api');
  const worker = new Worker(source, { eval: true, workerData: { memory, modules, loader } });
  let result: { whole: number; torn: number } | undefined;
  let isReady = false;
  worker.on('message', (message) => {
    if (message === 'ready') isReady = true;
    else result = message;
  });
  const random = seededRandom(5);
  const deadline = Date.now() + 20_000;
  for (let n = 1; result === undefined && Date.now() < deadline; ) {
    if (isReady) {
      for (let i = 0; i < 5000; i++, n++) {
        const record = table.insert(6, TYPE_SVC, n, 7, n, 0, 0, 0, n, 1, 0);
        table.setExpiry(record, HOUR);
        if (random() % 2 === 0) table.remove(record, CAUSE_FLUSHED, 0);
      }
    }
    await new Promise((resolve) => setImmediate(resolve));
  }
  await worker.terminate();
  t.equal(result?.torn, 0);
  t.ok(result !== undefined && result.whole > 0, `${result?.whole} copies`);
});
