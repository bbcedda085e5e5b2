import { lookup } from '../balance/lookup.js';
import type { Snapshot } from './snapshot.js';

/** Whether what is sent to this address comes back to weir: it is a VIP or an snat address. */
export function isOwnAddress({ vipIndex, snatIndex }: Snapshot, address: number): boolean {
  return lookup(vipIndex, address, 0, 0) !== 0 || lookup(snatIndex, address, 0, 0) !== 0;
}
