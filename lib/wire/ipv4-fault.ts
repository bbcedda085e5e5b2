import { fold, sum } from './checksum.js';
import {
  FLAG_MF,
  fragmentField,
  fragmentOffset,
  headerLength,
  IPV4_HEADER_BYTES,
  PROTO_ICMP,
  PROTO_TCP,
  PROTO_UDP,
  protocol,
  totalLength,
} from './ipv4.js';

/**
 * What `ipv4.check()` has against the packet of `length` bytes at `at`, in words; undefined: nothing. For people: the data path asks
 * `check` alone, and a test holds the two together.
 */
export function faultOf(bytes: Uint8Array, at: number, length: number): string | undefined {
  if (length < 1) return 'there is nothing';
  const version = bytes[at]! >> 4;
  if (version !== 4) return version === 6 ? 'it is IPv6' : `its version is ${version}, not 4`;
  if (length < IPV4_HEADER_BYTES) return `${length} bytes are no IPv4 header, which has 20 at least`;
  const header = headerLength(bytes, at);
  const total = totalLength(bytes, at);
  if (header < IPV4_HEADER_BYTES) return `it says that its IPv4 header has ${header} bytes, which has 20 at least`;
  if (total < header) return `its total length, ${total}, is less than its header of ${header} bytes`;
  if (total > length) return `it says that it has ${total} bytes, and has ${length}`;
  if (fold(sum(bytes, at, header)) !== 0xffff) return 'its IPv4 header checksum is wrong';

  const payload = total - header;
  const isFollowed = (fragmentField(bytes, at) & FLAG_MF) !== 0;
  if (isFollowed && (payload & 7) !== 0)
    return `it is a fragment that others follow, and its ${payload} bytes are no multiple of 8`;
  const offset = fragmentOffset(bytes, at);
  if (offset !== 0) return laterFragmentFault(offset, payload, total, protocol(bytes, at));
  return headerFault(bytes, at + header, payload, protocol(bytes, at), isFollowed);
}

function laterFragmentFault(offset: number, payload: number, total: number, proto: number): string | undefined {
  if (payload === 0) return 'it is a fragment without data';
  if (offset + total > 65535) return 'it is a fragment that ends beyond the largest datagram';
  if (proto === PROTO_TCP && offset === 8) return 'it is a second fragment that rewrites the TCP header (RFC 1858)';
  return undefined;
}

function headerFault(
  bytes: Uint8Array,
  l4: number,
  payload: number,
  proto: number,
  isFollowed: boolean,
): string | undefined {
  switch (proto) {
    case PROTO_TCP: {
      if (payload < 20) return `${payload} bytes are no TCP header, which has 20 at least`;
      const header = (bytes[l4 + 12]! >> 4) << 2;
      if (header < 20) return `it says that its TCP header has ${header} bytes, which has 20 at least`;
      return header > payload ? `it says that its TCP header has ${header} bytes, and has ${payload}` : undefined;
    }
    case PROTO_UDP: {
      if (payload < 8) return `${payload} bytes are no UDP header, which has 8`;
      const length = (bytes[l4 + 4]! << 8) | bytes[l4 + 5]!;
      if (length < 8) return `its UDP length, ${length}, is less than a header`;
      return length > payload && !isFollowed ? `its UDP length is ${length}, and it has ${payload} bytes` : undefined;
    }
    case PROTO_ICMP:
      return payload < 8 ? `${payload} bytes are no ICMP header, which has 8` : undefined;
    default:
      return undefined;
  }
}
