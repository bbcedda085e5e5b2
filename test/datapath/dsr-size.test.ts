import t from 'tap';
import { TX_PACKETS } from '../../lib/conntrack/record.js';
import { MemoryDevice } from '../../lib/io/memory-device.js';
import * as ipv4 from '../../lib/wire/ipv4.js';
import { reassemble } from '../fixtures/geneve.js';
import { describe } from '../fixtures/packet-text.js';
import { fragment, icmpError, partial, pattern, tcp, udp, verifyChecksums } from '../fixtures/packets.js';
import { B1, client, config, inside, OneByOne, only, query } from '../support/dsr.js';
import { TestPipeline } from '../support/pipeline.js';

/** Packets of dsr services that do not go through the tunnel as they are. */

t.test('a packet that does not fit: its sender is told, from the VIP, about its own packet', async (t) => {
  for (const [kind, room] of [
    ['ethernet', 1438],
    ['ip', 1452],
  ] as const) {
    for (const option of ['always', 'syn']) {
      const pipeline = new TestPipeline(config({ tunnel: `inner: ${kind}, option: ${option},` }));
      pipeline.send(tcp({ ...client, flags: 'S' }));
      const fits = tcp({ ...client, flags: 'A', payload: room - 40 });
      t.equal(only(t, pipeline.send(fits)).inner.length, room);
      const large = tcp({ ...client, flags: 'A', seq: 1, ack: 9, payload: room - 39 });
      for (const sent of [{ bytes: large }, partial(large)]) {
        const told = pipeline.send(sent);
        t.match(told, { verdict: 'reply', reason: 'frag-needed', service: 'web', backend: 'b1' });
        const expected = icmpError({
          src: '10.96.0.10',
          dst: '10.1.0.2',
          tos: 0xc0,
          type: 3,
          code: 4,
          mtu: room,
          quoted: large,
          quoteBytes: 548,
        });
        t.same(told.out[0]!.bytes, expected);
      }
      const datagram = udp({ ...query, payload: room - 27 });
      t.match(pipeline.send(datagram), { verdict: 'reply', reason: 'frag-needed', service: 'dns', backend: 'b1' });
      t.equal(pipeline.any.count, 0, 'a flow does not begin with it');
      t.equal(pipeline.tcp.doubles[TX_PACKETS], 2, 'nor is it a packet of one');
    }
  }
  const pipeline = new TestPipeline(config());
  const large = udp({ ...query, payload: 1480 });
  const reasons = Array.from({ length: 60 }, () => pipeline.send(large).reason);
  t.same(reasons, [...Array(50).fill('frag-needed'), ...Array(10).fill('rate-limited')]);
  const noHost = pipeline.send(udp({ ...query, src: '127.0.0.1', payload: 1480 }));
  t.match(noHost, { verdict: 'drop', reason: 'mtu-exceeded' });
  const rst = tcp({ ...client, flags: 'R', payload: 1450 });
  t.match(pipeline.send(rst), { verdict: 'drop', reason: 'mtu-exceeded' }, 'nothing answers an RST');
  t.match(pipeline.send(tcp({ ...client, sport: 9, flags: 'A', payload: 1450 })).verdict, 'drop');
  t.equal(pipeline.tcp.count, 0);
});

t.test('a packet that does not fit and may be fragmented', async (t) => {
  for (const offload of [true, false]) {
    const pipeline = new TestPipeline(config(), offload ? {} : { device: new OneByOne() });
    for (const sent of [
      tcp({ ...client, flags: 'PA', seq: 5, id: 77, df: false, payload: 1460 }),
      udp({ ...query, id: 78, df: false, payload: 1450 }),
      udp({ ...query, id: 79, df: false, payload: 1450, checksum: 0 }),
    ]) {
      for (const form of [{ bytes: sent }, ...(sent[27] === 0 && sent[9] === 17 ? [] : [partial(sent)])]) {
        const pieces = inside(t, pipeline.send(form));
        t.equal(pieces.length, 2);
        t.ok(pieces.every((piece) => piece.vip !== undefined && piece.inner.length <= 1438));
        const whole = reassemble(pieces.map((piece) => piece.inner));
        t.same(verifyChecksums(whole), []);
        t.equal(describe(whole), describe(sent).replace(/10\.96\.0\.10:\d+/, '10.2.0.11:8080'));
      }
    }
    t.equal(pipeline.device.slotsHeld, 0);
  }
});

