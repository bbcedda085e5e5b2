import t from 'tap';
import { STAT_CUT } from '../../lib/datapath/stats.js';
import type { MemoryPacket } from '../../lib/io/memory-device.js';
import { describe } from '../fixtures/packet-text.js';
import { echoRequest, fragment, icmpError, ip, partial, tcp, udp, verifyChecksums } from '../fixtures/packets.js';
import { TestPipeline } from '../support/pipeline.js';
import { B1, B2, check, client, establish, half, quad, reply, service, TWO_VIPS } from '../support/traffic.js';

t.test('a connection, there and back, in every checksum form', async (t) => {
  for (const mode of ['mode: dnat,', 'mode: snat,']) {
    const pipeline = new TestPipeline(`snat: { addresses: [10.96.255.1] }\n${service(mode)}`);
    const syn = pipeline.send(tcp({ ...client, flags: 'S', seq: 1, options: { mss: 1460, scale: 7 } }));
    t.match(syn, { verdict: 'forward', direction: 'original', service: 'web', state: 'SYN_SENT' });
    check(t, syn);
    const out = syn.out[0]!;
    t.equal(quad(out.bytes, 12), mode === 'mode: snat,' ? '10.96.255.1' : '10.1.0.2');
    const synAck = pipeline.send(reply(out, { flags: 'SA', seq: 9, ack: 2 }));
    t.match(synAck, { verdict: 'forward', direction: 'reply', state: 'SYN_RECV', backend: syn.backend });
    check(t, synAck);
    t.equal(quad(synAck.out[0]!.bytes, 12), '10.96.0.10');
    t.equal(quad(synAck.out[0]!.bytes, 16), '10.1.0.2');
    t.equal(half(synAck.out[0]!.bytes, 20), 80);
    for (const packet of [
      partial(tcp({ ...client, flags: 'PA', seq: 2, ack: 10, payload: 100 })),
      partial(tcp({ ...client, flags: 'A', seq: 102, ack: 10, payload: 60_000 }), 1448),
    ]) {
      const data = pipeline.send(packet);
      t.match(data, { verdict: 'forward', state: 'ESTABLISHED', backend: syn.backend });
      check(t, data);
    }
  }
});

t.test('packets of one batch see what those before them did', async (t) => {
  const pipeline = new TestPipeline(service(''));
  const outcomes = pipeline.sendBatch([
    tcp({ ...client, flags: 'S', seq: 1 }),
    tcp({ ...client, flags: 'S', seq: 1 }),
    tcp({ ...client, sport: 40001, flags: 'S', seq: 1 }),
  ]);
  t.same(
    outcomes.map(({ verdict }) => verdict),
    ['forward', 'forward', 'forward'],
  );
  t.equal(pipeline.tcp.count, 2);
});

t.test('a VIP answers for itself', async (t) => {
  const pipeline = new TestPipeline(service(''));
  const rst = pipeline.send(tcp({ ...client, dport: 81, flags: 'S', seq: 77 }));
  t.match(rst, { verdict: 'reply', reason: 'rst-unknown-port' });
  check(t, rst);
  const unreachable = pipeline.send(udp({ ...client, payload: 20 }));
  t.match(unreachable, { verdict: 'reply', reason: 'unreachable' });
  check(t, unreachable);
  const echo = pipeline.send(echoRequest({ src: '10.1.0.2', dst: '10.96.0.10', id: 1, payload: 56 }));
  t.match(echo, { verdict: 'reply', reason: 'echo' });
  check(t, echo);
  t.match(pipeline.send(tcp({ ...client, dport: 81, flags: 'R', seq: 1 })), {
    verdict: 'drop',
    reason: 'unknown-port',
  });
  t.match(pipeline.send(tcp({ ...client, src: '10.9.9.9', dst: '10.9.0.1' })), {
    verdict: 'pass',
    reason: 'not-tracked',
  });
});

t.test('answers are limited to 50 a second to one source', async (t) => {
  const pipeline = new TestPipeline(service(''));
  const verdicts = Array.from({ length: 60 }, (_, i) =>
    pipeline.send(tcp({ ...client, dport: 81, flags: 'S', seq: i })),
  );
  t.equal(verdicts.filter(({ verdict }) => verdict === 'reply').length, 50);
  t.match(verdicts.at(-1), { verdict: 'drop', reason: 'rate-limited' });
  pipeline.nowMs += 1000;
  t.match(pipeline.send(tcp({ ...client, dport: 81, flags: 'S', seq: 1 })), { verdict: 'reply' });
});

