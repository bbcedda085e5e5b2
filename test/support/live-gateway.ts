import { seededRandom } from '../../lib/base/random.js';
import { REASON_NAMES } from '../../lib/base/reasons.js';
import type { Config } from '../../lib/config/config.js';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import { allocateTable } from '../../lib/conntrack/memory.js';
import { STATE_NAMES } from '../../lib/conntrack/record.js';
import { TableReader } from '../../lib/conntrack/table-reader.js';
import { Desired } from '../../lib/control/desired.js';
import { NOTHING_ASSUMED, type Scene } from '../../lib/control/explain/scene.js';
import { flowJson, listFlows } from '../../lib/control/flows.js';
import type { BackendIdentity } from '../../lib/control/identity.js';
import { Gateway } from '../../lib/datapath/gateway.js';
import { allocateStats } from '../../lib/datapath/stats.js';
import { DIRECTION_NAMES, VERDICT_NAMES } from '../../lib/datapath/verdict.js';
import { MemoryDevice } from '../../lib/io/memory-device.js';

export interface LiveOptions {
  readonly tcpEntries?: number;
  readonly anyEntries?: number;
  readonly seed?: number;
  readonly recovering?: boolean;
}

/** What became of a packet, by the names that `weir explain` has for it. */
export interface Fate {
  readonly verdict: string;
  readonly reason: string | null;
  readonly direction: string;
  readonly service: string | null;
  readonly backend: string | null;
  readonly state: string | null;
  readonly out: readonly Uint8Array[];
}

/** A gateway as weir runs it - its pipeline, its tables, what control wants of it - on a memory device, with time by hand. */
export class LiveGateway {
  readonly tcp: FlowTable;
  readonly any: FlowTable;
  readonly readers: { readonly tcp: TableReader; readonly any: TableReader };
  readonly stats = allocateStats();
  readonly device = new MemoryDevice(16);
  readonly gateway: Gateway;
  readonly desired: Desired;
  readonly down = new Set<string>();
  readonly localAddresses: string[] = [];
  nowMs = 1000;

  constructor(
    config: Config,
    { tcpEntries = 1024, anyEntries = 1024, seed = 1, recovering = false }: LiveOptions = {},
  ) {
    const tables = { tcp: allocateTable(tcpEntries), any: allocateTable(anyEntries) };
    this.tcp = new FlowTable(tables.tcp);
    this.any = new FlowTable(tables.any);
    this.readers = { tcp: new TableReader(tables.tcp), any: new TableReader(tables.any) };
    this.gateway = new Gateway({
      tcp: this.tcp,
      any: this.any,
      output: this.device,
      random: seededRandom(seed),
      stats: this.stats,
      ...(recovering ? { recoveringSince: this.nowMs } : {}),
      affinityEntries: 64,
    });
    this.desired = new Desired(
      config,
      this.nowMs,
      {},
      (backend) => this.down.size === 0 || !this.down.has(this.#key(backend)),
    );
    this.gateway.use(this.desired.snapshot);
  }

  /** A reload; or, with the configuration in use, a change of health. */
  configure(config = this.desired.config): void {
    this.desired.take(this.desired.propose(config, this.nowMs));
    this.gateway.use(this.desired.snapshot);
  }

  setHealth(service: string, backend: string, isUp: boolean): void {
    if (isUp) this.down.delete(`${service}/${backend}`);
    else this.down.add(`${service}/${backend}`);
    this.configure();
  }

  send(bytes: Uint8Array): Fate {
    this.device.sent = [];
    this.device.push({ bytes });
    this.device.receive();
    this.gateway.process(this.device.rx, this.nowMs);
    const { verdict, reason, direction, service, backend, state } = this.gateway.results;
    return {
      verdict: VERDICT_NAMES[verdict[0]!]!,
      reason: reason[0] === 0 ? null : REASON_NAMES[reason[0]!]!,
      direction: DIRECTION_NAMES[direction[0]!]!,
      service: this.desired.identities.serviceName(service[0]!) ?? null,
      backend: this.desired.identities.backendName(backend[0]!) ?? null,
      state: state[0] === 0 ? null : STATE_NAMES[state[0]!]!,
      out: this.device.sent.map(({ bytes }) => bytes),
    };
  }

  /** Does what is due by time. @returns what that sent */
  flush(): readonly Uint8Array[] {
    this.device.sent = [];
    while (this.gateway.flushDue(this.nowMs) <= this.nowMs);
    return this.device.sent.map(({ bytes }) => bytes);
  }

  flows(): ReturnType<typeof flowJson>[] {
    return [...listFlows([this.tcp, this.any], this.desired.identities, this.nowMs)].map(flowJson);
  }

  scene(): Scene {
    return {
      desired: this.desired,
      readers: this.readers,
      nowMs: this.nowMs,
      // Across threads it is copied.
      recall: async (query) => structuredClone(this.gateway.recall(query)),
      downReason: () => undefined,
      routes: async (packets) => packets.map(() => null),
      localAddresses: new Set(this.localAddresses),
      assumed: NOTHING_ASSUMED,
    };
  }

  #key({ service, name }: BackendIdentity): string {
    return `${this.desired.identities.serviceName(service)}/${name}`;
  }
}
