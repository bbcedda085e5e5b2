import t, { type Test } from 'tap';
import { MemoryDevice, type MemoryPacket } from '../../lib/io/memory-device.js';
import { dsrOption, geneve } from '../fixtures/geneve.js';
import { addressWord, fragment, icmpError, partial, tcp, udp, verifyChecksums } from '../fixtures/packets.js';
import { type Outcome, TestPipeline } from '../support/pipeline.js';

/** Answers of a node whose way to the client is narrower than the backend believes. */

const GATEWAY = '192.0.2.1';
const NODE = '10.2.0.11';
const CLIENT = '10.1.0.2';
const CONFIG = `role: node\ntunnel: { address: ${NODE} }\n`;

const toBackend = { src: CLIENT, sport: 40000, dst: NODE, dport: 8080 };
const answer = { src: NODE, sport: 8080, dst: CLIENT, dport: 40000, flags: 'A', ack: 1001, id: 7 };
const datagramAnswer = { src: NODE, sport: 5353, dst: CLIENT, dport: 5000, id: 0 };
const asVip = { src: '10.96.0.10', sport: 80 };
const asDnsVip = { src: '10.96.0.10', sport: 53 };
/** TCP and IP, no options. */
const HEADERS = 40;

function arrives(bytes: Uint8Array, vipPort = 80): MemoryPacket {
  const options = [dsrOption('10.96.0.10', vipPort)];
  return { bytes: geneve({ options }, bytes), tunnel: { peer: addressWord(GATEWAY), tos: 0 } };
}

/** A node with a TCP connection, whose backend has sent 20000 bytes from 5001 on, and a UDP flow. */
function node(device = new MemoryDevice()): TestPipeline {
  const pipeline = new TestPipeline(CONFIG, { device });
  pipeline.send(arrives(tcp({ ...toBackend, flags: 'S', seq: 1000, win: 60000 })));
  pipeline.send(tcp({ ...answer, flags: 'SA', seq: 5000, win: 60000 }));
  pipeline.send(arrives(tcp({ ...toBackend, flags: 'A', seq: 1001, ack: 5001, win: 60000 })));
  pipeline.send(partial(tcp({ ...answer, seq: 5001, payload: 20000 }), 1460));
  pipeline.send(arrives(udp({ ...toBackend, sport: 5000, dport: 5353, payload: 5 }), 53));
  return pipeline;
}

interface Complaint {
  readonly mtu?: number;
  readonly code?: number;
  readonly seq?: number;
  readonly payload?: number;
  readonly client?: string;
}

/** What a router says of a segment, as the gateway sends it on. */
function complaint({
  mtu = 1400,
  code = 4,
  seq = 5001,
  payload = 1460,
  client = CLIENT,
}: Complaint = {}): MemoryPacket {
  const quoted = tcp({ ...answer, dst: client, seq, payload });
  return arrives(icmpError({ src: '10.1.0.1', dst: NODE, type: 3, code, mtu, quoted, quoteBytes: 28 }));
}

function same(t: Test, { out }: Outcome, expected: readonly MemoryPacket[], name = 'what leaves'): void {
  for (const { bytes, vnet } of out) t.same(verifyChecksums(bytes, vnet), []);
  t.same(out, expected, name);
}

const segment = { ...answer, seq: 25001, payload: 1460 };