t.test('fragments of a client follow their first one, and are cut again where they must', async (t) => {
  for (const option of ['always', 'syn']) {
    const pipeline = new TestPipeline(config({ tunnel: `option: ${option},` }));
    const datagram = udp({ ...query, id: 9, df: false, payload: 4000 });
    const [first, second, third] = fragment(datagram, 1480) as [Uint8Array, Uint8Array, Uint8Array];
    t.match(pipeline.send(third), { verdict: 'hold', out: [] });
    const released = inside(t, pipeline.send(first));
    const rest = inside(t, pipeline.send(second));
    const all = [...released, ...rest].map((piece) => piece.inner);
    all.sort((a, b) => (new DataView(a.buffer).getUint16(6) & 0x1fff) - (new DataView(b.buffer).getUint16(6) & 0x1fff));
    const whole = reassemble(all);
    t.same(verifyChecksums(whole), []);
    t.same(whole.subarray(28), pattern(4000));
    t.equal(new Set([...released, ...rest].map(({ sport, vip }) => `${sport} ${vip}`)).size, 1);
    t.equal(rest[0]!.vip, '10.96.0.10:53', 'every UDP packet carries the option');

    const segment = tcp({ ...client, flags: 'A', id: 10, payload: 1000 });
    const [head, tail] = fragment(segment, 600) as [Uint8Array, Uint8Array];
    pipeline.send(tcp({ ...client, flags: 'S' }));
    const pieces = [only(t, pipeline.send(head)), only(t, pipeline.send(tail))];
    t.same(verifyChecksums(reassemble(pieces.map((piece) => piece.inner))), []);
    t.same(
      pieces.map(({ vip }) => vip !== undefined),
      [option === 'always', option === 'always'],
    );
    t.equal(pipeline.device.slotsHeld, 0);
  }
  const pipeline = new TestPipeline(config());
  const [first, second] = fragment(udp({ ...query, id: 9, payload: 1500 }), 1480).reverse() as [Uint8Array, Uint8Array];
  new DataView(second.buffer).setUint16(6, 0x6000);
  ipv4.storeChecksum(second, 0);
  t.match(pipeline.send(second), { verdict: 'reply', reason: 'frag-needed' }, 'a first fragment with DF');
  t.match(pipeline.send(first), { verdict: 'drop', reason: 'mtu-exceeded' }, 'the others share its end');
});

t.test('datagrams of one client to several VIPs of a backend are kept apart, whoever fragments them', async (t) => {
  const dns = '  - { name: other, address: 10.96.0.11, port: 53, protocol: udp, mode: dsr, backends: [';
  for (const [payload, bytes] of [
    [4000, 1480],
    [4000, 1000],
    [1450, 1480],
  ] as const) {
    const pipeline = new TestPipeline(`${config()}${dns}${B1}] }\n`);
    const [first, second] = ['10.96.0.10', '10.96.0.11'].map((dst) => {
      const whole = udp({ ...query, dst, id: 7, df: false, payload });
      const sent = whole.length <= 1500 ? [whole] : fragment(whole, bytes);
      return reassemble(sent.flatMap((piece) => inside(t, pipeline.send(piece)).map(({ inner }) => inner)));
    }) as [Uint8Array, Uint8Array];
    const idOf = (packet: Uint8Array): number => (packet[4]! << 8) | packet[5]!;
    t.equal(idOf(first), 7);
    t.not(idOf(second), 7, `${payload} bytes in fragments of ${bytes}`);
    t.same(second.subarray(28), first.subarray(28));
    t.equal(pipeline.device.slotsHeld, 0);
  }
});

