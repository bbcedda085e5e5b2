import fc from 'fast-check';
import t, { type Test } from 'tap';
import { seededRandom } from '../../lib/base/random.js';
import { COUNTER_ROWS, COUNTER_TX_BYTES, COUNTER_TX_PACKETS } from '../../lib/datapath/snapshot.js';
import { describe } from '../fixtures/packet-text.js';
import { fragment, headerLength, tcp, udp, verifyChecksums } from '../fixtures/packets.js';
import { TestPipeline } from '../support/pipeline.js';

const ID = 7;
const CLIENTS = ['10.1.0.2', '10.1.0.3', '10.1.0.4', '10.1.0.5', '10.1.0.6'];
const OTHER = '10.9.0.9';

function config(mode: string): string {
  return `
snat: { addresses: [10.96.255.1] }
conntrack: { timeouts: { any: 20s } }
services:
  - { name: web, address: 10.96.0.10, port: 80, protocol: tcp, mode: ${mode}, backends: [{ address: 10.2.0.11, port: 8080 }, { address: 10.2.0.12, port: 8080 }] }
  - { name: dns, address: 10.96.0.10, port: 53, protocol: udp, mode: ${mode}, backends: [{ address: 10.2.0.11, port: 5353 }, { address: 10.2.0.12, port: 5353 }] }
`;
}

interface Ends {
  readonly src: string;
  readonly sport: number;
  readonly dst: string;
  readonly dport: number;
}

/** A fragmented datagram, and what it is to be on the other side. */
interface Datagram {
  readonly pieces: readonly Uint8Array[];
  readonly whole: Uint8Array;
}

function datagram(protocol: number, from: Ends, to: Ends, id: number, serial: number, pieceBytes: number): Datagram {
  // No two are alike, and no piece of one fits into another unseen.
  const payload = new Uint8Array(1900 + 37 * serial).map((_, i) => (i * (2 * serial + 1) + serial) & 0xff);
  const make = (ends: Ends): Uint8Array =>
    protocol === 17 ? udp({ ...ends, id, payload }) : tcp({ ...ends, id, payload, flags: 'PA', seq: 1001, ack: 5001 });
  return { pieces: fragment(make(from), pieceBytes), whole: make(to) };
}

function ends(bytes: Uint8Array): Ends {
  const l4 = headerLength(bytes);
  const half = (at: number): number => (bytes[at]! << 8) | bytes[at + 1]!;
  const [src, dst] = [12, 16].map((at) => bytes.subarray(at, at + 4).join('.'));
  return { src: src!, sport: half(l4), dst: dst!, dport: half(l4 + 2) };
}

function reverse({ src, sport, dst, dport }: Ends): Ends {
  return { src: dst, sport: dport, dst: src, dport: sport };
}

/** Opens the flows of all clients and makes a datagram for either direction of each, and two that are passed on. */
function makeDatagrams(pipeline: TestPipeline, pieceBytes: number): Datagram[] {
  const datagrams: Datagram[] = [];
  const replies = new Map<string, number>();
  for (const [i, src] of CLIENTS.entries()) {
    for (const protocol of [6, 17]) {
      const client = { src, sport: 41_000 + i, dst: '10.96.0.10', dport: protocol === 6 ? 80 : 53 };
      const first = pipeline.send(protocol === 6 ? tcp({ ...client, flags: 'S', seq: 1000 }) : udp(client));
      const server = ends(first.out[0]!.bytes);
      datagrams.push(datagram(protocol, client, server, ID, datagrams.length, pieceBytes));
      // A backend gives its datagrams to one address identifications of their own; all others are the same.
      const key = `${protocol} ${server.dst} ${server.src}`;
      const id = ID + (replies.get(key) ?? 0);
      replies.set(key, id - ID + 1);
      datagrams.push(datagram(protocol, reverse(server), reverse(client), id, datagrams.length, pieceBytes));
    }
    const direct = { src, sport: 41_000 + i, dst: OTHER, dport: 53 };
    if (i < 2) datagrams.push(datagram(17, direct, direct, ID, datagrams.length, pieceBytes));
  }
  return datagrams;
}

