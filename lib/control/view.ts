import type { Histogram } from '../base/histogram.js';
import type { Problem } from '../config/load.js';
import type { ExplainView } from './explain/explain-view.js';
import type { ExplainQuery } from './explain/request.js';
import type { FlowFormat } from './flow-formats.js';
import type { FlowFilter, FlowJson } from './flows.js';
import type { LiveWatch } from './live/live-view.js';
import type { PlanView } from './plan/plan-view.js';

/**
 * What a running weir tells about itself and lets itself be told: the answers of the admin API, which the commands print. Sizes
 * are in bytes, times in seconds, points in time in ISO 8601, counts since the start unless something else is said.
 */
export interface StatusView {
  readonly version: string;
  readonly pid: number;
  readonly startedAt: string;
  readonly uptimeSeconds: number;
  readonly device: DeviceView;
  /** null: a gateway. */
  readonly node: NodeView | null;
  readonly config: ConfigView;
  readonly conntrack: { readonly tcp: FillView; readonly any: FillView };
  readonly traffic: TrafficView;
}

export interface DeviceView {
  readonly name: string;
  readonly mtu: number;
  readonly engine: string;
  readonly vnetHeader: boolean;
  readonly offloads: { readonly csum: boolean; readonly tso4: boolean; readonly tso6: boolean; readonly uso: boolean };
  /** How the engine was chosen and which offloads the kernel gave. */
  readonly notes: readonly string[];
}

/** The end of the tunnels, and whose answers are led in; `learned`: from traffic. */
export interface NodeView {
  readonly address: string;
  readonly port: number;
  readonly endpoints: readonly {
    readonly address: string;
    readonly port: number;
    readonly protocol: string;
    readonly learned: boolean;
  }[];
}

export interface ConfigView {
  readonly path: string;
  /** Grows by one with each that is applied. */
  readonly version: number;
  readonly services: number;
  readonly backends: number;
  /** Since when the configuration in use is in use. */
  readonly appliedAt: string;
  readonly ageSeconds: number;
  /** The last time a file was read, whether or not it was taken; the start counts. */
  readonly lastReload: {
    readonly success: boolean;
    readonly at: string;
    readonly message: string;
    readonly seconds: number;
  };
  /** Files taken and refused; the start counts among neither. */
  readonly reloads: { readonly applied: number; readonly refused: number };
}

export interface FillView {
  /** Connections that have not expired. */
  readonly entries: number;
  readonly limit: number;
}

export interface TrafficView {
  /** Through the device: from the kernel (rx) and back to it (tx). */
  readonly rxPackets: number;
  readonly rxBytes: number;
  readonly txPackets: number;
  readonly txBytes: number;
  readonly batches: number;
  readonly forwarded: number;
  /** Without a record, the table being full. */
  readonly stateless: number;
  /** Connections taken up in the middle. */
  readonly pickedUp: number;
  /** Flows ended because their backend's drain time was over. */
  readonly cut: number;
  /** By reason; every reason is there. */
  readonly drops: Readonly<Record<string, number>>;
  readonly replies: Readonly<Record<string, number>>;
  readonly passes: Readonly<Record<string, number>>;
}

export interface ServiceView {
  readonly name: string;
  /** The VIP. */
  readonly address: string;
  readonly port: number;
  readonly protocol: string;
  readonly algorithm: string;
  readonly mode: string;
  /** No longer in the file; listed while its flows are kept. */
  readonly removed: boolean;
  /** Live now and not closing: what `maxConnections` counts. */
  readonly open: number;
  /** Limits in the file; null: none. */
  readonly maxConnections: number | null;
  readonly newConnectionsPerSecond: number | null;
  readonly backends: readonly BackendView[];
}

/** What is counted of a backend's connections; it never falls. */
export type CountsView = Pick<BackendView, 'connections' | 'closed' | 'packets' | 'bytes' | 'signals'>;

export interface BackendView {
  readonly name: string;
  readonly address: string;
  readonly port: number;
  /** In the file; 0 for a removed one. */
  readonly weight: number;
  /** `down`: its health checks fail; `draining`: it is to end what it has; `active`: neither. */
  readonly state: 'active' | 'down' | 'draining';
  /** What it drains by: weight 0 in the file, `weir drain`, or that it left the file and its flows are kept. */
  readonly drainedBy: 'weight' | 'command' | 'removal' | null;
  /** Whether new connections go to it: where all are down, `allDown` decides. */
  readonly takesNew: boolean;
  readonly removed: boolean;
  /** null: it is not checked. */
  readonly health: HealthView | null;
  /** What its TCP connections tell of it. */
  readonly signals: SignalsView;
  /** Begun since the start. */
  readonly connections: number;
  /** No longer in the table: ended, timed out, replaced. Those that came by import, pick-up or a state file are among them. */
  readonly closed: number;
  /** Live now. */
  readonly flows: number;
  /** Those of them that are not closing. */
  readonly open: number;
  /** In the file; null: any number. */
  readonly maxConnections: number | null;
  /** Those of them that take a port of the snat pool. */
  readonly snatPorts: number;
  readonly packets: { readonly original: number; readonly reply: number };
  readonly bytes: { readonly original: number; readonly reply: number };
}

