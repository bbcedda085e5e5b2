import t, { type Test } from 'tap';
import type { Config } from '../../../lib/config/config.js';
import { parseConfig } from '../../../lib/config/load.js';
import { explain } from '../../../lib/control/explain/explain.js';
import type { ExplainView, StepView } from '../../../lib/control/explain/explain-view.js';
import type { ExplainQuery } from '../../../lib/control/explain/request.js';
import { sceneOfFile } from '../../../lib/control/explain/scene.js';
import { fragment, icmpError, tcp, udp } from '../../fixtures/packets.js';
import { LiveGateway, type LiveOptions } from '../../support/live-gateway.js';

const B1 = '{ name: b1, address: 10.2.0.11, port: 8080 }';
const B2 = '{ name: b2, address: 10.2.0.12, port: 8080 }';
const FILE = { path: 'weir.yaml', version: 7 };

function configOf(text: string): Config {
  const { config, problems } = parseConfig(text);
  if (config === null) throw new Error(JSON.stringify(problems));
  return config;
}

function file(fields: string, backends = `${B1}, ${B2}`, more = ''): string {
  return `${more}\nservices: [{ name: web, address: 10.96.0.10, port: 80, ${fields}, backends: [${backends}] }]`;
}

function begin(text: string, options?: LiveOptions): LiveGateway {
  return new LiveGateway(configOf(text), options);
}

const SYN: ExplainQuery = { proto: 'tcp', src: '10.1.0.2:40000', dst: '10.96.0.10:80' };
const SYN_PACKET = { src: '10.1.0.2', sport: 40000, dst: '10.96.0.10', dport: 80, flags: 'S', seq: 1000 };

function ask(live: LiveGateway, query: ExplainQuery = SYN): Promise<ExplainView> {
  return explain(query, live.scene(), FILE);
}

function hex(bytes: Uint8Array): string {
  return Buffer.from(bytes).toString('hex');
}

/** `conntrack miss`, ... of the only outcome, or of the first. */
function path({ steps, outcomes }: ExplainView): string[] {
  return [...steps, ...outcomes[0]!.steps].map(({ step, result }) => `${step} ${result}`);
}

function stepOf({ steps, outcomes }: ExplainView, name: string): StepView {
  const found = [...steps, ...outcomes[0]!.steps].find(({ step }) => step === name);
  if (found === undefined) throw new Error(`no step ${name}`);
  return found;
}

/** To ESTABLISHED, by the client's ACK. */
function connect(live: LiveGateway): void {
  live.send(tcp(SYN_PACKET));
  const [flow] = live.flows();
  const [address, port] = flow!.backend.split(':');
  const back = { src: address!, sport: Number(port), dst: '10.1.0.2', dport: 40000 };
  live.send(tcp({ ...back, flags: 'SA', seq: 5000, ack: 1001 }));
  live.send(tcp({ ...SYN_PACKET, flags: 'A', seq: 1001, ack: 5001 }));
}

t.test('a new connection, step by step', async (t) => {
  const live = begin(file('protocol: tcp', `${B1}, { name: old, address: 10.2.0.13, port: 8080, weight: 0 }`));
  const view = await ask(live);
  t.strictSame(path(view), [
    'parse ok',
    'destination service',
    'conntrack miss',
    'source allowed',
    'selection maglev',
    'backends some',
    'reply-tuple free',
    'entry made',
    'rewrite rewritten',
  ]);
  t.match(view, {
    config: FILE,
    assumed: [],
    untried: 0,
    packet: { text: /^tcp .* > 10\.96\.0\.10:80 syn, 40 bytes$/ },
  });
  t.match(stepOf(view, 'selection').details, { size: 16381, slot: Number, hash: Number, backend: 'b1' });
  const { hash, slot } = stepOf(view, 'selection').details as { hash: number; slot: number };
  t.equal(slot, hash % 16381);
  t.match(stepOf(view, 'backends').notes, ['not old 10.2.0.13:8080: its weight is 0']);
  const { changes, before, after } = stepOf(view, 'rewrite').details as Record<string, never>;
  t.match(changes, [
    { field: 'destination', from: '10.96.0.10', to: '10.2.0.11' },
    { field: 'destination port', from: '80', to: '8080' },
    { field: 'header checksum' },
    { field: 'TCP checksum' },
  ]);
  t.equal(before, view.packet.bytes);
  t.match(view.outcomes, [
    {
      probability: 1,
      verdict: 'forward',
      reason: null,
      direction: 'original',
      service: 'web',
      backend: 'b1',
      state: 'SYN_SENT',
      entry: { client: '10.1.0.2:40000', backend: '10.2.0.11:8080' },
      out: [{ bytes: after, text: 'tcp 10.1.0.2:40000 > 10.2.0.11:8080 syn, 40 bytes' }],
    },
  ]);
  t.strictSame(live.flows(), [], 'nothing of it is so');
});

