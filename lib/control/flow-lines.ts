import { clip } from '../config/text-forms.js';
import type { RecordRows } from '../conntrack/adopt.js';
import * as R from '../conntrack/record.js';
import { formatEndpoint, parseIpv4 } from '../wire/address.js';
import { PROTO_TCP, PROTO_UDP } from '../wire/ipv4.js';
import { type Endpoint, flagNames, protocolName } from './flows.js';

/**
 * A record as a line of JSON and back: what `weir ct export` writes and `weir ct import` reads on another host. The names are
 * those of `weir ct list -o json`; what a record needs to go on elsewhere comes on top.
 *
 *     {"weir":"conntrack","version":1,"release":"0.1.0"}
 *     {"proto":"tcp","type":"OUT","client":"10.1.0.2:40000","vip":"10.96.0.10:80","backend":"10.2.0.11:8080",
 *      "snat":"10.96.255.1:40000","state":"ESTABLISHED","flags":["SeenNonSyn"],"expiresIn":7999.5,"age":12,
 *      "idle":{"original":0,"reply":1},"flagsSeen":{"original":26,"reply":18},"packets":{"original":3,"reply":2},
 *      "bytes":{"original":164,"reply":112},"tcp":{"windows":true,"original":{"end":1001,"acked":1001,"window":502,"scale":7},
 *      "reply":{"end":5001,"acked":5001,"window":509,"scale":7}}}                                         (one line)
 *     {"end":true}
 *
 * - Service and backend are `vip` and `backend`, with the protocol: their identities everywhere. Ids mean nothing elsewhere.
 * - Times are seconds from the moment the line was written, since clocks differ: `expiresIn` to the millisecond, `age` and `idle`
 *   (null: never) whole, as the record keeps them. A point before the other machine's boot becomes its boot.
 * - `tcp` is there when the client's SYN was seen; its `windows`, when the handshake was (MARK_WINDOWS). `scale` null: none. Of a
 *   one-way flow it is always there, and only the two `end` mean something.
 * - Not carried: COMMIT, links and class, which are the table's; the SYNs on an established flow, which matter for seconds at most.
 *
 * The law: a record that is written and read at one moment is the same again, if its expiry is whole milliseconds away.
 */

/** Of the form of the lines; a reader refuses any other. */
const FORMAT_VERSION = 1;

/** Longer than any that is written: the longest flow has some 700 bytes. */
export const MAX_LINE_BYTES = 4096;

const MAX_EXPIRES_SECONDS = 1e9;
const MAX_SECONDS = 0xffffffff;

export const END_LINE = '{"end":true}';

/** A record in reach of the formatter. */
export interface RecordView {
  readonly words: Int32Array;
  readonly bytes: Uint8Array;
  readonly halves: Uint16Array;
  readonly doubles: Float64Array;
}

export function formatHeader(release: string): string {
  return JSON.stringify({ weir: 'conntrack', version: FORMAT_VERSION, release });
}

/** What is wrong with the first line of a file, or ''. */
export function headerFault(text: string): string {
  let header: unknown;
  try {
    header = JSON.parse(text);
  } catch {
    // It is no header: said below.
  }
  if (!isObject(header) || header.weir !== 'conntrack') return 'it does not begin with the header of an export';
  if (header.version === FORMAT_VERSION) return '';
  return `it has version ${show(header.version)} of the format, and this weir reads version ${FORMAT_VERSION}`;
}

/** Whether a line says that nothing is missing before it. */
export function isEndLine(text: string): boolean {
  return text === END_LINE;
}

