import { flowHash } from '../balance/flow-hash.js';
import { lookup } from '../balance/lookup.js';
import { pickMaglev } from '../balance/pick.js';
import { TYPE_OUT } from '../conntrack/record.js';
import { PROTO_TCP } from '../wire/ipv4.js';
import type { Core } from './core.js';
import {
  AFFINITY_SECONDS,
  BACKEND_ADDRESS,
  BACKEND_PORT,
  BACKEND_WORDS,
  CHOICES_AT,
  CHOICES_COUNT,
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
   * Whether the packet in hand must be a reply, to be translated: it is TCP from a backend of exactly one Maglev service whose hash
   * picks that backend for the packet's receiver, who has no other connection with the VIP.
   */
  recognise(): boolean {
    const { packet, snapshot, tcp: table } = this.#core;
    if (packet.protocol !== PROTO_TCP) return false;
    const service = lookup(snapshot.endpointIndex, packet.source, packet.sourcePort, PROTO_TCP);
    if (service <= 0) return false;
    const { services, backends, choices } = snapshot;
    const row = service * SERVICE_WORDS;
    const vip = services[row]!;
    const vipPort = services[row + 1]!;
    if (services[row + CHOICES_COUNT] === 0 || this.#core.vipBits(packet.destination) !== 0) return false;

    const clientPort = packet.destinationPort;
    const hash = selectionHash(snapshot, row, packet.destination, clientPort, vipPort, PROTO_TCP);
    const choice = pickMaglev(snapshot.maglev, services[row + MAGLEV_AT]!, services[row + MAGLEV_SIZE]!, hash);
    const backend = choices[(services[row + CHOICES_AT]! + choice) * 2]!;
    const member = backend * BACKEND_WORDS;
    if (backends[member + BACKEND_ADDRESS] !== packet.source) return false;
    if (backends[member + BACKEND_PORT] !== packet.sourcePort) return false;

    const ports = (clientPort << 16) | vipPort;
    const key = table.hash(packet.destination, vip, ports, PROTO_TCP);
    if (table.find(packet.destination, vip, ports, PROTO_TCP, key) >= 0) return false;
    this.service = service;
    this.backend = backend;
    this.vip = vip;
    this.vipPort = vipPort;
    return true;
  }

  /** Makes the record of the reply that was recognised. @returns -1: there is no room */
  insert(): number {
    const { packet, tcp: table, stats, nowMs } = this.#core;
    const record = table.insert(
      PROTO_TCP,
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
