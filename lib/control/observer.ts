import type { Clock } from '../base/clock.js';
import { WeirError } from '../base/errors.js';
import { readHistogram } from '../base/histogram.js';
import { REASON_KINDS, REASON_NAMES } from '../base/reasons.js';
import type { BackendConfig } from '../config/config.js';
import { readCollectionFigures } from '../conntrack/gc.js';
import type { TableMemory } from '../conntrack/memory.js';
import { COMMIT, STATE_NAMES } from '../conntrack/record.js';
import type { TableReader } from '../conntrack/table-reader.js';
import type { DataPath } from '../datapath/data-path.js';
import { emptyRecollection, type RecollectionQuery } from '../datapath/recollection.js';
import * as S from '../datapath/snapshot.js';
import * as STATS from '../datapath/stats.js';
import type { Tun } from '../io/tun.js';
import { formatIpv4 } from '../wire/address.js';
import { PROTO_TCP } from '../wire/ipv4.js';
import { Captures } from './capture.js';
import { type Census, censusInSteps, takeCensus } from './census.js';
import type { Desired } from './desired.js';
import type { EventFeed } from './event-feed.js';
import { explain } from './explain/explain.js';
import type { ExplainView } from './explain/explain-view.js';
import type { ExplainQuery } from './explain/request.js';
import { NOTHING_ASSUMED, routesFrom } from './explain/scene.js';
import { noSuchService } from './find-backend.js';
import { exportFlows } from './flow-export.js';
import { type FlowFormat, formatFlows } from './flow-formats.js';
import { FlowImport } from './flow-import.js';
import { type FlowFilter, filterMistake, listFlows, matchRecords, protocolName } from './flows.js';
import type { BackendHealth, HealthChecker } from './health/checker.js';
import type { BackendIdentity, ServiceIdentity } from './identity.js';
import type { Ends } from './iproute.js';
import type { EventLog } from './log.js';
import type { NetworkSetup } from './network.js';
import { networkNeeds, type ReturnEndpoint } from './network-plan.js';
import { planReload } from './plan/plan.js';
import type { PlanView } from './plan/plan-view.js';
import type { Reloader } from './reloader.js';
import { countParts, plural } from './summary.js';
import type {
  BackendView,
  Capture,
  CaptureOptions,
  ConfigView,
  ConntrackView,
  DrainView,
  FlushView,
  HealthView,
  ImportView,
  LoopView,
  NodeView,
  Overview,
  ReloadView,
  RunningWeir,
  ServiceView,
  StatusView,
  TableView,
  TrafficView,
  Watch,
} from './view.js';

/** Records the data path removes between two batches: well under 1 ms. */
const FLUSH_RECORDS = 2048;

/** Of histograms, as powers of two: a batch has up to 64 packets, and takes some time between 4 µs and 0.5 s. */
const LAST_SIZE_BUCKET = 6;
const FIRST_TIME_BUCKET = 2;
const LAST_TIME_BUCKET = 19;

export interface ObserverParts {
  readonly version: string;
  readonly tun: Tun;
  readonly tables: { readonly tcp: TableMemory; readonly any: TableMemory };
  readonly readers: { readonly tcp: TableReader; readonly any: TableReader };
  readonly events: EventFeed;
  readonly desired: Desired;
  readonly path: DataPath;
  readonly network: NetworkSetup;
  readonly clock: Clock;
  readonly reloader: Reloader;
  readonly checker: HealthChecker;
  readonly log: EventLog;
}

/**
 * What the admin API sees of a running weir. Everything is read from memory that the data path writes, at the moment of the
 * question and without stopping it; only `flush`, `importFlows`, `setDrained`, `reload`, `explain` and `plan` ask it for
 * something.
 */
export class Observer implements RunningWeir {
  readonly #parts: ObserverParts;
  readonly #startedAt = new Date();
  readonly #startedMs: number;
  readonly #captures: Captures;

