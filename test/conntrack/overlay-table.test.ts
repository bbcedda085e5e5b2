import t from 'tap';
import { below, type Random, seededRandom } from '../../lib/base/random.js';
import { CAUSE_FLUSHED } from '../../lib/conntrack/events.js';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import { allocateTable } from '../../lib/conntrack/memory.js';
import { OverlayTable } from '../../lib/conntrack/overlay-table.js';
import {
  BACKEND,
  CLASS_CLOSING,
  CLASS_ESTABLISHED,
  CLASS_HALF_OPEN,
  CLIENT,
  COMMIT,
  NEXT,
  ORIGINAL_PORTS,
  PREVIOUS,
  QUEUED_AT,
  RECORD_WORDS,
  TYPE_OUT,
  TYPE_SVC,
} from '../../lib/conntrack/record.js';
import { TableReader } from '../../lib/conntrack/table-reader.js';
import { BACKEND_ADDRESS, Connection, insertFlow, SECRET, VIP_ADDRESS } from './connection.js';

/** The original key of flow `n` of insertFlow, and the reply key. */
function keysOf(n: number): [source: number, destination: number, ports: number][] {
  const client = (0x0a010002 + (n >>> 16)) | 0;
  const port = n & 0xffff;
  return [
    [client, VIP_ADDRESS, (port << 16) | 80],
    [BACKEND_ADDRESS, client, (8080 << 16) | port],
  ];
}

function find(table: FlowTable, [source, destination, ports]: [number, number, number]): number {
  return table.find(source, destination, ports, 6, table.hash(source, destination, ports, 6));
}

t.test('a reader finds what the table finds, through inserts and removals', async (t) => {
  const memory = allocateTable(300, SECRET);
  const table = new FlowTable(memory);
  const reader = new TableReader(memory);
  const random = seededRandom(1);
  const records = new Map<number, number>();
  let found = 0;
  for (let round = 0; round < 20_000; round++) {
    const n = below(random, 600);
    const record = records.get(n);
    if (record !== undefined) {
      table.remove(record, CAUSE_FLUSHED, 0);
      records.delete(n);
    } else if (records.size < 300) {
      const added = insertFlow(table, n, 6, 0, n % 3 === 0 ? TYPE_SVC : TYPE_OUT);
      table.setClass(added, CLASS_ESTABLISHED, 0);
      table.setExpiry(added, 1e9);
      records.set(n, added);
    }
    for (const key of [...keysOf(n), ...keysOf(below(random, 600))]) {
      const reference = reader.find(...key, 6);
      if (reference !== find(table, key)) return t.fail(`${key}: ${reference}, not ${find(table, key)}`);
      if (reference < 0) continue;
      found++;
      const at = (reference & 1) * BACKEND;
      if (reader.words[at] !== key[0] || reader.words[at + 2] !== key[2]) return t.fail(`${key}: another’s copy`);
    }
  }
  t.ok(found > 10_000);
  t.equal(reader.find(...keysOf(records.keys().next().value!)[0]!, 17), -1, 'not under another protocol');
});

/** A table of random classes and expiries, most often full. */
function crowd(random: Random, capacity: number): { readonly table: FlowTable; readonly reader: TableReader } {
  const memory = allocateTable(capacity, SECRET);
  const table = new FlowTable(memory);
  table.open.fit(2, 3);
  for (let n = 0; n < capacity - below(random, 2); n++) {
    const record = insertFlow(table, n, 6, 0);
    const classes = [CLASS_ESTABLISHED, CLASS_ESTABLISHED, CLASS_ESTABLISHED, CLASS_HALF_OPEN, CLASS_CLOSING];
    table.setClass(record, classes[below(random, 5)]!, 0);
    table.setExpiry(record, below(random, 12) === 0 ? 50 : 500);
  }
  if (below(random, 3) === 0 && table.count > 1) table.remove(0, CAUSE_FLUSHED, 0);
  return { table, reader: new TableReader(memory) };
}

