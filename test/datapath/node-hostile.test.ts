import t from 'tap';
import { below, type Random, seededRandom } from '../../lib/base/random.js';
import { REASON_NAMES } from '../../lib/base/reasons.js';
import { STAT_REASONS } from '../../lib/datapath/stats.js';
import type { MemoryPacket } from '../../lib/io/memory-device.js';
import { dsrOption, geneve, tunnelled } from '../fixtures/geneve.js';
import { echoRequest, fragment, icmpError, partial, tcp, udp, verifyChecksums } from '../fixtures/packets.js';
import { mutate } from '../support/mutate.js';
import { TestPipeline } from '../support/pipeline.js';

/**
 * Mutated datagrams and answers through a node: no crash, no slot lost, nothing emitted with a wrong length or header checksum.
 * What is random altogether is dropped, whatever it is.
 */
const PACKETS = Number(process.env.WEIR_FUZZ_PACKETS ?? 1_000_000) / 4;

const SEGMENT_BYTES = 100;

const CONFIG = 'role: node\ntunnel: { address: 10.2.0.11 }\n';

const toBackend = { src: '10.1.0.2', sport: 40000, dst: '10.2.0.11', dport: 8080 };
const fromBackend = { src: '10.2.0.11', sport: 8080, dst: '10.1.0.2', dport: 40000 };
const request = { src: '10.1.0.2', sport: 5000, dst: '10.2.0.11', dport: 53 };

/** What clients send. */
const INNERS = [
  tcp({ ...toBackend, flags: 'S', seq: 1, options: { mss: 1460, scale: 7, sackPermitted: true } }),
  tcp({ ...toBackend, flags: 'A', seq: 2, ack: 101 }),
  tcp({ ...toBackend, flags: 'FA', seq: 402, ack: 101 }),
  tcp({ ...toBackend, flags: 'R', seq: 402 }),
  udp({ ...request, payload: 30 }),
  ...fragment(udp({ ...request, id: 77, payload: 3000 }), 1480),
  echoRequest({ src: '10.1.0.2', dst: '10.2.0.11', id: 7, payload: 56 }),
  icmpError({
    src: '10.1.0.1',
    dst: '10.2.0.11',
    type: 3,
    code: 4,
    mtu: 1400,
    quoted: tcp({ ...fromBackend, seq: 5 }),
  }),
];

const TRAIN = Array.from({ length: 6 }, (_, i) =>
  tcp({ ...toBackend, id: i, df: true, flags: 'A', seq: 2 + i * SEGMENT_BYTES, ack: 101, payload: SEGMENT_BYTES }),
);

/** What backends answer. */
const ANSWERS: MemoryPacket[] = [
  { bytes: tcp({ ...fromBackend, flags: 'SA', seq: 100, ack: 2, options: { mss: 1460, scale: 7 } }) },
  { bytes: udp({ src: '10.2.0.11', sport: 53, dst: '10.1.0.2', dport: 5000, payload: 300 }) },
  partial(tcp({ ...fromBackend, flags: 'A', seq: 101, ack: 402, payload: 5000 }), 1398),
  {
    bytes: icmpError({ src: '10.2.0.11', dst: '10.1.0.2', type: 3, code: 3, quoted: udp({ ...request, payload: 30 }) }),
  },
];

const VIP = dsrOption('10.96.0.10', 80);
const OTHER_VIP = dsrOption('10.96.0.11', 80);
const FOREIGN = { class: 0x0102, type: 0x01, data: new Uint8Array(8) };
const OUTER = { src: '192.0.2.1', dst: '10.2.0.11', sport: 50000 };

/** The ways into the node. */
const WRAPPERS: ReadonlyArray<(inner: Uint8Array) => MemoryPacket> = [
  (inner) => ({ bytes: geneve({ options: [VIP] }, inner), tunnel: { peer: 1 } }),
  (inner) => ({ bytes: geneve({ options: [FOREIGN, OTHER_VIP], protocol: 0x0800 }, inner), tunnel: { peer: 1 } }),
  (inner) => ({ bytes: geneve({}, inner), tunnel: { peer: 1 } }),
  (inner) => ({ bytes: tunnelled(OUTER, geneve({ options: [VIP] }, inner)) }),
];

