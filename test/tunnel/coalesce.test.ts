import fc from 'fast-check';
import t from 'tap';
import { heapMemory, packetOffset } from '../../lib/io/device.js';
import type { MemoryPacket } from '../../lib/io/memory-device.js';
import { Coalescer } from '../../lib/tunnel/coalesce.js';
import { describe } from '../fixtures/packet-text.js';
import { flagBits, flagLetters, pattern, type TcpFields, tcp, udp, verifyChecksums } from '../fixtures/packets.js';

const SLOT_BYTES = 128 + 65536;

/** Packets one after the other through a coalescer, each in a slot of its own; what comes out. */
function coalesce(packets: readonly Uint8Array[]): MemoryPacket[] {
  const memory = heapMemory(2, SLOT_BYTES);
  const coalescer = new Coalescer(memory);
  const out: MemoryPacket[] = [];
  let slot = 0;
  let isHeld = false;
  const emit = (): void => {
    if (!isHeld) return;
    coalescer.finish();
    const { at, length } = coalescer;
    const vnet = memory.bytes.slice(at - 10, at);
    out.push({ bytes: memory.bytes.slice(at, at + length), ...(vnet.some((byte) => byte !== 0) ? { vnet } : {}) });
  };
  for (const packet of packets) {
    const at = packetOffset(memory, 1 - slot) + 34;
    memory.bytes.fill(0xee, at - 10, at);
    memory.bytes.set(packet, at);
    if (isHeld && coalescer.append(at, packet.length)) continue;
    emit();
    slot = 1 - slot;
    coalescer.begin(slot, at, packet.length);
    isHeld = true;
  }
  emit();
  return out;
}

function viewOf(bytes: Uint8Array): DataView {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
}

/** What whoever sends a super-packet makes of it: the rules of TSO, written from the packet's fields. */
function cut({ bytes, vnet }: MemoryPacket): Uint8Array[] {
  if (vnet === undefined) return [bytes];
  const size = vnet[4]! | (vnet[5]! << 8);
  const view = viewOf(bytes);
  const headers = vnet[2]! | (vnet[3]! << 8);
  const flags = flagLetters(bytes[33]!);
  const pieces: Uint8Array[] = [];
  for (let from = 0; headers + from < bytes.length; from += size) {
    const payload = bytes.slice(headers + from, headers + from + size);
    const isLast = headers + from + size >= bytes.length;
    const isDf = (view.getUint16(6) & 0x4000) !== 0;
    pieces.push(
      tcp({
        src: bytes.subarray(12, 16).join('.'),
        dst: bytes.subarray(16, 20).join('.'),
        tos: bytes[1]!,
        ttl: bytes[8]!,
        id: (view.getUint16(4) + from / size) & 0xffff,
        df: isDf,
        sport: view.getUint16(20),
        dport: view.getUint16(22),
        seq: (view.getUint32(24) + from) >>> 0,
        ack: view.getUint32(28),
        flags: isLast ? flags : flags.replace(/[FP]/g, ''),
        win: view.getUint16(34),
        options: bytes.slice(40, headers),
        payload,
      }),
    );
  }
  return pieces;
}

/** The identification of an atomic datagram means nothing. */
function withoutAtomicId(packet: Uint8Array): string {
  const copy = packet.slice();
  if ((viewOf(copy).getUint16(6) & 0x7fff) === 0x4000) copy.fill(0, 4, 6).fill(0, 10, 12);
  return Buffer.from(copy).toString('hex');
}

/** Whether Linux joins `next` to a packet made of `group`: tcp_gro_receive and inet_gro_receive, on whole packets. */
function linuxJoins(group: readonly Uint8Array[], next: Uint8Array): boolean {
  const first = group[0]!;
  const last = group.at(-1)!;
  const payloadOf = (packet: Uint8Array): number => packet.length - 20 - (packet[32]! >> 4) * 4;
  for (const packet of [first, next]) {
    if (packet[0] !== 0x45 || packet[9] !== 6 || (viewOf(packet).getUint16(6) & 0x3fff) !== 0) return false;
    if (verifyChecksums(packet).length > 0) return false;
  }
  const [a, b] = [viewOf(first), viewOf(next)];
  const mss = payloadOf(first);
  // What ends or never begins a group.
  const final = flagBits('FSRPU');
  if (group.some((packet) => (packet[33]! & final) !== 0 || payloadOf(packet) < mss) || mss === 0) return false;
  if (payloadOf(next) === 0 || payloadOf(next) > mss) return false;
  if (group.reduce((sum, packet) => sum + payloadOf(packet), first.length - mss) + payloadOf(next) > 65535)
    return false;
  if (a.getUint32(12) !== b.getUint32(12) || a.getUint32(16) !== b.getUint32(16) || a.getUint32(20) !== b.getUint32(20))
    return false;
  if (first[1] !== next[1] || first[8] !== next[8]) return false;
  const isDf = (a.getUint16(6) & 0x4000) !== 0;
  if (isDf !== ((b.getUint16(6) & 0x4000) !== 0)) return false;
  const step = (b.getUint16(4) - a.getUint16(4)) & 0xffff;
  const isFixed = isDf && (group.length === 1 ? step === 0 : viewOf(group[1]!).getUint16(4) === a.getUint16(4));
  if (step !== (isFixed ? 0 : group.length)) return false;
  if (a.getUint32(28) !== b.getUint32(28)) return false;
  if ((next[33]! & flagBits('W')) !== 0) return false;
  if (((a.getUint32(32) ^ b.getUint32(32)) & ~(flagBits('WFP') << 16)) !== 0) return false;
  if (
    Buffer.compare(first.subarray(40, 20 + (first[32]! >> 4) * 4), next.subarray(40, 20 + (next[32]! >> 4) * 4)) !== 0
  )
    return false;
  return b.getUint32(24) === (viewOf(last).getUint32(24) + payloadOf(last)) >>> 0;
}