/** The line of record `at`, without its end. */
export function formatFlowLine({ words, bytes, halves, doubles }: RecordView, at: number, nowMs: number): string {
  const word = at * R.RECORD_WORDS;
  const byte = at * R.RECORD_BYTES;
  const double = at * R.RECORD_DOUBLES;
  const originalPorts = words[word + R.ORIGINAL_PORTS]!;
  const replyPorts = words[word + R.REPLY_PORTS]!;
  const client = formatEndpoint(words[word + R.CLIENT]!, originalPorts >>> 16);
  const source = formatEndpoint(words[word + R.RETURN]!, replyPorts & 0xffff);
  const marks = bytes[byte + R.MARKS]!;
  const scales = bytes[byte + R.SCALES]!;
  const isOneWayTcp = bytes[byte + R.PROTOCOL] === PROTO_TCP && bytes[byte + R.TYPE] === R.TYPE_SVC;
  const nowSeconds = Math.floor(nowMs / 1000);
  const idle = (seen: number): number | null => (seen === 0 ? null : Math.max(0, nowSeconds - (seen >>> 0)));
  const side = (offset: 0 | 1, scale: number) => ({
    end: words[word + R.TX_END + 2 * offset]! >>> 0,
    acked: words[word + R.TX_ACKED + 2 * offset]! >>> 0,
    window: halves[at * (R.RECORD_BYTES / 2) + R.TX_WINDOW + offset]!,
    scale: scale === R.SCALE_NONE ? null : scale,
  });
  return JSON.stringify({
    proto: protocolName(bytes[byte + R.PROTOCOL]!),
    type: R.TYPE_NAMES[bytes[byte + R.TYPE]!],
    client,
    vip: formatEndpoint(words[word + R.VIP]!, originalPorts & 0xffff),
    backend: formatEndpoint(words[word + R.BACKEND]!, replyPorts >>> 16),
    ...(source === client ? {} : { snat: source }),
    state: R.STATE_NAMES[bytes[byte + R.STATE]!],
    flags: flagNames(bytes[byte + R.FLAGS]!),
    expiresIn: Math.max(1, Math.round(doubles[double + R.EXPIRES]! - nowMs)) / 1000,
    age: Math.max(0, nowSeconds - (words[word + R.CREATED]! >>> 0)),
    idle: { original: idle(words[word + R.TX_SEEN]!), reply: idle(words[word + R.RX_SEEN]!) },
    flagsSeen: { original: bytes[byte + R.TX_FLAGS_SEEN]!, reply: bytes[byte + R.RX_FLAGS_SEEN]! },
    packets: { original: doubles[double + R.TX_PACKETS]!, reply: doubles[double + R.RX_PACKETS]! },
    bytes: { original: doubles[double + R.TX_BYTES]!, reply: doubles[double + R.RX_BYTES]! },
    ...((marks & R.MARK_SYN_SEEN) === 0 && !isOneWayTcp
      ? {}
      : {
          tcp: {
            windows: (marks & R.MARK_WINDOWS) !== 0,
            original: side(0, scales >>> 4),
            reply: side(1, scales & 0xf),
          },
        }),
  });
}

/**
 * Reads a line into a row. SERVICE, BACKEND_ID and the class in MARKS are left 0: they are the reader's to give.
 *
 * @returns what is wrong with the line, in words that follow "line 7: "; '' when nothing is.
 */
export function parseFlowLine(text: string, into: RecordRows, row: number, nowMs: number): string {
  try {
    readFlow(parseObject(text), into, row, nowMs);
    return '';
  } catch (error) {
    if (error instanceof Fault) return error.message;
    throw error;
  }
}

class Fault extends Error {}

type Fields = Readonly<Record<string, unknown>>;

function readFlow(flow: Fields, { words, bytes, halves, doubles }: RecordRows, row: number, nowMs: number): void {
  const word = row * R.RECORD_WORDS;
  const byte = row * R.RECORD_BYTES;
  const double = row * R.RECORD_DOUBLES;
  words.fill(0, word, word + R.RECORD_WORDS);

  const protocol = PROTOCOLS[oneOf(flow, 'proto', PROTOCOL_NAMES)]!;
  const type = R.TYPE_NAMES.indexOf(oneOf(flow, 'type', TYPES));
  const client = endpoint(flow, 'client');
  const vip = endpoint(flow, 'vip');
  const backend = endpoint(flow, 'backend');
  const source = flow.snat === undefined ? client : endpoint(flow, 'snat');
  words[word + R.CLIENT] = client.address;
  words[word + R.VIP] = vip.address;
  words[word + R.ORIGINAL_PORTS] = (client.port << 16) | vip.port;
  words[word + R.BACKEND] = backend.address;
  words[word + R.RETURN] = source.address;
  words[word + R.REPLY_PORTS] = (backend.port << 16) | source.port;
  bytes[byte + R.PROTOCOL] = protocol;
  bytes[byte + R.TYPE] = type;
  bytes[byte + R.STATE] = R.STATE_NAMES.indexOf(oneOf(flow, 'state', STATES[protocol]!));
  bytes[byte + R.FLAGS] = flagBits(flow.flags);

  const expiresIn = flow.expiresIn;
  if (typeof expiresIn !== 'number' || !(expiresIn > 0 && expiresIn <= MAX_EXPIRES_SECONDS)) {
    throw new Fault(`expiresIn must be seconds above 0, not ${show(expiresIn)}`);
  }
  doubles[double + R.EXPIRES] = nowMs + Math.max(1, Math.round(expiresIn * 1000));
  const nowSeconds = Math.floor(nowMs / 1000);
  words[word + R.CREATED] = Math.max(0, nowSeconds - integer(flow, 'age', MAX_SECONDS));
  const idle = both(flow, 'idle');
  const seenAt = (key: Side): number =>
    idle[key] === null ? 0 : Math.max(0, nowSeconds - integer(idle, key, MAX_SECONDS, 'idle.'));
  words[word + R.TX_SEEN] = seenAt('original');
  words[word + R.RX_SEEN] = seenAt('reply');
  const flagsSeen = both(flow, 'flagsSeen');
  const packets = both(flow, 'packets');
  const octets = both(flow, 'bytes');
  SIDES.forEach((key, offset) => {
    bytes[byte + R.TX_FLAGS_SEEN + offset] = integer(flagsSeen, key, 0xff, 'flagsSeen.');
    doubles[double + R.TX_PACKETS + offset] = integer(packets, key, Number.MAX_SAFE_INTEGER, 'packets.');
    doubles[double + R.TX_BYTES + offset] = integer(octets, key, Number.MAX_SAFE_INTEGER, 'bytes.');
  });

  if (flow.tcp === undefined) return;
  if (protocol !== PROTO_TCP) throw new Fault('tcp does not belong to a flow of another protocol');
  const sequences = both(flow, 'tcp');
  if (typeof sequences.windows !== 'boolean') throw new Fault('tcp.windows must be true or false');
  if (type === R.TYPE_OUT) bytes[byte + R.MARKS] = R.MARK_SYN_SEEN | (sequences.windows ? R.MARK_WINDOWS : 0);
  else if (sequences.windows) throw new Fault('tcp.windows must be false for a one-way flow');
  SIDES.forEach((key, offset) => {
    const path = `tcp.${key}.`;
    const side = object(sequences, key, 'tcp.');
    words[word + R.TX_END + 2 * offset] = integer(side, 'end', 0xffffffff, path);
    words[word + R.TX_ACKED + 2 * offset] = integer(side, 'acked', 0xffffffff, path);
    halves[row * (R.RECORD_BYTES / 2) + R.TX_WINDOW + offset] = integer(side, 'window', 0xffff, path);
    const scale = side.scale === null && !sequences.windows ? R.SCALE_NONE : integer(side, 'scale', MAX_SCALE, path);
    bytes[byte + R.SCALES]! |= scale << (offset === 0 ? 4 : 0);
  });
}