t.test('two flows that would share a reply tuple', async (t) => {
  const second = { ...client, dst: '10.96.0.11' };

  t.test('no other backend, no pool: the second is refused, the first untouched', async (t) => {
    const pipeline = new TestPipeline(TWO_VIPS.replaceAll('BACKENDS', B1));
    const first = establish(pipeline);
    t.match(pipeline.send(tcp({ ...second, flags: 'S', seq: 1 })), { verdict: 'drop', reason: 'reply-tuple-clash' });
    const data = pipeline.send(reply(first.out[0]!, { flags: 'A', seq: 5001, ack: 1001, payload: 10 }));
    t.equal(quad(data.out[0]!.bytes, 12), '10.96.0.10');
  });

  t.test('another backend takes it', async (t) => {
    const pipeline = new TestPipeline(TWO_VIPS.replaceAll('BACKENDS', `${B1}, ${B2}`));
    const first = establish(pipeline);
    const other = pipeline.send(tcp({ ...second, flags: 'S', seq: 1 }));
    t.equal(other.verdict, 'forward');
    t.not(other.backend, first.backend);
  });

  t.test('with a pool it gets another source port', async (t) => {
    const pipeline = new TestPipeline(`snat: { addresses: [10.96.255.1] }\n${TWO_VIPS.replaceAll('BACKENDS', B1)}`);
    establish(pipeline);
    const other = pipeline.send(tcp({ ...second, flags: 'S', seq: 1 }));
    t.equal(quad(other.out[0]!.bytes, 12), '10.96.255.1');
    check(t, other);
  });

  t.test('a closing first flow is replaced whole', async (t) => {
    const pipeline = new TestPipeline(TWO_VIPS.replaceAll('BACKENDS', B1));
    const first = establish(pipeline);
    pipeline.send(tcp({ ...client, flags: 'FA', seq: 1001, ack: 5001 }));
    pipeline.send(reply(first.out[0]!, { flags: 'FA', seq: 5001, ack: 1002 }));
    t.match(pipeline.send(tcp({ ...second, flags: 'S', seq: 1 })), { verdict: 'forward', service: 'two' });
    t.equal(pipeline.tcp.count, 1);
  });
});

t.test('hairpin: snat or refused, never src = dst', async (t) => {
  const inside = { ...client, src: '10.2.0.11' };
  const refused = new TestPipeline(service('', B1));
  t.match(refused.send(tcp({ ...inside, flags: 'S', seq: 1 })), { verdict: 'drop', reason: 'hairpin-refused' });
  for (const mode of ['mode: snat,', '']) {
    const pipeline = new TestPipeline(`snat: { addresses: [10.96.255.1] }\n${service(mode, B1)}`);
    const out = pipeline.send(tcp({ ...inside, flags: 'S', seq: 1 }));
    t.equal(quad(out.out[0]!.bytes, 12), '10.96.255.1');
    const back = pipeline.send(reply(out.out[0]!, { flags: 'SA', seq: 1, ack: 2 }));
    t.equal(quad(back.out[0]!.bytes, 12), '10.96.0.10');
    t.equal(quad(back.out[0]!.bytes, 16), '10.2.0.11');
  }
});

t.test(
  'a client with an address of weir’s own is refused, and not answered: what is sent to it comes back',
  async (t) => {
    const pipeline = new TestPipeline(`snat: { addresses: [10.96.255.1] }\n${TWO_VIPS.replaceAll('BACKENDS', B1)}`);
    for (const src of ['10.96.0.11', '10.96.255.1']) {
      const own = { ...client, src };
      for (const [packet, reason] of [
        [tcp({ ...own, flags: 'S' }), 'hairpin-refused'],
        [tcp({ ...own, flags: 'A' }), 'hairpin-refused'],
        [tcp({ ...own, dport: 99, flags: 'S' }), 'unknown-port'],
        [udp({ ...own, dport: 99 }), 'unknown-port'],
        [ip(own, 47, new Uint8Array(20)), 'unsupported-protocol'],
        [echoRequest({ ...own, id: 1 }), 'icmp-unknown-flow'],
      ] as const) {
        t.match(pipeline.send(packet), { verdict: 'drop', reason, out: { length: 0 } }, src);
      }
    }
  },
);