  constructor(parts: ObserverParts) {
    this.#parts = parts;
    this.#startedMs = parts.clock.nowMs();
    this.#captures = new Captures(parts);
  }

  status(): StatusView {
    const { readers, clock } = this.#parts;
    const nowMs = clock.nowMs();
    return this.#status([readers.tcp.countLive(nowMs), readers.any.countLive(nowMs)]);
  }

  services(): ServiceView[] {
    return this.#services(this.#census());
  }

  conntrack(): ConntrackView {
    return this.#conntrack(this.#census());
  }

  *overview(): Generator<void, Overview> {
    const { readers, desired, clock } = this.#parts;
    const census = yield* censusInSteps([readers.tcp, readers.any], clock.nowMs(), desired.identities.backendRows);
    const { addresses, firstPort, lastPort } = desired.config.snat;
    return {
      status: this.#status(census.live),
      services: this.#services(census),
      conntrack: this.#conntrack(census),
      loop: this.#loop(),
      snatPortsPerBackend: addresses.length * (lastPort - firstPort + 1),
    };
  }

  packetsRead(): number {
    return this.#parts.path.stats[STATS.STAT_RX_PACKETS]!;
  }

  listFlows(filter: FlowFilter, format: FlowFormat): Iterable<string> {
    const { readers, desired, clock } = this.#parts;
    this.#requireFilter(filter);
    return formatFlows(listFlows([readers.tcp, readers.any], desired.identities, clock.nowMs(), filter), format);
  }

  watch(filter: FlowFilter): Watch {
    this.#requireFilter(filter);
    return this.#parts.events.watch(filter);
  }

  capture(options: CaptureOptions): Capture {
    return this.#captures.begin(options);
  }

  logged(count: number): readonly string[] {
    return this.#parts.log.history.last(count);
  }

  followLog(count: number): Watch {
    return this.#parts.log.history.follow(count);
  }

