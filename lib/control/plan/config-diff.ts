import type { BackendConfig, Config, ServiceConfig } from '../../config/config.js';
import { formatDuration } from '../../config/duration.js';
import type { BackendPlan, Change, FieldChange } from './plan-view.js';

/**
 * Two configurations compared, by the keys and in the words of the file. Nothing here knows what keys there are: whatever differs is
 * told, and what a file may leave out is compared with its default filled in. Order, comments and other ways to write a value make no
 * difference.
 */

/** A service of one of them, or of both; told by address, port and protocol. */
export interface ServicePair {
  readonly before: ServiceConfig | undefined;
  readonly after: ServiceConfig | undefined;
  readonly change: Change;
  readonly fields: readonly FieldChange[];
  readonly backends: readonly BackendPlan[];
}

/** What is different outside `services`. */
export function compareSettings(before: Config, after: Config): FieldChange[] {
  return compareLeaves(leavesOf(settingsOf(before)), leavesOf(settingsOf(after)));
}

/** All services: those of `after` in its order, then those that only `before` has. */
export function pairServices(before: Config, after: Config): ServicePair[] {
  const pairs = pair(before.services, after.services, (each) => `${each.address.text}:${each.port}/${each.protocol}`);
  return pairs.map(([old, next]) => {
    const fields = old !== undefined && next !== undefined ? compareLeaves(fieldsOf(old), fieldsOf(next)) : [];
    const backends = pairBackends(old, next);
    const isChanged = fields.length > 0 || backends.length > 0;
    return { before: old, after: next, change: changeOf(old, next, isChanged), fields, backends };
  });
}

/** The backends that are not the same in both. */
function pairBackends(before: ServiceConfig | undefined, after: ServiceConfig | undefined): BackendPlan[] {
  const pairs = pair(before?.backends ?? [], after?.backends ?? [], (each) => `${each.address.text}:${each.port}`);
  return pairs.flatMap(([old, next]) => {
    const { address, port } = (next ?? old)!;
    const fields = old !== undefined && next !== undefined ? compareLeaves(membersOf(old), membersOf(next)) : [];
    const change = changeOf(old, next, fields.length > 0);
    return change === 'same' ? [] : [{ name: (next ?? old)!.name, address: address.text, port, change, fields }];
  });
}

function changeOf(before: unknown, after: unknown, isChanged: boolean): Change {
  if (before === undefined) return 'added';
  if (after === undefined) return 'removed';
  return isChanged ? 'changed' : 'same';
}

function pair<T>(
  before: readonly T[],
  after: readonly T[],
  keyOf: (each: T) => string,
): [T | undefined, T | undefined][] {
  const old = new Map(before.map((each) => [keyOf(each), each]));
  const pairs = after.map((each): [T | undefined, T | undefined] => [old.get(keyOf(each)), each]);
  const kept = new Set(after.map(keyOf));
  return [
    ...pairs,
    ...before.filter((each) => !kept.has(keyOf(each))).map((each): [T, undefined] => [each, undefined]),
  ];
}

/** Where a value of the used form stands in the file under another name. */
const NAMES: Readonly<Record<string, string>> = {
  'conntrack.gcInterval': 'conntrack.gc.interval',
  affinity: 'affinity.clientIp',
  drain: 'drainTimeout',
};

/** What the absence of a value is called in the file; elsewhere, none. */
const ABSENT: Readonly<Record<string, string>> = { 'conntrack.gc.interval': 'auto' };

/** What says nothing, though it is a value. */
const SAYS_NOTHING: ReadonlySet<string> = new Set(['affinity.clientIp 0s']);

function settingsOf({ services: _, snat, admin, ...rest }: Config): object {
  const { addresses, firstPort, lastPort } = snat;
  const listen = admin.listen === null ? 'off' : `${admin.listen.host}:${admin.listen.port}`;
  return { ...rest, snat: { addresses, ports: `${firstPort}-${lastPort}` }, admin: { ...admin, listen } };
}

/** What makes its identity is left out, and so is what has its own list. */
function fieldsOf({
  address: _,
  port: __,
  protocol: ___,
  protocolNumber: ____,
  backends: _____,
  ...rest
}: ServiceConfig) {
  return leavesOf(rest);
}

function membersOf({ address: _, port: __, ...rest }: BackendConfig) {
  return leavesOf(rest);
}

type Leaves = ReadonlyMap<string, string | readonly string[]>;

function leavesOf(value: object): Leaves {
  const leaves = new Map<string, string | readonly string[]>();
  collect(value, '', false, leaves);
  return leaves;
}

/** @param isMs the value, or what is in it, is in milliseconds */
function collect(value: unknown, key: string, isMs: boolean, into: Map<string, string | readonly string[]>): void {
  const name = NAMES[key] ?? key;
  const isMap = typeof value === 'object' && value !== null && !('text' in value);
  if (Array.isArray(value))
    into.set(
      name,
      value.map((each) => textOf(each, isMs)),
    );
  else if (!isMap) into.set(name, value === null ? (ABSENT[name] ?? NONE) : textOf(value, isMs));
  else {
    for (const [step, part] of Object.entries(value)) {
      const isPartMs = step.endsWith('Ms');
      const place = isPartMs ? step.slice(0, -2) : step;
      collect(part, key === '' ? place : `${key}.${place}`, isMs || isPartMs, into);
    }
  }
}

function textOf(value: unknown, isMs: boolean): string {
  if (typeof value === 'object' && value !== null && 'text' in value) return String(value.text);
  return isMs ? formatDuration(value as number) : String(value);
}

const NONE = 'none';

function compareLeaves(before: Leaves, after: Leaves): FieldChange[] {
  return [...new Set([...before.keys(), ...after.keys()])].flatMap((key) =>
    compareLeaf(key, before.get(key), after.get(key)),
  );
}

function compareLeaf(key: string, before: Leaf, after: Leaf): FieldChange[] {
  if (typeof before === 'object' || typeof after === 'object') {
    const [old, next] = [new Set(before), new Set(after)];
    const added = [...next].filter((each) => !old.has(each));
    const removed = [...old].filter((each) => !next.has(each));
    if (added.length + removed.length === 0) return [];
    return [{ key, before: sayCount(old), after: sayCount(next), added, removed }];
  }
  const [old, next] = [before, after].map((text) =>
    text === undefined || SAYS_NOTHING.has(`${key} ${text}`) ? NONE : text,
  ) as [string, string];
  return old === next ? [] : [{ key, before: old, after: next }];
}

type Leaf = string | readonly string[] | undefined;

function sayCount({ size }: ReadonlySet<string>): string {
  return size === 0 ? NONE : String(size);
}