t.test('segments and super-packets of TCP are cut by the kernel to what fits', async (t) => {
  const pipeline = node();
  const untouched = { bytes: tcp({ ...segment, ...asVip }) };
  same(t, pipeline.send(tcp(segment)), [untouched], 'before anybody complains');
  t.match(pipeline.send(complaint()), { verdict: 'forward' }, 'the backend is told in any case');

  const cut = partial(tcp({ ...segment, ...asVip }), 1400 - HEADERS);
  same(t, pipeline.send(tcp(segment)), [cut]);
  same(t, pipeline.send(partial(tcp(segment))), [cut], 'whatever form its checksum had');
  const fits = { ...segment, payload: 1400 - HEADERS };
  same(t, pipeline.send(tcp(fits)), [{ bytes: tcp({ ...fits, ...asVip }) }], 'to the byte');
  same(t, pipeline.send(partial(tcp(fits))), [partial(tcp({ ...fits, ...asVip }))]);
  const many = { ...segment, payload: 14600 };
  same(t, pipeline.send(partial(tcp(many), 1460)), [partial(tcp({ ...many, ...asVip }), 1400 - HEADERS)]);
  same(t, pipeline.send(partial(tcp(many), 1000)), [partial(tcp({ ...many, ...asVip }), 1000)], 'never longer');
  const timestamps = { timestamps: [1, 2] as [number, number] };
  const withOptions = partial(tcp({ ...many, options: timestamps }), 1448);
  const shorter = partial(tcp({ ...many, ...asVip, options: timestamps }), 1400 - HEADERS - 12);
  same(t, pipeline.send(withOptions), [shorter], 'options are repeated in every segment');

  const direct = { ...segment, sport: 22 };
  same(t, pipeline.send(tcp(direct)), [{ bytes: tcp(direct) }], 'direct connections are the kernel’s affair');
  const [first] = fragment(udp({ ...datagramAnswer, df: false, payload: 3000 }), 1480) as [Uint8Array];
  t.equal(pipeline.send(first).out[0]!.vnet, undefined, 'nor are fragments touched');

  pipeline.send(complaint({ mtu: 1300 }));
  same(
    t,
    pipeline.send(tcp(segment)),
    [partial(tcp({ ...segment, ...asVip }), 1300 - HEADERS)],
    'a narrower one counts',
  );
  pipeline.send(complaint({ mtu: 1400 }));
  same(
    t,
    pipeline.send(tcp(segment)),
    [partial(tcp({ ...segment, ...asVip }), 1300 - HEADERS)],
    'a wider one does not',
  );
  pipeline.nowMs += 599_000;
  t.ok(pipeline.send(tcp(segment)).out[0]!.vnet);
  pipeline.nowMs += 2000;
  same(t, pipeline.send(tcp(segment)), [untouched], 'after ten minutes the path is tried again');
  pipeline.send(complaint({ mtu: 68 }));
  same(
    t,
    pipeline.send(tcp(segment)),
    [partial(tcp({ ...segment, ...asVip }), 576 - HEADERS)],
    'and never less than 576',
  );
  t.equal(pipeline.device.slotsHeld, 0);
});

t.test('who is not believed', async (t) => {
  for (const [name, fields] of [
    ['another error', { code: 1 }],
    ['about what would have fitted', { payload: 1300 }],
    ['about what was acknowledged', { seq: 5000 }],
    ['about what was never sent', { seq: 25001 }],
    ['about a client without an entry', { client: '10.1.0.3' }],
  ] as const) {
    const pipeline = node();
    pipeline.send(complaint(fields));
    t.equal(pipeline.send(tcp(segment)).out[0]!.vnet, undefined, name);
  }
  const pipeline = node();
  pipeline.send(complaint({ seq: 25000 }));
  t.ok(pipeline.send(tcp(segment)).out[0]!.vnet, 'the last byte under way');
});

t.test('datagrams lose DF and get an identification of their own', async (t) => {
  const pipeline = node();
  const quoted = udp({ ...datagramAnswer, payload: 1400 });
  const error = icmpError({ src: '10.1.0.1', dst: NODE, type: 3, code: 4, mtu: 1400, quoted, quoteBytes: 28 });
  pipeline.send(arrives(error, 53));
  const large = { ...datagramAnswer, payload: 1400 };
  const seen = new Set<number>();
  for (let i = 0; i < 4; i++) {
    const outcome = pipeline.send(udp({ ...large, df: true }));
    const { bytes } = outcome.out[0]!;
    const id = (bytes[4]! << 8) | bytes[5]!;
    same(t, outcome, [{ bytes: udp({ ...large, ...asDnsVip, df: false, id }) }]);
    seen.add(id);
  }
  t.equal(seen.size, 4);
  same(t, pipeline.send(udp({ ...large, df: false, id: 9 })), [
    { bytes: udp({ ...large, ...asDnsVip, df: false, id: 9 }) },
  ]);
  const fits = { ...datagramAnswer, df: true, payload: 1400 - 28 };
  same(t, pipeline.send(udp(fits)), [{ bytes: udp({ ...fits, ...asDnsVip }) }]);
  const [several] = pipeline.send(partial(udp({ ...large, df: true, payload: 14000 }), 1400)).out;
  t.equal((several!.bytes[6]! << 8) | several!.bytes[7]!, 0, 'also of a super-packet of such datagrams');
  t.same(verifyChecksums(several!.bytes, several!.vnet), []);
});

t.test('a device without vnet headers: the kernel makes fragments', async (t) => {
  class Plain extends MemoryDevice {
    override readonly features = { engine: 'memory', vnetHeader: false, udpSegmentation: false };
  }
  const pipeline = node(new Plain());
  pipeline.send(complaint());
  const outcome = pipeline.send(tcp({ ...segment, df: true }));
  const { bytes, vnet } = outcome.out[0]!;
  t.equal(vnet, undefined);
  same(t, outcome, [{ bytes: tcp({ ...segment, ...asVip, df: false, id: (bytes[4]! << 8) | bytes[5]! }) }]);
});
