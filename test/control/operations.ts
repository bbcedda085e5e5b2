import { ManualClock } from '../../lib/base/clock.js';
import { seededRandom } from '../../lib/base/random.js';
import { REASON_NAMES } from '../../lib/base/reasons.js';
import type { Config } from '../../lib/config/config.js';
import { parseConfig } from '../../lib/config/load.js';
import { allocateEvents } from '../../lib/conntrack/events.js';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import { GarbageCollector } from '../../lib/conntrack/gc.js';
import { allocateTable, INSERTED } from '../../lib/conntrack/memory.js';
import {
  BACKEND_ID,
  CLOSED,
  CLOSING,
  COMMIT,
  EXPIRES,
  RECORD_BYTES,
  RECORD_DOUBLES,
  RECORD_WORDS,
  SERVICE,
  STATE,
} from '../../lib/conntrack/record.js';
import { restoreTable } from '../../lib/conntrack/restore.js';
import { TableReader } from '../../lib/conntrack/table-reader.js';
import { censusInSteps } from '../../lib/control/census.js';
import { Desired } from '../../lib/control/desired.js';
import { EventFeed } from '../../lib/control/event-feed.js';
import { NO_NEEDS } from '../../lib/control/network-plan.js';
import { Observer, type ObserverParts } from '../../lib/control/observer.js';
import { adoptSurvivors } from '../../lib/control/survivors.js';
import { Gateway } from '../../lib/datapath/gateway.js';
import { BACKEND_FLAGS, BACKEND_WORDS, TAKES_NEW } from '../../lib/datapath/snapshot.js';
import { allocateStats } from '../../lib/datapath/stats.js';
import { MemoryDevice, type MemoryPacket } from '../../lib/io/memory-device.js';

/** A naive count of records, by the name of service and backend they are shown under. */
export interface Naive {
  /** Not expired. */
  readonly live: Map<string, number>;
  /** Live and not closing. */
  readonly open: Map<string, number>;
}

/** A gateway with all that is around it in a running weir but threads, kernel and timers: what is done to it in days, in a second. */
export class Operations {
  readonly clock = new ManualClock(1_000_000);
  readonly memory: { tcp: ReturnType<typeof allocateTable>; any: ReturnType<typeof allocateTable> };
  readonly device = new MemoryDevice();
  readonly down = new Set<string>();
  desired!: Desired;
  observer!: Observer;
  tcp!: FlowTable;
  any!: FlowTable;
  gateway!: Gateway;
  collector!: GarbageCollector;

  constructor(text: string, entries: number, seed: number) {
    const secret = { k0: seed, k1: ~seed };
    this.memory = { tcp: allocateTable(entries, secret), any: allocateTable(entries, secret) };
    this.#start(text, seed, undefined);
  }

  /** Another process takes the tables over, as from a state file. */
  restart(text: string, seed: number): void {
    restoreTable(this.memory.tcp, true, this.clock.nowMs());
    restoreTable(this.memory.any, false, this.clock.nowMs());
    this.#start(text, seed, adoptSurvivors(this.memory));
  }

  reload(text: string): void {
    this.#publish(configOf(text));
  }

  refreshHealth(): void {
    this.#publish(this.desired.config);
  }

  drain(service: number, backend: number, isDrained: boolean): void {
    const member = this.desired.configured()[service]?.backends[backend];
    if (member === undefined) return;
    this.desired.setDrained(this.desired.identities.backendById(member.id)!, member.backend.weight, isDrained);
    this.refreshHealth();
  }

