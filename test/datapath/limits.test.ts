import t, { type Test } from 'tap';
import { ADOPTED, adoptSome, RecordRows } from '../../lib/conntrack/adopt.js';
import { CAUSE_FLUSHED } from '../../lib/conntrack/events.js';
import { GarbageCollector } from '../../lib/conntrack/gc.js';
import { RECORD_WORDS } from '../../lib/conntrack/record.js';
import { Gateway } from '../../lib/datapath/gateway.js';
import { STAT_STATELESS } from '../../lib/datapath/stats.js';
import { MemoryDevice } from '../../lib/io/memory-device.js';
import { describe } from '../fixtures/packet-text.js';
import { tcp, udp } from '../fixtures/packets.js';
import * as dsr from '../support/dsr.js';
import { type Outcome, TestPipeline } from '../support/pipeline.js';
import { B1, B2, client, establish, quad, reply, service } from '../support/traffic.js';

const LIMITED_B1 = B1.replace('}', ', maxConnections: 1 }');
const LIMITED_B2 = B2.replace('}', ', maxConnections: 1 }');
const DNS = `services:
  - { name: dns, address: 10.96.0.10, port: 53, protocol: udp, maxConnections: 1, backends: [{ name: b1, address: 10.2.0.11, port: 5353 }] }
`;

const from = (sport: number, src = client.src) => ({ ...client, src, sport });
const syn = (sport: number, src = client.src): Uint8Array => tcp({ ...from(sport, src), flags: 'S', seq: 1000 });
const query = (sport: number): Uint8Array => udp({ ...from(sport), dport: 53, payload: 9 });

/** Ends a connection that `establish` has made, by both FINs. */
function close(pipeline: TestPipeline, first: Outcome, sport: number): void {
  pipeline.send(tcp({ ...from(sport), flags: 'FA', seq: 1001, ack: 5001 }));
  const last = pipeline.send(reply(first.out[0]!, { flags: 'FA', seq: 5001, ack: 1002 }));
  if (last.state !== 'CLOSING') throw new Error(`state is ${last.state}`);
}

/** Open connections by name of service and backend. */
function open({ tcp, any, identities }: TestPipeline): Record<string, number> {
  const counts: Record<string, number> = {};
  for (const table of [tcp, any]) {
    for (let id = 1; id < identities.serviceRows; id++) {
      const name = identities.serviceName(id)!;
      counts[name] = (counts[name] ?? 0) + table.open.services[id]!;
    }
    for (let id = 1; id < identities.backendRows; id++) {
      const name = identities.backendName(id)!;
      counts[name] = (counts[name] ?? 0) + table.open.backends[id]!;
    }
  }
  return counts;
}

const isRefused = (t: Test, outcome: Outcome, message = 'refused'): void => {
  t.match(outcome, { verdict: 'reply', reason: 'rst-connection-limit', service: 'web', backend: undefined }, message);
  t.match(describe(outcome.out[0]!.bytes), /^tcp 10\.96\.0\.10:80 > \S+ RA .*ack=1001/);
};

t.test('a service at its limit refuses what is new, as its noBackend says', async (t) => {
  const pipeline = new TestPipeline(service('maxConnections: 2,'));
  establish(pipeline, from(1));
  pipeline.send(syn(2));
  isRefused(t, pipeline.send(syn(3)), 'one that is half-open counts');
  t.match(pipeline.send(syn(2)), { verdict: 'forward' }, 'its repetition is none that is new');
  t.match(pipeline.send(tcp({ ...from(1), flags: 'A', seq: 1001, ack: 5001, payload: 5 })), { verdict: 'forward' });
  t.equal(pipeline.tcp.count, 2);

  const silent = new TestPipeline(service('maxConnections: 1, noBackend: drop,'));
  silent.send(syn(1));
  t.match(silent.send(syn(2)), { verdict: 'drop', reason: 'connection-limit', service: 'web' });
  const dns = new TestPipeline(DNS);
  dns.send(query(1));
  const refused = dns.send(query(2));
  t.match(refused, { verdict: 'reply', reason: 'unreachable' });
  t.match(describe(refused.out[0]!.bytes), /port-unreachable/);
});

