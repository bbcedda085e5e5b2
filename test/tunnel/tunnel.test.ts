import fc from 'fast-check';
import t, { type Test } from 'tap';
import { packetOffset } from '../../lib/io/device.js';
import { MemoryDevice, type MemoryPacket } from '../../lib/io/memory-device.js';
import { Cutter, FRAGMENTS, TCP_SEGMENTS, UDP_DATAGRAMS } from '../../lib/tunnel/cut.js';
import {
  encapsulate,
  makeTunnelRoute,
  OUTER_HEADER_BYTES,
  overheadBytes,
  type TunnelRoute,
  type TunnelSettings,
  tunnelHeaderBytes,
  tunnelSourcePort,
  writeOuterHeader,
  writeTunnelHeader,
} from '../../lib/tunnel/encapsulation.js';
import { PathMtus } from '../../lib/tunnel/path-mtu.js';
import { checkGeneve, makeGeneveContent } from '../../lib/wire/geneve.js';
import * as ipv4 from '../../lib/wire/ipv4.js';
import { datagramsOf, dsrOption, geneve, reassemble, tunnelled, untunnel } from '../fixtures/geneve.js';
import { addressWord, partial, pattern, tcp, udp, verifyChecksums } from '../fixtures/packets.js';
import { OneByOne } from '../support/dsr.js';

const FLOW = { src: '10.1.0.2', sport: 40000, dst: '10.2.0.11', dport: 8080 } as const;

const SETTINGS: TunnelSettings = {
  address: addressWord('192.0.2.1') | 0,
  port: 6081,
  vni: 2,
  inner: 0x6558,
  isOptionAlways: true,
  mtu: 1500,
};

const ROUTE: TunnelRoute = {
  node: addressWord('192.0.2.7') | 0,
  sourcePort: 50_000,
  hasVip: true,
  vip: addressWord('10.96.0.10') | 0,
  vipPort: 80,
};

t.test('headers, byte by byte, in the headroom', async (t) => {
  const packet = tcp({ ...FLOW, flags: 'S', tos: 0xb9 });
  for (const inner of [0x6558, 0x0800]) {
    for (const hasVip of [true, false]) {
      const settings = { ...SETTINGS, inner, vni: 0x123456, port: 7000 };
      const bytes = new Uint8Array(128 + packet.length).fill(0xa5);
      bytes.set(packet, 128);
      const view = new DataView(bytes.buffer);
      const tunnelBytes = tunnelHeaderBytes(inner, hasVip);
      const outer = 128 - tunnelBytes - OUTER_HEADER_BYTES;
      writeTunnelHeader(view, bytes, 128 - tunnelBytes, settings, { ...ROUTE, hasVip });
      writeOuterHeader(view, bytes, outer, settings, ROUTE, tunnelBytes + packet.length, 0xb9);
      const options = hasVip ? [dsrOption('10.96.0.10', 80)] : [];
      const expected = tunnelled(
        { src: '192.0.2.1', dst: '192.0.2.7', sport: 50_000, tos: 0xb9 },
        geneve({ options, protocol: inner, vni: 0x123456 }, packet),
        7000,
      );
      t.same(bytes.subarray(outer), expected);
      t.ok(bytes.subarray(0, outer).every((byte) => byte === 0xa5));
    }
  }
  t.equal(overheadBytes(0x6558), 62);
  t.equal(overheadBytes(0x0800), 48);
  fc.assert(fc.property(fc.integer(), (hash) => tunnelSourcePort(hash) === 32768 + (hash & 0x7fff)));
  t.same(makeTunnelRoute(), { node: 0, sourcePort: 0, hasVip: false, vip: 0, vipPort: 0 });
});

