import t from 'tap';
import { CAUSE_FLUSHED } from '../../lib/conntrack/events.js';
import { STAT_FORWARDED, STAT_STATELESS } from '../../lib/datapath/stats.js';
import type { MemoryPacket } from '../../lib/io/memory-device.js';
import { dsrOption, geneve, tunnelled } from '../fixtures/geneve.js';
import { describe } from '../fixtures/packet-text.js';
import { fragment, icmpError, partial, tcp, udp } from '../fixtures/packets.js';
import { B1, B2, client, config, inner, innerQuery, inside, only, query } from '../support/dsr.js';
import { TestPipeline } from '../support/pipeline.js';

/** Flows of dsr services: what leaves, what is remembered, who is refused. */

t.test('every byte, for either kind of inner packet and either use of the option', async (t) => {
  for (const kind of ['ethernet', 'ip']) {
    for (const option of ['always', 'syn']) {
      const pipeline = new TestPipeline(config({ tunnel: `inner: ${kind}, option: ${option}, vni: 77, port: 7000,` }));
      const send = (sent: Uint8Array | MemoryPacket, expected: Uint8Array, hasOption: boolean): void => {
        const { verdict, out, backend } = pipeline.send(sent);
        t.match({ verdict, backend, packets: out.length }, { verdict: 'forward', backend: 'b1', packets: 1 });
        const { bytes, vnet } = out[0]!;
        const port = expected[9] === 17 ? 53 : 80;
        const options = hasOption ? [dsrOption('10.96.0.10', port)] : [];
        const payload = geneve({ options, vni: 77, protocol: kind === 'ip' ? 0x0800 : 0x6558 }, expected);
        const sport = (bytes[20]! << 8) | bytes[21]!;
        t.ok(sport >= 32768);
        const outer = { src: '192.0.2.1', dst: '192.0.2.11', sport, tos: expected[1]! };
        t.same(bytes, tunnelled(outer, payload, 7000), `${describe(expected)} in ${kind}, option ${option}`);
        t.equal(vnet, undefined);
      };
      const always = option === 'always';
      const options = { mss: 1460, scale: 7, sackPermitted: true };
      send(tcp({ ...client, flags: 'S', seq: 9, options }), tcp({ ...inner, flags: 'S', seq: 9, options }), true);
      const data = { flags: 'PA', seq: 10, ack: 5, payload: 777 };
      for (const tos of [0, 1, 2, 3, 0xb8, 0xbb])
        send(tcp({ ...client, ...data, tos }), tcp({ ...inner, ...data, tos }), always);
      send(partial(tcp({ ...client, ...data })), tcp({ ...inner, ...data }), always);
      send(tcp({ ...client, flags: 'S', seq: 9 }), tcp({ ...inner, flags: 'S', seq: 9 }), true);
      send(tcp({ ...client, flags: 'FA', seq: 787 }), tcp({ ...inner, flags: 'FA', seq: 787 }), always);
      for (const fields of [{ payload: 33 }, { payload: 0 }, { payload: 20, checksum: 0 }])
        send(udp({ ...query, ...fields }), udp({ ...innerQuery, ...fields }), true);
      send(partial(udp({ ...query, payload: 9 })), udp({ ...innerQuery, payload: 9 }), true);
      const later = { ...client, sport: 40001, flags: 'A', seq: 7, ack: 1 };
      send(tcp(later), tcp({ ...later, dst: '10.2.0.11', dport: 8080 }), true);
      send(tcp(later), tcp({ ...later, dst: '10.2.0.11', dport: 8080 }), always);
      t.equal(pipeline.device.slotsHeld, 0);
    }
  }
});

