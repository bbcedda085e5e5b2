import { MAX_PACKET_BYTES } from '../base/limits.js';
import type { PacketMemory } from '../io/device.js';
import { fold, pseudoHeaderSum, sum, sumPayload } from '../wire/checksum.js';
import * as ipv4 from '../wire/ipv4.js';
import * as tcp from '../wire/tcp.js';
import * as vnet from '../wire/vnet.js';

/**
 * Segments that came through the tunnel one by one, joined again to the super-packet they were cut from: what a network card or
 * Linux does with segments of a wire (GRO). One write to the device then stands for some 45, and the kernel takes them in as one.
 *
 *     segments      | headers | payload | headers | payload | ... | headers | rest |
 *     super-packet  | headers | payload | payload | ...           | rest |
 *
 * The law: cut again by whoever sends it on, a super-packet gives the packets it was made of, byte for byte. Joined is therefore only
 * what differs in nothing that cutting would not restore, and nothing that Linux would leave apart (net/ipv4/tcp_offload.c,
 * tcp_gro_receive; inet_gro_receive):
 *
 * - IPv4 headers without options, no fragments, equal but for length, identification and checksum. Identifications count upwards; with
 *   DF they may also all be the same, since that of an atomic datagram means nothing (RFC 6864).
 * - TCP headers equal but for sequence and checksum, options included; the sequence goes on where the last segment ended.
 * - ACK and ECE are the only flags; PSH and FIN end the super-packet with the segment that has them.
 * - As much payload in each as in the first; less ends it. A segment without payload stands alone.
 * - Checksums are right. A super-packet's is computed by whoever cuts it, and a wrong one must stay wrong.
 *
 * Stricter than Linux: CWR stands alone, and urgent pointers are equal. Only neighbours are joined: packets stay in order, and
 * what came between two segments of a flow was not cut from the same super-packet.
 */
export class Coalescer {
  readonly #bytes: Uint8Array;
  readonly #view: DataView;
  readonly #slotBytes: number;

  /** Of the packet in hand: its IP header, and its bytes so far. */
  at = 0;
  length = 0;

  #end = 0;
  #isOpen = false;
  #count = 0;
  #isFirstVerified = false;
  #hasFixedId = false;
  #headerBytes = 0;
  #segmentBytes = 0;
  #nextSequence = 0;
  /** PSH and FIN of the last segment. */
  #lastFlags = 0;

  constructor({ bytes, view, slotBytes }: PacketMemory) {
    this.#bytes = bytes;
    this.#view = view;
    this.#slotBytes = slotBytes;
  }

