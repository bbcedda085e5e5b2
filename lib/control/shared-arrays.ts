/** Typed arrays over SharedArrayBuffers: handed to a Worker they are references. */

interface SharedArray<T> {
  readonly BYTES_PER_ELEMENT: number;
  new (buffer: SharedArrayBuffer): T;
}

export function shared<T>(Kind: SharedArray<T>, length: number): T {
  return new Kind(new SharedArrayBuffer(length * Kind.BYTES_PER_ELEMENT));
}

export function sharedFrom<T extends { set(values: ArrayLike<number>): void }>(
  Kind: SharedArray<T>,
  values: ArrayLike<number>,
): T {
  const array = shared(Kind, values.length);
  array.set(values);
  return array;
}
