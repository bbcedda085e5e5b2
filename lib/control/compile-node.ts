import { buildLookup, type LookupEntry } from '../balance/lookup.js';
import { encodeRanges } from '../balance/ranges.js';
import { sharedFrom } from '../base/shared-arrays.js';
import type { Config } from '../config/config.js';
import type { NodeSettings } from '../datapath/node-settings.js';
import { overheadBytes } from '../tunnel/encapsulation.js';
import { parseIpv4 } from '../wire/address.js';
import { INNER_ETHERNET, INNER_IPV4 } from '../wire/geneve.js';
import { IPV4_HEADER_BYTES } from '../wire/ipv4.js';
import { TCP_HEADER_BYTES } from '../wire/tcp.js';
import type { ReturnEndpoint } from './network-plan.js';

const NO_LIMIT = 0xffff;

/** A backend under its ids. */
export interface Member {
  readonly service: number;
  readonly backend: number;
  /** Of the backend; words, signed or not. */
  readonly address: number;
  readonly port: number;
  readonly protocol: number;
}

/**
 * @param members every configured backend
 * @param ledIn whose answers the kernel leads in; null: not weir's affair
 */
export function nodeSettings(
  { device, tunnel }: Config,
  members: readonly Member[],
  ledIn: readonly ReturnEndpoint[] | null,
): NodeSettings {
  const inner = tunnel.inner === 'ethernet' ? INNER_ETHERNET : INNER_IPV4;
  const headerBytes = IPV4_HEADER_BYTES + TCP_HEADER_BYTES;
  return {
    peers: tunnel.peers.length === 0 ? null : sharedFrom(Uint32Array, encodeRanges(tunnel.peers)),
    mssLimit: tunnel.clampMss ? device.mtu - overheadBytes(inner) - headerBytes : NO_LIMIT,
    ledIn: ledIn === null ? null : buildLookup(ledIn.map(toEntry)),
    ...indexMembers(members),
  };
}

function toEntry({ address, port, protocol }: ReturnEndpoint): LookupEntry {
  return { address: parseIpv4(address), port, protocol, value: 1 };
}

function indexMembers(members: readonly Member[]): Pick<NodeSettings, 'memberIndex' | 'members'> {
  const byEndpoint = new Map<string, Member[]>();
  for (const member of members) {
    const key = `${member.address >>> 0}:${member.port}/${member.protocol}`;
    const others = byEndpoint.get(key);
    if (others === undefined) byEndpoint.set(key, [member]);
    else others.push(member);
  }
  const rows: number[] = [];
  const entries: LookupEntry[] = [];
  for (const group of byEndpoint.values()) {
    const { address, port, protocol } = group[0]!;
    entries.push({ address, port, protocol, value: rows.length / 2 + 1 });
    for (const { service, backend } of group) rows.push(service, backend);
    rows.push(0, 0);
  }
  return { memberIndex: buildLookup(entries), members: sharedFrom(Int32Array, rows) };
}
