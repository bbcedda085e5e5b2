import { parseIpv4 } from '../../wire/address.js';
import { holds, parsePrefix } from './prefix.js';

/**
 * nftables' rules, as far as they matter to weir; those of iptables are among them, except of its old kind. What a rule asks for
 * besides interfaces, destination, port and state makes it `isPartial`: it may or may not meet a packet.
 */
export interface Firewall {
  readonly chains: readonly Chain[];
  /** Tables of iptables-legacy, which nft does not show; empty: there are none. */
  readonly legacyTables: string;
}

export interface Chain {
  /** `inet filter forward`: family, table and name. */
  readonly place: string;
  /** null: it is only jumped to. */
  readonly hook: string | null;
  /** Of a chain with a hook. */
  readonly policy: 'accept' | 'drop' | null;
  readonly rules: readonly FirewallRule[];
}

export interface FirewallRule {
  readonly handle: number;
  readonly iif: Match | null;
  readonly oif: Match | null;
  readonly daddr: Match | null;
  readonly dport: Match | null;
  /** `new`, `established`, `invalid`, ...; null: any. */
  readonly states: readonly string[] | null;
  readonly isPartial: boolean;
  readonly verdict: 'accept' | 'drop' | 'dnat' | 'jump' | null;
  /** The chain of a jump. */
  readonly target: string | null;
}

/** Values of a field: names, numbers, addresses, prefixes (`10.0.0.0/8`) and ranges (`10.0.0.1-10.0.0.9`). */
export interface Match {
  readonly values: readonly string[];
  readonly isNegated: boolean;
}

type Json = Readonly<Record<string, unknown>>;

/** @param json what `nft -j list ruleset` prints */
export function parseRuleset(json: string): Pick<Firewall, 'chains'> {
  const items = (JSON.parse(json) as { nftables: Json[] }).nftables;
  const chains = new Map<string, Chain & { rules: FirewallRule[] }>();
  for (const { chain, rule } of items as { chain?: Json; rule?: Json }[]) {
    if (chain !== undefined && isIpv4(chain)) {
      const place = `${chain.family} ${chain.table} ${chain.name}`;
      const hook = chain.hook === undefined ? null : String(chain.hook);
      const policy = hook === null ? null : chain.policy === 'drop' ? 'drop' : 'accept';
      chains.set(place, { place, hook, policy, rules: [] });
    }
    if (rule !== undefined && isIpv4(rule)) {
      chains.get(`${rule.family} ${rule.table} ${rule.chain}`)?.rules.push(toRule(rule));
    }
  }
  return { chains: [...chains.values()] };
}

function isIpv4({ family }: Json): boolean {
  return family === 'ip' || family === 'inet';
}

function toRule({ family, table, handle, expr }: Json): FirewallRule {
  const found = {
    iif: null as Match | null,
    oif: null as Match | null,
    daddr: null as Match | null,
    dport: null as Match | null,
    states: null as string[] | null,
    isPartial: false,
    verdict: null as FirewallRule['verdict'],
    target: null as string | null,
  };
  for (const part of expr as Json[]) {
    if (part.match !== undefined) takeMatch(part.match as Json, found);
    else if ('accept' in part) found.verdict = 'accept';
    else if ('drop' in part || 'reject' in part) found.verdict = 'drop';
    else if ('dnat' in part || 'redirect' in part || 'tproxy' in part) found.verdict = 'dnat';
    else if ('jump' in part || 'goto' in part) {
      found.verdict = 'jump';
      found.target = `${family} ${table} ${((part.jump ?? part.goto) as Json).target}`;
    } else if (part.xt !== undefined) takeExtension(part.xt as Json, found);
    else if (!('counter' in part || 'log' in part || 'comment' in part)) found.isPartial = true;
  }
  return { handle: Number(handle), ...found };
}

type Draft = { -readonly [K in Exclude<keyof FirewallRule, 'handle'>]: FirewallRule[K] };

function takeMatch({ op, left, right }: Json, found: Draft): void {
  const { meta, payload, ct } = left as { meta?: Json; payload?: Json; ct?: Json };
  const match = { values: valuesOf(right), isNegated: op === '!=' };
  if (meta?.key === 'iifname' || meta?.key === 'iif') found.iif = match;
  else if (meta?.key === 'oifname' || meta?.key === 'oif') found.oif = match;
  else if (payload?.protocol === 'ip' && payload.field === 'daddr') found.daddr = match;
  else if (payload?.field === 'dport') found.dport = match;
  else if (ct?.key === 'state' && !match.isNegated) found.states = match.values;
  else if (!(meta?.key === 'l4proto' || (payload?.protocol === 'ip' && payload.field === 'protocol')))
    found.isPartial = true;
}

