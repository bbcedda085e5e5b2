import assert from 'node:assert/strict';
import fc from 'fast-check';
import t from 'tap';
import { CAUSE_FLUSHED } from '../../lib/conntrack/events.js';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import { GarbageCollector } from '../../lib/conntrack/gc.js';
import {
  allocateTable,
  HEADER_BYTES,
  HIGH_WATER,
  headerWords,
  indexOffset,
  SECRET as SECRET_WORD,
  type TableMemory,
  tableBytes,
} from '../../lib/conntrack/memory.js';
import {
  CLASS_CLOSING,
  CLASS_ESTABLISHED,
  CLASS_HALF_OPEN,
  CLASS_MASK,
  CLOSED,
  CLOSING,
  COMMIT,
  CREATED,
  ESTABLISHED,
  EXPIRES,
  MARKS,
  NEXT,
  PREVIOUS,
  PROTOCOL,
  QUEUED_AT,
  RECORD_BYTES,
  RECORD_DOUBLES,
  RECORD_WORDS,
  RX_BYTES,
  STATE,
  SYN_SENT,
  TX_PACKETS,
  TYPE,
  TYPE_SVC,
} from '../../lib/conntrack/record.js';
import { restoreTable } from '../../lib/conntrack/restore.js';
import { insertFlow, SECRET } from './connection.js';

const TCP = 6;
const NOW = 50_000;
const CAPACITY = 32;

/** Flow `n` in a state and the class that goes with it, living for a minute. */
function addFlow(table: FlowTable, n: number, state = ESTABLISHED, type?: number, nowMs = NOW): number {
  const record = insertFlow(table, n, TCP, nowMs, type);
  table.bytes[record * RECORD_BYTES + STATE] = state;
  table.setExpiry(record, nowMs + 60_000);
  if (state === ESTABLISHED) table.doubles[record * RECORD_DOUBLES + TX_PACKETS] = 3;
  if (state === ESTABLISHED) table.setClass(record, CLASS_ESTABLISHED, nowMs);
  if (state === CLOSING || state === CLOSED) table.setClass(record, CLASS_CLOSING, nowMs);
  return record;
}

/** What is in a table, whatever record it is in: keys, and everything about them but list links and generations. */
function contents(table: FlowTable): string[] {
  const flows: string[] = [];
  for (let record = 0; record < table.highWater; record++) {
    if (table.generation(record) === 0) continue;
    const words = [...table.words.subarray(record * RECORD_WORDS, (record + 1) * RECORD_WORDS)];
    words[PREVIOUS] = words[NEXT] = words[COMMIT] = words[QUEUED_AT] = 0;
    flows.push(words.join());
  }
  return flows.sort();
}

/** Throws unless everything that is made anew fits the records. */
function checkWhole(table: FlowTable, expected: number): void {
  let live = 0;
  const classes = [0, 0, 0, 0];
  for (let record = 0; record < table.highWater; record++) {
    if (table.generation(record) === 0) continue;
    live++;
    classes[table.bytes[record * RECORD_BYTES + MARKS]! & CLASS_MASK]!++;
    const sides = table.bytes[record * RECORD_BYTES + TYPE] === TYPE_SVC ? 1 : 2;
    for (let side = 0; side < sides; side++) {
      const key = record * RECORD_WORDS + 3 * side;
      const [source, destination, ports] = [table.words[key]!, table.words[key + 1]!, table.words[key + 2]!];
      const protocol = table.bytes[record * RECORD_BYTES + PROTOCOL]!;
      const hash = table.hash(source, destination, ports, protocol);
      const found = table.find(source, destination, ports, protocol, hash);
      assert.equal(found, record * 2 + side, `record ${record} by its key ${side}`);
    }
  }
  assert.equal(live, expected);
  assert.equal(table.count, expected);
  assert.equal(table.listLength(CLASS_HALF_OPEN), classes[CLASS_HALF_OPEN]);
  assert.equal(table.listLength(CLASS_CLOSING), classes[CLASS_CLOSING]);
  let added = 0;
  while (table.count < table.capacity && addFlow(table, 0x70000 + added) >= 0) added++;
  assert.equal(added, table.capacity - expected, 'every free record can be had');
  for (let record = 0; record < table.capacity; record++)
    if (table.generation(record) !== 0) table.remove(record, CAUSE_FLUSHED, NOW);
  assert.equal(table.count, 0, 'and every record given up');
}