export interface HealthView {
  /** `up` also before it was first seen to fail. */
  readonly state: 'up' | 'down';
  /** For how long. */
  readonly seconds: number;
  /** The finding that made it so. */
  readonly reason: string;
  /** What the last probe found. */
  readonly last: string;
}

export interface SignalsView {
  /** SYNs it answered with an RST. */
  readonly refused: number;
  /** Connections that ended before it had answered their SYN. */
  readonly unanswered: number;
}

export interface ConntrackView {
  readonly tables: { readonly tcp: TableView; readonly any: TableView };
  readonly gc: {
    readonly runs: number;
    readonly intervalSeconds: number;
    readonly lastPassSeconds: number;
    readonly longestSliceSeconds: number;
    readonly totalSeconds: number;
    readonly lastDeleted: number;
  };
  /** Drops that happened at least once, by reason. */
  readonly drops: Readonly<Record<string, number>>;
}

export interface TableView extends FillView {
  /** Live connections by state. */
  readonly states: Readonly<Record<string, number>>;
  /** With the expired ones that the garbage collector has not come to. */
  readonly records: number;
  readonly inserted: number;
  /** Refused: full, and nothing could be evicted. */
  readonly insertFailures: number;
  readonly evicted: { readonly expired: number; readonly closing: number; readonly halfOpen: number };
  /** Taken out by the garbage collector. */
  readonly collected: number;
}

/** All of it at one moment, for a scrape. */
export interface Overview {
  readonly status: StatusView;
  readonly services: readonly ServiceView[];
  readonly conntrack: ConntrackView;
  readonly loop: LoopView;
  /** Ports of the snat pool towards one backend: addresses times ports. */
  readonly snatPortsPerBackend: number;
  /** What others that had a backend's name have counted under it (past-counts.ts); null: nothing. */
  past(service: string, backend: string): CountsView | null;
}

/** The data path's run loop. */
export interface LoopView {
  /** Packets in a batch. */
  readonly batchPackets: Histogram;
  /** From a batch's arrival to the end of its last packet. */
  readonly batchSeconds: Histogram;
  readonly longestBatchSeconds: number;
  /** Times it woke without a packet. */
  readonly idleWakeups: number;
}

export interface ReloadView {
  readonly path: string;
  readonly services: number;
  readonly backends: number;
  /** Kept for their flows though they left the file. */
  readonly removedBackends: number;
  /** ip and sysctl commands that were executed. */
  readonly commands: readonly string[];
  readonly tookMs: number;
}

/** What came of `weir drain` or `weir undrain`. */
export interface DrainView {
  readonly service: string;
  readonly backend: string;
  readonly drained: boolean;
  /** False: it was so before. */
  readonly changed: boolean;
  readonly takesNew: boolean;
  /** In the file. */
  readonly weight: number;
  /** Its connections now. */
  readonly flows: number;
  /** Backends of the service that take new connections now. */
  readonly takers: number;
}

export interface FlushView {
  /** Connections forgotten. */
  readonly flushed: number;
}

/** What happened to a connection, and the connection as it was then: of a closed one, as it last was. */
export interface FlowEventView extends FlowJson {
  readonly at: string;
  readonly event: 'created' | 'state' | 'closed';
  /** Of `state`: the state before. */
  readonly previous?: string;
  /** Of `closed`: `expired`, `replaced`, `evicted`, `flushed` or `cut`. */
  readonly cause?: string;
}

/** Events that cannot be told any more, at their place among the others. */
export interface LostView {
  readonly event: 'lost';
  readonly count: number;
}

/** A line of the log. */
export interface LogLineView {
  readonly level: 'info' | 'warn' | 'error';
  readonly time: string;
  /** By a stable name: docs/logs.md. */
  readonly event: string;
  readonly msg: string;
  /** What belongs to the event. */
  readonly [field: string]: unknown;
}

/** Somebody watches: events as they happen. */
export interface Watch {
  /** Lines of JSON, of one kind of view or LostView each, as soon as there are any. The first call begins the watch. */
  next(): Promise<string>;
  /** Ends it, whether or not something is waited for; that never comes then. */
  close(): void;
}

