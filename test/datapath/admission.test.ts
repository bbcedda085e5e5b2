import t, { type Test } from 'tap';
import { tcp, udp } from '../fixtures/packets.js';
import { type Outcome, TestPipeline } from '../support/pipeline.js';
import { B1, B2, check, client, establish, quad, reply, service, TWO_VIPS } from '../support/traffic.js';

const B3 = '{ name: b3, address: 10.2.0.13, port: 8080 }';
const POOL = 'snat: { addresses: [10.96.255.1] }\n';

const DNS = `services:
  - { name: dns, address: 10.96.0.11, port: 53, protocol: udp, backends: [{ name: b1, address: 10.2.0.11, port: 5353 }] }
`;

function isTranslated(t: Test, outcome: Outcome): void {
  t.match(outcome, { verdict: 'forward', direction: 'reply' });
  t.equal(quad(outcome.out[0]!.bytes, 12), '10.96.0.10');
  check(t, outcome);
}

t.test('a connection without a record goes both ways', async (t) => {
  const pipeline = new TestPipeline(service('', B1), { tcpEntries: 1 });
  establish(pipeline);
  const syn = pipeline.send(tcp({ ...client, sport: 7, flags: 'S', seq: 1 }));
  t.equal(syn.verdict, 'forward');
  isTranslated(t, pipeline.send(reply(syn.out[0]!, { flags: 'SA', seq: 9, ack: 2 })));
});

t.test('so does a datagram', async (t) => {
  const pipeline = new TestPipeline(DNS, { anyEntries: 1 });
  const query = (sport: number): Uint8Array =>
    udp({ src: '10.1.0.2', sport, dst: '10.96.0.11', dport: 53, payload: 9 });
  const answer = (dport: number): Uint8Array =>
    udp({ src: '10.2.0.11', sport: 5353, dst: '10.1.0.2', dport, payload: 99 });
  pipeline.send(query(1));
  pipeline.send(answer(1));
  t.match(pipeline.send(query(2)), { verdict: 'forward', backend: 'b1', state: '' });
  const back = pipeline.send(answer(2));
  t.match(back, { verdict: 'forward', direction: 'reply', service: 'dns' });
  t.equal(quad(back.out[0]!.bytes, 12), '10.96.0.11');
  check(t, back);
  t.equal(pipeline.any.count, 1);
  t.match(
    new TestPipeline(DNS, { recovering: true }).send(answer(3)),
    { verdict: 'pass' },
    'a start without a table is not it',
  );
});

t.test('only what the hash leads to its backend goes on without a record', async (t) => {
  const pipeline = new TestPipeline(TWO_VIPS.replaceAll('BACKENDS', `${B1}, ${B2}`), { tcpEntries: 1 });
  const first = establish(pipeline);
  // The same port to the other VIP hashes alike, but its reply tuple is taken.
  const second = pipeline.send(tcp({ ...client, dst: '10.96.0.11', flags: 'S', seq: 1 }));
  t.match(second, { verdict: 'drop', reason: 'table-full' });
  t.not(second.backend, first.backend);
  const third = pipeline.send(tcp({ ...client, sport: 40_001, dst: '10.96.0.11', flags: 'S', seq: 1 }));
  t.match(third, { verdict: 'forward', state: '' });
});

t.test('a lone RST leaves nothing, whichever side it comes from', async (t) => {
  const stray = new TestPipeline(service('', B1));
  t.match(stray.send(tcp({ ...client, flags: 'R', seq: 1 })), { verdict: 'forward', backend: 'b1' });
  const recovering = new TestPipeline(service('', B1), { recovering: true });
  const ends = { src: '10.2.0.11', sport: 8080, dst: '10.1.0.2', dport: 40_000 };
  isTranslated(t, recovering.send(tcp({ ...ends, flags: 'RA', seq: 5, ack: 6 })));
  t.equal(stray.tcp.count + recovering.tcp.count, 0);

  const clash = new TestPipeline(TWO_VIPS.replaceAll('BACKENDS', B1));
  establish(clash);
  const other = clash.send(tcp({ ...client, dst: '10.96.0.11', flags: 'R', seq: 1001 }));
  t.match(other, { verdict: 'drop', reason: 'reply-tuple-clash' }, 'nor does it reach who owns its reply tuple');
});

t.test('a reply is picked up over an entry that has expired', async (t) => {
  const short = 'conntrack: { timeouts: { tcpSyn: 10s } }\n';
  const pipeline = new TestPipeline(short + service('algorithm: random,'), { recovering: true });
  const { backend } = pipeline.send(tcp({ ...client, flags: 'S', seq: 1 }));
  // Now the hash leads the client to the other one.
  const [other, src] = backend === 'b1' ? [B2, '10.2.0.12'] : [B1, '10.2.0.11'];
  pipeline.configure(short + service('', other));
  const back = tcp({ src, sport: 8080, dst: '10.1.0.2', dport: 40_000, flags: 'A', seq: 1, ack: 1 });
  pipeline.nowMs += 9999;
  t.match(pipeline.send(back), { verdict: 'pass' });
  pipeline.nowMs += 1;
  isTranslated(t, pipeline.send(back));
});

t.test('a backend that is its own client is never picked up: it was not reached directly', async (t) => {
  const pipeline = new TestPipeline(service('', B1), { recovering: true });
  const itself = { src: '10.2.0.11', sport: 8080, dst: '10.2.0.11', dport: 40_000 };
  t.match(pipeline.send(tcp({ ...itself, flags: 'A', seq: 1, ack: 1 })), { verdict: 'pass' });
  t.equal(pipeline.tcp.count, 0);
});

t.test('the middle of a connection that had a source of weir’s is refused: which one is lost', async (t) => {
  const data = { flags: 'A', seq: 1, ack: 77, payload: 5 };
  const hairpin = new TestPipeline(POOL + service('', B1));
  t.match(hairpin.send(tcp({ ...client, src: '10.2.0.11', ...data })), { verdict: 'reply', reason: 'rst-mid-stream' });
  const clash = new TestPipeline(POOL + TWO_VIPS.replaceAll('BACKENDS', B1));
  establish(clash);
  const second = { ...client, dst: '10.96.0.11' };
  t.match(clash.send(tcp({ ...second, ...data })), { verdict: 'reply', reason: 'rst-mid-stream' });
  t.match(clash.send(tcp({ ...second, flags: 'S', seq: 1 })), { verdict: 'forward' }, 'a new one gets one');
  t.equal(hairpin.tcp.count, 0);
});

t.test('in search of a free reply tuple a client is not sent to itself', async (t) => {
  const services = TWO_VIPS.replaceAll('BACKENDS', `${B1}, ${B2}, ${B3}`);
  let skipped = 0;
  for (let sport = 1000; sport < 1020; sport++) {
    const pipeline = new TestPipeline(services);
    const inside = { ...client, src: '10.2.0.12', sport };
    const first = pipeline.send(tcp({ ...inside, flags: 'S', seq: 1 }));
    if (first.backend !== 'b1') continue;
    const second = pipeline.send(tcp({ ...inside, dst: '10.96.0.11', flags: 'S', seq: 1 }));
    t.match(second, { verdict: 'forward', backend: 'b3' });
    skipped++;
  }
  t.ok(skipped > 0);
});
