import type { MemoryPacket } from '../../../lib/io/memory-device.js';
import { fragmentOf, icmpError, partial, tcp, udp } from '../../fixtures/packets.js';
import type { Segment } from './tcp.js';
import { splitEndpoint } from './world.js';

/** A packet of TCP or UDP, or a piece of one. */
export interface Packet {
  readonly protocol: 'tcp' | 'udp';
  readonly source: string;
  readonly destination: string;
  readonly segment?: Segment;
  /** Of the whole; `segment.payload` is what its first fragment has of it. */
  readonly payload: number;
  /** Its checksum is partial, and it is a super-packet if it has more than a segment. */
  readonly isOffloaded?: boolean;
  /** Of a fragment: identification, and which bytes after the IP header it has. */
  readonly fragment?: { readonly id: number; readonly from: number; readonly to: number };
}

/** An ICMP error: what complains, and the packet it complains of. It is addressed to whoever sent that. */
export interface IcmpError {
  readonly from: string;
  readonly type: number;
  readonly code: number;
  readonly rest: number;
  readonly quoted: Packet;
  readonly quoteBytes: number;
}

const SEGMENT_BYTES = 1448;

/** RFC 1812: an error has 576 bytes at most. */
const LONGEST_QUOTE = 548;

/** The packet with these ends instead of its own: what it must leave as. */
export function build(packet: Packet, source = packet.source, destination = packet.destination): MemoryPacket {
  const { protocol, segment, payload, fragment } = packet;
  const [src, sport] = splitEndpoint(source);
  const [dst, dport] = splitEndpoint(destination);
  const ends = { src, sport, dst, dport, payload, ...(fragment ? { id: fragment.id } : {}) };
  const bytes =
    segment === undefined
      ? udp(ends)
      : tcp({
          ...ends,
          flags: segment.flags,
          seq: segment.seq >>> 0,
          ack: segment.ack >>> 0,
          win: segment.window,
          ...(segment.scale >= 0 ? { options: { scale: segment.scale } } : {}),
        });
  if (fragment) return { bytes: fragmentOf(bytes, fragment.from, fragment.to) };
  if (!packet.isOffloaded) return { bytes };
  return partial(bytes, protocol === 'tcp' && payload > SEGMENT_BYTES ? SEGMENT_BYTES : 0);
}

export function buildError(error: IcmpError, to = error.quoted.source): MemoryPacket {
  const { from, type, code, rest, quoteBytes } = error;
  const quoted = build(error.quoted).bytes;
  const fields = { src: from, dst: splitEndpoint(to)[0], type, code, mtu: rest, quoted };
  return { bytes: icmpError({ ...fields, quoteBytes: Math.min(quoteBytes, quoted.length) }) };
}

export function buildRst(source: string, destination: string, flags: string, seq: number, ack: number): MemoryPacket {
  const [src, sport] = splitEndpoint(source);
  const [dst, dport] = splitEndpoint(destination);
  return { bytes: tcp({ src, sport, dst, dport, flags, seq: seq >>> 0, ack: ack >>> 0, win: 0 }) };
}

/** What a client is told of its datagram. */
export function buildUnreachable({ isOffloaded: _, ...packet }: Packet): MemoryPacket {
  return unreachable(packet, build(packet).bytes);
}

/** The same where no datagram is at hand: the quote is weir's own, without data and checksum. */
export function buildOwnUnreachable(client: string, vip: string): MemoryPacket {
  const packet: Packet = { protocol: 'udp', source: client, destination: vip, payload: 0 };
  const { bytes } = build(packet);
  bytes.fill(0, 26, 28);
  return unreachable(packet, bytes);
}

function unreachable({ source, destination }: Packet, quoted: Uint8Array): MemoryPacket {
  const ends = { src: splitEndpoint(destination)[0], dst: splitEndpoint(source)[0] };
  const quoteBytes = Math.min(LONGEST_QUOTE, quoted.length);
  return { bytes: icmpError({ ...ends, tos: 0xc0, type: 3, code: 3, quoted, quoteBytes }) };
}
