import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import t from 'tap';
import { REASON } from '../../lib/base/reasons.js';
import { EVICTED_CLOSING, EVICTED_EXPIRED, EVICTED_HALF_OPEN, INSERT_FAILURES } from '../../lib/conntrack/memory.js';
import { STAT_REASONS, STAT_STATELESS } from '../../lib/datapath/stats.js';
import { MemoryDevice } from '../../lib/io/memory-device.js';
import { tcp, udp } from '../fixtures/packets.js';
import { TestPipeline } from '../support/pipeline.js';
import { check, client, establish, reply } from '../support/traffic.js';

const MODES = ['dnat', 'snat'] as const;
const CAPACITY = 200;

function config(mode: string, algorithm: string): string {
  return `
snat: { addresses: [10.96.255.1] }
conntrack: { timeouts: { tcpSyn: 60s, any: 60s } }
services:
  - { name: web, address: 10.96.0.10, port: 80, protocol: tcp, mode: ${mode}, algorithm: ${algorithm}, backends: [{ address: 10.2.0.11, port: 8080 }, { address: 10.2.0.12, port: 8080 }] }
  - { name: dns, address: 10.96.0.10, port: 53, protocol: udp, mode: ${mode}, algorithm: ${algorithm}, backends: [{ address: 10.2.0.11, port: 5353 }] }
`;
}

const from = (sport: number): typeof client => ({ ...client, sport });
const syn = (sport: number): Uint8Array => tcp({ ...from(sport), flags: 'S', seq: 1 });
const query = (sport: number): Uint8Array => udp({ ...from(sport), dport: 53 });

t.test('TCP: expired entries go first, then closing, then half-open ones, established ones never', async (t) => {
  for (const mode of MODES) {
    const pipeline = new TestPipeline(config(mode, 'random'), { tcpEntries: 5 });
    pipeline.send(syn(1));
    pipeline.nowMs += 50_000;
    pipeline.send(syn(2));
    const closed = pipeline.send(syn(3));
    pipeline.send(reply(closed.out[0]!, { flags: 'RA', seq: 0, ack: 2 }));
    establish(pipeline, from(4));
    establish(pipeline, from(5));
    const evicted = (): number[] =>
      [EVICTED_EXPIRED, EVICTED_CLOSING, EVICTED_HALF_OPEN, INSERT_FAILURES].map((row) => pipeline.tcp.figures[row]!);
    pipeline.nowMs += 9999;
    establish(pipeline, from(6));
    t.same(evicted(), [0, 1, 0, 0], `${mode}: the closed one`);
    pipeline.nowMs += 1;
    establish(pipeline, from(7));
    t.same(evicted(), [1, 1, 0, 0], 'the first, which has expired');
    establish(pipeline, from(8));
    t.same(evicted(), [1, 1, 1, 0], 'the second, half-open');
    t.match(pipeline.send(syn(9)), { verdict: 'drop', reason: 'table-full' });
    t.same(evicted(), [1, 1, 1, 1]);
    for (const sport of [4, 5, 6, 7, 8]) {
      const data = pipeline.send(tcp({ ...from(sport), flags: 'A', seq: 1001, ack: 5001, payload: 9 }));
      t.match(data, { verdict: 'forward', state: 'ESTABLISHED' });
    }
  }
});

t.test('UDP: one-way flows go, two-way ones never', async (t) => {
  for (const mode of MODES) {
    const pipeline = new TestPipeline(config(mode, 'random'), { anyEntries: 3 });
    for (const sport of [1, 2]) {
      const { src, sport: port, dst, dport } = ends(pipeline.send(query(sport)).out[0]!.bytes);
      pipeline.send(udp({ src: dst, sport: dport, dst: src, dport: port }));
    }
    for (const sport of [3, 4, 5]) t.match(pipeline.send(query(sport)), { verdict: 'forward', state: 'UNREPLIED' });
    for (const sport of [1, 2]) t.match(pipeline.send(query(sport)), { verdict: 'forward', state: 'REPLIED' });
    const { src, sport, dst, dport } = ends(pipeline.send(query(5)).out[0]!.bytes);
    pipeline.send(udp({ src: dst, sport: dport, dst: src, dport: sport }));
    t.match(pipeline.send(query(6)), { verdict: 'drop', reason: 'table-full' }, mode);
  }
});

