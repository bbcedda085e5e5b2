import type { z } from 'zod';
import { allowedKeys, placesOf } from './schema-walk.js';
import { clip } from './text-forms.js';

/** One thing that is wrong, before it has a position. */
export interface Fault {
  readonly path: readonly PropertyKey[];
  readonly message: string;
  /** Where to point, if not at the value: at its key, since nobody wants the key at all; or at an offset into the text. */
  readonly at?: 'key' | number;
}

/** What zod found, in words an operator can act on; an issue about several unknown keys becomes several faults. */
export function faultsOf(error: z.ZodError, written: unknown): Fault[] {
  return error.issues.flatMap((issue): Fault[] => {
    if (issue.code !== 'unrecognized_keys') {
      return [{ path: issue.path, message: wordIssue(issue, valueAt(written, issue.path)) }];
    }
    return issue.keys.map((key) => ({
      path: [...issue.path, key],
      message: unknownKey(key, issue.path, written),
      at: 'key' as const,
    }));
  });
}

/** Messages of the schema's own checks stand; zod's are replaced, since they say what was expected by zod, not by weir. */
export const UNWORDED = '';

function wordIssue(issue: z.core.$ZodIssue, input: unknown): string {
  if (issue.message !== UNWORDED) return issue.message;
  if (input === undefined) return 'is missing';
  if (input === null) return 'is empty; give it a value or remove the key';
  switch (issue.code) {
    case 'invalid_type':
      return `must be ${EXPECTED[issue.expected] ?? issue.expected}, not ${kindOf(input)}`;
    case 'invalid_value':
      return `must be ${oneOf(issue.values.map(String))}${nearValue(input, issue.values)}`;
    case 'too_small':
      return `must be at least ${issue.minimum} (got ${clip(String(input))})`;
    case 'too_big':
      return issue.origin === 'array'
        ? `must have at most ${issue.maximum} items (has ${(input as unknown[]).length})`
        : `must be at most ${issue.maximum} (got ${clip(String(input))})`;
    case 'invalid_union':
      return `must be ${oneOf(['tcp', 'http', 'icmp'])}${nearValue(input, ['tcp', 'http', 'icmp'])}`;
    default:
      return 'is not valid';
  }
}

const EXPECTED: Readonly<Record<string, string>> = {
  string: 'text',
  number: 'a number',
  int: 'a whole number',
  boolean: 'true or false',
  array: 'a list',
  object: 'a map of keys and values',
};

function kindOf(value: unknown): string {
  if (Array.isArray(value)) return 'a list';
  if (typeof value === 'object') return 'a map';
  return typeof value === 'string' ? `the text "${clip(value)}"` : clip(String(value));
}

function oneOf(values: readonly string[]): string {
  if (values.length === 1) return values[0]!;
  return `${values.slice(0, -1).join(', ')} or ${values.at(-1)}`;
}

function nearValue(input: unknown, values: readonly unknown[]): string {
  if (typeof input !== 'string') return ` (got ${kindOf(input)})`;
  const near = nearest(input, values.map(String));
  return near === null ? ` (got "${clip(input)}")` : ` (got "${clip(input)}"; did you mean ${near}?)`;
}

function unknownKey(key: string, path: readonly PropertyKey[], written: unknown): string {
  const allowed = allowedKeys(path);
  if (allowed.includes(key)) {
    const type = (valueAt(written, path) as { type?: unknown }).type;
    return `is not a key of type ${String(type)}`;
  }
  const near = nearest(key, allowed);
  if (near !== null) return `is not a known key; did you mean \`${near}\`?`;
  const places = placesOf(key);
  if (places.length === 1) return `is not a known key here; it belongs ${placeName(places[0]!)}`;
  return `is not a known key; here are known: ${allowed.join(', ')}`;
}

function placeName(place: string): string {
  return place === '' ? 'at the top of the file' : `under \`${place}\``;
}

/** The candidate that a slip of one or two keys away would have been, or `null`. */
function nearest(text: string, candidates: readonly string[]): string | null {
  const allowance = text.length <= 4 ? 1 : 2;
  let best: string | null = null;
  let bestDistance = allowance + 1;
  for (const candidate of candidates) {
    if (Math.abs(candidate.length - text.length) > allowance) continue;
    const distance = editDistance(text.toLowerCase(), candidate.toLowerCase());
    if (distance < bestDistance) {
      best = candidate;
      bestDistance = distance;
    }
  }
  return best ?? withoutSeparators(text, candidates);
}

/** `client_ip` or `drain-timeout`, as other tools spell keys. */
function withoutSeparators(text: string, candidates: readonly string[]): string | null {
  const bare = (name: string): string => name.replace(/[-_\s]/g, '').toLowerCase();
  return candidates.find((candidate) => bare(candidate) === bare(text)) ?? null;
}

/** Insertions, deletions, replacements and swaps of neighbours (optimal string alignment). */
function editDistance(a: string, b: string): number {
  let beforeLast: number[] = [];
  let last = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i++) {
    const row = [i];
    for (let j = 1; j <= b.length; j++) {
      const same = a[i - 1] === b[j - 1];
      let cost = Math.min(last[j]! + 1, row[j - 1]! + 1, last[j - 1]! + (same ? 0 : 1));
      if (i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1])
        cost = Math.min(cost, beforeLast[j - 2]! + 1);
      row.push(cost);
    }
    beforeLast = last;
    last = row;
  }
  return last[b.length]!;
}

/** What stands at a path of the value as written; `undefined` when nothing does. */
function valueAt(written: unknown, path: readonly PropertyKey[]): unknown {
  let value = written;
  for (const step of path) {
    if (typeof value !== 'object' || value === null || !Object.hasOwn(value, step)) return undefined;
    value = (value as Record<PropertyKey, unknown>)[step];
  }
  return value;
}
