import { ClientRates } from '../balance/client-rates.js';
import { flowHash } from '../balance/flow-hash.js';
import { pickMaglevWhere, pickWeightedWhere } from '../balance/pick.js';
import { contains } from '../balance/ranges.js';
import type { OpenCounts } from '../conntrack/open-counts.js';
import type { Core } from './core.js';
import { selectionHash } from './pick-up.js';
import type { RecollectionQuery } from './recollection.js';
import {
  BACKEND_CONNECTIONS,
  BACKEND_WORDS,
  CHOICES_AT,
  CHOICES_COUNT,
  CLIENT_CONNECTIONS,
  MAGLEV_AT,
  MAGLEV_SIZE,
  MODE_DSR,
  RANGES_AT,
  RANGES_COUNT,
  SERVICE_CONNECTIONS,
  SERVICE_FLAGS,
  SERVICE_LIMITED,
  SERVICE_MODE,
  SERVICE_WORDS,
  type Snapshot,
} from './snapshot.js';

/** Whether the service in `row` of `services` may be used by a client at all. */
export function isInSourceRanges({ services, ranges }: Snapshot, row: number, client: number): boolean {
  return services[row + RANGES_COUNT] === 0 || contains(ranges, services[row + RANGES_AT]!, client);
}

/** Open connections by id, of backends those that have a limit, and when the client may open as many as ever; null: it may. */
export interface LimitCounts {
  readonly services: readonly (readonly [id: number, open: number])[];
  readonly backends: readonly (readonly [id: number, open: number])[];
  readonly clientFullAtMs: number | null;
}

/** Expired records that are removed at once in search of the one that makes room: a tenth of a millisecond. */
const REAPED_AT_ONCE = 512;

/**
 * Limits of a service: how many connections it and its backends may have open, and how fast one client may open them. They are for
 * connections that begin; none that is known, or was picked up in its middle, is ever refused or led elsewhere for them.
 *
 * A backend at its limit is passed over (docs/operating.md, Limits): Maglev goes on to other slots of its table, the same at every
 * gateway where the same backends are full; lots are drawn among those that have room. A client whom affinity leads to a full
 * backend still belongs there: its next connection goes there again once there is room.
 *
 * What has expired and was not come upon yet counts for nothing: at a limit the table is searched for such records before
 * anybody is refused. Where it has not used more than some thousand records that is exact. In a larger one a search looks at
 * some (sweep.ts) and the next goes on there; a refusal that came of a search cut short asks the garbage collector for a pass,
 * so that a place is free some milliseconds after that, and at most a second (gc.ts).
 *
 * Rejected: an order by expiry (a heap, or lists by backend), which every insert and removal would pay for, and a reload that
 * sets a limit with a walk over the table.
 */
