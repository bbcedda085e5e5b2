/** Every limit that has a number has a name here. */

/** Bytes left free before each packet in a slot, so that encapsulation is a prepend (outer headers need 62). */
export const HEADROOM_BYTES = 128;

/** The largest IPv4 packet, and so the largest GSO super-packet the kernel hands over. */
export const MAX_PACKET_BYTES = 65535;

/** Packets per batch, and so the most reads that are in flight at once. */
export const BATCH_PACKETS = 64;

/** Packets weir generates (RST, ICMP errors, echo replies): per second, in all and per source address. */
export const REPLIES_PER_SECOND = 1000;
export const REPLIES_PER_SOURCE_PER_SECOND = 50;

/** Fragment tracking: docs/data-path.md, Fragments. */
export const FRAGMENT_ENTRIES = 8192;
export const FRAGMENT_LIFETIME_MS = 30_000;
export const HELD_FRAGMENTS = 1024;
export const HELD_FRAGMENTS_PER_DATAGRAM = 64;
export const HELD_FRAGMENT_MS = 1000;

/** Source ports tried per snat address before the next address is. */
export const SNAT_PORT_TRIES = 32;

/** Return-path rules per endpoint are a linear list for the kernel: beyond this, one rule per interface. */
export const MAX_ENDPOINT_RULES = 64;

/** Datagrams in one write to the device: UDP_MAX_SEGMENTS of Linux. */
export const MAX_UDP_SEGMENTS = 128;

/** Path MTUs that are lower than the device's: how many nodes, how long, and what every IPv4 host takes (RFC 791). */
export const PATH_MTU_ENTRIES = 4096;
export const PATH_MTU_LIFETIME_MS = 600_000;
export const MIN_PATH_MTU = 576;

/** On a node, an entry that was idle for this long gives way to a flow of another VIP with the same reply tuple. */
export const TAKEOVER_IDLE_MS = 60_000;

/** Direct connections a node remembers as such while it recovers. */
export const DIRECT_CONNECTIONS = 4096;

/** Endpoints a node learns from traffic; packets that wait for one, and how long; when one that was not learned is asked for anew. */
export const LEARNED_ENDPOINTS = 64;
export const ASKED_ENDPOINTS = 1024;
export const HELD_FOR_ENDPOINT = 64;
export const HELD_FOR_ENDPOINT_MS = 1000;
export const REFUSED_ENDPOINT_MS = 60_000;

/** Of a configuration's text: to read it takes 300 times the memory, in a process that has packets to forward. */
export const MAX_CONFIG_BYTES = 8 * 1024 * 1024;

/** Maglev table sizes that are accepted: primes, as the paper requires. */
export const MAGLEV_TABLE_SIZES: readonly number[] = [251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521, 131071];