t.test('the outer source port is the flow’s', async (t) => {
  const pipeline = new TestPipeline(config());
  const again = new TestPipeline(config(), { seed: 9 });
  const ports = new Set<number>();
  for (let sport = 1; sport <= 200; sport++) {
    const { sport: port } = only(t, pipeline.send(tcp({ ...client, sport, flags: 'S' })));
    t.equal(only(t, pipeline.send(tcp({ ...client, sport, flags: 'A', payload: 5 }))).sport, port);
    t.equal(only(t, again.send(tcp({ ...client, sport, flags: 'S' }))).sport, port, 'on every gateway of a seed');
    ports.add(port);
  }
  t.ok(ports.size > 190, `${ports.size} ports for 200 flows`);
});

t.test('entries of one direction: states, flags and what can be evicted', async (t) => {
  const pipeline = new TestPipeline(config(), { tcpEntries: 2, anyEntries: 2 });
  const states = (...flags: string[]): string[] => flags.map((f) => pipeline.send(tcp({ ...client, flags: f })).state);
  t.same(states('S', 'S', 'A', 'PA', 'S', 'FA', 'A', 'R'), [
    'SYN_SENT',
    'SYN_SENT',
    'ESTABLISHED',
    'ESTABLISHED',
    'ESTABLISHED',
    'CLOSING',
    'CLOSING',
    'CLOSING',
  ]);
  t.same(states('S'), ['SYN_SENT'], 'a SYN on a closing entry is a new connection');
  t.same(states('A', 'R', 'A'), ['ESTABLISHED', 'ESTABLISHED', 'ESTABLISHED']);
  const full = (flags: string[], sport: number): void => {
    for (const f of flags) pipeline.send(tcp({ ...client, sport, flags: f }));
  };
  full(['S', 'A', 'A'], 2);
  t.equal(pipeline.tcp.count, 2);
  full(['S', 'A'], 3);
  t.equal(pipeline.stats[STAT_STATELESS], 2, 'full of flows of three packets: forwarded without a record, by the hash');
  pipeline.tcp.remove(0, CAUSE_FLUSHED, pipeline.nowMs);
  full(['S', 'A'], 4);
  full(['S'], 5);
  t.equal(pipeline.stats[STAT_STATELESS], 2, 'a flow of two packets gives way');
  for (const sport of [2, 3, 1, 1, 1, 4, 4, 4]) pipeline.send(udp({ ...query, sport }));
  t.equal(pipeline.any.count, 2);
  t.equal(pipeline.stats[STAT_STATELESS], 2);
  pipeline.send(udp({ ...query, sport: 5 }));
  t.equal(pipeline.stats[STAT_STATELESS], 3);
});

const TIMEOUTS =
  'conntrack: { timeouts: { tcpSyn: 50s, tcpFin: 7s, serviceTcp: 1000s, serviceTcpGrace: 30s, serviceAny: 20s } }';

t.test('timers, a second before and a second after', async (t) => {
  const cases: ReadonlyArray<readonly [name: string, flags: readonly string[], seconds: number]> = [
    ['a SYN: tcpSyn', ['S'], 50],
    ['a SYN again', ['S', 'S'], 50],
    ['established: serviceTcp', ['S', 'A'], 1000],
    ['picked up in the middle', ['A'], 1000],
    ['a SYN on it', ['S', 'A', 'S'], 1000],
    ['after a FIN: serviceTcpGrace', ['S', 'A', 'FA'], 30],
    ['a FIN of an unknown flow', ['FA'], 30],
    ['packets after the FIN', ['S', 'A', 'FA', 'A'], 30],
    ['an RST: tcpFin', ['S', 'A', 'R'], 7],
    ['and the next other packet', ['S', 'A', 'R', 'A'], 1000],
    ['an RST after the FIN', ['S', 'A', 'FA', 'R'], 7],
    ['an RST on a SYN', ['S', 'R'], 7],
    ['UDP: serviceAny', [], 20],
  ];
  for (const [name, flags, seconds] of cases) {
    for (const delta of [-1, 1]) {
      const pipeline = new TestPipeline(config({ top: TIMEOUTS }));
      const table = flags.length === 0 ? pipeline.any : pipeline.tcp;
      if (flags.length === 0) pipeline.send(udp(query));
      for (const f of flags) {
        pipeline.nowMs += 1000;
        pipeline.send(tcp({ ...client, flags: f }));
      }
      t.equal(table.count, 1, name);
      t.equal(table.isExpired(0, pipeline.nowMs + (seconds + delta) * 1000), delta > 0, `${name}, ${delta} s`);
    }
  }
  const fragments = new TestPipeline(config({ top: TIMEOUTS }));
  const [first, second] = fragment(tcp({ ...client, flags: 'A', id: 5, payload: 1000 }), 600) as [
    Uint8Array,
    Uint8Array,
  ];
  fragments.send(first);
  fragments.nowMs += 20_000;
  fragments.send(second);
  t.equal(fragments.tcp.isExpired(0, fragments.nowMs + 999_000), false, 'a later fragment counts like any packet');
});

