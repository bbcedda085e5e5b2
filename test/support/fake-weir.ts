import { WeirError } from '../../lib/base/errors.js';
import type { ExplainView } from '../../lib/control/explain/explain-view.js';
import type { ExplainQuery } from '../../lib/control/explain/request.js';
import type { FlowFilter } from '../../lib/control/flows.js';
import type { LiveView, LiveWatch } from '../../lib/control/live/live-view.js';
import type { PlanView } from '../../lib/control/plan/plan-view.js';
import {
  type BackendView,
  type Capture,
  type CaptureOptions,
  type ConntrackView,
  type DrainView,
  type ImportView,
  type NodeView,
  type Overview,
  type RunningWeir,
  type ServiceView,
  SKIP_REASONS,
  type StatusView,
  type Watch,
} from '../../lib/control/view.js';

/** A running weir without one: fixed answers, and a record of what it was asked. */
export class FakeWeir implements RunningWeir {
  readonly asked: string[] = [];
  backends: BackendView[] = [backend('b1'), backend('b2')];
  chunks: () => Iterable<string> = () => ['[]\n'];
  /** What each watch is told, before it waits for ever. */
  events: readonly string[] = [];
  readonly watches: FakeWatch[] = [];
  refusal: WeirError | undefined;
  /** What becomes of an import. */
  takeBody = async (body: AsyncIterable<Uint8Array>): Promise<ImportView> => {
    let bytes = 0;
    for await (const chunk of body) bytes += chunk.length;
    this.asked.push(`import ${bytes} bytes`);
    return importView({});
  };
  node: NodeView | null = null;
  explainAnswer: ExplainView = {
    config: { path: '/etc/weir.yaml', version: 3 },
    assumed: [],
    packet: { text: 'tcp 10.1.0.2:40000 > 10.96.0.10:80 syn, 40 bytes', bytes: '4500' },
    steps: [{ step: 'parse', result: 'ok', text: 'all is well', notes: ['really'], details: {} }],
    outcomes: [],
    untried: 0,
  };
  planAnswer: PlanView = {
    path: 'new.yaml',
    against: { path: '/etc/weir.yaml', version: 3 },
    changes: false,
    refusal: null,
    settings: [],
    services: [],
    drainsEnded: [],
    flows: { live: 7, kept: 7, moved: 0, cutLater: 0, cut: 0 },
    network: { commands: [], later: [], notes: [] },
  };
  limits: Pick<ServiceView, 'maxConnections' | 'newConnectionsPerSecond'> = {
    maxConnections: null,
    newConnectionsPerSecond: null,
  };
  drainAnswer: Partial<DrainView> = {};
  liveViews: readonly LiveView[] = [];

  async status(): Promise<StatusView> {
    return this.statusView();
  }

  async services(): Promise<ServiceView[]> {
    return this.serviceViews();
  }

  async conntrack(): Promise<ConntrackView> {
    return this.conntrackView();
  }

  /** Each watch is given `liveViews`, then waits. */
  live(): LiveWatch {
    this.asked.push('live');
    if (this.refusal !== undefined) throw this.refusal;
    const views = this.liveViews.map((view) => JSON.stringify(view));
    return {
      next: async () => views.shift() ?? new Promise(() => {}),
      close: () => void this.asked.push('live closed'),
    };
  }

