import { isIPv4, isIPv6 } from 'node:net';
import ipaddr from 'ipaddr.js';
import { formatIpv4, parseIpv4 } from '../wire/address.js';
import type { Address, AddressRange } from './config.js';

/**
 * The forms of text a value may have. For each a `…Fault` function that says what is wrong with a text (`null`: nothing), in
 * words that fit after the value's path, and one that turns a right text into its used form. net.isIP decides what an
 * address is (it refuses `010.0.0.1` and `1.2.3`, which other parsers read as something else), ipaddr.js what kind it is.
 */

/** Kinds of address that no packet can be forwarded to or from, in ipaddr.js's names. */
const UNUSABLE: Readonly<Record<string, string>> = {
  unspecified: 'in the unspecified block 0.0.0.0/8',
  broadcast: 'the broadcast address',
  multicast: 'a multicast address',
  loopback: 'a loopback address',
};

/** Of an address that packets are sent to or from. */
export function addressFault(text: string): string | null {
  if (isIPv6(text)) return 'is an IPv6 address; weir balances IPv4 only, IPv6 is not supported yet';
  if (!isIPv4(text))
    return `must be an IPv4 address such as 10.0.0.1, four plain decimal numbers (got "${clip(text)}")`;
  const kind = UNUSABLE[ipaddr.IPv4.parse(text).range()];
  if (kind !== undefined) return `is ${kind}, which nothing can be forwarded to`;
  const first = parseIpv4(text) >>> 24;
  return first >= 240 ? 'is in the reserved block 240.0.0.0/4, which nothing can be forwarded to' : null;
}

export function toAddress(text: string): Address {
  return { text, word: parseIpv4(text) };
}

/** Of a block of client addresses. */
export function cidrFault(text: string): string | null {
  const slash = text.indexOf('/');
  const base = slash < 0 ? text : text.slice(0, slash);
  if (isIPv6(base)) return 'is an IPv6 range; weir balances IPv4 only, IPv6 is not supported yet';
  if (!isIPv4(base)) return `must be a range such as 10.0.0.0/8 (got "${clip(text)}")`;
  if (slash < 0) return `must have a prefix length; write ${base}/32 for one address`;
  const prefix = text.slice(slash + 1);
  if (!/^(?:\d|[12]\d|3[0-2])$/.test(prefix)) return 'must have a prefix length from 0 to 32, a plain decimal number';
  const word = parseIpv4(base);
  const network = (word & prefixMask(Number(prefix))) >>> 0;
  return network === word ? null : `has address bits beyond its prefix; write ${formatIpv4(network)}/${prefix}`;
}

/** Of one address, or a block of them. */
export function addressOrCidrFault(text: string): string | null {
  return text.includes('/') ? cidrFault(text) : addressFault(text);
}

/** An address without a prefix length is a range of one. */
export function toRange(text: string): AddressRange {
  const [base, prefix = '32'] = text.split('/') as [string, string?];
  const first = parseIpv4(base);
  return { text, first, last: (first | ~prefixMask(Number(prefix))) >>> 0 };
}

/** Of a range of ports: `32768-65535`, both included. */
export function portRangeFault(text: string): string | null {
  const parts = /^([1-9]\d{0,4})-([1-9]\d{0,4})$/.exec(text);
  if (parts === null) return `must be a range of ports such as 32768-65535 (got "${clip(text)}")`;
  const [first, last] = [Number(parts[1]), Number(parts[2])];
  if (last > 65535) return 'must stay within the ports 1 to 65535';
  return first > last ? `must have its lower end first: ${last}-${first}` : null;
}

export function toPortRange(text: string): { first: number; last: number } {
  const [first, last] = text.split('-') as [string, string];
  return { first: Number(first), last: Number(last) };
}

/** Of what a TCP server listens on: `127.0.0.1:9650`, `[::1]:9650`, or `off`. */
export function listenFault(text: string): string | null {
  if (text === 'off') return null;
  const parts = /^(?:\[([^\]]*)\]|([^:]*)):([1-9]\d{0,4})$/.exec(text);
  const host = parts?.[1] ?? parts?.[2] ?? '';
  const known = parts?.[1] === undefined ? isIPv4(host) : isIPv6(host) && !host.includes('%');
  if (parts === null || !known) return `must be address:port such as 127.0.0.1:9650, or off (got "${clip(text)}")`;
  return Number(parts[3]) > 65535 ? 'must have a port from 1 to 65535' : null;
}

export function toListen(text: string): { host: string; port: number } | null {
  if (text === 'off') return null;
  const colon = text.lastIndexOf(':');
  return { host: text.slice(0, colon).replace(/^\[|\]$/g, ''), port: Number(text.slice(colon + 1)) };
}

/** Of a network device's name: what the kernel's dev_valid_name accepts, without the `%` that makes it a pattern. */
export function deviceNameFault(text: string): string | null {
  if (text === '') return 'must not be empty';
  if (Buffer.byteLength(text) > 15) return 'must be at most 15 bytes long, the kernel’s limit';
  if (text === '.' || text === '..') return 'is not a device name the kernel accepts';
  return /^[^\s/:%\p{Cc}]+$/u.test(text) ? null : 'must not contain spaces, slashes, colons or %';
}

/** Of the name of a service or backend: it is a word in commands, in `service/backend` and in metrics. */
export function nameFault(text: string): string | null {
  if (text === '') return 'must not be empty';
  if (text.length > 253) return 'must be at most 253 characters long';
  return /^[^\s/\p{Cc}]+$/u.test(text) ? null : 'must not contain spaces or slashes';
}

/** Of a path of a file or socket that must not depend on where weir was started. */
export function absolutePathFault(text: string): string | null {
  if (!text.startsWith('/') || text.endsWith('/')) return `must be the absolute path of a file (got "${clip(text)}")`;
  return text.includes('\0') ? 'must not contain a zero byte' : null;
}

/** A text short and printable enough to stand in a message. */
export function clip(text: string): string {
  const printable = text.replace(/\p{Cc}/gu, ' ');
  return printable.length > 40 ? `${printable.slice(0, 39)}…` : printable;
}

function prefixMask(length: number): number {
  return length === 0 ? 0 : -1 << (32 - length);
}
