import { ManualClock } from '../base/clock.js';
import { seededRandom } from '../base/random.js';
import type { Config } from '../config/config.js';
import { FlowTable } from '../conntrack/flow-table.js';
import { GarbageCollector } from '../conntrack/gc.js';
import { allocateTable } from '../conntrack/memory.js';
import { type Compiled, compile } from '../control/compile.js';
import { type FlowFormat, formatFlows } from '../control/flow-formats.js';
import { listFlows } from '../control/flows.js';
import { Identities } from '../control/identity.js';
import { Gateway } from '../datapath/gateway.js';
import { Node } from '../datapath/node.js';
import type { Pipeline } from '../datapath/pipeline.js';
import { allocateStats } from '../datapath/stats.js';
import type { Results } from '../datapath/verdict.js';
import type { BatchDevice } from '../io/device.js';

/** Records of a garbage collection between two looks at whether it is finished: the result does not depend on it. */
const GC_SLICE_RECORDS = 65_536;

export interface SessionOptions {
  /** Seeds the lots drawn and the secret of the tables; Maglev has its own seed, in the configuration. */
  readonly seed: number;
  /** As after a start without a table: replies with no entry may be picked up for `conntrack.recovery`. */
  readonly recovering: boolean;
}

/**
 * A gateway, or a node, that runs on a clock which stands still: the whole of weir's data path, and what control does to it, without a thread,
 * a device of the kernel, or time. What is due by time alone (garbage collection, fragments that waited too long) is done at
 * its moment when the clock passes it.
 */
export class Session {
  /** Names of services and backends, also of removed ones. */
  readonly names = new Identities();

  readonly #clock = new ManualClock();
  readonly #device: BatchDevice;
  readonly #tcp: FlowTable;
  readonly #any: FlowTable;
  readonly #pipeline: Pipeline;
  readonly #collector: GarbageCollector;
  readonly #down = new Set<number>();
  #config: Config;
  #compiled: Compiled | undefined;
  #flushAtMs = Number.POSITIVE_INFINITY;

  /** The clock begins at 0. Role, table sizes and the GC interval are those of this configuration whatever comes later. */
  constructor(config: Config, device: BatchDevice, { seed, recovering }: SessionOptions) {
    const { tcpEntries, anyEntries, gcIntervalMs } = config.conntrack;
    const random = seededRandom(seed);
    this.#config = config;
    this.#device = device;
    this.#tcp = new FlowTable(allocateTable(tcpEntries, { k0: random() | 0, k1: random() | 0 }));
    this.#any = new FlowTable(allocateTable(anyEntries, { k0: random() | 0, k1: random() | 0 }));
    const parts = {
      tcp: this.#tcp,
      any: this.#any,
      output: device,
      random,
      stats: allocateStats(),
      ...(recovering ? { recoveringSince: 0 } : {}),
    };
    this.#pipeline = config.role === 'node' ? new Node(parts) : new Gateway(parts);
    this.#collector = new GarbageCollector([this.#tcp, this.#any], 0, gcIntervalMs, () => 0);
    this.#publish();
  }

  get nowMs(): number {
    return this.#clock.nowMs();
  }

  /** Row 0 tells what became of the last packet. */
  get results(): Results {
    return this.#pipeline.results;
  }

  /** Moves the clock to `ms`, unless it is past that, and does on the way whatever falls due. */
  advance(ms: number): void {
    for (;;) {
      const dueMs = Math.min(this.#flushAtMs, this.#collector.nextDueMs);
      if (dueMs > ms) break;
      this.#clock.set(dueMs);
      this.#doWhatIsDue();
    }
    this.#clock.set(ms);
  }

  /** Runs what the device delivered last through the pipeline. */
  process(): void {
    this.#pipeline.process(this.#device.rx, this.#clock.nowMs());
    this.#doWhatIsDue();
  }

  /** Reloads. */
  reload(config: Config): void {
    this.#config = config;
    this.#publish();
    this.names.rename(config.services);
  }

  /** What a health check would have found out about `service/backend`, which the configuration has. */
  setHealth(name: string, isUp: boolean): void {
    for (const service of this.#config.services) {
      for (const backend of service.backends) {
        if (`${service.name}/${backend.name}` !== name) continue;
        const { id } = this.names.backend(this.names.service(service), backend);
        if (isUp) this.#down.delete(id);
        else this.#down.add(id);
      }
    }
    this.#publish();
  }

  /** The conntrack at this moment, in chunks of text. */
  formatConntrack(format: FlowFormat): Iterable<string> {
    return formatFlows(listFlows([this.#tcp, this.#any], this.names, this.#clock.nowMs()), format);
  }

  #publish(): void {
    this.#compiled = compile(this.#config, this.names, {
      isUp: (id) => !this.#down.has(id),
      nowMs: this.#clock.nowMs(),
      ...(this.#compiled === undefined ? {} : { previous: this.#compiled }),
    });
    this.#pipeline.use(this.#compiled.snapshot);
    this.#flushAtMs = this.#pipeline.flushDue(this.#clock.nowMs());
  }

  #doWhatIsDue(): void {
    const nowMs = this.#clock.nowMs();
    while (this.#collector.slice(nowMs, GC_SLICE_RECORDS));
    this.#flushAtMs = this.#pipeline.flushDue(nowMs);
  }
}