t.test('an overlay finds room, and what has expired, where the table below would', async (t) => {
  const random = seededRandom(2);
  const seen = { room: 0, none: 0, reaped: 0 };
  for (let round = 0; round < 3000; round++) {
    const { table, reader } = crowd(random, 1 + below(random, 6));
    const overlay = new OverlayTable(reader, 16);
    overlay.open.fit(2, 3);
    overlay.open.assume([[1, table.open.services[1]!]], [[2, table.open.backends[2]!]]);
    const reaps = below(random, 4);
    if (below(random, 2) === 0) find(overlay, keysOf(below(random, 6))[0]!);
    for (let i = 0; i < reaps; i++) {
      if (overlay.mayHoldExpired(100) !== table.mayHoldExpired(100)) return t.fail(`round ${round}: may hold`);
      // The overlay looks at the same memory: it goes first.
      const isReaped = overlay.reapNext(100);
      if (table.reapNext(100) !== isReaped) return t.fail(`round ${round}: reap ${i}`);
      if (isReaped) seen.reaped++;
    }
    const counts = ({ open }: FlowTable): number[] => [open.services[1]!, open.backends[2]!];
    if (counts(overlay).join() !== counts(table).join()) return t.fail(`round ${round}: counts ${counts(overlay)}`);
    const hasRoom = insertFlow(overlay, 999, 6, 100) >= 0;
    if (hasRoom !== insertFlow(table, 999, 6, 100) >= 0) return t.fail(`round ${round}: ${hasRoom}`);
    seen[hasRoom ? 'room' : 'none']++;
  }
  t.ok(seen.room > 500 && seen.none > 100 && seen.reaped > 200, JSON.stringify(seen));

  const memory = allocateTable(5000, SECRET);
  const table = new FlowTable(memory);
  for (let n = 0; n < 5000; n++) {
    const record = insertFlow(table, n, 6, 0);
    table.setClass(record, CLASS_ESTABLISHED, 0);
    table.setExpiry(record, n === 4000 ? 50 : 500);
  }
  const overlay = new OverlayTable(new TableReader(memory), 16);
  let inserts = 0;
  for (let isFound = false; !isFound; inserts++) {
    overlay.clear();
    const hasRoom = insertFlow(overlay, 5000, 6, 100) >= 0;
    isFound = insertFlow(table, 5000, 6, 100) >= 0;
    if (hasRoom !== isFound) return t.fail(`insert ${inserts}: ${hasRoom}`);
  }
  t.ok(inserts > 10, 'in a large table as far as an insert looks');
});

t.test('an overlay copies what it is asked for, and changes nothing below', async (t) => {
  const below = allocateTable(16, SECRET);
  const table = new FlowTable(below);
  const { record } = new Connection({ table }).handshake({ scale: 7 }).client({ flags: 'S', at: 77 });
  const word = record * RECORD_WORDS;
  const original = table.words.slice(word, word + RECORD_WORDS);
  const key: [number, number, number] = [original[CLIENT]!, original[CLIENT + 1]!, original[ORIGINAL_PORTS]!];

  const overlay = new OverlayTable(new TableReader(below), 8);
  const reference = find(overlay, key);
  const copy = reference >> 1;
  t.equal(reference & 1, 0);
  const own = [PREVIOUS, NEXT, COMMIT, QUEUED_AT];
  const words = overlay.words.slice(copy * RECORD_WORDS, (copy + 1) * RECORD_WORDS);
  t.strictSame(
    [...words].filter((_, i) => !own.includes(i)),
    [...original].filter((_, i) => !own.includes(i)),
  );
  t.strictSame(overlay.originalOf(copy)!.words, original, 'with all it was');
  t.equal(find(overlay, keysOf(77)[0]!), -1);
  t.strictSame(
    overlay.lookedUp.map((each) => each.reference),
    [reference, -1],
  );
  t.equal(overlay.copyOf(record, original[COMMIT]!), copy, 'it is copied once');

  overlay.remove(copy, CAUSE_FLUSHED, 0);
  t.equal(find(overlay, key), -1, 'what is removed is gone');
  const made = insertFlow(overlay, 5, 6, 0);
  t.strictSame([overlay.removed, overlay.inserted], [[copy], [made]]);
  t.strictSame([...table.words.slice(word, word + RECORD_WORDS)], [...original]);
  t.equal(table.count, 1);

  overlay.clear();
  t.strictSame([overlay.count, overlay.lookedUp, overlay.removed, overlay.inserted], [0, [], [], []]);
  t.equal(find(overlay, keysOf(5)[0]!), -1, 'what was made is forgotten');
  t.ok(find(overlay, key) >= 0, 'and what was removed is there again');
  overlay.clear();
  t.equal(overlay.copyOf(record, original[COMMIT]! + 1), -1, 'a record of another generation is another’s');
  t.ok(overlay.copyOf(record, original[COMMIT]!) >= 0);
});

t.test('an overlay has room when the table below has', async (t) => {
  const memory = allocateTable(1, SECRET);
  const table = new FlowTable(memory);
  const record = insertFlow(table, 1, 6, 0);
  table.setClass(record, CLASS_ESTABLISHED, 0);
  table.setExpiry(record, 1000);
  const overlay = new OverlayTable(new TableReader(memory), 8);
  t.equal(insertFlow(overlay, 2, 6, 10), -1);
  t.ok(insertFlow(overlay, 2, 6, 1000) >= 0, 'its only record has expired');
  overlay.clear();
  overlay.remove(find(overlay, keysOf(1)[0]!) >> 1, CAUSE_FLUSHED, 10);
  t.ok(insertFlow(overlay, 2, 6, 10) >= 0, 'or has been removed here');
});
