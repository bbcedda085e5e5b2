import { z } from 'zod';
import { configSchema } from './schema.js';
import { itemOf, type KeySchema, keysOf, optionsOf, unwrap } from './schema-walk.js';

/**
 * docs/configuration.md, rendered from the schema: one table per map, every key with its form, default and meaning. What follows
 * the tables are the rules between values, which no schema shows.
 */
export function configReference(): string {
  const sections: string[] = [];
  renderMap(configSchema, '', sections);
  return `${[INTRODUCTION, ...sections, RULES].join('\n\n')}\n`;
}

const INTRODUCTION = `# Configuration

<!-- Generated from lib/config/schema.ts by lib/config/reference.ts; a test keeps it up to date. -->

One YAML document (JSON is YAML). Unknown keys are errors. \`weir check -c FILE\` lists all mistakes of a file at once, each as
\`file:line:column path: message\`. \`conf/weir.yaml\` is a commented example.

Durations are whole numbers with a unit: \`500ms\`, \`60s\`, \`5m\`, \`2h13m20s\`. Addresses are IPv4 in their canonical form, four plain
decimal numbers. Text that YAML would read as a number needs quotes. Anchors and aliases may be used, merge keys may not.`;

const RULES = `## Rules between values

- Names are unique: of services in the file, of backends in their service.
- Address, port and protocol of a service are unique in the file; address and port of a backend in its service.
- A VIP is not also a backend, a backend's node, an snat address or the tunnel's address. An snat address is not also a backend, a
  node or the tunnel's address. A gateway's \`tunnel.address\` is not the node of one of its dsr backends.
- Mode \`snat\` needs \`snat.addresses\`. Mode \`dsr\` and \`role: node\` need \`tunnel.address\`.
- A backend's \`node\` differs from its address in mode \`dsr\` only.
- A service with \`algorithm: maglev\` has at most \`maglev.tableSize\` backends; a hundredth of that keeps the shares within 1 %.
- No address may be unspecified, loopback, multicast, broadcast or reserved.`;

/** A section for the map at `place`, then one for each map below it. */
function renderMap(schema: z.core.$ZodType, place: string, sections: string[]): void {
  const keys = mergedKeys(schema);
  const rows = Object.entries(keys).map(
    ([name, key]) => `| \`${name}\` | ${formOf(key)} | ${defaultOf(key)} | ${key.description} |`,
  );
  const heading = place === '' ? '## The file' : `## ${place}`;
  sections.push([heading, '', '| key | value | default | meaning |', '|---|---|---|---|', ...rows].join('\n'));
  for (const [name, key] of Object.entries(keys)) {
    const path = place === '' ? name : `${place}.${name}`;
    const item = itemOf(key.schema);
    if (isMap(key.schema)) renderMap(key.schema, path, sections);
    else if (item !== null && isMap(item)) renderMap(item, `${path}[]`, sections);
  }
}

/** A map's keys; of a choice of maps, all keys of all of them, the one that chooses with the values of all. */
function mergedKeys(schema: z.core.$ZodType): Record<string, KeySchema> {
  const merged: Record<string, KeySchema> = {};
  const choosers: KeySchema[] = [];
  for (const option of optionsOf(schema) ?? [schema]) {
    for (const [name, wrapped] of Object.entries(keysOf(option) ?? {})) {
      const key = unwrap(wrapped);
      if (definitionOf(key.schema).type === 'literal' && optionsOf(schema) !== null) choosers.push(key);
      if (!Object.hasOwn(merged, name)) merged[name] = key;
    }
  }
  if (choosers.length > 0) {
    const meanings = choosers.map((key) => `${formOf(key)}: ${key.description}`);
    const values = choosers.flatMap(({ schema: chooser }) => [...(chooser as z.ZodLiteral).values]);
    merged.type = { ...choosers[0]!, schema: z.literal(values), description: meanings.join(' ') };
  }
  return merged;
}

function isMap(schema: z.core.$ZodType): boolean {
  return keysOf(schema) !== null || optionsOf(schema) !== null;
}

function formOf({ schema }: KeySchema): string {
  const form = (schema as z.ZodType).meta()?.form;
  if (typeof form === 'string') return form;
  const definition = definitionOf(schema);
  switch (definition.type) {
    case 'number': {
      const { minValue, maxValue } = schema as z.ZodNumber;
      return `${minValue} to ${maxValue}`;
    }
    case 'boolean':
      return '`true` or `false`';
    case 'enum':
      return code(Object.values(definition.entries));
    case 'literal':
      return code(definition.values);
    case 'array':
      return isMap(definition.element) ? 'list of maps' : `list: ${formOf(unwrap(definition.element))}`;
    default:
      return 'map';
  }
}

function code(values: readonly unknown[]): string {
  return values.map((value) => `\`${String(value)}\``).join(' ');
}

function defaultOf({ schema, optional, defaultValue }: KeySchema): string {
  if (isMap(schema)) return optional ? 'none' : '';
  if (defaultValue === undefined) return optional ? 'none' : 'required';
  return `\`${typeof defaultValue === 'string' ? defaultValue : JSON.stringify(defaultValue)}\``;
}

function definitionOf(schema: z.core.$ZodType): z.core.$ZodTypes['_zod']['def'] {
  return (schema as z.core.$ZodTypes)._zod.def;
}