t.test('a client on the gateway itself gets no answer in mode dnat', async (t) => {
  const notesOf = async (local: string[], mode = ''): Promise<readonly string[]> => {
    const live = begin(file(`protocol: tcp${mode}`, B1, 'snat: { addresses: [10.96.255.1] }'));
    live.localAddresses.push(...local);
    return stepOf(await ask(live), 'destination').notes;
  };
  t.match(await notesOf(['10.1.0.2']), [/^10\.1\.0\.2 is an address of this host: .* ask from another host$/]);
  t.strictSame(await notesOf(['10.1.0.1']), []);
  t.strictSame(await notesOf(['10.1.0.2'], ', mode: snat'), []);
});

t.test('a backend without a name is its address, said once', async (t) => {
  const unnamed = (address: string): string => `{ address: ${address}, port: 8080, weight: WEIGHT }`;
  const backends = `${unnamed('10.2.0.11')}, ${unnamed('10.2.0.12')}`;
  const view = await ask(begin(file('protocol: tcp', backends.replace('WEIGHT', '1').replace('WEIGHT', '0'))));
  t.match(stepOf(view, 'entry').text, /, to web\/10\.2\.0\.11:8080, SYN_SENT, expires in 1m$/);
  t.match(stepOf(view, 'backends').notes, ['not 10.2.0.12:8080: its weight is 0']);
});

t.test('a packet of a connection has the numbers that are expected of it', async (t) => {
  const live = begin(file('protocol: tcp'));
  connect(live);
  for (const [flags, state] of [
    ['ack', 'ESTABLISHED'],
    ['rst', 'CLOSED'],
    ['FIN+ACK', 'ESTABLISHED'],
  ] as const) {
    const view = await ask(live, { ...SYN, flags });
    t.match(path(view).slice(2), ['conntrack hit', 'entry kept', 'rewrite rewritten'], flags);
    t.match(view.outcomes, [{ verdict: 'forward', state, direction: 'original' }]);
  }
  const fin = await ask(live, { ...SYN, flags: 'fin,ack' });
  t.match(fin.outcomes[0]!.entry, { flags: ['TxClosing', 'SeenNonSyn'], packets: { original: 3 } });
  const { backend } = live.flows()[0]!;
  const reply = await ask(live, { proto: 'tcp', src: backend, dst: '10.1.0.2:40000', flags: 'rst' });
  t.match(stepOf(reply, 'conntrack'), { result: 'hit', details: { direction: 'reply' } });
  t.match(reply.outcomes, [{ direction: 'reply', state: 'CLOSED', out: [{ text: /^tcp 10\.96\.0\.10:80 > / }] }]);

  live.send(tcp({ ...SYN_PACKET, flags: 'R', seq: 1001 }));
  t.match(path(await ask(live)), ['parse ok', 'destination service', 'conntrack replaced', 'source allowed']);
  live.nowMs += 10_000;
  t.match(stepOf(await ask(live), 'conntrack').result, 'expired');
});

