import fc from 'fast-check';
import t from 'tap';
import { REASON_KINDS } from '../../lib/base/reasons.js';
import type { MemoryPacket } from '../../lib/io/memory-device.js';
import { type Answer, answerEcho, answerRst, answerUnreachable, mayAnswer } from '../../lib/nat/answer.js';
import { makeQuote, parseQuote, translateError } from '../../lib/nat/icmp-error.js';
import { rewrite, rewriteAddresses } from '../../lib/nat/rewrite.js';
import * as icmp from '../../lib/wire/icmp.js';
import * as ipv4 from '../../lib/wire/ipv4.js';
import { faultOf } from '../../lib/wire/ipv4-fault.js';
import * as tcp from '../../lib/wire/tcp.js';
import * as udp from '../../lib/wire/udp.js';
import * as vnet from '../../lib/wire/vnet.js';
import * as make from '../fixtures/packets.js';
import { answerIn, isIntactOutside, packetIn, type Slot, slotOf, vnetIn } from '../nat/slot.js';

/**
 * Packets nobody sane would send, through everything that touches packets. Two laws: once `check` is content, nothing reads or
 * writes outside the packet; and whatever leaves has right lengths and checksums, or exactly what was wrong when it came.
 *
 * Reads outside are found without watching them: each packet is judged twice, among different bytes.
 */

const CLIENT = '10.1.0.2';
const VIP = '10.96.0.10';
const FROM = { src: CLIENT, dst: VIP, sport: 40000, dport: 80 } as const;
const TCP = make.tcp({
  ...FROM,
  flags: 'S',
  id: 3,
  payload: 40,
  options: { mss: 1460, scale: 7, sackPermitted: true, timestamps: [1, 2] },
});
const UDP = make.udp({ ...FROM, id: 4, payload: 64 });

const SEEDS: readonly MemoryPacket[] = [
  { bytes: TCP },
  { bytes: UDP },
  { bytes: make.udp({ ...FROM, payload: 0, checksum: 0 }) },
  { bytes: make.udp({ ...FROM, payload: 900 }) },
  { bytes: make.tcp({ ...FROM, ipOptions: make.pattern(40), options: make.pattern(40), payload: 3 }) },
  { bytes: make.echoRequest({ src: CLIENT, dst: VIP, id: 7, payload: 56 }) },
  { bytes: make.icmpError({ src: '172.16.0.1', dst: CLIENT, type: 3, code: 4, mtu: 1400, quoted: TCP }) },
  { bytes: make.icmpError({ src: '172.16.0.1', dst: CLIENT, type: 11, code: 0, quoted: UDP, quoteBytes: 28 }) },
  { bytes: make.fragmentOf(TCP, 0, 80) },
  { bytes: make.fragmentOf(UDP, 0, 40) },
  { bytes: make.fragmentOf(UDP, 40, 72) },
  { bytes: make.ip({ src: CLIENT, dst: VIP }, 132, make.pattern(20)) },
  make.partial(TCP),
  make.partial(UDP),
  make.partial(make.tcp({ ...FROM, flags: 'PA', payload: 4000 }), 1448),
  make.partial(make.udp({ ...FROM, payload: 2000 }), 300),
];

/** A seed with some bytes changed, sometimes cut; most often with its header and ICMP checksums mended, to get further. */
const mutant = fc
  .record({
    seed: fc.nat(SEEDS.length - 1),
    changes: fc.array(
      fc.tuple(fc.oneof({ weight: 3, arbitrary: fc.nat(60) }, { weight: 1, arbitrary: fc.nat(4200) }), fc.nat(255)),
      { maxLength: 5 },
    ),
    cut: fc.oneof({ weight: 4, arbitrary: fc.constant(0) }, { weight: 1, arbitrary: fc.nat(60) }),
    fixLength: fc.boolean(),
    fixHeader: fc.integer({ min: 0, max: 9 }).map((n) => n > 0),
    fixIcmp: fc.boolean(),
    vnetByte: fc.option(fc.tuple(fc.nat(9), fc.nat(255)), { freq: 10 }),
  })
  .map(({ seed, changes, cut, fixLength, fixHeader, fixIcmp, vnetByte }): MemoryPacket => {
    const { bytes: whole, vnet: header } = SEEDS[seed]!;
    const bytes = whole.slice(0, Math.max(1, whole.length - cut));
    for (const [at, byte] of changes) bytes[at % bytes.length] = byte;
    const view = new DataView(bytes.buffer);
    const headerBytes = make.headerLength(bytes);
    if (fixLength && bytes.length >= 20) view.setUint16(2, bytes.length);
    if (fixHeader && bytes.length >= 20 && headerBytes >= 20 && headerBytes <= bytes.length)
      ipv4.storeChecksum(bytes, 0);
    const total = bytes.length >= 20 ? Math.min(bytes.length, view.getUint16(2)) : 0;
    if (fixIcmp && bytes[9] === 1 && total >= headerBytes + 8) {
      const fixed = make.icmp({
        src: CLIENT,
        dst: VIP,
        type: bytes[headerBytes]!,
        code: bytes[headerBytes + 1]!,
        rest: view.getUint32(headerBytes + 4),
        payload: bytes.slice(headerBytes + 8, total),
      });
      bytes.set(fixed.subarray(22, 24), headerBytes + 2);
    }
    const vnetBytes = header?.slice() ?? new Uint8Array(10);
    if (vnetByte) vnetBytes[vnetByte[0]] = vnetByte[1];
    return { bytes, vnet: vnetBytes };
  });

