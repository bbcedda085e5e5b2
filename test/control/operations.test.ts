import t from 'tap';
import { createMetrics } from '../../lib/admin/metrics.js';
import { seededRandom } from '../../lib/base/random.js';
import { adoptSome, RecordRows } from '../../lib/conntrack/adopt.js';
import { restoreTable } from '../../lib/conntrack/restore.js';
import { FlowImport } from '../../lib/control/flow-import.js';
import { END_LINE, formatHeader, MAX_LINE_BYTES } from '../../lib/control/flow-lines.js';
import { tcp, udp } from '../fixtures/packets.js';
import { half, quad } from '../support/traffic.js';
import { Operations } from './operations.js';

/** WEIR_OPERATIONS_RUNS sets the number of runs. */
const RUNS = Number(process.env.WEIR_OPERATIONS_RUNS ?? 5);
const STEPS = 400;

type Draw = (below: number) => number;

function drawer(seed: number): Draw {
  const random = seededRandom(seed);
  return (below) => Math.floor((random() / 2 ** 32) * below);
}

/** Some services of some backends, under names that wander. */
function randomFile(draw: Draw): string {
  const services: string[] = [];
  const endpoints = [
    '10.96.0.10, port: 80, protocol: tcp',
    '10.96.0.11, port: 80, protocol: tcp',
    '10.96.0.10, port: 53, protocol: udp',
  ];
  const taken = new Set<number>();
  for (const name of ['web', 'old', 'dns']) {
    const at = draw(endpoints.length);
    if (taken.has(at) || draw(4) === 0) continue;
    taken.add(at);
    const hosts = [1, 2, 3].filter(() => draw(3) > 0);
    const names = draw(3) === 0 ? ['b3', 'b1', 'b2'] : ['b1', 'b2', 'b3'];
    const backends = hosts.map((host, i) => {
      const limit = draw(3) === 0 ? `, maxConnections: ${1 + draw(4)}` : '';
      return `{ name: ${names[i]}, address: 10.2.0.${host}, port: ${8080 + (draw(8) % 2)}, weight: ${draw(5) === 0 ? 0 : 1}${limit} }`;
    });
    const options = [
      draw(2) === 0 ? 'algorithm: random' : 'algorithm: maglev',
      draw(2) === 0 ? 'onRemove: reset' : `drainTimeout: ${1 + draw(90)}s`,
      ...(draw(2) === 0 ? [`maxConnections: ${1 + draw(8)}`] : []),
      ...(draw(4) === 0 ? [`newConnectionsPerSecond: ${1 + draw(8)}`] : []),
    ];
    services.push(
      `  - { name: ${name}, address: ${endpoints[at]}, health: { type: tcp }, ${options.join(', ')}, backends: [${backends.join(', ')}] }`,
    );
  }
  return services.length === 0 ? 'services: []\n' : `services:\n${services.join('\n')}\n`;
}

/** Packets of clients, and of backends whose clients' packets were sent last. */
class Traffic {
  readonly #weir: Operations;
  readonly #draw: Draw;
  #forwarded: Uint8Array[] = [];
  /** Connections refused for a limit. */
  refused = 0;
  readonly mistakes: string[] = [];

  constructor(weir: Operations, draw: Draw) {
    this.#weir = weir;
    this.#draw = draw;
  }

  send(): void {
    const draw = this.#draw;
    const ends = { src: `10.1.0.${1 + draw(3)}`, sport: 1000 + draw(12), dst: `10.96.0.1${draw(2)}` };
    const last = this.#forwarded[draw(Math.max(1, this.#forwarded.length))];
    let packet: Uint8Array;
    if (last !== undefined && draw(2) === 0) packet = this.#answer(last);
    else if (draw(4) === 0) packet = udp({ ...ends, dport: 53, payload: 9 });
    else {
      const flags = ['S', 'S', 'S', 'A', 'A', 'PA', 'FA', 'R'][draw(8)]!;
      packet = tcp({ ...ends, dport: 80, flags, seq: flags === 'S' ? 1000 : 1001, ack: flags === 'S' ? 0 : 5001 });
    }
    const before = this.#weir.inserted;
    const [out] = this.#weir.send(packet);
    this.#checkLimits(packet, this.#weir.inserted > before);
    if (out !== undefined && quad(out.bytes, 16).startsWith('10.2.'))
      this.#forwarded = [out.bytes, ...this.#forwarded.slice(0, 19)];
  }

