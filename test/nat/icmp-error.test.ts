import fc from 'fast-check';
import t from 'tap';
import { REASON_NAMES } from '../../lib/base/reasons.js';
import type { MemoryPacket } from '../../lib/io/memory-device.js';
import { makeQuote, parseQuote, type Quote, translateError } from '../../lib/nat/icmp-error.js';
import { formatEndpoint, parseIpv4 } from '../../lib/wire/address.js';
import * as ipv4 from '../../lib/wire/ipv4.js';
import * as make from '../fixtures/packets.js';
import { isIntactOutside, packetIn, type Slot, slotOf, vnetIn } from './slot.js';

const CLIENT = { address: '10.1.0.2', port: 40000 };
const VIP = { address: '10.96.0.10', port: 80 };
const BACKEND = { address: '10.2.0.11', port: 8080 };
const SNAT = { address: '10.96.255.1', port: 51515 };
const ROUTER = '172.16.9.9';

type End = typeof CLIENT;

const quote = makeQuote();

function parse(slot: Slot, into: Quote = quote): string {
  const { memory, at, length } = slot;
  const l4 = at + ipv4.headerLength(memory.bytes, at);
  return REASON_NAMES[parseQuote(memory.view, memory.bytes, at, l4, at + length, into)]!;
}

function translate({ memory, at }: Slot, source: string, destination: string, from: End, to: End): void {
  const l4 = at + ipv4.headerLength(memory.bytes, at);
  const word = (text: string) => parseIpv4(text) | 0;
  const ports = (from.port << 16) | to.port;
  translateError(
    memory.view,
    memory.bytes,
    at,
    l4,
    quote,
    word(source),
    word(destination),
    word(from.address),
    word(to.address),
    ports,
  );
}

type Build = (from: End, to: End) => Uint8Array;
const ends = (from: End, to: End) => ({ src: from.address, dst: to.address, sport: from.port, dport: to.port });

/** Quoted packets: the same but for the two ends. */
const QUOTED: [what: string, build: Build][] = [
  [
    'TCP',
    (from, to) => make.tcp({ ...ends(from, to), seq: 12345, ack: 678, payload: 1400, options: { timestamps: [1, 2] } }),
  ],
  ['TCP, short', (from, to) => make.tcp({ ...ends(from, to), flags: 'S', seq: 12345 })],
  ['UDP', (from, to) => make.udp({ ...ends(from, to), payload: 700 })],
  ['UDP without data', (from, to) => make.udp(ends(from, to))],
  ['UDP without a checksum', (from, to) => make.udp({ ...ends(from, to), payload: 77, checksum: 0 })],
  ['IP options', (from, to) => make.udp({ ...ends(from, to), payload: 77, ipOptions: make.pattern(40) })],
  ['first fragment', (from, to) => make.fragmentOf(make.udp({ ...ends(from, to), id: 8, payload: 3000 }), 0, 1480)],
];

const ERRORS: [what: string, type: number, code: number, rest: number][] = [
  ['port unreachable', 3, 3, 0],
  ['frag-needed', 3, 4, 1400],
  ['source quench', 4, 0, 0],
  ['redirect', 5, 1, 0x0a0900fe],
  ['TTL exceeded', 11, 0, 0],
  ['parameter problem', 12, 0, 0x14000000],
];

/** An error as it arrives, and as it must leave. */
interface Case {
  readonly side: string;
  readonly from: string;
  readonly to: End;
  readonly quoted: readonly [End, End];
  readonly newFrom: string;
  readonly newTo: End;
  readonly newQuoted: readonly [End, End];
}

t.test('both sides, dnat and snat: the error its receiver would have got without weir between', async (t) => {
  for (const [mode, returned] of [
    ['dnat', CLIENT],
    ['snat', SNAT],
  ] as const) {
    for (const [what, build] of QUOTED) {
      for (const [error, type, code, rest] of ERRORS) {
        const whole = build(returned, BACKEND).length;
        for (const quoteBytes of new Set([make.headerLength(build(returned, BACKEND)) + 8, 60, 100, 548, whole])) {
          if (quoteBytes > whole || quoteBytes < make.headerLength(build(returned, BACKEND)) + 8) continue;
          const icmpError = (src: string, dst: string, quoted: Uint8Array) =>
            make.icmpError({ src, dst, tos: 0xc0, type, code, mtu: rest, quoted, quoteBytes });
          const cases: Case[] = [
            {
              side: 'backend side, a router',
              from: ROUTER,
              to: returned,
              quoted: [returned, BACKEND],
              newFrom: ROUTER,
              newTo: CLIENT,
              newQuoted: [CLIENT, VIP],
            },
            {
              side: 'backend side, the backend',
              from: BACKEND.address,
              to: returned,
              quoted: [returned, BACKEND],
              newFrom: VIP.address,
              newTo: CLIENT,
              newQuoted: [CLIENT, VIP],
            },
            {
              side: 'client side, a router',
              from: ROUTER,
              to: VIP,
              quoted: [VIP, CLIENT],
              newFrom: ROUTER,
              newTo: BACKEND,
              newQuoted: [BACKEND, returned],
            },
            {
              side: 'client side, the client',
              from: CLIENT.address,
              to: VIP,
              quoted: [VIP, CLIENT],
              newFrom: returned.address,
              newTo: BACKEND,
              newQuoted: [BACKEND, returned],
            },
          ];
          for (const row of cases) {
            const slot = slotOf(icmpError(row.from, row.to.address, build(...row.quoted)));
            const name = `${mode}, ${row.side}: ${error} quoting ${quoteBytes} bytes of ${what}`;
            if (parse(slot) !== 'none') t.fail(name);
            translate(slot, row.newFrom, row.newTo.address, ...row.newQuoted);
            const expected = icmpError(row.newFrom, row.newTo.address, build(...row.newQuoted));
            // Not t.same for each of the thousand: only what differs is worth a line.
            if (Buffer.compare(packetIn(slot), expected) !== 0) t.same(packetIn(slot), expected, name);
            if (!isIntactOutside(slot)) t.fail(`${name}: wrote outside`);
          }
        }
      }
    }
  }
  t.pass();
});