/** What is captured; absent: all of it. */
export interface CaptureOptions {
  readonly service?: string;
  /** As in a filter. */
  readonly backend?: string;
  /** As in a filter: what comes from it or goes to it, on either side of the translation. */
  readonly client?: string;
  /** Packets in after which it ends, and seconds. */
  readonly count?: number;
  readonly seconds?: number;
  /** The most that is kept of a packet. */
  readonly snapBytes?: number;
}

/** A capture under way. */
export interface Capture {
  /** The next bytes of a pcapng file, whole blocks; null: it is complete. The first call begins the capture. */
  next(): Promise<Uint8Array | null>;
  /** Ends it; idempotent. */
  close(): void;
}

export interface ImportView {
  /** Connections that are here now and were not. */
  readonly imported: number;
  /** Connections that were here as an earlier copy. */
  readonly updated: number;
  /** The other lines, by reason; every reason is there. */
  readonly skipped: Readonly<Record<SkipReason, number>>;
  /** The first of those that are not here now. */
  readonly refused: readonly { readonly line: number; readonly reason: SkipReason; readonly message: string }[];
  /** The end of the export was among the lines: nothing was cut off. */
  readonly complete: boolean;
}

export const SKIP_REASONS = [
  'exists',
  'malformed',
  'unknown-service',
  'unknown-backend',
  'wrong-mode',
  'hairpin-refused',
  'tuple-taken',
  'table-full',
] as const;

export type SkipReason = (typeof SKIP_REASONS)[number];

/** Every answer that is no success. */
export interface ErrorView {
  readonly code: string;
  readonly message: string;
  readonly remedy: string;
  /** Of a refused configuration. */
  readonly problems?: readonly Problem[];
}

/** A running weir, as the admin API sees it. */
export interface RunningWeir {
  /** These three count connections, with rests while packets flow. */
  status(): Promise<StatusView>;
  services(): Promise<ServiceView[]>;
  conntrack(): Promise<ConntrackView>;
  /** In steps with room for other things between them, when there are many connections. */
  overview(): Generator<void, Overview>;
  /** Packets that the data path has read so far. */
  packetsRead(): number;
  /**
   * The list in chunks of text, read from the live table while they are taken; an empty one: a rest would be welcome.
   *
   * @param limit connections at most
   * @throws WeirError USAGE on a bad filter
   */
  listFlows(filter: FlowFilter, format: FlowFormat, limit?: number): Iterable<string>;
  /** Events from now on. @throws WeirError USAGE on a bad filter */
  watch(filter: FlowFilter): Watch;
  /** What goes on, once a second. Its `next` throws WeirError NOT_SUPPORTED when too many watch already. */
  live(): LiveWatch;
  /** The last lines of the log: at most `count`. */
  logged(count: number): readonly string[];
  /** The same, and those to come. */
  followLog(count: number): Watch;
  /** Packets in and out, with what was decided. @throws WeirError USAGE; NOT_SUPPORTED while there is another capture */
  capture(options: CaptureOptions): Capture;
  /** Forgets connections: their next packets count as unknown. @throws WeirError USAGE on a bad filter */
  flush(filter: FlowFilter): Promise<FlushView>;
  /** All that `importFlows` needs elsewhere, in chunks of text as `listFlows`. @throws WeirError USAGE on a bad filter */
  exportFlows(filter: FlowFilter): Iterable<string>;
  /**
   * Takes in connections from the text of an export as it comes.
   *
   * @throws WeirError FLOWS_INVALID when it is none, or when `body` fails; what came before stays
   */
  importFlows(body: AsyncIterable<Uint8Array>): Promise<ImportView>;
  /**
   * Takes new connections from a backend, or gives them back; it is named as in a filter.
   *
   * @throws WeirError USAGE when the names mean nothing
   */
  setDrained(service: string, backend: string, isDrained: boolean): Promise<DrainView>;
  /** What would become of a packet, and why. @throws WeirError USAGE; NOT_SUPPORTED at a node */
  explain(query: ExplainQuery): Promise<ExplainView>;
  /**
   * What a reload would change if this were in the file.
   *
   * @param name of where the text comes from, for messages
   * @throws WeirError, as `reload` does for mistakes
   */
  plan(name: string, text: string): Promise<PlanView>;
  /** Reads the file again and applies it. @throws WeirError; the old configuration is then still in use */
  reload(): Promise<ReloadView>;
}

/** Where the admin API is served. */
export interface AdminPlaces {
  /** Path of the UNIX socket: everything, for its owner. */
  readonly socket: string;
  /** What only reads; null: nowhere. */
  readonly listen: { readonly host: string; readonly port: number } | null;
  /** Whether that has the dashboard, and what it shows. */
  readonly dashboard: boolean;
}

/** The admin API while it is served. */
export interface AdminEndpoint {
  /** Cuts what is under way and removes the socket. */
  close(): Promise<void>;
}
