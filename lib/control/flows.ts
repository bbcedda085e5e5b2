import {
  BACKEND,
  BACKEND_ID,
  CLIENT,
  EXPIRES,
  FLAG_NAMES,
  FLAGS,
  ORIGINAL_PORTS,
  PROTOCOL,
  RECORD_BYTES,
  RECORD_DOUBLES,
  RECORD_WORDS,
  REPLY_PORTS,
  RETURN,
  RX_BYTES,
  RX_FLAGS_SEEN,
  RX_PACKETS,
  RX_SEEN,
  SERVICE,
  STATE,
  STATE_NAMES,
  TX_BYTES,
  TX_FLAGS_SEEN,
  TX_PACKETS,
  TX_SEEN,
  TYPE,
  TYPE_NAMES,
  VIP,
} from '../conntrack/record.js';
import { formatEndpoint, formatIpv4, parseIpv4 } from '../wire/address.js';
import { PROTO_ICMP, PROTO_TCP, PROTO_UDP } from '../wire/ipv4.js';

/**
 * The conntrack as people and programs see it: records become flows with names. Reading is streamed, record after record, so
 * that a million of them need no memory; the packets go on meanwhile, and a list is therefore no snapshot of one moment.
 */

/** Memory with records in it: record n at word n * RECORD_WORDS, and so on. */
export interface RecordMemory {
  readonly words: Int32Array;
  readonly bytes: Uint8Array;
  readonly doubles: Float64Array;
}

/** Where records are read from: the data path's own table, or another thread's view of it. */
export interface RecordSource extends RecordMemory {
  /** The records there are room for. */
  readonly capacity: number;
  /** Records from here on were never used; a source without it knows so itself. Reading them would commit their memory. */
  readonly highWater?: number;
  /**
   * Makes a record readable in `words`, `bytes` and `doubles` and returns its number there, or -1 when it holds no flow (or
   * one that is being written).
   */
  read(record: number): number;
}

/** Names by the ids that records hold; undefined for an id that means nothing any more. */
export interface FlowNames {
  serviceName(id: number): string | undefined;
  backendName(id: number): string | undefined;
}

export interface Endpoint {
  /** Unsigned. */
  readonly address: number;
  readonly port: number;
}

/** One flow. Times are of the data path's clock. */
export interface Flow {
  readonly record: number;
  readonly protocol: number;
  readonly type: string;
  readonly client: Endpoint;
  readonly vip: Endpoint;
  readonly backend: Endpoint;
  /** What the backend sees as its client: the client, or weir itself (snat). */
  readonly source: Endpoint;
  readonly serviceId: number;
  readonly backendId: number;
  readonly serviceName: string | undefined;
  readonly backendName: string | undefined;
  readonly state: string;
  readonly flags: number;
  readonly expiresMs: number;
  readonly expiresInMs: number;
  readonly txPackets: number;
  readonly rxPackets: number;
  readonly txBytes: number;
  readonly rxBytes: number;
  readonly txFlagsSeen: number;
  readonly rxFlagsSeen: number;
  readonly txSeenSeconds: number;
  readonly rxSeenSeconds: number;
}

/** A flow as `weir ct list -o json`, `weir replay --conntrack` and the admin API show it. */
export interface FlowJson {
  readonly proto: string;
  readonly type: string;
  readonly client: string;
  readonly vip: string;
  readonly backend: string;
  /** Only where it is not the client: the address and port that the backend answers to. */
  readonly snat?: string;
  readonly service: string;
  readonly state: string;
  readonly flags: string[];
  /** Seconds, to the millisecond. */
  readonly expiresIn: number;
  readonly packets: { readonly original: number; readonly reply: number };
  readonly bytes: { readonly original: number; readonly reply: number };
}

/** What a list is narrowed down to; a flow must meet all that is given. */
export interface FlowFilter {
  /** The name of a service. */
  readonly service?: string;
  /** A backend by name, `service/name`, address, or address:port. */
  readonly backend?: string;
  /** A client by address, address:port, or prefix (`10.0.0.0/8`). */
  readonly client?: string;
  /** A state's name, in upper or lower case. */
  readonly state?: string;
}

/** Records looked at between two rests, whether or not they are listed: some 2 ms. */
const SLICE_RECORDS = 8192;

/** The flows that live, in the order of their records, source after source. */
export function* listFlows(...walk: Parameters<typeof walkFlows>): Generator<Flow, void, void> {
  for (const flow of walkFlows(...walk)) if (flow !== null) yield flow;
}

