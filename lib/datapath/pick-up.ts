import { flowHash } from '../balance/flow-hash.js';
import { lookup } from '../balance/lookup.js';
import { pickMaglev, pickWeighted } from '../balance/pick.js';
import { CAUSE_EXPIRED } from '../conntrack/events.js';
import { TYPE_OUT } from '../conntrack/record.js';
import type { Core } from './core.js';
import {
  AFFINITY_SECONDS,
  BACKEND_ADDRESS,
  BACKEND_PORT,
  BACKEND_WORDS,
  CHOICES_AT,
  CHOICES_COUNT,
  CHOICES_WEIGHT,
  MAGLEV_AT,
  MAGLEV_SIZE,
  SERVICE_WORDS,
  type Snapshot,
} from './snapshot.js';
import { STAT_PICKED_UP } from './stats.js';

/** The hash that chooses a backend of the service in `row` of `services`, for a client. */
export function selectionHash(
  { services, hashKey0, hashKey1 }: Snapshot,
  row: number,
  client: number,
  clientPort: number,
  vipPort: number,
  protocol: number,
): number {
  const port = services[row + AFFINITY_SECONDS] === 0 ? clientPort : 0;
  return flowHash(hashKey0, hashKey1, client, port, vipPort, protocol);
}

/**
 * The number within the service in `row` of the choice that a client's hash leads to: by its Maglev table, or, where lots are drawn by
 * the hash, by weight. The service has choices.
 */
export function choiceOfHash(
  snapshot: Snapshot,
  row: number,
  client: number,
  clientPort: number,
  vipPort: number,
  protocol: number,
): number {
  const { services, choices, maglev } = snapshot;
  const hash = selectionHash(snapshot, row, client, clientPort, vipPort, protocol);
  const size = services[row + MAGLEV_SIZE]!;
  if (size !== 0) return pickMaglev(maglev, services[row + MAGLEV_AT]!, size, hash);
  return pickWeighted(
    choices,
    services[row + CHOICES_AT]!,
    services[row + CHOICES_COUNT]!,
    services[row + CHOICES_WEIGHT]!,
    hash,
  );
}

/**
 * Replies that have no record, after a start without a table or of flows that found no room in it: recognised by the hash, which
 * leads every packet of a Maglev service's client to the same backend (docs/conntrack.md, Restarts).
 */
export class ReplyPickUp {
  readonly #core: Core;

  /** Of the last reply that was recognised. */
  service = 0;
  backend = 0;
  vip = 0;
  vipPort = 0;

  constructor(core: Core) {
    this.#core = core;
  }

  /** Whether the table is new enough for connections to be under way that it does not know. */
  get isRecovering(): boolean {
    const { nowMs, recoveringSince, snapshot } = this.#core;
    return nowMs < recoveringSince + snapshot.recoveryMs;
  }

  /**
   * Whether the packet in hand must be a reply, to be translated: it is from a backend of exactly one Maglev service whose hash
   * picks that backend for the packet's receiver, who has no other connection with the VIP. One that has expired is removed.
   */
  recognise(): boolean {
    const { packet, snapshot, nowMs } = this.#core;
    const { protocol } = packet;
    const service = lookup(snapshot.endpointIndex, packet.source, packet.sourcePort, protocol);
    // A backend that is its own client is never reached directly.
    if (service <= 0 || packet.source === packet.destination) return false;
    const { services, backends, choices } = snapshot;
    const row = service * SERVICE_WORDS;
    const vip = services[row]!;
    const vipPort = services[row + 1]!;
    if (services[row + CHOICES_COUNT] === 0 || this.#core.vipBits(packet.destination) !== 0) return false;

    const clientPort = packet.destinationPort;
    const choice = choiceOfHash(snapshot, row, packet.destination, clientPort, vipPort, protocol);
    const backend = choices[(services[row + CHOICES_AT]! + choice) * 2]!;
    const member = backend * BACKEND_WORDS;
    if (backends[member + BACKEND_ADDRESS] !== packet.source) return false;
    if (backends[member + BACKEND_PORT] !== packet.sourcePort) return false;

    const ports = (clientPort << 16) | vipPort;
    const table = this.#core.tableOf(protocol);
    const key = table.hash(packet.destination, vip, ports, protocol);
    const known = table.find(packet.destination, vip, ports, protocol, key);
    if (known >= 0) {
      if (!table.isExpired(known >> 1, nowMs)) return false;
      table.remove(known >> 1, CAUSE_EXPIRED, nowMs);
    }
    this.service = service;
    this.backend = backend;
    this.vip = vip;
    this.vipPort = vipPort;
    return true;
  }

  /** Makes the record of the reply that was recognised. @returns -1: there is no room */
  insert(): number {
    const { packet, stats, nowMs } = this.#core;
    const record = this.#core
      .tableOf(packet.protocol)
      .insert(
        packet.protocol,
        TYPE_OUT,
        packet.destination,
        this.vip,
        (packet.destinationPort << 16) | this.vipPort,
        packet.source,
        packet.destination,
        packet.ports,
        this.service,
        this.backend,
        nowMs,
      );
    if (record >= 0) stats[STAT_PICKED_UP]! += 1;
    return record;
  }
}
