import { seededRandom } from '../../lib/base/random.js';
import { REASON_NAMES } from '../../lib/base/reasons.js';
import type { Config } from '../../lib/config/config.js';
import { parseConfig } from '../../lib/config/load.js';
import { allocateEvents, EventWriter } from '../../lib/conntrack/events.js';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import { allocateTable } from '../../lib/conntrack/memory.js';
import { STATE_NAMES } from '../../lib/conntrack/record.js';
import { TableReader } from '../../lib/conntrack/table-reader.js';
import { type Compiled, compile } from '../../lib/control/compile.js';
import { Identities } from '../../lib/control/identity.js';
import type { ReturnEndpoint } from '../../lib/control/network-plan.js';
import type { AskForEndpoint } from '../../lib/datapath/endpoints.js';
import { Gateway } from '../../lib/datapath/gateway.js';
import { Node } from '../../lib/datapath/node.js';
import type { Pipeline } from '../../lib/datapath/pipeline.js';
import { allocateStats } from '../../lib/datapath/stats.js';
import { Tap } from '../../lib/datapath/tap.js';
import { DIRECTION_NAMES, VERDICT_NAMES } from '../../lib/datapath/verdict.js';
import { MemoryDevice, type MemoryPacket } from '../../lib/io/memory-device.js';

export interface Outcome {
  readonly verdict: string;
  readonly reason: string;
  readonly direction: string;
  readonly service: string | undefined;
  readonly backend: string | undefined;
  readonly state: string;
  readonly out: readonly MemoryPacket[];
}

export interface PipelineOptions {
  readonly tcpEntries?: number;
  readonly anyEntries?: number;
  readonly seed?: number;
  readonly recovering?: boolean;
  readonly device?: MemoryDevice;
  /** Of a node: takes what traffic teaches it. */
  readonly ask?: AskForEndpoint;
  readonly affinityEntries?: number;
}

/** The pipeline of a role on a memory device, from a configuration or its text: packets in, outcomes out, time by hand. */
export class TestPipeline {
  readonly tcp: FlowTable;
  readonly any: FlowTable;
  /** The ring of both tables. */
  readonly events = allocateEvents(256);
  /** As the main thread sees the tables. */
  readonly readers: { readonly tcp: TableReader; readonly any: TableReader };
  readonly device: MemoryDevice;
  readonly tap: Tap;
  readonly stats = allocateStats();
  readonly identities = new Identities();
  readonly down = new Set<number>();
  compiled: Compiled | undefined;
  nowMs = 1000;
  readonly pipeline: Pipeline;

  constructor(
    source: string | Config,
    {
      tcpEntries = 1024,
      anyEntries = 1024,
      seed = 1,
      recovering = false,
      ask,
      device = new MemoryDevice(),
      affinityEntries,
    }: PipelineOptions = {},
  ) {
    const secret = { k0: seed, k1: ~seed };
    this.device = device;
    this.tap = new Tap(device);
    const events = new EventWriter(this.events);
    const tables = { tcp: allocateTable(tcpEntries, secret), any: allocateTable(anyEntries, secret) };
    this.tcp = new FlowTable(tables.tcp, events);
    this.any = new FlowTable(tables.any, events);
    this.readers = { tcp: new TableReader(tables.tcp), any: new TableReader(tables.any) };
    const parts = {
      tcp: this.tcp,
      any: this.any,
      output: this.tap,
      random: seededRandom(seed),
      stats: this.stats,
      ...(recovering ? { recoveringSince: this.nowMs } : {}),
      ...(affinityEntries === undefined ? {} : { affinityEntries }),
    };
    const config = parse(source);
    this.pipeline = config.role === 'node' ? new Node(parts, ask) : new Gateway(parts);
    this.tap.attach(this.pipeline);
    this.configure(config);
  }

  /** @param ledIn of a node: the endpoints whose answers are led in */
  configure(source: string | Config, ledIn?: readonly ReturnEndpoint[]): void {
    const config = parse(source);
    this.compiled = compile(config, this.identities, {
      isUp: (backend) => !this.down.has(backend),
      nowMs: this.nowMs,
      ...(this.compiled ? { previous: this.compiled } : {}),
      ...(ledIn ? { ledIn } : {}),
    });
    this.identities.rename(config.services);
    this.pipeline.use(this.compiled.snapshot);
  }

  /** Does what is due by time alone; returns when there is more. */
  flushDue(nowMs = this.nowMs): number {
    return this.pipeline.flushDue(nowMs);
  }

  /** Runs what is due by time, until nothing is, and returns what came out. */
  sendDue(): readonly MemoryPacket[] {
    this.device.sent = [];
    while (this.flushDue() <= this.nowMs);
    return this.device.sent;
  }

  /** One packet in a batch of its own. */
  send(packet: Uint8Array | MemoryPacket): Outcome {
    return this.sendBatch([packet])[0]!;
  }

  /** Several packets in one batch; what they put out is all in the first outcome's `out`. */
  sendBatch(packets: readonly (Uint8Array | MemoryPacket)[]): Outcome[] {
    this.device.push(...packets.map((packet) => (packet instanceof Uint8Array ? { bytes: packet } : packet)));
    const count = this.device.receive();
    this.device.sent = [];
    if (this.tap.isOn) this.tap.before(this.device.rx);
    this.pipeline.process(this.device.rx, this.nowMs);
    if (this.tap.isOn) this.tap.after(this.device.rx, this.nowMs);
    const { verdict, reason, direction, service, backend, state } = this.pipeline.results;
    return Array.from({ length: count }, (_, i) => ({
      verdict: VERDICT_NAMES[verdict[i]!]!,
      reason: reason[i] === 0 ? '' : REASON_NAMES[reason[i]!]!,
      direction: DIRECTION_NAMES[direction[i]!]!,
      service: this.identities.serviceName(service[i]!),
      backend: this.identities.backendName(backend[i]!),
      state: STATE_NAMES[state[i]!]!,
      out: i === 0 ? this.device.sent : [],
    }));
  }
}

function parse(source: string | Config): Config {
  if (typeof source !== 'string') return source;
  const { config, problems } = parseConfig(source);
  if (config === null) throw new Error(problems.map((problem) => JSON.stringify(problem)).join('\n'));
  return config;
}
