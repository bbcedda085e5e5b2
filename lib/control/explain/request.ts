import { WeirError } from '../../base/errors.js';
import { RX_END, TX_END } from '../../conntrack/record.js';
import type { TableReader } from '../../conntrack/table-reader.js';
import { formatIpv4, parseIpv4 } from '../../wire/address.js';
import { pseudoHeaderSum, storeFull, sum } from '../../wire/checksum.js';
import * as icmp from '../../wire/icmp.js';
import * as ipv4 from '../../wire/ipv4.js';
import * as tcp from '../../wire/tcp.js';
import * as udp from '../../wire/udp.js';
import type { Scene } from './scene.js';

/** What is asked, as text: a packet by its ends, or byte by byte; and what is to be assumed. */
export interface ExplainQuery {
  /** `tcp`, `udp` or `icmp`. */
  readonly proto?: string;
  /** `ADDRESS:PORT`, of icmp `ADDRESS`. */
  readonly src?: string;
  readonly dst?: string;
  /** Of tcp: names, with commas between them; `syn` when absent. */
  readonly flags?: string;
  /** The packet from its IP header on, in hexadecimal. */
  readonly packet?: string;
  /** Backends as `SERVICE/BACKEND`. */
  readonly without?: readonly string[];
  readonly assumeDown?: readonly string[];
}

/** More than any path takes. */
const MAX_PACKET_BYTES = 7000;

const PROTOCOLS: Readonly<Record<string, number>> = {
  tcp: ipv4.PROTO_TCP,
  udp: ipv4.PROTO_UDP,
  icmp: ipv4.PROTO_ICMP,
};

const FLAGS: Readonly<Record<string, number>> = {
  fin: tcp.FIN,
  syn: tcp.SYN,
  rst: tcp.RST,
  psh: tcp.PSH,
  ack: tcp.ACK,
  urg: tcp.URG,
  ece: tcp.ECE,
  cwr: tcp.CWR,
};

/** In the order of the header. */
export function flagNames(flags: number): string {
  const names = Object.entries(FLAGS).filter(([, bit]) => (flags & bit) !== 0);
  return names.map(([name]) => name).join(',') || 'none';
}

/**
 * The packet that is meant. One by its ends is as small as can be: no options and no data, DF set, and of tcp the sequence
 * numbers that its connection expects next.
 *
 * @throws WeirError USAGE
 */
export function packetOf(query: ExplainQuery, scene: Scene): Uint8Array {
  const { proto, src, dst, flags } = query;
  if (query.packet !== undefined) {
    if (proto !== undefined || src !== undefined || dst !== undefined || flags !== undefined) {
      throw new WeirError('USAGE', 'a packet in hexadecimal says everything itself', 'Leave out its ends and flags.');
    }
    return parseHex(query.packet);
  }
  if (proto === undefined || src === undefined || dst === undefined) {
    throw new WeirError('USAGE', 'nothing says which packet', 'Give protocol, source and destination, or a packet.');
  }
  const protocol = PROTOCOLS[proto];
  if (protocol === undefined) {
    throw new WeirError('USAGE', `no protocol is called "${proto}"`, `There are ${Object.keys(PROTOCOLS).join(', ')}.`);
  }
  if (flags !== undefined && protocol !== ipv4.PROTO_TCP) {
    throw new WeirError('USAGE', `${proto} has no flags`, 'Leave them out.');
  }
  const hasPorts = protocol !== ipv4.PROTO_ICMP;
  const ends = { source: parseEnd(src, hasPorts), destination: parseEnd(dst, hasPorts) };
  if (protocol === ipv4.PROTO_TCP) return buildTcp(ends, parseFlags(flags ?? 'syn'), scene.readers.tcp);
  return protocol === ipv4.PROTO_UDP ? buildUdp(ends) : buildEcho(ends);
}

interface Ends {
  readonly source: End;
  readonly destination: End;
}

interface End {
  readonly address: number;
  readonly port: number;
}

function parseHex(text: string): Uint8Array {
  const digits = text.replace(/\s/g, '');
  if (!/^([0-9a-fA-F]{2})+$/.test(digits)) {
    throw new WeirError('USAGE', 'the packet is not in hexadecimal', 'Give its bytes from the IP header on: 4500...');
  }
  if (digits.length > 2 * MAX_PACKET_BYTES) {
    throw new WeirError('USAGE', `the packet has more than ${MAX_PACKET_BYTES} bytes`, 'Use `weir replay`.');
  }
  return Uint8Array.from(Buffer.from(digits, 'hex'));
}