const FLOW: TcpFields = {
  src: '10.1.0.2',
  dst: '10.2.0.11',
  sport: 40000,
  dport: 8080,
  ack: 77,
  win: 500,
  options: { timestamps: [1, 2] },
};

/** `count` segments in order, of `size` bytes each. */
function train(count: number, size: number, fields: Partial<TcpFields> = {}): TcpFields[] {
  const start = (fields.seq ?? 0xfffff000) >>> 0;
  return Array.from({ length: count }, (_, i) => ({
    ...FLOW,
    id: 100 + i,
    df: true,
    ...fields,
    seq: (start + i * size) >>> 0,
    payload: pattern(size).map((byte) => byte ^ i),
  }));
}

t.test('a train becomes one super-packet, and its segments again', async (t) => {
  for (const size of [1, 7, 1398]) {
    for (const fields of [{}, { options: {} }, { df: false }, { flags: 'AE', tos: 3 }]) {
      const packets = train(20, size, fields).map(tcp);
      const out = coalesce(packets);
      t.equal(out.length, 1);
      t.same(verifyChecksums(out[0]!.bytes, out[0]!.vnet), []);
      t.same(cut(out[0]!).map(describe), packets.map(describe));
    }
  }
  const fixed = train(5, 100, { id: 0, df: true }).map(tcp);
  t.equal(coalesce(fixed).length, 1, 'one identification for all of them, with DF');
  const last = [...train(4, 100), { ...train(5, 100)[4]!, flags: 'FPA', payload: pattern(99) }].map(tcp);
  t.same(cut(coalesce(last)[0]!).map(describe), last.map(describe), 'a short last one, with PSH and FIN');
});

t.test('what is left apart', async (t) => {
  const [first, second, third] = train(3, 100) as [TcpFields, TcpFields, TcpFields];
  const apart: [string, readonly Uint8Array[]][] = [
    ['another client port', [tcp(first), tcp({ ...second, sport: 40001 })]],
    ['another client', [tcp(first), tcp({ ...second, src: '10.1.0.3' })]],
    ['a gap', [tcp(first), tcp({ ...third, id: 101 })]],
    ['a repeat', [tcp(first), tcp({ ...first, id: 101 })]],
    ['another acknowledgement', [tcp(first), tcp({ ...second, ack: 78 })]],
    ['another window', [tcp(first), tcp({ ...second, win: 501 })]],
    ['other timestamps', [tcp(first), tcp({ ...second, options: { timestamps: [1, 3] } })]],
    ['more options', [tcp(first), tcp({ ...second, options: { timestamps: [1, 2], mss: 1400 } })]],
    ['another TTL', [tcp(first), tcp({ ...second, ttl: 63 })]],
    ['another TOS', [tcp(first), tcp({ ...second, tos: 3 })]],
    ['DF here, none there', [tcp(first), tcp({ ...second, df: false })]],
    ['identifications that skip one', [tcp(first), tcp({ ...second, id: 102 })]],
    ['one identification without DF', [tcp({ ...first, df: false }), tcp({ ...second, id: 100, df: false })]],
    ['IP options', [first, second].map((fields) => tcp({ ...fields, ipOptions: Uint8Array.of(1, 1, 1, 0) }))],
    ['a first one with PSH', [tcp({ ...first, flags: 'PA' }), tcp(second)]],
    ['SYN', [tcp({ ...first, flags: 'SA' }), tcp(second)]],
    ['RST', [tcp(first), tcp({ ...second, flags: 'RA' })]],
    ['URG', [tcp(first), tcp({ ...second, flags: 'UA' })]],
    ['CWR', [tcp({ ...first, flags: 'AW' }), tcp({ ...second, flags: 'AW' })]],
    ['ECE on one', [tcp(first), tcp({ ...second, flags: 'AE' })]],
    ['no ACK', [tcp({ ...first, flags: '' }), tcp({ ...second, flags: '' })]],
    ['no payload', [tcp(first), tcp({ ...second, payload: 0 })]],
    ['a bare ACK first', [tcp({ ...first, payload: 0 }), tcp({ ...first, id: 101 })]],
    ['more than the first', [tcp(first), tcp({ ...second, payload: 101 })]],
    ['a wrong checksum', [tcp(first), tcp({ ...second, checksum: 1 })]],
    ['a wrong checksum first', [tcp({ ...first, checksum: 1 }), tcp(second)]],
    ['after a short one', [tcp(first), tcp({ ...second, payload: 99 }), tcp({ ...third, seq: 0xfffff000 + 199 })]],
    ['after one with PSH', [tcp(first), tcp({ ...second, flags: 'PA' }), tcp(third)]],
    ['datagrams', [0, 1].map((id) => udp({ ...first, id, payload: 100 }))],
  ];
  for (const [name, packets] of apart) {
    const out = coalesce(packets);
    const wanted = packets.length === 3 ? 2 : packets.length;
    t.equal(out.length, wanted, name);
    t.same(out.flatMap(cut).map(withoutAtomicId), packets.map(withoutAtomicId), `${name}: nothing changed`);
  }
});