function takeExtension({ type, name }: Json, found: Draft): void {
  if (type === 'target' && ['DNAT', 'REDIRECT', 'TPROXY'].includes(String(name))) found.verdict = 'dnat';
  else if (type === 'target' && name === 'REJECT') found.verdict = 'drop';
  else if (!(type === 'match' && name === 'comment')) found.isPartial = true;
}

function valuesOf(right: unknown): string[] {
  if (Array.isArray(right)) return right.flatMap(valuesOf);
  if (right === null || typeof right !== 'object') return [String(right)];
  const { set, range, prefix, elem } = right as { set?: unknown; range?: unknown[]; prefix?: Json; elem?: Json };
  if (set !== undefined) return valuesOf(set);
  if (range !== undefined) return [range.join('-')];
  if (prefix !== undefined) return [`${prefix.addr}/${prefix.len}`];
  return elem === undefined ? ['?'] : valuesOf(elem.val);
}

/** Whether a field with this value is one that a rule means; a rule that does not ask means any. */
export function meetsName(match: Match | null, name: string): boolean {
  return match === null || match.values.some((value) => isPattern(value, name)) !== match.isNegated;
}

function isOnly({ values, isNegated }: Match, name: string): boolean {
  return !isNegated && values.every((value) => isPattern(value, name));
}

function isPattern(value: string, name: string): boolean {
  return value.endsWith('*') ? name.startsWith(value.slice(0, -1)) : value === name;
}

export function meetsAddress(match: Match | null, word: number): boolean {
  if (match === null) return true;
  const meets = match.values.some((value) => {
    const [first, last] = value.split('-');
    if (last !== undefined) return parseIpv4(first!) <= word && word <= parseIpv4(last);
    return /^[\d.]+(\/\d+)?$/.test(value) && holds(parsePrefix(value), word);
  });
  return meets !== match.isNegated;
}

export function meetsPort(match: Match | null, port: number): boolean {
  if (match === null) return true;
  const meets = match.values.some((value) => {
    const [first, last = first] = value.split('-').map(Number);
    return first! <= port && port <= last!;
  });
  return meets !== match.isNegated;
}

/** What becomes of packets of new connections at a hook, on one side of a device. */
export type Passage = 'accepted' | 'refused' | 'unknown';

/**
 * Follows the chains of the forward hook for packets that come out of a device (`iif`), or go into it (`oif`). The other interface,
 * addresses and ports may be any, so that most rules tell nothing for certain.
 *
 * @returns with `chain`, the one that refuses packets or cannot be judged
 */
export function passageThrough(
  { chains }: Firewall,
  device: string,
  side: 'iif' | 'oif',
): { readonly passage: Passage; readonly chain: Chain | null } {
  let unknown: Chain | null = null;
  for (const chain of chains.filter(({ hook }) => hook === 'forward')) {
    const outcomes = new Set<Outcome>();
    const isDecided = walk({ chains, device, side, outcomes, within: new Set() }, chain);
    if (!isDecided) outcomes.add(chain.policy === 'drop' ? 'refused' : 'accepted');
    if (outcomes.size > 1) unknown ??= chain;
    else if (outcomes.has('refused')) return { passage: 'refused', chain };
  }
  return unknown === null ? { passage: 'accepted', chain: null } : { passage: 'unknown', chain: unknown };
}

type Outcome = Exclude<Passage, 'unknown'>;

interface Walk {
  readonly chains: readonly Chain[];
  readonly device: string;
  readonly side: 'iif' | 'oif';
  /** Of all packets there may be: each rule that takes some of them adds its own. */
  readonly outcomes: Set<Outcome>;
  /** The chains one is in: jumps do not go round, but a ruleset is not ours to trust. */
  readonly within: Set<string>;
}

/** @returns whether no packet gets past the end of the chain */
function walk(state: Walk, chain: Chain): boolean {
  const { chains, device, side, outcomes, within } = state;
  if (within.has(chain.place)) return false;
  within.add(chain.place);
  const other = side === 'iif' ? 'oif' : 'iif';
  let isDecided = false;
  for (const rule of chain.rules) {
    if (isDecided) break;
    if (!meetsName(rule[side], device) || (rule.states !== null && !rule.states.includes('new'))) continue;
    // Nothing comes out of the device and goes into it.
    if (rule[other] !== null && isOnly(rule[other], device)) continue;
    const takesAll = !rule.isPartial && rule[other] === null && rule.daddr === null && rule.dport === null;
    if (rule.verdict === 'accept' || rule.verdict === 'drop') {
      outcomes.add(rule.verdict === 'accept' ? 'accepted' : 'refused');
      isDecided = takesAll;
    } else if (rule.verdict === 'jump') {
      const next = chains.find(({ place }) => place === rule.target);
      isDecided = next !== undefined && walk(state, next) && takesAll;
    }
  }
  within.delete(chain.place);
  return isDecided;
}
