import { LRUCache } from 'lru-cache';
import { lookup } from '../balance/lookup.js';
import { ASKED_ENDPOINTS, HELD_FOR_ENDPOINT, HELD_FOR_ENDPOINT_MS, REFUSED_ENDPOINT_MS } from '../base/limits.js';
import { VNET_HEADER_BYTES } from '../wire/vnet.js';
import type { Core } from './core.js';

/** Between two questions of packets that do not wait: those that do are as many at most. */
const ASK_INTERVAL_MS = HELD_FOR_ENDPOINT_MS / HELD_FOR_ENDPOINT;

/** Tells the main thread of an endpoint whose replies ought to be led into the device. */
export type AskForEndpoint = (address: number, port: number, protocol: number) => void;

/** The VIP and port that a packet's option names; not `isThere`: it had none. */
export interface NamedVip {
  isThere: boolean;
  vip: number;
  vipPort: number;
}

/** A packet that waits, its vnet header before it. */
export interface WaitingPacket extends Readonly<NamedVip> {
  readonly bytes: Uint8Array;
  readonly key: string;
  readonly address: number;
  readonly port: number;
  readonly protocol: number;
  readonly untilMs: number;
}

/**
 * Endpoints that traffic teaches: local addresses and ports that no configuration names, whose replies the kernel must lead into
 * the device before the first of them is sent.
 *
 *     unknown --first packet of a flow--> asked --snapshot with it--> led in
 *                                           '--HELD_FOR_ENDPOINT_MS--> refused for REFUSED_ENDPOINT_MS, then unknown
 *
 * The packets of an endpoint that was asked for wait, copied aside, so that no reply goes out untranslated: the client would
 * answer it with an RST to the backend itself. Where the answer does not come they go on in spite of that, and so do fragments and packets
 * that find no room to wait; the reply may still find its way, by a rule that is not weir's.
 */
export class EndpointStage {
  readonly #core: Core;
  readonly #ask: AskForEndpoint | undefined;
  /** When an endpoint was asked for. */
  readonly #asked = new LRUCache<string, number>({ max: ASKED_ENDPOINTS });
  #waiting: WaitingPacket[] = [];
  /** From when on a packet that does not wait may ask. */
  #askAtMs = Number.NEGATIVE_INFINITY;

  /** @param ask undefined: every endpoint counts as led in */
  constructor(core: Core, ask: AskForEndpoint | undefined) {
    this.#core = core;
    this.#ask = ask;
  }

  /**
   * Whether the packet in hand, the first of a flow to this VIP, has to wait; a copy of it does then, and its slot is given back.
   *
   * @param mayWait it has not yet, and is no fragment, which others follow; else its endpoint is asked for, and it goes on
   */
  mustWait(vip: number, vipPort: number, mayWait: boolean): boolean {
    const core = this.#core;
    const { packet, bytes, nowMs } = core;
    if (this.#ask === undefined) return false;
    const { destination: address, destinationPort: port, protocol } = packet;
    if (this.#isLedIn(address, port, protocol)) return false;
    const key = `${address}:${port}/${protocol}`;
    const askedMs = this.#asked.get(key);
    const isNew = askedMs === undefined || nowMs >= askedMs + REFUSED_ENDPOINT_MS;
    if (!mayWait) {
      if (isNew && nowMs >= this.#askAtMs) {
        this.#askAtMs = nowMs + ASK_INTERVAL_MS;
        this.#asked.set(key, nowMs);
        this.#ask(address, port, protocol);
      }
      return false;
    }
    if (!isNew && nowMs >= askedMs + HELD_FOR_ENDPOINT_MS) return false;
    if (this.#waiting.length >= HELD_FOR_ENDPOINT) return false;
    if (isNew) {
      this.#asked.set(key, nowMs);
      this.#ask(address, port, protocol);
    }
    this.#waiting.push({
      isThere: true,
      vip,
      vipPort,
      bytes: bytes.slice(packet.at - VNET_HEADER_BYTES, packet.at + packet.length),
      key,
      address,
      port,
      protocol,
      untilMs: nowMs + HELD_FOR_ENDPOINT_MS,
    });
    core.hold();
    return true;
  }

  /** When a packet next has waited long enough, ms. */
  get nextDueMs(): number {
    return this.#waiting[0]?.untilMs ?? Number.POSITIVE_INFINITY;
  }

  /** The next packet that waits no longer; undefined: none. */
  next(): WaitingPacket | undefined {
    if (this.#waiting.length === 0) return undefined;
    const { nowMs } = this.#core;
    const index = this.#waiting.findIndex(
      ({ untilMs, address, port, protocol }) => nowMs >= untilMs || this.#isLedIn(address, port, protocol),
    );
    if (index < 0) return undefined;
    const [packet] = this.#waiting.splice(index, 1);
    if (this.#isLedIn(packet!.address, packet!.port, packet!.protocol)) this.#asked.delete(packet!.key);
    return packet;
  }

  #isLedIn(address: number, port: number, protocol: number): boolean {
    const ledIn = this.#core.snapshot.node?.ledIn ?? null;
    return ledIn === null || lookup(ledIn, address, port, protocol) !== 0;
  }
}