t.test('lots: each end with its chance, and a chain', async (t) => {
  const weights = `${B1}, { name: b2, address: 10.2.0.12, port: 8080, weight: 3 }, { name: me, address: 10.1.0.2, port: 80 }`;
  const live = begin(file('protocol: tcp, algorithm: random', weights));
  const view = await ask(live);
  t.strictSame(stepOf(view, 'selection').notes, [
    'me 1/5, 20 % of all',
    'b1 1/4 of what is left, 20 % of all',
    'b2 the rest, 60 % of all',
  ]);
  t.match(view.outcomes, [
    { probability: 0.2, verdict: 'drop', reason: 'hairpin-refused', meaning: /the client itself/ },
    { probability: 0.2, verdict: 'forward', backend: 'b1' },
    { probability: 0.6, verdict: 'forward', backend: 'b2' },
  ]);
  const many = Array.from({ length: 40 }, (_, i) => `{ name: m${i}, address: 10.2.1.${i + 1}, port: 80 }`);
  const long = await ask(begin(file('protocol: tcp, algorithm: random', many.join(', '))));
  t.strictSame([long.outcomes.length, long.untried], [32, 8]);
  t.strictSame(stepOf(long, 'selection').notes.at(-1), 'and 20 more');

  const sticky = begin(file('protocol: tcp, algorithm: random, affinity: { clientIp: 1h }'));
  t.equal(stepOf(await ask(sticky), 'affinity').result, 'none');
  const { backend } = sticky.send(tcp(SYN_PACKET));
  const again = await ask(sticky, { ...SYN, src: '10.1.0.2:40001' });
  t.match(stepOf(again, 'affinity'), { result: 'remembered', details: { backend, seconds: 3600 } });
  t.match(again.outcomes, [{ probability: 1, backend }], 'no lot is drawn');
  const lost = await ask(sticky, { ...SYN, src: '10.1.0.2:40001', without: [`web/${backend}`] });
  t.equal(stepOf(lost, 'affinity').result, 'lost');
  t.match(lost, {
    assumed: [`web/${backend} is not in the file`],
    outcomes: [{ backend: backend === 'b1' ? 'b2' : 'b1' }],
  });
});

t.test('source ports', async (t) => {
  const pool = 'snat: { addresses: [10.96.255.1], ports: 40000-40001 }';
  const live = begin(file('protocol: tcp, mode: snat', B1, pool));
  const kept = await ask(live);
  t.match(stepOf(kept, 'source-port'), {
    result: 'kept',
    details: { source: '10.96.255.1:40000', tries: 1, taken: 0 },
  });
  t.match(kept.outcomes[0]!.entry, { snat: '10.96.255.1:40000' });
  live.send(tcp(SYN_PACKET));
  const drawn = await ask(live, { ...SYN, src: '10.1.0.3:40000' });
  t.match(stepOf(drawn, 'source-port'), { result: 'drawn', details: { source: '10.96.255.1:40001' } });
  t.ok(drawn.outcomes[0]!.portDrawn);
  live.send(tcp({ ...SYN_PACKET, src: '10.1.0.3' }));
  const none = await ask(live, { ...SYN, src: '10.1.0.4:40000' });
  t.match(stepOf(none, 'source-port'), { result: 'none', details: { tries: 34, taken: 34 } });
  t.match(none.outcomes, [{ verdict: 'drop', reason: 'no-snat-port', entry: null, out: [] }]);
});

t.test('a reply tuple that is another’s', async (t) => {
  const two = `services:
    - { name: one, address: 10.96.0.10, port: 80, protocol: tcp, backends: [${B1}] }
    - { name: two, address: 10.96.0.11, port: 80, protocol: tcp, backends: [${B1}] }`;
  const live = begin(two);
  connect(live);
  const view = await ask(live, { ...SYN, dst: '10.96.0.11:80' });
  t.match(stepOf(view, 'reply-tuple'), { result: 'taken', text: /would be those of tcp .* to one\/b1 .*ESTABLISHED/ });
  t.match(view.outcomes, [{ verdict: 'drop', reason: 'reply-tuple-clash' }]);
  live.send(tcp({ ...SYN_PACKET, flags: 'R', seq: 1001 }));
  const after = await ask(live, { ...SYN, dst: '10.96.0.11:80' });
  t.equal(stepOf(after, 'reply-tuple').result, 'replaced', 'a closing connection gives way');
  t.match(after.outcomes, [{ verdict: 'forward', service: 'two' }]);
});

