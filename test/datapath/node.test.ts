import t, { type Test } from 'tap';
import { type FlowJson, flowJson, listFlows } from '../../lib/control/flows.js';
import { MemoryDevice, type MemoryPacket } from '../../lib/io/memory-device.js';
import { dsrOption, type GeneveFields, geneve, tunnelled } from '../fixtures/geneve.js';
import { describe } from '../fixtures/packet-text.js';
import {
  addressWord,
  echoRequest,
  fragment,
  icmpError,
  ip,
  partial,
  type TcpFields,
  tcp,
  type UdpFields,
  udp,
  verifyChecksums,
} from '../fixtures/packets.js';
import { type Outcome, type PipelineOptions, TestPipeline } from '../support/pipeline.js';

const GATEWAY = '192.0.2.1';
const NODE = '10.2.0.11';
const VIP = '10.96.0.10';
const CONFIG = `
role: node
tunnel: { address: ${NODE} }
`;
const SERVICES = `
services:
  - name: web
    address: ${VIP}
    port: 80
    mode: dsr
    backends:
      - { name: b1, address: ${NODE}, port: 8080 }
      - { name: b2, address: 10.2.0.12, port: 8080 }
  - { name: dns, address: ${VIP}, port: 53, protocol: udp, mode: dsr, backends: [{ name: b1, address: ${NODE}, port: 5353 }] }
`;

/** As the gateway sends a packet of the client on. */
const toBackend = { src: '10.1.0.2', sport: 40000, dst: NODE, dport: 8080 };
/** The backend's answer. */
const fromBackend = { src: NODE, sport: 8080, dst: '10.1.0.2', dport: 40000 };
/** What the client is to see. */
const fromVip = { ...fromBackend, src: VIP, sport: 80 };
const query = { src: '10.1.0.2', sport: 5000, dst: NODE, dport: 5353 };

function node(extra = SERVICES, options: PipelineOptions = {}): TestPipeline {
  return new TestPipeline(CONFIG + extra, options);
}

const NAMED: GeneveFields = { options: [dsrOption(VIP, 80)] };
const DNS: GeneveFields = { options: [dsrOption(VIP, 53)] };

/** A datagram as the socket delivers it. */
function datagram(inner: Uint8Array, fields: GeneveFields = NAMED, { peer = GATEWAY, tos = 0 } = {}): MemoryPacket {
  return { bytes: geneve(fields, inner), tunnel: { peer: addressWord(peer), tos } };
}

/** Several of one size, joined by the kernel; the last may be shorter. */
function joined(inners: readonly Uint8Array[], fields: GeneveFields = NAMED): MemoryPacket {
  const payloads = inners.map((inner) => geneve(fields, inner));
  return {
    bytes: Buffer.concat(payloads),
    tunnel: { peer: addressWord(GATEWAY), datagramBytes: payloads[0]!.length },
  };
}

function sent({ out }: Outcome): string[] {
  return out.map(({ bytes, vnet }) => describe(bytes) + (vnet ? ` vnet=${Buffer.from(vnet).toString('hex')}` : ''));
}

/** Everything that was sent is sound, and just this. */
function same(t: Test, outcome: Outcome, wanted: readonly (Uint8Array | MemoryPacket)[], name = 'as sent'): void {
  for (const { bytes, vnet } of outcome.out) t.same(verifyChecksums(bytes, vnet), [], `${describe(bytes)} is sound`);
  const packets = wanted.map((packet) => (packet instanceof Uint8Array ? { bytes: packet } : packet));
  t.same(sent(outcome), sent({ ...outcome, out: packets }), name);
}

function flows(pipeline: TestPipeline): FlowJson[] {
  return [...listFlows([pipeline.tcp, pipeline.any], pipeline.identities, pipeline.nowMs)].map(flowJson);
}

/** A connection of the client, from its SYN to its first ACK. */
function establish(pipeline: TestPipeline, fields = NAMED, client: Partial<TcpFields> = {}): void {
  const reverse = client.sport === undefined ? {} : { dport: client.sport };
  pipeline.send(datagram(tcp({ ...toBackend, ...client, flags: 'S', seq: 1000 }), fields));
  pipeline.send(tcp({ ...fromBackend, ...reverse, flags: 'SA', seq: 5000, ack: 1001 }));
  const { state } = pipeline.send(datagram(tcp({ ...toBackend, ...client, flags: 'A', seq: 1001, ack: 5001 }), fields));
  if (state !== 'ESTABLISHED') throw new Error(`state is ${state}`);
}

