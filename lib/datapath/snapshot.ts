import type { TunnelSettings } from '../tunnel/encapsulation.js';
import type { NodeSettings } from './node-settings.js';

/**
 * What the data path knows of the configuration: flat typed arrays over SharedArrayBuffers, so that handing a snapshot to the
 * Worker copies references only, whatever its size. Control builds one and never changes it afterwards; the run loop swaps its
 * one reference between two batches.
 *
 * Service and backend ids are rows of `services` and `backends`. Control gives them out by identity (VIP, port, protocol;
 * and address, port, protocol within a service) and keeps them across reloads, since conntrack records hold them. Row 0 is
 * never used: a record's RevNAT and BackendID start at 1, as Cilium's do.
 */
export interface Snapshot {
  /** Grows by one with each snapshot. */
  readonly version: number;

  /** SERVICE_WORDS words per service. */
  readonly services: Int32Array;

  /** BACKEND_WORDS words per backend. */
  readonly backends: Int32Array;

  /** Per backend: when flows kept after its removal are cut, ms of the data path's clock; Infinity while it is configured. */
  readonly cutAt: Float64Array;

  /** The backends that have such a time. Whoever takes a snapshot in use looks at these, not at all. */
  readonly leaving: Int32Array;

  /**
   * The backends that take new flows, service after service, sorted by identity: `[backend id, cumulative weight]` pairs.
   * A service's rows are CHOICES_AT (in pairs) and CHOICES_COUNT.
   */
  readonly choices: Int32Array;

  /** Maglev tables, one after the other; an entry is the number of a choice within its service. */
  readonly maglev: Uint16Array;

  /** (VIP, port, protocol) -> service id, for services that are configured: see balance/lookup. */
  readonly serviceIndex: Int32Array;

  /** (VIP, 0, 0) -> VIP_* bits, for every address weir answers for. */
  readonly vipIndex: Int32Array;

  /** (snat address, 0, 0) -> 1. */
  readonly snatIndex: Int32Array;

  /** The version of the snapshot since which these two are as they are. */
  readonly ownSince: number;

  /**
   * (address, port, protocol) of each configured backend -> the id of the only maglev service in mode dnat that has it, or -1
   * when there is none or more than one: for picking replies up after a start without a table. 0: no backend.
   */
  readonly endpointIndex: Int32Array;

  /** The gateway's tunnels; of a node, whose end `address` and `port` are. */
  readonly tunnel: TunnelSettings;

  /** Of a node; null: this is a gateway. */
  readonly node: NodeSettings | null;

  /** (node, 0, 0) -> 1, for every node that flows may be sent to. */
  readonly nodeIndex: Int32Array;

  /** The client addresses that services allow, as blocks of balance/ranges.ts. */
  readonly ranges: Uint32Array;

  /** The snat pool. */
  readonly snatAddresses: Int32Array;
  readonly snatFirstPort: number;
  readonly snatLastPort: number;

  /** Conntrack timeouts in ms by TIMEOUT_* row. */
  readonly timeouts: Float64Array;

  /** The key of the selection hash, from `seed`. */
  readonly hashKey0: number;
  readonly hashKey1: number;

  /** `network.untracked: drop`. */
  readonly dropUntracked: boolean;

  /** `conntrack.recovery` in ms. */
  readonly recoveryMs: number;

  /** Per backend, COUNTER_* rows; the data path adds, the main thread reads. Kept from snapshot to snapshot. */
  readonly counters: Float64Array;
}

// services
export const SERVICE_WORDS = 16;
export const SERVICE_VIP = 0;
export const SERVICE_PORT = 1;
export const SERVICE_PROTOCOL = 2;
export const SERVICE_MODE = 3;
export const SERVICE_FLAGS = 4;
export const CHOICES_AT = 5;
export const CHOICES_COUNT = 6;
/** The sum of the weights of the choices. */
export const CHOICES_WEIGHT = 7;
export const MAGLEV_AT = 8;
/** 0: algorithm random. */
export const MAGLEV_SIZE = 9;
/** In words. */
export const RANGES_AT = 10;
/** As many as are written; 0: every client may connect. */
export const RANGES_COUNT = 11;
/** Client affinity in seconds; 0: none. */
export const AFFINITY_SECONDS = 12;
/** Open connections at most; 0: any number. */
export const SERVICE_CONNECTIONS = 13;
/** New connections of one client address per second at most; 0: any number. */
export const CLIENT_CONNECTIONS = 14;

export const MODE_DNAT = 0;
export const MODE_SNAT = 1;
export const MODE_DSR = 2;

/** SERVICE_FLAGS */
export const NO_BACKEND_DROP = 1;
export const SERVICE_MAGLEV = 2;
/** The service is no longer configured; its flows are kept until their backends' cutAt. */
export const SERVICE_REMOVED = 4;
/** It has a limit of some kind, or one of its backends has. */
export const SERVICE_LIMITED = 8;

// backends
export const BACKEND_WORDS = 8;
export const BACKEND_ADDRESS = 0;
export const BACKEND_PORT = 1;
export const BACKEND_SERVICE = 2;
/** Where the tunnel to it ends: mode dsr. */
export const BACKEND_NODE = 3;
export const BACKEND_FLAGS = 4;
/** Open connections at most; 0: any number. */
export const BACKEND_CONNECTIONS = 5;

/** BACKEND_FLAGS: its weight is above 0, it is up and configured. */
export const TAKES_NEW = 1;

/** vipIndex */
export const VIP_KNOWN = 1;
export const VIP_ECHO = 2;

// counters
export const COUNTER_ROWS = 8;
export const COUNTER_TX_PACKETS = 0;
export const COUNTER_TX_BYTES = 1;
export const COUNTER_RX_PACKETS = 2;
export const COUNTER_RX_BYTES = 3;
export const COUNTER_CONNECTIONS = 4;
/** TCP connections whose SYN the backend answered with an RST, and those that ended before it gave any answer. */
export const COUNTER_REFUSED = 5;
export const COUNTER_UNANSWERED = 6;
/** Connections that are no longer in the table. */
export const COUNTER_CLOSED = 7;