t.test('mid-stream: picked up by the hash, also by lot', async (t) => {
  for (const web of ['algorithm: maglev,', 'algorithm: random,']) {
    const before = new TestPipeline(config({ web, backends: `${B1}, ${B2}` }));
    const after = new TestPipeline(config({ web, backends: `${B1}, ${B2}` }), { seed: 7 });
    const seen = new Set<string | undefined>();
    for (let sport = 1; sport <= 40; sport++) {
      const { backend } = before.send(tcp({ ...client, sport, flags: 'S' }));
      seen.add(backend);
      const picked = after.send(tcp({ ...client, sport, flags: 'A', seq: 9, payload: 100 }));
      t.match(picked, { verdict: 'forward', backend, state: 'ESTABLISHED' });
    }
    t.equal(seen.size, 2);
    const lone = after.send(tcp({ ...client, sport: 50, flags: 'R', seq: 9 }));
    t.match(lone, { verdict: 'forward', state: '' });
    t.equal(only(t, lone).dst, `192.0.2.1${lone.backend!.slice(1)}`);
    t.equal(after.tcp.count, 40, 'a lone RST leaves no entry');
  }
  const syn = new TestPipeline(config({ tunnel: 'option: syn,' }));
  t.equal(only(t, syn.send(tcp({ ...client, flags: 'R', seq: 9 }))).vip, undefined);
});

t.test('who is refused', async (t) => {
  const pipeline = new TestPipeline(config());
  for (const flags of ['S', 'A']) {
    const hairpin = pipeline.send(tcp({ ...client, src: '10.2.0.11', flags }));
    t.match(hairpin, { verdict: 'drop', reason: 'hairpin-refused' });
  }
  t.match(pipeline.send(tcp({ ...client, src: '10.2.0.11', flags: 'R' })), { verdict: 'drop', reason: 'unknown-flow' });
  t.match(pipeline.send(tcp({ ...client, src: '10.96.0.10', flags: 'S' })), {
    verdict: 'drop',
    reason: 'hairpin-refused',
  });
  const empty = new TestPipeline(config({ backends: '' }));
  t.match(empty.send(tcp({ ...client, flags: 'S' })), { verdict: 'reply', reason: 'rst-no-backend' });
  t.match(empty.send(udp(query)), { verdict: 'reply', reason: 'unreachable' });
  t.equal(pipeline.tcp.count + empty.any.count, 0);
});

