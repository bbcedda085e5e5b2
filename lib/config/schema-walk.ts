import type { z } from 'zod';
import { configSchema } from './schema.js';

/** What a schema says of one key, its wrappers (default, optional) taken off. */
export interface KeySchema {
  readonly schema: z.core.$ZodType;
  readonly optional: boolean;
  /** As it would be written; `undefined`: none. */
  readonly defaultValue: unknown;
  readonly description: string;
}

/** Takes off what `.default()`, `.prefault()` and `.optional()` put around a schema. */
export function unwrap(schema: z.core.$ZodType): KeySchema {
  let inner = schema as z.core.$ZodTypes;
  let optional = false;
  let defaultValue: unknown;
  let description = descriptionOf(inner);
  for (;;) {
    const { def } = inner._zod;
    if (def.type !== 'default' && def.type !== 'prefault' && def.type !== 'optional') break;
    if (def.type === 'optional') optional = true;
    else defaultValue = def.defaultValue;
    inner = def.innerType as z.core.$ZodTypes;
    description ||= descriptionOf(inner);
  }
  return { schema: inner, optional, defaultValue, description };
}

function descriptionOf(schema: z.core.$ZodType): string {
  return (schema as z.ZodType).description ?? '';
}

/** The keys of an object schema, `null` of any other. */
export function keysOf(schema: z.core.$ZodType): Readonly<Record<string, z.core.$ZodType>> | null {
  const { def } = (schema as z.core.$ZodTypes)._zod;
  return def.type === 'object' ? def.shape : null;
}

/** The schemas a discriminated union chooses from, `null` of any other. */
export function optionsOf(schema: z.core.$ZodType): readonly z.core.$ZodType[] | null {
  const { def } = (schema as z.core.$ZodTypes)._zod;
  return def.type === 'union' ? def.options : null;
}

/** The schema of a list's items, `null` of any other. */
export function itemOf(schema: z.core.$ZodType): z.core.$ZodType | null {
  const { def } = (schema as z.core.$ZodTypes)._zod;
  return def.type === 'array' ? def.element : null;
}

/** Every key the object at `path` may have, under any of its types. Empty when `path` leads to no object. */
export function allowedKeys(path: readonly PropertyKey[]): readonly string[] {
  let candidates: z.core.$ZodType[] = [configSchema];
  for (const step of path) {
    candidates = candidates.flatMap((schema) => {
      const next = typeof step === 'number' ? itemOf(schema) : keysOf(schema)?.[String(step)];
      return next ? (optionsOf(unwrap(next).schema) ?? [unwrap(next).schema]) : [];
    });
  }
  return [...new Set(candidates.flatMap((schema) => Object.keys(keysOf(schema) ?? {})))];
}

/** The places, as `conntrack.timeouts` or `services[]`, of every object that has the key `name`; the file itself is ''. */
export function placesOf(name: string): readonly string[] {
  const places: string[] = [];
  const visit = (wrapped: z.core.$ZodType, place: string): void => {
    const { schema } = unwrap(wrapped);
    const item = itemOf(schema);
    if (item !== null) visit(item, `${place}[]`);
    for (const option of optionsOf(schema) ?? []) visit(option, place);
    const keys = keysOf(schema);
    if (keys === null) return;
    if (Object.hasOwn(keys, name) && !places.includes(place)) places.push(place);
    for (const key of Object.keys(keys)) visit(keys[key]!, place === '' ? key : `${place}.${key}`);
  };
  visit(configSchema, '');
  return places;
}
