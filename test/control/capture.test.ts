import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import { BlockReader } from '../../lib/cli/capture.js';
import { parseConfig } from '../../lib/config/load.js';
import { Captures } from '../../lib/control/capture.js';
import { EventLog } from '../../lib/control/log.js';
import type { Capture, CaptureOptions } from '../../lib/control/view.js';
import * as ipv4 from '../../lib/wire/ipv4.js';
import { openCapture } from '../../lib/wire/pcap.js';
import { dsrOption, geneve } from '../fixtures/geneve.js';
import { addressWord, fragment, icmpError, partial, tcp, udp } from '../fixtures/packets.js';
import { TestPipeline } from '../support/pipeline.js';
import { needsTools } from '../support/skip.js';
import { client, establish, reply } from '../support/traffic.js';

const CONFIG = `
snat: { addresses: [10.96.255.1] }
tunnel: { address: 192.0.2.1 }
services:
  - { name: web, address: 10.96.0.10, port: 80, backends: [{ name: b1, address: 10.2.0.11, port: 8080 }] }
  - { name: lot, address: 10.96.0.10, port: 81, algorithm: random, mode: snat, backends: [{ name: b2, address: 10.2.0.12, port: 8080 }] }
  - { name: dsr, address: 10.96.0.11, port: 80, mode: dsr, backends: [{ name: b3, address: 10.2.0.13, port: 8080 }] }
  - { name: none, address: 10.96.0.12, port: 80, noBackend: drop, backends: [] }
  - { name: dns, address: 10.96.0.10, port: 53, protocol: udp, backends: [{ name: b4, address: 10.2.0.14, port: 53 }] }
`;

/** A pipeline, and captures of it. */
class Bench {
  readonly pipeline: TestPipeline;
  readonly captures: Captures;
  readonly events: string[] = [];

  constructor(text = CONFIG) {
    const { config } = parseConfig(text);
    this.pipeline = new TestPipeline(config!);
    const { pipeline } = this;
    const { identities } = pipeline;
    this.captures = new Captures({
      version: '1.2.3',
      desired: { config: config!, identities, snapshot: pipeline.compiled!.snapshot },
      clock: { nowMs: () => pipeline.nowMs },
      path: { capture: async (request) => pipeline.tap.use(request) },
      log: new EventLog({ write: (line) => void this.events.push(JSON.parse(line).event) }),
    });
  }

  /** A capture that has begun. */
  async begin(options: CaptureOptions = {}): Promise<Recording> {
    const recording = new Recording(this.captures.begin(options));
    await recording.read();
    return recording;
  }
}

interface Frame {
  readonly comment: string;
  readonly bytes: Uint8Array;
}

/** What a capture has handed over so far. */
class Recording {
  readonly capture: Capture;
  bytes = Buffer.alloc(0);
  readonly blocks = new BlockReader();
  isOver = false;

  constructor(capture: Capture) {
    this.capture = capture;
  }

  async read(): Promise<void> {
    const chunk = await this.capture.next();
    if (chunk === null) this.isOver = true;
    else this.bytes = Buffer.concat([this.bytes, this.blocks.take(chunk)]);
  }

  /** Its packets and their comments, as our own reader and the options tell. */
  get frames(): Frame[] {
    const packets = readPackets(this.bytes);
    const comments = readComments(this.bytes);
    return packets.map((bytes, i) => ({ bytes, comment: comments[i]! }));
  }

  get comments(): string[] {
    return readComments(this.bytes);
  }
}

function readPackets(file: Uint8Array): Uint8Array[] {
  let at = 0;
  const reader = openCapture((into) => {
    const part = file.subarray(at, at + into.length);
    into.set(part);
    at += part.length;
    return part.length;
  });
  const found: Uint8Array[] = [];
  while (reader.next()) {
    const { bytes, offset, length } = reader.packet;
    found.push(bytes.slice(offset, offset + length));
  }
  return found;
}

function readComments(file: Buffer): string[] {
  const comments: string[] = [];
  for (let at = 0; at < file.length; at += file.readUInt32LE(at + 4)) {
    if (file.readUInt32LE(at) !== 6) continue;
    let option = at + 28 + ((file.readUInt32LE(at + 20) + 3) & ~3);
    while (file.readUInt16LE(option) !== 1) option += 4 + ((file.readUInt16LE(option + 2) + 3) & ~3);
    comments.push(file.toString('utf8', option + 4, option + 4 + file.readUInt16LE(option + 2)));
  }
  return comments;
}

