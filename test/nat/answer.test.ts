import t, { type Test } from 'tap';
import { REPLIES_PER_SECOND, REPLIES_PER_SOURCE_PER_SECOND } from '../../lib/base/limits.js';
import type { MemoryPacket } from '../../lib/io/memory-device.js';
import {
  type Answer,
  answerEcho,
  answerRst,
  answerUnreachable,
  buildPortUnreachable,
  buildRst,
  mayAnswer,
} from '../../lib/nat/answer.js';
import { AnswerLimiter } from '../../lib/nat/rate-limit.js';
import { parseIpv4 } from '../../lib/wire/address.js';
import { FRAGMENTATION_NEEDED, PORT_UNREACHABLE } from '../../lib/wire/icmp.js';
import { ACK, RST } from '../../lib/wire/tcp.js';
import * as make from '../fixtures/packets.js';
import { answerIn, isIntactOutside, type Slot, slotOf } from './slot.js';

const CLIENT = '10.1.0.2';
const VIP = '10.96.0.10';
const ENDS = { src: CLIENT, dst: VIP } as const;
const FROM = { ...ENDS, sport: 40000, dport: 80 } as const;
const BACK = { src: VIP, dst: CLIENT, sport: 80, dport: 40000 } as const;
const ANSWER: Answer = { offset: 0, length: 0 };
const NO_VNET = new Uint8Array(10);

/** What comes of an answer: the packet, after judging its checksums, vnet header and that nothing else was touched. */
function answered(t: Test, slot: Slot): Uint8Array {
  const { bytes, vnet } = answerIn(slot, ANSWER);
  t.same(make.verifyChecksums(bytes), [], 'lengths and checksums');
  t.same(vnet, NO_VNET, 'vnet header');
  const end = Math.max(slot.at + slot.length, ANSWER.offset + ANSWER.length);
  t.ok(isIntactOutside(slot, Math.min(slot.at, ANSWER.offset) - 10, end), 'nothing else is touched');
  return bytes;
}

t.test('RST (RFC 9293 3.10.7.1)', async (t) => {
  const rows: [what: string, packet: Uint8Array | MemoryPacket, answer: Partial<make.TcpFields>][] = [
    ['SYN: ack = seq + 1', make.tcp({ ...FROM, flags: 'S', seq: 1000 }), { flags: 'RA', ack: 1001 }],
    [
      'the SYN’s options are no data',
      make.tcp({ ...FROM, flags: 'S', seq: 1000, options: { mss: 1460, scale: 7 } }),
      { flags: 'RA', ack: 1001 },
    ],
    [
      'SYN with data (fast open)',
      make.tcp({ ...FROM, flags: 'S', seq: 1000, payload: 10 }),
      { flags: 'RA', ack: 1011 },
    ],
    [
      'SYN at the end of the sequence space',
      make.tcp({ ...FROM, flags: 'S', seq: 0xffffffff }),
      { flags: 'RA', ack: 0 },
    ],
    ['SYN with ECN bits', make.tcp({ ...FROM, flags: 'SEW', seq: 5 }), { flags: 'RA', ack: 6 }],
    ['FIN without ACK counts', make.tcp({ ...FROM, flags: 'F', seq: 7, payload: 2 }), { flags: 'RA', ack: 10 }],
    ['no flags at all', make.tcp({ ...FROM, flags: '', seq: 7 }), { flags: 'RA', ack: 7 }],
    [
      'ACK: seq = its ack, nothing acknowledged',
      make.tcp({ ...FROM, flags: 'A', seq: 7, ack: 99, payload: 50 }),
      { flags: 'R', seq: 99 },
    ],
    ['SYN-ACK', make.tcp({ ...FROM, flags: 'SA', seq: 7, ack: 0xfffffff0 }), { flags: 'R', seq: 0xfffffff0 }],
    [
      'IP options are not answered',
      make.tcp({ ...FROM, flags: 'A', ack: 3, ipOptions: new Uint8Array(8).fill(1) }),
      { flags: 'R', seq: 3 },
    ],
    ['partial checksum', make.partial(make.tcp({ ...FROM, flags: 'S', seq: 1 })), { flags: 'RA', ack: 2 }],
    [
      'super-packet',
      make.partial(make.tcp({ ...FROM, flags: '', seq: 1, payload: 30_000 }), 1448),
      { flags: 'RA', ack: 30_001 },
    ],
  ];
  for (const [what, packet, answer] of rows) {
    await t.test(what, async (t) => {
      const slot = slotOf(packet);
      t.ok(mayAnswer(slot.memory.bytes, slot.memory.view, slot.at));
      answerRst(slot.memory, slot.at, slot.length, ANSWER);
      t.same(answered(t, slot), make.tcp({ ...BACK, win: 0, ...answer }));
    });
  }
});