t.test('tunnels: what is put before the packet, and what does not fit', async (t) => {
  const live = begin(file('protocol: tcp, mode: dsr', B1, 'tunnel: { address: 192.0.2.1 }'));
  const view = await ask(live, { ...SYN, flags: 'ack' });
  t.strictSame(path(view).slice(4), [
    'mid-stream taken-up',
    'selection maglev',
    'backends some',
    'tunnel fits',
    'entry made',
    'rewrite rewritten',
    'encapsulation geneve',
  ]);
  const { outer, tunnel } = stepOf(view, 'encapsulation').details as { outer: string; tunnel: string };
  const inner = stepOf(view, 'rewrite').details.after as string;
  t.equal(outer + tunnel + inner, view.outcomes[0]!.out[0]!.bytes);
  t.equal(outer.length, 56);

  const big = tcp({ ...SYN_PACKET, flags: 'A', payload: 1300 });
  t.equal(stepOf(await ask(live, { packet: hex(big) }), 'tunnel').result, 'fits');
  connectOneWay(live);
  const quoted = live.send(tcp({ ...SYN_PACKET, flags: 'A', payload: 1200 })).out[0]!;
  live.send(icmpError({ src: '10.2.0.99', dst: '192.0.2.1', type: 3, code: 4, mtu: 1000, quoted, quoteBytes: 28 }));
  const narrow = await ask(live, { packet: hex(big) });
  t.match(stepOf(narrow, 'tunnel'), { result: 'too-big', details: { node: '10.2.0.11', mtu: 1000, room: 938 } });
  t.match(narrow.outcomes, [{ verdict: 'reply', reason: 'frag-needed' }]);
});

function connectOneWay(live: LiveGateway): void {
  live.send(tcp(SYN_PACKET));
  live.send(tcp({ ...SYN_PACKET, flags: 'A', seq: 1001 }));
}

t.test('what is refused or answered, and where it ends', async (t) => {
  const ranges = begin(file('protocol: tcp, algorithm: random, sourceRanges: [10.1.0.0/24]'));
  for (const [query, steps, reason] of [
    [{ ...SYN, src: '10.9.0.1:1' }, ['source refused'], 'not-in-source-range'],
    [{ ...SYN, flags: 'ack' }, ['source allowed', 'mid-stream refused', 'answer given'], 'rst-mid-stream'],
    [{ ...SYN, flags: 'rst' }, ['source allowed', 'mid-stream refused'], 'unknown-flow'],
  ] as const) {
    const view = await ask(ranges, query);
    t.strictSame(path(view).slice(3), steps, reason);
    t.match(view.outcomes, [{ reason, meaning: /./, service: 'web', backend: null }]);
  }
  const live = begin(file('protocol: tcp', ''));
  const empty = await ask(live);
  t.match(stepOf(empty, 'backends').result, 'none');
  t.match(empty.outcomes, [{ verdict: 'reply', reason: 'rst-no-backend' }]);
  for (let i = 0; i < 50; i++) live.send(tcp({ ...SYN_PACKET, dport: 81 }));
  const limited = await ask(live, { ...SYN, dst: '10.96.0.10:81' });
  t.match(stepOf(limited, 'destination'), { result: 'vip', details: { services: ['web'] } });
  t.match(stepOf(limited, 'answer'), { result: 'refused', details: { all: 50, source: 50 } });
  t.match(limited.outcomes, [{ verdict: 'drop', reason: 'rate-limited' }]);
  const echo = await ask(live, { proto: 'icmp', src: '10.1.0.9', dst: '10.96.0.10' });
  t.match(path(echo).slice(1), ['destination vip', 'icmp echo', 'answer given']);
  t.match(echo.outcomes, [{ reason: 'echo', out: [{ text: 'icmp 10.96.0.10 > 10.1.0.9 type 0 code 0, 28 bytes' }] }]);
  const other = await ask(live, { proto: 'udp', src: '10.2.0.11:53', dst: '10.1.0.2:9' });
  t.match(other.outcomes, [{ verdict: 'pass', reason: 'not-tracked' }]);

  const full = begin(file('protocol: tcp, algorithm: random'), { tcpEntries: 1 });
  connect(full);
  const crowded = await ask(full, { ...SYN, src: '10.1.0.3:40000' });
  t.match(crowded.outcomes[0], {
    verdict: 'drop',
    reason: 'table-full',
    steps: [{}, { step: 'entry', result: 'full' }],
  });
});