  /** What begins stays within the limits, and is refused for them only where they are reached. */
  #checkLimits(packet: Uint8Array, isNew: boolean): void {
    const begins = packet[9] === 17 || packet[33] === 2;
    const isRefused = /connection-limit/.test(this.#weir.reason);
    if (isRefused) this.refused++;
    if (!begins || !(isNew || isRefused) || !quad(packet, 16).startsWith('10.96.')) return;
    const { over, isFull } = this.#weir.limitsOf(quad(packet, 16), half(packet, 22));
    if (isNew && over) this.mistakes.push('a service has more connections than it may');
    if (isRefused && !isFull) this.mistakes.push('a connection was refused, and there was room');
  }

  #answer(packet: Uint8Array): Uint8Array {
    const ends = { src: quad(packet, 16), dst: quad(packet, 12), sport: half(packet, 22), dport: half(packet, 20) };
    if (packet[9] === 17) return udp({ ...ends, payload: 9 });
    const isSyn = (packet[33]! & 2) !== 0;
    const flags = isSyn ? ['SA', 'SA', 'SA', 'RA'][this.#draw(4)]! : ['A', 'A', 'FA', 'R'][this.#draw(4)]!;
    return tcp({ ...ends, flags, seq: isSyn ? 5000 : 5001, ack: 1001 });
  }
}

/** Series and their values, of counters (with the parts of histograms) or of gauges. */
async function scrape({
  observer,
}: Operations): Promise<{ counters: Map<string, number>; gauges: Map<string, number> }> {
  let text = '';
  for await (const piece of createMetrics(observer).scrape()) text += piece;
  const counters = new Map<string, number>();
  const gauges = new Map<string, number>();
  let into = gauges;
  for (const line of text.split('\n')) {
    if (line.startsWith('# TYPE')) into = line.endsWith(' gauge') ? gauges : counters;
    else if (line !== '' && !line.startsWith('#'))
      into.set(line.slice(0, line.lastIndexOf(' ')), Number(line.slice(line.lastIndexOf(' '))));
  }
  return { counters, gauges };
}

