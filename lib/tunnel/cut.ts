import { MAX_PACKET_BYTES, MAX_UDP_SEGMENTS } from '../base/limits.js';
import { type PacketMemory, type PacketOutput, packetOffset } from '../io/device.js';
import { fold, pseudoHeaderSum, storeFull, sum, sumPayload } from '../wire/checksum.js';
import * as ipv4 from '../wire/ipv4.js';
import * as tcp from '../wire/tcp.js';
import * as udp from '../wire/udp.js';
import * as vnet from '../wire/vnet.js';
import {
  OUTER_HEADER_BYTES,
  type TunnelRoute,
  type TunnelSettings,
  tunnelHeaderBytes,
  writeOuterHeader,
  writeTunnelHeader,
} from './encapsulation.js';

/**
 * Packets that are cut to go through the tunnel: super-packets, whose cutting the kernel left to whoever sends them, and packets
 * without DF that do not fit.
 *
 *     packet    | headers | payload ............................................ |
 *     pieces    | headers | pieceBytes |    | headers | pieceBytes |    | headers | rest |
 *     writes    | outer | tunnel | piece | tunnel | piece | ...    | outer | tunnel | piece | ...
 *
 * All pieces but the last have the same size, and so have the datagrams they travel in, which is what UDP segmentation asks for:
 * a device that has it takes up to MAX_UDP_SEGMENTS of them in one write, under one outer header, and the kernel or the network
 * card makes datagrams of them as late as it can. No write exceeds 65,535 bytes; the pieces of a full super-packet do, by
 * their headers, and take two. Where the device has no UDP segmentation every piece is a write.
 *
 * Pieces cannot be made where the packet lies, their headers being in between: each write gets a slot of its own.
 */

/** What the pieces are, and so which headers each repeats: IP and TCP, IP and UDP, or IP alone. */
export const TCP_SEGMENTS = 0;
export const UDP_DATAGRAMS = 1;
export const FRAGMENTS = 2;

export class Cutter {
  readonly #output: PacketOutput;
  readonly #memory: PacketMemory;
  readonly #piecesPerWrite: number;

  /** What the last call put out. */
  writes = 0;
  bytes = 0;

  constructor(output: PacketOutput) {
    this.#output = output;
    this.#memory = output.memory;
    this.#piecesPerWrite = output.features.udpSegmentation ? MAX_UDP_SEGMENTS : 1;
  }

  /**
   * Sends the packet of `length` bytes at `at` in pieces. It stays as it is, and its slot the caller's. Segments and datagrams get
   * full checksums whatever form the packet's has; a packet to be fragmented must have a full one.
   *
   * @param pieceBytes payload of each piece but the last; of fragments, a multiple of 8
   * @returns false when slots ran out: what was not sent by then is lost.
   */
  send(
    kind: number,
    at: number,
    length: number,
    pieceBytes: number,
    settings: TunnelSettings,
    route: TunnelRoute,
  ): boolean {
    this.writes = 0;
    this.bytes = 0;
    return this.#cut(kind, at, length, pieceBytes, settings, route);
  }

  /**
   * Sends a UDP super-packet whose datagrams do not fit: each is made whole, then fragmented.
   *
   * @param datagramBytes payload of each datagram but the last
   * @param fragmentBytes payload of each fragment but the last, a multiple of 8
   * @returns as `send`
   */
  sendFragmented(
    at: number,
    length: number,
    datagramBytes: number,
    fragmentBytes: number,
    settings: TunnelSettings,
    route: TunnelRoute,
  ): boolean {
    this.writes = 0;
    this.bytes = 0;
    const slot = this.#output.take();
    if (slot < 0) return false;
    const { bytes } = this.#memory;
    const headers = repeatedBytes(UDP_DATAGRAMS, bytes, at);
    const piece = packetOffset(this.#memory, slot);
    let isSent = true;
    for (let skipped = 0; isSent && skipped < length - headers; skipped += datagramBytes) {
      const payload = Math.min(datagramBytes, length - headers - skipped);
      this.#makePiece(UDP_DATAGRAMS, at, length, headers, skipped, payload, skipped / datagramBytes, piece);
      isSent = this.#cut(FRAGMENTS, piece, headers + payload, fragmentBytes, settings, route);
    }
    this.#output.release(slot);
    return isSent;
  }

  #cut(
    kind: number,
    at: number,
    length: number,
    pieceBytes: number,
    settings: TunnelSettings,
    route: TunnelRoute,
  ): boolean {
    const { bytes, view } = this.#memory;
    const headers = repeatedBytes(kind, bytes, at);
    const tunnelBytes = tunnelHeaderBytes(settings.inner, route.hasVip);
    const datagramBytes = tunnelBytes + headers + pieceBytes;
    const most = Math.floor((MAX_PACKET_BYTES - OUTER_HEADER_BYTES) / datagramBytes);
    const perWrite = Math.min(this.#piecesPerWrite, most);
    const total = length - headers;
    let index = 0;
    for (let skipped = 0; skipped < total; ) {
      const slot = this.#output.take();
      if (slot < 0) return false;
      const outer = packetOffset(this.#memory, slot);
      let to = outer + OUTER_HEADER_BYTES;
      let pieces = 0;
      for (; pieces < perWrite && skipped < total; pieces++) {
        const payload = Math.min(pieceBytes, total - skipped);
        writeTunnelHeader(view, bytes, to, settings, route);
        to += tunnelBytes;
        this.#makePiece(kind, at, length, headers, skipped, payload, index++, to);
        to += headers + payload;
        skipped += payload;
      }
      const written = to - outer;
      writeOuterHeader(view, bytes, outer, settings, route, written - OUTER_HEADER_BYTES, ipv4.tos(bytes, at));
      if (pieces === 1) vnet.clear(bytes, outer);
      else this.#askForSegments(outer, written, datagramBytes);
      this.#output.transmit(slot, outer, written);
      this.writes++;
      this.bytes += written;
    }
    return true;
  }

  #makePiece(
    kind: number,
    at: number,
    length: number,
    headers: number,
    skipped: number,
    payload: number,
    index: number,
    to: number,
  ): void {
    const { bytes, view } = this.#memory;
    const isLast = headers + skipped + payload === length;
    bytes.copyWithin(to, at, at + headers);
    bytes.copyWithin(to + headers, at + headers + skipped, at + headers + skipped + payload);
    ipv4.setTotalLength(view, to, headers + payload);
    if (kind === FRAGMENTS) finishFragment(view, bytes, to, headers, skipped, isLast);
    else {
      ipv4.setIdentification(view, to, ipv4.identification(bytes, at) + index);
      if (kind === TCP_SEGMENTS) finishSegment(view, bytes, to, headers, skipped, payload, isLast);
      else finishDatagram(view, bytes, to, headers, payload, hasUdpChecksum(bytes, at));
    }
    ipv4.storeChecksum(bytes, to);
  }

  /** One write of several datagrams: the kernel wants its UDP checksum in partial form. */
  #askForSegments(outer: number, written: number, datagramBytes: number): void {
    const { view } = this.#memory;
    vnet.describeUdpSegments(view, outer, datagramBytes);
    const pseudo = pseudoHeaderSum(
      ipv4.source(view, outer),
      ipv4.destination(view, outer),
      ipv4.PROTO_UDP,
      written - ipv4.IPV4_HEADER_BYTES,
    );
    view.setUint16(outer + ipv4.IPV4_HEADER_BYTES + udp.UDP_CHECKSUM, fold(pseudo));
  }
}

