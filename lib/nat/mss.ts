import { adjustFull, difference16 } from '../wire/checksum.js';
import { dataOffset, TCP_CHECKSUM, TCP_HEADER_BYTES } from '../wire/tcp.js';

const END_OF_OPTIONS = 0;
const NO_OPERATION = 1;
const MSS = 2;
const MSS_BYTES = 4;

/**
 * Lowers what the SYN or SYN-ACK at `l4` says its sender takes in one segment (RFC 9293 3.7.1) to `limit`, in every MSS option there
 * is, since receivers go by the last; never raises it, and adds none. Options are read until one contradicts its length.
 *
 * @param partial the checksum is in partial form, which does not cover options
 */
export function clampMss(view: DataView, bytes: Uint8Array, l4: number, limit: number, partial: boolean): void {
  const end = l4 + dataOffset(bytes, l4);
  for (let at = l4 + TCP_HEADER_BYTES; at < end; ) {
    const kind = bytes[at]!;
    if (kind === END_OF_OPTIONS) return;
    if (kind === NO_OPERATION) {
      at++;
      continue;
    }
    if (at + 1 >= end) return;
    const length = bytes[at + 1]!;
    if (length < 2 || at + length > end) return;
    if (kind === MSS && length === MSS_BYTES && view.getUint16(at + 2) > limit) {
      const before = view.getUint16(at + 2);
      view.setUint16(at + 2, limit);
      if (!partial) {
        // At an odd offset the two bytes belong to two words of the sum, which sees them exchanged.
        const isOdd = ((at - l4) & 1) !== 0;
        const difference = isOdd ? difference16(swap(before), swap(limit)) : difference16(before, limit);
        adjustFull(bytes, l4 + TCP_CHECKSUM, difference);
      }
    }
    at += length;
  }
}

function swap(word: number): number {
  return ((word << 8) | (word >>> 8)) & 0xffff;
}