/** Puts fragments together as a receiver does, by addresses, protocol and identification; offsets must fit without a gap. */
function reassemble(pieces: readonly Uint8Array[]): Uint8Array[] {
  const groups = new Map<string, Uint8Array[]>();
  for (const piece of pieces) {
    const key = [...piece.subarray(4, 6), ...piece.subarray(9, 10), ...piece.subarray(12, 20)].join();
    groups.set(key, [...(groups.get(key) ?? []), piece]);
  }
  return [...groups.values()].map((group) => {
    const offset = (piece: Uint8Array): number => (((piece[6]! & 0x1f) << 8) | piece[7]!) * 8;
    group.sort((a, b) => offset(a) - offset(b));
    const parts = [group[0]!.subarray(0, 20)];
    let end = 0;
    for (const piece of group) {
      if (offset(piece) !== end) throw new Error(`a fragment at ${offset(piece)} after ${end}: ${describe(piece)}`);
      parts.push(piece.subarray(20));
      end += piece.length - 20;
    }
    const whole = Uint8Array.from(Buffer.concat(parts));
    whole.set([whole.length >> 8, whole.length & 0xff], 2);
    whole.fill(0, 6, 8);
    return whole;
  });
}

/** All there is to a datagram once it is whole: ends and what it carries. */
function contents(whole: Uint8Array): string {
  return `${whole.subarray(9, 10).join()} ${Buffer.from(whole.subarray(12)).toString('hex')}`;
}

/** A property over orders, sizes of fragments and of batches. */
function checkAll(t: Test, mode: string): void {
  fc.assert(
    fc.property(
      fc.nat(),
      fc.constantFrom(64, 200, 512, 1480),
      fc.integer({ min: 1, max: 60 }),
      (seed, bytes, batch) => {
        const pipeline = new TestPipeline(config(mode), { anyEntries: 64, tcpEntries: 64 });
        const datagrams = makeDatagrams(pipeline, bytes);
        const random = seededRandom(seed);
        const pieces = datagrams
          .flatMap((each) => each.pieces)
          .map((piece) => ({ piece, lot: random() }))
          .sort((a, b) => a.lot - b.lot)
          .map(({ piece }) => piece);
        const sent: Uint8Array[] = [];
        for (let i = 0; i < pieces.length; i += batch) {
          const [first] = pipeline.sendBatch(pieces.slice(i, i + batch));
          sent.push(...first!.out.map((out) => out.bytes));
        }
        if (sent.length !== pieces.length) throw new Error(`${sent.length} of ${pieces.length} fragments came out`);
        for (const piece of sent) if (verifyChecksums(piece).length > 0) throw new Error(describe(piece));
        const wholes = reassemble(sent);
        // The header was put together here; what it carries must be right.
        const wrong = wholes.flatMap((whole) => verifyChecksums(whole)).filter((problem) => !problem.startsWith('IP'));
        if (wrong.length > 0) throw new Error(wrong.join());
        const wanted = datagrams.map(({ whole }) => contents(whole)).sort();
        if (wholes.map(contents).sort().join() !== wanted.join()) throw new Error('a datagram is not what was sent');
        return pipeline.device.slotsHeld === 0;
      },
    ),
    { numRuns: 50 },
  );
  t.pass();
}

t.test('22 interleaved datagrams with equal identifications, in any order, are whole on the other side', async (t) => {
  for (const mode of ['dnat', 'snat']) t.test(mode, async (t) => checkAll(t, mode));
});

t.test('only the first fragment has its L4 checksum adjusted: the others carry none', async (t) => {
  for (const mode of ['dnat', 'snat']) {
    const pipeline = new TestPipeline(config(mode));
    const query = udp({ src: '10.1.0.2', sport: 41_000, dst: '10.96.0.10', dport: 53, id: ID, payload: 3000 });
    const pieces = fragment(query, 1480);
    const out = pieces.map((piece) => pipeline.send(piece).out[0]!.bytes);
    t.notSame(out[0]!.subarray(20, 28), pieces[0]!.subarray(20, 28), 'ports and checksum');
    for (const [i, bytes] of out.entries()) t.same(bytes.subarray(28), pieces[i]!.subarray(28), `${mode}, piece ${i}`);
    for (const i of [1, 2]) t.same(out[i]!.subarray(20), pieces[i]!.subarray(20));
  }
});

