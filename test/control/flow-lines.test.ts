import fc from 'fast-check';
import t from 'tap';
import { RecordRows } from '../../lib/conntrack/adopt.js';
import * as R from '../../lib/conntrack/record.js';
import {
  END_LINE,
  formatFlowLine,
  formatHeader,
  headerFault,
  isEndLine,
  MAX_LINE_BYTES,
  parseFlowLine,
} from '../../lib/control/flow-lines.js';

const RUNS = Number(process.env.WEIR_MODEL_RUNS ?? 2000);

const rows = (count = 1): RecordRows => new RecordRows(new Int32Array(count * R.RECORD_WORDS));

const word = fc.integer({ min: -0x80000000, max: 0x7fffffff });
const byte = fc.nat(0xff);
const half = fc.nat(0xffff);
const count = fc.oneof(fc.nat(100), fc.nat(Number.MAX_SAFE_INTEGER));
const flags = fc.subarray([...R.FLAG_NAMES]).map((set) => set.reduce((bits, [bit]) => bits | bit, 0));

/** What a tracker may have left in a record, but for links, ids and class; times as seconds before `nowMs`. */
const validRecord = fc.record({
  isTcp: fc.boolean(),
  type: fc.constantFrom(R.TYPE_SVC, R.TYPE_OUT),
  client: word,
  vip: word,
  backend: word,
  snat: fc.option(word),
  ports: fc.tuple(half, half, half, half),
  tcpState: fc.integer({ min: R.SYN_SENT, max: R.CLOSED }),
  anyState: fc.constantFrom(R.UNREPLIED, R.REPLIED),
  flags,
  expiresInMs: fc.integer({ min: 1, max: 8_000_000 }),
  ages: fc.tuple(fc.nat(50_000), fc.option(fc.nat(50_000)), fc.option(fc.nat(50_000))),
  flagsSeen: fc.tuple(byte, byte),
  counts: fc.tuple(count, count, count, count),
  marks: fc.constantFrom(0, R.MARK_SYN_SEEN, R.MARK_SYN_SEEN | R.MARK_WINDOWS),
  windows: fc.tuple(half, half),
  scales: fc.tuple(fc.nat(15), fc.nat(14)),
  sequences: fc.tuple(word, word, word, word),
});

type Valid = typeof validRecord extends fc.Arbitrary<infer T> ? T : never;

function write(f: Valid, nowMs: number): RecordRows {
  const into = rows();
  const { words, bytes, halves, doubles } = into;
  const seconds = (ago: number | null): number => (ago === null ? 0 : Math.floor(nowMs / 1000) - ago);
  words[R.CLIENT] = f.client;
  words[R.VIP] = f.vip;
  words[R.BACKEND] = f.backend;
  words[R.RETURN] = f.snat ?? f.client;
  words[R.ORIGINAL_PORTS] = (f.ports[0] << 16) | f.ports[1];
  words[R.REPLY_PORTS] = (f.ports[2] << 16) | (f.snat === null ? f.ports[0] : f.ports[3]);
  bytes[R.PROTOCOL] = f.isTcp ? 6 : 17;
  bytes[R.TYPE] = f.type;
  bytes[R.STATE] = f.isTcp ? f.tcpState : f.anyState;
  bytes[R.FLAGS] = f.flags;
  doubles[R.EXPIRES] = nowMs + f.expiresInMs;
  [words[R.CREATED], words[R.TX_SEEN], words[R.RX_SEEN]] = f.ages.map(seconds) as [number, number, number];
  [bytes[R.TX_FLAGS_SEEN], bytes[R.RX_FLAGS_SEEN]] = f.flagsSeen;
  doubles.set(f.counts, R.TX_PACKETS);
  if (f.isTcp && f.type === R.TYPE_SVC) [words[R.TX_END], words[R.RX_END]] = [f.sequences[0], f.sequences[2]];
  if (!f.isTcp || f.type === R.TYPE_SVC || f.marks === 0) return into;
  bytes[R.MARKS] = f.marks;
  halves.set(f.windows, R.TX_WINDOW);
  const tx = (f.marks & R.MARK_WINDOWS) === 0 ? f.scales[0] : Math.min(f.scales[0], 14);
  bytes[R.SCALES] = (tx << 4) | f.scales[1];
  words.set(f.sequences, R.TX_END);
  return into;
}

