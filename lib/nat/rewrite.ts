import { adjustFull, adjustPartial, difference16, difference32 } from '../wire/checksum.js';
import * as ipv4 from '../wire/ipv4.js';
import { ports as portsOf, TCP_CHECKSUM } from '../wire/tcp.js';
import { UDP_CHECKSUM } from '../wire/udp.js';

/**
 * Rewriting in place: addresses and ports of one packet, its checksums by difference (RFC 1624), nothing else touched. A
 * packet whose checksum was wrong leaves with a checksum that is as wrong: the end that receives it must be able to tell.
 *
 * Super-packets (GSO) need nothing of their own: whoever cuts them repeats the rewritten header, and their L4 checksum is in
 * partial form like that of any packet whose checksum the kernel left to others.
 */

/**
 * Gives a packet that `ipv4.check()` accepted another source, destination and pair of ports. Protocols other than TCP and
 * UDP have only their addresses changed. First fragments are rewritten like whole packets: their L4 checksum covers the
 * datagram, and a difference needs no more than the header. Words that stay the same cost no checksum work.
 *
 * @param src address word, signed as `ipv4.source` reads it
 * @param dst likewise
 * @param ports source port << 16 | destination port, signed or not
 * @param partial the L4 checksum is in partial form (`vnet.isPartial`): it covers the addresses only
 */
export function rewrite(
  view: DataView,
  bytes: Uint8Array,
  at: number,
  l4: number,
  protocol: number,
  src: number,
  dst: number,
  ports: number,
  partial: boolean,
): void {
  let difference = rewriteAddresses(view, bytes, at, src, dst);
  if (protocol !== ipv4.PROTO_TCP && protocol !== ipv4.PROTO_UDP) return;

  const oldPorts = portsOf(view, l4);
  if (oldPorts !== (ports | 0)) {
    view.setInt32(l4, ports);
    if (!partial) difference += difference32(oldPorts, ports);
  }
  if (difference === 0) return;
  if (protocol === ipv4.PROTO_TCP) {
    if (partial) adjustPartial(bytes, l4 + TCP_CHECKSUM, difference);
    else adjustFull(bytes, l4 + TCP_CHECKSUM, difference);
  } else if (partial) adjustPartial(bytes, l4 + UDP_CHECKSUM, difference);
  else adjustUdp(bytes, l4, difference);
}

/**
 * Gives a packet another source and destination, and its header checksum with them: all there is to do for a fragment that
 * is not the first.
 *
 * @returns what the change adds to a checksum over the pseudo-header, 0 when nothing changed.
 */
export function rewriteAddresses(view: DataView, bytes: Uint8Array, at: number, src: number, dst: number): number {
  let difference = 0;
  const oldSource = ipv4.source(view, at);
  if (oldSource !== src) {
    ipv4.setSource(view, at, src);
    difference = difference32(oldSource, src);
  }
  const oldDestination = ipv4.destination(view, at);
  if (oldDestination !== dst) {
    ipv4.setDestination(view, at, dst);
    difference += difference32(oldDestination, dst);
  }
  if (difference !== 0) adjustFull(bytes, ipv4.checksumOffset(at), difference);
  return difference;
}

/** Gives a packet another identification, and its header checksum with it. */
export function rewriteIdentification(view: DataView, bytes: Uint8Array, at: number, id: number): void {
  const old = ipv4.identification(bytes, at);
  if (old === id) return;
  ipv4.setIdentification(view, at, id);
  adjustFull(bytes, ipv4.checksumOffset(at), difference16(old, id));
}

/** A UDP checksum in full form: 0 means that there is none and stays; a computed 0 is sent as ffff (RFC 768). */
export function adjustUdp(bytes: Uint8Array, l4: number, difference: number): void {
  const at = l4 + UDP_CHECKSUM;
  if ((bytes[at]! | bytes[at + 1]!) === 0) return;
  adjustFull(bytes, at, difference);
  if ((bytes[at]! | bytes[at + 1]!) === 0) {
    bytes[at] = 0xff;
    bytes[at + 1] = 0xff;
  }
}
