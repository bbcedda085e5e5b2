import { deepStrictEqual } from 'node:assert/strict';
import * as fc from 'fast-check';
import t from 'tap';
import { maglevTable } from '../../lib/balance/maglev.js';
import { keyFromString } from '../../lib/base/hash.js';
import { type MaglevTables, placeTables, type TableParts, tableKey } from '../../lib/control/maglev-tables.js';

const KEY = keyFromString('weir');
const SIZES = [251, 509] as const;

function parts(n: number): TableParts {
  return { backends: [1, 2, 3].map((i) => ({ address: n, port: i, weight: 1 + ((n + i) % 3) })), protocol: 6 };
}

function wantedOf(numbers: readonly number[], size: number): Map<string, TableParts> {
  return new Map(numbers.map((n) => [tableKey(parts(n), size, 'weir'), parts(n)]));
}

/** What is at the places of a snapshot's tables. */
function contents({ memory, size, at }: MaglevTables): Map<string, Uint16Array> {
  return new Map([...at].map(([key, from]) => [key, memory.slice(from, from + size)]));
}

t.test(
  'whatever is proposed, tried out, taken or dropped: tables are right, and those in use are never written to',
  async (t) => {
    let inPlace = 0;
    const step = fc.record({
      numbers: fc.uniqueArray(fc.nat(40), { maxLength: 24 }),
      size: fc.constantFrom(SIZES[0], SIZES[0], SIZES[0], SIZES[1]),
      what: fc.constantFrom('take', 'take', 'drop', 'try'),
    });
    fc.assert(
      fc.property(fc.array(step, { minLength: 2, maxLength: 12 }), (steps) => {
        let live: MaglevTables | undefined;
        let tried: MaglevTables | undefined;
        for (const { numbers, size, what } of steps) {
          const before = live && contents(live);
          const isTried = what === 'try' && live !== undefined;
          const from = isTried ? (tried ?? { ...live!, isOwn: false }) : live;
          const wanted = wantedOf(numbers, size);
          const next = placeTables(wanted, size, KEY, from);
          deepStrictEqual(
            contents(next),
            new Map([...wanted].map(([key, { backends }]) => [key, maglevTable(backends, 6, size, KEY)])),
          );
          if (live !== undefined) deepStrictEqual(contents(live), before);
          if (isTried) tried = next;
          else tried = undefined;
          if (what !== 'take') continue;
          if (live !== undefined && next.memory === live.memory) inPlace++;
          live = next;
        }
      }),
    );
    t.ok(inPlace > 10, `${inPlace} times in place`);
  },
);

t.test('a change of one table among many moves no other and takes no other memory', async (t) => {
  const numbers = Array.from({ length: 16 }, (_, i) => i);
  let tables = placeTables(wantedOf(numbers, 251), 251, KEY, undefined);
  const { memory } = tables;
  for (let change = 100; change < 150; change++) {
    const at = [...tables.at.values()];
    numbers[change % 16] = change;
    tables = placeTables(wantedOf(numbers, 251), 251, KEY, tables);
    t.equal(tables.memory, memory);
    t.equal([...tables.at.values()].filter((place) => !at.includes(place)).length, 1);
  }
});

t.test('what is tried out takes no shared memory, what may be put to use does', async (t) => {
  const first = placeTables(wantedOf([1], 251), 251, KEY, undefined);
  t.ok(first.memory.buffer instanceof SharedArrayBuffer);
  const tried = placeTables(wantedOf([2, 3], 251), 251, KEY, { ...first, isOwn: false });
  t.ok(tried.memory.buffer instanceof ArrayBuffer);
  const grown = placeTables(wantedOf([1, 2, 3, 4, 5], 251), 251, KEY, first);
  t.ok(grown.memory.buffer instanceof SharedArrayBuffer);
  t.not(grown.memory, first.memory);
});
