import { REASON_NAMES } from '../../../lib/base/reasons.js';
import type { FlowTable } from '../../../lib/conntrack/flow-table.js';
import { GarbageCollector } from '../../../lib/conntrack/gc.js';
import {
  BACKEND_ID,
  MARK_SYN_SEEN,
  MARKS,
  RECORD_BYTES,
  RECORD_WORDS,
  STATE,
  SYN_SENT,
} from '../../../lib/conntrack/record.js';
import { flagNames, listFlows } from '../../../lib/control/flows.js';
import {
  COUNTER_CLOSED,
  COUNTER_CONNECTIONS,
  COUNTER_ROWS,
  COUNTER_UNANSWERED,
} from '../../../lib/datapath/snapshot.js';
import { STAT_CUT, STAT_FORWARDED, STAT_PICKED_UP, STAT_REASONS, STAT_STATELESS } from '../../../lib/datapath/stats.js';
import { MemoryDevice, type MemoryPacket } from '../../../lib/io/memory-device.js';
import { formatEndpoint } from '../../../lib/wire/address.js';
import { type Outcome, TestPipeline } from '../../support/pipeline.js';
import { compareOut, compareOutcome, same } from './compare.js';
import { backendName, type Flow, originalOf, stateOf } from './flows.js';
import type { GatewayModel } from './gateway.js';
import { build, buildError, type IcmpError, type Packet } from './packets.js';
import { Twin } from './twin.js';
import { type Backend, keyOf, type Service, type World } from './world.js';

export const START_MS = 1000;

/** The pipeline that is judged, and what it shows of itself. */
export class Real {
  readonly pipeline: TestPipeline;
  readonly twin: Twin;
  readonly collection: Collection;
  /** Ids by the model's keys of backends. */
  readonly ids = new Map<string, number>();

  constructor(world: World) {
    const { tcpEntries, anyEntries, recovering, seed } = world.setup;
    const config = world.config();
    const options = { tcpEntries, anyEntries, recovering, seed, affinityEntries: 64 };
    this.pipeline = new TestPipeline(config, { ...options, device: new MemoryDevice(16) });
    this.twin = new Twin(new TestPipeline(config, { ...options, device: new MemoryDevice(16) }));
    const { identities, tcp, any } = this.pipeline;
    this.collection = new Collection([tcp, any], START_MS);
    for (const [i, service] of world.services.entries()) {
      const identity = identities.service(config.services[i]!);
      for (const [k, backend] of service.backends.entries()) {
        this.ids.set(keyOf(service, backend), identities.backend(identity, config.services[i]!.backends[k]!).id);
      }
    }
  }

