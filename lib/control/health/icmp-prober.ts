import type { Socket } from 'raw-socket';
import { storeFull, sum } from '../../wire/checksum.js';
import { ECHO_REPLY, ECHO_REQUEST, ICMP_CHECKSUM, ICMP_HEADER_BYTES, type } from '../../wire/icmp.js';
import { headerLength, IPV4_HEADER_BYTES } from '../../wire/ipv4.js';
import type { Attempt } from './attempt.js';

/** The echo header's own part (RFC 792). */
const IDENTIFIER = 4;
const SEQUENCE = 6;

/** As ping's, which firewalls and people know. */
const PAYLOAD_BYTES = 56;

/** What raw-socket says, in strerror's words, when nothing can be sent to this address in particular. */
const UNREACHABLE = /unreachable|no route to host/i;

type Load = () => Promise<Pick<typeof import('raw-socket'), 'default'>>;

interface Waiting {
  readonly attempt: Attempt;
  readonly address: string;
}

/**
 * Echo requests, over one raw socket for all of them. It is opened with the first probe, and the optional package that brings it
 * loaded then; a host that has not got it, or may not open one, finds nothing out.
 */
export class IcmpProber {
  readonly #load: Load;
  readonly #identifier: number;
  readonly #waiting = new Map<number, Waiting>();
  #sequence = 0;
  /** The socket, or why there is none. */
  #opening: Promise<Socket | string> | undefined;
  #socket: Socket | undefined;
  #isClosed = false;

  /** @param identifier tells this process' requests from those of others; 16 bits */
  constructor(identifier = process.pid & 0xffff, load: Load = () => import('raw-socket')) {
    this.#identifier = identifier;
    this.#load = load;
  }

  begin(attempt: Attempt, address: string): void {
    this.#opening ??= this.#open();
    void this.#opening.then((socket) => {
      if (attempt.isOver) return;
      if (typeof socket === 'string') attempt.settle('unknown', socket);
      else this.#send(socket, attempt, address);
    });
  }

  close(): void {
    this.#isClosed = true;
    this.#socket?.close();
    this.#socket = undefined;
  }

  async #open(): Promise<Socket | string> {
    let raw: typeof import('raw-socket')['default'];
    try {
      raw = (await this.#load()).default;
    } catch (error) {
      const { code, message } = error as NodeJS.ErrnoException;
      const isMissing = code === 'ERR_MODULE_NOT_FOUND' || code === 'MODULE_NOT_FOUND';
      return `the optional package raw-socket ${isMissing ? 'is not installed' : `cannot be loaded: ${message}`}`;
    }
    if (this.#isClosed) return 'closed';
    try {
      const socket = raw.createSocket({ protocol: raw.Protocol.ICMP });
      socket.on('message', (packet: Buffer, source: string) => this.#receive(packet, source));
      socket.on('error', (error: Error) => this.#fail(socket, error));
      // Nobody else holds it, and what nobody holds is closed.
      this.#socket = socket;
      return socket;
    } catch (error) {
      return `a raw socket cannot be opened (${(error as Error).message}): CAP_NET_RAW is needed`;
    }
  }

  #send(socket: Socket, attempt: Attempt, address: string): void {
    this.#sequence = (this.#sequence + 1) & 0xffff;
    const sequence = this.#sequence;
    const echo = Buffer.alloc(ICMP_HEADER_BYTES + PAYLOAD_BYTES);
    echo[0] = ECHO_REQUEST;
    echo.writeUInt16BE(this.#identifier, IDENTIFIER);
    echo.writeUInt16BE(sequence, SEQUENCE);
    storeFull(echo, ICMP_CHECKSUM, sum(echo, 0, echo.length));
    this.#waiting.set(sequence, { attempt, address });
    attempt.release = () => this.#waiting.delete(sequence);
    socket.send(echo, 0, echo.length, address, (error) => {
      if (error === null) return;
      const text = error.message.toLowerCase();
      attempt.settle(UNREACHABLE.test(text) ? 'failure' : 'unknown', text);
    });
  }

  #receive(packet: Buffer, source: string): void {
    if (packet.length < IPV4_HEADER_BYTES) return;
    const l4 = headerLength(packet, 0);
    if (packet.length < l4 + ICMP_HEADER_BYTES || type(packet, l4) !== ECHO_REPLY) return;
    if (packet.readUInt16BE(l4 + IDENTIFIER) !== this.#identifier) return;
    const waiting = this.#waiting.get(packet.readUInt16BE(l4 + SEQUENCE));
    if (waiting?.address === source) waiting.attempt.settle('success', 'echo reply');
  }

  /** The next probe opens another. */
  #fail(socket: Socket, error: Error): void {
    if (this.#socket !== socket) return;
    this.#socket = undefined;
    this.#opening = undefined;
    socket.close();
    for (const { attempt } of [...this.#waiting.values()]) {
      attempt.settle('unknown', `the raw socket failed: ${error.message}`);
    }
  }
}