function parseEnd(text: string, hasPort: boolean): End {
  const match = /^(\d+\.\d+\.\d+\.\d+)(?::(\d{1,5}))?$/.exec(text);
  const address = match === null ? 0 : parseIpv4(match[1]!);
  const port = Number(match?.[2] ?? 0);
  const isRight =
    match !== null && formatIpv4(address) === match[1] && (match[2] !== undefined) === hasPort && port <= 65535;
  if (!isRight) {
    const form = hasPort ? 'ADDRESS:PORT' : 'ADDRESS';
    throw new WeirError('USAGE', `"${text}" is no ${form}`, hasPort ? 'Write 10.1.0.2:40000.' : 'Write 10.1.0.2.');
  }
  return { address, port };
}

function parseFlags(text: string): number {
  let flags = 0;
  for (const name of text.toLowerCase().split(/[,+|]/)) {
    const bit = name === 'none' ? 0 : FLAGS[name];
    if (bit === undefined) {
      throw new WeirError('USAGE', `no TCP flag is called "${name}"`, `There are ${Object.keys(FLAGS).join(', ')}.`);
    }
    flags |= bit;
  }
  return flags;
}

function buildTcp({ source, destination }: Ends, flags: number, reader: TableReader): Uint8Array {
  const ports = (source.port << 16) | destination.port;
  const reference = reader.find(source.address, destination.address, ports, ipv4.PROTO_TCP);
  const isReply = (reference & 1) !== 0;
  const next = reference < 0 ? 0 : reader.words[isReply ? RX_END : TX_END]!;
  const awaited = reference < 0 ? 0 : reader.words[isReply ? TX_END : RX_END]!;
  return build(source, destination, ipv4.PROTO_TCP, tcp.TCP_HEADER_BYTES, (bytes, view, l4) => {
    view.setInt32(l4, ports);
    view.setInt32(l4 + 4, (flags & tcp.SYN) === 0 ? next : next - 1);
    view.setInt32(l4 + 8, (flags & tcp.ACK) === 0 ? 0 : awaited);
    view.setUint16(l4 + 12, (5 << 12) | flags);
    view.setUint16(l4 + 14, 65535);
    const pseudo = pseudoHeaderSum(source.address, destination.address, ipv4.PROTO_TCP, tcp.TCP_HEADER_BYTES);
    storeFull(bytes, l4 + tcp.TCP_CHECKSUM, pseudo + sum(bytes, l4, tcp.TCP_HEADER_BYTES));
  });
}

function buildUdp({ source, destination }: Ends): Uint8Array {
  return build(source, destination, ipv4.PROTO_UDP, udp.UDP_HEADER_BYTES, (bytes, view, l4) => {
    udp.writeHeader(view, l4, (source.port << 16) | destination.port, udp.UDP_HEADER_BYTES);
    const pseudo = pseudoHeaderSum(source.address, destination.address, ipv4.PROTO_UDP, udp.UDP_HEADER_BYTES);
    udp.storeChecksum(bytes, l4, pseudo + sum(bytes, l4, udp.UDP_HEADER_BYTES));
  });
}

function buildEcho({ source, destination }: Ends): Uint8Array {
  return build(source, destination, ipv4.PROTO_ICMP, icmp.ICMP_HEADER_BYTES, (bytes, _, l4) => {
    bytes[l4] = icmp.ECHO_REQUEST;
    storeFull(bytes, l4 + icmp.ICMP_CHECKSUM, sum(bytes, l4, icmp.ICMP_HEADER_BYTES));
  });
}

function build(
  source: End,
  destination: End,
  protocol: number,
  l4Bytes: number,
  fill: (bytes: Uint8Array, view: DataView, l4: number) => void,
): Uint8Array {
  const bytes = new Uint8Array(ipv4.IPV4_HEADER_BYTES + l4Bytes);
  const view = new DataView(bytes.buffer);
  ipv4.writeHeader(view, bytes, 0, bytes.length, protocol, source.address, destination.address);
  fill(bytes, view, ipv4.IPV4_HEADER_BYTES);
  return bytes;
}
