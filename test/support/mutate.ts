import { below, type Random } from '../../lib/base/random.js';
import type { MemoryPacket } from '../../lib/io/memory-device.js';

/** Flips bits, overwrites bytes, cuts or pads; and half the time mends the header checksum, to get past the first gate. */
export function mutate({ bytes, vnet, tunnel }: MemoryPacket, random: Random): MemoryPacket {
  let copy = bytes.slice();
  for (let changes = 1 + below(random, 3); changes > 0; changes--) {
    // Most of what matters is in the headers.
    const at = below(random, below(random, 4) === 0 ? copy.length : Math.min(copy.length, 64));
    switch (below(random, 5)) {
      case 0:
        copy[at]! ^= 1 << below(random, 8);
        break;
      case 1:
        copy[at] = random() & 255;
        break;
      case 2:
        copy[at] = below(random, 2) === 0 ? 0 : 255;
        break;
      case 3:
        copy = copy.slice(0, Math.max(1, copy.length - below(random, 64)));
        break;
      default: {
        const longer = new Uint8Array(copy.length + below(random, 32));
        longer.set(copy);
        copy = longer;
      }
    }
  }
  if (copy.length >= 20 && below(random, 2) === 0) mendHeader(copy);
  return { bytes: copy, ...(vnet ? { vnet } : {}), ...(tunnel ? { tunnel } : {}) };
}

function mendHeader(bytes: Uint8Array): void {
  const header = Math.min((bytes[0]! & 15) * 4, bytes.length);
  bytes[10] = 0;
  bytes[11] = 0;
  let sum = 0;
  for (let i = 0; i + 1 < header; i += 2) sum += (bytes[i]! << 8) | bytes[i + 1]!;
  while (sum >>> 16) sum = (sum & 0xffff) + (sum >>> 16);
  bytes[10] = (~sum >>> 8) & 255;
  bytes[11] = ~sum & 255;
}