t.test('an identification changes only where two datagrams would be mixed up', async (t) => {
  const pipeline = new TestPipeline(config('snat').replace(', { address: 10.2.0.12, port: 5353 }', ''));
  const query = (src: string, id: number): Uint8Array[] =>
    fragment(udp({ src, sport: 41_000, dst: '10.96.0.10', dport: 53, id, payload: 2000 }), 1480);
  const idOf = (bytes: Uint8Array): number => (bytes[4]! << 8) | bytes[5]!;
  const send = (pieces: readonly Uint8Array[]): number[] =>
    pieces.map((piece) => idOf(pipeline.send(piece).out[0]!.bytes));
  t.same(send(query('10.1.0.2', ID)), [ID, ID]);
  const [first, second] = send(query('10.1.0.3', ID)) as [number, number];
  t.not(first, ID, 'both come from one snat address now');
  t.equal(second, first);
  t.same(send(query('10.1.0.3', ID)), [first, first], 'again, and again the same');
  t.same(send(query('10.1.0.2', ID + 1)), [ID + 1, ID + 1]);
  pipeline.nowMs += 30_000;
  t.same(send(query('10.1.0.3', ID)), [ID, ID], 'once the first is forgotten');
});

t.test('fragments that follow count for their flow while it lives, and do not wake it', async (t) => {
  const pipeline = new TestPipeline(config('dnat'));
  const [first, second, third] = fragment(
    udp({ src: '10.1.0.2', sport: 41_000, dst: '10.96.0.10', dport: 53, id: ID, payload: 3000 }),
    1480,
  ) as [Uint8Array, Uint8Array, Uint8Array];
  const outcome = pipeline.send(first);
  const { backend } = outcome;
  t.match(pipeline.send(second), { verdict: 'forward', state: 'UNREPLIED', backend });
  const { counters } = pipeline.compiled!.snapshot;
  const sum = (row: number): number => counters.filter((_, i) => i % COUNTER_ROWS === row).reduce((a, b) => a + b, 0);
  t.equal(sum(COUNTER_TX_PACKETS), 2, 'for its backend too');
  t.equal(sum(COUNTER_TX_BYTES), 3000);
  pipeline.nowMs += 20_000;
  t.match(pipeline.send(third), { verdict: 'forward', state: '', backend }, 'the datagram is completed');
  const back = udp(reverse(ends(outcome.out[0]!.bytes)));
  t.match(pipeline.send(back), { verdict: 'pass' }, 'its flow has expired');
});

t.test('an address that has become weir’s own takes no more fragments: they would come back for ever', async (t) => {
  const dns = (vip: string, backend: string, name = 'dns'): string =>
    `  - { name: ${name}, address: ${vip}, port: 53, protocol: udp, backends: [{ address: ${backend}, port: 53 }] }\n`;
  const web = (own: string): string =>
    `snat: { addresses: [10.96.255.1, ${own}] }\nservices:\n${dns('10.96.0.10', '10.2.0.11')}`;
  const query = { src: CLIENTS[0]!, sport: 5000, dport: 53, id: ID, payload: 3000 };
  for (const [name, dst, after] of [
    ['passed on to what is a VIP now', '10.96.0.77', web('10.96.255.2') + dns('10.96.0.77', '10.2.0.12', 'new')],
    ['passed on to what is an snat address now', '10.96.0.77', web('10.96.0.77')],
    [
      'forwarded to what is a VIP now',
      '10.96.0.10',
      `services:\n${dns('10.96.0.10', '10.2.0.12')}${dns('10.2.0.11', '10.2.0.12', 'new')}`,
    ],
  ] as const) {
    const pipeline = new TestPipeline(web('10.96.255.2'));
    const [first, second, third] = fragment(udp({ ...query, dst }), 1480);
    t.equal(pipeline.send(first!).out.length, 1, name);
    t.equal(pipeline.send(second!).out.length, 1);
    pipeline.configure(after);
    t.match(pipeline.send(third!), { verdict: 'drop', reason: 'unknown-flow', out: { length: 0 } }, name);
    t.equal(pipeline.device.slotsHeld, 0);
  }
});