  get #both(): readonly TestPipeline[] {
    this.twin.settle();
    return [this.pipeline, this.twin.pipeline];
  }

  send(packet: MemoryPacket): Outcome {
    const outcome = this.pipeline.send(packet);
    this.twin.add(packet, outcome);
    return outcome;
  }

  advance(ms: number): void {
    for (const pipeline of this.#both) pipeline.nowMs += ms;
  }

  /** What is due by time; returns what was sent. */
  flush(): readonly MemoryPacket[] {
    const [sent, again] = this.#both.map((pipeline) => pipeline.sendDue());
    compareOut(again!, sent!);
    return sent!;
  }

  configure(world: World): void {
    for (const pipeline of this.#both) pipeline.configure(world.config());
  }

  setHealth(service: Service, backend: Backend, isUp: boolean): void {
    const id = this.ids.get(keyOf(service, backend))!;
    for (const { down } of this.#both) {
      if (isUp) down.delete(id);
      else down.add(id);
    }
  }

  /** The flows that are listed, one line each, by original tuple. */
  list({ tcp, any, identities, nowMs }: TestPipeline = this.pipeline): Map<string, string> {
    const lines = new Map<string, string>();
    for (const flow of listFlows([tcp, any], identities, nowMs)) {
      const ends = [flow.client, flow.vip, flow.source, flow.backend];
      const [client, vip, source, backend] = ends.map(({ address, port }) => formatEndpoint(address, port));
      const key = `${flow.protocol === 6 ? 'tcp' : 'udp'} ${client} > ${vip}`;
      lines.set(
        key,
        `${key} as ${source} > ${backend} ${flow.serviceName}/${flow.backendName} ${flow.state} ` +
          `[${flagNames(flow.flags).sort()}] until ${flow.expiresMs} packets ${flow.txPackets}/${flow.rxPackets} ` +
          `bytes ${flow.txBytes}/${flow.rxBytes}`,
      );
    }
    return lines;
  }
}

/** Sends a packet to both. */
export function send(model: GatewayModel, real: Real, packet: Packet): void {
  const outcome = real.send(build(packet));
  compareOutcome(outcome, model.see(packet, { outcome, listed: new Set(real.list().keys()) }));
}

export function sendError(model: GatewayModel, real: Real, error: IcmpError): void {
  compareOutcome(real.send(buildError(error)), model.seeError(error));
}

/** What is due by time in both. */
export function flush(model: GatewayModel, real: Real): void {
  compareOut(real.flush(), model.flush());
}

/** @throws Error when flows, counters or slots differ */
export function compare(model: GatewayModel, real: Real): void {
  const { pipeline } = real;
  same('flows', [...real.list().values()].sort(), [...model.flows].map(lineOf).sort());
  const { stats } = pipeline;
  const { forwarded, stateless, pickedUp, cut, reasons } = model.ends.stats;
  same(
    'forwarded, stateless, picked up, cut',
    [stats[STAT_FORWARDED], stats[STAT_STATELESS], stats[STAT_PICKED_UP], stats[STAT_CUT]],
    [forwarded, stateless, pickedUp, cut],
  );
  for (const [id, name] of REASON_NAMES.entries()) same(name, stats[STAT_REASONS + id], reasons.get(name) ?? 0);
  const rows = pipeline.compiled!.snapshot.counters;
  for (const [key, id] of real.ids) {
    const { packets, bytes, begun, refused, unanswered } = model.ends.countersOf(key);
    const wanted = [packets.original, bytes.original, packets.reply, bytes.reply, begun, refused, unanswered];
    const counted = [...rows.subarray(id * COUNTER_ROWS, (id + 1) * COUNTER_ROWS)];
    counted[COUNTER_UNANSWERED]! += unansweredYet(pipeline, id);
    same(`counters of ${key}`, counted.slice(0, wanted.length), wanted);
    const unbegun = recordsOf(pipeline, id) + counted[COUNTER_CLOSED]! - counted[COUNTER_CONNECTIONS]!;
    // Those that replies brought back were not begun.
    same(`${key} closed none too often or too seldom`, unbegun >= 0 && unbegun <= pickedUp, true);
  }
  same('slots held', pipeline.device.slotsHeld, 0);
}

/** Records that name a backend, expired ones among them. */
function recordsOf({ tcp, any }: TestPipeline, backend: number): number {
  let count = 0;
  for (const table of [tcp, any]) {
    for (let record = 0; record < table.highWater; record++) {
      if (table.read(record) >= 0 && table.words[record * RECORD_WORDS + BACKEND_ID] === backend) count++;
    }
  }
  return count;
}

/** The twin has come to the same. */
export function compareTwin(real: Real): void {
  const { pipeline, twin } = real;
  twin.settle();
  same('flows of the twin', [...real.list(twin.pipeline).values()].sort(), [...real.list().values()].sort());
  for (const row of [STAT_FORWARDED, STAT_STATELESS, STAT_PICKED_UP, STAT_CUT]) {
    same(`figure ${row} of the twin`, twin.pipeline.stats[row], pipeline.stats[row]);
  }
}

/** SYNs that a backend never answered whose records have expired and are still there: they are counted when somebody finds them. */
function unansweredYet({ tcp, nowMs }: TestPipeline, backend: number): number {
  let count = 0;
  for (let record = 0; record < tcp.highWater; record++) {
    if (tcp.generation(record) === 0 || !tcp.isExpired(record, nowMs)) continue;
    if (tcp.words[record * RECORD_WORDS + BACKEND_ID] !== backend) continue;
    const isFromStart = (tcp.bytes[record * RECORD_BYTES + MARKS]! & MARK_SYN_SEEN) !== 0;
    if (isFromStart && tcp.bytes[record * RECORD_BYTES + STATE] === SYN_SENT) count++;
  }
  return count;
}

/** Garbage collection, and the rule of its interval once more. */
class Collection {
  readonly #collector: GarbageCollector;
  readonly #tables: readonly FlowTable[];
  #intervalMs = 300_000;
  #dueMs: number;
  #pressedMs = Number.NEGATIVE_INFINITY;
  /** By table, in the pass under way. */
  #deleted: number[] | undefined;
  #fuller = 0;

  constructor(tables: readonly FlowTable[], nowMs: number) {
    this.#tables = tables;
    this.#collector = new GarbageCollector(tables, nowMs, null, () => 0);
    this.#dueMs = nowMs + this.#intervalMs;
  }

  /** A slice, or all that are due. */
  run(nowMs: number, records: number, isWhole: boolean): void {
    const fill = this.#tables.map(({ count, capacity }) => count / capacity);
    const isPressed = fill.some((share) => share > 0.9) && nowMs >= this.#pressedMs;
    if (this.#deleted === undefined && (nowMs >= this.#dueMs || isPressed)) {
      this.#deleted = [0, 0];
      this.#fuller = fill[1]! > fill[0]! ? 1 : 0;
    }
    const before = this.#tables.map(({ count }) => count);
    let isUnderWay = true;
    do isUnderWay = this.#collector.slice(nowMs, records);
    while (isWhole && isUnderWay);
    const gone = this.#tables.map(({ count }, i) => before[i]! - count);
    if (this.#deleted === undefined) same('a pass that is not due', [isUnderWay, ...gone], [false, 0, 0]);
    else {
      this.#deleted = this.#deleted.map((count, i) => count + gone[i]!);
      if (!isUnderWay) this.#finish(nowMs);
    }
    same('interval', this.#collector.intervalMs, this.#intervalMs);
  }

  #finish(nowMs: number): void {
    const ratio = this.#deleted![this.#fuller]! / this.#tables[this.#fuller]!.capacity;
    if (ratio > 0.25) this.#intervalMs *= 1 - Math.min(ratio, 0.9);
    else if (ratio > 0 && ratio < 0.05) this.#intervalMs *= 1.5;
    this.#intervalMs = Math.min(Math.max(Math.round(this.#intervalMs / 1000) * 1000, 10_000), 43_200_000);
    this.#dueMs = nowMs + this.#intervalMs;
    this.#pressedMs = nowMs + 10_000;
    this.#deleted = undefined;
  }
}

function lineOf(flow: Flow): string {
  const flags = [...(flow.isLoopback ? ['LBLoopback'] : []), ...(flow.tcp?.flags ?? [])].sort();
  return (
    `${originalOf(flow)} as ${flow.source} > ${flow.backend} ${flow.service.name}/${backendName(flow)} ${stateOf(flow)} ` +
    `[${flags}] until ${flow.expiresMs} packets ${flow.packets.original}/${flow.packets.reply} ` +
    `bytes ${flow.bytes.original}/${flow.bytes.reply}`
  );
}
