import t from 'tap';
import { below, seededRandom } from '../../lib/base/random.js';
import { REASON_KINDS, REASON_NAMES } from '../../lib/base/reasons.js';
import { STAT_REASONS } from '../../lib/datapath/stats.js';
import type { MemoryPacket } from '../../lib/io/memory-device.js';
import { datagramsOf, untunnel } from '../fixtures/geneve.js';
import { echoRequest, fragment, icmpError, partial, tcp, udp, verifyChecksums } from '../fixtures/packets.js';
import { mutate } from '../support/mutate.js';
import { TestPipeline } from '../support/pipeline.js';

/**
 * A million mutated packets through the whole pipeline: no crash, no slot lost, and nothing emitted with a wrong length, a
 * wrong header checksum or a VIP or snat address as its destination, or ends for a reason of another kind. L4 checksums must be right whenever they were on the way in.
 */
const PACKETS = Number(process.env.WEIR_FUZZ_PACKETS ?? 1_000_000);

const CONFIG = `
tunnel: { address: 192.0.2.1, option: syn }
snat: { addresses: [10.96.255.1], ports: 40000-40063 }
services:
  - { name: dnat, address: 10.96.0.10, port: 80, protocol: tcp, backends: [{ address: 10.2.0.11, port: 8080 }, { address: 10.2.0.12, port: 8080 }] }
  - { name: snat, address: 10.96.0.10, port: 81, protocol: tcp, mode: snat, algorithm: random, backends: [{ address: 10.2.0.11, port: 8080 }] }
  - { name: dns, address: 10.96.0.11, port: 53, protocol: udp, backends: [{ address: 10.2.0.11, port: 53 }, { address: 10.2.0.12, port: 53 }] }
  - { name: none, address: 10.96.0.11, port: 54, protocol: udp, backends: [] }
  - { name: dsr, address: 10.96.0.12, port: 80, protocol: tcp, mode: dsr, backends: [{ address: 10.2.0.13, port: 8080, node: 192.0.2.13 }] }
  - { name: dsr-udp, address: 10.96.0.12, port: 53, protocol: udp, mode: dsr, backends: [{ address: 10.2.0.13, port: 53, node: 192.0.2.13 }] }
`;
/** What is sent there comes back. */
const OWN = new Set(['10.96.0.10', '10.96.0.11', '10.96.0.12', '10.96.255.1']);

function address(bytes: Uint8Array, at: number): string {
  return bytes.subarray(at, at + 4).join('.');
}

function seeds(): MemoryPacket[] {
  const client = { src: '10.1.0.2', sport: 40000, dst: '10.96.0.10', dport: 80 };
  const reply = { src: '10.2.0.11', sport: 8080, dst: '10.1.0.2', dport: 40000 };
  const request = { src: '10.1.0.2', sport: 5000, dst: '10.96.0.11', dport: 53 };
  const plain: Uint8Array[] = [
    tcp({ ...client, flags: 'S', seq: 1, options: { mss: 1460, scale: 7, sackPermitted: true } }),
    tcp({ ...client, flags: 'A', seq: 2, ack: 101 }),
    tcp({ ...client, flags: 'PA', seq: 2, ack: 101, payload: 400 }),
    tcp({ ...client, flags: 'FA', seq: 402, ack: 101 }),
    tcp({ ...client, flags: 'R', seq: 402 }),
    tcp({ ...client, dport: 81, flags: 'S', seq: 1 }),
    tcp({ ...client, dport: 99, flags: 'S', seq: 1 }),
    tcp({ ...reply, flags: 'SA', seq: 100, ack: 2, options: { mss: 1460, scale: 7 } }),
    tcp({ ...reply, flags: 'PA', seq: 101, ack: 402, payload: 1200 }),
    udp({ ...request, payload: 30 }),
    udp({ ...request, payload: 31, checksum: 0 }),
    udp({ ...request, dport: 54, payload: 8 }),
    udp({ src: '10.2.0.11', sport: 53, dst: '10.1.0.2', dport: 5000, payload: 300 }),
    ...fragment(udp({ ...request, id: 77, payload: 3000 }), 1480),
    echoRequest({ src: '10.1.0.2', dst: '10.96.0.10', id: 7, payload: 56 }),
    echoRequest({ src: '10.96.0.11', dst: '10.96.0.10', id: 7, payload: 56 }),
    tcp({ ...client, src: '10.96.0.11', dport: 99, flags: 'S', seq: 1 }),
    udp({ ...request, src: '10.96.255.1', dport: 99, payload: 8 }),
    udp({ ...request, src: '224.0.0.1', dport: 99, payload: 8 }),
    icmpError({
      src: '10.1.0.1',
      dst: '10.96.0.10',
      type: 3,
      code: 4,
      mtu: 1400,
      quoted: tcp({ src: '10.96.0.10', sport: 80, dst: '10.1.0.2', dport: 40000, seq: 5, flags: 'A', payload: 1000 }),
      quoteBytes: 28,
    }),
    icmpError({
      src: '10.2.0.11',
      dst: '10.1.0.2',
      type: 3,
      code: 3,
      quoted: udp({ src: '10.1.0.2', sport: 5000, dst: '10.2.0.11', dport: 53, payload: 30 }),
      quoteBytes: 28,
    }),
  ];
  const direct = { ...client, dst: '10.96.0.12' };
  const question = { ...request, dst: '10.96.0.12' };
  plain.push(
    tcp({ ...direct, flags: 'S', seq: 1 }),
    tcp({ ...direct, flags: 'A', seq: 2, ack: 101 }),
    tcp({ ...direct, flags: 'PA', seq: 2, ack: 101, payload: 1420 }),
    tcp({ ...direct, flags: 'PA', seq: 2, ack: 101, id: 5, payload: 1420 }),
    udp({ ...question, payload: 30 }),
    udp({ ...question, id: 6, df: false, ipOptions: Uint8Array.of(0x94, 4, 0, 0, 0x44, 4, 5, 0), payload: 1430 }),
    ...fragment(udp({ ...question, id: 78, payload: 3000 }), 1480),
    icmpError({
      src: '10.1.0.1',
      dst: '10.96.0.12',
      type: 3,
      code: 4,
      mtu: 1400,
      quoted: tcp({ src: '10.96.0.12', sport: 80, dst: '10.1.0.2', dport: 40000, seq: 5, flags: 'A', payload: 1000 }),
      quoteBytes: 28,
    }),
    icmpError({
      src: '192.0.2.254',
      dst: '192.0.2.1',
      type: 3,
      code: 4,
      mtu: 1400,
      quoted: udp({ src: '192.0.2.1', sport: 50000, dst: '192.0.2.13', dport: 6081, payload: 1400 }),
      quoteBytes: 28,
    }),
  );
  return [
    ...plain.map((bytes) => ({ bytes })),
    partial(tcp({ ...direct, flags: 'PA', seq: 2, ack: 101, payload: 1200 }), 500),
    partial(udp({ ...question, payload: 900 }), 400),
    partial(udp({ ...question, id: 7, df: false, payload: 1800 }), 1450),
    partial(tcp({ ...client, flags: 'PA', seq: 2, ack: 101, payload: 2000 }), 1448),
    partial(tcp({ ...reply, flags: 'A', seq: 101, ack: 402, payload: 5000 }), 1448),
    partial(udp({ ...request, payload: 100 })),
  ];
}