t.test('a connection: out of the tunnel, and answered from the VIP', async (t) => {
  for (const [name, fields] of [
    ['frames', NAMED],
    ['packets', { ...NAMED, protocol: 0x0800 }],
  ] as const) {
    for (const extra of [SERVICES, '']) {
      const pipeline = node(extra);
      const names = extra === '' ? {} : { service: 'web', backend: 'b1' };
      const syn = tcp({ ...toBackend, flags: 'S', seq: 1000, options: { mss: 1460, scale: 7 }, ttl: 63 });
      const first = pipeline.send(datagram(syn, fields));
      t.match(first, { verdict: 'forward', reason: '', direction: 'original', state: 'SYN_SENT', ...names }, name);
      same(t, first, [syn], 'the inner packet, unchanged');

      const options = { mss: 1460, sackPermitted: true, scale: 7 };
      const second = pipeline.send(tcp({ ...fromBackend, flags: 'SA', seq: 5000, ack: 1001, options }));
      t.match(second, { verdict: 'forward', direction: 'reply', state: 'SYN_RECV', ...names });
      same(t, second, [
        tcp({ ...fromVip, flags: 'SA', seq: 5000, ack: 1001, options: { ...options, mss: 1500 - 62 - 40 } }),
      ]);

      const ack = tcp({ ...toBackend, flags: 'A', seq: 1001, ack: 5001 });
      t.match(pipeline.send(datagram(ack, fields)), { verdict: 'forward', state: 'ESTABLISHED' });
      const data = pipeline.send(tcp({ ...fromBackend, flags: 'PA', seq: 5001, ack: 1001, payload: 700 }));
      t.match(data, { verdict: 'forward', direction: 'reply', state: 'ESTABLISHED' });
      same(t, data, [tcp({ ...fromVip, flags: 'PA', seq: 5001, ack: 1001, payload: 700 })]);

      t.match(flows(pipeline), [
        {
          proto: 'tcp',
          type: 'OUT',
          client: '10.1.0.2:40000',
          vip: `${VIP}:80`,
          backend: `${NODE}:8080`,
          service: extra === '' ? '' : 'web',
          state: 'ESTABLISHED',
          flags: ['SeenNonSyn', 'DSR'],
          expiresIn: 8000,
          packets: { original: 2, reply: 2 },
        },
      ]);
      t.equal(pipeline.device.slotsHeld, 0);
    }
  }
});

t.test('the same as a capture has it: UDP to the end of the tunnel', async (t) => {
  const pipeline = node();
  const syn = tcp({ ...toBackend, flags: 'S', seq: 1000 });
  const outer = { src: GATEWAY, dst: NODE, sport: 50000 };
  const outcome = pipeline.send(tunnelled(outer, geneve(NAMED, syn)));
  t.match(outcome, { verdict: 'forward', direction: 'original', service: 'web', backend: 'b1', state: 'SYN_SENT' });
  same(t, outcome, [syn]);
  t.match(pipeline.send(tunnelled(outer, geneve(NAMED, syn), 6082)), { verdict: 'pass' }, 'another port is not it');
  t.match(pipeline.send(tunnelled({ ...outer, dst: '10.2.0.12' }, geneve(NAMED, syn))), { verdict: 'pass' });
  const pieces = fragment(udp({ ...outer, dport: 6081, id: 7, payload: 2000 }), 1000);
  for (const piece of pieces) {
    t.match(pipeline.send(piece), { verdict: 'drop', reason: 'geneve-malformed' }, 'nothing is reassembled');
  }
  t.equal(pipeline.device.slotsHeld, 0);
});

t.test('datagrams of UDP, with a checksum, without, and partial', async (t) => {
  const pipeline = node();
  for (const checksum of [undefined, 0]) {
    const request = udp({ ...query, payload: 30, ...(checksum === undefined ? {} : { checksum }) });
    const outcome = pipeline.send(datagram(request, DNS));
    t.match(outcome, { verdict: 'forward', service: 'dns', backend: 'b1' });
    same(t, outcome, [request]);
  }
  const answer: UdpFields = { src: NODE, sport: 5353, dst: '10.1.0.2', dport: 5000, payload: 200 };
  const translated = { ...answer, src: VIP, sport: 53 };
  same(t, pipeline.send(udp(answer)), [udp(translated)]);
  same(t, pipeline.send(udp({ ...answer, checksum: 0 })), [udp({ ...translated, checksum: 0 })], 'none stays none');
  same(t, pipeline.send(partial(udp(answer))), [partial(udp(translated))]);
  same(t, pipeline.send(partial(udp({ ...answer, payload: 3000 }), 1000)), [
    partial(udp({ ...translated, payload: 3000 }), 1000),
  ]);
  t.match(flows(pipeline), [{ proto: 'udp', state: 'REPLIED', flags: ['DSR'], packets: { original: 2, reply: 4 } }]);
});

t.test('answers of a local process: partial checksums and super-packets', async (t) => {
  const pipeline = node();
  pipeline.send(datagram(tcp({ ...toBackend, flags: 'S', seq: 1000 })));
  const synAck = { flags: 'SA', seq: 5000, ack: 1001, options: { mss: 1460 } };
  same(t, pipeline.send(partial(tcp({ ...fromBackend, ...synAck }))), [
    partial(tcp({ ...fromVip, ...synAck, options: { mss: 1398 } })),
  ]);
  pipeline.send(datagram(tcp({ ...toBackend, flags: 'A', seq: 1001, ack: 5001 })));
  const bulk = { flags: 'PA', seq: 5001, ack: 1001, payload: 60_000 };
  same(t, pipeline.send(partial(tcp({ ...fromBackend, ...bulk }), 1398)), [
    partial(tcp({ ...fromVip, ...bulk }), 1398),
  ]);
  t.match(flows(pipeline), [{ packets: { original: 2, reply: 2 }, bytes: { reply: 44 + 60_040 } }]);
});