  statusView(): StatusView {
    const at = '2026-01-02T03:04:05.000Z';
    return {
      version: '1.2.3',
      pid: 42,
      startedAt: at,
      uptimeSeconds: 3725,
      device: {
        name: 'weir0',
        mtu: 1500,
        engine: 'io_uring',
        vnetHeader: true,
        offloads: { csum: true, tso4: true, tso6: true, uso: false },
        notes: ['engine io_uring, multishot reads'],
      },
      node: this.node,
      config: {
        path: '/etc/weir.yaml',
        version: 3,
        services: 1,
        backends: this.backends.length,
        appliedAt: at,
        ageSeconds: 59,
        lastReload: { success: this.refusal === undefined, at, message: this.refusal?.message ?? '', seconds: 0.012 },
        reloads: { applied: 2, refused: 1 },
      },
      conntrack: { tcp: { entries: 7, limit: 100 }, any: { entries: 2, limit: 50 } },
      traffic: {
        rxPackets: 11,
        rxBytes: 1100,
        txPackets: 9,
        txBytes: 900,
        batches: 4,
        forwarded: 8,
        stateless: 0,
        pickedUp: 1,
        cut: 0,
        drops: { malformed: 2, 'table-full': 0 },
        replies: { echo: 1 },
        passes: { 'not-tracked': 0 },
      },
    };
  }

  serviceViews(): ServiceView[] {
    return [
      {
        name: 'web',
        address: '10.96.0.10',
        port: 80,
        protocol: 'tcp',
        algorithm: 'maglev',
        mode: 'dnat',
        removed: false,
        open: 5,
        maxConnections: this.limits.maxConnections,
        newConnectionsPerSecond: this.limits.newConnectionsPerSecond,
        backends: this.backends,
      },
    ];
  }

  conntrackView(): ConntrackView {
    const table = {
      records: 8,
      inserted: 20,
      insertFailures: 1,
      evicted: { expired: 1, closing: 2, halfOpen: 3 },
      collected: 6,
    };
    return {
      tables: {
        tcp: { ...table, entries: 7, limit: 100, states: { ESTABLISHED: 7 } },
        any: { ...table, entries: 2, limit: 50, states: { UNREPLIED: 2 } },
      },
      gc: {
        runs: 2,
        intervalSeconds: 300,
        lastPassSeconds: 0.004,
        longestSliceSeconds: 0.0005,
        totalSeconds: 0.007,
        lastDeleted: 6,
      },
      drops: { malformed: 2 },
    };
  }

  *overview(): Generator<void, Overview> {
    yield;
    const histogram = {
      buckets: [
        { bound: 1, count: 2 },
        { bound: 2, count: 3 },
      ],
      count: 4,
      sum: 9.5,
    };
    return {
      status: this.statusView(),
      services: this.serviceViews(),
      conntrack: this.conntrackView(),
      loop: { batchPackets: histogram, batchSeconds: histogram, longestBatchSeconds: 0.25, idleWakeups: 6 },
      snatPortsPerBackend: 32768,
      past: () => null,
    };
  }

  packetsRead(): number {
    return 11;
  }

  listFlows(filter: FlowFilter, format: string, limit?: number): Iterable<string> {
    this.asked.push(`list ${format} ${JSON.stringify(filter)}${limit === undefined ? '' : `, ${limit} at most`}`);
    if (filter.state === 'NOPE') throw new WeirError('USAGE', 'no state is called "NOPE"', 'Correct the filter.');
    return this.chunks();
  }

  watch(filter: FlowFilter): FakeWatch {
    this.asked.push(`watch ${JSON.stringify(filter)}`);
    if (filter.state === 'NOPE') throw new WeirError('USAGE', 'no state is called "NOPE"', 'Correct the filter.');
    const watch = new FakeWatch(this.events);
    this.watches.push(watch);
    return watch;
  }

  capture(options: CaptureOptions): Capture {
    this.asked.push(`capture ${JSON.stringify(options)}`);
    const chunks = this.events.map((text) => new TextEncoder().encode(text));
    return { next: async () => chunks.shift() ?? null, close: () => void this.asked.push('capture closed') };
  }

  logged(count: number): readonly string[] {
    this.asked.push(`log ${count}`);
    return this.events.slice(-count);
  }

  followLog(count: number): FakeWatch {
    this.asked.push(`follow ${count}`);
    const watch = new FakeWatch(this.events);
    this.watches.push(watch);
    return watch;
  }

  exportFlows(filter: FlowFilter): Iterable<string> {
    this.asked.push(`export ${JSON.stringify(filter)}`);
    return this.chunks();
  }

