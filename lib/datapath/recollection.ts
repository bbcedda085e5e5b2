import type { Remembered } from '../balance/affinity.js';
import type { DatagramMemory } from '../conntrack/fragments.js';
import type { AnswersCounted } from '../nat/rate-limit.js';
import type { Lowered } from '../tunnel/path-mtu.js';
import type { Decision } from './fragments.js';
import type { LimitCounts } from './limits.js';

/**
 * What a gateway knows besides its tables and its snapshot, as far as it bears on one packet. It lives in the data path's
 * thread alone, which is asked for it between two batches (a few look-ups, none of which counts as a use); a second gateway that
 * is told all of it decides like the first. Left out is which identifications other datagrams hold, which depends on where the
 * packet will go.
 */
export interface Recollection {
  /** The backend that the service's affinity has for the client. */
  readonly affinity: Remembered | null;
  readonly limits: LimitCounts;
  /** Until when replies without a record are recognised, ms: since a start without a table (its begin), and for a full one. */
  readonly recoveringSince: number;
  readonly statelessTcpUntilMs: number;
  readonly statelessAnyUntilMs: number;
  readonly answers: AnswersCounted;
  /** By node, where it may be less than the device's. */
  readonly pathMtus: readonly (readonly [node: number, lowered: Lowered])[];
  readonly datagram: DatagramMemory<Decision>;
}

/** The packet that is asked about. Addresses are signed words. */
export interface RecollectionQuery {
  readonly source: number;
  readonly destination: number;
  readonly protocol: number;
  readonly identification: number;
  /** The service it is addressed to, 0: none. */
  readonly service: number;
  /** Where it may be sent through a tunnel. */
  readonly nodes: readonly number[];
}

/** Of a gateway that nothing has come to yet. */
export function emptyRecollection(): Recollection {
  return {
    affinity: null,
    limits: { services: [], backends: [], clientFullAtMs: null },
    recoveringSince: Number.NEGATIVE_INFINITY,
    statelessTcpUntilMs: Number.NEGATIVE_INFINITY,
    statelessAnyUntilMs: Number.NEGATIVE_INFINITY,
    answers: { all: { startMs: Number.NEGATIVE_INFINITY, count: 0 }, source: null },
    pathMtus: [],
    datagram: { key: '', decided: null, held: [], heldElsewhere: 0 },
  };
}
