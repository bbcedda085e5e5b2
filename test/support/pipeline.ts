import { seededRandom } from '../../lib/base/random.js';
import { REASON_NAMES } from '../../lib/base/reasons.js';
import { parseConfig } from '../../lib/config/load.js';
import { allocateEvents, EventWriter } from '../../lib/conntrack/events.js';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import { allocateTable } from '../../lib/conntrack/memory.js';
import { STATE_NAMES } from '../../lib/conntrack/record.js';
import { TableReader } from '../../lib/conntrack/table-reader.js';
import { type Compiled, compile } from '../../lib/control/compile.js';
import { Identities } from '../../lib/control/identity.js';
import { Gateway } from '../../lib/datapath/gateway.js';
import { allocateStats } from '../../lib/datapath/stats.js';
import { DIRECTION_NAMES, VERDICT_NAMES } from '../../lib/datapath/verdict.js';
import { MemoryDevice, type MemoryPacket } from '../../lib/io/memory-device.js';
import { tcp } from '../fixtures/packets.js';

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
}

/** The gateway's pipeline on a memory device, from a configuration's text: packets in, outcomes out, time by hand. */
export class TestPipeline {
  readonly tcp: FlowTable;
  readonly any: FlowTable;
  /** The ring of both tables. */
  readonly events = allocateEvents(256);
  /** As the main thread sees the tables. */
  readonly readers: { readonly tcp: TableReader; readonly any: TableReader };
  readonly device = new MemoryDevice();
  readonly stats = allocateStats();
  readonly gateway: Gateway;
  readonly identities = new Identities();
  readonly down = new Set<number>();
  compiled: Compiled | undefined;
  nowMs = 1000;

  constructor(
    config: string,
    { tcpEntries = 1024, anyEntries = 1024, seed = 1, recovering = false }: PipelineOptions = {},
  ) {
    const secret = { k0: seed, k1: ~seed };
    const events = new EventWriter(this.events);
    const tables = { tcp: allocateTable(tcpEntries, secret), any: allocateTable(anyEntries, secret) };
    this.tcp = new FlowTable(tables.tcp, events);
    this.any = new FlowTable(tables.any, events);
    this.readers = { tcp: new TableReader(tables.tcp), any: new TableReader(tables.any) };
    this.gateway = new Gateway({
      tcp: this.tcp,
      any: this.any,
      output: this.device,
      random: seededRandom(seed),
      stats: this.stats,
      ...(recovering ? { recoveringSince: this.nowMs } : {}),
    });
    this.configure(config);
  }

  configure(text: string): void {
    const { config, problems } = parseConfig(text);
    if (config === null) throw new Error(problems.map((problem) => JSON.stringify(problem)).join('\n'));
    this.compiled = compile(config, this.identities, {
      isUp: (backend) => !this.down.has(backend),
      nowMs: this.nowMs,
      ...(this.compiled ? { previous: this.compiled } : {}),
    });
    this.gateway.use(this.compiled.snapshot);
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
    this.gateway.process(this.device.rx, this.nowMs);
    const { verdict, reason, direction, service, backend, state } = this.gateway.results;
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

/** A client of the VIP 10.96.0.10:80. */
export const client = { src: '10.1.0.2', sport: 40000, dst: '10.96.0.10', dport: 80 };

/** The packet's answer from a backend, as seen by the gateway. */
export function reply(out: MemoryPacket, fields: object): Uint8Array {
  const [src, dst] = [quad(out.bytes, 16), quad(out.bytes, 12)];
  const l4 = (out.bytes[0]! & 15) * 4;
  const [sport, dport] = [half(out.bytes, l4 + 2), half(out.bytes, l4)];
  return tcp({ src, sport, dst, dport, ...fields });
}

export function quad(bytes: Uint8Array, at: number): string {
  return bytes.subarray(at, at + 4).join('.');
}

export function half(bytes: Uint8Array, at: number): number {
  return (bytes[at]! << 8) | bytes[at + 1]!;
}

/** Opens a connection and brings it to ESTABLISHED; returns its first outcome. */
export function establish(pipeline: TestPipeline, from: typeof client = client): Outcome {
  const first = pipeline.send(tcp({ ...from, flags: 'S', seq: 1000 }));
  pipeline.send(reply(first.out[0]!, { flags: 'SA', seq: 5000, ack: 1001 }));
  const third = pipeline.send(tcp({ ...from, flags: 'A', seq: 1001, ack: 5001 }));
  if (third.state !== 'ESTABLISHED') throw new Error(`state is ${third.state}`);
  return first;
}