t.test('mid-stream', async (t) => {
  const maglev = new TestPipeline(service(''));
  const again = new TestPipeline(service(''));
  const chosen = maglev.send(tcp({ ...client, flags: 'S', seq: 1 })).backend;
  t.match(again.send(tcp({ ...client, flags: 'A', seq: 500, ack: 1 })), {
    verdict: 'forward',
    backend: chosen,
    state: 'SYN_SENT',
  });
  const lone = new TestPipeline(service(''));
  t.match(lone.send(tcp({ ...client, flags: 'R', seq: 500 })), { verdict: 'forward', backend: chosen });
  t.equal(lone.tcp.count, 0);
  for (const fields of ['algorithm: random,', 'mode: snat,']) {
    const pipeline = new TestPipeline(`snat: { addresses: [10.96.255.1] }\n${service(fields)}`);
    t.match(pipeline.send(tcp({ ...client, flags: 'A', seq: 1, ack: 2 })), {
      verdict: 'reply',
      reason: 'rst-mid-stream',
    });
    t.match(pipeline.send(tcp({ ...client, flags: 'R', seq: 1 })), { verdict: 'drop', reason: 'unknown-flow' });
    t.equal(pipeline.tcp.count, 0);
  }
});

t.test('a reply after a start without a table', async (t) => {
  const before = new TestPipeline(service(''));
  const first = establish(before);
  const data = reply(first.out[0]!, { flags: 'A', seq: 5001, ack: 1001, payload: 500 });

  const cold = new TestPipeline(service(''));
  t.match(cold.send(data), { verdict: 'pass' });

  const recovering = new TestPipeline(service(''), { recovering: true });
  const picked = recovering.send(data);
  t.match(picked, { verdict: 'forward', direction: 'reply', service: 'web', backend: first.backend });
  t.equal(quad(picked.out[0]!.bytes, 12), '10.96.0.10');
  check(t, picked);
  t.match(recovering.send(tcp({ ...client, flags: 'A', seq: 1001, ack: 5501 })), {
    backend: first.backend,
    state: 'ESTABLISHED',
  });

  const wrong = recovering.send(tcp({ src: '10.2.0.11', sport: 8080, dst: '10.1.0.2', dport: 40003, flags: 'A' }));
  const other = recovering.send(tcp({ src: '10.2.0.12', sport: 8080, dst: '10.1.0.2', dport: 40003, flags: 'A' }));
  t.same([wrong.verdict, other.verdict].sort(), ['forward', 'pass'], 'only the backend the hash picks');

  const late = new TestPipeline(service(''), { recovering: true });
  late.nowMs += 60_000;
  t.match(late.send(data), { verdict: 'pass' });
});

t.test('a backend that takes no new flows', async (t) => {
  const both = service('onRemove: keep,');
  const one = service('onRemove: keep,', B2);
  const pipeline = new TestPipeline(both);
  const flows = Array.from({ length: 20 }, (_, i) => ({ from: { ...client, sport: 41_000 + i } }));
  const firsts = flows.map(({ from }) => establish(pipeline, from));
  const half = pipeline.send(tcp({ ...client, sport: 42_000, flags: 'S', seq: 1 }));
  pipeline.configure(one);
  flows.forEach(({ from }, i) => {
    const data = pipeline.send(tcp({ ...from, flags: 'A', seq: 1001, ack: 5001, payload: 5 }));
    t.equal(data.backend, firsts[i]!.backend, 'an established flow stays');
  });
  t.equal(pipeline.send(tcp({ ...client, sport: 42_000, flags: 'S', seq: 1 })).backend, 'b2', 'a SYN picks again');
  t.ok(half.verdict === 'forward');
  pipeline.nowMs += 5 * 60_000;
  const onB1 = flows[firsts.findIndex(({ backend }) => backend === 'b1')]!;
  const cut = pipeline.send(tcp({ ...onB1.from, flags: 'A', seq: 1006, ack: 5001 }));
  t.match(cut, { verdict: 'reply', reason: 'rst-mid-stream' }, 'and is cut when its drain time is over');
});

