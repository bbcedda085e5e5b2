import { ByteWindow, type ReadBytes } from './byte-window.js';
import { type CaptureReader, LINK_RAW, MAX_CAPTURED_BYTES, newPacket } from './capture.js';
import { BLOCK_SECTION, PcapngReader } from './pcapng.js';

/**
 * Capture files: pcap (draft-ietf-opsawg-pcap) here, pcapng in pcapng.ts, both behind `openCapture`; and a pcap writer.
 * Files are read in one pass through a sliding window: size does not matter, and neither does whether they can seek.
 *
 *     file:   magic u32 | major u16 | minor u16 | zone i32 | sigfigs u32 | snaplen u32 | link type u16, FCS u16
 *     record: seconds u32 | fraction u32 | captured length u32 | original length u32 | bytes
 *
 * Either byte order; the magic says which, and whether fractions are microseconds or nanoseconds.
 */

const MAGIC_MICROSECONDS = 0xa1b2c3d4;
const MAGIC_NANOSECONDS = 0xa1b23c4d;
const FILE_HEADER_BYTES = 24;
const RECORD_HEADER_BYTES = 16;

/**
 * Looks at the first bytes and returns the reader for them; `name` is the file's, for messages.
 *
 * @throws WeirError CAPTURE_INVALID when it is no capture, or one in a dialect that is not read.
 */
export function openCapture(read: ReadBytes, name = 'capture'): CaptureReader {
  const window = new ByteWindow(read, name);
  if (!window.require(4))
    throw window.error(0, window.available === 0 ? 'the file is empty' : 'the file has less than 4 bytes');
  const magic = window.view.getUint32(window.at);
  if (magic === BLOCK_SECTION) return new PcapngReader(window);
  for (const littleEndian of [false, true]) {
    const ordered = window.view.getUint32(window.at, littleEndian);
    if (ordered === MAGIC_MICROSECONDS || ordered === MAGIC_NANOSECONDS) {
      return new PcapReader(window, littleEndian, ordered === MAGIC_NANOSECONDS);
    }
  }
  throw window.error(0, `the file is neither pcap nor pcapng: it begins with ${foreignName(magic)}`);
}

class PcapReader implements CaptureReader {
  readonly packet = newPacket();
  readonly nanosecond: boolean;
  readonly #window: ByteWindow;
  readonly #littleEndian: boolean;

  constructor(window: ByteWindow, littleEndian: boolean, nanosecond: boolean) {
    this.#window = window;
    this.#littleEndian = littleEndian;
    this.nanosecond = nanosecond;
    if (!window.require(FILE_HEADER_BYTES)) throw window.error(window.position, 'the file header is cut short');
    const { view, at } = window;
    const major = view.getUint16(at + 4, littleEndian);
    if (major !== 2) throw window.error(4, `pcap version ${major} is not 2`);
    // The upper half of the word tells of a frame check sequence, which IP's own length cuts off.
    this.packet.linkType = view.getUint32(at + 20, littleEndian) & 0xffff;
    window.skip(FILE_HEADER_BYTES);
  }

  next(): boolean {
    const window = this.#window;
    const { packet } = this;
    const start = window.position;
    if (!window.require(RECORD_HEADER_BYTES)) {
      if (window.available === 0) return false;
      throw window.error(start, `the last record is cut short: ${window.available} of its 16 header bytes are there`);
    }
    const { view, at } = window;
    const length = view.getUint32(at + 8, this.#littleEndian);
    if (length > MAX_CAPTURED_BYTES) throw window.error(start + 8, `a record of ${length} bytes is not credible`);
    const fraction = view.getUint32(at + 4, this.#littleEndian);
    const nanoseconds = this.nanosecond ? fraction : fraction * 1000;
    packet.seconds = view.getUint32(at, this.#littleEndian) + Math.floor(nanoseconds / 1e9);
    packet.nanoseconds = nanoseconds % 1e9;
    if (!window.require(RECORD_HEADER_BYTES + length)) {
      const there = window.available - RECORD_HEADER_BYTES;
      throw window.error(start, `the last record is cut short: ${there} of its ${length} bytes are there`);
    }
    packet.bytes = window.bytes;
    packet.offset = window.at + RECORD_HEADER_BYTES;
    packet.length = length;
    window.skip(RECORD_HEADER_BYTES + length);
    return true;
  }
}

const WRITE_BUFFER_BYTES = 256 * 1024;

/**
 * Writes a little-endian pcap file of raw IP packets (link type 101). Times are in microseconds, the form every tool reads,
 * or in nanoseconds for those whose source is finer, so that nothing is lost.
 */
export class PcapWriter {
  readonly #write: (bytes: Uint8Array) => void;
  readonly #nanosecond: boolean;
  readonly #buffer = new Uint8Array(WRITE_BUFFER_BYTES);
  readonly #view = new DataView(this.#buffer.buffer);
  #used = 0;

  /** `write` must be done with the bytes when it returns: they are a buffer that is filled again. */
  constructor(write: (bytes: Uint8Array) => void, nanosecond = false) {
    this.#write = write;
    this.#nanosecond = nanosecond;
    const view = this.#view;
    view.setUint32(0, nanosecond ? MAGIC_NANOSECONDS : MAGIC_MICROSECONDS, true);
    view.setUint16(4, 2, true);
    view.setUint16(6, 4, true);
    view.setUint32(16, 262144, true);
    view.setUint32(20, LINK_RAW, true);
    this.#used = FILE_HEADER_BYTES;
  }

  /** Appends `length` bytes at `offset` with a time since the epoch. At most MAX_PACKET_BYTES + 62, an encapsulated one. */
  packet(bytes: Uint8Array, offset: number, length: number, seconds: number, nanoseconds: number): void {
    if (this.#used + RECORD_HEADER_BYTES + length > WRITE_BUFFER_BYTES) this.flush();
    const view = this.#view;
    const at = this.#used;
    view.setUint32(at, seconds, true);
    view.setUint32(at + 4, this.#nanosecond ? nanoseconds : Math.floor(nanoseconds / 1000), true);
    view.setUint32(at + 8, length, true);
    view.setUint32(at + 12, length, true);
    this.#buffer.set(bytes.subarray(offset, offset + length), at + RECORD_HEADER_BYTES);
    this.#used = at + RECORD_HEADER_BYTES + length;
  }

  /** Hands over what is buffered. Call it at the end. */
  flush(): void {
    if (this.#used > 0) this.#write(this.#buffer.subarray(0, this.#used));
    this.#used = 0;
  }
}

/** What a foreign file most likely is, from its first four bytes. */
function foreignName(magic: number): string {
  if (magic >>> 16 === 0x1f8b) return 'the mark of gzip; decompress it first';
  if (magic === 0x28b52ffd) return 'the mark of zstd; decompress it first';
  if (magic === 0xa1b2cd34 || magic === 0x34cdb2a1)
    return 'the mark of modified pcap (Kuznetzov); convert it with editcap';
  return `0x${magic.toString(16).padStart(8, '0')}`;
}
