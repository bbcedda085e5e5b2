import fc from 'fast-check';
import t from 'tap';
import { CAUSE_FLUSHED } from '../../lib/conntrack/events.js';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import { GarbageCollector } from '../../lib/conntrack/gc.js';
import { allocateTable } from '../../lib/conntrack/memory.js';
import { OpenCounts } from '../../lib/conntrack/open-counts.js';
import {
  CLASS_CLOSING,
  CLASS_ESTABLISHED,
  CLASS_HALF_OPEN,
  CLASS_MASK,
  EXPIRES,
  MARKS,
  RECORD_BYTES,
  RECORD_DOUBLES,
  TYPE_OUT,
  TYPE_SVC,
} from '../../lib/conntrack/record.js';
import { account } from '../../lib/conntrack/tcp-tracker.js';
import { SECRET } from './connection.js';

/**
 * The flow table against a Map that does the same naively: random inserts, removals, expiries, classes, clock steps and garbage
 * collections must never make them disagree. WEIR_MODEL_RUNS raises the number of runs.
 */

const RUNS = Number(process.env.WEIR_MODEL_RUNS ?? 10_000);
const KEYS = 40;

/** Few homes and few tags, so that clusters are long and removals shift much. */
class CollidingTable extends FlowTable {
  override hash(source: number, destination: number, ports: number, protocol: number): number {
    return super.hash(source, destination, ports, protocol) & (0xc0000001 | 0);
  }
}

interface Entry {
  readonly key: number;
  readonly backend: number;
  readonly type: number;
  expiresMs: number;
  class: number;
  queuedAt: number;
  seenAt: number;
}

class Model {
  /** By record. */
  readonly entries = new Map<number, Entry>();
  readonly lists: Record<number, number[]> = { [CLASS_HALF_OPEN]: [], [CLASS_CLOSING]: [] };
  nowMs = 5_000;
  readonly evicted = { expired: 0, closing: 0, halfOpen: 0, failures: 0 };

  recordOf(key: number): number {
    for (const [record, entry] of this.entries) if (entry.key === key) return record;
    return -1;
  }

  setClass(record: number, to: number): void {
    const entry = this.entries.get(record)!;
    if (entry.class === to) return;
    this.unlist(record);
    entry.class = to;
    this.enlist(record);
  }

  unlist(record: number): void {
    const list = this.lists[this.entries.get(record)!.class];
    list?.splice(list.indexOf(record), 1);
  }

  enlist(record: number): void {
    const entry = this.entries.get(record)!;
    this.lists[entry.class]?.push(record);
    entry.queuedAt = Math.floor(this.nowMs / 1000);
  }

  remove(record: number): void {
    this.unlist(record);
    this.entries.delete(record);
  }

  /** Those of which a full table evicts one: any of the expired, else the one that is first in line. */
  victims(): number[] {
    const expired = [...this.entries].filter(([, entry]) => entry.expiresMs <= this.nowMs).map(([record]) => record);
    if (expired.length > 0) return expired;
    for (const list of [CLASS_CLOSING, CLASS_HALF_OPEN]) {
      if (this.lists[list]!.length === 0) continue;
      for (let chances = 4; chances > 0; chances--) {
        const head = this.lists[list]![0]!;
        const entry = this.entries.get(head)!;
        if (entry.seenAt <= entry.queuedAt) break;
        this.unlist(head);
        this.enlist(head);
      }
      return [this.lists[list]![0]!];
    }
    return [];
  }
}

interface Real {
  readonly table: FlowTable;
  readonly collector: GarbageCollector;
}

const SERVICES = 3;
const BACKENDS = 5;
const serviceOf = (key: number): number => key % SERVICES;
const backendOf = (key: number): number => key % BACKENDS;

const client = (key: number): number => 0x0a000000 + (key % 7);
const originalPorts = (key: number): number => ((2000 + key) << 16) | 80 | 0;
const replyPorts = (key: number): number => (8080 << 16) | (2000 + key) | 0;
const VIP = 0x0a600001;

function findOriginal({ table }: Real, key: number): number {
  return table.find(client(key), VIP, originalPorts(key), 6, table.hash(client(key), VIP, originalPorts(key), 6));
}

function findReply({ table }: Real, key: number, backend: number): number {
  const hash = table.hash(backend, client(key), replyPorts(key), 6);
  return table.find(backend, client(key), replyPorts(key), 6, hash);
}