t.test('no super-packet exceeds what IP can say, or its slot', async (t) => {
  const packets = train(120, 1448).map(tcp);
  const out = coalesce(packets);
  t.ok(out.length >= 3);
  t.ok(out.every(({ bytes }) => bytes.length <= 65535));
  t.same(out.flatMap(cut).map(describe), packets.map(describe));
});

t.test(
  'the law: coalesced and cut again, packets are what they were; and Linux would have joined as many',
  async (t) => {
    const change = fc.record(
      {
        sport: fc.constantFrom(40000, 40001),
        flags: fc.constantFrom('A', 'PA', 'FA', 'AE', 'AW', 'RA', 'SA', 'UA', ''),
        ack: fc.constantFrom(77, 78),
        win: fc.constantFrom(500, 501),
        ttl: fc.constantFrom(64, 63),
        tos: fc.constantFrom(0, 2, 3),
        df: fc.boolean(),
        idStep: fc.constantFrom(0, 1, 2),
        seqStep: fc.constantFrom(0, 1, -1),
        size: fc.constantFrom(0, 1, 8, 9),
        options: fc.constantFrom({}, { timestamps: [1, 2] as const }, { timestamps: [1, 3] as const }),
        checksum: fc.constantFrom(0, 1),
      },
      { requiredKeys: [] },
    );
    // Most segments just go on.
    const steps = fc.array(fc.oneof({ weight: 3, arbitrary: fc.constant({}) }, { weight: 1, arbitrary: change }), {
      minLength: 2,
      maxLength: 12,
    });
    let joined = 0;
    fc.assert(
      fc.property(steps, fc.constantFrom(0, 1), fc.boolean(), (list, idStep, df) => {
        let id = 65534;
        let seq = 0xfffffff0;
        const packets = (list as (Partial<TcpFields> & { idStep?: number; seqStep?: number; size?: number })[]).map(
          ({ idStep: step = idStep, seqStep = 0, size = 8, ...fields }) => {
            id = (id + step) & 0xffff;
            seq = (seq + seqStep) >>> 0;
            const packet = tcp({ ...FLOW, id, df, seq, payload: size, ...fields });
            seq = (seq + size) >>> 0;
            return packet;
          },
        );
        const out = coalesce(packets);
        for (const { bytes, vnet } of out) {
          if (vnet !== undefined) {
            const problems = verifyChecksums(bytes, vnet);
            if (problems.length > 0) throw new Error(problems.join());
          }
        }
        const again = out.flatMap(cut);
        if (again.map(withoutAtomicId).join('\n') !== packets.map(withoutAtomicId).join('\n'))
          throw new Error(`${packets.map(describe).join('\n')}\nbecame\n${again.map(describe).join('\n')}`);
        let index = 0;
        for (const each of out) {
          const count = cut(each).length;
          for (let k = 1; k < count; k++) {
            joined++;
            if (!linuxJoins(packets.slice(index, index + k), packets[index + k]!)) {
              throw new Error(`Linux would not join ${describe(packets[index + k]!)}`);
            }
          }
          const group = packets.slice(index, index + count);
          const next = packets[index + count];
          const isStricter = [...group, next].some(
            (packet) => packet && (packet[33]! & flagBits('AW')) !== flagBits('A'),
          );
          if (next !== undefined && !isStricter && linuxJoins(group, next))
            throw new Error(`Linux would join ${describe(next)}`);
          index += count;
        }
      }),
      { numRuns: 3000 },
    );
    t.ok(joined > 1000, `${joined} segments were joined`);
  },
);
