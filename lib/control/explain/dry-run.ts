import { BATCH_PACKETS, HEADROOM_BYTES, SNAT_PORT_TRIES } from '../../base/limits.js';
import { seededRandom } from '../../base/random.js';
import { type LookedUp, OverlayTable } from '../../conntrack/overlay-table.js';
import { BACKEND_ID, RECORD_WORDS } from '../../conntrack/record.js';
import { Gateway } from '../../datapath/gateway.js';
import type { Recollection, RecollectionQuery } from '../../datapath/recollection.js';
import {
  BACKEND_CONNECTIONS,
  BACKEND_WORDS,
  CHOICES_AT,
  CHOICES_COUNT,
  SERVICE_FLAGS,
  SERVICE_LIMITED,
  SERVICE_WORDS,
  type Snapshot,
} from '../../datapath/snapshot.js';
import { allocateStats } from '../../datapath/stats.js';
import { MemoryDevice } from '../../io/memory-device.js';
import { PROTO_TCP } from '../../wire/ipv4.js';
import { type Flow, readFlow } from '../flows.js';
import type { Scene } from './scene.js';

/** What became of a packet that was never sent. Ids are the pipeline's; 0 where nothing is known. */
export interface DryRun {
  readonly verdict: number;
  readonly reason: number;
  readonly direction: number;
  readonly service: number;
  readonly backend: number;
  readonly state: number;
  /** What left, in order. */
  readonly sent: readonly Uint8Array[];
  /** What it asked the table, in order. */
  readonly lookups: readonly Lookup[];
  /** The connection that it made. */
  readonly made: Flow | undefined;
  /** The connection that it belongs to, as it is afterwards. */
  readonly entry: Flow | undefined;
  /** Lots that were drawn. */
  readonly draws: number;
  /** Ids of the service's backends that have as many connections as they may, as far as that was found out. */
  readonly full: readonly number[];
}

/** A key that was looked for. */
export interface Lookup extends LookedUp {
  /** The connection it was found to belong to, as it was before. */
  readonly flow: Flow | undefined;
  /** That was removed in the course of things. */
  readonly isGone: boolean;
}

/**
 * The data path's own pipeline, for one packet: on a table that lies over the live one, with the live snapshot and with what the
 * live pipeline knows besides. It does with the packet what the live one would, and nobody notices.
 */
export class Rehearsal {
  readonly #scene: Scene;
  readonly #packet: Uint8Array;
  readonly #query: RecollectionQuery;
  readonly #recollection: Recollection;
  readonly #tcp: OverlayTable;
  readonly #any: OverlayTable;
  readonly #device: MemoryDevice;
  readonly #gateway: Gateway;
  #lots: () => number = () => 0;