t.test('a connection counts until it is closing, or its record ends for whatever cause', async (t) => {
  const endings: Record<string, (pipeline: TestPipeline, first: Outcome) => void> = {
    'both FINs': (pipeline, first) => close(pipeline, first, 1),
    'an RST': (pipeline) => {
      t.match(pipeline.send(tcp({ ...from(1), flags: 'R', seq: 1001 })), { state: 'CLOSED' });
    },
    'a flush': ({ tcp, nowMs }) => tcp.remove(0, CAUSE_FLUSHED, nowMs),
    'its time is over': (pipeline) => {
      pipeline.nowMs += 8_000_000;
    },
    'the drain time of its backend is over': (pipeline) => {
      pipeline.configure(service('maxConnections: 1, onRemove: reset,', B1.replace('b1', 'b3').replace('11', '13')));
      pipeline.sendDue();
    },
  };
  for (const [name, end] of Object.entries(endings)) {
    const pipeline = new TestPipeline(service('maxConnections: 1,'));
    const first = establish(pipeline, from(1));
    isRefused(t, pipeline.send(syn(2)), name);
    end(pipeline, first);
    t.match(pipeline.send(syn(2)), { verdict: 'forward', state: 'SYN_SENT' }, name);
    isRefused(t, pipeline.send(syn(3)), name);
  }
  const pipeline = new TestPipeline(service('maxConnections: 1,'));
  const first = establish(pipeline, from(1));
  pipeline.send(tcp({ ...from(1), flags: 'FA', seq: 1001, ack: 5001 }));
  isRefused(t, pipeline.send(syn(2)), 'half-closed is open');
  pipeline.send(reply(first.out[0]!, { flags: 'FA', seq: 5001, ack: 1002 }));
  t.match(pipeline.send(syn(1)), { verdict: 'forward' }, 'a fresh one on the port of one that is closing');
  t.same(open(pipeline).web, 1);
});

t.test('what has expired does not count, though nobody has come upon it', async (t) => {
  const talk = `  - { name: talk, address: 10.96.0.10, port: 54, protocol: udp, backends: [${B1}] }\n`;
  for (const others of [0, 400, 10_000]) {
    const pipeline = new TestPipeline(DNS + talk, { anyEntries: 16_384, device: new MemoryDevice(2) });
    const collector = new GarbageCollector([pipeline.tcp, pipeline.any], pipeline.nowMs, null, () => 0);
    // They expire first, and are in the way of the search.
    for (let n = 0; n < others; n++) pipeline.send(udp({ ...client, src: `10.7.${n >> 8}.${n & 255}`, dport: 54 }));
    pipeline.nowMs += 1;
    t.equal(pipeline.send(query(1)).verdict, 'forward');
    pipeline.nowMs += 59_999;
    t.equal(pipeline.send(query(2)).verdict, 'reply', 'not yet');
    pipeline.nowMs += 1;
    if (others < 1000) {
      t.equal(pipeline.send(query(2)).verdict, 'forward', `${others} others: at once`);
      t.equal(collector.slice(pipeline.nowMs, 1), false, 'nobody is asked for a pass');
    } else {
      t.equal(pipeline.send(query(2)).verdict, 'reply', 'a place may be there, but not found');
      while (collector.slice(pipeline.nowMs, 2048));
      t.equal(pipeline.send(query(2)).verdict, 'forward', 'a pass of the collector is asked for at once');
    }
    t.equal(open(pipeline).dns, 1);
  }
});

t.test('a backend at its limit is passed over; the flows of others stay where they are', async (t) => {
  const free = new TestPipeline(service(''));
  const homes = new Map<number, string>();
  for (let sport = 1; sport <= 60; sport++) homes.set(sport, free.send(syn(sport)).backend!);
  const pipeline = new TestPipeline(service('', `${LIMITED_B1}, ${B2}`));
  let ofB1 = 0;
  for (const [sport, home] of homes) {
    const { verdict, backend } = pipeline.send(syn(sport));
    t.equal(verdict, 'forward');
    t.equal(backend, home === 'b1' && ofB1 > 0 ? 'b2' : home, `port ${sport}`);
    if (home === 'b1') ofB1++;
  }
  t.ok(ofB1 > 1);
  t.same(open(pipeline), { web: 60, b1: 1, b2: 59 });

  for (const algorithm of ['maglev', 'random']) {
    const full = new TestPipeline(service(`algorithm: ${algorithm},`, `${LIMITED_B1}, ${LIMITED_B2}`));
    const taken = [full.send(syn(1)).backend, full.send(syn(2)).backend];
    t.same(taken.sort(), ['b1', 'b2'], algorithm);
    isRefused(t, full.send(syn(3)));
    t.match(full.send(tcp({ ...from(1), flags: 'S', seq: 1000 })), { verdict: 'forward' });
  }
});