t.test('the MSS is lowered to what the tunnel leaves', async (t) => {
  const rows: [config: string, mss: number, expected: number][] = [
    ['tunnel: { address: 10.2.0.11 }', 1460, 1398],
    ['tunnel: { address: 10.2.0.11, inner: ip }', 1460, 1412],
    ['tunnel: { address: 10.2.0.11, clampMss: false }', 1460, 1460],
    ['tunnel: { address: 10.2.0.11 }\ndevice: { mtu: 9000 }', 8960, 8898],
    ['tunnel: { address: 10.2.0.11 }\ndevice: { mtu: 9000 }', 1460, 1460],
    ['tunnel: { address: 10.2.0.11 }\ndevice: { mtu: 576 }', 1460, 474],
  ];
  for (const [config, mss, expected] of rows) {
    const pipeline = new TestPipeline(`role: node\n${config}\n`);
    // Only what the backend tells: the client's own SYN is the gateway's to look after.
    const syn = tcp({ ...toBackend, flags: 'S', seq: 1, options: { mss } });
    same(t, pipeline.send(datagram(syn)), [syn]);
    const synAck: TcpFields = { ...fromBackend, flags: 'SA', seq: 9, ack: 2 };
    const odd = (value: number) => Uint8Array.of(1, 2, 4, value >> 8, value & 255, 1, 1, 0);
    for (const wrap of [(packet: Uint8Array) => ({ bytes: packet }), partial]) {
      const out = pipeline.send(wrap(tcp({ ...synAck, options: odd(mss) })));
      same(t, out, [wrap(tcp({ ...synAck, src: VIP, sport: 80, options: odd(expected) }))], config);
    }
    const broken = { ...synAck, options: Uint8Array.of(1, 1, 1, 2) };
    same(t, pipeline.send(tcp(broken)), [tcp({ ...broken, src: VIP, sport: 80 })], 'an option without its length');
  }
});

t.test('without an option', async (t) => {
  const pipeline = node();
  const plain: GeneveFields = {};
  const lost = tcp({ ...toBackend, flags: 'PA', seq: 1, ack: 1, payload: 10 });
  const outcome = pipeline.send(datagram(lost, plain));
  t.match(outcome, { verdict: 'pass', reason: 'not-tracked' }, 'and without an entry: delivered as it is');
  same(t, outcome, [lost]);
  t.equal(pipeline.tcp.count, 0);
  const answer = tcp({ ...fromBackend, flags: 'A', seq: 1, ack: 11 });
  const direct = pipeline.send(answer);
  t.match(direct, { verdict: 'pass', reason: 'not-tracked' });
  same(t, direct, [answer], 'its answer has the address of the backend');

  establish(pipeline);
  const data = tcp({ ...toBackend, flags: 'PA', seq: 1001, ack: 5001, payload: 100 });
  const tracked = pipeline.send(datagram(data, plain));
  t.match(tracked, { verdict: 'forward', direction: 'original', service: 'web', state: 'ESTABLISHED' });
  same(t, tracked, [data], 'with an entry it is one of its packets');

  pipeline.send(datagram(tcp({ ...toBackend, flags: 'FA', seq: 1101, ack: 5001 }), plain));
  pipeline.send(tcp({ ...fromBackend, flags: 'FA', seq: 5001, ack: 1102 }));
  t.match(flows(pipeline), [{ state: 'CLOSING' }]);
  t.match(
    pipeline.send(datagram(tcp({ ...toBackend, flags: 'S', seq: 9000 }), plain)),
    { verdict: 'forward', state: 'SYN_SENT', service: 'web' },
    'a SYN begins anew what is closing, for the VIP it had',
  );
  t.match(flows(pipeline), [{ vip: `${VIP}:80`, packets: { original: 1, reply: 0 } }]);
});

t.test('options of others, and the VNI, do not matter', async (t) => {
  const pipeline = node();
  const foreign = { class: 0x0102, type: 0x01, data: new Uint8Array(16) };
  const empty = { class: 0xffff, type: 0x7f, data: new Uint8Array(0) };
  const syn = tcp({ ...toBackend, flags: 'S', seq: 1 });
  for (const options of [
    [foreign, dsrOption(VIP, 80)],
    [dsrOption(VIP, 80), foreign, empty],
  ]) {
    const outcome = pipeline.send(datagram(syn, { options, vni: 77 }));
    t.match(outcome, { verdict: 'forward', service: 'web' });
    same(t, outcome, [syn]);
  }
});

t.test('any packet of the client brings back what a lost process knew', async (t) => {
  const pipeline = node();
  const data = tcp({ ...toBackend, flags: 'PA', seq: 500, ack: 900, payload: 10 });
  t.match(pipeline.send(datagram(data)), { verdict: 'forward', direction: 'original', state: 'SYN_SENT' });
  const answer = { flags: 'A', seq: 900, ack: 510 };
  const outcome = pipeline.send(tcp({ ...fromBackend, ...answer }));
  t.match(outcome, { verdict: 'forward', state: 'ESTABLISHED' });
  same(t, outcome, [tcp({ ...fromVip, ...answer })]);

  const gone = node();
  const rst = tcp({ ...toBackend, flags: 'R', seq: 500 });
  const told = gone.send(datagram(rst));
  t.match(told, { verdict: 'forward', service: 'web', backend: 'b1' }, 'an RST is told to the backend');
  same(t, told, [rst]);
  t.equal(gone.tcp.count, 0, 'and leaves nothing behind');
});

const OTHER: GeneveFields = { options: [dsrOption('10.96.0.11', 80)] };
const OTHER_PORT: GeneveFields = { options: [dsrOption(VIP, 81)] };

t.test('one client port, two VIPs', async (t) => {
  const pipeline = node('');
  establish(pipeline);
  const second = tcp({ ...toBackend, dport: 8081, flags: 'S', seq: 1 });
  t.match(pipeline.send(datagram(second, OTHER)), { verdict: 'forward' }, 'with different backends both work');
  same(t, pipeline.send(tcp({ ...fromBackend, sport: 8081, flags: 'SA', seq: 1, ack: 2 })), [
    tcp({ ...fromBackend, src: '10.96.0.11', sport: 80, flags: 'SA', seq: 1, ack: 2 }),
  ]);
  same(t, pipeline.send(tcp({ ...fromBackend, flags: 'A', seq: 5001, ack: 1001 })), [
    tcp({ ...fromVip, flags: 'A', seq: 5001, ack: 1001 }),
  ]);

  for (const [name, fields] of [
    ['another VIP', OTHER],
    ['another port of the VIP', OTHER_PORT],
  ] as const) {
    for (const flags of ['S', 'A', 'R']) {
      const refused = pipeline.send(datagram(tcp({ ...toBackend, flags, seq: 7 }), fields));
      t.match(refused, { verdict: 'drop', reason: 'reply-tuple-clash', out: [] }, `${name} and the same backend`);
    }
  }
  t.match(pipeline.send(datagram(tcp({ ...toBackend, flags: 'A', seq: 1001, ack: 5001 }))), { verdict: 'forward' });
  t.equal(pipeline.tcp.count, 2);
});

