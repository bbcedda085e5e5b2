import { readFileSync } from 'node:fs';
import fc from 'fast-check';
import t from 'tap';
import { seededRandom } from '../../lib/base/random.js';
import { adoptSome, RecordRows } from '../../lib/conntrack/adopt.js';
import {
  CLASS_CLOSING,
  CLASS_HALF_OPEN,
  CREATED,
  EXPIRES,
  RECORD_BYTES,
  RECORD_DOUBLES,
  RECORD_WORDS,
  STATE,
  STATE_NAMES,
} from '../../lib/conntrack/record.js';
import { exportFlows } from '../../lib/control/flow-export.js';
import { ADOPT_RECORDS, FlowImport } from '../../lib/control/flow-import.js';
import { END_LINE, formatHeader, MAX_LINE_BYTES } from '../../lib/control/flow-lines.js';
import type { FlowFilter } from '../../lib/control/flows.js';
import { type ImportView, SKIP_REASONS } from '../../lib/control/view.js';
import { describe } from '../fixtures/packet-text.js';
import { tcp, udp } from '../fixtures/packets.js';
import { type Outcome, type PipelineOptions, TestPipeline } from '../support/pipeline.js';
import { half, quad, reply } from '../support/traffic.js';

const B1 = '{ name: b1, address: 10.2.0.11, port: 8080 }';
const B2 = '{ name: b2, address: 10.2.0.12, port: 8080 }';
const B3 = '{ name: b3, address: 10.2.0.13, port: 8080 }';
const HEAD = formatHeader('1.2.3');

function web(fields: string, backends: string[]): string {
  return `{ name: web, address: 10.96.0.10, port: 80, ${fields} backends: [${backends.join(', ')}] }`;
}

function dns(backends: string[]): string {
  return `{ name: dns, address: 10.96.0.10, port: 53, protocol: udp, backends: [${backends.join(', ')}] }`;
}

function config(...services: string[]): string {
  return `maglev: { tableSize: 251 }\nsnat: { addresses: [10.96.255.1] }\nservices:\n${services.map((each) => `  - ${each}\n`).join('')}`;
}

/** The old host, and the new one: another hash secret, another clock, other ids for the same things. */
function hosts(fields: string, options: PipelineOptions = {}): { from: TestPipeline; to: TestPipeline } {
  const from = new TestPipeline(config(web(fields, [B1, B2, B3]), dns([B1, B2])), { seed: 7 });
  from.nowMs = 5_000_000_000;
  const to = new TestPipeline(config(dns([B2, B1]), web(fields, [B3, B2, B1])), { seed: 99, ...options });
  to.nowMs = 77_000;
  return { from, to };
}

function exported({ readers, identities, nowMs }: TestPipeline, filter: FlowFilter = {}): string {
  const clock = { nowMs: () => nowMs };
  return [...exportFlows([readers.tcp, readers.any], identities, clock, filter, '1.2.3')].join('');
}

interface Hooks {
  /** How far the clock goes each time the data path looks at it, ms; it has 1 ms a message. */
  readonly tickMs?: number;
  /** Called where the turn begins. */
  readonly onTurn?: () => void;
  readonly onBatch?: (records: number) => void;
}

function makeImport(to: TestPipeline, { tickMs = 0, onTurn, onBatch }: Hooks = {}): FlowImport {
  return new FlowImport({
    desired: {
      identities: to.identities,
      get snapshot() {
        return to.compiled!.snapshot;
      },
    },
    clock: { nowMs: () => to.nowMs },
    inTurn: async (step) => {
      onTurn?.();
      return await step();
    },
    adopt: async (table, records) => {
      onBatch?.(records.length / RECORD_WORDS);
      let looks = 0;
      const clock = { nowMs: () => to.nowMs + tickMs * looks++ };
      return adoptSome(to[table], new RecordRows(records), clock, 1);
    },
  });
}

async function* stream(...chunks: (string | Uint8Array)[]): AsyncGenerator<Uint8Array> {
  for (const chunk of chunks) yield typeof chunk === 'string' ? Buffer.from(chunk) : chunk;
}

async function imported(to: TestPipeline, text: string, hooks?: Hooks): Promise<ImportView> {
  const flows = makeImport(to, hooks);
  await flows.run(stream(text));
  return flows.view;
}

/** The reasons for which lines were left out. */
function reasons({ skipped }: ImportView): object {
  return Object.fromEntries(Object.entries(skipped).filter(([, count]) => count > 0));
}