  constructor(scene: Scene, packet: Uint8Array, query: RecollectionQuery, recollection: Recollection) {
    const { snapshot } = scene.desired;
    const capacity = recordsTouched(snapshot, query.service);
    this.#scene = scene;
    this.#packet = packet;
    this.#query = query;
    this.#recollection = recollection;
    this.#tcp = new OverlayTable(scene.readers.tcp, capacity);
    this.#any = new OverlayTable(scene.readers.any, capacity);
    this.#device = new MemoryDevice(BATCH_PACKETS, slotBytes(packet, recollection));
    this.#gateway = new Gateway({
      tcp: this.#tcp,
      any: this.#any,
      output: this.#device,
      random: () => this.#lots(),
      stats: allocateStats(),
      recoveringSince: recollection.recoveringSince,
      affinityEntries: 1,
      memoryEntries: Math.max(1, recollection.pathMtus.length),
    });
    // Nothing of a snapshot is written but its counters.
    this.#gateway.use({ ...snapshot, counters: new Float64Array(snapshot.counters.length) });
  }

  /** Begins anew each time. @param draws what is drawn first; then it is anything */
  run(...draws: readonly number[]): DryRun {
    for (const table of [this.#tcp, this.#any]) table.clear();
    this.#gateway.assume(this.#query, this.#withOwnRecord());
    const lots = seededRandom(1);
    let drawn = 0;
    this.#lots = () => draws[drawn++] ?? lots();
    this.#device.sent = [];
    this.#device.push({ bytes: this.#packet });
    this.#device.receive();
    this.#gateway.process(this.#device.rx, this.#scene.nowMs);
    const { verdict, reason, direction, service, backend, state } = this.#gateway.results;
    return {
      verdict: verdict[0]!,
      reason: reason[0]!,
      direction: direction[0]!,
      service: service[0]!,
      backend: backend[0]!,
      state: state[0]!,
      sent: this.#device.sent.map(({ bytes }) => bytes),
      ...this.#connections(),
      draws: drawn,
      full: this.#full(),
    };
  }

  /** By the counts there were before the packet's own connection came to them. */
  #full(): number[] {
    const { snapshot } = this.#scene.desired;
    const { service, protocol } = this.#query;
    const row = service * SERVICE_WORDS;
    if ((snapshot.services[row + SERVICE_FLAGS]! & SERVICE_LIMITED) === 0) return [];
    const table = this.#tableOf(protocol);
    const [made] = table.inserted;
    const own = made === undefined ? 0 : table.words[made * RECORD_WORDS + BACKEND_ID]!;
    const first = snapshot.services[row + CHOICES_AT]!;
    const choices = Array.from(
      { length: snapshot.services[row + CHOICES_COUNT]! },
      (_, i) => snapshot.choices[(first + i) * 2]!,
    );
    return choices.filter((id) => {
      const limit = snapshot.backends[id * BACKEND_WORDS + BACKEND_CONNECTIONS]!;
      return limit !== 0 && table.open.backends[id]! - (id === own ? 1 : 0) >= limit;
    });
  }

  #tableOf(protocol: number): OverlayTable {
    return protocol === PROTO_TCP ? this.#tcp : this.#any;
  }

  #connections(): Pick<DryRun, 'lookups' | 'made' | 'entry'> {
    const table = this.#tcp.lookedUp.length > 0 ? this.#tcp : this.#any;
    const { desired, nowMs } = this.#scene;
    const names = desired.identities;
    const lookups = table.lookedUp.map((each): Lookup => {
      const record = each.reference >> 1;
      const original = each.reference < 0 ? undefined : table.originalOf(record);
      const flow = original === undefined ? undefined : readFlow(original, 0, record, names, nowMs);
      return { ...each, flow, isGone: each.reference >= 0 && table.removed.includes(record) };
    });
    const current = (record: number): Flow => readFlow(table, record, record, names, nowMs);
    const [made] = table.inserted.filter((record) => table.generation(record) !== 0);
    const [first] = lookups;
    const record = made ?? (first === undefined || first.reference < 0 || first.isGone ? -1 : first.reference >> 1);
    const entry = record < 0 ? undefined : current(record);
    return {
      lookups,
      made: made === undefined ? undefined : entry,
      entry: entry !== undefined && entry.expiresInMs > 0 ? entry : undefined,
    };
  }

  /** A decision about a datagram names a record by its place in the live table. */
  #withOwnRecord(): Recollection {
    const { datagram } = this.#recollection;
    const { decided } = datagram;
    if (decided === null || decided.decision.record < 0) return this.#recollection;
    const table = this.#tableOf(this.#query.protocol);
    const record = table.copyOf(decided.decision.record, decided.decision.generation);
    const generation = record < 0 ? 0 : table.generation(record);
    const decision = { ...decided.decision, record, generation };
    return { ...this.#recollection, datagram: { ...datagram, decided: { ...decided, decision } } };
  }
}

/** At most: those of the packet and of a few more, those of every backend's reply, and those of every source port that is tried. */
function recordsTouched({ services, snatAddresses }: Snapshot, service: number): number {
  const choices = services[service * SERVICE_WORDS + CHOICES_COUNT]!;
  return 64 + choices + snatAddresses.length * (SNAT_PORT_TRIES + 2);
}

/** For the longest packet there is to handle, with the headers that its pieces may get. */
function slotBytes(packet: Uint8Array, { datagram }: Recollection): number {
  const longest = Math.max(packet.length, ...datagram.held.map(({ bytes }) => bytes.length));
  return HEADROOM_BYTES + 2 * longest + 1024;
}