t.test('an entry that is idle or closing gives way', async (t) => {
  const syn = datagram(tcp({ ...toBackend, flags: 'S', seq: 7 }), OTHER);
  const idle = node('');
  establish(idle);
  idle.nowMs += 59_000;
  t.match(idle.send(syn), { verdict: 'drop', reason: 'reply-tuple-clash' }, 'idle for 59 s');
  idle.send(tcp({ ...fromBackend, flags: 'A', seq: 5001, ack: 1001 }));
  idle.nowMs += 59_000;
  t.match(idle.send(syn), { verdict: 'drop' }, 'a packet of the backend counts');
  idle.nowMs += 1000;
  t.match(idle.send(syn), { verdict: 'forward', state: 'SYN_SENT' }, 'idle for 60 s');
  t.match(flows(idle), [{ vip: '10.96.0.11:80', packets: { original: 1, reply: 0 } }]);
  same(t, idle.send(tcp({ ...fromBackend, flags: 'SA', seq: 1, ack: 8 })), [
    tcp({ ...fromVip, src: '10.96.0.11', flags: 'SA', seq: 1, ack: 8 }),
  ]);

  const closing = node('');
  establish(closing);
  closing.send(datagram(tcp({ ...toBackend, flags: 'FA', seq: 1001, ack: 5001 })));
  t.match(closing.send(syn), { verdict: 'drop', reason: 'reply-tuple-clash' }, 'one FIN is not enough');
  closing.send(tcp({ ...fromBackend, flags: 'FA', seq: 5001, ack: 1002 }));
  t.match(closing.send(datagram(tcp({ ...toBackend, flags: 'A', seq: 1, ack: 1 }), OTHER)), { verdict: 'forward' });
  t.match(flows(closing), [{ vip: '10.96.0.11:80', state: 'SYN_SENT' }], 'both are');

  const reset = node('');
  establish(reset);
  reset.send(tcp({ ...fromBackend, flags: 'R', seq: 5001 }));
  t.match(reset.send(syn), { verdict: 'forward', state: 'SYN_SENT' }, 'and so is an RST');

  const stray = node('');
  establish(stray);
  stray.nowMs += 60_000;
  t.match(stray.send(datagram(tcp({ ...toBackend, flags: 'R', seq: 7 }), OTHER)), { verdict: 'forward' });
  t.match(flows(stray), [{ vip: `${VIP}:80`, state: 'ESTABLISHED' }], 'but not to an RST, which begins nothing');
  same(t, stray.send(tcp({ ...fromBackend, flags: 'A', seq: 5001, ack: 1001 })), [
    tcp({ ...fromVip, flags: 'A', seq: 5001, ack: 1001 }),
  ]);

  const datagrams = node('');
  datagrams.send(datagram(udp({ ...query, payload: 5 }), DNS));
  const other = datagram(udp({ ...query, payload: 6 }), OTHER);
  t.match(datagrams.send(other), { verdict: 'drop', reason: 'reply-tuple-clash' });
  datagrams.nowMs += 60_000;
  t.match(datagrams.send(other), { verdict: 'forward', state: 'UNREPLIED' });
});

t.test('a client that the gateway sends to another backend now', async (t) => {
  const pipeline = node('');
  establish(pipeline);
  const moved = tcp({ ...toBackend, dport: 8081, flags: 'A', seq: 1001, ack: 5001 });
  t.match(pipeline.send(datagram(moved)), { verdict: 'forward' });
  t.match(flows(pipeline), [{ backend: `${NODE}:8081` }], 'has one connection from a port to a VIP');
  t.match(pipeline.send(tcp({ ...fromBackend, flags: 'A', seq: 5001, ack: 1001 })), { verdict: 'pass' });
});

t.test('entries expire, and tables are full', async (t) => {
  const pipeline = node('', { tcpEntries: 2, anyEntries: 1 });
  establish(pipeline);
  establish(pipeline, NAMED, { sport: 40001 });
  const third = tcp({ ...toBackend, sport: 40002, flags: 'S', seq: 1 });
  t.match(pipeline.send(datagram(third)), { verdict: 'drop', reason: 'table-full', out: [] });
  pipeline.nowMs += 8_000_000;
  t.match(pipeline.send(tcp({ ...fromBackend, flags: 'A', seq: 5001, ack: 1001 })), { verdict: 'pass' });
  t.match(pipeline.send(datagram(third)), { verdict: 'forward', state: 'SYN_SENT' });
  t.match(pipeline.send(datagram(tcp({ ...toBackend, flags: 'A', seq: 1001 }), {})), { verdict: 'pass' });
});

