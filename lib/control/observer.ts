import { setImmediate } from 'node:timers/promises';
import type { Clock } from '../base/clock.js';
import { WeirError } from '../base/errors.js';
import { readHistogram } from '../base/histogram.js';
import { REASON_KINDS, REASON_NAMES } from '../base/reasons.js';
import { readCollectionFigures } from '../conntrack/gc.js';
import type { TableMemory } from '../conntrack/memory.js';
import { COMMIT, STATE_NAMES } from '../conntrack/record.js';
import type { TableReader } from '../conntrack/table-reader.js';
import type { DataPath } from '../datapath/data-path.js';
import { emptyRecollection, type RecollectionQuery } from '../datapath/recollection.js';
import * as STATS from '../datapath/stats.js';
import type { Tun } from '../io/tun.js';
import { Captures } from './capture.js';
import { type Census, censusInSteps } from './census.js';
import type { Desired } from './desired.js';
import type { EventFeed } from './event-feed.js';
import { explain } from './explain/explain.js';
import type { ExplainView } from './explain/explain-view.js';
import type { ExplainQuery } from './explain/request.js';
import { addressesHere, NOTHING_ASSUMED, routesFrom } from './explain/scene.js';
import { requireNames } from './find-backend.js';
import { exportFlows } from './flow-export.js';
import { type FlowFormat, formatFlows } from './flow-formats.js';
import { FlowImport } from './flow-import.js';
import { type FlowFilter, filterMistake, matchRecords, protocolName, walkFlows } from './flows.js';
import type { HealthChecker } from './health/checker.js';
import type { Ends } from './iproute.js';
import type { LiveFeed } from './live/live-feed.js';
import type { LiveWatch } from './live/live-view.js';
import { openLiveFeed } from './live/observed.js';
import type { EventLog } from './log.js';
import type { NetworkSetup } from './network.js';
import { networkNeeds, type ReturnEndpoint } from './network-plan.js';
import { inSteps } from './pace.js';
import { countedName } from './past-counts.js';
import { planReload } from './plan/plan.js';
import type { PlanView } from './plan/plan-view.js';
import type { Reloader } from './reloader.js';
import { listServices, viewCounts, viewService } from './service-views.js';
import { countParts, countRefused, plural } from './summary.js';
import type {
  Capture,
  CaptureOptions,
  ConfigView,
  ConntrackView,
  DrainView,
  FlushView,
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
  readonly #live: LiveFeed;

  constructor(parts: ObserverParts) {
    this.#parts = parts;
    this.#startedMs = parts.clock.nowMs();
    this.#captures = new Captures(parts);
    this.#live = openLiveFeed({
      ...parts,
      packetsRead: () => this.packetsRead(),
      status: ({ live }) => this.#status(live),
      conntrack: (census) => this.#conntrack(census),
    });
  }

  async status(): Promise<StatusView> {
    return this.#status((await this.#census()).live);
  }

  async services(): Promise<ServiceView[]> {
    return this.#services(await this.#census());
  }

  async conntrack(): Promise<ConntrackView> {
    return this.#conntrack(await this.#census());
  }

  *overview(): Generator<void, Overview> {
    const census = yield* this.#count();
    const { addresses, firstPort, lastPort } = this.#parts.desired.config.snat;
    return {
      status: this.#status(census.live),
      services: this.#services(census),
      conntrack: this.#conntrack(census),
      loop: this.#loop(),
      snatPortsPerBackend: addresses.length * (lastPort - firstPort + 1),
      past: (service, backend) => {
        const counts = this.#parts.desired.past.of(countedName(service, backend));
        return counts === undefined ? null : viewCounts(counts);
      },
    };
  }

  /** Always the same while weir stops: what is under way does not rest for packets then. */
  packetsRead(): number {
    return this.#parts.reloader.isClosed ? 0 : this.#parts.path.stats[STATS.STAT_RX_PACKETS]!;
  }

  listFlows(filter: FlowFilter, format: FlowFormat, limit?: number): Iterable<string> {
    const { readers, desired, clock } = this.#parts;
    this.#requireFilter(filter);
    const flows = walkFlows([readers.tcp, readers.any], desired.identities, clock.nowMs(), filter, limit);
    return formatFlows(flows, format);
  }

  watch(filter: FlowFilter): Watch {
    this.#requireFilter(filter);
    return this.#parts.events.watch(filter);
  }

  live(): LiveWatch {
    return this.#live.watch();
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
    let failure: Error | undefined;
    try {
      await flows.run(body);
    } catch (error) {
      failure = error as Error;
      throw error;
    } finally {
      logImport(log, flows.view, failure);
    }
    return flows.view;
  }

  async setDrained(service: string, backend: string, isDrained: boolean): Promise<DrainView> {
    const { name, weight, changed } = await this.#parts.reloader.setDrained(service, backend, isDrained);
    const members = (await this.services()).find((each) => each.name === service && !each.removed)?.backends ?? [];
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
        localAddresses: addressesHere(),
        assumed: NOTHING_ASSUMED,
      };
      return explain(query, scene, { path: reloader.configPath, version: reloader.version });
    });
  }

  plan(name: string, text: string): Promise<PlanView> {
    const { reloader, path } = this.#parts;
    return reloader.inTurn(() => {
      const against = { path: reloader.configPath, version: reloader.version };
      return planReload(name, text, against, {
        ...this.#parts,
        countAffinity: () => path.countAffinity(),
        packetsRead: () => this.packetsRead(),
      });
    });
  }

  reload(): Promise<ReloadView> {
    return this.#parts.reloader.reload(true);
  }

  async #flushTable(table: 'tcp' | 'any', filter: FlowFilter): Promise<number> {
    const { readers, desired, path, clock } = this.#parts;
    const reader = readers[table];
    const records = new Int32Array(FLUSH_RECORDS);
    const commits = new Int32Array(FLUSH_RECORDS);
    let count = 0;
    let flushed = 0;
    for (const record of matchRecords(reader, desired.identities, clock.nowMs(), filter)) {
      if (record === null) {
        await setImmediate();
        continue;
      }
      records[count] = record;
      commits[count] = reader.words[COMMIT]!;
      if (++count < FLUSH_RECORDS) continue;
      flushed += await path.flush(table, records, commits);
      count = 0;
    }
    if (count > 0) flushed += await path.flush(table, records.slice(0, count), commits.slice(0, count));
    return flushed;
  }

  #requireFilter(filter: FlowFilter): void {
    const mistake = filterMistake(filter);
    if (mistake !== undefined) throw new WeirError('USAGE', mistake, 'Correct the filter.');
    requireNames(this.#parts.desired.identities, filter);
  }

  #census(): Promise<Census> {
    return inSteps(this.#count(), () => this.packetsRead());
  }

  #count(): Generator<void, Census> {
    const { readers, desired, clock } = this.#parts;
    return censusInSteps([readers.tcp, readers.any], clock.nowMs(), desired.identities.backendRows);
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
    return Array.from(listServices(this.#parts.desired), (listed) => viewService(listed, this.#parts, census));
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

/** As a warning when it failed, was cut short, or has left some out. */
function logImport(log: EventLog, view: ImportView, failure: Error | undefined): void {
  const { imported, updated, skipped, complete } = view;
  const taken = `${plural(imported + updated, 'connection')} taken over`;
  const refused = countRefused(skipped);
  const fields = { imported, updated, skipped, complete };
  if (failure !== undefined) log.warn('imported', `an import failed: ${failure.message}; ${taken}`, fields);
  else if (!complete) log.warn('imported', `an import was cut short; ${taken}`, fields);
  else if (refused > 0) log.warn('imported', `${taken}, ${refused} refused`, fields);
  else log.info('imported', taken, fields);
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