function check(model: Model, real: Real): void {
  const { table } = real;
  const fail = (what: string): never => {
    throw new Error(what);
  };
  if (table.count !== model.entries.size) fail(`count ${table.count}, model ${model.entries.size}`);
  for (const list of [CLASS_CLOSING, CLASS_HALF_OPEN]) {
    if (table.listLength(list) !== model.lists[list]!.length) fail(`list ${list}: ${table.listLength(list)}`);
  }
  checkOpen(model, table);
  const records = new Map<number, number>();
  for (const [record, entry] of model.entries) {
    records.set(entry.key, record);
    if (table.generation(record) === 0) fail(`record ${record} is not live`);
    if (table.doubles[record * RECORD_DOUBLES + EXPIRES] !== entry.expiresMs) fail(`expiry of ${record}`);
    if ((table.bytes[record * RECORD_BYTES + MARKS]! & CLASS_MASK) !== entry.class) fail(`class of ${record}`);
    const reply = findReply(real, entry.key, entry.backend);
    if (reply !== (entry.type === TYPE_SVC ? -1 : (record << 1) | 1)) fail(`reply key of ${record}: ${reply}`);
  }
  for (let key = 0; key < KEYS; key++) {
    const record = records.get(key);
    const found = findOriginal(real, key);
    if (found !== (record === undefined ? -1 : record << 1)) fail(`key ${key}: ${found}, model ${record}`);
    if (record === undefined && findReply(real, key, 1) >= 0) fail(`a stale reply key ${key}`);
  }
}

/** Open connections by service and backend, and counted again by somebody who attaches. */
function checkOpen(model: Model, table: FlowTable): void {
  const again = new OpenCounts();
  again.fit(SERVICES, BACKENDS);
  again.recount(table.words, table.bytes, table.highWater);
  const open = [...model.entries.values()].filter((entry) => entry.class !== CLASS_CLOSING).map(({ key }) => key);
  for (const { services, backends } of [table.open, again]) {
    for (let id = 0; id < services.length; id++) {
      const wanted = open.filter((key) => serviceOf(key) === id).length;
      if (services[id] !== wanted) throw new Error(`service ${id} has ${wanted} open, not ${services[id]}`);
    }
    for (let id = 0; id < backends.length; id++) {
      const wanted = open.filter((key) => backendOf(key) === id).length;
      if (backends[id] !== wanted) throw new Error(`backend ${id} has ${wanted} open, not ${backends[id]}`);
    }
  }
}

/** A command on the flow of a key, if it is there. */
class OnFlow implements fc.Command<Model, Real> {
  readonly #name: string;
  readonly #key: number;
  readonly #value: number;

  constructor(name: 'remove' | 'expire' | 'class' | 'packet', key: number, value: number) {
    this.#name = name;
    this.#key = key;
    this.#value = value;
  }