/**
 * The same with places for a rest, also where nothing is found for a long time: null.
 *
 * @param limit flows at most
 */
export function* walkFlows(
  sources: readonly RecordSource[],
  names: FlowNames,
  nowMs: number,
  filter: FlowFilter = {},
  limit = Number.POSITIVE_INFINITY,
): Generator<Flow | null, void, void> {
  const accepts = compileFilter(filter, names);
  let left = limit;
  for (const source of sources) {
    for (let record = 0; record < (source.highWater ?? source.capacity); record++) {
      if (record % SLICE_RECORDS === SLICE_RECORDS - 1) yield null;
      const at = source.read(record);
      if (at < 0) continue;
      if (source.doubles[at * RECORD_DOUBLES + EXPIRES]! <= nowMs || !accepts(source, at)) continue;
      if (left-- <= 0) return;
      yield readFlow(source, at, record, names, nowMs);
    }
  }
}

/**
 * The record numbers that `listFlows` would list, for removing or exporting them. Each is in the source's `words`, `bytes` and
 * `doubles` when its number comes. With places for a rest, as `walkFlows` has them: null.
 */
export function* matchRecords(
  source: RecordSource,
  names: FlowNames,
  nowMs: number,
  filter: FlowFilter,
): Generator<number | null> {
  const accepts = compileFilter(filter, names);
  for (let record = 0; record < (source.highWater ?? source.capacity); record++) {
    if (record % SLICE_RECORDS === SLICE_RECORDS - 1) yield null;
    const at = source.read(record);
    if (at >= 0 && source.doubles[at * RECORD_DOUBLES + EXPIRES]! > nowMs && accepts(source, at)) yield record;
  }
}

/** @returns what is wrong with a filter's text, or undefined. */
export function filterMistake({ client, state }: FlowFilter): string | undefined {
  if (client !== undefined && parseClient(client) === undefined) {
    return `"${client}" is no address, address:port or prefix`;
  }
  if (state !== undefined && stateNumber(state) < 0) {
    return `no state is called "${state}"; there are ${STATE_NAMES.slice(1).join(', ')}`;
  }
  return undefined;
}

export function flowJson(flow: Flow): FlowJson {
  const { client, vip, backend, source } = flow;
  const isSnat = source.address !== client.address || source.port !== client.port;
  return {
    proto: protocolName(flow.protocol),
    type: flow.type,
    client: formatEndpoint(client.address, client.port),
    vip: formatEndpoint(vip.address, vip.port),
    backend: formatEndpoint(backend.address, backend.port),
    ...(isSnat ? { snat: formatEndpoint(source.address, source.port) } : {}),
    service: flow.serviceName ?? '',
    state: flow.state,
    flags: flagNames(flow.flags),
    expiresIn: Math.round(flow.expiresInMs) / 1000,
    packets: { original: flow.txPackets, reply: flow.rxPackets },
    bytes: { original: flow.txBytes, reply: flow.rxBytes },
  };
}

/** In the order of Cilium's dump. */
export function flagNames(flags: number): string[] {
  return FLAG_NAMES.filter(([bit]) => (flags & bit) !== 0).map(([, name]) => name);
}

export function protocolName(protocol: number): string {
  switch (protocol) {
    case PROTO_TCP:
      return 'tcp';
    case PROTO_UDP:
      return 'udp';
    case PROTO_ICMP:
      return 'icmp';
    default:
      return String(protocol);
  }
}

/** The flow whose record lies at `at`; `record` is its number in its table. */
export function readFlow(memory: RecordMemory, at: number, record: number, names: FlowNames, nowMs: number): Flow {
  const { words, bytes, doubles } = memory;
  const word = at * RECORD_WORDS;
  const byte = at * RECORD_BYTES;
  const double = at * RECORD_DOUBLES;
  const originalPorts = words[word + ORIGINAL_PORTS]!;
  const replyPorts = words[word + REPLY_PORTS]!;
  const serviceId = words[word + SERVICE]!;
  const backendId = words[word + BACKEND_ID]!;
  const expiresMs = doubles[double + EXPIRES]!;
  return {
    record,
    protocol: bytes[byte + PROTOCOL]!,
    type: TYPE_NAMES[bytes[byte + TYPE]!] ?? '',
    client: { address: words[word + CLIENT]! >>> 0, port: originalPorts >>> 16 },
    vip: { address: words[word + VIP]! >>> 0, port: originalPorts & 0xffff },
    backend: { address: words[word + BACKEND]! >>> 0, port: replyPorts >>> 16 },
    source: { address: words[word + RETURN]! >>> 0, port: replyPorts & 0xffff },
    serviceId,
    backendId,
    serviceName: names.serviceName(serviceId),
    backendName: names.backendName(backendId),
    state: STATE_NAMES[bytes[byte + STATE]!] ?? '',
    flags: bytes[byte + FLAGS]!,
    expiresMs,
    expiresInMs: expiresMs - nowMs,
    txPackets: doubles[double + TX_PACKETS]!,
    rxPackets: doubles[double + RX_PACKETS]!,
    txBytes: doubles[double + TX_BYTES]!,
    rxBytes: doubles[double + RX_BYTES]!,
    txFlagsSeen: bytes[byte + TX_FLAGS_SEEN]!,
    rxFlagsSeen: bytes[byte + RX_FLAGS_SEEN]!,
    txSeenSeconds: words[word + TX_SEEN]! >>> 0,
    rxSeenSeconds: words[word + RX_SEEN]! >>> 0,
  };
}

