import { closeSync, existsSync, mkdtempSync, openSync, readFileSync, rmSync, writeFileSync, writeSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import fc from 'fast-check';
import t from 'tap';
import { seededRandom } from '../../lib/base/random.js';
import { replay } from '../../lib/replay/replay.js';
import { ethernet, PcapngBlocks, pcapFile, readPcap } from '../fixtures/captures.js';
import { packet } from '../fixtures/packet-text.js';
import { tcp, verifyChecksums } from '../fixtures/packets.js';
import { capture, EPOCH_SECONDS, runReplay } from './fixture.js';

const folder = mkdtempSync(join(tmpdir(), 'weir-replay-test-'));
t.teardown(() => rmSync(folder, { recursive: true }));
const path = (name: string): string => join(folder, name);

const backends = ['b1', 'b2', 'b3'].map((name, i) => ({ name, address: `10.2.0.${11 + i}`, port: 8080 }));
const conntrack = { tcpEntries: 4096, anyEntries: 4096 };
const CONFIG = {
  conntrack,
  snat: { addresses: ['10.96.255.1'] },
  services: [
    { name: 'web', address: '10.96.0.10', port: 80, protocol: 'tcp', backends },
    { name: 'lots', address: '10.96.0.10', port: 81, protocol: 'tcp', algorithm: 'random', mode: 'snat', backends },
    { name: 'dns', address: '10.96.0.10', port: 53, protocol: 'udp', algorithm: 'random', backends },
  ],
};

/** A connection to each of the three services per client port, 10 ms apart. */
function traffic(count: number): Array<{ at: number; bytes: Uint8Array }> {
  const packets: Array<{ at: number; bytes: Uint8Array }> = [];
  for (let i = 0; i < count; i++) {
    const client = `10.1.${i >> 8}.${i & 255}`;
    const ports = `${client}:${1024 + ((i * 7919) % 60000)}`;
    const at = i / 100;
    packets.push({ at, bytes: packet(`tcp ${ports} > 10.96.0.10:80 S seq=${i}`) });
    packets.push({ at: at + 0.001, bytes: packet(`tcp ${ports} > 10.96.0.10:81 S seq=${i}`) });
    packets.push({ at: at + 0.002, bytes: packet(`udp ${ports} > 10.96.0.10:53 len=${i % 500}`) });
  }
  return packets;
}

t.test('the same bytes on every run; the seed moves lots, never Maglev', async (t) => {
  const packets = traffic(300);
  const events = [
    { at: 0.5, backend: 'web/b1', health: 'down' },
    { at: 1, config: 'fewer.yaml' },
    { at: 400, end: true },
  ];
  const fewer = {
    ...CONFIG,
    services: CONFIG.services.map((service) => ({ ...service, backends: backends.slice(0, 2) })),
  };
  const input = { config: CONFIG, configs: { fewer }, packets, events };
  const first = await runReplay(input);
  const again = await runReplay(input);
  t.ok(Buffer.compare(first.files.pcap, again.files.pcap) === 0, 'OUT.pcap');
  t.equal(again.files.json, first.files.json, 'OUT.jsonl');
  t.equal(again.files.conntrack, first.files.conntrack, 'CT.json');
  t.same((await runReplay({ ...input, seed: 1 })).files.json, first.files.json, 'the default seed is 1');

  const other = await runReplay({ ...input, seed: 2 });
  const chosen = (output: typeof first, service: string) =>
    output.lines.filter((line) => line.service === service).map((line) => line.backend);
  t.same(chosen(other, 'web'), chosen(first, 'web'), 'Maglev');
  t.notSame(chosen(other, 'lots'), chosen(first, 'lots'), 'random');
  t.equal(new Set(chosen(first, 'web')).size, 3);
});

t.test('a line per packet with its own time, a clock that never goes back', async (t) => {
  const flow = 'udp 10.1.0.2:5000 > 10.96.0.10:53';
  const output = await runReplay({
    config: CONFIG,
    packets: [
      { at: 100, bytes: packet(flow) },
      { at: 100.000001, bytes: packet(flow) },
      { at: 95.5, bytes: packet(flow) },
      { at: 101.5, bytes: packet(flow) },
    ],
  });
  t.same(
    output.lines.map(({ n, t }) => [n, t]),
    [
      [1, 0],
      [2, 0.000001],
      [3, -4.5],
      [4, 1.5],
    ],
  );
  t.match(output.files.json, /^\{"n":1,"t":0\.0,"verdict":"forward","direction":"original","service":"dns",/);
  t.equal(output.conntrack[0]!.expiresIn, 60);
  t.same(
    readPcap(output.files.pcap).records.map(({ seconds, fraction }) => [seconds - EPOCH_SECONDS, fraction]),
    [
      [100, 0],
      [100, 1],
      [95, 500_000],
      [101, 500_000],
    ],
    'what is sent has the time of the packet that caused it',
  );
  t.equal((await runReplay({ config: CONFIG, packets: [] })).files.json, '', 'an empty capture is a replay too');
});

t.test('Ethernet and pcapng; frames without IP have their line; packets without a time', async (t) => {
  const syn = packet('tcp 10.1.0.2:40000 > 10.96.0.10:80 S seq=1');
  const blocks = new PcapngBlocks();
  writeFileSync(path('weir.json'), JSON.stringify(CONFIG));
  const options = { config: path('weir.json'), in: path('in'), out: path('out'), json: path('json') };
  writeFileSync(
    path('in'),
    Buffer.concat([
      blocks.section(),
      blocks.interface(1),
      blocks.simple(ethernet(0x0800, syn)),
      blocks.enhanced(0, 5_000_000n, ethernet(0x0800, syn, [0x8100])),
      blocks.enhanced(0, 5_250_000n, ethernet(0x0806, syn)),
      blocks.simple(ethernet(0x0800, syn)),
      blocks.enhanced(0, 5_500_000n, ethernet(0x86dd, syn).subarray(0, 9)),
    ]),
  );
  const summary = replay(options);
  const lines = readFileSync(options.json, 'utf8').trimEnd().split('\n');
  t.same(
    lines.map((line) => JSON.parse(line)).map(({ t, verdict, reason, out }) => [t, verdict, reason, out.length]),
    [
      [0, 'forward', undefined, 1],
      [0, 'forward', undefined, 1],
      [0.25, 'drop', 'unsupported-protocol', 0],
      [0.25, 'forward', undefined, 1],
      [0.5, 'drop', 'malformed', 0],
    ],
  );
  t.equal(lines[2], '{"n":3,"t":0.25,"verdict":"drop","reason":"unsupported-protocol","direction":"none","out":[]}');
  t.same(summary, {
    packets: 5,
    emitted: 3,
    seconds: 0.5,
    verdicts: { forward: 3, reply: 0, pass: 0, drop: 2, hold: 0 },
  });
});

t.test('answers are limited per source and in all', async (t) => {
  const from = (host: number, at: number) => ({
    at,
    bytes: packet(`tcp 10.1.${host >> 8}.${host & 255}:1 > 10.96.0.10:9 S seq=1`),
  });
  const perSource = await runReplay({ config: CONFIG, packets: Array.from({ length: 60 }, () => from(1, 0)) });
  t.equal(perSource.lines.filter(({ verdict }) => verdict === 'reply').length, 50);
  t.same(new Set(perSource.lines.slice(50).map(({ reason }) => reason)), new Set(['rate-limited']));
  const inAll = await runReplay({
    config: CONFIG,
    packets: Array.from({ length: 1100 }, (_, i) => from(i + 1, i / 2000)),
  });
  t.equal(inAll.lines.filter(({ verdict }) => verdict === 'reply').length, 1000);
});

t.test('recovering picks up the replies of a maglev flow', async (t) => {
  const client = '10.1.0.2:40000';
  const [line] = (
    await runReplay({ config: CONFIG, packets: [{ at: 0, bytes: packet(`tcp ${client} > 10.96.0.10:80 S seq=1`) }] })
  ).lines;
  const { address } = backends.find(({ name }) => name === line!.backend)!;
  const packets = [{ at: 0, bytes: packet(`tcp ${address}:8080 > ${client} A seq=7 ack=9`) }];
  const one = { ...CONFIG, services: CONFIG.services.slice(0, 1) };
  t.equal((await runReplay({ config: one, packets })).lines[0]!.verdict, 'pass');
  const recovered = await runReplay({ config: one, packets, recovering: true });
  t.match(recovered.lines[0], { verdict: 'forward', direction: 'reply', service: 'web', backend: line!.backend });
  t.match(recovered.conntrack[0], { client, vip: '10.96.0.10:80' });
  const late = await runReplay({ config: one, packets, recovering: true, events: [] });
  t.equal(late.lines.length, 1);
});

t.test('what is wrong is said before an output is touched', async (t) => {
  writeFileSync(path('weir.yaml'), JSON.stringify(CONFIG));
  writeFileSync(path('bad.yaml'), 'services:\n  - nmae: web\n');
  writeFileSync(path('node.yaml'), 'role: node\ntunnel: { address: 192.0.2.1 }\n');
  writeFileSync(path('good.pcap'), capture(traffic(2)));
  const good = capture(traffic(2));
  writeFileSync(path('cut.pcap'), good.subarray(0, good.length - 5));
  const timeline = (text: string): string => {
    writeFileSync(path('t.jsonl'), text);
    return path('t.jsonl');
  };
  const options = { config: path('weir.yaml'), in: path('good.pcap'), out: path('o.pcap'), json: path('o.jsonl') };
  const cases: Array<[name: string, change: object, error: { code: string; message?: RegExp }]> = [
    ['no configuration', { config: path('none') }, { code: 'CONFIG_UNREADABLE' }],
    ['a bad configuration', { config: path('bad.yaml') }, { code: 'CONFIG_INVALID', message: /bad\.yaml:2:\d+ / }],
    ['no capture', { in: path('none') }, { code: 'CAPTURE_INVALID' }],
    ['a text as capture', { in: path('weir.yaml') }, { code: 'CAPTURE_INVALID', message: /neither pcap nor pcapng/ }],
    ['a bad timeline', { timeline: timeline('{"at":1}\n') }, { code: 'TIMELINE_INVALID', message: /t\.jsonl:1: / }],
  ];
  for (const [name, change, error] of cases) {
    t.throws(() => replay({ ...options, ...change }), error, name);
    t.notOk(existsSync(options.out), 'no output');
  }
  const events: Array<[text: string, error: { code: string; message?: RegExp }]> = [
    ['\n{"at":1,"config":"none.yaml"}', { code: 'TIMELINE_INVALID', message: /t\.jsonl:2: .*none\.yaml/ }],
    ['{"at":1,"config":"bad.yaml"}', { code: 'CONFIG_INVALID', message: /bad\.yaml:2:/ }],
    ['{"at":1,"config":"node.yaml"}', { code: 'NOT_SUPPORTED', message: /node\.yaml has role node, but .* a gateway/ }],
    [
      '{"at":1,"backend":"web/b9","health":"down"}',
      {
        code: 'TIMELINE_INVALID',
        message: /t\.jsonl:1: no backend is called web\/b9 at that moment; there are web\/b1, /,
      },
    ],
  ];
  for (const [text, error] of events) {
    t.throws(() => replay({ ...options, timeline: timeline(text) }), error, text);
    t.notOk(existsSync(options.out), 'no output');
  }
  t.throws(() => replay({ ...options, out: options.in }), {
    code: 'USAGE',
    message: /--out and --in are the same file/,
  });
  t.throws(() => replay({ ...options, json: options.out }), { code: 'USAGE', message: /--json and --out/ });
  t.same(readFileSync(options.in), Buffer.from(good), 'the capture is as it was');
  t.throws(() => replay({ ...options, out: join(folder, 'no', 'o') }), {
    code: 'OUTPUT_FAILED',
    message: /cannot write .*: its folder does not exist/,
  });

  t.throws(() => replay({ ...options, in: path('cut.pcap') }), {
    code: 'CAPTURE_INVALID',
    message: /the last record is cut short/,
  });
  t.equal(readFileSync(options.json, 'utf8').trimEnd().split('\n').length, 5, 'all that came before the cut is there');
  t.equal(readPcap(readFileSync(options.out)).records.length, 5);
});

t.test('mutated packets are dropped or leave right; none leaves with the VIP as destination', async (t) => {
  const vip = Buffer.from([10, 96, 0, 10]);
  const random = seededRandom(7);
  const packets = traffic(40).flatMap(({ at, bytes }) =>
    Array.from({ length: 30 }, () => {
      const mutated = bytes.slice();
      for (let edits = random() % 4; edits >= 0; edits--) mutated[random() % mutated.length] = random() & 255;
      // Most mistakes would end at the header checksum: half of the packets get a right one.
      if (random() & 1) repairHeader(mutated);
      return { at, bytes: random() % 8 === 0 ? mutated.subarray(0, random() % mutated.length) : mutated };
    }),
  );
  const output = await runReplay({ config: CONFIG, packets });
  t.equal(output.lines.length, packets.length);
  const wrong: string[] = [];
  for (const [i, { out, verdict }] of output.lines.entries()) {
    for (const hex of out) {
      const bytes = Buffer.from(hex, 'hex');
      // A checksum that was wrong on arrival is as wrong when it leaves; the length and header of IP are weir's to judge.
      const judged = verifyChecksums(bytes).filter(
        (problem) => !problem.startsWith('quoted') && (verdict === 'reply' || /total length|IP header/.test(problem)),
      );
      if (judged.length > 0) wrong.push(`packet ${i + 1} left with a wrong ${judged.join()}: ${hex}`);
      if (bytes.subarray(16, 20).equals(vip)) wrong.push(`packet ${i + 1} left for the VIP: ${hex}`);
    }
  }
  t.same(wrong, []);
});

t.test('any order of anything can be replayed', async () => {
  const step = fc.record({
    ms: fc.nat(100_000),
    text: fc.constantFrom(
      'tcp 10.1.0.2:1 > 10.96.0.10:80 S seq=1',
      'tcp 10.1.0.2:1 > 10.96.0.10:81 S seq=1',
      'tcp 10.1.0.2:1 > 10.96.0.10:80 FA seq=2 ack=9',
      'tcp 10.2.0.11:8080 > 10.1.0.2:1 SA seq=8 ack=2',
      'tcp 10.2.0.12:8080 > 10.1.0.2:1 R seq=9',
      'udp 10.1.0.2:1 > 10.96.0.10:53 len=2000 id=5 frag=1480-',
      'udp 10.1.0.2:1 > 10.96.0.10:53 len=2000 id=5 frag=0-1480',
      'icmp 10.1.0.2 > 10.96.0.10 echo-request id=1',
    ),
  });
  const event = fc.record({
    at: fc.nat(100),
    backend: fc.constantFrom('web/b1', 'dns/b2'),
    health: fc.constantFrom('up', 'down'),
  });
  await fc.assert(
    fc.asyncProperty(fc.array(step, { maxLength: 30 }), fc.array(event, { maxLength: 5 }), async (steps, events) => {
      const output = await runReplay({
        config: CONFIG,
        packets: steps.map(({ ms, text }) => ({ at: ms / 1000, bytes: packet(text) })),
        events,
      });
      const sent = output.lines.reduce((sum, { out }) => sum + out.length, 0);
      return output.lines.length === steps.length && sent === output.sent.length;
    }),
    { numRuns: 40 },
  );
});

t.test('a large capture is replayed with flat memory', async (t) => {
  const count = 200_000;
  const input = path('large.pcap');
  const fd = openSync(input, 'w');
  const chunk = 10_000;
  for (let from = 0; from < count; from += chunk) {
    const records = Array.from({ length: chunk }, (_, i) => {
      const n = (from + i) % 4096;
      const flags = from + i < 4096 ? 'S' : 'A';
      const fields = { src: `10.1.${n >> 8}.${n & 255}`, sport: 40000, dst: '10.96.0.10', dport: 80, flags };
      const bytes = Buffer.concat([tcp(fields), new Uint8Array(500)]); // IP ignores what follows it
      return { seconds: EPOCH_SECONDS + Math.floor((from + i) / 1e5), fraction: (from + i) % 1e5, bytes };
    });
    const file = pcapFile(records);
    writeSync(fd, from === 0 ? file : file.subarray(24));
  }
  closeSync(fd);
  writeFileSync(path('weir.yaml'), JSON.stringify(CONFIG));
  replay({ config: path('weir.yaml'), in: path('good.pcap'), out: '/dev/null', json: '/dev/null' });
  const before = process.memoryUsage();
  const started = performance.now();
  const summary = replay({
    config: path('weir.yaml'),
    in: input,
    out: '/dev/null',
    json: '/dev/null',
    conntrack: '/dev/null',
  });
  const seconds = (performance.now() - started) / 1000;
  const after = process.memoryUsage();
  t.equal(summary.packets, count);
  t.equal(summary.verdicts.forward, count);
  const grown = (after.rss - before.rss) / (1 << 20);
  t.ok(
    grown < 100,
    `RSS grew by ${grown.toFixed(0)} MiB over a capture of 111 MB; ${Math.round(count / seconds)} packets/s`,
  );
});

function repairHeader(bytes: Uint8Array): void {
  const length = (bytes[0]! & 15) * 4;
  if (length > bytes.length) return;
  bytes[10] = 0;
  bytes[11] = 0;
  let sum = 0;
  for (let i = 0; i < length; i += 2) sum += bytes[i]! * 256 + bytes[i + 1]!;
  while (sum > 0xffff) sum = (sum & 0xffff) + (sum >>> 16);
  bytes[10] = ~sum >> 8;
  bytes[11] = ~sum;
}