const RUNS = { numRuns: 20_000 };

/** Everything the accessors can tell of a packet; only the reason when `check` refuses it. */
function readAll({ memory: { bytes, view }, at, length }: Slot): unknown[] {
  const reason = ipv4.check(bytes, at, length);
  if (reason !== 0) return [reason];
  const l4 = at + ipv4.headerLength(bytes, at);
  const protocol = ipv4.protocol(bytes, at);
  const facts: unknown[] = [
    reason,
    l4,
    protocol,
    ipv4.tos(bytes, at),
    ipv4.totalLength(bytes, at),
    ipv4.identification(bytes, at),
    ipv4.ttl(bytes, at),
    ipv4.fragmentField(bytes, at),
    ipv4.fragmentOffset(bytes, at),
    ipv4.isFragment(bytes, at),
    ipv4.source(view, at),
    ipv4.destination(view, at),
    mayAnswer(bytes, view, at),
    vnet.gsoType(bytes, at),
    vnet.gsoSize(bytes, at),
  ];
  if (ipv4.fragmentOffset(bytes, at) !== 0) return facts;
  facts.push(vnet.isPartial(bytes, at, l4));
  if (protocol === ipv4.PROTO_TCP) {
    facts.push(
      tcp.ports(view, l4),
      tcp.sequence(view, l4),
      tcp.acknowledgement(view, l4),
      tcp.dataOffset(bytes, l4),
      tcp.flags(bytes, l4),
      tcp.window(bytes, l4),
      tcp.windowScale(bytes, l4),
    );
  } else if (protocol === ipv4.PROTO_UDP)
    facts.push(tcp.ports(view, l4), udp.length(bytes, l4), udp.checksum(bytes, l4));
  else if (protocol === ipv4.PROTO_ICMP) {
    facts.push(icmp.type(bytes, l4), icmp.code(bytes, l4));
    if (icmp.isError(icmp.type(bytes, l4))) {
      const quote = makeQuote();
      facts.push(parseQuote(view, bytes, at, l4, at + ipv4.totalLength(bytes, at), quote));
      if (facts.at(-1) === 0) facts.push(quote);
    }
  }
  return facts;
}

t.test('what is wrong can be said of what is refused, and of nothing else', async () => {
  const isSaid = fc.property(mutant, ({ bytes }) => {
    return (ipv4.check(bytes, 0, bytes.length) === 0) === (faultOf(bytes, 0, bytes.length) === undefined);
  });
  fc.assert(isSaid, RUNS);
});

t.test('after check(), no accessor sees a byte outside the packet', async (t) => {
  const judge = (packet: MemoryPacket): boolean => {
    const slots = [0x00, 0xff, 0x45].map((canary) => slotOf(packet, canary));
    const facts = slots.map((slot) => JSON.stringify(readAll(slot)));
    const reason = readAll(slots[0]!)[0] as number;
    return (
      facts.every((each) => each === facts[0]) &&
      slots.every((slot) => isIntactOutside(slot)) &&
      (reason === 0 || REASON_KINDS[reason] === 'drop')
    );
  };
  fc.assert(fc.property(mutant, judge), RUNS);
  fc.assert(
    fc.property(fc.uint8Array({ minLength: 0, maxLength: 80 }), (bytes) => judge({ bytes })),
    RUNS,
  );
  t.pass();
});

/** The packet as its total length says, as the pipeline sees it; undefined when it is refused. */
function accepted(packet: MemoryPacket): Slot | undefined {
  const slot = slotOf(packet);
  const { bytes } = slot.memory;
  if (ipv4.check(bytes, slot.at, slot.length) !== 0) return undefined;
  return slotOf({ ...packet, bytes: packet.bytes.slice(0, ipv4.totalLength(bytes, slot.at)) });
}

