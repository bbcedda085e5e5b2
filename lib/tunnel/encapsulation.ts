import type { PacketMemory } from '../io/device.js';
import {
  DSR_OPTION_BYTES,
  ETHERNET_HEADER_BYTES,
  GENEVE_HEADER_BYTES,
  INNER_ETHERNET,
  writeGeneve,
  writeGeneveWithVip,
  writeInnerEthernet,
} from '../wire/geneve.js';
import * as ipv4 from '../wire/ipv4.js';
import * as udp from '../wire/udp.js';
import * as vnet from '../wire/vnet.js';

/**
 * What stands before a packet in the tunnel. Two parts, since several packets to one node may share the first (cut.ts):
 *
 *     | IPv4 20 | UDP 8 |  Geneve 8 [| option 12] [| Ethernet 14] | packet
 *       outer header       tunnel header, one for each packet
 *
 * - The whole TOS byte is the inner packet's: DSCP as it is, ECN copied (RFC 6040 4.1, normal mode).
 * - DF is set: the tunnel's path MTU is found, not hidden (path-mtu.ts).
 * - The source port is the flow's, so that routers and network cards spread flows and keep each in order (RFC 8926 3.3).
 * - The UDP checksum is zero, as Linux and Cilium send Geneve over IPv4: the inner packet has checksums of its own. Only a write
 *   of several datagrams has one, since the kernel does not cut them without.
 */

/** The gateway's end of its tunnels, as the configuration says. */
export interface TunnelSettings {
  /** Source of the outer header, an address word, signed; 0: there is no tunnel. */
  readonly address: number;
  /** UDP port at the nodes. */
  readonly port: number;
  readonly vni: number;
  /** INNER_ETHERNET or INNER_IPV4. */
  readonly inner: number;
  /** Every packet carries the option, not only those that start a flow. */
  readonly isOptionAlways: boolean;
  /** The device's: the most an outer packet may have where its path is not known to be narrower. */
  readonly mtu: number;
}

/** Where packets of one flow go, and what the node is told of it; owned by the caller and reused. */
export interface TunnelRoute {
  /** Destination of the outer header. */
  node: number;
  sourcePort: number;
  /** Whether the option is there. */
  hasVip: boolean;
  vip: number;
  vipPort: number;
}

export function makeTunnelRoute(): TunnelRoute {
  return { node: 0, sourcePort: 0, hasVip: false, vip: 0, vipPort: 0 };
}

export const OUTER_HEADER_BYTES = ipv4.IPV4_HEADER_BYTES + udp.UDP_HEADER_BYTES;

/** The source port of a flow with this hash: of the 32768 upper ones. */
export function tunnelSourcePort(hash: number): number {
  return 0x8000 | (hash & 0x7fff);
}

/** Bytes before the inner packet that are reckoned with: as with the option, so that all packets of a flow have the same room. */
export function overheadBytes(inner: number): number {
  return OUTER_HEADER_BYTES + tunnelHeaderBytes(inner, true);
}

/** Bytes between the outer UDP header and the inner packet. */
export function tunnelHeaderBytes(inner: number, hasVip: boolean): number {
  return GENEVE_HEADER_BYTES + (hasVip ? DSR_OPTION_BYTES : 0) + (inner === INNER_ETHERNET ? ETHERNET_HEADER_BYTES : 0);
}

/**
 * Puts both headers before the packet of `length` bytes at `at`, whose checksums are full, and clears the vnet header before them.
 *
 * @returns the offset of the outer header
 */
export function encapsulate(
  { bytes, view }: PacketMemory,
  at: number,
  length: number,
  settings: TunnelSettings,
  route: TunnelRoute,
): number {
  const tunnel = at - tunnelHeaderBytes(settings.inner, route.hasVip);
  const outer = tunnel - OUTER_HEADER_BYTES;
  writeTunnelHeader(view, bytes, tunnel, settings, route);
  writeOuterHeader(view, bytes, outer, settings, route, at + length - tunnel, ipv4.tos(bytes, at));
  vnet.clear(bytes, outer);
  return outer;
}

/** Writes the tunnel header that begins at `at`. */
export function writeTunnelHeader(
  view: DataView,
  bytes: Uint8Array,
  at: number,
  { inner, vni }: TunnelSettings,
  { hasVip, vip, vipPort }: TunnelRoute,
): void {
  if (hasVip) writeGeneveWithVip(bytes, view, at, inner, vni, vip, vipPort);
  else writeGeneve(view, at, inner, vni);
  if (inner === INNER_ETHERNET) writeInnerEthernet(view, at + tunnelHeaderBytes(inner, hasVip) - ETHERNET_HEADER_BYTES);
}

/**
 * Writes the outer header that begins at `at`.
 *
 * @param payloadBytes what follows it
 * @param tos of the inner packet
 */
export function writeOuterHeader(
  view: DataView,
  bytes: Uint8Array,
  at: number,
  { address, port }: TunnelSettings,
  { node, sourcePort }: TunnelRoute,
  payloadBytes: number,
  tos: number,
): void {
  ipv4.writeHeader(view, bytes, at, OUTER_HEADER_BYTES + payloadBytes, ipv4.PROTO_UDP, address, node, tos);
  const l4 = at + ipv4.IPV4_HEADER_BYTES;
  udp.writeHeader(view, l4, (sourcePort << 16) | port, udp.UDP_HEADER_BYTES + payloadBytes);
}