t.test('what is encapsulated comes out as it went in, and nothing else is touched', async () => {
  const packets = fc.oneof(
    fc.nat(1400).map((payload) => tcp({ ...FLOW, payload, tos: payload & 255 })),
    fc.nat(1400).map((payload) => udp({ ...FLOW, payload, tos: payload & 255 })),
  );
  const settings = fc.record({
    address: fc.integer(),
    port: fc.nat(65535),
    vni: fc.nat(0xffffff),
    inner: fc.constantFrom(0x6558, 0x0800),
    isOptionAlways: fc.boolean(),
    mtu: fc.constant(1500),
  });
  const routes = fc.record({
    node: fc.integer(),
    sourcePort: fc.nat(65535),
    hasVip: fc.boolean(),
    vip: fc.integer(),
    vipPort: fc.nat(65535),
  });
  fc.assert(
    fc.property(packets, settings, routes, (packet, ends, route) => {
      const bytes = new Uint8Array(128 + packet.length + 8).fill(0xa5);
      const memory = { bytes, view: new DataView(bytes.buffer), slotBytes: bytes.length, slots: 1 };
      bytes.set(packet, 128);
      const outer = encapsulate(memory, 128, packet.length, ends, route);
      const { hasVip } = route;
      const content = makeGeneveContent();
      const length = 128 + packet.length - outer;
      return (
        ipv4.check(bytes, outer, length) === 0 &&
        ipv4.totalLength(bytes, outer) === length &&
        ipv4.source(memory.view, outer) === ends.address &&
        ipv4.destination(memory.view, outer) === route.node &&
        ipv4.tos(bytes, outer) === packet[1] &&
        memory.view.getUint16(outer + 20) === route.sourcePort &&
        memory.view.getUint16(outer + 22) === ends.port &&
        checkGeneve(bytes, memory.view, outer + 28, length - 28, content) === 0 &&
        content.inner === 128 &&
        content.innerLength === packet.length &&
        content.vni === ends.vni &&
        content.hasVip === hasVip &&
        content.vip === (hasVip ? route.vip : 0) &&
        content.vipPort === (hasVip ? route.vipPort : 0) &&
        Buffer.from(bytes.subarray(128, 128 + packet.length)).equals(packet) &&
        bytes.subarray(outer - 10, outer).every((byte) => byte === 0) &&
        bytes.every((byte, i) => (i >= outer - 10 && i < 128 + packet.length) || byte === 0xa5)
      );
    }),
  );
});

const OFFLOAD = new MemoryDevice(64);
const SINGLES = new OneByOne(64);

/** Cuts one packet and gives back what is inside the datagrams, having judged what is around. */
function cut(
  t: Test,
  packet: Uint8Array | MemoryPacket,
  kind: number,
  pieceBytes: number,
  {
    device = OFFLOAD,
    settings = SETTINGS,
    route = ROUTE,
    fragmentBytes = 0,
  }: { device?: MemoryDevice; settings?: TunnelSettings; route?: TunnelRoute; fragmentBytes?: number } = {},
): Uint8Array[] {
  device.push(packet instanceof Uint8Array ? { bytes: packet } : packet);
  device.receive();
  device.sent = [];
  const cutter = new Cutter(device);
  const at = device.rx.offset[0]!;
  const length = device.rx.length[0]!;
  const before = device.memory.bytes.slice(at - 10, at + length);
  const isSent =
    fragmentBytes > 0
      ? cutter.sendFragmented(at, length, pieceBytes, fragmentBytes, settings, route)
      : cutter.send(kind, at, length, pieceBytes, settings, route);
  t.ok(isSent);
  t.ok(Buffer.from(device.memory.bytes.slice(at - 10, at + length)).equals(before), 'the packet stays as it is');
  device.release(device.rx.slot[0]!);
  t.equal(device.slotsHeld, 0);
  t.equal(cutter.writes, device.sent.length);
  t.equal(
    cutter.bytes,
    device.sent.reduce((total, { bytes }) => total + bytes.length, 0),
  );
  const datagrams = device.sent.flatMap(datagramsOf);
  for (const datagram of datagrams) {
    const { src, dst, sport, dport, df, ttl, vip, vni, protocol } = untunnel(datagram);
    const wanted = { src: '192.0.2.1', dst: '192.0.2.7', sport: 50_000, dport: 6081, df: true, ttl: 64 };
    const option = route.hasVip ? '10.96.0.10:80' : undefined;
    const found = { src, dst, sport, dport, df, ttl, vip, vni, protocol };
    const all = { ...wanted, vip: option, vni: settings.vni, protocol: settings.inner };
    if (JSON.stringify(found) !== JSON.stringify(all)) t.same(found, all);
  }
  return datagrams.map((datagram) => untunnel(datagram).inner);
}

