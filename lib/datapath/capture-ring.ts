/**
 * Packets on their way from the data path to the main thread while somebody captures: a ring of bytes in shared memory, with one
 * writer, one reader, and entries as long as their packets are.
 *
 *     | header 64 B | entries, each a multiple of 8 bytes ... |      header: word 0 WRITTEN, 1 READ (both in units of 8 bytes,
 *                                                                           mod 2^32), 2 LOST
 *     entry: ENTRY_WORDS words | bytes of the packet, padded
 *
 * The writer waits for nobody: an entry for which there is no room is counted in LOST, and nothing that was written is touched. It
 * may be written when READ has come past its place; it may be read when WRITTEN has. Entries do not wrap around: what is left at the
 * end is skipped, which its first word says.
 *
 * Rejected: the ring of conntrack/events.ts, whose entries are all as long as a record, which lets any number of readers watch one
 * writer, and which overwrites what was not read. Here the longest entry is a thousand times as long as the shortest, there is one
 * reader, and what it has not read is what it came for.
 */

/** Words of an entry. */
const UNITS = 0;
export const KIND = 1;
/** Which packet in an entry belongs to: numbers of one capture, 1 and up; 0: none. */
export const PACKET_NUMBER = 2;
export const CAPTURED_BYTES = 3;
export const ORIGINAL_BYTES = 4;
/** Of the packet in: verdict | reason << 8 | direction << 16 | state << 24. */
export const OUTCOME = 5;
export const OUTCOME_SERVICE = 6;
export const OUTCOME_BACKEND = 7;
/** A double: ms of the data path's clock. */
const AT = 8;
/** GSO type | GSO size << 8. */
export const GSO = 10;
/** Of a datagram from a tunnel: the address it came from. */
export const PEER = 11;
/** ENTRY_* bits. */
export const ENTRY_FLAGS = 12;
const ENTRY_WORDS = 14;

/** KIND: a packet as it came in; as it went out; a datagram's payload as it came out of a tunnel's socket. */
export const ENTRY_IN = 1;
export const ENTRY_OUT = 2;
export const ENTRY_DATAGRAM = 3;
/** Nothing: the rest of the ring up to its end. */
const ENTRY_SKIP = 4;

/** ENTRY_FLAGS: a flow begins with it; its L4 checksum is left to whoever sends it. */
export const ENTRY_NEW = 1;
export const ENTRY_PARTIAL = 2;

const HEADER_BYTES = 64;
const WRITTEN = 0;
const READ = 1;
const LOST = 2;

/** Memory of an empty ring. @param bytes a power of two */
export function allocateCaptureRing(bytes: number): SharedArrayBuffer {
  return new SharedArrayBuffer(HEADER_BYTES + bytes);
}

/** Makes a ring as good as new that neither end uses. */
export function clearCaptureRing(memory: SharedArrayBuffer): void {
  new Int32Array(memory, 0, HEADER_BYTES / 4).fill(0);
}

/** Both ends' view of a ring. */
class CaptureRing {
  protected readonly header: Int32Array;
  protected readonly words: Int32Array;
  protected readonly doubles: Float64Array;
  protected readonly bytes: Uint8Array;
  /** In units of 8 bytes. */
  protected readonly size: number;

  constructor(memory: SharedArrayBuffer) {
    this.header = new Int32Array(memory, 0, HEADER_BYTES / 4);
    this.words = new Int32Array(memory, HEADER_BYTES);
    this.doubles = new Float64Array(memory, HEADER_BYTES);
    this.bytes = new Uint8Array(memory, HEADER_BYTES);
    this.size = this.bytes.length / 8;
  }
}

/** The data path's end. */
export class CaptureRingWriter extends CaptureRing {
  /** The words of the entry to be written next, but for its lengths and time. */
  readonly entry = new Int32Array(ENTRY_WORDS);

  /** Writes `entry` with `length` bytes at `at` of `from`, or counts it as lost. */
  write(from: Uint8Array, at: number, length: number, nowMs: number): void {
    const units = (ENTRY_WORDS * 4 + length + 7) >>> 3;
    const { header, size } = this;
    const written = header[WRITTEN]! >>> 0;
    let place = written & (size - 1);
    const skipped = place + units > size ? size - place : 0;
    const taken = (written - Atomics.load(header, READ)) >>> 0;
    if (taken + skipped + units > size) {
      this.lose(1);
      return;
    }
    if (skipped > 0) {
      this.words[place * 2 + UNITS] = skipped;
      this.words[place * 2 + KIND] = ENTRY_SKIP;
      place = 0;
    }
    const word = place * 2;
    const { entry, words, bytes } = this;
    for (let i = 0; i < ENTRY_WORDS; i++) words[word + i] = entry[i]!;
    words[word + UNITS] = units;
    words[word + CAPTURED_BYTES] = length;
    this.doubles[place + AT / 2] = nowMs;
    bytes.set(from.subarray(at, at + length), place * 8 + ENTRY_WORDS * 4);
    Atomics.store(header, WRITTEN, (written + skipped + units) | 0);
  }

  lose(count: number): void {
    Atomics.add(this.header, LOST, count);
  }
}

/** The main thread's end. */
export class CaptureRingReader extends CaptureRing {
  /** The entry last read, whole; its packet, valid until the next call; and when it was. */
  readonly entry = new Int32Array(ENTRY_WORDS);
  packet: Uint8Array = new Uint8Array(0);
  atMs = 0;
  #unread = 0;

  /** Entries there was no room for, so far. */
  get lost(): number {
    return Atomics.load(this.header, LOST);
  }

  /** Reads the next entry, and gives the place of the last one back. @returns whether there was one */
  next(): boolean {
    const { header, words, size, entry } = this;
    for (;;) {
      const read = (Atomics.load(header, READ) + this.#unread) | 0;
      Atomics.store(header, READ, read);
      this.#unread = 0;
      if (Atomics.load(header, WRITTEN) === read) return false;
      const place = (read >>> 0) & (size - 1);
      this.#unread = words[place * 2 + UNITS]!;
      if (words[place * 2 + KIND] === ENTRY_SKIP) continue;
      for (let i = 0; i < ENTRY_WORDS; i++) entry[i] = words[place * 2 + i]!;
      this.atMs = this.doubles[place + AT / 2]!;
      const from = place * 8 + ENTRY_WORDS * 4;
      this.packet = this.bytes.subarray(from, from + entry[CAPTURED_BYTES]!);
      return true;
    }
  }
}