t.test('a backend that takes no new flows', async (t) => {
  const pipeline = new TestPipeline(config());
  for (const flags of ['S', 'A']) pipeline.send(tcp({ ...client, flags }));
  pipeline.send(tcp({ ...client, sport: 2, flags: 'S' }));
  for (let i = 0; i < 4; i++) pipeline.send(udp(query));
  pipeline.configure(config({ backends: B2 }));
  t.equal(only(t, pipeline.send(tcp({ ...client, flags: 'A', payload: 5 }))).dst, '192.0.2.11', 'TCP stays');
  t.equal(pipeline.send(tcp({ ...client, flags: 'S' })).backend, 'b1');
  t.equal(pipeline.send(tcp({ ...client, sport: 2, flags: 'S' })).backend, 'b2', 'a SYN without more picks again');
  const moved = pipeline.send(udp(query));
  t.equal(moved.backend, 'b2', 'and so does every datagram');
  t.equal(only(t, moved).dst, '192.0.2.12');
  pipeline.nowMs += 300_000;
  const cut = pipeline.send(tcp({ ...client, flags: 'A', seq: 1, ack: 77 }));
  t.match(cut, { verdict: 'reply', reason: 'rst-mid-stream' });
  t.same(
    cut.out.map(({ bytes }) => describe(bytes).replace(/:\d+ > 192/, ' > 192')),
    [
      'geneve 192.0.2.1 > 192.0.2.11 vip=10.96.0.10:80 [tcp 10.1.0.2:40000 > 10.2.0.11:8080 R seq=1 win=0]',
      'tcp 10.96.0.10:80 > 10.1.0.2:40000 R seq=77 win=0',
    ],
    'a packet that comes before the sweep: both ends are told',
  );
  t.equal(pipeline.device.slotsHeld, 0);
});

t.test('flows that are cut: an RST to the client, and one through the tunnel', async (t) => {
  const pipeline = new TestPipeline(config({ web: 'onRemove: reset,', tunnel: 'option: syn,' }));
  const due = (): string[] => {
    pipeline.device.sent = [];
    while (pipeline.flushDue() <= pipeline.nowMs);
    return pipeline.device.sent.map(({ bytes }) => describe(bytes).replace(/:\d+ > 192/, ' > 192'));
  };
  pipeline.send(tcp({ ...client, flags: 'S', seq: 1000 }));
  pipeline.send(tcp({ ...client, flags: 'A', seq: 1001, ack: 5001 }));
  pipeline.send(tcp({ ...client, flags: 'PA', seq: 1001, ack: 5001, payload: 100 }));
  pipeline.send(tcp({ ...client, flags: 'A', seq: 1101, ack: 5301 }));
  pipeline.send(tcp({ ...client, flags: 'A', seq: 1001, ack: 5001, payload: 50 }));
  pipeline.send(tcp({ ...client, sport: 2, flags: 'S', seq: 7 }));
  pipeline.send(tcp({ ...client, sport: 3, flags: 'FA', seq: 7 }));
  pipeline.send(udp(query));
  pipeline.configure(config({ web: 'onRemove: reset,', tunnel: 'option: syn,', backends: B2 }));
  t.same(due(), [
    'tcp 10.96.0.10:80 > 10.1.0.2:40000 RA seq=5301 ack=1101 win=0',
    'geneve 192.0.2.1 > 192.0.2.11 [tcp 10.1.0.2:40000 > 10.2.0.11:8080 RA seq=1101 ack=5301 win=0]',
    'tcp 10.96.0.10:80 > 10.1.0.2:2 RA seq=0 ack=8 win=0',
    'geneve 192.0.2.1 > 192.0.2.11 [tcp 10.1.0.2:2 > 10.2.0.11:8080 R seq=8 win=0]',
  ]);
  t.equal(pipeline.tcp.count, 0, 'a closing one just goes');
  t.equal(pipeline.device.slotsHeld, 0);
});

t.test('a configuration without a tunnel has no place for its flows', async (t) => {
  const pipeline = new TestPipeline(config());
  pipeline.send(tcp({ ...client, flags: 'S' }));
  const [first, second] = fragment(udp({ ...query, id: 3, payload: 100 }), 56) as [Uint8Array, Uint8Array];
  pipeline.send(first);
  const error = icmpError({
    src: '10.1.0.1',
    dst: '10.96.0.10',
    type: 3,
    code: 1,
    quoted: tcp({ ...client, src: '10.96.0.10', sport: 80, dst: '10.1.0.2', dport: 40000 }),
  });
  pipeline.configure(
    config()
      .replace(/^tunnel.*$/m, '')
      .replaceAll('mode: dsr,', '')
      .replaceAll(/node: [\d.]+/g, ''),
  );
  t.match(pipeline.send(error), { verdict: 'drop', reason: 'unknown-flow' });
  t.match(pipeline.send(second), { verdict: 'drop', reason: 'unknown-flow' });
  const moved = pipeline.send(tcp({ ...client, flags: 'A' }));
  t.match(moved, { verdict: 'forward', backend: 'b1' });
  t.equal(describe(moved.out[0]!.bytes), 'tcp 10.1.0.2:40000 > 10.2.0.11:8080 A seq=0', 'the flow begins anew without');
});