t.test('what the quote says', async (t) => {
  const quoted = make.tcp({ ...ends(VIP, CLIENT), seq: 9, ipOptions: make.pattern(8), payload: 30 });
  const slot = slotOf(
    make.icmpError({ src: ROUTER, dst: VIP.address, type: 3, code: 4, mtu: 1400, quoted, ipOptions: make.pattern(4) }),
  );
  t.equal(parse(slot), 'none');
  t.equal(quote.at, slot.at + 24 + 8);
  t.equal(quote.l4, quote.at + 28);
  t.equal(quote.end, slot.at + slot.length);
  t.equal(quote.messageEnd, quote.end);
  t.equal(quote.protocol, 6);
  t.equal(formatEndpoint(quote.source, quote.ports >>> 16), '10.96.0.10:80');
  t.equal(formatEndpoint(quote.destination, quote.ports & 0xffff), '10.1.0.2:40000');
  t.equal(slot.memory.view.getUint32(quote.l4 + 4), 9, 'the sequence number, for whoever knows the window');
});

t.test('echo messages in the quote: addresses change, the identifier does not', async (t) => {
  for (const type of [0, 8]) {
    const build: Build = (from, to) =>
      make.icmp({ src: from.address, dst: to.address, type, rest: 0x12340001, payload: 20 });
    const error = (src: string, dst: string, quoted: Uint8Array) =>
      make.icmpError({ src, dst, type: 11, code: 0, quoted });
    const slot = slotOf(error(ROUTER, VIP.address, build(VIP, CLIENT)));
    t.equal(parse(slot), 'none');
    t.equal(quote.protocol, 1);
    t.equal(quote.ports, 0x12341234);
    translate(slot, ROUTER, BACKEND.address, BACKEND, CLIENT);
    t.same(packetIn(slot), error(ROUTER, BACKEND.address, build(BACKEND, CLIENT)));
  }
});

t.test('dropped by reason', async (t) => {
  const sent = make.udp({ ...ends(VIP, CLIENT), payload: 30 });
  const error = (quoted: Uint8Array, more: { quoteBytes?: number; dst?: string } = {}) =>
    make.icmpError({ src: ROUTER, dst: VIP.address, type: 3, code: 3, quoted, ...more });
  const bent = (at: number, byte: number) => error(sent.map((old, i) => (i === at ? byte : old)));
  const rows: [what: string, packet: Uint8Array, reason: string][] = [
    ['28 bytes', error(sent, { quoteBytes: 28 }), 'none'],
    ['27 bytes', error(sent, { quoteBytes: 27 }), 'icmp-malformed'],
    ['nothing', error(sent, { quoteBytes: 0 }), 'icmp-malformed'],
    [
      '8 bytes of L4 short of the options',
      error(make.udp({ ...ends(VIP, CLIENT), ipOptions: make.pattern(8) }), { quoteBytes: 35 }),
      'icmp-malformed',
    ],
    ['version 6', bent(0, 0x65), 'icmp-malformed'],
    ['header length 16', bent(0, 0x44), 'icmp-malformed'],
    ['header longer than the quote', bent(0, 0x4f), 'icmp-malformed'],
    ['total length below its header', bent(3, 12), 'icmp-malformed'],
    ['total length of 7 bytes of L4', bent(3, 27), 'icmp-malformed'],
    ['wrong ICMP checksum', error(sent).map((byte, i) => (i === 50 ? byte ^ 1 : byte)), 'icmp-malformed'],
    ['another protocol', bent(9, 132), 'icmp-unknown-flow'],
    [
      'an ICMP error about an ICMP error',
      error(make.icmpError({ src: VIP.address, dst: CLIENT.address, type: 3, code: 1, quoted: sent })),
      'icmp-unknown-flow',
    ],
    ['an echo', error(make.echoReply({ src: VIP.address, dst: CLIENT.address, id: 1 })), 'none'],
    [
      'fragment other than the first',
      error(make.fragmentOf(make.udp({ ...ends(VIP, CLIENT), id: 1, payload: 99 }), 8, 40)),
      'icmp-unknown-flow',
    ],
    ['not addressed to the sender of what it quotes', error(sent, { dst: '10.96.0.11' }), 'icmp-unknown-flow'],
    ['a quoted TTL of 0 and a stale header checksum are the path’s doing', bent(8, 0), 'none'],
  ];
  for (const [what, packet, reason] of rows) {
    const slot = slotOf(packet);
    t.equal(parse(slot), reason, what);
    t.same(packetIn(slot), packet, 'parsing changes nothing');
  }
});