  async importFlows(body: AsyncIterable<Uint8Array>): Promise<ImportView> {
    return this.takeBody(body);
  }

  async flush(filter: FlowFilter) {
    this.asked.push(`flush ${JSON.stringify(filter)}`);
    return { flushed: 5 };
  }

  async setDrained(service: string, backend: string, drained: boolean): Promise<DrainView> {
    this.asked.push(`${drained ? 'drain' : 'undrain'} ${service}/${backend}`);
    if (this.refusal !== undefined) throw this.refusal;
    const now = { changed: true, takesNew: !drained, weight: 1, flows: 3, takers: 1 };
    return { service, backend, drained, ...now, ...this.drainAnswer };
  }

  async explain(query: ExplainQuery): Promise<ExplainView> {
    this.asked.push(`explain ${JSON.stringify(query)}`);
    if (this.refusal !== undefined) throw this.refusal;
    return this.explainAnswer;
  }

  async plan(name: string, text: string): Promise<PlanView> {
    this.asked.push(`plan ${name}, ${text.length} characters`);
    if (this.refusal !== undefined) throw this.refusal;
    return this.planAnswer;
  }

  async reload() {
    this.asked.push('reload');
    if (this.refusal !== undefined) throw this.refusal;
    return { path: '/etc/weir.yaml', services: 1, backends: 2, removedBackends: 0, commands: [], tookMs: 3 };
  }
}

class FakeWatch implements Watch {
  /** How often it was asked for more. */
  asked = 0;
  isClosed = false;
  readonly #chunks: readonly string[];

  constructor(chunks: readonly string[]) {
    this.#chunks = chunks;
  }

  async next(): Promise<string> {
    return this.#chunks[this.asked++] ?? new Promise(() => {});
  }

  close(): void {
    this.isClosed = true;
  }
}

export function importView(fields: Partial<ImportView>, skipped: Partial<ImportView['skipped']> = {}): ImportView {
  const none = Object.fromEntries(SKIP_REASONS.map((reason) => [reason, 0])) as ImportView['skipped'];
  return { imported: 3, updated: 0, skipped: { ...none, ...skipped }, refused: [], complete: true, ...fields };
}

export function backend(name: string): BackendView {
  return {
    name,
    address: '10.2.0.11',
    port: 8080,
    weight: 1,
    state: 'active',
    drainedBy: null,
    takesNew: true,
    removed: false,
    health: null,
    signals: { refused: 0, unanswered: 0 },
    connections: 4,
    closed: 1,
    flows: 3,
    open: 2,
    maxConnections: null,
    snatPorts: 0,
    packets: { original: 10, reply: 12 },
    bytes: { original: 1000, reply: 1200 },
  };
}

/** Of a gateway with one service and traffic; without backends it has none of either. */
export function liveView(fields: Partial<LiveView> = {}): LiveView {
  const weir = new FakeWeir();
  const rates = { packets: { original: 100, reply: 50.5 }, bits: { original: 8000, reply: 4_000_000 }, connections: 2 };
  return {
    at: '2026-01-02T03:04:05.000Z',
    intervalSeconds: 1,
    status: weir.statusView(),
    rates: { packetsIn: 150.5, packetsOut: 150.5, bitsIn: 4_008_000, bitsOut: 4_008_000, connections: 2, drops: 0.5 },
    services: weir.serviceViews().map((service) => ({
      ...service,
      rates,
      backends: service.backends.map((backend) => ({ ...backend, rates, share: 0.5 })),
    })),
    omittedServices: 0,
    conntrack: weir.conntrackView(),
    reasons: [{ reason: 'malformed', verdict: 'drop', meaning: 'A header is short.', packets: 2, rate: 0.5 }],
    count: { secondsAgo: 2, tookSeconds: 0.001 },
    clients: { distinct: 2, error: 0, top: [{ address: '10.1.0.2', connections: 3, bytes: 2200 }] },
    ...fields,
  };
}