/** Sends what there is of each kind, a batch each. */
function sendEverything({ pipeline }: Bench): void {
  const first = pipeline.send(tcp({ ...client, flags: 'S', seq: 1000 }));
  pipeline.send(reply(first.out[0]!, { flags: 'SA', seq: 5000, ack: 1001 }));
  pipeline.send(partial(tcp({ ...client, flags: 'A', seq: 1001, ack: 5001, payload: 4000 }), 1448));
  pipeline.send(tcp({ ...client, dport: 81, flags: 'S', seq: 1000 }));
  pipeline.send(tcp({ ...client, dst: '10.96.0.11', flags: 'S', seq: 1000 }));
  pipeline.send(tcp({ ...client, dst: '10.96.0.12', flags: 'S', seq: 1000 }));
  pipeline.send(tcp({ ...client, dport: 82, flags: 'S', seq: 1000 }));
  pipeline.send(tcp({ ...client, dst: '10.9.9.9', flags: 'S', seq: 1000 }));
  const [head, tail] = fragment(udp({ ...client, dport: 53, payload: 1200 }), 800);
  pipeline.send(tail!);
  pipeline.send(head!);
  pipeline.send(icmpError({ src: '10.2.0.1', dst: '10.1.0.2', type: 3, code: 1, quoted: first.out[0]!.bytes }));
}

const EVERYTHING = [
  'in: web -> b1 10.2.0.11:8080, new, maglev, SYN_SENT',
  'out of packet 1',
  'in: web <- b1 10.2.0.11:8080, tracked, SYN_RECV',
  'out of packet 3',
  'in: web -> b1 10.2.0.11:8080, tracked, ESTABLISHED; a super-packet of segments of 1448 bytes; checksum left to the device',
  'out of packet 5; a super-packet of segments of 1448 bytes; checksum left to the device',
  'in: lot -> b2 10.2.0.12:8080, new, random, SYN_SENT',
  'out of packet 7',
  'in: dsr -> b3 10.2.0.13:8080, new, maglev, SYN_SENT',
  'out of packet 9',
  'in: dropped, no-backend (none)',
  'in: answered by weir, rst-unknown-port',
  'out of packet 12',
  'in: passed on unchanged, not-tracked',
  'out of packet 14',
  'in: held: its first fragment has not come',
  'in: dns -> b4 10.2.0.14:53, new, maglev, UNREPLIED',
  'out of packet 17',
  'out of no packet of its own (dns/b4)',
  'in: web <- b1 10.2.0.11:8080, tracked, ESTABLISHED',
  'out of packet 20',
];

t.test('each packet in with its decision, followed by what it became', async (t) => {
  const bench = new Bench();
  const recording = await bench.begin();
  sendEverything(bench);
  await recording.read();
  t.strictSame(recording.comments, EVERYTHING);
  const [syn, out] = recording.frames;
  const address = (bytes: Uint8Array): string => bytes.subarray(16, 20).join('.');
  t.strictSame([address(syn!.bytes), address(out!.bytes)], ['10.96.0.10', '10.2.0.11'], 'before and after');
  t.equal(recording.frames[4]!.bytes.length, 4040, 'a super-packet as it is');
  const outer = recording.frames[9]!.bytes;
  t.strictSame([ipv4.protocol(outer, 0), address(outer)], [ipv4.PROTO_UDP, '10.2.0.13'], 'dsr: as it leaves');
  recording.capture.close();
  await recording.read();
  t.ok(recording.isOver);
  t.notOk(bench.pipeline.tap.isOn);
  t.strictSame(bench.events, ['capture-begun', 'capture-ended']);
});