/** A packet that is broken somewhere, at times: outside, inside, or in the middle of a train. */
function anyPacket(random: Random): MemoryPacket {
  const dice = below(random, 8);
  if (dice === 0) {
    const answer = ANSWERS[below(random, ANSWERS.length)]!;
    return below(random, 2) === 0 ? answer : mutate(answer, random);
  }
  if (dice === 1) {
    const broken = below(random, 2 * TRAIN.length);
    const train = TRAIN.map((bytes, i) => (i === broken ? flipBit(bytes, random) : bytes));
    const datagrams = train.map((segment) => geneve({ options: [VIP] }, segment));
    return { bytes: Buffer.concat(datagrams), tunnel: { peer: 1, datagramBytes: datagrams[0]!.length } };
  }
  const inner = { bytes: INNERS[below(random, INNERS.length)]! };
  const wrap = WRAPPERS[below(random, WRAPPERS.length)]!;
  if (dice === 2) return wrap(inner.bytes);
  return dice < 6 ? wrap(mutate(inner, random).bytes) : mutate(wrap(inner.bytes), random);
}

function flipBit(bytes: Uint8Array, random: Random): Uint8Array {
  const copy = bytes.slice();
  copy[below(random, copy.length)]! ^= 1 << below(random, 8);
  return copy;
}

t.test(`${PACKETS} mutated packets`, async (t) => {
  const random = seededRandom(20261130);
  const pipeline = new TestPipeline(CONFIG, { tcpEntries: 256, anyEntries: 256 });
  let emitted = 0;
  const wrong: string[] = [];
  for (let done = 0; done < PACKETS && wrong.length < 5; ) {
    const batch = Array.from({ length: 1 + below(random, 32) }, () => anyPacket(random));
    done += batch.length;
    pipeline.nowMs += below(random, 2000);
    const [first] = pipeline.sendBatch(batch);
    pipeline.flushDue();
    for (const { bytes, vnet } of first!.out) {
      emitted++;
      const mistakes = verifyChecksums(bytes, vnet).filter(
        // What was joined here must be right altogether.
        (mistake) => vnet?.[4] === SEGMENT_BYTES || (/^IP|total length/i.test(mistake) && !mistake.includes('quote')),
      );
      for (const mistake of mistakes) wrong.push(`${mistake}: ${Buffer.from(bytes).toString('hex').slice(0, 160)}`);
    }
    if (pipeline.device.slotsHeld !== 0) wrong.push(`${pipeline.device.slotsHeld} slots were not given back`);
  }
  t.same(wrong, []);
  t.ok(emitted > PACKETS / 4, `${emitted} packets came out`);
  const seen = REASON_NAMES.filter((_, reason) => pipeline.stats[STAT_REASONS + reason]! > 0);
  t.ok(seen.length >= 9, `reasons met: ${seen.join(' ')}`);
});

t.test('random bytes', async (t) => {
  const random = seededRandom(1);
  const pipeline = new TestPipeline(CONFIG);
  const dropped: Record<string, number> = {};
  for (let i = 0; i < 20_000; i++) {
    const bytes = Uint8Array.from({ length: below(random, 200) }, () => random());
    if (bytes.length > 8 && i % 2 === 0) bytes.set([below(random, 8), 0x40, 0x65, 0x58]);
    const { verdict, reason } = pipeline.send({ bytes, tunnel: { peer: 1, datagramBytes: 1 + below(random, 200) } });
    dropped[`${verdict} ${reason}`] = (dropped[`${verdict} ${reason}`] ?? 0) + 1;
  }
  t.match(Object.keys(dropped).sort(), ['drop geneve-critical-option', 'drop geneve-malformed']);
  t.equal(pipeline.device.slotsHeld, 0);
});