t.test('fragments in any order follow their first', async (t) => {
  const config = `services:
  - { name: dns, address: 10.96.0.11, port: 53, protocol: udp, backends: [{ name: b1, address: 10.2.0.11, port: 53 }] }
`;
  const datagram = udp({ src: '10.1.0.2', sport: 5000, dst: '10.96.0.11', dport: 53, id: 9, payload: 4000 });
  const [first, second, third] = fragment(datagram, 1480) as [Uint8Array, Uint8Array, Uint8Array];
  const pipeline = new TestPipeline(config);
  t.match(pipeline.send(third), { verdict: 'hold', out: [] });
  const released = pipeline.send(first);
  t.match(released, { verdict: 'forward', service: 'dns', backend: 'b1' });
  t.equal(released.out.length, 2);
  const last = pipeline.send(second);
  t.match(last, { verdict: 'forward', backend: 'b1' });
  for (const { bytes } of [...released.out, ...last.out]) t.equal(quad(bytes, 16), '10.2.0.11');
  t.equal(pipeline.device.slotsHeld, 0);
  pipeline.send(
    fragment(udp({ src: '10.1.0.2', sport: 1, dst: '10.96.0.11', dport: 53, id: 10, payload: 4000 }), 1480)[1]!,
  );
  t.equal(pipeline.flushDue(), pipeline.nowMs + 1000);
  t.equal(pipeline.flushDue(pipeline.nowMs + 1000), Number.POSITIVE_INFINITY);
});

t.test('ICMP errors belong to the flow they quote', async (t) => {
  const pipeline = new TestPipeline(service('', B1));
  const first = establish(pipeline);
  const back = icmpError({
    src: '10.2.0.99',
    dst: '10.1.0.2',
    type: 3,
    code: 4,
    mtu: 1400,
    quoted: first.out[0]!.bytes,
    quoteBytes: 28,
  });
  const toClient = pipeline.send(back);
  t.match(toClient, { verdict: 'forward', direction: 'reply', service: 'web' });
  check(t, toClient);
  t.equal(quad(toClient.out[0]!.bytes, 28 + 16), '10.96.0.10');
  const quoted = tcp({ src: '10.96.0.10', sport: 80, dst: '10.1.0.2', dport: 40000, flags: 'A', payload: 1400 });
  const toBackend = pipeline.send(
    icmpError({ src: '10.1.0.1', dst: '10.96.0.10', type: 3, code: 4, mtu: 1400, quoted, quoteBytes: 28 }),
  );
  t.match(toBackend, { verdict: 'forward', direction: 'original' });
  check(t, toBackend);
  t.equal(quad(toBackend.out[0]!.bytes, 16), '10.2.0.11');
  const unknown = tcp({ src: '10.96.0.10', sport: 80, dst: '10.1.0.2', dport: 49999 });
  t.match(pipeline.send(icmpError({ src: '10.1.0.1', dst: '10.96.0.10', type: 3, code: 4, quoted: unknown })), {
    verdict: 'drop',
    reason: 'icmp-unknown-flow',
  });
});

t.test('a million packets of known flows allocate nothing that stays', async (t) => {
  const pipeline = new TestPipeline(service(''));
  for (let i = 0; i < 64; i++) establish(pipeline, { ...client, sport: 45_000 + i });
  const { device, pipeline: gateway } = pipeline;
  const packet = tcp({ ...client, sport: 45_000, flags: 'A', seq: 1001, ack: 5001 });
  device.transmit = () => {};
  device.release = () => {};
  const run = (batches: number): void => {
    const { rx, memory } = device;
    for (let b = 0; b < batches; b++) {
      rx.count = 64;
      for (let i = 0; i < 64; i++) {
        const at = i * memory.slotBytes + 128;
        rx.offset[i] = at;
        rx.slot[i] = i;
        rx.length[i] = packet.length;
        for (let k = 0; k < packet.length; k++) memory.bytes[at + k] = packet[k]!;
      }
      gateway.process(rx, pipeline.nowMs);
    }
  };
  run(2000);
  const before = process.memoryUsage().heapUsed;
  run(15_625);
  const grown = process.memoryUsage().heapUsed - before;
  t.ok(grown < 2_000_000, `the heap grew by ${grown} bytes over 1,000,000 packets`);
});

