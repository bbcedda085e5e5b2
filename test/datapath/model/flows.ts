import type { MemoryPacket } from '../../../lib/io/memory-device.js';
import { build, type Packet } from './packets.js';
import type { Side, TcpModel } from './tcp.js';
import { endpointOf, type Service } from './world.js';

/** An entry of conntrack. Ends are text: `10.1.0.2:40000`. */
export interface Flow {
  readonly protocol: 'tcp' | 'udp';
  readonly client: string;
  readonly vip: string;
  readonly backend: string;
  /** What the backend takes for its client. */
  readonly source: string;
  readonly service: Service;
  readonly backendKey: string;
  readonly isLoopback: boolean;
  readonly tcp: TcpModel | undefined;
  isReplied: boolean;
  expiresMs: number;
  readonly packets: Record<Side, number>;
  readonly bytes: Record<Side, number>;
}

/** All that live, by the text of either tuple. */
export class Flows {
  readonly #original = new Map<string, Flow>();
  readonly #reply = new Map<string, Flow>();
  readonly #onEnd: (flow: Flow) => void;

  constructor(onEnd: (flow: Flow) => void) {
    this.#onEnd = onEnd;
  }

  /** In the order of their making. */
  [Symbol.iterator](): IterableIterator<Flow> {
    return [...this.#original.values()][Symbol.iterator]();
  }

  /** Whose packet this would be, and from which side. */
  find(protocol: string, source: string, destination: string): [flow: Flow, side: Side] | undefined {
    const tuple = `${protocol} ${source} > ${destination}`;
    const original = this.#original.get(tuple);
    if (original) return [original, 'original'];
    const reply = this.#reply.get(tuple);
    return reply && [reply, 'reply'];
  }

  add(flow: Flow): void {
    this.#original.set(originalOf(flow), flow);
    this.#reply.set(replyOf(flow), flow);
  }

  remove(flow: Flow): void {
    this.#onEnd(flow);
    this.#original.delete(originalOf(flow));
    this.#reply.delete(replyOf(flow));
  }

  has(flow: Flow): boolean {
    return this.#original.get(originalOf(flow)) === flow;
  }
}

export function originalOf({ protocol, client, vip }: Flow): string {
  return `${protocol} ${client} > ${vip}`;
}

function replyOf({ protocol, backend, source }: Flow): string {
  return `${protocol} ${backend} > ${source}`;
}

export function stateOf({ tcp, isReplied }: Flow): string {
  return tcp ? tcp.state : isReplied ? 'REPLIED' : 'UNREPLIED';
}

export function isClosing({ tcp }: Flow): boolean {
  return tcp?.state === 'CLOSING' || tcp?.state === 'CLOSED';
}

export function isHalfOpen(flow: Flow): boolean {
  return ['SYN_SENT', 'SYN_RECV', 'UNREPLIED'].includes(stateOf(flow));
}

/** The client's SYN is all there is. */
export function isUnanswered({ tcp }: Flow): boolean {
  return tcp?.state === 'SYN_SENT' && tcp.isFromStart;
}

/** As the file last called it. */
export function backendName({ service, backend }: Flow): string {
  return service.backends.find((each) => endpointOf(each) === backend)!.name;
}

/** A packet of one side as it must leave. */
export function translate(flow: Flow, side: Side, packet: Packet): MemoryPacket {
  return side === 'original' ? build(packet, flow.source, flow.backend) : build(packet, flow.vip, flow.client);
}