/** Whether the record that lies at `at` is wanted. */
type RecordTest = (memory: RecordMemory, at: number) => boolean;

/** A test on the raw record, so that what is filtered out costs no strings. Names are compared once per id. */
export function compileFilter(filter: FlowFilter, names: FlowNames): RecordTest {
  const tests: RecordTest[] = [];
  if (filter.state !== undefined) {
    const state = stateNumber(filter.state);
    tests.push(({ bytes }, at) => bytes[at * RECORD_BYTES + STATE] === state);
  }
  if (filter.client !== undefined) {
    const wanted = parseClient(filter.client);
    if (wanted === undefined) return () => false;
    const { address, mask, port } = wanted;
    tests.push(({ words }, at) => {
      const word = at * RECORD_WORDS;
      return (
        ((words[word + CLIENT]! ^ address) & mask) === 0 && (port < 0 || words[word + ORIGINAL_PORTS]! >>> 16 === port)
      );
    });
  }
  if (filter.service !== undefined) {
    const isWanted = rememberById((id) => names.serviceName(id) === filter.service);
    tests.push(({ words }, at) => isWanted(words[at * RECORD_WORDS + SERVICE]!));
  }
  if (filter.backend !== undefined) tests.push(compileBackend(filter.backend, names));
  return (memory, at) => tests.every((test) => test(memory, at));
}

function compileBackend(wanted: string, names: FlowNames): RecordTest {
  const slash = wanted.lastIndexOf('/');
  const isService = rememberById((id) => slash < 0 || names.serviceName(id) === wanted.slice(0, slash));
  const name = wanted.slice(slash + 1);
  const isName = rememberById((id) => names.backendName(id) === name);
  const endpoint = ENDPOINT.exec(name);
  const address = endpoint ? parseIpv4(endpoint[1]!) | 0 : 0;
  const port = endpoint?.[2] === undefined ? -1 : Number(endpoint[2]);
  return ({ words }, at) => {
    const word = at * RECORD_WORDS;
    if (!isService(words[word + SERVICE]!)) return false;
    if (isName(words[word + BACKEND_ID]!)) return true;
    return (
      endpoint !== null && words[word + BACKEND] === address && (port < 0 || words[word + REPLY_PORTS]! >>> 16 === port)
    );
  };
}

function rememberById(test: (id: number) => boolean): (id: number) => boolean {
  const known = new Map<number, boolean>();
  return (id) => {
    const before = known.get(id);
    if (before !== undefined) return before;
    const result = test(id);
    known.set(id, result);
    return result;
  };
}

const ENDPOINT = /^(\d+\.\d+\.\d+\.\d+)(?::(\d+))?$/;
const CLIENT_TEXT = /^(\d+\.\d+\.\d+\.\d+)(?::(\d+)|\/(\d+))?$/;

/** An address, address:port or prefix, as a filter has it. */
export function parseClient(text: string): { address: number; mask: number; port: number } | undefined {
  const match = CLIENT_TEXT.exec(text);
  if (match === null) return undefined;
  const [, host, port, prefix] = match;
  const address = parseIpv4(host!);
  const bits = prefix === undefined ? 32 : Number(prefix);
  if (formatIpv4(address) !== host || bits > 32 || Number(port ?? 0) > 65535) return undefined;
  return { address, mask: bits === 0 ? 0 : -1 << (32 - bits), port: port === undefined ? -1 : Number(port) };
}

function stateNumber(name: string): number {
  const upper = name.toUpperCase();
  return upper === '' ? -1 : STATE_NAMES.indexOf(upper);
}