  async flush(filter: FlowFilter): Promise<FlushView> {
    this.#requireFilter(filter);
    const flushed = (await this.#flushTable('tcp', filter)) + (await this.#flushTable('any', filter));
    this.#parts.log.info('flushed', `${flushed} connections forgotten`, { flushed, filter });
    return { flushed };
  }

  exportFlows(filter: FlowFilter): Iterable<string> {
    const { readers, desired, clock, version } = this.#parts;
    this.#requireFilter(filter);
    return exportFlows([readers.tcp, readers.any], desired.identities, clock, filter, version);
  }

  async importFlows(body: AsyncIterable<Uint8Array>): Promise<ImportView> {
    const { desired, path, clock, reloader, log } = this.#parts;
    const flows = new FlowImport({
      desired,
      clock,
      inTurn: (step) => reloader.inTurn(step),
      adopt: (table, records) => path.adopt(table, records),
    });
    try {
      await flows.run(body);
    } finally {
      const { imported, updated, skipped, complete } = flows.view;
      const fields = { imported, updated, skipped, complete };
      log.info('imported', `${plural(imported + updated, 'connection')} taken over`, fields);
    }
    return flows.view;
  }

  async setDrained(service: string, backend: string, isDrained: boolean): Promise<DrainView> {
    const { name, weight, changed } = await this.#parts.reloader.setDrained(service, backend, isDrained);
    const members = this.services().find((each) => each.name === service && !each.removed)?.backends ?? [];
    const member = members.find((each) => each.name === name && !each.removed);
    const { takesNew = false, flows = 0 } = member ?? {};
    const takers = members.filter((each) => each.takesNew).length;
    return { service, backend: name, drained: isDrained, changed, takesNew, weight, flows, takers };
  }

  explain(query: ExplainQuery): Promise<ExplainView> {
    const { desired, readers, path, clock, reloader, checker } = this.#parts;
    return reloader.inTurn(() => {
      const scene = {
        desired,
        readers,
        nowMs: clock.nowMs(),
        recall: async (asked: RecollectionQuery) => (await path.recall(asked)) ?? emptyRecollection(),
        downReason: (id: number) => {
          const health = checker.healthOf(desired.identities.backendById(id)!);
          return health?.isUp === false ? health.reason : undefined;
        },
        routes: (packets: readonly Ends[]) => routesFrom(desired.config.device.name, packets),
        assumed: NOTHING_ASSUMED,
      };
      return explain(query, scene, { path: reloader.configPath, version: reloader.version });
    });
  }

  plan(name: string, text: string): Promise<PlanView> {
    const { reloader, path } = this.#parts;
    return reloader.inTurn(() => {
      const against = { path: reloader.configPath, version: reloader.version };
      return planReload(name, text, against, { ...this.#parts, countAffinity: () => path.countAffinity() });
    });
  }

  reload(): Promise<ReloadView> {
    return this.#parts.reloader.reload();
  }

  async #flushTable(table: 'tcp' | 'any', filter: FlowFilter): Promise<number> {
    const { readers, desired, path, clock } = this.#parts;
    const reader = readers[table];
    const records = new Int32Array(FLUSH_RECORDS);
    const commits = new Int32Array(FLUSH_RECORDS);
    let count = 0;
    let flushed = 0;
    for (const record of matchRecords(reader, desired.identities, clock.nowMs(), filter)) {
      records[count] = record;
      commits[count] = reader.words[COMMIT]!;
      if (++count < FLUSH_RECORDS) continue;
      flushed += await path.flush(table, records, commits);
      count = 0;
    }
    if (count > 0) flushed += await path.flush(table, records.slice(0, count), commits.slice(0, count));
    return flushed;
  }

  /** A name that means nothing is a slip more often than a question. */
  #requireFilter(filter: FlowFilter): void {
    const mistake = filterMistake(filter);
    if (mistake !== undefined) throw new WeirError('USAGE', mistake, 'Correct the filter.');
    const { service } = filter;
    if (service === undefined) return;
    const names = new Set([...this.#parts.desired.configured().map((each) => each.service.name)]);
    for (const { name } of this.#parts.desired.removedServices()) names.add(name);
    if (!names.has(service)) throw noSuchService(service, [...names]);
  }

  #census(): Census {
    const { readers, desired, clock } = this.#parts;
    return takeCensus([readers.tcp, readers.any], clock.nowMs(), desired.identities.backendRows);
  }

  #status([tcp, any]: readonly number[]): StatusView {
    const { version, tun, readers, desired, path, clock } = this.#parts;
    const { name, mtu } = desired.config.device;
    return {
      version,
      pid: process.pid,
      startedAt: this.#startedAt.toISOString(),
      uptimeSeconds: seconds(clock.nowMs() - this.#startedMs),
      device: {
        name,
        mtu,
        engine: path.features.engine,
        vnetHeader: tun.vnetHeader,
        offloads: tun.offloads,
        notes: [path.note, tun.note],
      },
      node: this.#node(),
      config: this.#config(),
      conntrack: {
        tcp: { entries: tcp!, limit: readers.tcp.capacity },
        any: { entries: any!, limit: readers.any.capacity },
      },
      traffic: this.#traffic(),
    };
  }

  #node(): NodeView | null {
    const { desired } = this.#parts;
    const { role, tunnel } = desired.config;
    if (role !== 'node' || tunnel.address === null) return null;
    const view = (learned: boolean) => (endpoint: ReturnEndpoint) => ({
      ...endpoint,
      protocol: protocolName(endpoint.protocol),
      learned,
    });
    const configured = networkNeeds(desired.config).endpoints.map(view(false));
    const endpoints = [...configured, ...desired.learned.map(view(true))];
    return { address: tunnel.address.text, port: tunnel.port, endpoints };
  }

  #config(): ConfigView {
    const { desired, reloader, clock } = this.#parts;
    const { success, at, message, tookMs } = reloader.last;
    return {
      path: reloader.configPath,
      version: reloader.version,
      ...countParts(desired.config),
      appliedAt: reloader.appliedAt.toISOString(),
      ageSeconds: seconds(clock.nowMs() - reloader.appliedMs),
      lastReload: { success, at: at.toISOString(), message, seconds: seconds(tookMs) },
      reloads: { applied: reloader.version - 1, refused: reloader.refusals },
    };
  }

  #traffic(): TrafficView {
    const { stats } = this.#parts.path;
    return {
      rxPackets: stats[STATS.STAT_RX_PACKETS]!,
      rxBytes: stats[STATS.STAT_RX_BYTES]!,
      txPackets: stats[STATS.STAT_TX_PACKETS]!,
      txBytes: stats[STATS.STAT_TX_BYTES]!,
      batches: stats[STATS.STAT_BATCHES]!,
      forwarded: stats[STATS.STAT_FORWARDED]!,
      stateless: stats[STATS.STAT_STATELESS]!,
      pickedUp: stats[STATS.STAT_PICKED_UP]!,
      cut: stats[STATS.STAT_CUT]!,
      drops: reasonsOf(stats, 'drop'),
      replies: reasonsOf(stats, 'reply'),
      passes: reasonsOf(stats, 'pass'),
    };
  }