t.test('ICMP errors', async (t) => {
  const pipeline = node();
  establish(pipeline);
  pipeline.send(datagram(udp({ ...query, payload: 30 }), DNS));
  const asSent = udp({ src: '10.1.0.2', sport: 5000, dst: VIP, dport: 53, payload: 30 });
  const unreachable = { dst: '10.1.0.2', type: 3, code: 3, quoteBytes: 28 };
  const outcome = pipeline.send(icmpError({ src: NODE, ...unreachable, quoted: udp({ ...query, payload: 30 }) }));
  t.match(outcome, { verdict: 'forward', direction: 'reply', service: 'dns' });
  same(t, outcome, [icmpError({ src: VIP, ...unreachable, quoted: asSent })], 'of the backend: from the VIP');
  const router = { ...unreachable, src: '10.2.0.1', type: 11, code: 0 };
  same(t, pipeline.send(icmpError({ ...router, quoted: udp({ ...query, payload: 30 }) })), [
    icmpError({ ...router, quoted: asSent }),
  ]);
  t.match(flows(pipeline)[1], { packets: { original: 1, reply: 0 } }, 'they count for nothing');

  const tooBig = icmpError({
    src: '10.1.0.1',
    dst: NODE,
    type: 3,
    code: 4,
    mtu: 1400,
    quoted: tcp({ ...fromBackend, flags: 'A', seq: 5001, payload: 1400 }),
    quoteBytes: 28,
  });
  for (const fields of [NAMED, {}]) {
    const inner = pipeline.send(datagram(tooBig, fields));
    t.match(inner, { verdict: 'forward', direction: 'original', service: 'web' }, 'translated by the gateway already');
    same(t, inner, [tooBig]);
  }
  const foreign = icmpError({ ...unreachable, src: '10.1.0.1', dst: NODE, quoted: udp({ ...query, src: '1.2.3.4' }) });
  same(t, pipeline.send(datagram(foreign)), [foreign]);
  t.match(pipeline.send(datagram(foreign)), { verdict: 'pass' });
  const wrong = foreign.slice();
  wrong[40]! ^= 1;
  t.match(pipeline.send(wrong), { verdict: 'drop', reason: 'icmp-malformed' });
});

t.test('what is not of a flow', async (t) => {
  const pipeline = node();
  const echo = echoRequest({ src: '10.1.0.2', dst: NODE, id: 1, payload: 56 });
  const esp = ip({ src: '10.1.0.2', dst: NODE }, 50, new Uint8Array(40));
  for (const packet of [echo, esp]) {
    same(t, pipeline.send(datagram(packet)), [packet], 'of the tunnel');
    same(t, pipeline.send(packet), [packet], 'of the device');
  }
  const toVip = echoRequest({ src: NODE, dst: VIP, id: 1 });
  same(t, pipeline.send(toVip), [toVip], 'a node does not answer for a VIP');
  const syn = tcp({ src: NODE, sport: 50000, dst: VIP, dport: 80, flags: 'S' });
  t.match(pipeline.send(syn), { verdict: 'pass', reason: 'not-tracked' }, 'nor balances');
  const strict = node(`network: { untracked: drop }\n${SERVICES}`);
  const stray = tcp({ ...fromBackend, flags: 'A', seq: 1 });
  t.match(strict.send(stray), { verdict: 'drop', reason: 'untracked-reply' });
  t.match(strict.send(tcp({ ...fromBackend, sport: 22, flags: 'A' })), { verdict: 'pass' }, 'of a backend alone');
});

t.test('fragments follow their first one, in both directions', async (t) => {
  const pipeline = node();
  const request = fragment(udp({ ...query, id: 7, payload: 4000 }), 1400);
  for (const piece of request) {
    const outcome = pipeline.send(datagram(piece, DNS));
    t.match(outcome, { verdict: 'forward', direction: 'original', service: 'dns' });
    same(t, outcome, [piece]);
  }
  const answer: UdpFields = { src: NODE, sport: 5353, dst: '10.1.0.2', dport: 5000, id: 9, payload: 4000 };
  const [first, ...rest] = fragment(udp(answer), 1400);
  for (const piece of rest) t.match(pipeline.send(piece), { verdict: 'hold', out: [] });
  const translated = fragment(udp({ ...answer, src: VIP, sport: 53 }), 1400);
  same(t, pipeline.send(first!), translated, 'those that come too early wait');
  t.match(flows(pipeline), [{ packets: { original: 3, reply: 3 } }]);
  const strays = fragment(udp({ ...answer, sport: 99, id: 10 }), 1400);
  for (const piece of strays) same(t, pipeline.send(piece), [piece], 'of a direct answer: as they came');
  const refused = fragment(udp({ ...query, id: 11, payload: 4000 }), 1400);
  for (const piece of refused)
    t.match(pipeline.send(datagram(piece, OTHER)), { verdict: 'drop', reason: 'reply-tuple-clash' });
  t.equal(pipeline.device.slotsHeld, 0);
});

t.test('answers of several backends behind one VIP are kept apart when they come in fragments', async (t) => {
  const pipeline = node('');
  const ids = ['10.3.0.1', '10.3.0.2'].map((backend, i) => {
    const sport = 5000 + i;
    pipeline.send(datagram(udp({ ...query, sport, dst: backend, payload: 5 }), DNS));
    const answer = udp({ src: backend, sport: 5353, dst: query.src, dport: sport, id: 9, payload: 3000 });
    const pieces = fragment(answer, 1480).flatMap((piece) => pipeline.send(piece).out.map(({ bytes }) => bytes));
    t.equal(pieces.length, 3);
    t.same(
      pieces.flatMap((piece) => verifyChecksums(piece)),
      [],
    );
    return pieces.map((piece) => (piece[4]! << 8) | piece[5]!);
  });
  t.same(ids[0], [9, 9, 9]);
  t.not(ids[1]![0], 9);
  t.equal(new Set(ids[1]).size, 1);
});