t.test('a client belongs to its backend by affinity though that was full for a while', async (t) => {
  for (const algorithm of ['maglev', 'random']) {
    const text = service(`algorithm: ${algorithm}, affinity: { clientIp: 1h },`, `${LIMITED_B1}, ${LIMITED_B2}`);
    const pipeline = new TestPipeline(text);
    const first = establish(pipeline, from(1));
    const elsewhere = establish(pipeline, from(2));
    t.not(elsewhere.backend, first.backend, algorithm);
    close(pipeline, first, 1);
    close(pipeline, elsewhere, 2);
    pipeline.nowMs += 3_599_000;
    t.equal(establish(pipeline, from(3)).backend, first.backend, 'and elsewhere counts for how long');
  }
  // Whom the hash leads to a full backend and who was nowhere before belongs where he came to.
  const pipeline = new TestPipeline(service('affinity: { clientIp: 1h },', `${LIMITED_B1}, ${B2}`));
  let others = 0;
  let first: Outcome | undefined;
  for (let n = 1; n < 40; n++) {
    const src = `10.1.0.${n}`;
    const outcome = pipeline.send(syn(1, src));
    if (first === undefined && outcome.backend === 'b1') first = outcome;
    else if (outcome.backend !== 'b2') t.fail(`to ${outcome.backend}`);
    others++;
  }
  t.ok(first !== undefined && others > 5);
  pipeline.send(reply(first!.out[0]!, { flags: 'RA', seq: 0, ack: 1001 }));
  for (let n = 1; n < 40; n++) {
    const src = `10.1.0.${n}`;
    if (src === quad(first!.out[0]!.bytes, 12)) continue;
    t.equal(pipeline.send(syn(2, src)).backend, 'b2');
  }
});

t.test('a connection that was there before is taken up, full or not, and counts', async (t) => {
  const pipeline = new TestPipeline(service('maxConnections: 1, newConnectionsPerSecond: 1,', LIMITED_B1));
  pipeline.send(syn(1));
  for (const sport of [2, 3, 4]) {
    const data = pipeline.send(tcp({ ...from(sport), flags: 'A', seq: 1, ack: 1, payload: 9 }));
    t.match(data, { verdict: 'forward', backend: 'b1', state: 'SYN_SENT' });
  }
  t.same(open(pipeline), { web: 4, b1: 4 });
  pipeline.nowMs += 1000;
  isRefused(t, pipeline.send(syn(5)));

  const recovering = new TestPipeline(service('', LIMITED_B1), { recovering: true });
  for (const dport of [1, 2]) {
    const back = { src: '10.2.0.11', sport: 8080, dst: client.src, dport, flags: 'A', seq: 1, ack: 1 };
    t.match(recovering.send(tcp(back)), { verdict: 'forward', direction: 'reply' });
  }
  t.same(open(recovering), { web: 2, b1: 2 });
});

t.test('direct server return counts what the gateway sees', async (t) => {
  const text = dsr.config({ web: 'maxConnections: 1,', dns: 'maxConnections: 1,' });
  const pipeline = new TestPipeline(text);
  pipeline.send(syn(1));
  isRefused(t, pipeline.send(syn(2)));
  pipeline.send(tcp({ ...from(1), flags: 'A', seq: 1001, ack: 1 }));
  isRefused(t, pipeline.send(syn(2)));
  pipeline.send(tcp({ ...from(1), flags: 'FA', seq: 1001, ack: 1 }));
  t.match(pipeline.send(syn(2)), { verdict: 'forward' }, 'after the client’s FIN');
  t.match(pipeline.send(tcp({ ...from(7), flags: 'A', seq: 1, ack: 1 })), { verdict: 'forward' }, 'picked up');
  t.match(pipeline.send(query(1)), { verdict: 'forward' });
  t.match(pipeline.send(query(2)), { reason: 'unreachable' });

  const backends = [dsr.B1, dsr.B2].map((backend) => backend.replace('}', ', maxConnections: 20 }')).join(', ');
  const lots = new TestPipeline(dsr.config({ web: 'algorithm: random,', backends }));
  const verdicts = Array.from({ length: 41 }, (_, i) => lots.send(syn(i + 1)).reason);
  t.same(verdicts, [...Array<string>(40).fill(''), 'rst-connection-limit'], 'by lot, each up to its limit');

  // Without a record only the hash leads on: not to where a flow is led for want of room.
  const free = new TestPipeline(dsr.config({ backends: `${dsr.B1}, ${dsr.B2}` }));
  const ports = Array.from({ length: 40 }, (_, i) => i + 1);
  const home = new Map(ports.map((sport) => [sport, free.send(syn(sport)).backend]));
  const [first, second] = ports.filter((sport) => home.get(sport) === 'b1');
  const few = `${dsr.B1.replace('}', ', maxConnections: 1 }')}, ${dsr.B2}`;
  const full = new TestPipeline(dsr.config({ backends: few }), { tcpEntries: 1 });
  full.send(syn(first!));
  for (const seq of [1001, 1002]) full.send(tcp({ ...from(first!), flags: 'A', seq, ack: 1 }));
  t.match(full.send(syn(second!)), { verdict: 'drop', reason: 'table-full', backend: 'b2' });
  const third = ports.find((sport) => home.get(sport) === 'b2')!;
  t.match(full.send(syn(third)), { verdict: 'forward', state: '', backend: 'b2' });
});