t.test('flows are cut at the end of the drain time, or at once under onRemove: reset', async (t) => {
  for (const [fields, waitMs] of [
    ['onRemove: reset,', 0],
    ['drainTimeout: 10s,', 10_000],
  ] as const) {
    const pipeline = new TestPipeline(service(fields, B1));
    const first = establish(pipeline);
    pipeline.send(tcp({ ...client, flags: 'PA', seq: 1001, ack: 5001, payload: 100 }));
    pipeline.send(reply(first.out[0]!, { flags: 'PA', seq: 5001, ack: 1101, payload: 300 }));
    pipeline.configure(service(fields, B2));
    if (waitMs > 0) t.equal(pipeline.sendDue().length, 0, 'kept so long');
    pipeline.nowMs += waitMs;
    const [toClient, toBackend] = pipeline.sendDue() as [MemoryPacket, MemoryPacket];
    for (const { bytes } of [toClient, toBackend]) t.same(verifyChecksums(bytes), []);
    t.match(describe(toClient.bytes), /10\.96\.0\.10:80 > 10\.1\.0\.2:40000 RA? .*seq=5301/);
    t.match(describe(toBackend.bytes), /10\.1\.0\.2:40000 > 10\.2\.0\.11:8080 RA? .*seq=1101/);
    t.equal(pipeline.tcp.count, 0);
    t.match(pipeline.send(tcp({ ...client, flags: 'S', seq: 9000 })), { verdict: 'forward', backend: 'b2' });
    t.equal(pipeline.device.slotsHeld, 0);
  }
});

t.test('a packet that comes before the sweep ends its flow as well, and both ends hear of it', async (t) => {
  for (const side of ['client', 'backend'] as const) {
    const pipeline = new TestPipeline(service('onRemove: reset,', B1));
    const first = establish(pipeline);
    pipeline.configure(service('onRemove: reset,', B2));
    const packet =
      side === 'client'
        ? tcp({ ...client, flags: 'PA', seq: 1001, ack: 5001, payload: 9 })
        : reply(first.out[0]!, { flags: 'PA', seq: 5001, ack: 1001, payload: 9 });
    const outcome = pipeline.send(packet);
    t.match(outcome, { verdict: 'reply', reason: 'rst-mid-stream', backend: 'b1' });
    check(t, outcome);
    const [toClient, toBackend] = outcome.out.map(({ bytes }) => describe(bytes));
    t.match(toClient, /10\.96\.0\.10:80 > 10\.1\.0\.2:40000 RA? .*seq=5001/);
    t.match(toBackend, /10\.1\.0\.2:40000 > 10\.2\.0\.11:8080 RA? .*seq=1001/);
    t.equal(pipeline.sendDue().length, 0, 'once');
    t.equal(pipeline.stats[STAT_CUT], 1);
    t.equal(pipeline.device.slotsHeld, 0);
  }
});

t.test('a deadline in the millisecond of a sweep for another is kept', async (t) => {
  const both = TWO_VIPS.replaceAll('BACKENDS', B1).replaceAll('backends', 'onRemove: reset, backends');
  const pipeline = new TestPipeline(both);
  establish(pipeline);
  const second = { ...client, sport: 7, dst: '10.96.0.11' };
  establish(pipeline, second);
  const withoutOne = both.replace(/\n.*one.*/, '');
  pipeline.configure(withoutOne);
  t.equal(pipeline.sendDue().length, 2);
  pipeline.configure(withoutOne.replace(B1, B2));
  t.equal(pipeline.sendDue().length, 2);
  t.equal(pipeline.tcp.count, 0);
});

t.test('what has expired is not cut, what was picked up in the middle is not reset', async (t) => {
  const pipeline = new TestPipeline(service('drainTimeout: 10s,', B1));
  pipeline.send(tcp({ ...client, flags: 'A', seq: 7, ack: 8, payload: 9 }));
  pipeline.configure(service('drainTimeout: 10s,', B2));
  pipeline.nowMs += 10_000;
  t.equal(pipeline.sendDue().length, 0, 'its numbers are unknown');
  t.equal(pipeline.stats[STAT_CUT], 1);
  pipeline.send(tcp({ ...client, flags: 'S', seq: 7 }));
  pipeline.configure(service('drainTimeout: 60s,', B1));
  pipeline.nowMs += 60_000;
  t.equal(pipeline.sendDue().length, 0, 'its time was over anyway');
  t.equal(pipeline.stats[STAT_CUT], 1);
  t.equal(pipeline.tcp.count, 0);
});

t.test('a backend that becomes a VIP keeps no flow: its packets would come back', async (t) => {
  const pipeline = new TestPipeline(service('', B1));
  establish(pipeline);
  const moved = '  - { name: nv, address: 10.2.0.11, port: 80, protocol: tcp, backends: [] }\n';
  pipeline.configure(service('', B2) + moved);
  t.equal(pipeline.sendDue().length, 2);
  t.equal(pipeline.tcp.count, 0);
});
