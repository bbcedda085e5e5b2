import { WeirError } from '../base/errors.js';

/** Delivers the next bytes of a file into the given space and says how many; 0 at the end. May deliver less than fits. */
export type ReadBytes = (into: Uint8Array) => number;

const INITIAL_BYTES = 256 * 1024;

/**
 * A window that slides over a file of any size: `require(n)` makes the next n bytes readable at `bytes[at ...]`, `skip(n)`
 * leaves them behind. Memory is as large as the largest `require`.
 */
export class ByteWindow {
  bytes: Uint8Array = new Uint8Array(INITIAL_BYTES);
  view: DataView = new DataView(this.bytes.buffer);
  /** Where the next byte stands in `bytes`. */
  at = 0;

  readonly #name: string;
  readonly #read: ReadBytes;
  #end = 0;
  #consumed = 0;

  /** `name` is the file's, for messages. */
  constructor(read: ReadBytes, name: string) {
    this.#read = read;
    this.#name = name;
  }

  /** Offset in the file of the next byte. */
  get position(): number {
    return this.#consumed + this.at;
  }

  /** Readable bytes at `at`: grows with `require`. */
  get available(): number {
    return this.#end - this.at;
  }

  /** @returns whether the file has `count` more bytes; they are then readable. Moves `at`. */
  require(count: number): boolean {
    while (this.available < count) {
      if (this.at + count > this.bytes.length) this.#makeRoom(count);
      const got = this.#read(this.bytes.subarray(this.#end));
      if (got === 0) return false;
      this.#end += got;
    }
    return true;
  }

  /** Leaves bytes behind that `require` made readable. */
  skip(count: number): void {
    this.at += count;
  }

  /** What is wrong at an offset of the file. */
  error(position: number, problem: string): WeirError {
    return new WeirError(
      'CAPTURE_INVALID',
      `${this.#name}: at offset ${position}: ${problem}`,
      'A capture is a pcap or pcapng file, as tcpdump -w and Wireshark write it.',
    );
  }

  #makeRoom(count: number): void {
    const { bytes } = this;
    if (count > bytes.length) {
      this.bytes = new Uint8Array(count * 2);
      this.view = new DataView(this.bytes.buffer);
    }
    this.bytes.set(bytes.subarray(this.at, this.#end));
    this.#consumed += this.at;
    this.#end -= this.at;
    this.at = 0;
  }
}
