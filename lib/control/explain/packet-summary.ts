import { formatEndpoint, formatIpv4 } from '../../wire/address.js';
import { GENEVE_PORT } from '../../wire/geneve.js';
import * as icmp from '../../wire/icmp.js';
import * as ipv4 from '../../wire/ipv4.js';
import * as tcp from '../../wire/tcp.js';
import { protocolName } from '../flows.js';
import type { PacketView } from './explain-view.js';
import { flagNames } from './request.js';

/** What a packet is, as far as its headers say. Addresses are signed words. */
export interface Headers {
  /** 0, or why it is refused at sight: an id of REASON. */
  readonly reason: number;
  readonly length: number;
  readonly protocol: number;
  readonly source: number;
  readonly destination: number;
  readonly identification: number;
  /** Where the next header begins. */
  readonly l4: number;
  readonly isFragment: boolean;
  /** Of a fragment: where in its datagram it belongs. */
  readonly fragmentOffset: number;
  /** Of TCP and UDP, unless in a later fragment; else 0. */
  readonly ports: number;
  readonly sourcePort: number;
  readonly destinationPort: number;
  /** Of TCP. */
  readonly tcpFlags: number;
}

/** Reads the headers of a packet, whole or refused. */
export function headersOf(bytes: Uint8Array): Headers {
  const view = viewOf(bytes);
  const reason = ipv4.check(bytes, 0, bytes.length);
  if (reason !== 0) return { ...NOTHING, reason, length: bytes.length };
  const protocol = ipv4.protocol(bytes, 0);
  const l4 = ipv4.headerLength(bytes, 0);
  const fragmentOffset = ipv4.fragmentOffset(bytes, 0);
  const hasPorts = (protocol === ipv4.PROTO_TCP || protocol === ipv4.PROTO_UDP) && fragmentOffset === 0;
  const ports = hasPorts ? tcp.ports(view, l4) : 0;
  return {
    reason,
    length: ipv4.totalLength(bytes, 0),
    protocol,
    source: ipv4.source(view, 0),
    destination: ipv4.destination(view, 0),
    identification: ipv4.identification(bytes, 0),
    l4,
    isFragment: ipv4.isFragment(bytes, 0),
    fragmentOffset,
    ports,
    sourcePort: ports >>> 16,
    destinationPort: ports & 0xffff,
    tcpFlags: hasPorts && protocol === ipv4.PROTO_TCP ? tcp.flags(bytes, l4) : 0,
  };
}

export function viewOf(bytes: Uint8Array): DataView {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
}

export function packetView(bytes: Uint8Array): PacketView {
  return { text: describePacket(bytes), bytes: hexOf(bytes) };
}

export function hexOf(bytes: Uint8Array): string {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length).toString('hex');
}

/** `tcp 10.1.0.2:40000 > 10.96.0.10:80`: a key of the table. */
export function describeTuple(source: number, destination: number, ports: number, protocol: number): string {
  const ends = `${formatEndpoint(source, ports >>> 16)} > ${formatEndpoint(destination, ports & 0xffff)}`;
  return `${protocolName(protocol)} ${ends}`;
}

function describePacket(bytes: Uint8Array): string {
  const { reason, length, protocol, source, destination, l4, isFragment, fragmentOffset, ports, tcpFlags } =
    headersOf(bytes);
  if (reason !== 0) return `${bytes.length} bytes that are no whole packet`;
  const parts: string[] = [];
  if (fragmentOffset !== 0) parts.push(`${protocolName(protocol)} ${formatIpv4(source)} > ${formatIpv4(destination)}`);
  else if (protocol === ipv4.PROTO_TCP) {
    parts.push(`${describeTuple(source, destination, ports, protocol)} ${flagNames(tcpFlags)}`);
  } else if (protocol === ipv4.PROTO_UDP) {
    const inside = (ports & 0xffff) === GENEVE_PORT ? ' geneve' : '';
    parts.push(`${describeTuple(source, destination, ports, protocol)}${inside}`);
  } else {
    const kind = protocol === ipv4.PROTO_ICMP ? ` type ${icmp.type(bytes, l4)} code ${icmp.code(bytes, l4)}` : '';
    parts.push(`${protocolName(protocol)} ${formatIpv4(source)} > ${formatIpv4(destination)}${kind}`);
  }
  if (isFragment) parts.push(fragmentOffset === 0 ? 'first fragment' : `fragment at ${fragmentOffset}`);
  return [...parts, `${length} bytes`].join(', ');
}

const NOTHING: Headers = {
  reason: 0,
  length: 0,
  protocol: 0,
  source: 0,
  destination: 0,
  identification: 0,
  l4: 0,
  isFragment: false,
  fragmentOffset: 0,
  ports: 0,
  sourcePort: 0,
  destinationPort: 0,
  tcpFlags: 0,
};