t.test('what is refused at the end of the tunnel', async (t) => {
  const syn = tcp({ ...toBackend, flags: 'S', seq: 1 });
  const good = geneve(NAMED, syn);
  const critical = { class: 0x0102, type: 0x81, data: new Uint8Array(4) };
  const edited = (edit: (bytes: Uint8Array) => void, from = syn): Uint8Array => {
    const bytes = Uint8Array.from(from);
    edit(bytes);
    return bytes;
  };
  const nested = (dst: string): Uint8Array => tunnelled({ src: GATEWAY, dst, sport: 50000 }, good);
  const rows: [name: string, payload: Uint8Array, reason: string][] = [
    ['nothing', new Uint8Array(0), 'geneve-malformed'],
    ['one byte', good.subarray(0, 1), 'geneve-malformed'],
    ['half a header', good.subarray(0, 7), 'geneve-malformed'],
    ['a header alone', geneve({}, new Uint8Array(0)).subarray(0, 8), 'geneve-malformed'],
    ['another version', geneve({ ...NAMED, version: 1 }, syn), 'geneve-malformed'],
    ['a control packet', geneve({ ...NAMED, oam: true }, syn), 'geneve-malformed'],
    ['options past the end', geneve({ ...NAMED, optionWords: 63 }, syn), 'geneve-malformed'],
    ['an option past the options', geneve({ ...NAMED, optionWords: 2 }, syn), 'geneve-malformed'],
    ['an unknown critical option', geneve({ options: [dsrOption(VIP, 80), critical] }, syn), 'geneve-critical-option'],
    ['neither frame nor packet', geneve({ ...NAMED, protocol: 0x86dd }, syn), 'geneve-malformed'],
    ['a frame of something else', geneve({ ...NAMED, ethertype: 0x0806 }, syn), 'geneve-malformed'],
    ['a packet cut short', good.subarray(0, good.length - 1), 'malformed'],
    ['an inner header cut short', geneve(NAMED, syn.subarray(0, 19)), 'geneve-malformed'],
    [
      'IPv6 inside',
      geneve(
        NAMED,
        edited((bytes) => (bytes[0] = 0x65)),
      ),
      'unsupported-protocol',
    ],
    [
      'a wrong header checksum inside',
      geneve(
        NAMED,
        edited((bytes) => (bytes[8]! ^= 1)),
      ),
      'bad-checksum-header',
    ],
    [
      'a TCP header beyond the packet',
      geneve(
        NAMED,
        edited((bytes) => (bytes[32] = 0xf0)),
      ),
      'malformed',
    ],
    ['a tunnel inside', geneve(NAMED, nested(NODE)), 'geneve-malformed'],
    ['a tunnel to another node inside', geneve(NAMED, nested('10.2.0.12')), 'geneve-malformed'],
  ];
  const pipeline = node();
  for (const [name, bytes, reason] of rows) {
    const outcome = pipeline.send({ bytes, tunnel: { peer: addressWord(GATEWAY) } });
    t.match(outcome, { verdict: 'drop', reason, out: [] }, name);
    const outer = { src: GATEWAY, dst: NODE, sport: 50000 };
    t.match(pipeline.send(tunnelled(outer, bytes)), { verdict: 'drop', reason, out: [] }, `${name}, in a capture`);
  }
  t.equal(pipeline.tcp.count + pipeline.any.count, 0);
  t.equal(pipeline.device.slotsHeld, 0);
});

t.test('padding behind the packet is not delivered', async (t) => {
  const pipeline = node();
  const syn = tcp({ ...toBackend, flags: 'S', seq: 1 });
  same(t, pipeline.send(datagram(Buffer.concat([syn, new Uint8Array(6)]))), [syn]);
});

t.test('peers', async (t) => {
  const pipeline = new TestPipeline(
    'role: node\ntunnel: { address: 10.2.0.11, peers: [192.0.2.1, 198.51.100.0/24] }\n',
  );
  const syn = tcp({ ...toBackend, flags: 'S', seq: 1 });
  for (const [peer, verdict] of [
    ['192.0.2.1', 'forward'],
    ['198.51.100.200', 'forward'],
    ['192.0.2.2', 'drop'],
    ['10.1.0.2', 'drop'],
  ] as const) {
    const reason = verdict === 'drop' ? 'not-in-source-range' : '';
    t.match(pipeline.send(datagram(syn, NAMED, { peer })), { verdict, reason }, peer);
    const outer = { src: peer, dst: NODE, sport: 50000 };
    t.match(pipeline.send(tunnelled(outer, geneve(NAMED, syn))), { verdict, reason }, `${peer}, in a capture`);
  }
});

t.test('congestion marks of the tunnel are carried over (RFC 6040)', async (t) => {
  const pipeline = node();
  const [NOT, ECT1, ECT0, CE] = [0, 1, 2, 3];
  // By inner, then by outer; -1: dropped.
  const table = [
    [NOT, NOT, NOT, -1],
    [ECT1, ECT1, ECT1, CE],
    [ECT0, ECT1, ECT0, CE],
    [CE, CE, CE, CE],
  ];
  for (const [inner, row] of table.entries()) {
    for (const [outer, wanted] of row.entries()) {
      const packet = (tos: number) => tcp({ ...toBackend, flags: 'A', seq: 1, ack: 1, tos: (10 << 2) | tos });
      const outcome = pipeline.send(datagram(packet(inner), NAMED, { tos: (46 << 2) | outer }));
      if (wanted === -1) t.match(outcome, { verdict: 'drop', reason: 'geneve-malformed' });
      else same(t, outcome, [packet(wanted!)], `${inner} in ${outer}`);
    }
  }
});