const client = { src: '10.1.0.2', sport: 40000, dst: '10.96.0.10', dport: 80 };

/** A connection with scaled windows and 100 bytes each way: the next are 1101 of the client, 5101 of the backend. */
function converse(pipeline: TestPipeline, from = client): Outcome {
  const options = { mss: 1460, scale: 7 };
  const first = pipeline.send(tcp({ ...from, flags: 'S', seq: 1000, win: 64240, options }));
  pipeline.send(reply(first.out[0]!, { flags: 'SA', seq: 5000, ack: 1001, win: 65160, options }));
  pipeline.send(tcp({ ...from, flags: 'A', seq: 1001, ack: 5001, win: 502 }));
  pipeline.send(tcp({ ...from, flags: 'PA', seq: 1001, ack: 5001, win: 502, payload: 100 }));
  pipeline.send(reply(first.out[0]!, { flags: 'PA', seq: 5001, ack: 1101, win: 509, payload: 100 }));
  return first;
}

/** Addresses and ports, to compare where two packets go. */
function tuple({ out }: Outcome): string {
  const { bytes } = out[0]!;
  return `${quad(bytes, 12)}:${half(bytes, 20)} > ${quad(bytes, 16)}:${half(bytes, 22)}`;
}

const MODES = ['dnat', 'snat'].flatMap((mode) =>
  ['random', 'maglev'].map((algorithm) => `mode: ${mode}, algorithm: ${algorithm},`),
);

t.test('a connection goes on in both directions, and its end is known', async (t) => {
  for (const fields of MODES) {
    for (const end of ['client', 'backend'] as const) {
      const { from, to } = hosts(fields);
      const first = converse(from);
      from.nowMs += 12_300;
      const view = await imported(to, exported(from));
      t.match(view, { imported: 1, updated: 0, refused: [], complete: true }, fields);
      t.strictSame(reasons(view), {});

      const data = to.send(tcp({ ...client, flags: 'PA', seq: 1101, ack: 5101, win: 502, payload: 50 }));
      t.match(data, { verdict: 'forward', backend: first.backend, state: 'ESTABLISHED' });
      t.equal(tuple(data), tuple(first), 'to the same backend, from the same port');
      const answer = to.send(reply(first.out[0]!, { flags: 'PA', seq: 5101, ack: 1151, win: 509, payload: 60_000 }));
      t.match(answer, { verdict: 'forward', direction: 'reply', state: 'ESTABLISHED' });
      t.equal(tuple(answer), '10.96.0.10:80 > 10.1.0.2:40000');
      t.match(from.send(tcp({ ...client, flags: 'A', seq: 1101, ack: 5101 })), { backend: first.backend });

      const rst = (seq: number) =>
        end === 'client'
          ? to.send(tcp({ ...client, flags: 'R', seq: 1151 + seq }))
          : to.send(reply(first.out[0]!, { flags: 'R', seq: 65_101 + seq }));
      for (const seq of [-70_000, 20_000_000]) {
        t.match(
          rst(seq),
          { verdict: 'forward', state: 'ESTABLISHED' },
          `an RST at ${seq} of the ${end} is implausible`,
        );
      }
      // Inside the window only with the scale that was seen before the move.
      t.match(
        rst(end === 'client' ? 50_000 : 4000),
        { verdict: 'forward', state: 'CLOSED' },
        'one in the window closes it',
      );
    }
  }
});

t.test('a one-way flow takes along what it must be told at its end', async (t) => {
  const tunnel = 'tunnel: { address: 192.0.2.1 }\n';
  const [from, to] = [7, 99].map((seed) => {
    return new TestPipeline(tunnel + config(web('mode: dsr, onRemove: reset,', [B1])), { seed });
  }) as [TestPipeline, TestPipeline];
  from.send(tcp({ ...client, flags: 'S', seq: 0xc0000000 }));
  from.send(tcp({ ...client, flags: 'A', seq: 0xc0000001, ack: 0xd0000001 }));
  t.match(await imported(to, exported(from)), { imported: 1, refused: { length: 0 } });
  t.equal(exported(to), exported(from));
  to.send(tcp({ ...client, flags: 'PA', seq: 0xc0000001, ack: 0xd0000002, payload: 100 }));
  to.configure(tunnel + config(web('mode: dsr, onRemove: reset,', [B2])));
  const [rst] = to.sendDue();
  t.match(describe(rst!.bytes), `RA seq=${0xd0000002} ack=${0xc0000065}`);
});