t.test('a Maglev flow in dnat goes on without an entry, both are counted', async (t) => {
  const pipeline = new TestPipeline(config('dnat', 'maglev'), { tcpEntries: 16 });
  for (let i = 0; i < 16; i++) establish(pipeline, from(50_000 + i));
  const first = pipeline.send(syn(1));
  t.equal(first.verdict, 'forward');
  check(t, first);
  const second = pipeline.send(tcp({ ...from(1), flags: 'A', seq: 2, ack: 1 }));
  t.match(second, { verdict: 'forward', backend: first.backend });
  t.equal(pipeline.tcp.count, 16);
  t.equal(pipeline.stats[STAT_STATELESS], 2);
  const snat = new TestPipeline(config('snat', 'maglev'), { tcpEntries: 1 });
  establish(snat);
  t.match(snat.send(syn(1)), { verdict: 'drop', reason: 'table-full' });
  t.equal(snat.stats[STAT_REASONS + REASON['table-full']], 1);
});

t.test('floods of ten times the table: of SYNs, of forged ACKs, of datagrams', async (t) => {
  for (const mode of MODES) {
    const pipeline = new TestPipeline(config(mode, 'maglev'), {
      tcpEntries: CAPACITY,
      anyEntries: CAPACITY,
      device: new MemoryDevice(2),
    });
    const established = CAPACITY * 0.9;
    for (let i = 0; i < established; i++) {
      establish(pipeline, from(1000 + i));
      const { src, sport, dst, dport } = ends(pipeline.send(query(1000 + i)).out[0]!.bytes);
      pipeline.send(udp({ src: dst, sport: dport, dst: src, dport: sport }));
    }
    const flood = (make: (n: number) => Uint8Array): void => {
      for (let n = 0; n < 10 * CAPACITY; n++) {
        pipeline.nowMs += 1;
        const { verdict } = pipeline.send(make(n));
        if (verdict !== 'forward' && mode === 'dnat') t.fail(verdict);
      }
    };
    const address = (n: number): string => `10.7.${n >> 8}.${n & 255}`;
    flood((n) => tcp({ ...client, src: address(n), flags: 'S', seq: n }));
    flood((n) => tcp({ ...client, src: address(n), sport: 7, flags: 'A', seq: n, ack: n }));
    flood((n) => udp({ ...client, src: address(n), dport: 53 }));
    t.ok(pipeline.tcp.count <= CAPACITY && pipeline.any.count <= CAPACITY);
    let harmed = 0;
    for (let i = 0; i < established; i++) {
      const data = pipeline.send(tcp({ ...from(1000 + i), flags: 'A', seq: 1001, ack: 5001, payload: 9 }));
      const datagram = pipeline.send(query(1000 + i));
      if (data.state !== 'ESTABLISHED' || datagram.state !== 'REPLIED') harmed++;
    }
    t.equal(harmed, 0, `${mode}: no flow that was established is harmed`);
  }
});

t.test('memory is constant, whatever comes', async (t) => {
  setFlagsFromString('--expose-gc');
  const collect = runInNewContext('gc') as () => void;
  const text = config('dnat', 'maglev').replaceAll('algorithm:', 'newConnectionsPerSecond: 5, algorithm:');
  const pipeline = new TestPipeline(text, { tcpEntries: CAPACITY, device: new MemoryDevice(2) });
  const flood = (from: number): void => {
    for (let n = from; n < from + 20_000; n++) {
      pipeline.nowMs += 1;
      pipeline.send(tcp({ ...client, src: `10.${(n >> 16) & 255}.${(n >> 8) & 255}.${n & 255}`, flags: 'S', seq: n }));
    }
  };
  flood(0x070000);
  collect();
  const before = process.memoryUsage().heapUsed;
  flood(0x080000);
  collect();
  const grown = process.memoryUsage().heapUsed - before;
  t.ok(grown < 1e6, `the heap grew by ${grown} bytes over 20,000 connections`);
});

function ends(bytes: Uint8Array): { src: string; sport: number; dst: string; dport: number } {
  const half = (at: number): number => (bytes[at]! << 8) | bytes[at + 1]!;
  const [src, dst] = [12, 16].map((at) => bytes.subarray(at, at + 4).join('.'));
  return { src: src!, sport: half(20), dst: dst!, dport: half(22) };
}