t.test('whatever was done to a table, its records make it whole again', async (t) => {
  const step = fc.tuple(
    fc.constantFrom('add', 'add', 'add', 'add', 'remove', 'expire', 'collect'),
    fc.nat(40),
    fc.constantFrom(1, 3, 4, 5),
  );
  let worst = 0;
  fc.assert(
    fc.property(fc.array(step, { maxLength: 120, size: 'max' }), fc.nat(), (steps, noise) => {
      const memory = allocateTable(CAPACITY, SECRET);
      const table = new FlowTable(memory);
      const collector = new GarbageCollector([table], NOW, 1000);
      let nowMs = NOW;
      const byFlow = new Map<number, number>();
      for (const [what, n, state] of steps) {
        nowMs += 250;
        const record = byFlow.get(n);
        const isIn = record !== undefined && table.generation(record) !== 0;
        if (what === 'add' && !isIn) byFlow.set(n, addFlow(table, n, state, n % 5 === 0 ? TYPE_SVC : undefined, nowMs));
        else if (what === 'remove' && isIn) table.remove(record, CAUSE_FLUSHED, nowMs);
        else if (what === 'expire' && isIn) table.setExpiry(record, nowMs);
        else if (what === 'collect') while (collector.slice(nowMs + 2000, 8));
        for (const [flow, at] of byFlow) if (at < 0 || table.generation(at) === 0) byFlow.delete(flow);
      }
      for (let record = 0; record < table.highWater; record++) {
        if (table.generation(record) !== 0 && table.isExpired(record, nowMs))
          table.remove(record, CAUSE_FLUSHED, nowMs);
      }
      const before = contents(table);

      // Everything but the records, the secret and the high-water mark may be anything.
      const words = new Int32Array(memory.buffer);
      const header = headerWords(memory);
      const kept = [
        header[0]!,
        header[1]!,
        header[2]!,
        header[HIGH_WATER]!,
        header[SECRET_WORD]!,
        header[SECRET_WORD + 1]!,
      ];
      for (let i = 0; i < HEADER_BYTES / 4; i++) header[i] = Math.imul(noise + i, 0x9e3779b1);
      header.set(kept.slice(0, 4));
      header.set(kept.slice(4), SECRET_WORD);
      for (let i = indexOffset(CAPACITY) / 4; i < tableBytes(CAPACITY) / 4; i++)
        words[i] = Math.imul(noise ^ i, 0x85ebca6b);
      for (let record = 0; record < CAPACITY; record++) {
        const at = HEADER_BYTES / 4 + record * RECORD_WORDS;
        if (words[at + COMMIT] === 0 || record % 2 === 0) words[at + NEXT] = noise;
      }

      const restored = restoreTable(memory, true, nowMs);
      assert.deepEqual(restored, { kept: before.length, expired: 0, damaged: 0 });
      const after = new FlowTable(memory);
      assert.deepEqual(contents(after), before);
      worst = Math.max(worst, before.length);
      checkWhole(after, before.length);
    }),
    { numRuns: 300 },
  );
  t.ok(worst > CAPACITY / 2, `up to ${worst} records`);
});

