import * as S from '../../datapath/snapshot.js';
import type { Compiled } from '../compile.js';
import type { SlotChange } from './plan-view.js';

/**
 * The slots of a service's Maglev table that change owner between two snapshots. Where the hash, and so the slot a client comes
 * to, is another as well, both backends of a client are independent draws from the two tables, and what is counted is the share of
 * clients that get two different ones.
 */
export function compareSlots(before: Compiled, after: Compiled, service: number): SlotChange | null {
  const row = service * S.SERVICE_WORDS;
  const isMaglev = ({ snapshot: { services } }: Compiled): boolean =>
    row < services.length && (services[row + S.SERVICE_FLAGS]! & S.SERVICE_MAGLEV) !== 0;
  if (!isMaglev(before) || !isMaglev(after)) return null;
  const [from, to] = [tableOf(before, row), tableOf(after, row)];
  const size = to.size === 0 ? from.size : to.size;
  if (size === 0) return null;
  if (from.size === 0 || to.size === 0) return { size, changed: size, share: 1 };
  if (!isSameHash(before.snapshot, after.snapshot, row) || from.size !== to.size) return betweenDraws(from, to);
  if (from.key !== undefined && from.key === to.key) return { size, changed: 0, share: 0 };
  let changed = 0;
  for (let slot = 0; slot < size; slot++) if (from.ownerOf(slot) !== to.ownerOf(slot)) changed++;
  return { size, changed, share: changed / size };
}

interface Table {
  /** 0: nobody takes new flows. */
  readonly size: number;
  /** All that it was made from. */
  readonly key: string | undefined;
  /** The id of a slot's backend. */
  ownerOf(slot: number): number;
}

function tableOf({ snapshot, tables }: Compiled, row: number): Table {
  const { services, choices, maglev } = snapshot;
  const size = services[row + S.MAGLEV_SIZE]!;
  const at = services[row + S.MAGLEV_AT]!;
  const first = services[row + S.CHOICES_AT]!;
  const keys = keysOf(tables.at);
  return { size, key: keys.get(at), ownerOf: (slot) => choices[(first + maglev[at + slot]!) * 2]! };
}

/** By where a table begins. */
const inverted = new WeakMap<ReadonlyMap<string, number>, Map<number, string>>();

function keysOf(tables: ReadonlyMap<string, number>): Map<number, string> {
  let keys = inverted.get(tables);
  if (keys === undefined) {
    keys = new Map([...tables].map(([key, at]) => [at, key]));
    inverted.set(tables, keys);
  }
  return keys;
}

function isSameHash(before: S.Snapshot, after: S.Snapshot, row: number): boolean {
  const ignoresPort = ({ services }: S.Snapshot): boolean => services[row + S.AFFINITY_SECONDS] !== 0;
  const isSameKey = before.hashKey0 === after.hashKey0 && before.hashKey1 === after.hashKey1;
  return isSameKey && ignoresPort(before) === ignoresPort(after);
}

function betweenDraws(from: Table, to: Table): SlotChange {
  const [old, next] = [sharesOf(from), sharesOf(to)];
  let same = 0;
  for (const [backend, share] of next) same += share * (old.get(backend) ?? 0);
  const share = 1 - same;
  return { size: to.size, changed: Math.round(share * to.size), share };
}

function sharesOf({ size, ownerOf }: Table): Map<number, number> {
  const shares = new Map<number, number>();
  for (let slot = 0; slot < size; slot++) {
    const owner = ownerOf(slot);
    shares.set(owner, (shares.get(owner) ?? 0) + 1 / size);
  }
  return shares;
}