t.test('an RST out of nothing', async (t) => {
  const slot = slotOf(new Uint8Array(40).fill(0xee));
  const ports = (8080 << 16) | 40000;
  buildRst(slot.memory, slot.at, parseIpv4(VIP), parseIpv4(CLIENT) | 0, ports, -2, 77, RST | ACK, ANSWER);
  const same = { ...BACK, sport: 8080, win: 0, flags: 'RA', seq: 0xfffffffe, ack: 77 };
  t.same(answered(t, slot), make.tcp(same));
  buildRst(slot.memory, slot.at, parseIpv4(VIP), parseIpv4(CLIENT), ports, 5, 0, RST, ANSWER);
  t.same(answered(t, slot), make.tcp({ ...same, flags: 'R', seq: 5, ack: 0 }));
});

/** The error that is due, by the independent builder. */
function unreachable(quoted: Uint8Array, code: number, mtu = 0): Uint8Array {
  return make.icmpError({
    src: VIP,
    dst: CLIENT,
    tos: 0xc0,
    type: 3,
    code,
    mtu,
    quoted,
    quoteBytes: Math.min(548, quoted.length),
  });
}

t.test('ICMP unreachable quotes the packet as the client sent it', async (t) => {
  const long = make.udp({ ...FROM, payload: 1400, tos: 0x2e });
  const segment = { ...FROM, seq: 9, ack: 8, options: { timestamps: [1, 2] as const } };
  const data = make.pattern(3000);
  const datagrams = make.pattern(900);
  const firstFragment = make.fragmentOf(make.udp({ ...FROM, id: 5, payload: 4000 }), 0, 1480);
  const rows: [what: string, packet: Uint8Array | MemoryPacket, quoted: Uint8Array][] = [
    ['short', make.udp({ ...FROM, payload: 3 }), make.udp({ ...FROM, payload: 3 })],
    ['just 576 in all', make.udp({ ...FROM, payload: 520 }), make.udp({ ...FROM, payload: 520 })],
    ['no more than 576 in all', long, long],
    [
      'IP options',
      make.udp({ ...FROM, ipOptions: make.pattern(12), payload: 2 }),
      make.udp({ ...FROM, ipOptions: make.pattern(12), payload: 2 }),
    ],
    [
      'UDP without a checksum',
      make.udp({ ...FROM, payload: 3, checksum: 0 }),
      make.udp({ ...FROM, payload: 3, checksum: 0 }),
    ],
    [
      'a wrong checksum is quoted as it is',
      make.udp({ ...FROM, payload: 3, checksum: 1 }),
      make.udp({ ...FROM, payload: 3, checksum: 1 }),
    ],
    ['another protocol', make.ip(ENDS, 132, make.pattern(40)), make.ip(ENDS, 132, make.pattern(40))],
    [
      'first fragment',
      make.fragmentOf(make.udp({ ...FROM, id: 5, payload: 4000 }), 0, 1480),
      make.fragmentOf(make.udp({ ...FROM, id: 5, payload: 4000 }), 0, 1480),
    ],
    ['partial UDP checksum', make.partial(make.udp({ ...FROM, payload: 333 })), make.udp({ ...FROM, payload: 333 })],
    [
      'partial TCP checksum',
      make.partial(make.tcp({ ...segment, payload: 1000 })),
      make.tcp({ ...segment, payload: 1000 }),
    ],
    [
      'TCP super-packet: the first segment',
      make.partial(make.tcp({ ...segment, flags: 'PAFE', payload: data }), 1448),
      make.tcp({ ...segment, flags: 'AE', payload: data.subarray(0, 1448) }),
    ],
    [
      'TCP super-packet with small segments',
      make.partial(make.tcp({ ...segment, flags: 'PA', payload: data }), 100),
      make.tcp({ ...segment, flags: 'A', payload: data.subarray(0, 100) }),
    ],
    [
      'a super-packet of one segment',
      make.partial(make.tcp({ ...segment, flags: 'PA', payload: 90 }), 100),
      make.tcp({ ...segment, flags: 'PA', payload: 90 }),
    ],
    [
      'exactly one segment keeps its FIN',
      make.partial(make.tcp({ ...segment, flags: 'FPA', payload: 100 }), 100),
      make.tcp({ ...segment, flags: 'FPA', payload: 100 }),
    ],
    [
      'a super-packet of segments of no size is none',
      { bytes: make.tcp({ ...segment, flags: 'PA', payload: 90 }), vnet: Uint8Array.of(0, 1, 0, 0, 0, 0, 0, 0, 0, 0) },
      make.tcp({ ...segment, flags: 'PA', payload: 90 }),
    ],
    [
      'a vnet header on a fragment is not believed',
      { bytes: firstFragment, vnet: make.partial(make.udp(FROM), 300).vnet! },
      firstFragment,
    ],
    [
      'UDP super-packet without checksums',
      {
        bytes: make.udp({ ...FROM, payload: datagrams, checksum: 0 }),
        vnet: Uint8Array.of(0, 5, 28, 0, 44, 1, 0, 0, 0, 0),
      },
      make.udp({ ...FROM, payload: datagrams.subarray(0, 300), checksum: 0 }),
    ],
    [
      'UDP super-packet: the first datagram',
      make.partial(make.udp({ ...FROM, payload: datagrams }), 300),
      make.udp({ ...FROM, payload: datagrams.subarray(0, 300) }),
    ],
  ];
  for (const [what, packet, quoted] of rows) {
    await t.test(what, async (t) => {
      const slot = slotOf(packet);
      answerUnreachable(slot.memory, slot.at, slot.length, PORT_UNREACHABLE, 0, ANSWER);
      const { bytes, vnet } = answerIn(slot, ANSWER);
      t.same(bytes, unreachable(quoted, 3));
      t.same(vnet, NO_VNET);
      t.ok(bytes.length <= 576);
      t.ok(isIntactOutside(slot, ANSWER.offset - 10), 'nothing else is touched');
    });
  }
});