  check(model: Readonly<Model>): boolean {
    return model.recordOf(this.#key) >= 0;
  }

  run(model: Model, real: Real): void {
    const record = model.recordOf(this.#key);
    const entry = model.entries.get(record)!;
    switch (this.#name) {
      case 'remove':
        real.table.remove(record, CAUSE_FLUSHED, model.nowMs);
        model.remove(record);
        break;
      case 'expire':
        entry.expiresMs = model.nowMs + this.#value;
        real.table.setExpiry(record, entry.expiresMs);
        break;
      case 'class':
        real.table.setClass(record, this.#value % 3, model.nowMs);
        model.setClass(record, this.#value % 3);
        break;
      case 'packet':
        account(real.table, record, this.#value % 2 === 1, 100, model.nowMs);
        entry.seenAt = Math.floor(model.nowMs / 1000);
        break;
    }
    check(model, real);
  }

  toString(): string {
    return `${this.#name}(${this.#key}, ${this.#value})`;
  }
}

class Insert implements fc.Command<Model, Real> {
  readonly #key: number;
  readonly #ttlMs: number;
  readonly #type: number;

  constructor(key: number, ttlMs: number, isOneWay: boolean) {
    this.#key = key;
    this.#ttlMs = ttlMs;
    this.#type = isOneWay ? TYPE_SVC : TYPE_OUT;
  }

  check(model: Readonly<Model>): boolean {
    return model.recordOf(this.#key) < 0;
  }

  run(model: Model, real: Real): void {
    const { table } = real;
    const key = this.#key;
    const isFull = model.entries.size === table.capacity;
    const victims = isFull ? model.victims() : [];
    const record = table.insert(
      6,
      this.#type,
      client(key),
      VIP,
      originalPorts(key),
      1,
      client(key),
      replyPorts(key),
      serviceOf(key),
      backendOf(key),
      model.nowMs,
    );
    if (isFull && victims.length === 0) {
      if (record !== -1) throw new Error('an insert into a full table of established flows');
      check(model, real);
      return;
    }
    // With one record freed by an eviction, that is the one taken.
    if (isFull && !victims.includes(record)) throw new Error(`evicted ${record}, not one of ${victims}`);
    if (isFull) model.remove(record);
    model.entries.set(record, {
      key,
      backend: 1,
      type: this.#type,
      expiresMs: model.nowMs + this.#ttlMs,
      class: CLASS_HALF_OPEN,
      queuedAt: 0,
      seenAt: 0,
    });
    model.enlist(record);
    table.setExpiry(record, model.nowMs + this.#ttlMs);
    check(model, real);
  }

  toString(): string {
    return `insert(${this.#key}, ${this.#ttlMs}, ${this.#type})`;
  }
}

class Advance implements fc.Command<Model, Real> {
  readonly #ms: number;

  constructor(ms: number) {
    this.#ms = ms;
  }

  check(): boolean {
    return true;
  }

  run(model: Model): void {
    model.nowMs += this.#ms;
  }

  toString(): string {
    return `advance(${this.#ms})`;
  }
}

/** A search for one record that has expired: it finds one if there is one. */
class Reap implements fc.Command<Model, Real> {
  check(): boolean {
    return true;
  }

  run(model: Model, real: Real): void {
    const { table } = real;
    const expired = [...model.entries].filter(([, entry]) => entry.expiresMs <= model.nowMs);
    const mayFind = table.mayHoldExpired(model.nowMs);
    if (expired.length > 0 && !mayFind) throw new Error('there are expired records that it does not know of');
    if (table.reapNext(model.nowMs) !== expired.length > 0) throw new Error(`${expired.length} have expired`);
    const gone = [...model.entries.keys()].filter((record) => table.generation(record) === 0);
    if (gone.length !== Math.min(1, expired.length)) throw new Error(`${gone.length} are gone`);
    for (const record of gone) {
      if (model.entries.get(record)!.expiresMs > model.nowMs) throw new Error(`a live record ${record} is gone`);
      model.remove(record);
    }
    check(model, real);
  }

  toString(): string {
    return 'reap()';
  }
}

/** One slice, or as many as there are. */
class Collect implements fc.Command<Model, Real> {
  readonly #records: number;
  readonly #isWhole: boolean;

  constructor(records: number, isWhole: boolean) {
    this.#records = records;
    this.#isWhole = isWhole;
  }

  check(): boolean {
    return true;
  }

  run(model: Model, { table, collector }: Real): void {
    for (let i = 0; i < 200; i++) {
      if (!collector.slice(model.nowMs, this.#records) || !this.#isWhole) break;
    }
    for (const [record, entry] of model.entries) {
      if (table.generation(record) !== 0) continue;
      if (entry.expiresMs > model.nowMs) throw new Error(`a live record ${record} was collected`);
      model.remove(record);
    }
    check(model, { table, collector });
  }

  toString(): string {
    return `collect(${this.#records}, ${this.#isWhole})`;
  }
}

const key = fc.nat({ max: KEYS - 1 });
const ttl = fc.oneof(fc.nat({ max: 3000 }), fc.constantFrom(60_000, 8_000_000));
const commands = fc.commands(
  [
    fc.tuple(key, ttl, fc.boolean()).map((args) => new Insert(...args)),
    fc.tuple(key, ttl, fc.boolean()).map((args) => new Insert(...args)),
    key.map((k) => new OnFlow('remove', k, 0)),
    fc.tuple(key, ttl).map(([k, ms]) => new OnFlow('expire', k, ms)),
    fc
      .tuple(key, fc.constantFrom(CLASS_ESTABLISHED, CLASS_HALF_OPEN, CLASS_CLOSING))
      .map(([k, c]) => new OnFlow('class', k, c)),
    fc.tuple(key, fc.nat({ max: 1 })).map(([k, side]) => new OnFlow('packet', k, side)),
    fc.nat({ max: 4000 }).map((ms) => new Advance(ms)),
    fc.constant(new Reap()),
    fc.tuple(fc.integer({ min: 1, max: 40 }), fc.boolean()).map((args) => new Collect(...args)),
  ],
  { maxCommands: 250, size: 'max' },
);

t.test('random commands never make table and model disagree', async (t) => {
  const property = fc.property(
    commands,
    fc.integer({ min: 1, max: 24 }),
    fc.boolean(),
    (run, capacity, isColliding) => {
      const memory = allocateTable(capacity, SECRET);
      const table = isColliding ? new CollidingTable(memory) : new FlowTable(memory);
      table.open.fit(SERVICES, BACKENDS);
      const collector = new GarbageCollector([table], 0, 3000, () => 0);
      fc.modelRun(() => ({ model: new Model(), real: { table, collector } }), run);
    },
  );
  fc.assert(property, { numRuns: RUNS, interruptAfterTimeLimit: RUNS * 2, markInterruptAsFailure: false });
  t.pass(`${RUNS} runs`);
});
