import { setImmediate as turn } from 'node:timers/promises';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import t from 'tap';
import { shared, sharedFrom } from '../../lib/base/shared-arrays.js';

setFlagsFromString('--expose-gc');
const collect: () => void = runInNewContext('gc');

/** Until what nobody refers to has been collected and that is known. */
async function forget(): Promise<void> {
  for (let i = 0; i < 3; i++) {
    await turn();
    collect();
  }
  await turn();
}

/** What another thread has of an array that was sent to it. */
function sent(array: Int32Array): Int32Array {
  return structuredClone(array);
}

/** In memory of its own, in which 7 is written everywhere. */
function written(length: number): Int32Array {
  return shared(Int32Array, length).fill(7);
}

t.test('as long as was asked for, of zeros, shared', async (t) => {
  for (const length of [0, 1, 16, 17, 1000]) {
    const array = shared(Float64Array, length);
    t.strictSame([array.length, array.every((value) => value === 0)], [length, true]);
    t.ok(array.buffer instanceof SharedArrayBuffer);
  }
  t.strictSame([...sharedFrom(Uint16Array, [1, 2, 65535])], [1, 2, 65535]);
});

t.test('memory that nobody refers to is handed out again, and is zeros again', async (t) => {
  const elsewhere = await (async () => sent(written(5000)))();
  await forget();
  const next = shared(Int32Array, 4500);
  t.strictSame([next.length, next.every((word) => word === 0)], [4500, true]);
  next.fill(8);
  t.equal(elsewhere[0], 8, 'the same memory');
  t.equal(elsewhere[4500], 7, 'and no more of it is touched than is used');
});

t.test('not while a part of it is held', async (t) => {
  const held = await (async () => written(9000).subarray(100, 200))();
  await forget();
  const others = [1, 2, 3].map(() => shared(Int32Array, 9000).fill(9));
  t.ok(held.every((word) => word === 7));
  t.equal(others.length, 3);
});

t.test('two are never the same, however often it is handed out', async (t) => {
  let live: Int32Array[] = [];
  for (let round = 0; round < 30; round++) {
    live = live.filter((_, i) => (i + round) % 3 !== 0);
    if (round % 5 === 4) await forget();
    while (live.length < 20) live.push(shared(Int32Array, 3000));
    for (const [i, array] of live.entries()) array.fill(i);
    const torn = live.filter((array, i) => !array.every((word) => word === i));
    if (torn.length > 0) t.fail(`round ${round}: ${torn.length} of 20 hold what was written to another`);
  }
  t.pass();
});
