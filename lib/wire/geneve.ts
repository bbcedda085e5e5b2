import { REASON } from '../base/reasons.js';
import { IPV4_HEADER_BYTES } from './ipv4.js';

/**
 * Geneve (RFC 8926), and the one option that direct server return knows: the address and port a client really asked for, as
 * Cilium passes them between its nodes, byte for byte. `at` is the first byte of the Geneve header, after UDP.
 *
 *      0               1               2               3
 *     |ver|  opt len  |O|C|  reserved |        protocol type          |  0
 *     |        virtual network identifier             |   reserved    |  4
 *     |        option class 014b      |   type 81     |0 0 0|  len 2  |  8
 *     |                      virtual IP address                       | 12
 *     |        its port               |              0                | 16
 *
 * Lengths of options are in words: `opt len` of all of them, `len` of one without its header. C says that one of them is
 * critical, which is the high bit of its type: whoever does not know such an option must drop the packet. What follows is an
 * Ethernet frame, whose addresses mean nothing here, or an IPv4 packet.
 */

export const GENEVE_PORT = 6081;
export const GENEVE_HEADER_BYTES = 8;

/** The option whole: its header, then address, port and padding. */
export const DSR_OPTION_BYTES = 12;
export const DSR_OPTION_CLASS = 0x014b;
/** With the critical bit. */
export const DSR_OPTION_TYPE = 0x81;

/** Protocol types of what is inside. */
export const INNER_ETHERNET = 0x6558;
export const INNER_IPV4 = 0x0800;

export const ETHERNET_HEADER_BYTES = 14;

/** Inner frames go from 02:00:00:00:00:01 to 02:00:00:00:00:02, which are locally administered. */
const MAC_PREFIX = 0x02000000;
const INNER_SOURCE_MAC = 0x01;
const INNER_DESTINATION_MAC = 0x02;

const ETHERTYPE = 12;

const PROTOCOL_TYPE = 2;
const VNI = 4;

/** In byte 1. */
const OAM_BIT = 0x80;
const CRITICAL_BIT = 0x40;
/** In an option's type. */
const CRITICAL_TYPE = 0x80;

const OPTION_HEADER_BYTES = 4;

/** What `checkGeneve` finds; owned by the caller and reused. */
export interface GeneveContent {
  /** Offset of the inner IPv4 header, of which at least 20 bytes are there; nothing of it is judged. */
  inner: number;
  /** Bytes from there to the end of the datagram. */
  innerLength: number;
  vni: number;
  /** Whether the option is there; without it `vip` and `vipPort` are 0. */
  hasVip: boolean;
  /** Address word, signed as `ipv4.source` reads it. */
  vip: number;
  vipPort: number;
}

export function makeGeneveContent(): GeneveContent {
  return { inner: 0, innerLength: 0, vni: 0, hasVip: false, vip: 0, vipPort: 0 };
}

/**
 * Judges the Geneve packet of `length` bytes at `at`, the payload of one UDP datagram, and finds what is in it. Options
 * of others are skipped wherever they stand; of two of ours the first
 * counts.
 *
 * @returns 0, or the id of the reason to drop it, and `into` means nothing. `geneve-malformed`: a version other than 0, a control
 * packet (OAM), lengths that contradict each other, our option with another length than 8, something other than IPv4 inside, or
 * too little of it. `geneve-critical-option`: a critical option that is not ours.
 */
export function checkGeneve(
  bytes: Uint8Array,
  view: DataView,
  at: number,
  length: number,
  into: GeneveContent,
): number {
  const malformed = REASON['geneve-malformed'];
  if (length < GENEVE_HEADER_BYTES) return malformed;
  const optionBytes = (bytes[at]! & 0x3f) << 2;
  if (bytes[at]! >> 6 !== 0 || (bytes[at + 1]! & OAM_BIT) !== 0) return malformed;
  const end = at + length;
  const payload = at + GENEVE_HEADER_BYTES + optionBytes;
  if (payload > end) return malformed;

  into.hasVip = false;
  into.vip = 0;
  into.vipPort = 0;
  let isCritical = false;
  for (let option = at + GENEVE_HEADER_BYTES; option < payload; ) {
    const type = bytes[option + 2]!;
    const next = option + OPTION_HEADER_BYTES + ((bytes[option + 3]! & 0x1f) << 2);
    if (next > payload) return malformed;
    if (type === DSR_OPTION_TYPE && view.getUint16(option) === DSR_OPTION_CLASS) {
      if (next - option !== DSR_OPTION_BYTES) return malformed;
      if (!into.hasVip) {
        into.hasVip = true;
        into.vip = view.getInt32(option + OPTION_HEADER_BYTES);
        into.vipPort = view.getUint16(option + OPTION_HEADER_BYTES + 4);
      }
    } else if ((type & CRITICAL_TYPE) !== 0) isCritical = true;
    option = next;
  }
  if (isCritical) return REASON['geneve-critical-option'];

  let inner = payload;
  const protocolType = view.getUint16(at + PROTOCOL_TYPE);
  if (protocolType === INNER_ETHERNET) {
    inner += ETHERNET_HEADER_BYTES;
    if (inner > end || view.getUint16(payload + ETHERTYPE) !== INNER_IPV4) return malformed;
  } else if (protocolType !== INNER_IPV4) return malformed;
  if (end - inner < IPV4_HEADER_BYTES) return malformed;
  into.inner = inner;
  into.innerLength = end - inner;
  into.vni = view.getUint32(at + VNI) >>> 8;
  return 0;
}

/** Writes a header without options: GENEVE_HEADER_BYTES. */
export function writeGeneve(view: DataView, at: number, protocolType: number, vni: number): void {
  view.setUint16(at, 0);
  view.setUint16(at + PROTOCOL_TYPE, protocolType);
  view.setUint32(at + VNI, vni << 8);
}

/** Writes a header with the option: DSR_OPTION_BYTES more. */
export function writeGeneveWithVip(
  bytes: Uint8Array,
  view: DataView,
  at: number,
  protocolType: number,
  vni: number,
  vip: number,
  vipPort: number,
): void {
  writeGeneve(view, at, protocolType, vni);
  bytes[at] = DSR_OPTION_BYTES >> 2;
  bytes[at + 1] = CRITICAL_BIT;
  const option = at + GENEVE_HEADER_BYTES;
  view.setUint16(option, DSR_OPTION_CLASS);
  bytes[option + 2] = DSR_OPTION_TYPE;
  bytes[option + 3] = (DSR_OPTION_BYTES - OPTION_HEADER_BYTES) >> 2;
  view.setInt32(option + OPTION_HEADER_BYTES, vip);
  view.setUint16(option + OPTION_HEADER_BYTES + 4, vipPort);
  view.setUint16(option + OPTION_HEADER_BYTES + 6, 0);
}

/** Writes the header of the inner frame: ETHERNET_HEADER_BYTES. */
export function writeInnerEthernet(view: DataView, at: number): void {
  view.setInt32(at, MAC_PREFIX);
  view.setUint16(at + 4, INNER_DESTINATION_MAC);
  view.setInt32(at + 6, MAC_PREFIX);
  view.setUint16(at + 10, INNER_SOURCE_MAC);
  view.setUint16(at + ETHERTYPE, INNER_IPV4);
}
