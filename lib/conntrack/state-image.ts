import { hashString } from '../base/hash.js';
import * as memory from './memory.js';
import { formatTable, randomSecret, type TableMemory, tableBytes } from './memory.js';
import * as record from './record.js';

/**
 * Both flow tables in one piece of memory that outlives the process: a file, mapped shared.
 *
 *     | page: what the rest is | table of TCP | table of everything else |
 *
 *     word 0 MAGIC  1 VERSION  2 LAYOUT  3 TCP_ENTRIES  4 ANY_ENTRIES  5-8 BOOT_ID        the rest of the page: zero
 *
 * MAGIC is stored last: a file whose writer was killed while it made it is none. LAYOUT is a hash of the layout's own
 * constants, so that nobody can change them and forget to say so. The boot is named because times in records count from it.
 */

/** How many records each of the tables has room for. */
export interface ImageSizes {
  readonly tcpEntries: number;
  readonly anyEntries: number;
}

/** As much as `imageMistake` wants to see. */
export const IMAGE_HEADER_BYTES = 4096;

const PAGE_BYTES = 4096;

const MAGIC = 0;
const VERSION = 1;
const LAYOUT = 2;
const TCP_ENTRIES = 3;
const ANY_ENTRIES = 4;
const BOOT_ID = 5;

const MAGIC_WORD = 0x46746357; // "WctF", little-endian
const VERSION_WORD = 1;
const LAYOUT_WORD = hashString(JSON.stringify([memory, record])) | 0;

export function imageBytes({ tcpEntries, anyEntries }: ImageSizes): number {
  return IMAGE_HEADER_BYTES + pages(tableBytes(tcpEntries)) + pages(tableBytes(anyEntries));
}

/** Where the tables lie in an image. */
export function tablesOf(
  buffer: ArrayBuffer,
  { tcpEntries, anyEntries }: ImageSizes,
): { readonly tcp: TableMemory; readonly any: TableMemory } {
  const second = IMAGE_HEADER_BYTES + pages(tableBytes(tcpEntries));
  return {
    tcp: { buffer, byteOffset: IMAGE_HEADER_BYTES, capacity: tcpEntries },
    any: { buffer, byteOffset: second, capacity: anyEntries },
  };
}

/** Makes an image with two empty tables of zeroed memory. @param bootId as `bootIdWords` gives it */
export function formatImage(buffer: ArrayBuffer, sizes: ImageSizes, bootId: Int32Array): void {
  const { tcp, any } = tablesOf(buffer, sizes);
  formatTable(tcp, randomSecret());
  formatTable(any, randomSecret());
  const header = new Int32Array(buffer, 0, IMAGE_HEADER_BYTES / 4);
  header[VERSION] = VERSION_WORD;
  header[LAYOUT] = LAYOUT_WORD;
  header[TCP_ENTRIES] = sizes.tcpEntries;
  header[ANY_ENTRIES] = sizes.anyEntries;
  header.set(bootId, BOOT_ID);
  Atomics.store(header, MAGIC, MAGIC_WORD);
}

/** Why a file is no image to go on with. */
export interface ImageMistake {
  /** As the end of a sentence that begins with the file's name. */
  readonly text: string;
  /** It may be somebody else's, and worth keeping. */
  readonly isForeign: boolean;
}

/**
 * Judges a file by its first page and its size; what the tables hold is judged record by record (restore.ts).
 *
 * @param header the first IMAGE_HEADER_BYTES, or what there is of them
 * @returns undefined for one that this build, on this boot, can go on with
 */
export function imageMistake(
  header: Uint8Array,
  fileBytes: number,
  sizes: ImageSizes,
  bootId: Int32Array,
): ImageMistake | undefined {
  if (header.every((byte) => byte === 0)) return { text: 'was never finished', isForeign: false };
  const ours = (text: string): ImageMistake => ({ text, isForeign: false });
  const words = new Int32Array(IMAGE_HEADER_BYTES / 4);
  new Uint8Array(words.buffer).set(header.subarray(0, IMAGE_HEADER_BYTES));
  if (words[MAGIC] !== MAGIC_WORD) {
    const isUnfinished = words[MAGIC] === 0 && words[VERSION] === VERSION_WORD && words[LAYOUT] === LAYOUT_WORD;
    if (isUnfinished) return ours('was never finished');
    return { text: 'is no conntrack state file', isForeign: true };
  }
  if (words[VERSION] !== VERSION_WORD || words[LAYOUT] !== LAYOUT_WORD) return ours('is of another version of weir');
  if (bootId.some((word, i) => words[BOOT_ID + i] !== word)) return ours('is from before the last boot');
  const held = { tcpEntries: words[TCP_ENTRIES]!, anyEntries: words[ANY_ENTRIES]! };
  if (held.tcpEntries !== sizes.tcpEntries || held.anyEntries !== sizes.anyEntries) {
    return ours(
      `has room for ${held.tcpEntries} TCP and ${held.anyEntries} other connections, not for ${sizes.tcpEntries} and ${sizes.anyEntries}`,
    );
  }
  const wanted = imageBytes(sizes);
  if (fileBytes < wanted) return ours(`is cut short: ${fileBytes} of ${wanted} bytes`);
  if (fileBytes > wanted) return ours(`is too long: ${fileBytes} instead of ${wanted} bytes`);
  return undefined;
}

/** The kernel's boot id (a UUID, as /proc/sys/kernel/random/boot_id says it) as four words. */
export function bootIdWords(text: string): Int32Array {
  const digits = text.replaceAll('-', '').trim();
  return Int32Array.from([0, 8, 16, 24], (at) => Number.parseInt(digits.slice(at, at + 8), 16) | 0);
}

function pages(bytes: number): number {
  return Math.ceil(bytes / PAGE_BYTES) * PAGE_BYTES;
}