t.test('flows without a record are nobody’s connection', async (t) => {
  const pipeline = new TestPipeline(service('maxConnections: 2, newConnectionsPerSecond: 2,', B1), { tcpEntries: 1 });
  establish(pipeline, from(1));
  for (const sport of [2, 3, 4]) t.match(pipeline.send(syn(sport)), { verdict: 'forward', state: '' });
  t.equal(pipeline.stats[STAT_STATELESS], 3);
  t.same(open(pipeline), { web: 1, b1: 1 });
});

t.test('what a client opens a second', async (t) => {
  const pipeline = new TestPipeline(`${service('newConnectionsPerSecond: 2,')}
  - { name: other, address: 10.96.0.11, port: 80, protocol: tcp, newConnectionsPerSecond: 2, backends: [${B1}] }`);
  establish(pipeline, from(1));
  establish(pipeline, from(2));
  const third = pipeline.send(syn(3));
  t.match(third, { verdict: 'drop', reason: 'client-rate', direction: 'original', service: 'web' });
  t.same(third.out, [], 'without a word');
  for (let i = 0; i < 10; i++) {
    t.match(pipeline.send(tcp({ ...from(1), flags: 'A', seq: 1001, ack: 5001 })), { verdict: 'forward' });
    t.match(pipeline.send(syn(3)), { reason: 'client-rate' });
  }
  t.match(pipeline.send(syn(3, '10.1.0.3')), { verdict: 'forward' }, 'another client');
  t.match(pipeline.send(tcp({ ...from(3), dst: '10.96.0.11', flags: 'S', seq: 1 })), { verdict: 'forward' });
  pipeline.nowMs += 500;
  t.match(pipeline.send(syn(3)), { verdict: 'forward' }, 'what was refused has not counted');
  for (let i = 0; i < 10; i++) t.match(pipeline.send(syn(3)), { verdict: 'forward' }, 'nor do repetitions');
  t.match(pipeline.send(syn(4)), { reason: 'client-rate' });
  pipeline.nowMs += 500;
  t.match(pipeline.send(syn(4)), { verdict: 'forward' });
  t.match(pipeline.send(tcp({ ...from(9), flags: 'A', seq: 1, ack: 1 })), { verdict: 'forward' }, 'picked up');
});

t.test('a reload sets limits, and lifts them', async (t) => {
  const pipeline = new TestPipeline(service(''));
  for (const sport of [1, 2, 3]) establish(pipeline, from(sport));
  pipeline.configure(service('maxConnections: 2,'));
  t.match(pipeline.send(tcp({ ...from(1), flags: 'A', seq: 1001, ack: 5001 })), { verdict: 'forward' });
  isRefused(t, pipeline.send(syn(4)), 'those of before count');
  pipeline.configure(service('maxConnections: 4,', `${B2}, ${B1}`));
  t.match(pipeline.send(syn(4)), { verdict: 'forward' });
  isRefused(t, pipeline.send(syn(5)));
  pipeline.configure(service('maxConnections: 4,', B2));
  isRefused(t, pipeline.send(syn(5)), 'those of a backend that has left the file count to the service');
  pipeline.configure(service('', B2));
  t.match(pipeline.send(syn(5)), { verdict: 'forward' });
});

