import type { MemoryPacket } from '../../../lib/io/memory-device.js';
import { buildRst, buildUnreachable, type Packet } from './packets.js';
import type { Side } from './tcp.js';
import { splitEndpoint } from './world.js';

/** What must come of a packet. */
export interface Expected {
  readonly verdict: string;
  readonly reason?: string;
  readonly direction?: string;
  readonly service?: string;
  readonly backend?: string;
  readonly state?: string;
  readonly out: readonly MemoryPacket[];
}

export interface Counters {
  readonly packets: Record<Side, number>;
  readonly bytes: Record<Side, number>;
  begun: number;
  /** SYNs that the backend refused, and those that ended before it answered. */
  refused: number;
  unanswered: number;
}

const ANSWERS_PER_SECOND = 50;

/** How a packet can end, and the counting of it. */
export class Ends {
  readonly stats = { forwarded: 0, stateless: 0, pickedUp: 0, cut: 0, reasons: new Map<string, number>() };
  /** By backend. */
  readonly counters = new Map<string, Counters>();
  readonly #answers = new Map<string, { startMs: number; count: number }>();

  forward(out: MemoryPacket): Expected {
    this.stats.forwarded++;
    return { verdict: 'forward', out: [out] };
  }

  drop(reason: string): Expected {
    this.count(reason);
    return { verdict: 'drop', reason, out: [] };
  }

  refuseTcp(packet: Packet, nowMs: number, reason: string, otherwise: string): Expected {
    const { flags, seq, ack, payload } = packet.segment!;
    if (flags.includes('R')) return this.drop(otherwise);
    if (!this.#mayAnswer(packet, nowMs)) return this.drop('rate-limited');
    this.count(reason);
    const next = seq + payload + (flags.includes('S') ? 1 : 0) + (flags.includes('F') ? 1 : 0);
    const answer = flags.includes('A')
      ? buildRst(packet.destination, packet.source, 'R', ack, 0)
      : buildRst(packet.destination, packet.source, 'RA', 0, next);
    return { verdict: 'reply', reason, out: [answer] };
  }

  refuseUdp(packet: Packet, nowMs: number): Expected {
    if (!this.#mayAnswer(packet, nowMs)) return this.drop('rate-limited');
    this.count('unreachable');
    return { verdict: 'reply', reason: 'unreachable', out: [buildUnreachable(packet)] };
  }

  #mayAnswer({ source }: Packet, nowMs: number): boolean {
    const [address] = splitEndpoint(source);
    const window = this.#answers.get(address);
    if (window === undefined || nowMs - window.startMs >= 1000) {
      this.#answers.set(address, { startMs: nowMs, count: 1 });
      return true;
    }
    window.count++;
    return window.count <= ANSWERS_PER_SECOND;
  }

  count(reason: string): void {
    this.stats.reasons.set(reason, (this.stats.reasons.get(reason) ?? 0) + 1);
  }

  countersOf(backendKey: string): Counters {
    let counters = this.counters.get(backendKey);
    if (counters === undefined) {
      counters = {
        packets: { original: 0, reply: 0 },
        bytes: { original: 0, reply: 0 },
        begun: 0,
        refused: 0,
        unanswered: 0,
      };
      this.counters.set(backendKey, counters);
    }
    return counters;
  }
}
