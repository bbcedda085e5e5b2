import { adjustFull, difference16 } from '../wire/checksum.js';
import { checksumOffset, tos } from '../wire/ipv4.js';

const ECN_MASK = 3;
const NOT_ECT = 0;
const ECT_1 = 1;
const CONGESTED = 3;

/**
 * Carries a congestion mark of the way through the tunnel over to the packet at `at` that came out of it (RFC 6040 4.2).
 *
 * @param outerTos of the header it came with
 * @returns false when the packet must be dropped: it is marked, and its sender does not know of marks.
 */
export function mergeEcn(view: DataView, bytes: Uint8Array, at: number, outerTos: number): boolean {
  const outer = outerTos & ECN_MASK;
  const inner = tos(bytes, at) & ECN_MASK;
  if (inner === NOT_ECT) return outer !== CONGESTED;
  // ECT(1) is the stronger mark of the two that are none, where both ends say so.
  if (inner === CONGESTED || (outer !== CONGESTED && outer !== ECT_1)) return true;
  const before = view.getUint16(at);
  const after = (before & ~ECN_MASK) | outer;
  view.setUint16(at, after);
  adjustFull(bytes, checksumOffset(at), difference16(before, after));
  return true;
}