t.test('answers to anything that may be answered are right', async (t) => {
  const answer: Answer = { offset: 0, length: 0 };
  let answers = 0;
  fc.assert(
    fc.property(mutant, fc.boolean(), (packet, unreachable) => {
      const slot = accepted(packet);
      if (slot === undefined) return;
      const { memory, at, length } = slot;
      if (!mayAnswer(memory.bytes, memory.view, at)) return;
      const protocol = ipv4.protocol(memory.bytes, at);
      const before = make.verifyChecksums(packetIn(slot));
      const source = ipv4.source(memory.view, at);
      const destination = ipv4.destination(memory.view, at);
      const isEcho = protocol === ipv4.PROTO_ICMP && !unreachable;
      if (isEcho && ipv4.isFragment(memory.bytes, at)) return;
      const build = isEcho
        ? () => answerEcho(memory, at, length, answer)
        : protocol === ipv4.PROTO_TCP && !unreachable
          ? () => answerRst(memory, at, length, answer)
          : () => answerUnreachable(memory, at, length, icmp.PORT_UNREACHABLE, 0, answer);
      build();
      answers++;
      const made = answerIn(slot, answer);
      const wrong = make.verifyChecksums(made.bytes).filter((problem) => {
        // A checksum that was wrong is echoed, and quoted, as wrong as it came.
        if (problem === 'ICMP checksum' && isEcho)
          return (
            !before.includes(problem) &&
            vnet.isPartial(slotOf(packet).memory.bytes, at, at + make.headerLength(packet.bytes))
          );
        return !problem.startsWith('quoted: ');
      });
      if (wrong.length > 0) throw new Error(wrong.join());
      if (made.vnet.some((byte) => byte !== 0)) throw new Error('vnet header');
      if (made.bytes.length > (isEcho ? length : 576)) throw new Error(`${made.bytes.length} bytes`);
      const view = new DataView(made.bytes.buffer);
      if (ipv4.source(view, 0) !== destination || ipv4.destination(view, 0) !== source) throw new Error('ends');
      if (ipv4.check(made.bytes, 0, made.bytes.length) !== 0) throw new Error('refused by check()');
      if (!isEcho && mayAnswer(made.bytes, view, 0)) throw new Error('an answer to it is allowed');
      if (!isIntactOutside(slot, Math.min(at, answer.offset) - 10)) throw new Error('wrote outside');
    }),
    RUNS,
  );
  t.ok(answers > 5000, `${answers} answers`);
});

t.test('a quote of an intact packet is intact, whatever offload it came with', async (t) => {
  const answer: Answer = { offset: 0, length: 0 };
  fc.assert(
    fc.property(fc.boolean(), fc.nat(500), fc.nat(600), fc.nat(65535), (isTcp, payload, gso, seq) => {
      const whole = isTcp
        ? make.tcp({ ...FROM, flags: 'PA', seq, payload })
        : make.udp({ ...FROM, sport: seq, payload });
      const slot = slotOf(make.partial(whole, gso));
      answerUnreachable(slot.memory, slot.at, slot.length, icmp.PORT_UNREACHABLE, 0, answer);
      return make.verifyChecksums(answerIn(slot, answer).bytes).length === 0;
    }),
    { numRuns: 3000 },
  );
  t.pass();
});

const word = fc.integer({ min: -0x80000000, max: 0x7fffffff });

t.test('rewriting keeps what is right right and what is wrong wrong', async (t) => {
  fc.assert(
    fc.property(mutant, word, word, word, (packet, src, dst, ports) => {
      const slot = accepted(packet);
      if (slot === undefined) return true;
      const {
        memory: { bytes, view },
        at,
      } = slot;
      const l4 = at + ipv4.headerLength(bytes, at);
      // A vnet header that speaks of another place than the L4 header says nothing of this checksum.
      const partial = vnet.isPartial(bytes, at, l4);
      const problems = () => make.verifyChecksums(packetIn(slot), partial ? vnetIn(slot) : undefined).join();
      const before = problems();
      const isLater = ipv4.fragmentOffset(bytes, at) !== 0;
      if (isLater) rewriteAddresses(view, bytes, at, src, dst);
      else rewrite(view, bytes, at, l4, ipv4.protocol(bytes, at), src, dst, ports, partial);
      return isIntactOutside(slot) && ipv4.check(bytes, at, slot.length) === 0 && problems() === before;
    }),
    RUNS,
  );
  t.pass();
});

t.test('translated errors: the same, within the quote too', async (t) => {
  let translated = 0;
  const quote = makeQuote();
  fc.assert(
    fc.property(
      mutant.filter(({ bytes }) => bytes[9] === 1),
      word,
      word,
      word,
      (packet, src, dst, ports) => {
        const slot = accepted(packet);
        if (slot === undefined) return true;
        const {
          memory: { bytes, view },
          at,
          length,
        } = slot;
        const l4 = at + ipv4.headerLength(bytes, at);
        if (ipv4.isFragment(bytes, at) || !icmp.isError(icmp.type(bytes, l4))) return true;
        const before = packetIn(slot);
        const wasPartial = vnet.isPartial(bytes, at, l4);
        if (parseQuote(view, bytes, at, l4, at + length, quote) !== 0)
          return Buffer.compare(packetIn(slot), before) === 0;
        translateError(view, bytes, at, l4, quote, src, dst, dst, src, ports);
        translated++;
        const problems = make.verifyChecksums(before).filter((problem) => !(wasPartial && problem === 'ICMP checksum'));
        return (
          isIntactOutside(slot) &&
          ipv4.check(bytes, at, length) === 0 &&
          make.verifyChecksums(packetIn(slot)).join() === problems.join() &&
          parseQuote(view, bytes, at, l4, at + length, quote) === 0
        );
      },
    ),
    RUNS,
  );
  t.ok(translated > 2000, `${translated} translated`);
});