export class LimitStage {
  readonly #core: Core;
  readonly #rates: ClientRates;
  /** Of the service and the client that `allowsClient` was asked about. */
  #hash = 0;
  /** Where the service's choices begin in the snapshot, for what follows. */
  #choicesAt = 0;
  /** What has expired has been searched for already. */
  readonly #choiceHasRoom = (choice: number): boolean => {
    const backend = this.#backendOf(choice);
    const limit = this.#limitOf(backend);
    return limit === 0 || this.#open.backends[backend]! < limit;
  };

  constructor(core: Core) {
    this.#core = core;
    this.#rates = new ClientRates(core.memoryEntries === undefined ? undefined : 1);
  }

  /** What counts for a new connection of a client: of the service, of its backends, of itself. */
  recall({ service, source, protocol }: RecollectionQuery): LimitCounts {
    const { services, choices } = this.#core.snapshot;
    const { open } = this.#core.tableOf(protocol);
    const row = service * SERVICE_WORDS;
    const first = services[row + CHOICES_AT]!;
    const isLimited = (services[row + SERVICE_FLAGS]! & SERVICE_LIMITED) !== 0;
    const backends: [id: number, open: number][] = [];
    for (let i = 0; isLimited && i < services[row + CHOICES_COUNT]!; i++) {
      const backend = choices[(first + i) * 2]!;
      if (this.#limitOf(backend) !== 0) backends.push([backend, open.backends[backend]!]);
    }
    const clientFullAtMs = this.#rates.recall(service, source, this.#hashOf(service, source, protocol));
    return { services: [[service, open.services[service]!]], backends, clientFullAtMs };
  }

  /** Goes on from what another has recalled. */
  assume({ service, source, protocol }: RecollectionQuery, { services, backends, clientFullAtMs }: LimitCounts): void {
    this.#core.tableOf(protocol).open.assume(services, backends);
    this.#rates.assume(service, source, this.#hashOf(service, source, protocol), clientFullAtMs);
  }

  #hashOf(service: number, client: number, protocol: number): number {
    return this.#core.tableOf(protocol).hash(client, service, 0, 0);
  }

  /** Whether the client of the packet in hand may open one more connection now. */
  allowsClient(service: number, row: number): boolean {
    const { packet, snapshot, nowMs } = this.#core;
    const perSecond = snapshot.services[row + CLIENT_CONNECTIONS]!;
    if (perSecond === 0) return true;
    this.#hash = this.#hashOf(service, packet.source, packet.protocol);
    return this.#rates.allows(service, packet.source, this.#hash, perSecond, nowMs);
  }

  /** The choice itself while its backend has room, else another that has; -1: none has, or the service has none. */
  withRoom(service: number, row: number, choice: number): number {
    const { packet, snapshot, random } = this.#core;
    const { services, choices, maglev } = snapshot;
    if (this.#isFull(this.#open.services, service, services[row + SERVICE_CONNECTIONS]!)) return -1;
    this.#choicesAt = services[row + CHOICES_AT]!;
    if (this.hasRoom(this.#backendOf(choice))) return choice;

    const { source, sourcePort, destinationPort, protocol } = packet;
    const count = services[row + CHOICES_COUNT]!;
    const size = services[row + MAGLEV_SIZE]!;
    const isByHash = size !== 0 || services[row + SERVICE_MODE] === MODE_DSR;
    const hash = isByHash ? selectionHash(snapshot, row, source, sourcePort, destinationPort, protocol) : 0;
    if (size !== 0) return pickMaglevWhere(maglev, services[row + MAGLEV_AT]!, size, hash, count, this.#choiceHasRoom);
    const draw = isByHash ? flowHash(snapshot.hashKey0, snapshot.hashKey1, hash, 0, 0, 0) : random();
    return pickWeightedWhere(choices, this.#choicesAt, count, draw, this.#choiceHasRoom);
  }

  /** Whether a backend has room for one more connection of the protocol of the packet in hand. */
  hasRoom(backend: number): boolean {
    return !this.#isFull(this.#open.backends, backend, this.#limitOf(backend));
  }

  /** The packet in hand has opened a connection, after `allowsClient`. */
  opened(service: number, row: number): void {
    const { packet, snapshot, nowMs } = this.#core;
    const perSecond = snapshot.services[row + CLIENT_CONNECTIONS]!;
    if (perSecond !== 0) this.#rates.count(service, packet.source, this.#hash, perSecond, nowMs);
  }

  /** Whether as many connections are open as may be, when what has expired is gone. @param limit 0: any number */
  #isFull(counts: Int32Array, id: number, limit: number): boolean {
    if (limit === 0 || counts[id]! < limit) return false;
    const { packet, nowMs } = this.#core;
    const table = this.#core.tableOf(packet.protocol);
    for (let left = REAPED_AT_ONCE; left > 0 && table.reapNext(nowMs); left--) if (counts[id]! < limit) return false;
    if (table.mayHoldExpired(nowMs)) table.isPassWanted = true;
    return true;
  }

  get #open(): OpenCounts {
    return this.#core.tableOf(this.#core.packet.protocol).open;
  }

  #limitOf(backend: number): number {
    return this.#core.snapshot.backends[backend * BACKEND_WORDS + BACKEND_CONNECTIONS]!;
  }

  #backendOf(choice: number): number {
    return this.#core.snapshot.choices[(this.#choicesAt + choice) * 2]!;
  }
}
