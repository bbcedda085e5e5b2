import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { Worker } from 'node:worker_threads';
import fc from 'fast-check';
import t from 'tap';
import {
  allocateEvents,
  CAUSE_CUT,
  CAUSE_EVICTED,
  CAUSE_EXPIRED,
  CAUSE_FLUSHED,
  CAUSE_REPLACED,
  EVENT_CLOSED,
  EVENT_STATE,
  EventReader,
  EventWriter,
} from '../../lib/conntrack/events.js';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import { allocateTable } from '../../lib/conntrack/memory.js';
import {
  BACKEND_ID,
  CLASS_CLOSING,
  CLASS_ESTABLISHED,
  ORIGINAL_PORTS,
  RECORD_WORDS,
  TX_BYTES,
} from '../../lib/conntrack/record.js';
import { account } from '../../lib/conntrack/tcp-tracker.js';
import { insertFlow, SECRET } from './connection.js';

// Where the counters of a ring are.
const WATCHERS = 0;
const BEGUN = 1;
const DONE = 2;

/** A ring whose n-th event has the word n in every place, and a reader that says when it gets something else. */
class Ring {
  readonly writer: EventWriter;
  readonly reader: EventReader;
  written = 0;
  read = 0;
  lost = 0;
  readonly #record = new Int32Array(RECORD_WORDS);
  readonly #first: number;
  #last: number;

  /** @param first the number of the first event */
  constructor(entries: number, first: number) {
    const memory = allocateEvents(entries);
    new Int32Array(memory).fill(first, BEGUN, DONE + 1);
    this.writer = new EventWriter(memory);
    this.reader = new EventReader(memory);
    this.#first = first;
    this.#last = first - 1;
  }

  write(count: number): void {
    for (let i = 0; i < count; i++) this.#write(this.#record);
  }

  /** Writes one event, with `during` done when it is half written. */
  writeInterrupted(during: () => void): void {
    const words = new Proxy(this.#record, {
      get: (record, key) => {
        if (key === String(RECORD_WORDS / 2)) during();
        return record[Number(key)];
      },
    });
    this.#write(words);
  }

  #write(words: Int32Array): void {
    const number = (this.#first + this.written++) | 0;
    this.#record.fill(number);
    this.writer.write(EVENT_STATE, number & 7, words, 0, number);
  }

  /** Returns false when there was nothing to read. */
  take(): boolean {
    const { reader } = this;
    const lost = reader.read();
    if (lost < 0) return false;
    const expected = (this.#last + lost + 1) | 0;
    const words = reader.words.subarray(0, RECORD_WORDS);
    if (words.some((word) => word !== expected)) throw new Error(`event ${expected} has ${words}`);
    if (reader.kind !== EVENT_STATE || reader.detail !== (expected & 7) || reader.atMs !== expected) {
      throw new Error(`event ${expected}: ${reader.kind} ${reader.detail} ${reader.atMs}`);
    }
    this.#last = expected;
    this.lost += lost;
    this.read++;
    return true;
  }
}

/** Runs `run` with `during` done when the reader comes to look at BEGUN: what another thread does at that moment. */
function interruptReading(during: () => void, run: () => void): void {
  const { load } = Atomics;
  const restore = (): void => void Object.assign(Atomics, { load });
  const patched = (array: Int32Array, index: number): number => {
    if (index === BEGUN) {
      restore();
      during();
    }
    return load(array, index);
  };
  Object.assign(Atomics, { load: patched });
  try {
    run();
  } finally {
    restore();
  }
}