t.test('a computed UDP checksum of 0 is quoted as ffff', async (t) => {
  let found = 0;
  for (let sport = 0; sport < 65536; sport++) {
    const packet = make.udp({ ...FROM, sport, payload: 3 });
    if (packet[26] !== 0xff || packet[27] !== 0xff) continue;
    found++;
    const slot = slotOf(make.partial(packet));
    answerUnreachable(slot.memory, slot.at, slot.length, PORT_UNREACHABLE, 0, ANSWER);
    t.same(answered(t, slot), unreachable(packet, 3));
  }
  t.ok(found > 0);
});

t.test('frag-needed carries the MTU', async (t) => {
  const packet = make.tcp({ ...FROM, payload: 1460 });
  const slot = slotOf(packet);
  answerUnreachable(slot.memory, slot.at, slot.length, FRAGMENTATION_NEEDED, 1438, ANSWER);
  t.same(answered(t, slot), unreachable(packet, 4, 1438));
});

t.test('a port unreachable for a flow that is cut', async (t) => {
  const slot = slotOf(new Uint8Array(28).fill(0xee));
  buildPortUnreachable(slot.memory, slot.at, parseIpv4(CLIENT) | 0, parseIpv4(VIP), (40000 << 16) | 80, ANSWER);
  t.same(answered(t, slot), unreachable(make.udp({ ...FROM, checksum: 0 }), 3));
});

t.test('echo reply', async (t) => {
  const rows: [what: string, request: Uint8Array | MemoryPacket, reply: Uint8Array][] = [];
  for (const payload of [0, 1, 56, 1472]) {
    rows.push([
      `${payload} bytes, DF`,
      make.echoRequest({ ...ENDS, id: 7, seq: 3, payload, ttl: 9 }),
      make.echoReply({ src: VIP, dst: CLIENT, id: 7, seq: 3, payload }),
    ]);
  }
  const message = { type: 8, rest: 0x00070003, payload: 20 };
  rows.push(
    [
      'without DF the identification is kept',
      make.icmp({ ...ENDS, ...message, id: 999, tos: 0xb8 }),
      make.icmp({ src: VIP, dst: CLIENT, ...message, type: 0, id: 999, tos: 0xb8 }),
    ],
    [
      'IP options are left out',
      make.icmp({ ...ENDS, ...message, ipOptions: new Uint8Array(12).fill(1) }),
      make.icmp({ src: VIP, dst: CLIENT, ...message, type: 0 }),
    ],
    [
      'a code is not echoed',
      make.icmp({ ...ENDS, ...message, code: 5 }),
      make.icmp({ src: VIP, dst: CLIENT, ...message, type: 0 }),
    ],
    [
      'nothing but zeros: its checksum is ffff, not 0',
      make.icmp({ ...ENDS, type: 8 }),
      make.icmp({ src: VIP, dst: CLIENT, type: 0 }),
    ],
  );
  for (const [what, request, reply] of rows) {
    await t.test(what, async (t) => {
      const slot = slotOf(request);
      t.ok(mayAnswer(slot.memory.bytes, slot.memory.view, slot.at));
      answerEcho(slot.memory, slot.at, slot.length, ANSWER);
      t.same(answered(t, slot), reply);
    });
  }
  await t.test('a checksum the sender left to others', async (t) => {
    const request = make.icmp({ ...ENDS, ...message, checksum: 0 });
    const slot = slotOf({ bytes: request, vnet: Uint8Array.of(1, 0, 0, 0, 0, 0, 20, 0, 2, 0) });
    answerEcho(slot.memory, slot.at, slot.length, ANSWER);
    t.same(answered(t, slot), make.icmp({ src: VIP, dst: CLIENT, ...message, type: 0 }));
  });
  await t.test('a wrong checksum is not made right', async (t) => {
    const slot = slotOf(make.icmp({ ...ENDS, ...message, checksum: 0x1234 }));
    answerEcho(slot.memory, slot.at, slot.length, ANSWER);
    t.same(make.verifyChecksums(answerIn(slot, ANSWER).bytes), ['ICMP checksum']);
  });
});