t.test('a service in another mode has no tunnels for its flows, but for those that are drained', async (t) => {
  const both = `${B1}, ${B2}`;
  const dnat = (backends: string): string =>
    config({ backends: backends.replaceAll(/, node: [\d.]+/g, '') }).replaceAll('mode: dsr,', '');
  const ack = { ...client, flags: 'A', seq: 2, ack: 9 };
  const pipeline = new TestPipeline(config({ backends: both }));
  const { backend } = pipeline.send(tcp({ ...client, flags: 'S', seq: 1 }));
  pipeline.send(udp(query));
  const [stays, leaves] = backend === 'b1' ? [B1, B2] : [B2, B1];

  pipeline.configure(dnat(leaves));
  t.match(describe(pipeline.send(tcp(ack)).out[0]!.bytes), / > 192\.0\.2\.1[12] /, 'to the node it was at');

  pipeline.configure(config({ backends: both }));
  pipeline.configure(dnat(stays));
  const moved = pipeline.send(tcp(ack));
  t.match(moved, { verdict: 'forward', backend, direction: 'original' });
  t.match(describe(moved.out[0]!.bytes), /^tcp 10\.1\.0\.2:40000 > 10\.2\.0\.1[12]:8080 A seq=2 ack=9$/);
  const answer = {
    src: backend === 'b1' ? '10.2.0.11' : '10.2.0.12',
    sport: 8080,
    dst: client.src,
    dport: client.sport,
  };
  t.match(pipeline.send(tcp({ ...answer, flags: 'A', seq: 9, ack: 2 })), { direction: 'reply', state: 'ESTABLISHED' });
  t.match(describe(pipeline.send(udp(query)).out[0]!.bytes), /^udp 10\.1\.0\.2:5000 > 10\.2\.0\.1[12]:8080/);
});

t.test('flows from before a service was in mode dsr: their answers are the node’s now', async (t) => {
  const tunnel = 'option: syn,';
  const backends = `${B1}, ${B2}`;
  const top = 'snat: { addresses: [10.96.255.1] }';
  const before = (mode: string): string =>
    config({ tunnel, top, backends: backends.replaceAll(/, node: [\d.]+/g, '') }).replaceAll('mode: dsr,', mode);
  for (const mode of ['', 'mode: snat,']) {
    const pipeline = new TestPipeline(before(mode));
    const { backend, out } = pipeline.send(tcp({ ...client, flags: 'S', seq: 1 }));
    const [, source, from] = describe(out[0]!.bytes).match(/^tcp (\S+) > (\S+):8080/)!;
    const [dst, dport] = source!.split(':') as [string, string];
    const answer = { src: from!, sport: 8080, dst, dport: Number(dport), seq: 9, ack: 2 };
    pipeline.send(tcp({ ...answer, flags: 'SA', seq: 8 }));
    pipeline.send(tcp({ ...client, flags: 'A', seq: 2, ack: 9 }));
    pipeline.send(udp(query));

    pipeline.configure(config({ tunnel, top, backends }));
    t.match(pipeline.send(tcp({ ...answer, flags: 'A' })), { verdict: 'forward', direction: 'reply' }, 'on its way');
    const next = pipeline.send(tcp({ ...client, flags: 'A', seq: 2, ack: 9, payload: 5 }));
    const datagram = pipeline.send(udp(query));
    if (mode === '') {
      t.match(next, { backend, state: 'ESTABLISHED' });
      t.match(only(t, next), { vip: '10.96.0.10:80', dst: backend === 'b1' ? '192.0.2.11' : '192.0.2.12' });
      t.match(only(t, datagram), { vip: '10.96.0.10:53' });
    } else {
      t.match(describe(next.out[0]!.bytes), /^tcp 10\.96\.255\.1:/, 'answers to an snat address go on coming');
      t.match(describe(datagram.out[0]!.bytes), /^udp 10\.96\.255\.1:/);
    }
    t.equal(pipeline.tcp.count, 1);
    t.equal(pipeline.any.count, 1);
  }
});