/** A segment's fields that matter here. */
function segment(bytes: Uint8Array) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  const l4 = (bytes[0]! & 15) * 4;
  const header = l4 + (bytes[l4 + 12]! >> 4) * 4;
  return {
    id: view.getUint16(4),
    seq: view.getUint32(l4 + 4),
    flags: bytes[l4 + 13]!,
    headers: [...bytes.subarray(0, 2), ...bytes.subarray(6, 10), ...bytes.subarray(12, l4 + 4)],
    options: bytes.slice(l4 + 20, header),
    payload: bytes.slice(header),
  };
}

t.test('TCP segments are the original stream with right headers', async (t) => {
  const arbitrary = fc.record({
    payload: fc.oneof(fc.integer({ min: 2, max: 3000 }), fc.integer({ min: 60_000, max: 65_000 })),
    mss: fc.integer({ min: 536, max: 1448 }),
    seq: fc.oneof(fc.nat(0xffffffff), fc.constant(0xffffff00)),
    id: fc.oneof(fc.nat(65535), fc.constant(65535)),
    flags: fc.constantFrom('A', 'PA', 'FPA', 'FAW', 'PAWE'),
    isPartial: fc.boolean(),
    options: fc.constantFrom({}, { timestamps: [1, 2] as const }),
    ipOptions: fc.constantFrom(new Uint8Array(0), Uint8Array.of(1, 1, 1, 1)),
    inner: fc.constantFrom(0x6558, 0x0800),
    hasVip: fc.boolean(),
    offload: fc.boolean(),
  });
  fc.assert(
    fc.property(
      arbitrary,
      ({ payload, mss, seq, id, flags, isPartial, options, ipOptions, inner, hasVip, offload }) => {
        const whole = tcp({ ...FLOW, seq, ack: 7, id, flags, options, ipOptions, tos: 3, payload });
        const pieces = cut(t, isPartial ? partial(whole, mss) : whole, TCP_SEGMENTS, mss, {
          device: offload ? OFFLOAD : SINGLES,
          settings: { ...SETTINGS, inner },
          route: { ...ROUTE, hasVip },
        });
        const original = segment(whole);
        const stream = Buffer.concat(pieces.map((piece) => segment(piece).payload));
        if (!stream.equals(original.payload) || pieces.length !== Math.ceil(payload / mss)) return false;
        return pieces.every((piece, i) => {
          const isLast = i === pieces.length - 1;
          const { id: pieceId, seq: pieceSeq, flags: pieceFlags, headers, options: pieceOptions } = segment(piece);
          const first = i === 0 ? original.flags : original.flags & ~0x80;
          return (
            verifyChecksums(piece).length === 0 &&
            pieceId === ((id + i) & 0xffff) &&
            pieceSeq === (seq + i * mss) % 2 ** 32 &&
            pieceFlags === (isLast ? first : first & ~0x09) &&
            headers.join() === original.headers.join() &&
            Buffer.from(pieceOptions).equals(original.options)
          );
        });
      },
    ),
    { numRuns: 150 },
  );
});

t.test('urgent data ends where it did', async (t) => {
  const whole = tcp({ ...FLOW, seq: 100, flags: 'PUA', payload: 3000 });
  const urgent = (packet: Uint8Array): [flag: boolean, pointer: number] => [
    (packet[33]! & 0x20) !== 0,
    (packet[38]! << 8) | packet[39]!,
  ];
  for (const [pointer, wanted] of [
    [1500, [true, 1500, true, 500, false, 0]],
    [1000, [true, 1000, false, 0, false, 0]],
    [0xffff, [true, 0xffff, true, 64_535, true, 63_535]],
  ] as const) {
    const packet = Uint8Array.from(whole);
    packet.set([pointer >> 8, pointer & 0xff], 38);
    const pieces = cut(t, partial(packet, 1000), TCP_SEGMENTS, 1000);
    t.same(pieces.flatMap(urgent), wanted);
    for (const piece of pieces) t.same(verifyChecksums(piece), []);
  }
});