t.test('record -> line -> record is the same record', async () => {
  fc.assert(
    fc.property(validRecord, fc.integer({ min: 60_000_000, max: 4e12 }), (fields, nowMs) => {
      const before = write(fields, nowMs);
      const line = formatFlowLine(before, 0, nowMs);
      if (Buffer.byteLength(line) > 800 || line.includes('\n')) return false;
      const after = rows(2);
      after.words.fill(-1); // what was there before is no part of it
      if (parseFlowLine(line, after, 1, nowMs) !== '') return false;
      return Buffer.from(before.bytes).equals(after.bytes.subarray(R.RECORD_BYTES));
    }),
    { numRuns: RUNS },
  );
});

t.test('on a machine with another clock, distances in time are the same, or since its boot', async () => {
  const now = fc.integer({ min: 60_000_000, max: 4e12 });
  fc.assert(
    fc.property(validRecord, now, fc.integer({ min: 0, max: 1e8 }), (fields, thereMs, hereMs) => {
      const after = rows();
      if (parseFlowLine(formatFlowLine(write(fields, thereMs), 0, thereMs), after, 0, hereMs) !== '') return false;
      const seconds = Math.floor(hereMs / 1000);
      const expected = fields.ages.map((ago) => (ago === null ? 0 : Math.max(0, seconds - ago)));
      const got = [R.CREATED, R.TX_SEEN, R.RX_SEEN].map((at) => after.words[at]);
      return after.doubles[R.EXPIRES] === hereMs + fields.expiresInMs && got.join() === expected.join();
    }),
    { numRuns: RUNS },
  );
});

const GOOD = {
  proto: 'tcp',
  type: 'OUT',
  client: '10.1.0.2:40000',
  vip: '10.96.0.10:80',
  backend: '10.2.0.11:8080',
  snat: '10.96.255.1:40001',
  state: 'ESTABLISHED',
  flags: ['SeenNonSyn'],
  expiresIn: 7999.5,
  age: 12,
  idle: { original: 0, reply: null },
  flagsSeen: { original: 26, reply: 18 },
  packets: { original: 3, reply: 2 },
  bytes: { original: 164, reply: 112 },
  tcp: {
    windows: true,
    original: { end: 1001, acked: 4294967295, window: 502, scale: 7 },
    reply: { end: 5001, acked: 5001, window: 509, scale: 0 },
  },
};

t.test('the form, to the letter', async (t) => {
  const into = rows();
  t.equal(parseFlowLine(JSON.stringify(GOOD), into, 0, 50_000), '');
  t.equal(formatFlowLine(into, 0, 50_000), JSON.stringify(GOOD));
  t.equal(formatHeader('1.2.3'), '{"weir":"conntrack","version":1,"release":"1.2.3"}');
  t.equal(headerFault(formatHeader('1.2.3')), '');
  t.ok(isEndLine(END_LINE));
  const { tcp: _, snat: __, ...plain } = GOOD;
  t.equal(parseFlowLine(JSON.stringify({ ...plain, proto: 'udp', state: 'REPLIED' }), into, 0, 50_000), '');
  t.strictSame([into.words[R.RETURN], into.words[R.TX_END], into.bytes[R.MARKS]], [into.words[R.CLIENT], 0, 0]);
});