  /** What the reloader does every ten seconds. */
  sweep(): void {
    const steps = censusInSteps([...this.#readers()], this.clock.nowMs(), this.desired.identities.backendRows);
    let step = steps.next();
    while (!step.done) step = steps.next();
    this.desired.forget(step.value.backends, NO_NEEDS);
  }

  collect(): void {
    while (this.collector.slice(this.clock.nowMs(), 64));
  }

  send(packet: Uint8Array): readonly MemoryPacket[] {
    this.device.push({ bytes: packet });
    this.device.receive();
    this.device.sent = [];
    this.gateway.process(this.device.rx, this.clock.nowMs());
    return this.device.sent;
  }

  sendDue(): readonly MemoryPacket[] {
    this.device.sent = [];
    while (this.gateway.flushDue(this.clock.nowMs()) <= this.clock.nowMs());
    return this.device.sent;
  }

  /** Why the last packet was refused, '' when it was not. */
  get reason(): string {
    const [reason] = this.gateway.results.reason;
    return reason === 0 ? '' : REASON_NAMES[reason!]!;
  }

  /** Records made so far. */
  get inserted(): number {
    return this.tcp.figures[INSERTED]! + this.any.figures[INSERTED]!;
  }

  /** Whether a service, or a backend of it, has as many live connections that are not closing as it may; by looking at every record. */
  limitsOf(address: string, port: number): { over: boolean; isFull: boolean } {
    const listed = this.desired
      .configured()
      .find(({ service }) => service.address.text === address && service.port === port)!;
    const table = listed.service.protocol === 'tcp' ? this.tcp : this.any;
    const open = (at: number, id: number): number => {
      let count = 0;
      for (let record = 0; record < table.capacity; record++) {
        const word = record * RECORD_WORDS;
        const state = table.bytes[record * RECORD_BYTES + STATE]!;
        if (table.words[word + COMMIT] === 0 || table.words[word + at] !== id) continue;
        if (table.isExpired(record, this.clock.nowMs()) || state === CLOSING || state === CLOSED) continue;
        count++;
      }
      return count;
    };
    const { backends: rows } = this.desired.snapshot;
    const total = open(SERVICE, listed.id) - (listed.service.maxConnections ?? Number.POSITIVE_INFINITY);
    const takers = listed.backends.filter(({ id }) => (rows[id * BACKEND_WORDS + BACKEND_FLAGS]! & TAKES_NEW) !== 0);
    const each = takers.map(
      ({ backend, id }) => open(BACKEND_ID, id) - (backend.maxConnections ?? Number.POSITIVE_INFINITY),
    );
    return { over: total > 0, isFull: total >= 0 || each.every((room) => room >= 0) };
  }

  count(): Naive {
    const live = new Map<string, number>();
    const open = new Map<string, number>();
    const { identities } = this.desired;
    const add = (counts: Map<string, number>, key: string): void => void counts.set(key, (counts.get(key) ?? 0) + 1);
    for (const table of [this.tcp, this.any]) {
      for (let record = 0; record < table.capacity; record++) {
        const word = record * RECORD_WORDS;
        if (table.words[word + COMMIT] === 0) continue;
        if (table.doubles[record * RECORD_DOUBLES + EXPIRES]! <= this.clock.nowMs()) continue;
        const service = identities.serviceName(table.words[word + SERVICE]!)!;
        const name = `${service}/${identities.backendName(table.words[word + BACKEND_ID]!)}`;
        const state = table.bytes[record * RECORD_BYTES + STATE]!;
        add(live, name);
        if (state === CLOSING || state === CLOSED) continue;
        add(open, service);
        add(open, name);
      }
    }
    return { live, open };
  }

  /** Where the counts that limits go by are not what the records say, by table and id; with those below zero. */
  miscounts(): string[] {
    const wrong: string[] = [];
    for (const [name, table] of [['tcp', this.tcp] as const, ['any', this.any] as const]) {
      const services = new Int32Array(table.open.services.length);
      const backends = new Int32Array(table.open.backends.length);
      for (let record = 0; record < table.capacity; record++) {
        const word = record * RECORD_WORDS;
        const state = table.bytes[record * RECORD_BYTES + STATE]!;
        if (table.words[word + COMMIT] === 0 || state === CLOSING || state === CLOSED) continue;
        services[table.words[word + SERVICE]!]!++;
        backends[table.words[word + BACKEND_ID]!]!++;
      }
      table.open.services.forEach((open, id) => {
        if (open !== services[id]) wrong.push(`${name}: service ${id} has ${services[id]}, not ${open}`);
      });
      table.open.backends.forEach((open, id) => {
        if (open !== backends[id]) wrong.push(`${name}: backend ${id} has ${backends[id]}, not ${open}`);
      });
    }
    return wrong;
  }

  *#readers(): Generator<TableReader> {
    yield new TableReader(this.memory.tcp);
    yield new TableReader(this.memory.any);
  }

  #publish(config: Config): void {
    const proposal = this.desired.propose(config, this.clock.nowMs());
    this.gateway.use(proposal.compiled.snapshot);
    this.desired.take(proposal);
  }

  #start(text: string, seed: number, survivors: ReturnType<typeof adoptSurvivors> | undefined): void {
    const { clock, memory } = this;
    const config = configOf(text);
    this.desired = new Desired(config, clock.nowMs(), { survivors }, ({ name }) => !this.down.has(name));
    this.tcp = new FlowTable(memory.tcp);
    this.any = new FlowTable(memory.any);
    const stats = allocateStats();
    const { tcp, any, device } = this;
    this.gateway = new Gateway({ tcp, any, output: device, random: seededRandom(seed), stats });
    this.gateway.use(this.desired.snapshot);
    this.collector = new GarbageCollector([tcp, any], clock.nowMs(), null, () => 0);
    const [tcpReader, anyReader] = this.#readers();
    this.observer = new Observer({
      version: '1.2.3',
      tun: { vnetHeader: true, offloads: {}, note: '' },
      tables: memory,
      readers: { tcp: tcpReader, any: anyReader },
      events: new EventFeed(allocateEvents(2), this.desired.identities, clock),
      desired: this.desired,
      path: { stats, features: { engine: 'memory' }, note: '' },
      clock,
      reloader: {
        last: { success: true, at: new Date(0), message: '', tookMs: 0 },
        version: 1,
        appliedAt: new Date(0),
      },
      checker: { healthOf: () => undefined },
    } as unknown as ObserverParts);
  }
}

function configOf(text: string): Config {
  const { config, problems } = parseConfig(text);
  if (config === null) throw new Error(JSON.stringify(problems));
  return config;
}