t.test('whatever the order: events come as they were written, each once, and read + lost = written', async (t) => {
  const count = fc.integer({ min: 0, max: 40 });
  const step = fc.oneof(
    fc.record({ what: fc.constant('write' as const), count }),
    fc.record({ what: fc.constant('read' as const), count }),
    fc.record({ what: fc.constant('write in the middle of a read' as const), count }),
    fc.record({ what: fc.constant('read in the middle of a write' as const), count }),
  );
  const first = fc.constantFrom(0, 1, 2 ** 31 - 20, -20);
  let mostLost = 0;
  fc.assert(
    fc.property(fc.array(step, { maxLength: 60 }), fc.constantFrom(2, 4, 16), first, (steps, entries, first) => {
      const ring = new Ring(entries, first);
      const read = (times: number): void => {
        for (let i = 0; i < times && ring.take(); i++);
      };
      for (const { what, count } of steps) {
        if (what === 'write') ring.write(count);
        else if (what === 'read') read(count);
        else if (what === 'write in the middle of a read') {
          interruptReading(
            () => ring.write(count),
            () => read(1),
          );
        } else ring.writeInterrupted(() => read(count));
      }
      while (ring.take());
      if (ring.read + ring.lost !== ring.written) {
        throw new Error(`${ring.read} read, ${ring.lost} lost, ${ring.written} written`);
      }
      mostLost = Math.max(mostLost, ring.lost);
    }),
    { numRuns: 3000 },
  );
  t.ok(mostLost > 100, `up to ${mostLost} events were lost`);
});

t.test('a reader that keeps up loses nothing; one that does not loses the oldest', async (t) => {
  const ring = new Ring(16, 0);
  for (let round = 0; round < 100; round++) {
    ring.write(16);
    while (ring.take());
  }
  t.strictSame([ring.read, ring.lost], [1600, 0]);
  ring.write(17);
  ring.take();
  t.equal(ring.lost, 3, 'what was overwritten, and an eighth of the ring');
  while (ring.take());
  t.strictSame([ring.read, ring.lost], [1614, 3]);
});

t.test('readers are independent, and see what happens from their making on', async (t) => {
  const memory = allocateEvents(16);
  const writer = new EventWriter(memory);
  const record = new Int32Array(RECORD_WORDS);
  t.notOk(writer.isWatched);
  const one = new EventReader(memory);
  t.ok(writer.isWatched);
  writer.write(EVENT_STATE, 1, record, 0, 1);
  const other = new EventReader(memory);
  writer.write(EVENT_STATE, 2, record, 0, 2);
  t.strictSame([one.read(), one.detail, one.read(), one.detail, one.read()], [0, 1, 0, 2, -1]);
  t.strictSame([other.read(), other.detail, other.read()], [0, 2, -1]);
  one.close();
  t.ok(writer.isWatched);
  other.close();
  t.notOk(writer.isWatched);
});

t.test('a table tells why a record goes, with the record as it last was', async (t) => {
  const memory = allocateEvents(64);
  const table = new FlowTable(allocateTable(4, SECRET), new EventWriter(memory));
  const live = (n: number, expiresMs: number, list: number): number => {
    const record = insertFlow(table, n, 6, 0);
    table.setExpiry(record, expiresMs);
    table.setClass(record, list, 0);
    account(table, record, false, 100 + n, 0);
    return record;
  };
  const unheard = live(1, 5000, CLASS_ESTABLISHED);
  table.remove(unheard, CAUSE_FLUSHED, 0);
  t.ok(
    new Uint8Array(memory).every((byte) => byte === 0),
    'nothing is written while nobody watches',
  );

  const reader = new EventReader(memory);
  const next = (): unknown[] => {
    if (reader.read() !== 0) return [];
    const port = reader.words[ORIGINAL_PORTS]! >>> 16;
    return [reader.kind, reader.detail, reader.atMs, port, reader.words[BACKEND_ID], reader.doubles[TX_BYTES]];
  };
  for (const [n, cause] of [CAUSE_REPLACED, CAUSE_FLUSHED, CAUSE_CUT].entries()) {
    table.remove(live(n, 5000, CLASS_ESTABLISHED), cause, 10 + n);
    t.strictSame(next(), [EVENT_CLOSED, cause, 10 + n, n, 2, 100 + n]);
  }
  table.remove(live(7, 5000, CLASS_ESTABLISHED), CAUSE_REPLACED, 5000);
  t.strictSame(next(), [EVENT_CLOSED, CAUSE_EXPIRED, 5000, 7, 2, 107], 'an expired one, whoever comes upon it');
  live(8, 5000, CLASS_ESTABLISHED);
  live(9, 6000, CLASS_ESTABLISHED);
  t.equal(table.reap(0, 4, 5500), 1);
  t.strictSame(next(), [EVENT_CLOSED, CAUSE_EXPIRED, 5500, 8, 2, 108], 'the garbage collector');
  for (const n of [10, 11, 12]) live(n, 90_000, CLASS_CLOSING);
  table.setExpiry(insertFlow(table, 13, 6, 7000), 90_000);
  t.strictSame(next(), [EVENT_CLOSED, CAUSE_EXPIRED, 7000, 9, 2, 109], 'an insert that finds an expired one');
  insertFlow(table, 14, 6, 7000);
  const [kind, cause, atMs] = next();
  t.strictSame([kind, cause, atMs], [EVENT_CLOSED, CAUSE_EVICTED, 7000]);
  t.strictSame(next(), []);
});

