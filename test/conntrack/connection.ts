import { FlowTable } from '../../lib/conntrack/flow-table.js';
import { allocateTable } from '../../lib/conntrack/memory.js';
import {
  CLASS_MASK,
  EXPIRES,
  FLAG_NAMES,
  FLAGS,
  MARKS,
  RECORD_BYTES,
  RECORD_DOUBLES,
  STATE,
  STATE_NAMES,
  TYPE_OUT,
} from '../../lib/conntrack/record.js';
import { account, openTcp, trackTcp } from '../../lib/conntrack/tcp-tracker.js';
import * as tcp from '../../lib/wire/tcp.js';

/** The default timers, ms, in the order of TIMEOUT_*: tcp, tcpSyn, tcpFin, any, serviceTcp, serviceAny, grace. */
export const TIMEOUTS = Float64Array.of(8_000_000, 60_000, 10_000, 60_000, 8_000_000, 60_000, 60_000);

export const SECRET = { k0: 0x01234567, k1: 0x76543210 };

export const CLIENT_ADDRESS = 0x0a010002;
export const VIP_ADDRESS = 0x0a60000a;
export const BACKEND_ADDRESS = 0x0a02000b;

export interface Segment {
  /** Letters of `SFRPAUEW`. */
  readonly flags: string;
  /** Relative to the sender's next byte; `at` instead: absolute. */
  readonly seq?: number;
  readonly at?: number;
  /** Relative to the peer's next byte. */
  readonly ack?: number;
  readonly window?: number;
  readonly payload?: number;
  readonly scale?: number;
}

/** A table with room for `capacity` connections and a fixed secret. */
export function makeTable(capacity = 64): FlowTable {
  return new FlowTable(allocateTable(capacity, SECRET));
}

/** Inserts flow `n`: client port n & 0xffff of one of many clients, all to one VIP and backend. */
export function insertFlow(table: FlowTable, n: number, protocol: number, nowMs: number, type = TYPE_OUT): number {
  const client = (CLIENT_ADDRESS + (n >>> 16)) | 0;
  const port = n & 0xffff;
  return table.insert(
    protocol,
    type,
    client,
    VIP_ADDRESS,
    (port << 16) | 80,
    BACKEND_ADDRESS,
    client,
    (8080 << 16) | port,
    1,
    2,
    nowMs,
  );
}

/** The reference of flow `n` under its original key, -1 when it is not there. */
export function findFlow(table: FlowTable, n: number, protocol: number): number {
  const client = (CLIENT_ADDRESS + (n >>> 16)) | 0;
  const ports = ((n & 0xffff) << 16) | 80;
  return table.find(client, VIP_ADDRESS, ports, protocol, table.hash(client, VIP_ADDRESS, ports, protocol));
}

/** One TCP connection through the tracker, with both ends' sequence numbers kept as real ends would. */
export class Connection {
  readonly table: FlowTable;
  readonly record: number;
  nowMs: number;
  /** The next byte each end will send. */
  readonly next: { client: number; backend: number };
  #isOpen = false;

  constructor(
    options: { type?: number; nowMs?: number; clientIsn?: number; backendIsn?: number; table?: FlowTable } = {},
  ) {
    this.table = options.table ?? makeTable();
    this.nowMs = options.nowMs ?? 1_000_000;
    this.next = { client: options.clientIsn ?? 1000, backend: options.backendIsn ?? 700_000 };
    this.record = insertFlow(this.table, this.table.count + 1, 6, this.nowMs, options.type ?? TYPE_OUT);
  }

  /** A packet of the client; the first one opens the record. */
  client(segment: Segment): this {
    return this.#send('client', segment);
  }

  backend(segment: Segment): this {
    return this.#send('backend', segment);
  }

  wait(ms: number): this {
    this.nowMs += ms;
    return this;
  }

  handshake(options: { window?: number; scale?: number } = {}): this {
    const { window = 65535, scale = -1 } = options;
    return this.client({ flags: 'S', window, scale })
      .backend({ flags: 'SA', window, scale })
      .client({ flags: 'A', window });
  }

  get state(): string {
    return STATE_NAMES[this.table.bytes[this.record * RECORD_BYTES + STATE]!]!;
  }

  get flags(): string {
    const bits = this.table.bytes[this.record * RECORD_BYTES + FLAGS]!;
    return FLAG_NAMES.filter(([bit]) => (bits & bit) !== 0)
      .map(([, name]) => name)
      .join(' ');
  }

  get class(): number {
    return this.table.bytes[this.record * RECORD_BYTES + MARKS]! & CLASS_MASK;
  }

  get expiresInMs(): number {
    return this.table.doubles[this.record * RECORD_DOUBLES + EXPIRES]! - this.nowMs;
  }

  #send(from: 'client' | 'backend', segment: Segment): this {
    const peer = from === 'client' ? 'backend' : 'client';
    const bits = flagBits(segment.flags);
    const payload = segment.payload ?? 0;
    const seq = (segment.at ?? this.next[from] + (segment.seq ?? 0)) | 0;
    const ack = (bits & tcp.ACK) === 0 ? 0 : (this.next[peer] + (segment.ack ?? 0)) | 0;
    const isSyn = (bits & tcp.SYN) !== 0;
    const scale = isSyn ? (segment.scale ?? -1) : -1;
    const window = segment.window ?? 65535;
    const { table, record, nowMs } = this;
    if (this.#isOpen || from === 'backend') {
      trackTcp(table, record, from === 'backend', bits, seq, ack, window, payload, scale, nowMs, TIMEOUTS);
    } else openTcp(table, record, bits, seq, ack, window, payload, scale, nowMs, TIMEOUTS);
    this.#isOpen = true;
    account(table, record, from === 'backend', 40 + payload, nowMs);
    const isInSequence = segment.at === undefined && (segment.seq ?? 0) === 0 && (bits & tcp.RST) === 0;
    if (isInSequence) this.next[from] += payload + (isSyn ? 1 : 0) + ((bits & tcp.FIN) !== 0 ? 1 : 0);
    return this;
  }
}

function flagBits(letters: string): number {
  let bits = 0;
  for (const letter of letters) bits |= 1 << 'FSRPAUEW'.indexOf(letter);
  return bits;
}