t.test('limits: who is passed over, and who is refused', async (t) => {
  const max = (n: number, limit: number): string =>
    `{ name: b${n}, address: 10.2.0.${10 + n}, port: 8080, maxConnections: ${limit} }`;
  const random = begin(file('protocol: tcp, algorithm: random', `${max(1, 1)}, ${max(2, 9)}, ${max(3, 9)}`));
  t.match(stepOf(await ask(random), 'limits'), { result: 'room', notes: ['0 of 1 of b1 are open', /b2/, /b3/] });
  for (let port = 1; !random.flows().some(({ backend }) => backend === '10.2.0.11:8080'); port++) {
    random.send(tcp({ ...SYN_PACKET, src: '10.1.9.9', sport: port }));
  }
  const passed = await ask(random);
  t.match(stepOf(passed, 'limits'), { result: 'passed-over', details: { full: ['b1'] } });
  t.match(stepOf(passed, 'backends').notes, ['not b1 10.2.0.11:8080: it has as many connections as it may']);
  t.strictSame(
    passed.outcomes.map(({ backend, probability }) => [backend, probability.toFixed(6)]),
    [
      ['b2', '0.500000'],
      ['b3', '0.500000'],
    ],
  );

  const maglev = begin(
    file('protocol: tcp, maxConnections: 3, newConnectionsPerSecond: 2', `${max(1, 1)}, ${max(2, 1)}`),
  );
  const first = await ask(maglev);
  t.match(stepOf(first, 'limits').notes.at(-1), 'the client may open 2 more at once, of 2 a second');
  maglev.send(tcp(SYN_PACKET));
  const { backend } = first.outcomes[0]!;
  const source = async (wanted: string): Promise<ExplainQuery> => {
    for (let port = 41_000; ; port++) {
      const query = { ...SYN, src: `10.1.0.2:${port}` };
      if (stepOf(await ask(maglev, query), 'selection').details.backend === wanted) return query;
    }
  };
  const other = await ask(maglev, await source(backend!));
  t.match(stepOf(other, 'limits'), {
    result: 'passed-over',
    notes: { 3: 'the client may open 1 more at once, of 2 a second' },
  });
  t.notOk(other.outcomes[0]!.backend === backend, 'another slot of its way leads to the other');
  maglev.send(tcp({ ...SYN_PACKET, sport: Number((await source(backend!)).src!.split(':')[1]) }));
  t.match((await ask(maglev, { ...SYN, src: '10.1.0.2:42000' })).outcomes, [
    { verdict: 'drop', reason: 'client-rate' },
  ]);
  const full = await ask(maglev, { ...SYN, src: '10.1.0.3:42000' });
  t.match(stepOf(full, 'limits'), { result: 'full' });
  t.match(full.outcomes, [{ verdict: 'reply', reason: 'rst-connection-limit' }]);
  maglev.nowMs += 60_000;
  t.match((await ask(maglev)).outcomes, [{ verdict: 'forward' }], 'what has expired does not count');
  t.match(
    (await ask(maglev, { ...SYN, src: '10.1.0.3:42000', flags: 'ack' })).steps.some(({ step }) => step === 'limits'),
    false,
  );

  const lots = begin(file('protocol: tcp, algorithm: random, maxConnections: 1'));
  lots.send(tcp(SYN_PACKET));
  const refused = await ask(lots, { ...SYN, src: '10.1.0.3:1' });
  t.match(refused.outcomes, [{ probability: 1, reason: 'rst-connection-limit' }], 'whatever the lot, it is one end');
});

t.test('packets byte by byte: malformed ones, fragments, errors', async (t) => {
  const live = begin(file('protocol: udp', B1));
  const whole = udp({ src: '10.1.0.2', sport: 40000, dst: '10.96.0.10', dport: 80, id: 9, payload: 100 });
  const cut = await ask(live, { packet: hex(whole.subarray(0, 60)) });
  t.match(stepOf(cut, 'parse'), { result: 'refused', details: { fault: 'it says that it has 128 bytes, and has 60' } });
  t.match(cut.outcomes, [{ verdict: 'drop', reason: 'malformed' }]);
  const [first, second] = fragment(whole, 64);
  const early = await ask(live, { packet: hex(second!) });
  t.match(path(early), ['parse ok', 'destination vip', 'fragment unknown']);
  t.match(early.outcomes, [{ verdict: 'hold', reason: null }]);
  live.send(second!);
  const leading = await ask(live, { packet: hex(first!) });
  t.equal(leading.outcomes[0]!.out.length, 2, 'the one that waits goes along');
  live.send(first!);
  const following = await ask(live, { packet: hex(second!) });
  t.match(stepOf(following, 'fragment'), { result: 'follows', details: { verdict: 'forward' } });
  t.match(following.outcomes, [{ verdict: 'forward', backend: 'b1', out: [{ text: /fragment at 64/ }] }]);

  const quoted = udp({ src: '10.1.0.2', sport: 40000, dst: '10.2.0.11', dport: 8080, payload: 10 });
  const error = icmpError({ src: '10.2.0.11', dst: '10.1.0.2', type: 3, code: 3, quoted });
  const view = await ask(live, { packet: ` ${hex(error).replace(/../g, '$& ')}\n` });
  t.match(path(view), ['parse ok', 'destination other', 'icmp error', 'conntrack hit']);
  t.match(stepOf(view, 'icmp').text, 'quotes udp 10.1.0.2:40000 > 10.2.0.11:8080');
  t.match(view.outcomes, [
    { direction: 'reply', out: [{ text: 'icmp 10.96.0.10 > 10.1.0.2 type 3 code 3, 66 bytes' }] },
  ]);
});