/** Segments of one flow. */
function train(count: number): Uint8Array[] {
  return Array.from({ length: count }, (_, i) =>
    tcp({ ...toBackend, id: 7 + i, df: true, flags: 'A', ack: 5001, payload: 1398, seq: 1001 + i * 1398 }),
  );
}

/** What becomes of them. */
function superPacket(count: number): MemoryPacket {
  const payload = Buffer.concat(train(count).map((segment) => segment.subarray(40)));
  return partial(tcp({ ...toBackend, id: 7, df: true, flags: 'A', ack: 5001, seq: 1001, payload }), 1398);
}

t.test('segments that came joined leave as one super-packet', async (t) => {
  const pipeline = node();
  establish(pipeline);
  const outcome = pipeline.send(joined(train(40)));
  t.match(outcome, { verdict: 'forward', direction: 'original', state: 'ESTABLISHED' });
  same(t, outcome, [superPacket(40)]);
  t.match(flows(pipeline), [{ packets: { original: 3 } }], 'which counts as one packet');
  t.equal(pipeline.device.slotsHeld, 0);
});

t.test('and so do segments of a batch, in one datagram each', async (t) => {
  const pipeline = node();
  establish(pipeline);
  const [outcome] = pipeline.sendBatch(train(10).map((segment) => datagram(segment)));
  same(t, outcome!, [superPacket(10)]);
  t.equal(pipeline.device.slotsHeld, 0);
});

t.test('what cannot be joined stays apart and in order', async (t) => {
  const pipeline = node();
  establish(pipeline);
  establish(pipeline, NAMED, { sport: 40001 });
  const [a, b, c, d] = train(4) as [Uint8Array, Uint8Array, Uint8Array, Uint8Array];
  const other = tcp({ ...toBackend, sport: 40001, flags: 'A', seq: 1001, ack: 5001, payload: 1398 });
  const answer = tcp({ ...fromBackend, flags: 'A', seq: 5001, ack: 1001 });
  const translated = tcp({ ...fromVip, flags: 'A', seq: 5001, ack: 1001 });
  const rows: [name: string, input: (Uint8Array | MemoryPacket)[], output: (Uint8Array | MemoryPacket)[]][] = [
    ['two flows in turn', [joined([a, other, b])], [a, other, b]],
    ['a packet of the device between', [datagram(a), answer, datagram(b)], [a, translated, b]],
    ['an option here and none there', [datagram(a), datagram(b, {})], [a, b]],
    [
      'a malformed one between',
      [datagram(a), { bytes: Uint8Array.of(1), tunnel: { peer: 1 } }, datagram(b)],
      [superPacket(2)],
    ],
    ['joined, then single', [joined([a, b]), datagram(c), datagram(d)], [superPacket(4)]],
    ['single, then joined', [datagram(a), joined([b, c, d])], [superPacket(4)]],
  ];
  for (const [name, input, output] of rows) {
    const [outcome] = pipeline.sendBatch(input);
    same(t, outcome!, output, name);
    t.equal(pipeline.device.slotsHeld, 0);
  }
  const plain = new MemoryDevice();
  Object.assign(plain, { features: { ...plain.features, vnetHeader: false } });
  const without = node('', { device: plain });
  establish(without);
  same(t, without.send(joined([a, b, c])), [a, b, c], 'nor where the device takes no super-packets');
});

t.test('many small datagrams joined: each needs a slot', async (t) => {
  const pipeline = node('');
  const inners = Array.from({ length: 300 }, (_, i) => udp({ ...query, sport: 1024 + i, payload: 8 }));
  const outcome = pipeline.send(joined(inners, DNS));
  same(t, outcome, inners);
  t.equal(pipeline.any.count, 300);
  t.equal(pipeline.device.slotsHeld, 0);
});

t.test('endpoints that traffic teaches', async (t) => {
  const asked: string[] = [];
  const pipeline = node(SERVICES, {
    ask: (address, port, protocol) => asked.push(`${address >>> 0}:${port}/${protocol}`),
  });
  const known = [
    { address: NODE, port: 8080, protocol: 6 },
    { address: NODE, port: 5353, protocol: 17 },
  ];
  pipeline.configure(CONFIG + SERVICES, known);
  establish(pipeline);
  t.same(asked, [], 'those of the configuration are led in');

  const syn = tcp({ ...toBackend, dport: 9090, flags: 'S', seq: 1 });
  const again = tcp({ ...toBackend, sport: 40001, dport: 9090, flags: 'S', seq: 1 });
  t.match(pipeline.send(datagram(syn)), { verdict: 'hold', out: [] });
  t.match(pipeline.send(datagram(again)), { verdict: 'hold', out: [] });
  t.same(asked, [`${addressWord(NODE)}:9090/6`], 'is asked for once');
  t.equal(pipeline.flushDue(), pipeline.nowMs + 1000);
  pipeline.configure(CONFIG + SERVICES, [...known, { address: NODE, port: 9090, protocol: 6 }]);
  pipeline.device.sent = [];
  t.equal(pipeline.flushDue(), Number.POSITIVE_INFINITY);
  t.same(
    pipeline.device.sent.map(({ bytes }) => describe(bytes)),
    [syn, again].map(describe),
    'when it is, they go on',
  );
  t.match(flows(pipeline), [{ client: '10.1.0.2:40000' }, { client: '10.1.0.2:40001' }]);
  t.match(pipeline.send(tcp({ ...fromBackend, sport: 9090, flags: 'SA', seq: 1, ack: 2 })), { verdict: 'forward' });

  const late = tcp({ ...toBackend, dport: 9091, flags: 'S', seq: 1 });
  pipeline.send(datagram(late));
  pipeline.nowMs += 1000;
  pipeline.device.sent = [];
  pipeline.flushDue();
  t.equal(pipeline.device.sent.length, 1, 'without an answer they go on after a second');
  const next = tcp({ ...toBackend, sport: 40002, dport: 9091, flags: 'S', seq: 1 });
  t.match(pipeline.send(datagram(next)), { verdict: 'forward' }, 'and the next do not wait');
  t.equal(asked.length, 2);
  pipeline.nowMs += 60_000;
  const later = tcp({ ...toBackend, sport: 40003, dport: 9091, flags: 'S', seq: 1 });
  t.match(pipeline.send(datagram(later)), { verdict: 'hold' }, 'it is asked for again after a minute');
  t.equal(asked.length, 3);

  const held = Array.from({ length: 70 }, (_, i) => datagram(tcp({ ...toBackend, dport: 10_000 + i, flags: 'S' })));
  const verdicts = held.map((packet) => pipeline.send(packet).verdict);
  t.equal(verdicts.filter((verdict) => verdict === 'hold').length, 63, 'no more than 64 wait');
  t.equal(verdicts.filter((verdict) => verdict === 'forward').length, 7);
  t.equal(pipeline.device.slotsHeld, 0);
});