function repeatedBytes(kind: number, bytes: Uint8Array, at: number): number {
  const header = ipv4.headerLength(bytes, at);
  if (kind === FRAGMENTS) return header;
  return header + (kind === TCP_SEGMENTS ? tcp.dataOffset(bytes, at + header) : udp.UDP_HEADER_BYTES);
}

function hasUdpChecksum(bytes: Uint8Array, at: number): boolean {
  const l4 = at + ipv4.headerLength(bytes, at);
  return vnet.isPartial(bytes, at, l4) || udp.checksum(bytes, l4) !== 0;
}

/** FIN and PSH are the last segment's, CWR the first's (RFC 3168 6.1.2), and URG is for those that begin before the urgent data ends. */
function finishSegment(
  view: DataView,
  bytes: Uint8Array,
  at: number,
  headers: number,
  skipped: number,
  payload: number,
  isLast: boolean,
): void {
  const l4 = at + ipv4.headerLength(bytes, at);
  let flags = tcp.flags(bytes, l4);
  if (!isLast) flags &= ~(tcp.FIN | tcp.PSH);
  if (skipped !== 0) {
    flags &= ~tcp.CWR;
    if ((flags & tcp.URG) !== 0) {
      const urgent = tcp.urgentPointer(view, l4) - skipped;
      if (urgent <= 0) flags &= ~tcp.URG;
      tcp.setUrgentPointer(view, l4, Math.max(0, urgent));
    }
  }
  tcp.setFlags(bytes, l4, flags);
  tcp.setSequence(view, l4, tcp.sequence(view, l4) + skipped);
  view.setUint16(l4 + tcp.TCP_CHECKSUM, 0);
  storeFull(bytes, l4 + tcp.TCP_CHECKSUM, sumOfL4(view, bytes, at, l4, headers, payload));
}

function finishDatagram(
  view: DataView,
  bytes: Uint8Array,
  at: number,
  headers: number,
  payload: number,
  hasChecksum: boolean,
): void {
  const l4 = at + ipv4.headerLength(bytes, at);
  udp.setLength(view, l4, udp.UDP_HEADER_BYTES + payload);
  view.setUint16(l4 + udp.UDP_CHECKSUM, 0);
  if (hasChecksum) udp.storeChecksum(bytes, l4, sumOfL4(view, bytes, at, l4, headers, payload));
}

/** Of the pseudo-header, the L4 header and the payload of the piece at `at`. */
function sumOfL4(view: DataView, bytes: Uint8Array, at: number, l4: number, headers: number, payload: number): number {
  const header = at + headers - l4;
  const source = ipv4.source(view, at);
  const destination = ipv4.destination(view, at);
  const pseudo = pseudoHeaderSum(source, destination, ipv4.protocol(bytes, at), header + payload);
  return pseudo + sum(bytes, l4, header) + sumPayload(view, l4 + header, payload);
}

/** RFC 791 3.2. What is cut may itself be a fragment. */
function finishFragment(
  view: DataView,
  bytes: Uint8Array,
  at: number,
  headers: number,
  skipped: number,
  isLast: boolean,
): void {
  const field = ipv4.fragmentField(bytes, at);
  const more = isLast ? field : field | ipv4.FLAG_MF;
  ipv4.setFragmentField(view, at, more + (skipped >> 3));
  if (skipped !== 0) blankOptions(bytes, at + ipv4.IPV4_HEADER_BYTES, at + headers);
}

/** Options without the copied flag are the first fragment's alone; no-operations take their place. */
function blankOptions(bytes: Uint8Array, from: number, end: number): void {
  for (let at = from; at < end && bytes[at] !== 0; ) {
    const length = bytes[at] === 1 ? 1 : Math.max(2, at + 1 < end ? bytes[at + 1]! : 2);
    if ((bytes[at]! & 0x80) === 0) bytes.fill(1, at, Math.min(at + length, end));
    at += length;
  }
}