t.test('Wireshark reads it without a complaint', needsTools(t, 'tshark'), async (t) => {
  const bench = new Bench();
  const recording = await bench.begin({ seconds: 2 });
  sendEverything(bench);
  bench.pipeline.nowMs += 2000;
  while (!recording.isOver) await recording.read();
  const fields = [
    'frame.number',
    'frame.interface_name',
    'frame.comment',
    'frame.len',
    'ip.dst',
    '_ws.expert.severity',
  ];
  const folder = mkdtempSync(join(tmpdir(), 'weir-capture-'));
  t.teardown(() => rmSync(folder, { recursive: true }));
  const file = join(folder, 'all.pcapng');
  writeFileSync(file, recording.bytes);
  const args = ['-r', file, '-T', 'fields', '-E', 'separator=|', ...fields.flatMap((field) => ['-e', field])];
  const { stdout, stderr, status } = spawnSync('tshark', args, { encoding: 'utf8' });
  t.equal(status, 0);
  t.equal(stderr.replace(/^Running as user.*\n/m, ''), '');
  const rows = stdout
    .trimEnd()
    .split('\n')
    .map((line) => line.split('|'));
  t.strictSame(
    rows.map(([, name, comment]) => `${name} ${comment}`),
    EVERYTHING.map((comment) => `${comment.startsWith('in') ? 'in' : 'out'} ${comment}`),
  );
  t.strictSame(
    rows.slice(0, 2).map(([number, , , length, address]) => [number, length, address]),
    [
      ['1', '40', '10.96.0.10'],
      ['2', '40', '10.2.0.11'],
    ],
  );
});

t.test('filters are about the packet, its flow, and either side of the translation', async (t) => {
  for (const [options, wanted] of [
    [{ service: 'web' }, 8],
    [{ service: 'none' }, 1],
    [{ backend: 'b2' }, 2],
    [{ backend: 'dsr/b3' }, 2],
    [{ backend: '10.2.0.14:53' }, 3],
    [{ service: 'web', backend: 'b2' }, 0],
    [{ client: '10.1.0.2' }, EVERYTHING.length],
    [{ client: '10.1.0.0/16' }, EVERYTHING.length],
    [{ client: '10.1.0.3' }, 0],
    [{ client: '10.9.9.9' }, 2],
    [{ client: '10.1.0.2:40000', service: 'lot' }, 2],
    [{ client: '10.1.0.2:40001' }, 0],
  ] as const) {
    const bench = new Bench();
    const recording = await bench.begin(options);
    sendEverything(bench);
    if (wanted > 0) await recording.read();
    recording.capture.close();
    await recording.read();
    t.equal(recording.comments.length, wanted, JSON.stringify(options));
  }
  const bench = new Bench();
  const lot = bench.pipeline.send(tcp({ ...client, dport: 81, flags: 'S', seq: 1000 }));
  const recording = await bench.begin({ client: '10.1.0.2' });
  bench.pipeline.send(reply(lot.out[0]!, { flags: 'SA', seq: 5000, ack: 1001 }));
  await recording.read();
  t.match(recording.comments, [/^in: lot <- b2/, 'out of packet 1'], 'an answer to an snat address is the client’s');
  recording.capture.close();
});

t.test('ends: by count, with all that became of the last; by time', async (t) => {
  const bench = new Bench();
  const recording = await bench.begin({ count: 3 });
  sendEverything(bench);
  while (!recording.isOver) await recording.read();
  t.strictSame(recording.comments, EVERYTHING.slice(0, 6));
  const timed = await bench.begin({ seconds: 5 });
  sendEverything(bench);
  await timed.read();
  bench.pipeline.nowMs += 5000;
  while (!timed.isOver) await timed.read();
  t.ok(timed.comments.length > 6);
  t.notOk(bench.pipeline.tap.isOn);
});

t.test('snaplen: what is kept, of how much', async (t) => {
  const bench = new Bench();
  establish(bench.pipeline);
  const recording = await bench.begin({ snapBytes: 64 });
  bench.pipeline.send(tcp({ ...client, flags: 'PA', seq: 1001, ack: 5001, payload: 1000 }));
  await recording.read();
  t.strictSame(
    recording.frames.map(({ bytes }) => bytes.length),
    [64, 64],
  );
  recording.capture.close();
});