  /** Takes a packet in hand that `ipv4.check()` accepted, the one before being done with. */
  begin(slot: number, at: number, length: number): void {
    const bytes = this.#bytes;
    this.at = at;
    this.length = length;
    this.#count = 1;
    this.#isOpen = false;
    if (bytes[at] !== 0x45 || bytes[at + 9] !== ipv4.PROTO_TCP) return;
    if ((ipv4.fragmentField(bytes, at) & ~ipv4.FLAG_DF) !== 0) return;
    const l4 = at + ipv4.IPV4_HEADER_BYTES;
    if ((tcp.flags(bytes, l4) & ~tcp.ECE) !== tcp.ACK) return;
    this.#headerBytes = ipv4.IPV4_HEADER_BYTES + tcp.dataOffset(bytes, l4);
    this.#segmentBytes = length - this.#headerBytes;
    if (this.#segmentBytes === 0) return;
    this.#isOpen = true;
    this.#isFirstVerified = false;
    this.#hasFixedId = false;
    this.#lastFlags = 0;
    this.#nextSequence = (tcp.sequence(this.#view, l4) + this.#segmentBytes) | 0;
    this.#end = Math.min(at + MAX_PACKET_BYTES, (slot + 1) * this.#slotBytes);
  }

  /**
   * Joins the packet of `length` bytes at `from`, which `ipv4.check()` accepted and which lies in another slot, to the one in hand.
   *
   * @returns false, and nothing has changed, when it is not the next segment
   */
  append(from: number, length: number): boolean {
    if (!this.#isOpen) return false;
    const { at } = this;
    const bytes = this.#bytes;
    const view = this.#view;
    const headerBytes = this.#headerBytes;
    const payload = length - headerBytes;
    if (payload <= 0 || payload > this.#segmentBytes || at + this.length + payload > this.#end) return false;
    const l4 = at + ipv4.IPV4_HEADER_BYTES;
    const fromL4 = from + ipv4.IPV4_HEADER_BYTES;
    if (tcp.sequence(view, fromL4) !== this.#nextSequence) return false;
    if (!this.#hasSameHeaders(from, fromL4, l4)) return false;
    if (!this.#isFirstVerified) {
      if (!isSound(bytes, view, at, this.length)) {
        this.#isOpen = false;
        return false;
      }
      this.#isFirstVerified = true;
    }
    if (!isSound(bytes, view, from, length)) return false;

    bytes.copyWithin(at + this.length, from + headerBytes, from + length);
    const isFixed = ipv4.identification(bytes, from) === ipv4.identification(bytes, at);
    if (this.#count === 1) this.#hasFixedId = isFixed;
    this.#count++;
    this.length += payload;
    this.#nextSequence = (this.#nextSequence + payload) | 0;
    this.#lastFlags = tcp.flags(bytes, fromL4) & (tcp.PSH | tcp.FIN);
    if (this.#lastFlags !== 0 || payload < this.#segmentBytes) this.#isOpen = false;
    return true;
  }

  /** Makes the packet in hand ready to be sent: alone it stays as it came, with a clear vnet header. */
  finish(): void {
    const { at, length } = this;
    const bytes = this.#bytes;
    const view = this.#view;
    if (this.#count === 1) {
      vnet.clear(bytes, at);
      return;
    }
    const l4 = at + ipv4.IPV4_HEADER_BYTES;
    ipv4.setTotalLength(view, at, length);
    ipv4.storeChecksum(bytes, at);
    tcp.setFlags(bytes, l4, tcp.flags(bytes, l4) | this.#lastFlags);
    view.setUint16(l4 + tcp.TCP_CHECKSUM, fold(pseudoSum(view, at, length)));
    vnet.describeTcpSegments(view, at, this.#headerBytes, this.#segmentBytes);
  }

  #hasSameHeaders(from: number, fromL4: number, l4: number): boolean {
    const { at } = this;
    const bytes = this.#bytes;
    const view = this.#view;
    // Version and TOS; TTL and protocol; the flags.
    if (view.getUint16(from) !== view.getUint16(at) || view.getUint16(from + 8) !== view.getUint16(at + 8))
      return false;
    if (ipv4.source(view, from) !== ipv4.source(view, at)) return false;
    if (ipv4.destination(view, from) !== ipv4.destination(view, at)) return false;
    const fragment = ipv4.fragmentField(bytes, at);
    if (ipv4.fragmentField(bytes, from) !== fragment) return false;
    const step = (ipv4.identification(bytes, from) - ipv4.identification(bytes, at)) & 0xffff;
    const mayBeFixed = fragment !== 0 && (this.#count === 1 || this.#hasFixedId);
    const mayCount = this.#count === 1 || !this.#hasFixedId;
    if (!(mayBeFixed && step === 0) && !(mayCount && step === this.#count)) return false;

    if (tcp.ports(view, fromL4) !== tcp.ports(view, l4)) return false;
    if (tcp.acknowledgement(view, fromL4) !== tcp.acknowledgement(view, l4)) return false;
    // Data offset, flags and window in one word.
    const difference = view.getInt32(fromL4 + 12) ^ view.getInt32(l4 + 12);
    if ((difference & ~((tcp.PSH | tcp.FIN) << 16)) !== 0) return false;
    if (view.getUint16(fromL4 + 18) !== view.getUint16(l4 + 18)) return false;
    const end = at + this.#headerBytes;
    for (let a = l4 + tcp.TCP_HEADER_BYTES, b = fromL4 + tcp.TCP_HEADER_BYTES; a < end; a += 4, b += 4) {
      if (view.getInt32(a) !== view.getInt32(b)) return false;
    }
    return true;
  }
}

/** Whether the TCP checksum of the packet is right. */
function isSound(bytes: Uint8Array, view: DataView, at: number, length: number): boolean {
  const l4 = at + ipv4.IPV4_HEADER_BYTES;
  const headers = tcp.TCP_HEADER_BYTES;
  const total =
    pseudoSum(view, at, length) +
    sum(bytes, l4, headers) +
    sumPayload(view, l4 + headers, length - ipv4.IPV4_HEADER_BYTES - headers);
  return fold(total) === 0xffff;
}

function pseudoSum(view: DataView, at: number, length: number): number {
  const source = ipv4.source(view, at);
  const destination = ipv4.destination(view, at);
  return pseudoHeaderSum(source, destination, ipv4.PROTO_TCP, length - ipv4.IPV4_HEADER_BYTES);
}