t.test('writes: at most 65,535 bytes and 128 datagrams each, a single one as it is', async (t) => {
  const sizes = (payload: number, mss: number, device = OFFLOAD): number[] => {
    cut(t, partial(tcp({ ...FLOW, payload }), mss), TCP_SEGMENTS, mss, { device });
    return device.sent.map((write) => datagramsOf(write).length);
  };
  t.same(sizes(1000, 500), [2]);
  t.same(sizes(1001, 1000), [2]);
  t.same(sizes(45 * 1398, 1398), [44, 1], 'a full super-packet takes two');
  t.same(sizes(129 * 100, 100), [128, 1]);
  t.same(sizes(3000, 1000, SINGLES), [1, 1, 1]);
  cut(t, partial(tcp({ ...FLOW, payload: 45 * 1398 }), 1398), TCP_SEGMENTS, 1398);
  t.equal(OFFLOAD.sent[1]!.vnet, undefined);
});

t.test('UDP datagrams', async (t) => {
  fc.assert(
    fc.property(
      fc.integer({ min: 2, max: 60_000 }),
      fc.integer({ min: 500, max: 1400 }),
      fc.boolean(),
      (payload, size, offload) => {
        const device = offload ? OFFLOAD : SINGLES;
        const pieces = cut(t, partial(udp({ ...FLOW, id: 65_534, df: true, payload }), size), UDP_DATAGRAMS, size, {
          device,
        });
        const stream = Buffer.concat(pieces.map((piece) => piece.subarray(28)));
        return (
          stream.equals(pattern(payload)) &&
          pieces.every(
            (piece, i) =>
              verifyChecksums(piece).length === 0 && piece[26]! + piece[27]! > 0 && piece[5] === ((0xfe + i) & 255),
          )
        );
      },
    ),
    { numRuns: 100 },
  );
  const without = cut(t, udp({ ...FLOW, payload: 900, checksum: 0 }), UDP_DATAGRAMS, 400);
  t.same(
    without.map((piece) => [piece.length, piece[26], piece[27]]),
    [
      [428, 0, 0],
      [428, 0, 0],
      [128, 0, 0],
    ],
    'a checksum that the sender did not compute stays out',
  );
});

t.test('fragments put together are the packet', async (t) => {
  fc.assert(
    fc.property(
      fc.integer({ min: 9, max: 60_000 }),
      fc.integer({ min: 60, max: 180 }),
      fc.boolean(),
      (payload, eights, offload) => {
        const whole = udp({ ...FLOW, id: 77, df: false, payload });
        const device = offload ? OFFLOAD : SINGLES;
        const pieces = cut(t, whole, FRAGMENTS, eights * 8, { device });
        return (
          pieces.every((piece) => verifyChecksums(piece).length === 0) && Buffer.from(reassemble(pieces)).equals(whole)
        );
      },
    ),
    { numRuns: 100 },
  );
  // A fragment of a fragment, in the middle of its datagram: MF stays on the last piece, offsets go on.
  const middle = udp({ ...FLOW, id: 9, df: false, payload: 1000 });
  new DataView(middle.buffer).setUint16(6, 0x2000 | 185);
  const offsets = cut(t, middle, FRAGMENTS, 400).map((piece) => new DataView(piece.buffer).getUint16(6));
  t.same(offsets, [0x2000 | 185, 0x2000 | 235, 0x2000 | 285]);
});