t.test(`${RUNS} runs of operation: no counter falls, gauges and limits are what the table says`, async (t) => {
  let refused = 0;
  for (let seed = 1; seed <= RUNS; seed++) {
    const draw = drawer(seed);
    let file = randomFile(draw);
    const weir = new Operations(file, 32, seed);
    const traffic = new Traffic(weir, draw);
    let before = new Map<string, number>();
    let did = '';
    const fail = (message: string): void => void t.fail(`run ${seed}, ${did}: ${message}`);
    for (let step = 0; step < STEPS && t.passing(); step++) {
      const what = draw(20);
      if (what < 12) {
        did = 'packets';
        for (let i = draw(12); i >= 0; i--) traffic.send();
      } else if (what < 14) {
        did = 'reload';
        file = randomFile(draw);
        weir.reload(file);
      } else if (what === 14) {
        did = 'health';
        for (const name of ['b1', 'b2', 'b3']) if (draw(2) === 0 && !weir.down.delete(name)) weir.down.add(name);
        weir.refreshHealth();
      } else if (what === 15) {
        did = 'drain';
        weir.drain(draw(3), draw(3), draw(2) === 0);
      } else if (what === 16) {
        did = 'sweep';
        weir.sweep();
      } else if (what === 17) {
        did = 'garbage collection';
        weir.collect();
      } else {
        did = 'time';
        weir.clock.advance(draw(3) === 0 ? draw(70_000) : draw(3000));
        weir.sendDue();
      }
      if (draw(80) === 0) {
        did = 'restart';
        const { open } = weir.count();
        weir.restart(file, seed);
        before = new Map();
        const sum = [...open].reduce((all, [name, count]) => all + (name.includes('/') ? 0 : count), 0);
        const found = [weir.tcp, weir.any].reduce(
          (all, { open: { services } }) => all + services.reduce((a, b) => a + b, 0),
          0,
        );
        if (sum !== found) fail(`${sum} connections were open and ${found} are`);
      }
      for (const wrong of [...weir.miscounts(), ...traffic.mistakes]) fail(wrong);
      const { counters, gauges } = await scrape(weir);
      for (const [name, value] of counters)
        if (!(value >= (before.get(name) ?? 0))) fail(`${name} fell from ${before.get(name)} to ${value}`);
      before = counters;
      const { live } = weir.count();
      let all = 0;
      for (const [series, value] of gauges) {
        const backend = /^weir_connections_active\{service="(.*)",backend="(.*)"\}/.exec(series);
        if (backend === null) continue;
        const name = `${backend[1]}/${backend[2]}`;
        all += value;
        if (value !== (live.get(name) ?? 0)) fail(`${series} is ${value}, and there are ${live.get(name) ?? 0}`);
      }
      const entries =
        gauges.get('weir_conntrack_entries{table="tcp"}')! + gauges.get('weir_conntrack_entries{table="any"}')!;
      const total = [...live.values()].reduce((a, b) => a + b, 0);
      if (entries !== total || all !== total) fail(`${entries} entries, ${all} connections, and there are ${total}`);
    }
    refused += traffic.refused;
  }
  t.ok(refused > RUNS, `${refused} refused for limits`);
});

