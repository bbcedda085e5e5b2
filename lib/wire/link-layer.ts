import { LINK_ETHERNET, LINK_IPV4, LINK_IPV6, LINK_RAW } from './capture.js';

/** What stands before the IP header in a capture. */

const ETHERNET_HEADER_BYTES = 14;
const VLAN_TAG_BYTES = 4;

const ETHERTYPE_IPV4 = 0x0800;
const ETHERTYPE_IPV6 = 0x86dd;
/** 802.1Q, 802.1ad, and the value that was used for stacked tags before it. */
const ETHERTYPES_VLAN: readonly number[] = [0x8100, 0x88a8, 0x9100];

/** The frame carries something else than IP: ARP, LLDP, an 802.3 length. */
export const NOT_IP = -1;
/** Packets of this link type cannot be read. */
export const UNKNOWN_LINK = -2;

/**
 * The length of the link-layer header of a frame, VLAN tags included; all of the frame when it is cut short within. NOT_IP or
 * UNKNOWN_LINK where there is no IP header to be found.
 */
export function linkHeaderLength(linkType: number, bytes: Uint8Array, offset: number, length: number): number {
  if (linkType === LINK_RAW || linkType === LINK_IPV4 || linkType === LINK_IPV6) return 0;
  if (linkType !== LINK_ETHERNET) return UNKNOWN_LINK;
  let header = ETHERNET_HEADER_BYTES;
  while (header <= length) {
    const etherType = (bytes[offset + header - 2]! << 8) | bytes[offset + header - 1]!;
    if (etherType === ETHERTYPE_IPV4 || etherType === ETHERTYPE_IPV6) return header;
    if (!ETHERTYPES_VLAN.includes(etherType)) return NOT_IP;
    header += VLAN_TAG_BYTES;
  }
  return length;
}