t.test('a million packets of known flows allocate nothing that stays', async (t) => {
  const pipeline = node();
  for (let i = 0; i < 32; i++) establish(pipeline, NAMED, { sport: 45_000 + i });
  const { device } = pipeline;
  const datagrams = Array.from({ length: 32 }, (_, i) =>
    geneve(NAMED, tcp({ ...toBackend, sport: 45_000 + i, flags: 'A', seq: 1001, ack: 5001, payload: 8 })),
  );
  const answers = Array.from({ length: 32 }, (_, i) =>
    tcp({ ...fromBackend, dport: 45_000 + i, flags: 'A', seq: 5001, ack: 1001 }),
  );
  device.transmit = () => {};
  device.release = () => {};
  const { rx, memory } = device;
  const run = (batches: number): void => {
    for (let b = 0; b < batches; b++) {
      rx.count = 64;
      for (let row = 0; row < 64; row++) {
        const isOurs = row % 2 === 0;
        const bytes = (isOurs ? datagrams : answers)[row >> 1]!;
        const offset = row * memory.slotBytes + 128;
        memory.bytes.set(bytes, offset);
        memory.bytes.fill(0, offset - 10, offset);
        rx.slot[row] = row;
        rx.offset[row] = offset;
        rx.length[row] = bytes.length;
        rx.datagramBytes[row] = isOurs ? bytes.length : 0;
      }
      pipeline.pipeline.process(rx, pipeline.nowMs);
      pipeline.flushDue();
    }
  };
  run(2000);
  const before = process.memoryUsage().heapUsed;
  run(16_000);
  const grown = process.memoryUsage().heapUsed - before;
  t.ok(grown < 4 << 20, `the heap has grown by ${grown} bytes`);
  t.equal(pipeline.tcp.count, 32);
});

t.test('after a start without a table', async (t) => {
  const alone = `
services:
  - { name: web, address: ${VIP}, port: 80, mode: dsr, backends: [{ name: b1, address: ${NODE}, port: 8080 }] }
`;
  const data = { flags: 'PA', seq: 5001, ack: 1001, payload: 100 };
  const pipeline = node(alone, { recovering: true });
  const outcome = pipeline.send(tcp({ ...fromBackend, ...data }));
  t.match(outcome, { verdict: 'forward', direction: 'reply', service: 'web', backend: 'b1' }, 'told by the hash');
  same(t, outcome, [tcp({ ...fromVip, ...data })]);
  t.match(pipeline.send(datagram(tcp({ ...toBackend, flags: 'A', seq: 1001, ack: 5101 }))), { state: 'ESTABLISHED' });
  t.match(flows(pipeline), [{ flags: ['SeenNonSyn', 'DSR'], packets: { original: 1, reply: 1 } }]);

  const fresh = { ...fromBackend, dport: 50000 };
  t.match(pipeline.send(tcp({ ...fresh, flags: 'SA', seq: 1, ack: 2 })), { verdict: 'pass' }, 'a SYN-ACK is direct');
  t.match(pipeline.send(tcp({ ...fresh, ...data })), { verdict: 'pass' }, 'and its connection with it');

  const old = { ...fromBackend, dport: 50001 };
  t.match(pipeline.send(tcp({ ...old, ...data })), { verdict: 'forward' }, 'a direct one that is older is mistaken');
  const rst = tcp({ ...toBackend, sport: 50001, flags: 'R', seq: 1001 });
  t.match(
    pipeline.send(datagram(rst)),
    { verdict: 'drop', reason: 'unknown-flow', out: [] },
    'until its client protests',
  );
  t.match(pipeline.send(tcp({ ...old, ...data })), { verdict: 'pass' });

  const two = node(SERVICES, { recovering: true });
  const verdicts = Array.from({ length: 200 }, (_, i) =>
    two.send(tcp({ ...fromBackend, dport: 30_000 + i, ...data })),
  ).map(({ verdict }) => verdict);
  const own = verdicts.filter((verdict) => verdict === 'forward').length;
  t.ok(own > 60 && own < 140, `${own} of 200 clients are this backend's`);

  pipeline.nowMs += 60_000;
  t.match(pipeline.send(tcp({ ...fromBackend, dport: 50002, ...data })), { verdict: 'pass' }, 'it ends');
  t.match(node(alone).send(tcp({ ...fromBackend, ...data })), { verdict: 'pass' });
});