t.test('its snat port is nobody else’s afterwards', async (t) => {
  const { from, to } = hosts('mode: snat, algorithm: random,');
  const one = converse(from);
  const port = half(one.out[0]!.bytes, 20);
  t.equal(port, 40_000);
  await imported(to, exported(from));
  let met = 0;
  for (let host = 3; host < 60; host++) {
    const other = to.send(tcp({ ...client, src: `10.1.0.${host}`, flags: 'S', seq: 1 }));
    if (quad(other.out[0]!.bytes, 16) !== quad(one.out[0]!.bytes, 16)) continue;
    met++;
    t.not(half(other.out[0]!.bytes, 20), port, 'another client of this port gets another one');
  }
  t.ok(met > 5, `${met} went to the same backend`);
});

t.test('handshakes, half-closed connections and datagrams go on as well', async (t) => {
  const { from, to } = hosts('algorithm: random,');
  const syn = (sport: number) =>
    from.send(tcp({ ...client, sport, flags: 'S', seq: 1000, win: 64240, options: { scale: 7 } }));
  const sent = syn(1);
  const received = syn(2);
  from.send(reply(received.out[0]!, { flags: 'SA', seq: 5000, ack: 1001, options: { scale: 7 } }));
  const closing = converse(from, { ...client, sport: 3 });
  from.send(tcp({ ...client, sport: 3, flags: 'FA', seq: 1101, ack: 5101 }));
  const closed = converse(from, { ...client, sport: 4 });
  from.send(tcp({ ...client, sport: 4, flags: 'R', seq: 1101 }));
  const asked = { src: '10.1.0.2', sport: 5000, dst: '10.96.0.10', dport: 53 };
  const datagram = from.send(udp({ ...asked, payload: 20 }));
  const answer = { src: quad(datagram.out[0]!.bytes, 16), sport: 8080, dst: asked.src, dport: asked.sport };
  from.send(udp({ ...answer, payload: 20 }));
  const silent = from.send(udp({ ...asked, sport: 5001 }));

  t.match(await imported(to, exported(from)), { imported: 6, refused: [] });
  t.strictSame([to.tcp.listLength(CLASS_HALF_OPEN), to.tcp.listLength(CLASS_CLOSING)], [2, 1]);
  t.equal(to.any.listLength(CLASS_HALF_OPEN), 1);

  to.send(reply(sent.out[0]!, { flags: 'SA', seq: 5000, ack: 1001, options: { scale: 7 } }));
  for (const sport of [1, 2]) {
    const ack = to.send(tcp({ ...client, sport, flags: 'A', seq: 1001, ack: 5001 }));
    t.match(ack, { state: 'ESTABLISHED', backend: sport === 1 ? sent.backend : received.backend });
  }
  t.equal(to.tcp.listLength(CLASS_HALF_OPEN), 0);
  t.match(to.send(reply(closing.out[0]!, { flags: 'FA', seq: 5101, ack: 1102 })), { state: 'CLOSING' });
  t.match(to.send(reply(closed.out[0]!, { flags: 'A', seq: 5101, ack: 1101 })), { state: 'CLOSED' });
  const again = to.send(tcp({ ...client, sport: 4, flags: 'S', seq: 9 }));
  t.match(again, { verdict: 'forward', state: 'SYN_SENT' }, 'a port whose connection was closed is used again at once');
  t.match(to.send(udp({ ...asked, payload: 20 })), { state: 'REPLIED', backend: datagram.backend });
  t.match(to.send(udp({ ...asked, sport: 5001 })), { state: 'UNREPLIED', backend: silent.backend });
});

t.test('what is left of its time, and what is told of it, moves along', async (t) => {
  const { from, to } = hosts('');
  converse(from);
  from.nowMs += 7_000_000;
  const [, line] = exported(from).split('\n');
  t.match(JSON.parse(line!), { expiresIn: 1000, age: 7000, idle: { original: 7000, reply: 7000 } });
  to.nowMs = 8_000_000_500;
  await imported(to, exported(from));
  t.equal(to.tcp.words[CREATED], 8_000_000 - 7000);
  t.equal(to.tcp.doubles[EXPIRES], to.nowMs + 1_000_000);
  t.equal(exported(to), exported(from), 'and from there it moves on the same');

  from.nowMs += 1_000_000;
  t.equal(exported(from), `${HEAD}\n${END_LINE}\n`, 'what has expired does not');

  const { from: slow, to: quick } = hosts('');
  converse(slow);
  quick.configure(`conntrack: { timeouts: { tcp: 60s, tcpFin: 3s } }\n${config(web('', [B1, B2, B3]), dns([B1, B2]))}`);
  await imported(quick, exported(slow));
  t.equal(quick.tcp.doubles[EXPIRES], quick.nowMs + 60_000, 'no longer than the timers of the new host allow');
});