  #loop(): LoopView {
    const { stats } = this.#parts.path;
    return {
      batchPackets: readHistogram(stats, STATS.STAT_BATCH_SIZES, 0, LAST_SIZE_BUCKET),
      batchSeconds: readHistogram(stats, STATS.STAT_BATCH_TIMES, FIRST_TIME_BUCKET, LAST_TIME_BUCKET, 1e-6),
      longestBatchSeconds: stats[STATS.STAT_SLOWEST_BATCH_MS]! / 1000,
      idleWakeups: stats[STATS.STAT_IDLE_WAKEUPS]!,
    };
  }

  #services(census: Census): ServiceView[] {
    const { desired } = this.#parts;
    const removed = desired.removedBackends();
    const views = desired.configured().map(({ service, id, backends }): ServiceView => {
      const configured = backends.map(({ backend, id }) =>
        this.#backend(desired.identities.backendById(id)!, backend, census),
      );
      const members = [...configured, ...this.#removedOf(id, removed, census)];
      return {
        name: service.name,
        address: service.address.text,
        port: service.port,
        protocol: service.protocol,
        algorithm: service.algorithm,
        mode: service.mode,
        removed: false,
        open: openOf(members),
        maxConnections: service.maxConnections,
        newConnectionsPerSecond: service.newConnectionsPerSecond,
        backends: members,
      };
    });
    return [...views, ...desired.removedServices().map((identity) => this.#removedService(identity, removed, census))];
  }

  #removedService(identity: ServiceIdentity, removed: readonly BackendIdentity[], census: Census): ServiceView {
    const { services } = this.#parts.desired.snapshot;
    const row = identity.id * S.SERVICE_WORDS;
    const members = this.#removedOf(identity.id, removed, census);
    return {
      name: identity.name,
      address: formatIpv4(identity.vip),
      port: identity.port,
      protocol: identity.protocol === PROTO_TCP ? 'tcp' : 'udp',
      algorithm: services[row + S.SERVICE_FLAGS]! & S.SERVICE_MAGLEV ? 'maglev' : 'random',
      mode: ['dnat', 'snat', 'dsr'][services[row + S.SERVICE_MODE]!]!,
      removed: true,
      open: openOf(members),
      maxConnections: null,
      newConnectionsPerSecond: null,
      backends: members,
    };
  }

  #removedOf(service: number, removed: readonly BackendIdentity[], census: Census): BackendView[] {
    return removed.filter((each) => each.service === service).map((each) => this.#backend(each, null, census));
  }

  /** @param written null: it has left the file */
  #backend(identity: BackendIdentity, written: BackendConfig | null, census: Census): BackendView {
    const { desired, checker } = this.#parts;
    const { id, name, address, port } = identity;
    const removed = written === null;
    const weight = written?.weight ?? 0;
    const { counters, backends } = desired.snapshot;
    const row = id * S.COUNTER_ROWS;
    const health = checker.healthOf(identity);
    const drainedBy = removed ? 'removal' : weight === 0 ? 'weight' : desired.isDrained(identity) ? 'command' : null;
    return {
      name,
      address: formatIpv4(address),
      port,
      weight,
      state: drainedBy !== null ? 'draining' : health?.isUp === false ? 'down' : 'active',
      drainedBy,
      takesNew: (backends[id * S.BACKEND_WORDS + S.BACKEND_FLAGS]! & S.TAKES_NEW) !== 0,
      removed,
      health: health === undefined ? null : healthView(health),
      signals: { refused: counters[row + S.COUNTER_REFUSED]!, unanswered: counters[row + S.COUNTER_UNANSWERED]! },
      connections: counters[row + S.COUNTER_CONNECTIONS]!,
      closed: counters[row + S.COUNTER_CLOSED]!,
      flows: census.backends[id] ?? 0,
      open: census.open[id] ?? 0,
      maxConnections: written?.maxConnections ?? null,
      snatPorts: census.snatPorts[id] ?? 0,
      packets: { original: counters[row + S.COUNTER_TX_PACKETS]!, reply: counters[row + S.COUNTER_RX_PACKETS]! },
      bytes: { original: counters[row + S.COUNTER_TX_BYTES]!, reply: counters[row + S.COUNTER_RX_BYTES]! },
    };
  }

  #conntrack({ live, states }: Census): ConntrackView {
    const { readers, tables, path } = this.#parts;
    const { runs, intervalMs, lastPassMs, longestSliceMs, totalMs, lastDeleted } = readCollectionFigures(tables.tcp);
    const drops = Object.entries(reasonsOf(path.stats, 'drop')).filter(([, count]) => count > 0);
    return {
      tables: { tcp: tableView(readers.tcp, live[0]!, states[0]!), any: tableView(readers.any, live[1]!, states[1]!) },
      gc: {
        runs,
        intervalSeconds: intervalMs / 1000,
        lastPassSeconds: lastPassMs / 1000,
        longestSliceSeconds: longestSliceMs / 1000,
        totalSeconds: totalMs / 1000,
        lastDeleted,
      },
      drops: Object.fromEntries(drops),
    };
  }
}