t.test('the path MTU towards a node follows what routers say about the tunnel', async (t) => {
  const setUp = (): { pipeline: TestPipeline; outer: Uint8Array } => {
    const pipeline = new TestPipeline(config());
    pipeline.send(tcp({ ...client, flags: 'S' }));
    return { pipeline, outer: pipeline.send(tcp({ ...client, flags: 'A', payload: 1398 })).out[0]!.bytes };
  };
  /** The largest inner packet that is sent, and what a larger one is told. */
  const room = (pipeline: TestPipeline): number => {
    const { reason, out } = pipeline.send(tcp({ ...client, flags: 'A', payload: 1460 }));
    pipeline.nowMs += 1000;
    t.equal(reason, 'frag-needed');
    return new DataView(out[0]!.bytes.buffer).getUint16(26);
  };
  const error = (outer: Uint8Array, fields = {}, quoteBytes = 28): Uint8Array =>
    icmpError({
      src: '192.0.2.254',
      dst: '192.0.2.1',
      type: 3,
      code: 4,
      mtu: 1400,
      quoted: outer,
      quoteBytes,
      ...fields,
    });

  const { pipeline, outer } = setUp();
  t.equal(room(pipeline), 1438);
  const heard = pipeline.send(error(outer));
  t.match(heard, { verdict: 'pass', reason: 'not-tracked', direction: 'none' }, 'the error is the host’s as well');
  const heardAtMs = pipeline.nowMs;
  t.equal(room(pipeline), 1338);
  t.equal(only(t, pipeline.send(tcp({ ...client, flags: 'A', payload: 1298 }))).inner.length, 1338);
  pipeline.nowMs = heardAtMs + 599_000;
  t.equal(room(pipeline), 1338);
  pipeline.nowMs = heardAtMs + 601_000;
  t.equal(room(pipeline), 1438, 'for ten minutes');
  pipeline.send(error(outer, { mtu: 0 }));
  t.equal(room(pipeline), 514, 'a router that gives no number: what every host takes');

  const forged = (change: (bytes: Uint8Array) => void): Uint8Array => {
    const copy = outer.slice();
    change(copy);
    return copy;
  };
  const ignored: ReadonlyArray<readonly [why: string, packet: Uint8Array]> = [
    [
      'to another address',
      error(
        forged((bytes) => bytes.set([192, 0, 2, 9], 12)),
        { dst: '192.0.2.9' },
      ),
    ],
    ['of another code', error(outer, { code: 1 })],
    ['of another type', error(outer, { type: 11, code: 0 })],
    ['about another port', error(forged((bytes) => bytes.set([1, 2], 22)))],
    ['about another node', error(forged((bytes) => bytes.set([192, 0, 2, 99], 16)))],
    ['about another protocol', error(forged((bytes) => bytes.fill(6, 9, 10)))],
    ['about a packet that was not larger', error(outer, { mtu: 1500 })],
    ['that quotes too little', error(outer, {}, 27)],
  ];
  for (const [why, bytes] of ignored) {
    const { pipeline: fresh } = setUp();
    fresh.send(bytes);
    t.equal(room(fresh), 1438, why);
  }
});