t.test('filters', async (t) => {
  const { from } = hosts('');
  for (const sport of [40_000, 40_001, 40_002]) converse(from, { ...client, sport });
  from.send(udp({ ...client, dport: 53 }));
  const lines = (filter: FlowFilter) => exported(from, filter).trimEnd().split('\n').slice(1, -1);
  t.equal(lines({}).length, 4);
  t.equal(lines({ service: 'dns' }).length, 1);
  t.equal(lines({ client: '10.1.0.2:40001' }).length, 1);
  t.equal(lines({ state: 'established', service: 'web' }).length, 3);
  t.equal(lines({ backend: 'none' }).length, 0);
});

const GOOD = {
  proto: 'tcp',
  type: 'OUT',
  client: '10.1.0.2:40000',
  vip: '10.96.0.10:80',
  backend: '10.2.0.11:8080',
  state: 'ESTABLISHED',
  flags: [],
  expiresIn: 60,
  age: 1,
  idle: { original: 0, reply: 0 },
  flagsSeen: { original: 0, reply: 0 },
  packets: { original: 2, reply: 2 },
  bytes: { original: 100, reply: 100 },
};

function file(...flows: (object | string)[]): string {
  const lines = flows.map((flow) => (typeof flow === 'string' ? flow : JSON.stringify(flow)));
  return [HEAD, ...lines, END_LINE, ''].join('\n');
}

t.test('what does not fit is counted, and named by line', async (t) => {
  const { to } = hosts('');
  to.configure(
    config(
      web('', [B1, B2]),
      dns([B1]),
      `{ name: hidden, address: 10.96.0.12, port: 80, mode: snat, backends: [${B1}] }`,
    ),
  );
  const other = (fields: object) => ({ ...GOOD, client: '10.1.0.3:1', ...fields });
  const view = await imported(
    to,
    file(
      GOOD,
      'nonsense',
      other({ vip: '10.96.0.10:81' }),
      other({ proto: 'udp', state: 'REPLIED' }),
      other({ backend: '10.2.0.11:8081' }),
      other({ backend: '10.2.0.13:8080' }),
      other({ type: 'SVC' }),
      other({ snat: '10.96.255.2:4000' }),
      other({ snat: '10.1.0.3:2' }),
      other({ vip: '10.96.0.12:80' }),
      other({ client: '10.96.0.12:40000' }),
      other({ client: '10.2.0.11:40000' }),
      other({ client: '10.1.0.2:40000', backend: '10.2.0.12:8080' }),
      other({ vip: '10.96.0.12:80', snat: '10.96.255.1:9' }),
      other({ client: '10.2.0.11:40001', snat: '10.96.255.1:40001' }),
      GOOD,
    ),
  );
  t.strictSame(reasons(view), {
    exists: 1,
    malformed: 1,
    'unknown-service': 2,
    'unknown-backend': 2,
    'wrong-mode': 4,
    'hairpin-refused': 2,
    'tuple-taken': 1,
  });
  t.equal(view.imported, 3, 'snat is what a hairpin needs, and dnat may have');
  t.equal(view.refused.length, 10, 'the first of them');
  t.match(view.refused, [
    { line: 3, reason: 'malformed', message: 'it is no JSON: nonsense' },
    { line: 4, reason: 'unknown-service', message: '10.96.0.10:81/tcp is no service here' },
    { line: 5, reason: 'unknown-service', message: '10.96.0.10:80/udp is no service here' },
    { line: 6, reason: 'unknown-backend', message: '10.2.0.11:8081 is no backend of web' },
    { line: 7, reason: 'unknown-backend', message: '10.2.0.13:8080 is no backend of web' },
    { line: 8, reason: 'wrong-mode', message: 'flows of web are two-way and this is one-way' },
    { line: 9, reason: 'wrong-mode', message: 'web needs an snat address here, which 10.96.255.2 is not' },
    { line: 10, reason: 'wrong-mode', message: 'web needs an snat address here, which 10.1.0.3 is not' },
    { line: 11, reason: 'wrong-mode', message: 'hidden needs an snat address here, which 10.1.0.3 is not' },
    { line: 12, reason: 'hairpin-refused', message: 'the client 10.96.0.12 is a VIP' },
  ]);
  const page = readFileSync(new URL('../../docs/conntrack.md', import.meta.url), 'utf8');
  for (const reason of SKIP_REASONS) t.match(page, `| \`${reason}\` |`, `${reason} is documented`);
});

