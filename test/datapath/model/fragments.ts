import type { Flow } from './flows.js';
import type { Packet } from './packets.js';
import type { Side } from './tcp.js';
import type { Backend, Service } from './world.js';

/** What became of a first fragment, and so becomes of the others. */
export interface Decision {
  readonly atMs: number;
  readonly verdict: 'forward' | 'pass' | 'drop';
  readonly reason: string;
  /** The ends and the identification it left with. */
  readonly source: string;
  readonly destination: string;
  readonly id: number;
  readonly side: Side | undefined;
  readonly service: Service | undefined;
  readonly backend: Backend | undefined;
  readonly flow: Flow | undefined;
}

const REMEMBERED_MS = 30_000;
const HELD_MS = 1000;

/** Rule 7: who follows whom, and who waits. */
export class FragmentsModel {
  readonly #decisions = new Map<string, Decision>();
  /** Which datagram has an identification between two addresses, and until when. */
  readonly #holders = new Map<string, { readonly datagram: string; readonly untilMs: number }>();
  #waiting: { readonly key: string; readonly atMs: number; readonly packet: Packet }[] = [];

  /** What the fragment follows. */
  find(packet: Packet, nowMs: number): Decision | undefined {
    const decision = this.#decisions.get(keyOfDatagram(packet));
    return decision !== undefined && nowMs < decision.atMs + REMEMBERED_MS ? decision : undefined;
  }

  hold(packet: Packet, nowMs: number): void {
    this.#waiting.push({ key: keyOfDatagram(packet), atMs: nowMs, packet });
  }

  /** The first fragment has come to its end; returns those that waited for it. */
  lead(packet: Packet, decision: Decision): Packet[] {
    const key = keyOfDatagram(packet);
    this.#decisions.set(key, decision);
    const followers = this.#waiting.filter((each) => each.key === key);
    this.#waiting = this.#waiting.filter((each) => each.key !== key);
    return followers.map((each) => each.packet);
  }

  /**
   * The identification that a datagram leaves with: its own, unless another has that where it now goes. Then it is what it was
   * given, if nobody has it.
   */
  identify(packet: Packet, source: string, destination: string, given: number, nowMs: number): number {
    const datagram = keyOfDatagram(packet);
    const isTaken = (id: number): boolean => {
      const holder = this.#holders.get(keyOf(packet.protocol, source, destination, id));
      return holder !== undefined && holder.datagram !== datagram && nowMs < holder.untilMs;
    };
    const own = packet.fragment!.id;
    const id = isTaken(own) ? given : own;
    if (isTaken(id)) throw new Error(`identification ${id} is another's`);
    this.#holders.set(keyOf(packet.protocol, source, destination, id), { datagram, untilMs: nowMs + REMEMBERED_MS });
    return id;
  }

  /** Throws away what has waited too long; returns how many that were. */
  expire(nowMs: number): number {
    const count = this.#waiting.length;
    this.#waiting = this.#waiting.filter(({ atMs }) => nowMs < atMs + HELD_MS);
    return count - this.#waiting.length;
  }
}

function keyOfDatagram({ protocol, source, destination, fragment }: Packet): string {
  return keyOf(protocol, source, destination, fragment!.id);
}

function keyOf(protocol: string, source: string, destination: string, id: number): string {
  const [from, to] = [source, destination].map((endpoint) => endpoint.split(':')[0]);
  return `${protocol} ${from} > ${to} ${id}`;
}
