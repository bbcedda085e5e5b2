/**
 * Typed arrays over shared memory: sent to a Worker they are references.
 *
 * Memory that is no longer used is handed out again, and not left to the collector: the data path's thread makes so little garbage
 * that it collects what is old once in many hours, and until then it keeps all it was ever sent. At 1,000 services that was 1 MB for
 * every backend that fell ill. No amount of it makes a collection begin, since V8 counts shared memory as nobody's.
 *
 *     shared() --> an array over A; B, another SharedArrayBuffer of the same memory, is kept here
 *                  nothing in this thread refers to A any more --> B is spare, and the next of its size
 *
 * Invariant: who sends an array to another thread holds it until that thread uses it no more. The data path's snapshots are held
 * (control/desired.ts) until it has put the next to use.
 */

interface SharedArray<T> {
  readonly BYTES_PER_ELEMENT: number;
  new (buffer: SharedArrayBuffer, byteOffset: number, length: number): T;
}

/** Sizes are powers of two, so that what is spare fits again. */
const LEAST_BYTES = 64;

/** Spare memory, by size. */
const spares = new Map<number, SharedArrayBuffer[]>();

const uses = new FinalizationRegistry<SharedArrayBuffer>((spare) => {
  const others = spares.get(spare.byteLength);
  if (others === undefined) spares.set(spare.byteLength, [spare]);
  else others.push(spare);
});

/** An array of zeros. */
export function shared<T extends { fill(value: number): unknown }>(Kind: SharedArray<T>, length: number): T {
  const size = sizeFor(length * Kind.BYTES_PER_ELEMENT);
  const spare = spares.get(size)?.pop();
  const memory = spare ?? new SharedArrayBuffer(size);
  uses.register(memory, structuredClone(memory));
  const array = new Kind(memory, 0, length);
  if (spare !== undefined) array.fill(0);
  return array;
}

export function sharedFrom<T extends { fill(value: number): unknown; set(values: ArrayLike<number>): void }>(
  Kind: SharedArray<T>,
  values: ArrayLike<number>,
): T {
  const array = shared(Kind, values.length);
  array.set(values);
  return array;
}

function sizeFor(bytes: number): number {
  let size = LEAST_BYTES;
  while (size < bytes) size *= 2;
  return size;
}