t.test('as if a check failed', async (t) => {
  const live = begin(file('protocol: tcp'));
  const view = await ask(live, { ...SYN, assumeDown: ['web/b1'] });
  t.match(view, { assumed: ['the check of web/b1 fails'], outcomes: [{ backend: 'b2' }] });
  t.match(stepOf(view, 'backends').notes, ['not b1 10.2.0.11:8080: it is assumed to be down']);
  const none = await ask(live, { ...SYN, assumeDown: ['web/b1', 'web/10.2.0.12'] });
  t.match(none.outcomes, [{ reason: 'rst-no-backend' }]);
  const checked = begin(file('protocol: tcp, health: { type: tcp }'));
  const all = await ask(checked, { ...SYN, assumeDown: ['web/b1', 'web/b2'] });
  t.match(stepOf(all, 'backends').notes, [/^b1 .*assumed to be down; it is used, since all are$/, /^b2 /]);
  checked.setHealth('web', 'b1', false);
  t.match(stepOf(await ask(checked), 'backends').notes, [/^not b1 .*: it is down: its check fails$/]);

  const reset = begin(file('protocol: tcp, onRemove: reset', B1));
  connect(reset);
  const gone = await ask(reset, { ...SYN, flags: 'ack', without: ['web/b1'] });
  t.equal(stepOf(gone, 'conntrack').result, 'cut');
  t.match(gone.outcomes, [
    { verdict: 'reply', reason: 'rst-mid-stream', entry: null, out: [{ text: / rst,ack, / }, {}] },
  ]);
  t.match(reset.flows(), [{ state: 'ESTABLISHED' }]);
});

t.test('what makes no sense is said', async (t: Test) => {
  const live = begin(file('protocol: tcp'));
  for (const [query, message] of [
    [{}, /nothing says which packet/],
    [{ ...SYN, dst: undefined }, /nothing says which packet/],
    [{ ...SYN, proto: 'sctp' }, /no protocol is called "sctp"/],
    [{ ...SYN, src: '10.1.0.2' }, /"10.1.0.2" is no ADDRESS:PORT/],
    [{ ...SYN, src: '10.1.0.02:1' }, /is no ADDRESS:PORT/],
    [{ ...SYN, src: '10.1.0.2:65536' }, /is no ADDRESS:PORT/],
    [{ ...SYN, proto: 'icmp' }, /is no ADDRESS/],
    [{ ...SYN, flags: 'syn,ak' }, /no TCP flag is called "ak"/],
    [{ ...SYN, proto: 'udp', flags: 'syn' }, /udp has no flags/],
    [{ ...SYN, packet: '45' }, /says everything itself/],
    [{ packet: '450' }, /not in hexadecimal/],
    [{ packet: '00'.repeat(7001) }, /more than 7000 bytes/],
    [{ ...SYN, without: ['b1'] }, /"b1" names no backend/],
    [{ ...SYN, without: ['wob/b1'] }, /no service is called "wob"/],
    [{ ...SYN, assumeDown: ['web/b9'] }, /web has no backend "b9"/],
  ] as const) {
    await t.rejects(ask(live, query as ExplainQuery), { code: 'USAGE', message }, JSON.stringify(query).slice(0, 80));
  }
  const node = sceneOfFile(configOf('role: node\ntunnel: { address: 192.0.2.1 }'));
  await t.rejects(explain(SYN, node, FILE), { code: 'NOT_SUPPORTED', message: /a node decides nothing/ });
  const offline = await explain(SYN, sceneOfFile(configOf(file('protocol: tcp'))), { path: 'x', version: null });
  t.match(offline.outcomes, [{ verdict: 'forward', service: 'web' }], 'by a file alone');
});
