/**
 * Every reason a packet is dropped, answered by weir itself, or passed on untouched. The names are stable: they are the
 * label of metrics, the `reason` of `weir replay` and the headings of docs/reasons.md (a test keeps the three together).
 */

/** `[name, verdict it goes with, what it means to an operator]`; the row number is the reason's id. */
const TABLE = [
  ['none', 'none', 'The packet was forwarded; nothing to explain.'],
  ['malformed', 'drop', 'A header is short, lies about a length, or its fields contradict each other.'],
  ['bad-checksum-header', 'drop', 'The IPv4 header checksum is wrong.'],
  ['unsupported-protocol', 'drop', 'Not IPv4, or a protocol that no answer can be given to.'],
  [
    'not-in-source-range',
    'drop',
    'The client is outside the service’s sourceRanges, or a tunnelled packet is not from one of the tunnel’s peers.',
  ],
  ['no-snat-port', 'drop', 'Every source port tried in the snat pool was taken.'],
  ['table-full', 'drop', 'The conntrack table is full of live connections and nothing could be evicted.'],
  [
    'reply-tuple-clash',
    'drop',
    'Another live connection already owns the tuple the replies would have, and no other port or backend is left.',
  ],
  [
    'hairpin-refused',
    'drop',
    'The chosen backend is the client itself, or the client is a VIP or an snat address; dnat cannot serve that.',
  ],
  ['fragment-expired', 'drop', 'A held fragment waited 1 s and its first fragment never came.'],
  ['fragment-limit', 'drop', 'Too many fragments wait for their first one, in all or for this datagram.'],
  ['unknown-flow', 'drop', 'A mid-stream packet of no known connection that must not be answered (it is an RST).'],
  [
    'icmp-unknown-flow',
    'drop',
    'An ICMP error that quotes no tracked connection, or an ICMP message nobody asked for.',
  ],
  ['icmp-malformed', 'drop', 'An ICMP message that is short, has a wrong checksum, or quotes less than 8 bytes of L4.'],
  [
    'no-backend',
    'drop',
    'No backend takes new connections, and the service says `noBackend: drop` or no answer is due.',
  ],
  [
    'connection-limit',
    'drop',
    'The service, or every backend of it, has `maxConnections` open, and it says `noBackend: drop` or no answer is due.',
  ],
  ['client-rate', 'drop', 'The client opens more connections than `newConnectionsPerSecond` of the service.'],
  ['unknown-port', 'drop', 'No service at this VIP and port, and the packet must not be answered.'],
  ['untracked-reply', 'drop', 'A packet to an snat address, or from a backend under `untracked: drop`, with no entry.'],
  ['rate-limited', 'drop', 'An answer was due, but weir already sent 50 to this source or 1000 in all this second.'],
  ['echo-off', 'drop', 'An echo request to a VIP whose services all have `icmpEcho: false`.'],
  ['geneve-malformed', 'drop', 'A Geneve packet with a wrong version, length or option.'],
  ['geneve-critical-option', 'drop', 'A Geneve packet with a critical option weir does not know.'],
  ['mtu-exceeded', 'drop', 'The packet does not fit the path and must not be answered.'],
  ['device-write', 'drop', 'The kernel refused the packet weir wrote to the device, or its pieces had no room.'],
  ['echo', 'reply', 'weir answered an echo request to a VIP.'],
  ['rst-no-backend', 'reply', 'weir sent an RST: the service has no backend that takes connections.'],
  [
    'rst-connection-limit',
    'reply',
    'weir sent an RST: the service, or every backend of it, has `maxConnections` open.',
  ],
  ['rst-unknown-port', 'reply', 'weir sent an RST: no service at this VIP and port.'],
  ['rst-mid-stream', 'reply', 'weir sent an RST: the connection is not tracked and cannot be picked up.'],
  ['unreachable', 'reply', 'weir sent an ICMP port or protocol unreachable.'],
  ['frag-needed', 'reply', 'weir sent an ICMP fragmentation needed: the packet does not fit the tunnel.'],
  ['not-tracked', 'pass', 'Not weir’s: passed on unchanged for the kernel to route.'],
] as const;

export type ReasonName = (typeof TABLE)[number][0];

/** Reason ids by name, for the data path: `REASON['no-backend']` is a small integer. */
export const REASON = Object.fromEntries(TABLE.map(([name], id) => [name, id])) as Record<ReasonName, number>;

/** Names by id. */
export const REASON_NAMES: readonly ReasonName[] = TABLE.map(([name]) => name);

/** The verdict a reason belongs to, by id. */
export const REASON_KINDS: readonly ('none' | 'drop' | 'reply' | 'pass')[] = TABLE.map(([, kind]) => kind);

/** One sentence for an operator, by id. */
export const REASON_MEANINGS: readonly string[] = TABLE.map(([, , meaning]) => meaning);

export const REASON_COUNT = TABLE.length;