t.test('what does not fit is counted, the rest is whole', async (t) => {
  const bench = new Bench();
  establish(bench.pipeline);
  const recording = await bench.begin();
  const big = tcp({ ...client, flags: 'PA', seq: 1001, ack: 5001, payload: 60_000 });
  // 2 * 60 kB each, of 8 MB.
  for (let i = 0; i < 100; i++) bench.pipeline.send({ bytes: big });
  const { blocks } = recording;
  while (blocks.packets[0]! + blocks.packets[1]! + blocks.lost < 200) await recording.read();
  t.ok(blocks.lost > 50, `${blocks.lost} lost`);
  bench.pipeline.send(tcp({ ...client, flags: 'A', seq: 1001, ack: 5001 }));
  await recording.read();
  t.match(recording.comments.slice(-2), [/^in: web -> b1/, /^out of packet \d+$/], 'then it goes on');
  recording.capture.close();
  for (const { bytes } of recording.frames)
    if (bytes.length !== big.length && bytes.length !== 40) t.fail(`${bytes.length} bytes`);
});

t.test('one at a time; a look at the head is none', async (t) => {
  const bench = new Bench();
  bench.captures.begin({});
  const first = await bench.begin();
  t.throws(() => bench.captures.begin({}), { code: 'NOT_SUPPORTED', message: /running already/ });
  first.capture.close();
  await new Promise((resolve) => setImmediate(resolve));
  (await bench.begin()).capture.close();
  for (const [options, message] of [
    [{ service: 'wbe' }, /no service is called "wbe"/],
    [{ backend: 'b9' }, /no backend is called "b9"/],
    [{ client: '10.1' }, /"10.1" is no address/],
  ] as const) {
    await new Promise((resolve) => setImmediate(resolve));
    t.throws(() => bench.captures.begin(options), { code: 'USAGE', message });
  }
});

t.test('what one capture left unread, or lost, is not the next one’s', async (t) => {
  const bench = new Bench();
  establish(bench.pipeline);
  const big = tcp({ ...client, flags: 'PA', seq: 1001, ack: 5001, payload: 60_000 });
  const first = await bench.begin();
  for (let i = 0; i < 100; i++) bench.pipeline.send({ bytes: big });
  await first.read();
  first.capture.close();
  await new Promise((resolve) => setImmediate(resolve));
  const second = await bench.begin();
  bench.pipeline.send(tcp({ ...client, flags: 'A', seq: 1001, ack: 5001 }));
  await second.read();
  t.strictSame(second.comments, ['in: web -> b1 10.2.0.11:8080, tracked, ESTABLISHED', 'out of packet 1']);
  t.equal(second.blocks.lost, 0);
  second.capture.close();
});

t.test('a node shows what the socket gave it, with headers as they may have been', async (t) => {
  const bench = new Bench(`
role: node
tunnel: { address: 10.2.0.11 }
services:
  - { name: web, address: 10.96.0.10, port: 80, mode: dsr, backends: [{ name: b1, address: 10.2.0.11, port: 8080 }] }
`);
  const inner = { src: '10.1.0.2', sport: 40000, dst: '10.2.0.11', dport: 8080 };
  const fields = { options: [dsrOption('10.96.0.10', 80)] };
  const tunnel = { peer: addressWord('192.0.2.1') };
  const recording = await bench.begin();
  bench.pipeline.send({ bytes: geneve(fields, tcp({ ...inner, flags: 'S', seq: 1 })), tunnel });
  const segments = [1, 1001].map((seq) => geneve(fields, tcp({ ...inner, flags: 'A', seq, payload: 1000 })));
  const datagramBytes = segments[0]!.length;
  bench.pipeline.send({ bytes: Buffer.concat(segments), tunnel: { ...tunnel, datagramBytes } });
  await recording.read();
  const { comments, frames } = recording;
  t.strictSame(comments.slice(0, 2), ['in: web -> b1 10.2.0.11:8080, new, maglev, SYN_SENT', 'out of packet 1']);
  t.match(comments.slice(2), [
    /^in: web -> b1/,
    /^in: web -> b1/,
    /^out of packet 3; a super-packet of segments of 1000/,
  ]);
  const { bytes } = frames[2]!;
  t.equal(bytes.length, 28 + datagramBytes);
  t.equal(ipv4.check(bytes, 0, bytes.length), 0, 'headers that hold');
  t.strictSame([bytes.subarray(12, 20).join('.'), bytes[22]! * 256 + bytes[23]!], ['192.0.2.1.10.2.0.11', 6081]);
  recording.capture.close();
});