t.test('connections of an earlier run, and of another host, count', async (t) => {
  const text = service('maxConnections: 3,');
  const before = new TestPipeline(text);
  for (const sport of [1, 2]) establish(before, from(sport));
  close(before, establish(before, from(3)), 3);
  const after = new TestPipeline(text);
  const { tcp: table, any } = before;
  const device = new MemoryDevice();
  const gateway = new Gateway({ tcp: table, any, output: device, random: () => 0, stats: after.stats });
  table.open.services.fill(99);
  gateway.use(after.compiled!.snapshot);
  t.same(open(before).web, 2, 'counted anew from the records');

  const rows = new Int32Array(table.words.subarray(0, 3 * RECORD_WORDS));
  t.same([...adoptSome(after.tcp, new RecordRows(rows), { nowMs: () => 1000 }, 1000)], [ADOPTED, ADOPTED, ADOPTED]);
  t.same(open(after), open(before));
  t.same(open(after).web, 2, 'one of the three is closing');
  for (let sport = 11; sport < 14; sport++) adoptRow(after, rows, sport);
  t.equal(open(after).web, 5, 'whatever the limit');
  isRefused(t, after.send(syn(4)));
});

/** The first of the rows with another port. */
function adoptRow(pipeline: TestPipeline, rows: Int32Array, sport: number): void {
  const row = rows.slice(0, RECORD_WORDS);
  row[2] = (sport << 16) | 80;
  row[5] = (8080 << 16) | sport;
  adoptSome(pipeline.tcp, new RecordRows(row), { nowMs: () => 1000 }, 1000);
}

t.test('a service that is flooded does not starve another', async (t) => {
  const CAPACITY = 200;
  const two = (limit: string): string => `services:
  - { name: web, address: 10.96.0.10, port: 80, protocol: tcp, algorithm: random, ${limit} backends: [${B1}] }
  - { name: other, address: 10.96.0.11, port: 80, protocol: tcp, algorithm: random, backends: [${B2}] }
`;
  const toOther = (n: number) => ({ ...client, src: '10.1.0.9', sport: 1000 + n, dst: '10.96.0.11' });
  const source = (n: number): string => `10.7.${n >> 8}.${n & 255}`;
  const options = { tcpEntries: CAPACITY, device: new MemoryDevice(2) };

  const flooded = new TestPipeline(two(''), options);
  for (let n = 0; n < 10 * CAPACITY; n++) {
    flooded.nowMs += 1;
    flooded.send(syn(1, source(n)));
    if (n % 40 === 0) establish(flooded, toOther(n));
  }
  t.equal(open(flooded).other, 50, 'SYNs give way to whatever the table is full of');

  const crowd = new TestPipeline(two('maxConnections: 100,'), options);
  let refused = 0;
  for (let n = 0; n < 2 * CAPACITY; n++) {
    crowd.nowMs += 1000;
    const { verdict, out } = crowd.send(syn(1, source(n)));
    if (verdict !== 'forward') {
      refused++;
      continue;
    }
    crowd.send(reply(out[0]!, { flags: 'SA', seq: 5000, ack: 1001 }));
    crowd.send(tcp({ ...from(1, source(n)), flags: 'A', seq: 1001, ack: 5001 }));
  }
  t.equal(refused, 2 * CAPACITY - 100);
  for (let n = 0; n < 100; n++) establish(crowd, toOther(n));
  t.same([open(crowd).web, open(crowd).other], [100, 100], 'established ones, which never give way, end at the limit');
});

t.test('a client whose range leaves the file keeps what it has', async (t) => {
  const pipeline = new TestPipeline(service('sourceRanges: [10.1.0.0/16, 10.1.0.0/24, 10.0.0.0/8],', B1));
  establish(pipeline);
  pipeline.configure(service('sourceRanges: [10.2.0.0/16, 192.0.2.0/24],', B1));
  const data = tcp({ ...client, flags: 'A', seq: 1001, ack: 5001, payload: 9 });
  t.match(pipeline.send(data), { verdict: 'forward', state: 'ESTABLISHED' });
  t.match(pipeline.send(syn(2)), { verdict: 'drop', reason: 'not-in-source-range' });
  pipeline.nowMs += 8_000_000;
  t.match(pipeline.send(data), { reason: 'not-in-source-range' }, 'once that has expired it is as new');
});