t.test('super-packets are cut, whatever the device can do', async (t) => {
  const devices: ReadonlyArray<readonly [string, () => MemoryDevice]> = [
    ['with UDP segmentation', () => new MemoryDevice()],
    ['without', () => new OneByOne()],
  ];
  for (const [name, device] of devices) {
    const pipeline = new TestPipeline(config(), { device: device() });
    pipeline.send(tcp({ ...client, flags: 'S', seq: 999 }));
    const stream = {
      ...client,
      flags: 'FPA',
      seq: 1000,
      ack: 7,
      id: 50,
      df: true,
      options: { timestamps: [1, 2] as const },
    };
    for (const [payload, gsoSize, segment] of [
      [60_000, 1448, 1386],
      [60_000, 1386, 1386],
      [30_000, 536, 536],
      [1500, 1448, 1386],
      [1400, 700, 700],
      [65_535 - 52, 1448, 1386],
    ] as const) {
      const outcome = pipeline.send(partial(tcp({ ...stream, payload }), gsoSize));
      const pieces = inside(t, outcome);
      t.equal(pieces.length, Math.ceil(payload / segment), `${payload} bytes in ${gsoSize}, ${name}`);
      t.equal(
        outcome.out.length,
        name === 'without' ? pieces.length : payload < 64_000 && segment > 1000 ? 1 : payload > 64_000 ? 2 : 1,
      );
      t.ok(Buffer.concat(pieces.map((piece) => piece.inner.subarray(52))).equals(pattern(payload)));
      pieces.forEach((piece, i) => {
        const isLast = i === pieces.length - 1;
        const from = i * segment;
        const expected = tcp({
          ...stream,
          dst: '10.2.0.11',
          dport: 8080,
          flags: isLast ? 'FPA' : 'A',
          seq: 1000 + from,
          id: 50 + i,
          payload: pattern(payload).subarray(from, from + segment),
        });
        if (!Buffer.from(piece.inner).equals(expected)) t.equal(describe(piece.inner), describe(expected));
      });
      t.equal(pipeline.device.slotsHeld, 0);
    }
    t.equal(pipeline.tcp.doubles[TX_PACKETS], 7, 'one packet each for the flow');

    const one = only(t, pipeline.send(partial(tcp({ ...stream, payload: 600 }), 700)));
    t.equal(one.inner.length, 652, 'what is not worth cutting goes as it is');
    const caught = inside(t, pipeline.send(tcp({ ...stream, payload: 5000 })));
    t.same(
      caught.map((piece) => piece.inner.length),
      [1438, 1438, 1438, 894],
      'as a capture has it, without a vnet header',
    );

    const datagrams = { ...query, id: 7, df: true };
    const cut = inside(t, pipeline.send(partial(udp({ ...datagrams, payload: 5000 }), 1400)));
    t.same(
      cut.map((piece) => piece.inner.length),
      [1428, 1428, 1428, 828],
    );
    t.ok(Buffer.concat(cut.map((piece) => piece.inner.subarray(28))).equals(pattern(5000)));
    const tooLarge = partial(udp({ ...datagrams, payload: 5000 }), 1450);
    const told = pipeline.send(tooLarge);
    t.match(told, { verdict: 'reply', reason: 'frag-needed' });
    const quoted = udp({ ...datagrams, payload: pattern(5000).subarray(0, 1450) });
    t.same(told.out[0]!.bytes.subarray(28), quoted.subarray(0, 548), 'quoting the first datagram');
    const loose = inside(t, pipeline.send(partial(udp({ ...datagrams, df: false, payload: 4000 }), 1450)));
    t.equal(loose.length, 5, 'two fragments of each, and one datagram that fits');
    t.equal(pipeline.device.slotsHeld, 0);
  }
});

t.test('when slots run out, what cannot be sent whole is dropped', async (t) => {
  const device = new OneByOne(4);
  const pipeline = new TestPipeline(config(), { device });
  const taken = Array.from({ length: 6 }, () => device.take());
  pipeline.send(tcp({ ...client, flags: 'S' }));
  const outcome = pipeline.send(partial(tcp({ ...client, flags: 'A', payload: 5000 }), 1448));
  t.equal(outcome.verdict, 'forward', 'a write gives its slot back at once here');
  taken.push(device.take());
  t.match(pipeline.send(partial(tcp({ ...client, flags: 'A', payload: 5000 }), 1448)), {
    verdict: 'drop',
    reason: 'device-write',
  });
  for (const slot of taken) device.release(slot);
  t.equal(device.slotsHeld, 0);
});