/** A file of an export with bytes changed, lines cut, doubled and swapped, and things that no export has. */
function spoil(text: string, draw: Draw): Uint8Array {
  const lines = text.split('\n');
  const junk = [
    '',
    '{}',
    'null',
    '[1]',
    '{"end":true}',
    '\u0000\uffff',
    '{'.repeat(5000),
    '"',
    '1e999',
    '{"proto":"tcp"}',
  ];
  for (let i = draw(12); i > 0; i--) {
    const at = 1 + draw(lines.length - 1);
    const line = lines[at]!;
    const what = draw(6);
    if (what === 0) lines[at] = line.slice(0, draw(line.length + 1));
    else if (what === 1) lines.splice(at, 0, line);
    else if (what === 2) lines.splice(at, 0, junk[draw(junk.length)]!);
    else if (what === 3) lines.splice(at, 1, lines[1 + draw(lines.length - 1)]!);
    else if (what === 4) {
      const numbers = ['-1', '0', '0.5', '65536', '4294967296', '1e300', '1e-300', 'null', '"5"'];
      lines[at] = line.replace(/\d+(?=[,}])/g, (found) => (draw(12) === 0 ? numbers[draw(numbers.length)]! : found));
    } else lines[at] = line.replace(/[\w.:]+(?=")/g, (found) => (draw(12) === 0 ? found.slice(1) : found));
  }
  const bytes = Buffer.from(lines.join('\n'));
  for (let i = draw(4); i > 0; i--) bytes[bytes.indexOf(10) + 1 + draw(Math.max(1, bytes.length - 200))] = draw(256);
  return bytes;
}

t.test('whatever is imported, what is taken is sound, and every line is accounted for', async (t) => {
  const file = `snat: { addresses: [10.96.255.1] }
services:
  - { name: web, address: 10.96.0.10, port: 80, backends: [{ address: 10.2.0.1, port: 8080 }, { address: 10.2.0.2, port: 8080 }] }
  - { name: other, address: 10.96.0.11, port: 80, mode: snat, backends: [{ address: 10.2.0.3, port: 8080 }] }
  - { name: dns, address: 10.96.0.10, port: 53, protocol: udp, maxConnections: 3, backends: [{ address: 10.2.0.1, port: 53 }] }
`;
  for (let seed = 1; seed <= RUNS * 20 && t.passing(); seed++) {
    const draw = drawer(seed);
    const [from, to] = [new Operations(file, 64, seed), new Operations(file, 64, seed + 1)];
    for (const [weir, packets] of [
      [from, 120],
      [to, draw(30)],
    ] as const) {
      const traffic = new Traffic(weir, draw);
      for (let i = 0; i < packets; i++) traffic.send();
    }
    const bytes = spoil([...from.observer.exportFlows({})].join(''), draw);
    const before = to.tcp.count + to.any.count;
    const flows = new FlowImport({
      desired: to.desired,
      clock: to.clock,
      inTurn: (step) => step(),
      adopt: async (table, records) => adoptSome(to[table], new RecordRows(records), to.clock, 1000),
    });
    await flows.run(inPieces(bytes, draw));
    const { imported, updated, skipped, refused } = flows.view;
    const judged = imported + updated + Object.values(skipped).reduce((a, b) => a + b, 0);
    const [, ...lines] = bytes.toString().split('\n');
    const wanted = lines.filter((line) => line.trim() !== '' && line.trim() !== '{"end":true}').length;
    t.equal(judged, wanted, `run ${seed}: every line is counted`);
    for (const { line, message } of refused)
      if (line < 2 || line > lines.length + 1 || message === '') t.fail(`line ${line}`);
    t.ok(to.tcp.count + to.any.count <= before + imported);
    t.strictSame(to.miscounts(), []);
    const damaged = [
      restoreTable(to.memory.tcp, true, to.clock.nowMs()),
      restoreTable(to.memory.any, false, to.clock.nowMs()),
    ];
    t.strictSame(
      damaged.map(({ damaged }) => damaged),
      [0, 0],
      'a state file with it is whole',
    );
  }
});

async function* inPieces(bytes: Uint8Array, draw: Draw): AsyncGenerator<Uint8Array> {
  for (let at = 0; at < bytes.length; ) {
    const end = at + 1 + draw(3000);
    yield bytes.subarray(at, end);
    at = end;
  }
}

t.test('a line of 10 MB and a file of nothing but noise need no memory', async (t) => {
  const to = new Operations(
    randomFile(() => 1),
    64,
    1,
  );
  const head = `${formatHeader('1')}\n`;
  for (const [name, count] of [
    ['a line without an end', 1],
    ['noise', 0],
  ] as const) {
    let peak = 0;
    async function* body(): AsyncGenerator<Uint8Array> {
      yield Buffer.from(head);
      const piece = Buffer.alloc(65_536, 'x');
      if (count === 0) for (let i = 0; i < piece.length; i++) piece[i] = (i * 2_654_435_761) >>> 13;
      for (let i = 0; i < 160; i++) {
        yield piece;
        peak = Math.max(peak, process.memoryUsage().arrayBuffers);
      }
      yield Buffer.from(`\n${END_LINE}\n`);
    }
    const flows = new FlowImport({
      desired: to.desired,
      clock: to.clock,
      inTurn: (step: () => unknown) => step(),
      adopt: async () => t.fail('nothing is taken'),
    } as unknown as ConstructorParameters<typeof FlowImport>[0]);
    const before = process.memoryUsage().arrayBuffers;
    await flows.run(body());
    const { skipped, refused, complete } = flows.view;
    if (count > 0) t.match(refused, [{ line: 2, message: `it is longer than ${MAX_LINE_BYTES} bytes` }], name);
    t.ok(skipped.malformed >= 1 && complete && refused.length <= 10, `${name}: ${skipped.malformed} refused`);
    t.ok(peak - before < 16 << 20, `${(peak - before) >> 10} KiB at most`);
  }
});
