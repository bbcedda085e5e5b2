import { readFileSync } from 'node:fs';
import { parse } from 'yaml';

/** What the lab's compose files use of the compose specification. */
export interface Compose {
  readonly services: Readonly<Record<string, ComposeService>>;
  readonly networks: Readonly<Record<string, ComposeNetwork>>;
}

export interface ComposeService {
  readonly image: string;
  /** The folder with the Dockerfile. */
  readonly build?: string;
  readonly command?: readonly string[];
  readonly environment?: Readonly<Record<string, string>>;
  readonly cap_add?: readonly string[];
  readonly devices?: readonly string[];
  readonly sysctls?: Readonly<Record<string, number>>;
  /** `./file:/path:ro` */
  readonly volumes?: readonly string[];
  readonly networks?: Readonly<Record<string, { readonly ipv4_address: string }>>;
  /** `service:NAME` */
  readonly network_mode?: string;
  readonly depends_on?: readonly string[];
  readonly init?: boolean;
  readonly healthcheck?: { readonly test: readonly string[] };
}

export interface ComposeNetwork {
  readonly ipam: { readonly config: readonly { readonly subnet: string; readonly gateway: string }[] };
}

type Node = Readonly<Record<string, unknown>>;

/** One after the other, as `docker compose -f A -f B` takes them. @returns as parsed, for the schema to judge */
export function mergeCompose(paths: readonly string[]): Node {
  return paths.map(parseCompose).reduce((earlier, later) => merge(earlier, later));
}

export function parseCompose(path: string): Node {
  return parse(readFileSync(path, 'utf8'), { merge: true }) as Node;
}

/** Mappings are joined, lists one after the other; commands are replaced, and of volumes those for the same place. */
function merge(earlier: Node, later: Node): Node {
  const merged: Record<string, unknown> = { ...earlier };
  for (const [key, value] of Object.entries(later)) {
    const before = merged[key];
    if (isNode(before) && isNode(value)) merged[key] = merge(before, value);
    else if (!Array.isArray(before) || !Array.isArray(value) || key === 'command' || key === 'test')
      merged[key] = value;
    else if (key === 'volumes') {
      const places = value.map(placeOf);
      merged[key] = [...before.filter((each) => !places.includes(placeOf(each))), ...value];
    } else merged[key] = [...new Set([...before, ...value])];
  }
  return merged;
}

function isNode(value: unknown): value is Node {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

function placeOf(volume: string): string {
  return volume.split(':')[1]!;
}