t.test('header options go into the first fragment, copied ones into all', async (t) => {
  const routerAlert = [0x94, 4, 0, 0];
  const timestamp = [0x44, 8, 9, 0, 1, 2, 3, 4];
  const ipOptions = Uint8Array.from([1, ...timestamp, ...routerAlert, 0]);
  const pieces = cut(t, udp({ ...FLOW, id: 5, df: false, ipOptions, payload: 100 }), FRAGMENTS, 56);
  const [first, second] = pieces.map((piece) => [...piece.subarray(20, (piece[0]! & 15) * 4)]);
  t.same(first, [...ipOptions, 0, 0]);
  t.same(second, [1, 1, 1, 1, 1, 1, 1, 1, 1, ...routerAlert, 0, 0, 0]);
  for (const broken of [
    [0x44, 0, 0, 0],
    [0x44, 1, 0, 0],
    [1, 1, 1, 0x44],
    [0x83, 200, 1, 1],
  ]) {
    const [, later] = cut(
      t,
      udp({ ...FLOW, id: 5, df: false, ipOptions: Uint8Array.from(broken), payload: 100 }),
      FRAGMENTS,
      56,
    );
    t.equal(later!.length, 24 + 52);
  }
});

t.test('datagrams of a super-packet that do not fit are fragmented one by one', async (t) => {
  const whole = partial(udp({ ...FLOW, id: 20, df: false, payload: 5000 }), 2000);
  const pieces = cut(t, whole, UDP_DATAGRAMS, 2000, { fragmentBytes: 1400 });
  const byId = [20, 21, 22].map((id) => pieces.filter((piece) => piece[5] === id));
  t.same(
    byId.map((fragments) => fragments.length),
    [2, 2, 1],
  );
  const stream = Buffer.concat(
    byId.map((fragments) => {
      const datagram = fragments.length === 1 ? fragments[0]! : reassemble(fragments);
      t.same(verifyChecksums(datagram), []);
      return datagram.subarray(28);
    }),
  );
  t.ok(stream.equals(pattern(5000)));
});

t.test('when slots run out what is left is lost, and nothing else', async (t) => {
  for (const fragmentBytes of [0, 80]) {
    const device = new OneByOne(2);
    device.push(partial(udp({ ...FLOW, id: 1, payload: 3000 }), 500));
    device.receive();
    const taken = [device.take(), device.take(), device.take()];
    t.equal(device.take(), -1);
    if (fragmentBytes > 0) device.release(taken.pop()!);
    const cutter = new Cutter(device);
    const at = packetOffset(device.memory, device.rx.slot[0]!);
    const isSent =
      fragmentBytes > 0
        ? cutter.sendFragmented(at, 3028, 500, fragmentBytes, SETTINGS, ROUTE)
        : cutter.send(UDP_DATAGRAMS, at, 3028, 500, SETTINGS, ROUTE);
    t.equal(isSent, false);
    t.equal(cutter.writes, 0);
    for (const slot of taken) device.release(slot);
    device.release(device.rx.slot[0]!);
    t.equal(device.slotsHeld, 0);
  }
});

t.test('path MTUs are lowered for ten minutes, never below what every host takes, and are bounded', async (t) => {
  const mtus = new PathMtus();
  t.equal(mtus.towards(1, 1500, 0), 1500);
  mtus.lower(1, 1400, 0);
  t.equal(mtus.towards(1, 1500, 0), 1400);
  t.equal(mtus.towards(1, 1300, 0), 1300, 'the device may be narrower still');
  t.equal(mtus.towards(2, 1500, 0), 1500);
  mtus.lower(1, 1450, 300_000);
  t.equal(mtus.towards(1, 1500, 599_999), 1400, 'a wider one changes nothing');
  t.equal(mtus.towards(1, 1500, 600_000), 1500, 'not even the time');
  mtus.lower(1, 1450, 600_000);
  mtus.lower(1, 1450, 700_000);
  t.equal(mtus.towards(1, 1500, 1_299_999), 1450, 'the same again is news');
  t.equal(mtus.towards(1, 1500, 1_300_000), 1500);
  mtus.lower(1, 68, 1_300_000);
  t.equal(mtus.towards(1, 1500, 1_300_000), 576);
  for (let node = 10; node < 10 + 4096; node++) mtus.lower(node, 1400, 0);
  t.equal(mtus.towards(1, 1500, 1_300_000), 1500, 'the least recently used goes');
  t.equal(mtus.towards(10, 1500, 0), 1400);
});