t.test('ICMP errors from the client’s side go to the owner of the flow, translated', async (t) => {
  for (const option of ['always', 'syn']) {
    const pipeline = new TestPipeline(config({ tunnel: `option: ${option},` }));
    const { sport } = only(t, pipeline.send(tcp({ ...client, flags: 'S' })));
    pipeline.send(udp(query));
    const quotes = {
      tcp: tcp({ src: '10.96.0.10', sport: 80, dst: '10.1.0.2', dport: 40000, flags: 'A', seq: 77, payload: 1400 }),
      udp: udp({ src: '10.96.0.10', sport: 53, dst: '10.1.0.2', dport: 5000, payload: 1400 }),
    };
    const translated = {
      tcp: tcp({ src: '10.2.0.11', sport: 8080, dst: '10.1.0.2', dport: 40000, flags: 'A', seq: 77, payload: 1400 }),
      udp: udp({ src: '10.2.0.11', sport: 8080, dst: '10.1.0.2', dport: 5000, payload: 1400 }),
    };
    for (const protocol of ['tcp', 'udp'] as const) {
      for (const src of ['10.1.0.1', '10.1.0.2']) {
        const sent = { src, dst: '10.96.0.10', type: 3, code: 4, mtu: 1300, quoted: quotes[protocol], quoteBytes: 28 };
        const outcome = pipeline.send(icmpError(sent));
        t.match(outcome, { direction: 'original', service: protocol === 'tcp' ? 'web' : 'dns', backend: 'b1' });
        const found = only(t, outcome);
        t.same(found.inner, icmpError({ ...sent, dst: '10.2.0.11', quoted: translated[protocol] }));
        t.equal(found.dst, '192.0.2.11');
        t.equal(found.vip, option === 'syn' ? undefined : `10.96.0.10:${protocol === 'tcp' ? 80 : 53}`);
        if (protocol === 'tcp') t.equal(found.sport, sport, 'in the order of the flow');
      }
    }
    const unknown = tcp({ src: '10.96.0.10', sport: 9, dst: '10.1.0.2', dport: 40000 });
    const stray = icmpError({ src: '10.1.0.1', dst: '10.96.0.10', type: 3, code: 4, mtu: 1300, quoted: unknown });
    t.match(pipeline.send(stray), { verdict: 'drop', reason: 'icmp-unknown-flow' });
    const long = icmpError({ src: '10.1.0.1', dst: '10.96.0.10', type: 3, code: 1, quoted: quotes.tcp });
    t.match(pipeline.send(long), { verdict: 'drop', reason: 'mtu-exceeded' }, 'nobody is told about an error');
    const loose = icmpError({ src: '10.1.0.1', dst: '10.96.0.10', id: 4, type: 3, code: 1, quoted: quotes.tcp });
    t.equal(inside(t, pipeline.send(loose)).length, 2);
  }
});