t.test('checksums within the quote are adjusted, not repaired', async (t) => {
  const build = (from: End, to: End) => {
    const packet = make.tcp({ ...ends(from, to), payload: 40 });
    packet[8] = 1; // the TTL it had where it died, with the header checksum it was sent with
    packet[37] = packet[37]! ^ 0x10; // a wrong TCP checksum
    return packet;
  };
  const error = (src: string, dst: string, quoted: Uint8Array) =>
    make.icmpError({ src, dst, type: 11, code: 0, quoted });
  const slot = slotOf(error(ROUTER, VIP.address, build(VIP, CLIENT)));
  t.equal(parse(slot), 'none');
  translate(slot, ROUTER, BACKEND.address, BACKEND, CLIENT);
  t.same(packetIn(slot), error(ROUTER, BACKEND.address, build(BACKEND, CLIENT)));
});

t.test('a checksum the sender left to others is completed', async (t) => {
  const quoted = make.udp({ ...ends(CLIENT, BACKEND), payload: 30 });
  const packet: MemoryPacket = {
    bytes: make.icmp({ src: ROUTER, dst: CLIENT.address, type: 3, code: 3, payload: quoted, checksum: 0 }),
    vnet: Uint8Array.of(1, 0, 0, 0, 0, 0, 20, 0, 2, 0),
  };
  const slot = slotOf(packet);
  t.equal(parse(slot), 'none');
  translate(slot, ROUTER, CLIENT.address, CLIENT, VIP);
  t.same(make.verifyChecksums(packetIn(slot)), []);
  t.same(vnetIn(slot), new Uint8Array(10));
});

t.test('multi-part extensions (RFC 4884) and padding are left alone', async (t) => {
  const extension = Uint8Array.from([0x20, 0, 0xdf, 0xff, 0, 8, 1, 1, 0, 0, 0x11, 0x40]);
  const build = (from: End, to: End) => {
    const payload = new Uint8Array(128 + extension.length);
    payload.set(make.tcp({ ...ends(from, to), payload: 8 }));
    payload.set(extension, 128);
    return payload;
  };
  const error = (src: string, dst: string, payload: Uint8Array) =>
    make.icmp({ src, dst, type: 11, code: 0, rest: 32 << 16, payload });
  const slot = slotOf(error(ROUTER, VIP.address, build(VIP, CLIENT)));
  t.equal(parse(slot), 'none');
  t.equal(quote.end, quote.at + 48, 'the datagram ends before the padding');
  translate(slot, ROUTER, BACKEND.address, BACKEND, CLIENT);
  t.same(packetIn(slot), error(ROUTER, BACKEND.address, build(BACKEND, CLIENT)));

  // A router from before RFC 4884 with anything in the unused byte.
  for (const byte of [1, 7, 31, 255]) {
    const long = make.tcp({ ...ends(VIP, CLIENT), payload: 300 });
    const old = slotOf(make.icmp({ src: ROUTER, dst: VIP.address, type: 3, code: 1, rest: byte << 16, payload: long }));
    t.equal(parse(old), 'none');
    t.equal(quote.end, quote.at + 340);
  }
});

t.test('translating there and back gives the error back, whatever it is', async (t) => {
  const end = fc.record({
    address: fc.tuple(fc.nat(255), fc.nat(255), fc.nat(255), fc.nat(255)).map((parts) => parts.join('.')),
    port: fc.nat(65535),
  });
  fc.assert(
    fc.property(
      end,
      end,
      end,
      end,
      fc.nat(QUOTED.length - 1),
      fc.integer({ min: 68, max: 548 }),
      fc.constantFrom(3, 4, 5, 11, 12),
      (a, b, c, d, which, quoteBytes, type) => {
        const error = make.icmpError({
          src: ROUTER,
          dst: a.address,
          type,
          code: 0,
          quoted: QUOTED[which]![1](a, b),
          quoteBytes,
        });
        const slot = slotOf(error);
        if (parse(slot) !== 'none') return false;
        translate(slot, ROUTER, c.address, c, d);
        if (make.verifyChecksums(packetIn(slot)).some((problem) => !problem.startsWith('quoted: UDP length')))
          return false;
        if (parse(slot) !== 'none') return false;
        translate(slot, ROUTER, a.address, a, b);
        return Buffer.compare(packetIn(slot), error) === 0 && isIntactOutside(slot);
      },
    ),
    { numRuns: 2000 },
  );
  t.pass();
});