t.test('what is never answered (RFC 1122 3.2.2)', async (t) => {
  const may = (packet: Uint8Array) => {
    const { memory, at } = slotOf(packet);
    return mayAnswer(memory.bytes, memory.view, at);
  };
  t.ok(may(make.udp(FROM)));
  t.ok(may(make.ip(ENDS, 132, make.pattern(8))));
  t.ok(may(make.tcp({ ...FROM, flags: 'S' })));
  t.ok(may(make.tcp({ ...FROM, flags: 'FA' })));
  t.notOk(may(make.tcp({ ...FROM, flags: 'R' })));
  t.notOk(may(make.tcp({ ...FROM, flags: 'RA' })));
  t.notOk(may(make.tcp({ ...FROM, flags: 'SRFPAUEW' })));
  for (let type = 0; type < 256; type++) {
    const expected = type === 8;
    if (may(make.icmp({ ...ENDS, type, payload: 28 })) !== expected) t.fail(`ICMP type ${type}`);
  }
  for (const src of [
    '0.0.0.0',
    '0.1.2.3',
    '127.0.0.1',
    '224.0.0.5',
    '239.1.1.1',
    '240.0.0.1',
    '255.255.255.255',
    VIP,
  ]) {
    t.notOk(may(make.udp({ ...FROM, src })), `from ${src}`);
  }
  for (const dst of ['224.0.0.1', '239.255.255.255', '255.255.255.255'])
    t.notOk(may(make.udp({ ...FROM, dst })), `to ${dst}`);
  const pieces = make.fragment(make.udp({ ...FROM, id: 3, payload: 3000 }), 1480);
  t.same(pieces.map(may), [true, false, false], 'only the first fragment');
});

t.test('rate limits', async (t) => {
  const source = (n: number) => (0x0a010000 + n) | 0;
  const burst = (limiter: AnswerLimiter, from: number, count: number, atMs: (i: number) => number) => {
    let allowed = 0;
    for (let i = 0; i < count; i++) if (limiter.allow(from, atMs(i))) allowed++;
    return allowed;
  };

  await t.test('60 in half a second from one source: exactly 50', async (t) => {
    const limiter = new AnswerLimiter();
    t.equal(
      burst(limiter, source(1), 60, (i) => 700 + (i * 500) / 60),
      REPLIES_PER_SOURCE_PER_SECOND,
    );
    t.notOk(limiter.allow(source(1), 1699.9), 'the window lasts a second from its first answer');
    t.equal(
      burst(limiter, source(1), 60, () => 1700),
      REPLIES_PER_SOURCE_PER_SECOND,
      'then another begins',
    );
    t.ok(limiter.allow(source(2), 1700), 'others are not affected');
  });

  await t.test('1000 in all; a refused source takes nothing from the others', async (t) => {
    const limiter = new AnswerLimiter();
    t.equal(
      burst(limiter, source(0), 5000, () => 0),
      50,
    );
    let allowed = 0;
    for (let n = 1; n <= 2000; n++) if (limiter.allow(source(n), 1)) allowed++;
    t.equal(allowed, REPLIES_PER_SECOND - 50);
    t.notOk(limiter.allow(source(5000), 999.9));
    t.ok(limiter.allow(source(5000), 1000));
  });

  await t.test('a flood of forged sources makes no source forgotten', async (t) => {
    const limiter = new AnswerLimiter();
    limiter.allow(source(0), 0); // the total's windows: 0 to 1000, 1000 to 2000
    t.equal(
      burst(limiter, source(1), 60, () => 900),
      50,
    );
    for (let n = 100; n < 1049; n++) if (!limiter.allow(source(n), 950)) t.fail('the rest of the first window');
    for (let n = 2000; n < 2999; n++) if (!limiter.allow(source(n), 1000)) t.fail('all but one of the second');
    t.notOk(limiter.allow(source(1), 1899), 'its own window is still known');
    t.ok(limiter.allow(source(1), 1900));
  });

  await t.test('a clock past 2^31 ms', async (t) => {
    const limiter = new AnswerLimiter();
    t.equal(
      burst(limiter, source(0), 60, () => 5e12),
      50,
    );
    t.equal(
      burst(limiter, source(0), 60, () => 5e12 + 999.5),
      0,
    );
    t.equal(
      burst(limiter, source(0), 60, () => 5e12 + 1000),
      50,
    );
  });
});