type Side = 'original' | 'reply';

const SIDES: readonly Side[] = ['original', 'reply'];

const PROTOCOLS: Readonly<Record<string, number>> = { tcp: PROTO_TCP, udp: PROTO_UDP };
const PROTOCOL_NAMES = Object.keys(PROTOCOLS);
const TYPES = R.TYPE_NAMES.slice(R.TYPE_SVC);

const STATES: Readonly<Record<number, readonly string[]>> = {
  [PROTO_TCP]: R.STATE_NAMES.slice(R.SYN_SENT, R.CLOSED + 1),
  [PROTO_UDP]: R.STATE_NAMES.slice(R.UNREPLIED, R.REPLIED + 1),
};

/** RFC 7323 2.3. */
const MAX_SCALE = 14;

function parseObject(text: string): Fields {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Fault(`it is no JSON: ${show(text)}`);
  }
  if (!isObject(value)) throw new Fault(`it is no flow: ${show(text)}`);
  return value;
}

function isObject(value: unknown): value is Fields {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

function object(from: Fields, key: string, path = ''): Fields {
  const value = from[key];
  if (!isObject(value)) throw new Fault(`${path}${key} must be an object, not ${show(value)}`);
  return value;
}

/** An object with a value for each direction. */
function both(from: Fields, key: string): Fields {
  const value = object(from, key);
  for (const side of SIDES) if (!Object.hasOwn(value, side)) throw new Fault(`${key}.${side} is missing`);
  return value;
}

function oneOf(from: Fields, key: string, names: readonly string[]): string {
  const value = from[key];
  if (typeof value === 'string' && names.includes(value)) return value;
  throw new Fault(`${key} must be ${names.join(' or ')}, not ${show(value)}`);
}

function integer(from: Fields, key: string, max: number, path = ''): number {
  const value = from[key];
  if (typeof value === 'number' && Number.isInteger(value) && value >= 0 && value <= max) return value;
  throw new Fault(`${path}${key} must be an integer from 0 to ${max}, not ${show(value)}`);
}

const ENDPOINT = /^(\d{1,3}(?:\.\d{1,3}){3}):(\d{1,5})$/;

function endpoint(from: Fields, key: string): Endpoint {
  const value = from[key];
  const parts = typeof value === 'string' ? ENDPOINT.exec(value) : null;
  if (parts !== null) {
    const address = parseIpv4(parts[1]!);
    const port = Number(parts[2]);
    if (port <= 0xffff && formatEndpoint(address, port) === value) return { address, port };
  }
  throw new Fault(`${key} must be address:port, not ${show(value)}`);
}

function flagBits(names: unknown): number {
  if (!Array.isArray(names)) throw new Fault(`flags must be a list, not ${show(names)}`);
  let bits = 0;
  for (const name of names) {
    const known = R.FLAG_NAMES.find(([, flag]) => flag === name);
    if (known === undefined) throw new Fault(`no flag is called ${show(name)}`);
    bits |= known[0];
  }
  return bits;
}

/** Any value, short enough for a message and on one line. */
function show(value: unknown): string {
  return clip(typeof value === 'string' ? value : (JSON.stringify(value) ?? 'missing'));
}