t.test('records that cannot be are left out, one by one', async (t) => {
  const damages: readonly [name: string, damage: (table: FlowTable, record: number) => void][] = [
    ['no type', ({ bytes }, record) => (bytes[record * RECORD_BYTES + TYPE] = 0)],
    ['another type', ({ bytes }, record) => (bytes[record * RECORD_BYTES + TYPE] = 3)],
    ['a protocol of the other table', ({ bytes }, record) => (bytes[record * RECORD_BYTES + PROTOCOL] = 17)],
    ['no state', ({ bytes }, record) => (bytes[record * RECORD_BYTES + STATE] = 0)],
    ['a state of the other table', ({ bytes }, record) => (bytes[record * RECORD_BYTES + STATE] = 6)],
    ['no class', ({ bytes }, record) => (bytes[record * RECORD_BYTES + MARKS]! |= CLASS_MASK)],
    ['created later', ({ words }, record) => (words[record * RECORD_WORDS + CREATED] = NOW)],
    ['living for ever', ({ doubles }, record) => (doubles[record * RECORD_DOUBLES + EXPIRES] = 1e300)],
    ['an expiry that is none', ({ doubles }, record) => (doubles[record * RECORD_DOUBLES + EXPIRES] = Number.NaN)],
    ['a negative count', ({ doubles }, record) => (doubles[record * RECORD_DOUBLES + TX_PACKETS] = -1)],
    ['a count that is none', ({ doubles }, record) => (doubles[record * RECORD_DOUBLES + RX_BYTES] = Number.NaN)],
    ['the keys of another', ({ words }, record) => words.copyWithin(record * RECORD_WORDS, 0, RECORD_WORDS / 4)],
  ];
  for (const [name, damage] of damages) {
    const memory = allocateTable(CAPACITY, SECRET);
    const table = new FlowTable(memory);
    for (let n = 0; n < 5; n++) addFlow(table, n, n === 4 ? SYN_SENT : ESTABLISHED);
    damage(table, 3);
    t.same(restoreTable(memory, true, NOW), { kept: 4, expired: 0, damaged: 1 }, name);
    checkWhole(new FlowTable(memory), 4);
  }
});

t.test('what has expired meanwhile is gone; the order of eviction stays', async (t) => {
  const memory = allocateTable(4, SECRET);
  const table = new FlowTable(memory);
  const [late, old, young, gone] = [0, 1, 2, 3].map((n) => addFlow(table, n, SYN_SENT)) as [
    number,
    number,
    number,
    number,
  ];
  table.setExpiry(gone, NOW + 1000);
  for (const [record, at] of [
    [late, NOW + 30_000],
    [old, NOW],
    [young, NOW + 20_000],
  ] as const) {
    table.words[record * RECORD_WORDS + QUEUED_AT] = at / 1000;
  }
  t.same(restoreTable(memory, true, NOW + 1000), { kept: 3, expired: 1, damaged: 0 });
  const after = new FlowTable(memory);
  addFlow(after, 10, SYN_SENT, undefined, NOW + 1000);
  for (const [evicted, n] of [
    [old, 11],
    [young, 12],
    [late, 13],
  ] as const) {
    const generation = after.generation(evicted);
    addFlow(after, n, SYN_SENT, undefined, NOW + 40_000);
    t.not(after.generation(evicted), generation, 'the longest half-open goes first');
  }
});

t.test('a class that its state has left behind', async (t) => {
  const cases = [
    [ESTABLISHED, CLASS_HALF_OPEN, CLASS_ESTABLISHED],
    [CLOSING, CLASS_ESTABLISHED, CLASS_CLOSING],
    [CLOSED, CLASS_HALF_OPEN, CLASS_CLOSING],
    [SYN_SENT, CLASS_ESTABLISHED, CLASS_HALF_OPEN],
  ] as const;
  for (const [state, stored, fitting] of cases) {
    const memory = allocateTable(4, SECRET);
    const table = new FlowTable(memory);
    const record = addFlow(table, 1, state);
    const marks = record * RECORD_BYTES + MARKS;
    table.bytes[marks] = (table.bytes[marks]! & ~CLASS_MASK) | stored;
    restoreTable(memory, true, NOW);
    t.equal(new FlowTable(memory).bytes[marks]! & CLASS_MASK, fitting);
    checkWhole(new FlowTable(memory), 1);
  }
});

t.test('counts begin anew, generations do not', async (t) => {
  const memory: TableMemory = allocateTable(CAPACITY, SECRET);
  const record = addFlow(new FlowTable(memory), 1);
  const generation = new FlowTable(memory).generation(record);
  restoreTable(memory, true, NOW);
  const table = new FlowTable(memory);
  t.equal(table.generation(record), generation);
  t.not(table.generation(addFlow(table, 2)), generation);
  t.equal(
    table.figures.filter((_, i) => i >= 12).reduce((sum, each) => sum + each, 0),
    1,
    'one insert, nothing else',
  );
});