t.test('a copy of what is here takes its place when it is ahead', async (t) => {
  const { from, to } = hosts('mode: snat, algorithm: random,');
  const first = converse(from);
  const early = exported(from);
  from.send(tcp({ ...client, flags: 'A', seq: 1101, ack: 5101, payload: 1000 }));
  from.send(reply(first.out[0]!, { flags: 'A', seq: 5101, ack: 2101 }));
  const late = exported(from);
  t.match(await imported(to, early), { imported: 1 });
  t.strictSame(reasons(await imported(to, early)), { exists: 1 }, 'the same once more changes nothing');
  t.match(await imported(to, late), { imported: 0, updated: 1 });
  t.equal(exported(to), late);
  t.strictSame(reasons(await imported(to, early)), { exists: 1 }, 'an older one changes nothing');
  t.equal(exported(to), late);
  to.send(tcp({ ...client, flags: 'FA', seq: 2101, ack: 5101 }));
  to.send(reply(first.out[0]!, { flags: 'FA', seq: 5101, ack: 2102 }));
  t.strictSame(reasons(await imported(to, late)), { exists: 1 }, 'nor does one of a connection that has gone on here');
  t.equal(STATE_NAMES[to.tcp.bytes[STATE]!], 'CLOSING');
  t.equal(to.tcp.count, 1);
});

t.test('a tuple that is another connection’s', async (t) => {
  const direct = { ...client, dst: '10.96.0.10' };
  const two = config(
    web('algorithm: random,', [B1]),
    `{ name: two, address: 10.96.0.11, port: 80, backends: [${B1}] }`,
  );
  const make = (): TestPipeline => new TestPipeline(two);
  const clash = file({ ...GOOD, vip: '10.96.0.11:80' });

  const live = make();
  converse(live, direct);
  const before = exported(live);
  t.strictSame(reasons(await imported(live, clash)), { 'tuple-taken': 1 });
  t.equal(exported(live), before, 'a live one is not touched');

  const closed = make();
  converse(closed, direct);
  closed.send(tcp({ ...direct, flags: 'R', seq: 1101 }));
  t.match(await imported(closed, clash), { imported: 1 }, 'a closing one gives way');
  t.equal(closed.tcp.count, 1);

  const expired = make();
  converse(expired, direct);
  expired.nowMs += 9_000_000;
  t.match(await imported(expired, clash), { imported: 1 }, 'and so does an expired one');
  expired.nowMs += 9_000_000;
  t.match(await imported(expired, clash), { imported: 1 }, 'also of the same tuples');
  t.equal(expired.tcp.count, 1);

  const both = make();
  converse(both, direct);
  converse(both, { ...direct, dst: '10.96.0.11', sport: 40_001 });
  both.send(tcp({ ...direct, flags: 'R', seq: 1101 }));
  const across = file({ ...GOOD, client: '10.1.0.2:40001', snat: '10.96.255.1:5', vip: '10.96.0.11:80' });
  t.strictSame(reasons(await imported(both, across)), { 'tuple-taken': 1 }, 'the client’s tuple with another source');
  t.equal(both.tcp.count, 2);
});

t.test('a full table', async (t) => {
  const { from, to } = hosts('', { tcpEntries: 20 });
  for (let sport = 1; sport <= 30; sport++) converse(from, { ...client, sport });
  for (let sport = 101; sport <= 112; sport++) converse(to, { ...client, sport });
  for (let sport = 201; sport <= 205; sport++) to.send(tcp({ ...client, sport, flags: 'S', seq: 1 }));
  const view = await imported(to, exported(from));
  t.match(view, { imported: 8, skipped: { 'table-full': 22 } });
  t.match(view.refused[0], { line: 10, reason: 'table-full' });
  const list = exported(to);
  for (let sport = 101; sport <= 112; sport++) t.match(list, `10.1.0.2:${sport}"`, 'what was established here stays');
  t.notMatch(list, 'SYN_SENT', 'half-open ones went');
});