t.test('a record that comes and goes while somebody watches leaves nothing on the heap', async (t) => {
  const memory = allocateEvents(256);
  const table = new FlowTable(allocateTable(64, SECRET), new EventWriter(memory));
  const reader = new EventReader(memory);
  const churn = (rounds: number): void => {
    for (let n = 0; n < rounds; n++) {
      const record = insertFlow(table, n, 6, n);
      table.tell(EVENT_STATE, 1, record, n);
      table.remove(record, CAUSE_FLUSHED, n);
      reader.read();
    }
  };
  setFlagsFromString('--expose-gc');
  const collectGarbage = runInNewContext('gc') as () => void;
  churn(50_000);
  collectGarbage();
  const before = process.memoryUsage().heapUsed;
  churn(500_000);
  collectGarbage();
  const grown = process.memoryUsage().heapUsed - before;
  t.ok(grown < 300_000, `${grown} bytes after a million events`);
  t.equal(new Int32Array(memory)[WATCHERS], 1);
});

t.test('a reader on another thread: whole events in order, and every other one counted', async (t) => {
  const memory = allocateEvents(64);
  const source = `
    const { workerData: { memory, modules, loader }, parentPort } = require('node:worker_threads');
    (async () => {
      (await import(loader)).register();
      const { EventReader } = await import(modules);
      const reader = new EventReader(memory);
      parentPort.postMessage('ready');
      let read = 0, lost = 0, wrong = 0;
      for (;;) {
        const skipped = reader.read();
        if (skipped < 0) continue;
        lost += skipped;
        read++;
        const number = read + lost - 1;
        for (let i = 0; i < 32; i++) if (reader.words[i] !== number) wrong++;
        if (reader.atMs !== number) wrong++;
        if (reader.kind === 3) break;
      }
      reader.close();
      parentPort.postMessage({ read, lost, wrong });
    })();`;
  const modules = new URL('../../lib/conntrack/events.ts', import.meta.url).href;
  const loader = import.meta.resolve('tsx/esm/api');
  const worker = new Worker(source, { eval: true, workerData: { memory, modules, loader } });
  const results: unknown[] = [];
  worker.on('message', (message) => results.push(message));
  const failed = new Promise((_, reject) => worker.on('error', reject));
  const hear = (count: number): Promise<unknown> =>
    Promise.race([
      failed,
      new Promise<void>((resolve) => {
        const look = (): void => (results.length >= count ? resolve() : void setImmediate(look));
        look();
      }),
    ]);
  await hear(1);
  const writer = new EventWriter(memory);
  t.ok(writer.isWatched);
  const record = new Int32Array(RECORD_WORDS);
  const total = 500_000;
  for (let n = 0; n < total; n++) {
    record.fill(n);
    writer.write(n === total - 1 ? EVENT_CLOSED : EVENT_STATE, 0, record, 0, n);
  }
  await hear(2);
  await worker.terminate();
  const { read, lost, wrong } = results[1] as { read: number; lost: number; wrong: number };
  t.equal(wrong, 0);
  t.equal(read + lost, total, `${read} read, ${lost} lost`);
  t.ok(read > 0);
  t.notOk(writer.isWatched);
});