t.test('ICMP errors of flows that another gateway has go where their packets go', async (t) => {
  const complaint = (dport: number, fields: object = {}): Uint8Array =>
    icmpError({
      src: '10.1.0.1',
      dst: '10.96.0.10',
      type: 3,
      code: 4,
      mtu: 1300,
      quoted: tcp({ src: '10.96.0.10', sport: 80, dst: '10.1.0.2', dport, flags: 'A', payload: 1400, ...fields }),
      quoteBytes: 28,
    });
  for (const web of ['algorithm: maglev,', 'algorithm: random,', 'affinity: { clientIp: 1h },']) {
    const one = new TestPipeline(config({ web, backends: `${B1}, ${B2}` }));
    const other = new TestPipeline(config({ web, backends: `${B1}, ${B2}` }), { seed: 9 });
    const nodes = new Set<string>();
    for (let sport = 40000; sport < 40050; sport++) {
      const flow = only(t, one.send(tcp({ ...client, sport, flags: 'S' })));
      const known = only(t, one.send(complaint(sport)));
      const outcome = other.send(complaint(sport));
      t.match(outcome, { direction: 'original', service: 'web' });
      const unknown = only(t, outcome);
      t.same(unknown, known, 'byte for byte as the gateway that has the flow sends it');
      t.same([unknown.dst, unknown.sport], [flow.dst, flow.sport]);
      nodes.add(unknown.dst);
    }
    t.equal(nodes.size, web.includes('affinity') ? 1 : 2);
    t.equal(other.tcp.count, 0, 'and nothing is recorded');
  }

  const ranged = new TestPipeline(config({ web: 'sourceRanges: [10.1.0.0/24],' }));
  t.equal(ranged.send(complaint(1)).verdict, 'forward');
  const lost = { verdict: 'drop', reason: 'icmp-unknown-flow', out: [] };
  t.match(ranged.send(complaint(1, { dst: '10.1.1.2' })), lost, 'a client that has no flows');
  const anyone = new TestPipeline(config());
  t.match(anyone.send(complaint(1, { dst: '10.2.0.11' })), lost, 'nor has a backend');
  t.match(anyone.send(complaint(1, { dst: '10.96.0.10' })), lost, 'nor a VIP');
  t.match(ranged.send(complaint(1, { sport: 81 })), lost, 'no service');
  const dnat = config()
    .replaceAll('dsr', 'dnat')
    .replaceAll(/, node: [\d.]+/g, '');
  t.match(new TestPipeline(config({ backends: '' })).send(complaint(1)), lost, 'no backend');
  t.match(new TestPipeline(dnat).send(complaint(1)), lost, 'only dsr knows by the hash');
  const narrow = new TestPipeline(config({ top: 'device: { mtu: 576 }' }));
  const whole = icmpError({
    src: '10.1.0.1',
    dst: '10.96.0.10',
    type: 3,
    code: 1,
    quoted: tcp({ src: '10.96.0.10', sport: 80, dst: '10.1.0.2', dport: 1, flags: 'A', payload: 500 }),
  });
  t.match(narrow.send(whole), { reason: 'mtu-exceeded' }, 'and it has to fit');
  for (const pipeline of [ranged, narrow]) t.equal(pipeline.device.slotsHeld, 0);
});

t.test('a million packets of known flows allocate nothing that stays', async (t) => {
  const pipeline = new TestPipeline(config());
  for (const flags of ['S', 'A', 'A']) pipeline.send(tcp({ ...client, flags }));
  const { device } = pipeline;
  const sent = tcp({ ...client, flags: 'A', payload: 40 });
  device.transmit = () => {};
  const run = (batches: number): void => {
    const { rx, memory } = device;
    rx.count = 64;
    for (let b = 0; b < batches; b++) {
      for (let i = 0; i < 64; i++) {
        const at = i * memory.slotBytes + 128;
        rx.offset[i] = at;
        rx.slot[i] = i;
        rx.length[i] = sent.length;
        memory.bytes.fill(0, at - 10, at);
        memory.bytes.set(sent, at);
      }
      pipeline.pipeline.process(rx, pipeline.nowMs);
    }
  };
  run(2000);
  const before = process.memoryUsage().heapUsed;
  run(15_625);
  const grown = process.memoryUsage().heapUsed - before;
  t.equal(pipeline.stats[STAT_FORWARDED], 3 + 17_625 * 64);
  t.ok(grown < 2_000_000, `the heap grew by ${grown} bytes over 1,000,000 packets`);
});