t.test('a fault is told', async (t) => {
  const without = (key: keyof typeof GOOD) => ({ ...GOOD, [key]: undefined });
  const { original } = GOOD.tcp;
  for (const [line, fault] of [
    ['', /it is no JSON/],
    ['{"proto"', /it is no JSON: {"proto"/],
    [null, /it is no flow: null/],
    [[GOOD], /it is no flow/],
    [7, /it is no flow: 7/],
    [without('proto'), /^proto must be tcp or udp, not missing$/],
    [{ ...GOOD, proto: 'icmp' }, /proto must be tcp or udp, not icmp/],
    [{ ...GOOD, type: '' }, /type must be SVC or OUT/],
    [{ ...GOOD, client: '10.1.0.2' }, /client must be address:port, not 10.1.0.2/],
    [{ ...GOOD, client: '10.1.0.02:1' }, /client must be/],
    [{ ...GOOD, vip: '10.96.0.256:80' }, /vip must be/],
    [{ ...GOOD, backend: '10.2.0.11:65536' }, /backend must be/],
    [{ ...GOOD, backend: '10.2.0.11:0080' }, /backend must be/],
    [{ ...GOOD, snat: null }, /snat must be address:port, not null/],
    [{ ...GOOD, state: 'REPLIED' }, /state must be SYN_SENT or .* not REPLIED/],
    [{ ...GOOD, flags: ['Nope'] }, /no flag is called Nope/],
    [{ ...GOOD, flags: 'SeenNonSyn' }, /flags must be a list/],
    [{ ...GOOD, expiresIn: 0 }, /expiresIn must be seconds above 0, not 0/],
    [{ ...GOOD, expiresIn: '9' }, /expiresIn/],
    [{ ...GOOD, expiresIn: 1e12 }, /expiresIn/],
    [{ ...GOOD, age: -1 }, /age must be an integer from 0/],
    [{ ...GOOD, age: 1.5 }, /age/],
    [{ ...GOOD, idle: { original: 0 } }, /idle.reply is missing/],
    [{ ...GOOD, idle: { original: 'x', reply: null } }, /idle.original must be an integer/],
    [{ ...GOOD, flagsSeen: { original: 256, reply: 0 } }, /flagsSeen.original must be an integer from 0 to 255/],
    [{ ...GOOD, packets: [1, 2] }, /packets must be an object/],
    [{ ...GOOD, bytes: { original: 2 ** 53, reply: 0 } }, /bytes.original/],
    [{ ...GOOD, proto: 'udp', state: 'REPLIED' }, /tcp does not belong/],
    [{ ...GOOD, tcp: { ...GOOD.tcp, windows: 1 } }, /tcp.windows must be true or false/],
    [{ ...GOOD, type: 'SVC' }, /tcp.windows must be false for a one-way flow/],
    [{ ...GOOD, tcp: { ...GOOD.tcp, reply: 1 } }, /tcp.reply must be an object/],
    [{ ...GOOD, tcp: { ...GOOD.tcp, original: { ...original, end: 2 ** 32 } } }, /tcp.original.end/],
    [{ ...GOOD, tcp: { ...GOOD.tcp, original: { ...original, window: 65536 } } }, /tcp.original.window/],
    [{ ...GOOD, tcp: { ...GOOD.tcp, original: { ...original, scale: 15 } } }, /tcp.original.scale/],
    [{ ...GOOD, tcp: { ...GOOD.tcp, original: { ...original, scale: null } } }, /tcp.original.scale/],
  ] as const) {
    const text = typeof line === 'string' ? line : JSON.stringify(line);
    t.match(parseFlowLine(text, rows(), 0, 50_000), fault, text.slice(0, 60));
  }
  for (const [line, fault] of [
    ['', /does not begin with the header/],
    ['null', /does not begin/],
    ['{"weir":"state","version":1}', /does not begin/],
    ['{"weir":"conntrack","version":2}', /version 2 of the format, and this weir reads version 1/],
    ['{"weir":"conntrack"}', /version missing/],
  ] as const) {
    t.match(headerFault(line), fault, line);
  }
});

t.test('nothing crashes it', async (t) => {
  const into = rows();
  const isText = (fault: string): boolean => fault.length > 0 && fault.length < 200 && !fault.includes('\n');
  fc.assert(
    fc.property(fc.json(), (text) => isText(parseFlowLine(text, into, 0, 50_000)) && isText(headerFault(text))),
    { numRuns: RUNS },
  );
  fc.assert(
    fc.property(fc.string({ unit: 'binary' }), (text) => isText(parseFlowLine(text, into, 0, 50_000))),
    { numRuns: RUNS },
  );
  // Each value of a good line in turn made anything: taken or refused, and what is taken can be written and read again.
  const paths = Object.keys(GOOD).flatMap((key) => {
    const value = GOOD[key as keyof typeof GOOD];
    return typeof value === 'object' && !Array.isArray(value) ? Object.keys(value).map((k) => [key, k]) : [[key]];
  });
  fc.assert(
    fc.property(fc.constantFrom(...paths), fc.jsonValue(), (path, value) => {
      const flow = structuredClone(GOOD) as Record<string, unknown>;
      const holder = path.length === 1 ? flow : (flow[path[0]!] as Record<string, unknown>);
      holder[path.at(-1)!] = value;
      const fault = parseFlowLine(JSON.stringify(flow), into, 0, 50_000);
      return fault === '' ? parseFlowLine(formatFlowLine(into, 0, 50_000), into, 0, 50_000) === '' : isText(fault);
    }),
    { numRuns: RUNS },
  );
  const deep = '['.repeat(MAX_LINE_BYTES / 2) + ']'.repeat(MAX_LINE_BYTES / 2);
  t.match(parseFlowLine(deep, into, 0, 50_000), /it is no flow/);
  t.match(parseFlowLine(`{"proto":${deep}}`, into, 0, 50_000), /proto must be/);
  t.match(parseFlowLine('{"__proto__":{"proto":"tcp"}}', into, 0, 50_000), /proto must be/);
});
