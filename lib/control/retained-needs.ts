import {
  BACKEND,
  CLIENT,
  PROTOCOL,
  RECORD_BYTES,
  RECORD_WORDS,
  REPLY_PORTS,
  RETURN,
  TYPE,
  TYPE_OUT,
  VIP,
} from '../conntrack/record.js';
import type { Records, TableReader } from '../conntrack/table-reader.js';
import { formatIpv4, parseIpv4 } from '../wire/address.js';
import { mergeEndpoints, type NetworkNeeds, NO_NEEDS, type ReturnEndpoint } from './network-plan.js';

/**
 * What flows need of the kernel that began under another configuration: their service or backend has left the file, the service is of another
 * mode, or the snat pool of other addresses. What one configuration needs and the next does not is retained until no flow uses it.
 */

/** Records looked at in a step: a few ms. */
const SLICE_RECORDS = 8192;

/** What is left of needs when others see to part of them. */
export function needsWithout(needs: NetworkNeeds, others: NetworkNeeds): NetworkNeeds {
  if (isNothing(needs) || needs === others) return NO_NEEDS;
  const addresses = new Set(others.addresses);
  const endpoints = new Set(others.endpoints.map(keyOf));
  return {
    addresses: needs.addresses.filter((address) => !addresses.has(address)),
    endpoints: needs.endpoints.filter((endpoint) => !endpoints.has(keyOf(endpoint))),
  };
}

export function mergeNeeds(a: NetworkNeeds, b: NetworkNeeds): NetworkNeeds {
  if (isNothing(b)) return a;
  return {
    addresses: [...new Set([...a.addresses, ...b.addresses])],
    endpoints: mergeEndpoints(a.endpoints, b.endpoints),
  };
}

export function isNothing({ addresses, endpoints }: NetworkNeeds): boolean {
  return addresses.length === 0 && endpoints.length === 0;
}

/** Those of `needs` that live flows have. Looks at every record, in steps. */
export function* usedNeeds(
  readers: readonly TableReader[],
  needs: NetworkNeeds,
  nowMs: number,
): Generator<void, NetworkNeeds> {
  if (isNothing(needs)) return needs;
  const unused = new Unused(needs);
  const visit = (records: Records, record: number): void => unused.strike(records, record);
  for (const reader of readers) {
    for (let first = 0; first < reader.highWater && !unused.isEmpty; first += SLICE_RECORDS) {
      reader.visitLive(first, SLICE_RECORDS, nowMs, visit);
      yield;
    }
  }
  return needsWithout(needs, unused.needs);
}

/** Needs that no flow was found for yet. */
class Unused {
  readonly #addresses: Set<number>;
  /** By address. */
  readonly #endpoints = new Map<number, ReturnEndpoint[]>();

  constructor({ addresses, endpoints }: NetworkNeeds) {
    this.#addresses = new Set(addresses.map(wordOf));
    for (const endpoint of endpoints) {
      const address = wordOf(endpoint.address);
      this.#endpoints.set(address, [...(this.#endpoints.get(address) ?? []), endpoint]);
    }
  }

  get isEmpty(): boolean {
    return this.#addresses.size === 0 && this.#endpoints.size === 0;
  }

  get needs(): NetworkNeeds {
    return { addresses: [...this.#addresses].map(formatIpv4), endpoints: [...this.#endpoints.values()].flat() };
  }

  strike({ words, bytes }: Records, record: number): void {
    const word = record * RECORD_WORDS;
    this.#addresses.delete(words[word + VIP]!);
    if (bytes[record * RECORD_BYTES + TYPE] !== TYPE_OUT) return;
    const source = words[word + RETURN]!;
    if (source !== words[word + CLIENT]) this.#addresses.delete(source);
    else {
      const protocol = bytes[record * RECORD_BYTES + PROTOCOL]!;
      this.#strikeEndpoint(words[word + BACKEND]!, words[word + REPLY_PORTS]! >>> 16, protocol);
    }
  }

  #strikeEndpoint(address: number, port: number, protocol: number): void {
    const here = this.#endpoints.get(address);
    if (here === undefined) return;
    const rest = here.filter((each) => each.port !== port || each.protocol !== protocol);
    if (rest.length > 0) this.#endpoints.set(address, rest);
    else this.#endpoints.delete(address);
  }
}

function keyOf({ address, port, protocol }: ReturnEndpoint): string {
  return `${address} ${port} ${protocol}`;
}

function wordOf(address: string): number {
  return parseIpv4(address) | 0;
}