t.test('the body comes as it likes', async (t) => {
  const flows = Array.from({ length: 200 }, (_, i) => ({ ...GOOD, client: `10.1.0.2:${i + 1}` }));
  const text = `${HEAD}\n\n${flows.map((flow) => JSON.stringify(flow)).join('\r\n')}\n${END_LINE}`;
  await fc.assert(
    fc.asyncProperty(fc.array(fc.nat(text.length), { maxLength: 40 }), async (cuts) => {
      const { to } = hosts('');
      const at = [0, ...cuts.sort((a, b) => a - b), text.length];
      const largest = { records: 0 };
      const run = makeImport(to, {
        onBatch: (records) => {
          largest.records = Math.max(largest.records, records);
        },
      });
      await run.run(stream(...at.slice(1).map((end, i) => text.slice(at[i], end))));
      return run.view.imported === 200 && run.view.complete && to.tcp.count === 200 && largest.records <= ADOPT_RECORDS;
    }),
    { numRuns: 25 },
  );

  for (const [tickMs, messages] of [
    [0, 2],
    [0.25, 50],
    [5, 200],
  ] as const) {
    const { to } = hosts('');
    let sent = 0;
    const view = await imported(to, text, { tickMs, onBatch: () => sent++ });
    t.strictSame([view.imported, to.tcp.count, sent], [200, 200, messages], `${tickMs} ms a record`);
  }

  const { to } = hosts('');
  const long = JSON.stringify({ ...GOOD, more: 'x'.repeat(MAX_LINE_BYTES) });
  const longest = JSON.stringify({ ...GOOD, more: '' }).length;
  const fits = JSON.stringify({ ...GOOD, more: 'x'.repeat(MAX_LINE_BYTES - longest) });
  const view = await imported(to, `${HEAD}\n${long}\n${'y'.repeat(3 * MAX_LINE_BYTES)}\n${fits}\n${long}`);
  t.match(view, { imported: 1, skipped: { malformed: 3 }, complete: false });
  t.strictSame(
    view.refused.map(({ line }) => line),
    [2, 3, 5],
  );
  t.match(await imported(to, `${HEAD}\n${JSON.stringify(GOOD).slice(0, 50)}`), { imported: 0, complete: false });
  t.match(await imported(to, `${HEAD}\n${END_LINE}\n${JSON.stringify(GOOD)}\n`), { complete: false });
});

t.test('what is no export is refused before anything is taken', async (t) => {
  const { to } = hosts('');
  const flow = JSON.stringify(GOOD);
  for (const [text, message] of [
    ['', /nothing to import/],
    ['\n\n', /nothing to import/],
    [flow, /^line 1: it does not begin with the header of an export$/],
    [`\n${flow}\n`, /^line 2: it does not begin/],
    [
      `{"weir":"conntrack","version":2}\n${flow}\n`,
      /^line 1: it has version 2 of the format, and this weir reads .* 1$/,
    ],
    ['x'.repeat(MAX_LINE_BYTES + 1), /^line 1: it does not begin/],
    [new Uint8Array([0xff, 0xfe, 0x0a]), /^line 1/],
  ] as const) {
    const run = makeImport(to);
    await t.rejects(run.run(stream(text)), { code: 'FLOWS_INVALID', message, remedy: /./ });
    t.match(run.view, { imported: 0, complete: false });
  }
  t.equal(to.tcp.count, 0);
});

t.test('a body that breaks off leaves what came before', async (t) => {
  const { to } = hosts('');
  const run = makeImport(to);
  async function* broken(): AsyncGenerator<Uint8Array> {
    yield Buffer.from(`${HEAD}\n${JSON.stringify(GOOD)}\n{"proto":`);
    throw new Error('aborted');
  }
  await t.rejects(run.run(broken()), { code: 'FLOWS_INVALID', message: /went away/ });
  t.match(run.view, { imported: 1, skipped: { malformed: 0 }, complete: false });
  t.equal(to.tcp.count, 1);
});