t.test(`${PACKETS} mutated packets`, async (t) => {
  const random = seededRandom(20261130);
  const pipeline = new TestPipeline(CONFIG, { tcpEntries: 256, anyEntries: 256 });
  const originals = seeds();
  let emitted = 0;
  const wrong: string[] = [];
  for (let done = 0; done < PACKETS && wrong.length < 5; ) {
    const batch: MemoryPacket[] = [];
    const size = 1 + below(random, 32);
    for (let i = 0; i < size; i++) {
      const original = originals[below(random, originals.length)]!;
      batch.push(below(random, 8) === 0 ? original : mutate(original, random));
    }
    done += size;
    pipeline.nowMs += below(random, 2000);
    const outcomes = pipeline.sendBatch(batch);
    const [first] = outcomes;
    pipeline.flushDue();
    for (const { verdict, reason } of outcomes) {
      const kind = reason === '' ? verdict : REASON_KINDS[REASON_NAMES.indexOf(reason as 'echo')];
      if (kind !== verdict) wrong.push(`${verdict} for ${reason}`);
    }
    const soundIn = batch.every((packet) => isSound(packet));
    for (const out of first!.out.flatMap(withoutTunnel)) {
      emitted++;
      const mistakes = verifyChecksums(out.bytes, out.vnet).filter(
        (mistake) => soundIn || (/^IP|total length/i.test(mistake) && !mistake.includes('quote')),
      );
      if (OWN.has(address(out.bytes, 16))) mistakes.push('is addressed to weir itself');
      for (const mistake of mistakes) wrong.push(`${mistake}: ${Buffer.from(out.bytes).toString('hex').slice(0, 160)}`);
    }
    if (pipeline.device.slotsHeld !== 0) wrong.push(`${pipeline.device.slotsHeld} slots were not given back`);
  }
  t.same(wrong, []);
  t.ok(emitted > PACKETS / 20, `${emitted} packets came out`);
  const seen = REASON_NAMES.filter((_, reason) => pipeline.stats[STAT_REASONS + reason]! > 0);
  t.ok(seen.length >= 10, `reasons met: ${seen.join(' ')}`);
});

/** What is inside, of a write to a node; `untunnel` throws at anything that is wrong around it. */
function withoutTunnel(out: MemoryPacket): MemoryPacket[] {
  if (address(out.bytes, 12) !== '192.0.2.1' || out.bytes[9] !== 17) return [out];
  return datagramsOf(out).map((datagram) => ({ bytes: untunnel(datagram).inner }));
}

function isSound({ bytes, vnet }: MemoryPacket): boolean {
  try {
    return verifyChecksums(bytes, vnet).length === 0;
  } catch {
    return false;
  }
}