function openOf(backends: readonly BackendView[]): number {
  return backends.reduce((sum, { open }) => sum + open, 0);
}

function healthView({ isUp, forMs, reason, last }: BackendHealth): HealthView {
  return { state: isUp ? 'up' : 'down', seconds: forMs / 1000, reason, last };
}

function tableView(reader: TableReader, entries: number, states: Float64Array): TableView {
  const figures = reader.figures();
  const named = STATE_NAMES.map((name, state) => [name, states[state]!] as const);
  return {
    entries,
    limit: figures.capacity,
    states: Object.fromEntries(named.filter(([name, count]) => name !== '' && count > 0)),
    records: figures.count,
    inserted: figures.inserted,
    insertFailures: figures.insertFailures,
    evicted: {
      expired: figures.evictedExpired,
      closing: figures.evictedClosing,
      halfOpen: figures.evictedHalfOpen,
    },
    collected: figures.collected,
  };
}

function reasonsOf(stats: Float64Array, kind: 'drop' | 'reply' | 'pass'): Record<string, number> {
  const counts: Record<string, number> = {};
  REASON_NAMES.forEach((name, id) => {
    if (REASON_KINDS[id] === kind) counts[name] = stats[STATS.STAT_REASONS + id]!;
  });
  return counts;
}

function seconds(ms: number): number {
  return Math.round(ms) / 1000;
}