t.test('a reload between two batches is seen by the second; a data path that ends ends the import', async (t) => {
  const { to } = hosts('');
  const flows = Array.from({ length: 2 * ADOPT_RECORDS }, (_, i) => ({ ...GOOD, client: `10.1.0.2:${i + 1}` }));
  let turns = 0;
  const view = await imported(to, file(...flows), {
    onTurn: () => {
      if (++turns === 2) to.configure(config(web('', [B2, B3])));
    },
  });
  t.match(view, { imported: ADOPT_RECORDS, skipped: { 'unknown-backend': ADOPT_RECORDS } });

  const dead = new FlowImport({
    desired: { identities: to.identities, snapshot: to.compiled!.snapshot },
    clock: { nowMs: () => to.nowMs },
    inTurn: (step) => step(),
    adopt: async () => new Uint8Array(0),
  });
  await t.rejects(dead.run(stream(file({ ...GOOD, backend: '10.2.0.12:8080' }))), { code: 'NOT_RUNNING' });
});

t.test('whatever traffic has left in the tables arrives whole', async () => {
  const FLAGS = ['S', 'A', 'PA', 'FA', 'R', 'RA', 'SA'];
  await fc.assert(
    fc.asyncProperty(fc.integer(), fc.constantFrom(...MODES), async (seed, fields) => {
      const random = seededRandom(seed);
      const { from, to } = hosts(fields);
      const firsts: Outcome[] = [];
      for (let i = 0; i < 120; i++) {
        from.nowMs += random() % 500;
        const source = { ...client, sport: 40_000 + (random() % 8) };
        const flags = FLAGS[random() % FLAGS.length]!;
        const fields = { flags, seq: 1000 + (random() % 3) * 500, ack: 5000 + (random() % 3) * 500, payload: 500 };
        const syn = flags === 'S' ? { options: { scale: random() % 15 } } : {};
        const first = firsts[random() % Math.max(1, firsts.length)];
        if (i % 9 === 0) from.send(udp({ ...source, dport: 53 }));
        else if (i % 2 === 0 && first) from.send(reply(first.out[0]!, { ...fields, ack: 1001, ...syn }));
        else {
          const outcome = from.send(tcp({ ...source, ...fields, ...syn }));
          if (outcome.verdict === 'forward') firsts.push(outcome);
        }
      }
      from.nowMs = Math.ceil(from.nowMs);
      const text = exported(from);
      const view = await imported(to, text);
      const sorted = (lines: string): string => lines.split('\n').sort().join('\n');
      return view.refused.length === 0 && sorted(exported(to)) === sorted(text);
    }),
    { numRuns: Number(process.env.WEIR_MODEL_RUNS ?? 60) },
  );
});

t.test('a long file needs no memory', async (t) => {
  const count = 60_000;
  const { to } = hosts('', { tcpEntries: count });
  const gc = (globalThis as { gc?: () => void }).gc;
  let peak = 0;
  async function* body(): AsyncGenerator<Uint8Array> {
    yield Buffer.from(`${HEAD}\n`);
    for (let i = 0; i < count; i += 100) {
      const flows = Array.from({ length: 100 }, (_, k) => ({
        ...GOOD,
        client: `10.1.${(i + k) >> 13}.2:${((i + k) & 0x1fff) + 1}`,
      }));
      yield Buffer.from(`${flows.map((flow) => JSON.stringify(flow)).join('\n')}\n`);
      if (i % 10_000 === 0) peak = Math.max(peak, process.memoryUsage().heapUsed);
    }
    yield Buffer.from(`${END_LINE}\n`);
  }
  gc?.();
  const before = process.memoryUsage().heapUsed;
  const run = makeImport(to);
  await run.run(body());
  t.match(run.view, { imported: count, complete: true });
  t.ok(peak - before < 64 << 20, `${((peak - before) / (1 << 20)).toFixed(1)} MiB of heap at most`);

  let chars = 0;
  let largest = 0;
  const clock = { nowMs: () => to.nowMs };
  for (const chunk of exportFlows([to.readers.tcp, to.readers.any], to.identities, clock, {}, '1')) {
    chars += chunk.length;
    largest = Math.max(largest, chunk.length);
  }
  t.ok(chars > count * 250 && largest < 40_000, `${chars} characters out again, in chunks of at most ${largest}`);
  t.equal(to.tcp.bytes[(count - 1) * RECORD_BYTES + STATE], STATE_NAMES.indexOf('ESTABLISHED'));
  t.ok(to.tcp.doubles[(count - 1) * RECORD_DOUBLES + EXPIRES]! > to.nowMs);
});
