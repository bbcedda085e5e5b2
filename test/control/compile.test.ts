import t from 'tap';
import { lookup } from '../../lib/balance/lookup.js';
import { maglevTable } from '../../lib/balance/maglev.js';
import { contains } from '../../lib/balance/ranges.js';
import { keyFromString } from '../../lib/base/hash.js';
import type { Config } from '../../lib/config/config.js';
import { parseConfig } from '../../lib/config/load.js';
import { TIMEOUT_ANY, TIMEOUT_SERVICE_TCP_GRACE, TIMEOUT_TCP, TIMEOUT_TCP_FIN } from '../../lib/conntrack/record.js';
import { type Compiled, compile } from '../../lib/control/compile.js';
import { Identities } from '../../lib/control/identity.js';
import * as S from '../../lib/datapath/snapshot.js';
import { parseIpv4 } from '../../lib/wire/address.js';

const TCP = 6;
const UDP = 17;

/** What a control process does: one set of identities, one snapshot after the other. */
class Control {
  readonly identities = new Identities();
  readonly down = new Set<number>();
  readonly drained = new Set<number>();
  compiled: Compiled | undefined;

  load(text: string, nowMs = 0): S.Snapshot {
    return this.use(configOf(text), nowMs);
  }

  use(config: Config, nowMs = 0): S.Snapshot {
    const previous = this.compiled === undefined ? {} : { previous: this.compiled };
    this.compiled = compile(config, this.identities, {
      isUp: (id) => !this.down.has(id),
      isDrained: (id) => this.drained.has(id),
      nowMs,
      ...previous,
    });
    this.identities.rename(config.services);
    return this.compiled.snapshot;
  }

  get snapshot(): S.Snapshot {
    return this.compiled!.snapshot;
  }

  serviceId(vip: string, port = 80, protocol = TCP): number {
    return lookup(this.snapshot.serviceIndex, parseIpv4(vip), port, protocol);
  }

  serviceWord(id: number, word: number): number {
    return this.snapshot.services[id * S.SERVICE_WORDS + word]!;
  }

  backendWord(id: number, word: number): number {
    return this.snapshot.backends[id * S.BACKEND_WORDS + word]!;
  }

  /** `[address, weight]` of the choices of a service, in order. */
  choices(id: number): [string, number][] {
    const { choices } = this.snapshot;
    const at = this.serviceWord(id, S.CHOICES_AT);
    let before = 0;
    return Array.from({ length: this.serviceWord(id, S.CHOICES_COUNT) }, (_, i) => {
      const cumulative = choices[(at + i) * 2 + 1]!;
      const weight = cumulative - before;
      before = cumulative;
      return [this.identities.backendName(choices[(at + i) * 2]!)!, weight];
    });
  }

  /** Ids of the backends that are or were configured, by name. */
  backendId(name: string): number {
    for (let id = 1; id < this.identities.backendRows; id++) if (this.identities.backendName(id) === name) return id;
    throw new Error(`no backend ${name}`);
  }

  table(id: number): Uint16Array {
    const at = this.serviceWord(id, S.MAGLEV_AT);
    return this.snapshot.maglev.slice(at, at + this.serviceWord(id, S.MAGLEV_SIZE));
  }
}

function configOf(text: string): Config {
  const { config, problems } = parseConfig(text);
  if (config === null) throw new Error(JSON.stringify(problems));
  return config;
}

/** One service `web` on 10.96.0.1:80 of the backends named, whose addresses are 10.2.0.<number in the name>. */
function web(backends: string, extra = ''): string {
  const list = backends.split(' ').filter((name) => name !== '');
  const members = list.map((name) => `{ name: ${name}, address: 10.2.0.${name.slice(1)}, port: 8080 }`);
  return `services:\n- { name: web, address: 10.96.0.1, port: 80, ${extra} backends: [${members.join(', ')}] }\n`;
}

t.test('every field of a snapshot', async (t) => {
  const control = new Control();
  const snapshot = control.load(`
seed: abc
maglev: { tableSize: 251 }
network: { untracked: drop }
conntrack: { recovery: 30s, timeouts: { tcp: 100s, tcpFin: 5s } }
snat: { addresses: [10.255.0.2, 10.255.0.1], ports: 40000-40099 }
tunnel: { address: 192.0.2.1 }
services:
- name: web
  address: 10.96.0.1
  port: 80
  affinity: { clientIp: 1500ms }
  sourceRanges: [10.1.0.0/16, 10.0.0.0/16, 192.168.0.0/24]
  maxConnections: 1000
  newConnectionsPerSecond: 20
  noBackend: drop
  onRemove: reset
  icmpEcho: false
  backends:
  - { name: b2, address: 200.0.0.2, port: 8080, weight: 3 }
  - { name: b1, address: 10.2.0.1, port: 8081, maxConnections: 50 }
  - { name: b0, address: 10.2.0.1, port: 8080, weight: 2 }
  - { name: off, address: 10.2.0.9, port: 8080, weight: 0 }
- { name: dns, address: 10.96.0.1, port: 53, protocol: udp, algorithm: random, mode: snat, backends: [{ name: d, address: 10.2.0.1, port: 53, weight: 65535 }] }
- { name: video, address: 10.96.0.2, port: 443, mode: dsr, backends: [{ name: v, address: 10.3.0.1, port: 443, node: 10.9.0.1 }] }
- { name: none, address: 10.96.0.3, port: 1, icmpEcho: false, backends: [] }
`);
  t.equal(snapshot.version, 1);
  const webId = control.serviceId('10.96.0.1');
  const dnsId = control.serviceId('10.96.0.1', 53, UDP);
  const videoId = control.serviceId('10.96.0.2', 443);
  const noneId = control.serviceId('10.96.0.3', 1);
  t.same([webId, dnsId, videoId, noneId], [1, 2, 3, 4], 'row 0 is never used');
  t.equal(control.serviceId('10.96.0.1', 53, TCP), 0);
  t.same(
    ['web', 'dns', 'video', 'none'],
    [1, 2, 3, 4].map((id) => control.identities.serviceName(id)),
  );

  t.equal(control.serviceWord(webId, S.SERVICE_VIP), parseIpv4('10.96.0.1'));
  t.equal(control.serviceWord(webId, S.SERVICE_PORT), 80);
  t.equal(control.serviceWord(dnsId, S.SERVICE_PROTOCOL), UDP);
  t.same(
    [webId, dnsId, videoId].map((id) => control.serviceWord(id, S.SERVICE_MODE)),
    [S.MODE_DNAT, S.MODE_SNAT, S.MODE_DSR],
  );
  t.equal(control.serviceWord(webId, S.SERVICE_FLAGS), S.NO_BACKEND_DROP | S.SERVICE_MAGLEV | S.SERVICE_LIMITED);
  t.same(
    [webId, dnsId].map((id) =>
      [S.SERVICE_CONNECTIONS, S.CLIENT_CONNECTIONS].map((word) => control.serviceWord(id, word)),
    ),
    [
      [1000, 20],
      [0, 0],
    ],
  );
  t.same(
    ['b0', 'b1'].map((name) => control.backendWord(control.backendId(name), S.BACKEND_CONNECTIONS)),
    [0, 50],
  );
  t.equal(control.serviceWord(dnsId, S.SERVICE_FLAGS), 0);
  t.equal(control.serviceWord(webId, S.AFFINITY_SECONDS), 2, 'part of a second counts as one');
  t.equal(control.serviceWord(dnsId, S.AFFINITY_SECONDS), 0);

  t.same(
    control.choices(webId),
    [
      ['b0', 2],
      ['b1', 1],
      ['b2', 3],
    ],
    'by unsigned address, then port; none of weight 0',
  );
  t.equal(control.serviceWord(webId, S.CHOICES_WEIGHT), 6);
  t.same(control.choices(dnsId), [['d', 65535]]);
  t.same(control.choices(noneId), []);
  t.equal(control.serviceWord(webId, S.MAGLEV_SIZE), 251);
  t.equal(control.serviceWord(dnsId, S.MAGLEV_SIZE), 0, 'random');
  t.equal(control.serviceWord(noneId, S.MAGLEV_SIZE), 0, 'nothing to choose from');
  const expected = maglevTable(
    [
      { address: parseIpv4('10.2.0.1'), port: 8080, weight: 2 },
      { address: parseIpv4('10.2.0.1'), port: 8081, weight: 1 },
      { address: parseIpv4('200.0.0.2'), port: 8080, weight: 3 },
    ],
    TCP,
    251,
    keyFromString('abc'),
  );
  t.same(control.table(webId), expected);

  const ranges = (id: number, client: string) =>
    contains(snapshot.ranges, control.serviceWord(id, S.RANGES_AT), parseIpv4(client));
  t.equal(control.serviceWord(dnsId, S.RANGES_COUNT), 0);
  t.same(
    ['10.0.0.1', '10.1.255.255', '192.168.0.7', '10.2.0.0', '9.255.255.255'].map((client) => ranges(webId, client)),
    [true, true, true, false, false],
  );

  const b2 = control.backendId('b2');
  const v = control.backendId('v');
  t.equal(control.backendWord(b2, S.BACKEND_ADDRESS), parseIpv4('200.0.0.2') | 0);
  t.equal(control.backendWord(b2, S.BACKEND_PORT), 8080);
  t.equal(control.backendWord(b2, S.BACKEND_SERVICE), webId);
  t.equal(control.backendWord(b2, S.BACKEND_NODE), parseIpv4('200.0.0.2') | 0);
  t.equal(control.backendWord(v, S.BACKEND_NODE), parseIpv4('10.9.0.1'));
  t.same(
    ['b2', 'off', 'd'].map((name) => control.backendWord(control.backendId(name), S.BACKEND_FLAGS)),
    [S.TAKES_NEW, 0, S.TAKES_NEW],
  );
  t.equal(snapshot.cutAt[b2], Number.POSITIVE_INFINITY);
  t.same(snapshot.tunnel, {
    address: parseIpv4('192.0.2.1') | 0,
    port: 6081,
    vni: 2,
    inner: 0x6558,
    isOptionAlways: true,
    mtu: 1500,
  });
  const node = (text: string) => lookup(control.snapshot.nodeIndex, parseIpv4(text), 0, 0);
  t.same(['10.9.0.1', '10.3.0.1', '200.0.0.2'].map(node), [1, 0, 0], 'of dsr services alone');

  const vip = (text: string) => lookup(snapshot.vipIndex, parseIpv4(text), 0, 0);
  t.same(['10.96.0.1', '10.96.0.2', '10.96.0.3', '10.96.0.4'].map(vip), [
    S.VIP_KNOWN | S.VIP_ECHO,
    S.VIP_KNOWN | S.VIP_ECHO,
    S.VIP_KNOWN,
    0,
  ]);
  t.equal(lookup(snapshot.snatIndex, parseIpv4('10.255.0.1'), 0, 0), 1);
  t.equal(lookup(snapshot.snatIndex, parseIpv4('10.96.0.1'), 0, 0), 0);
  t.same([...snapshot.snatAddresses], [parseIpv4('10.255.0.2'), parseIpv4('10.255.0.1')], 'in the order of the file');
  t.same([snapshot.snatFirstPort, snapshot.snatLastPort], [40_000, 40_099]);
  t.same(
    [TIMEOUT_TCP, TIMEOUT_TCP_FIN, TIMEOUT_ANY, TIMEOUT_SERVICE_TCP_GRACE].map((row) => snapshot.timeouts[row]),
    [100_000, 5000, 60_000, 60_000],
  );
  t.same({ k0: snapshot.hashKey0, k1: snapshot.hashKey1 }, keyFromString('abc'));
  t.equal(snapshot.dropUntracked, true);
  t.equal(snapshot.recoveryMs, 30_000);

  for (const [name, value] of Object.entries(snapshot)) {
    if (ArrayBuffer.isView(value)) t.ok(value.buffer instanceof SharedArrayBuffer, `${name} is shared`);
  }
});

t.test('the endpoint index names the one maglev service in mode dnat that has a backend', async (t) => {
  const control = new Control();
  const member = (n: number) => `{ address: 10.2.0.${n}, port: 80 }`;
  const snapshot = control.load(`
snat: { addresses: [10.255.0.1] }
services:
- { name: a, address: 10.96.0.1, port: 1, backends: [${member(1)}, ${member(2)}] }
- { name: b, address: 10.96.0.2, port: 1, backends: [${member(2)}] }
- { name: c, address: 10.96.0.3, port: 1, algorithm: random, backends: [${member(1)}, ${member(3)}] }
- { name: d, address: 10.96.0.4, port: 1, mode: snat, backends: [${member(4)}] }
- { name: e, address: 10.96.0.5, port: 1, protocol: udp, backends: [${member(2)}] }
`);
  const at = (n: number, protocol = TCP) => lookup(snapshot.endpointIndex, parseIpv4(`10.2.0.${n}`), 80, protocol);
  t.equal(at(1), control.serviceId('10.96.0.1', 1), 'a random service does not matter');
  t.equal(at(2), -1, 'two of them');
  t.equal(at(3), -1, 'none');
  t.equal(at(4), -1, 'none in mode dnat');
  t.equal(at(5), 0, 'no backend');
  t.equal(at(2, UDP), control.serviceId('10.96.0.5', 1, UDP));
});

t.test('ids are of identities: neither order, name, weight, algorithm nor mode changes them', async (t) => {
  const control = new Control();
  control.load(web('b1 b2 b3'));
  const ids = ['b1', 'b2', 'b3'].map((name) => control.backendId(name));
  const table = control.table(1);
  control.load(`
services:
- { name: new, address: 10.96.0.9, port: 80, backends: [{ name: n1, address: 10.2.0.1, port: 8080 }] }
- { name: renamed, address: 10.96.0.1, port: 80, algorithm: random, backends: [
    { name: x3, address: 10.2.0.3, port: 8080, weight: 9 }, { name: x1, address: 10.2.0.1, port: 8080 }, { name: x2, address: 10.2.0.2, port: 8080 }] }
`);
  t.same(
    ['x1', 'x2', 'x3'].map((name) => control.backendId(name)),
    ids,
  );
  t.equal(control.serviceId('10.96.0.1'), 1);
  t.equal(control.identities.serviceName(1), 'renamed');
  t.notOk(ids.includes(control.backendId('n1')), 'the same endpoint in another service is another backend');
  control.load(web('b3 b1 b2'));
  t.same(control.table(1), table, 'nor does order change a table');
  t.equal(control.snapshot.version, 3);
});

t.test('removal: rows stay, the deadline is the first one, adding again ends it', async (t) => {
  const control = new Control();
  control.load(web('b1 b2', 'drainTimeout: 60s,'), 1000);
  const b2 = control.backendId('b2');
  control.load(web('b1', 'drainTimeout: 60s,'), 5000);
  t.equal(control.snapshot.cutAt[b2], 65_000);
  t.equal(control.backendWord(b2, S.BACKEND_FLAGS), 0);
  t.equal(control.backendWord(b2, S.BACKEND_ADDRESS), parseIpv4('10.2.0.2'), 'its flows still find it');
  t.same(control.choices(1), [['b1', 1]]);
  t.equal(lookup(control.snapshot.endpointIndex, parseIpv4('10.2.0.2'), 8080, TCP), 0);
  control.load(web('b1 b3', 'drainTimeout: 10s,'), 20_000);
  t.equal(control.snapshot.cutAt[b2], 65_000, 'a later reload does not move it');
  control.load(web('b1 b2', 'drainTimeout: 10s,'), 30_000);
  t.equal(control.backendId('b2'), b2);
  t.equal(control.snapshot.cutAt[b2], Number.POSITIVE_INFINITY);
  t.equal(control.backendWord(b2, S.BACKEND_FLAGS), S.TAKES_NEW);
  t.equal(control.snapshot.cutAt[control.backendId('b3')], 40_000);
  control.load(web('b1', 'drainTimeout: 7s,'), 50_000);
  t.equal(
    control.snapshot.cutAt[b2],
    57_000,
    'a second removal counts anew, by the drain time of the file that removes',
  );
});

t.test('a removed service keeps its row and its flows; its VIP is no longer weir’s', async (t) => {
  const control = new Control();
  control.load(
    `${web('b1 b2', 'noBackend: drop, drainTimeout: 30s,')}- { name: other, address: 10.96.0.2, port: 80, backends: [] }\n`,
  );
  control.load('services: [{ name: other, address: 10.96.0.2, port: 80, backends: [] }]', 1000);
  t.equal(control.serviceId('10.96.0.1'), 0);
  t.equal(lookup(control.snapshot.vipIndex, parseIpv4('10.96.0.1'), 0, 0), 0);
  t.equal(control.serviceWord(1, S.SERVICE_FLAGS), S.SERVICE_REMOVED | S.NO_BACKEND_DROP | S.SERVICE_MAGLEV);
  t.equal(control.serviceWord(1, S.SERVICE_VIP), parseIpv4('10.96.0.1'));
  t.equal(control.serviceWord(1, S.CHOICES_COUNT), 0);
  t.equal(control.serviceWord(1, S.MAGLEV_SIZE), 0);
  t.same([control.snapshot.cutAt[1], control.snapshot.cutAt[2]], [31_000, 31_000]);
  t.same(
    [control.identities.serviceName(1), control.identities.backendName(2)],
    ['web', 'b2'],
    'lists still know them',
  );
  control.load('{}', 9000);
  t.equal(control.snapshot.cutAt[1], 31_000);
  control.load(web('b1'), 10_000);
  t.equal(control.serviceId('10.96.0.1'), 1);
  t.equal(control.serviceWord(1, S.SERVICE_FLAGS), S.SERVICE_MAGLEV);
  t.same(
    [control.snapshot.cutAt[1], control.snapshot.cutAt[2]],
    [Number.POSITIVE_INFINITY, 31_000],
    'b2 did not come back',
  );
});

t.test('health and weight 0 take a backend out of the choices, without a deadline', async (t) => {
  const control = new Control();
  control.load(web('b1 b2 b3'));
  const b2 = control.backendId('b2');
  control.down.add(b2);
  control.load(web('b1 b2 b3'));
  t.same(
    control.choices(1).map(([name]) => name),
    ['b1', 'b3'],
  );
  t.equal(control.backendWord(b2, S.BACKEND_FLAGS), 0);
  t.equal(control.snapshot.cutAt[b2], Number.POSITIVE_INFINITY);
  control.down.add(control.backendId('b1')).add(control.backendId('b3'));
  control.load(web('b1 b2 b3'));
  t.equal(control.serviceWord(1, S.CHOICES_COUNT), 0);
  t.equal(control.serviceWord(1, S.MAGLEV_SIZE), 0);
});

t.test('all down: use-all gives flows to all with a weight that no command drains, reject to none', async (t) => {
  const control = new Control();
  const names = () => control.choices(1).map(([name]) => name);
  for (const [extra, whenAllDown] of [
    ['', []],
    ['allDown: use-all,', ['b1', 'b2']],
    ['health: { type: tcp },', ['b1', 'b2']],
    ['health: { type: tcp }, allDown: reject,', []],
  ] as const) {
    const text = web('b1 b2 b3', extra).replace('{ name: b3,', '{ name: b3, weight: 0,');
    control.down.clear();
    control.load(text);
    t.same(names(), ['b1', 'b2'], 'weight 0 never takes any');
    control.down.add(control.backendId('b1'));
    control.load(text);
    t.same(names(), ['b2'], 'one that is up takes all');
    control.down.add(control.backendId('b2'));
    control.load(text);
    t.same(names(), whenAllDown, extra);
    control.down.add(control.backendId('b3'));
    control.load(text);
    t.same(names(), whenAllDown);
    control.drained.add(control.backendId('b2'));
    control.load(text);
    t.same(names(), whenAllDown.slice(0, 1), 'a drained one is not used for want of others');
    control.down.delete(control.backendId('b2'));
    control.load(text);
    t.same(names(), whenAllDown.slice(0, 1), 'even if it is the only one that is up');
    control.drained.clear();
  }
});

t.test('Maglev tables: reused when nothing they depend on changed, right in every other case', async (t) => {
  const control = new Control();
  const two = (first: string, second: string, top = '') =>
    `${top}${web(first)}- { name: w2, address: 10.96.0.2, port: 80, backends: [${second}] }\n`;
  const other = '{ address: 10.3.0.1, port: 1 }, { address: 10.3.0.2, port: 1 }';
  control.load(two('b1 b2', other));
  const { maglev } = control.snapshot;
  const secondTable = control.table(2);
  control.load(two('b2 b1', other));
  t.equal(control.snapshot.maglev, maglev, 'the very array');
  const [firstAt, secondAt] = [1, 2].map((id) => control.serviceWord(id, S.MAGLEV_AT));
  control.load(two('b1 b2 b3', other));
  t.not(control.serviceWord(1, S.MAGLEV_AT), firstAt, 'beside the one in use');
  t.equal(control.serviceWord(2, S.MAGLEV_AT), secondAt);
  t.same(control.table(2), secondTable);
  const fresh = (text: string) => {
    const alone = new Control();
    alone.load(text);
    return alone;
  };
  for (const text of [
    two('b1 b2 b3', other, 'seed: other\n'),
    two('b1 b2 b3', other, 'maglev: { tableSize: 509 }\n'),
    two('b1 b2 b3', '{ address: 10.3.0.1, port: 1, weight: 2 }, { address: 10.3.0.2, port: 1 }'),
    two('', other),
    two('b1', '{ address: 10.2.0.1, port: 8080 }'),
    web('b1 b2').replace('port: 80,', 'port: 80, protocol: udp,'),
  ]) {
    control.load(text);
    const alone = fresh(text);
    for (const [vip, protocol] of [
      ['10.96.0.1', TCP],
      ['10.96.0.2', TCP],
      ['10.96.0.1', UDP],
    ] as const) {
      const id = control.serviceId(vip, 80, protocol);
      const aloneId = alone.serviceId(vip, 80, protocol);
      t.equal(id === 0, aloneId === 0);
      if (id !== 0) t.same(control.table(id), alone.table(aloneId), `${vip} of ${text.slice(0, 30)}`);
    }
  }
  const sharing = fresh(two('b1', '{ address: 10.2.0.1, port: 8080 }'));
  t.equal(
    sharing.serviceWord(1, S.MAGLEV_AT),
    sharing.serviceWord(2, S.MAGLEV_AT),
    'services of the same backends share a table',
  );
});

t.test('any limit makes a service a limited one, and a reload lifts them', async (t) => {
  const control = new Control();
  const flags = (text: string): number => {
    control.load(text);
    return control.serviceWord(control.serviceId('10.96.0.1'), S.SERVICE_FLAGS) & S.SERVICE_LIMITED;
  };
  t.equal(flags(web('b1', 'maxConnections: 1,')), S.SERVICE_LIMITED);
  t.equal(flags(web('b1', 'newConnectionsPerSecond: 1,')), S.SERVICE_LIMITED);
  t.equal(flags(web('b1').replace('8080', '8080, maxConnections: 7')), S.SERVICE_LIMITED);
  t.equal(control.backendWord(control.backendId('b1'), S.BACKEND_CONNECTIONS), 7);
  t.equal(flags(web('b1')), 0);
  t.equal(control.backendWord(control.backendId('b1'), S.BACKEND_CONNECTIONS), 0);
});

t.test(
  'source ranges: one block for lists of the same addresses, placed anew only when a list is another',
  async (t) => {
    const text = (first: string, second: string): string => `services:
- { name: a, address: 10.96.0.1, port: 80, sourceRanges: [${first}], backends: [{ name: b1, address: 10.2.0.1, port: 80 }] }
- { name: b, address: 10.96.0.2, port: 80, sourceRanges: [${second}], backends: [] }
- { name: c, address: 10.96.0.3, port: 80, backends: [] }
`;
    const control = new Control();
    const rangesAt = (vip: string): number => control.serviceWord(control.serviceId(vip), S.RANGES_AT);
    const isIn = (vip: string, client: string): boolean =>
      contains(control.snapshot.ranges, rangesAt(vip), parseIpv4(client));
    const config = configOf(text('10.1.0.0/16, 10.0.0.0/8', '10.0.0.0/8'));
    const before = control.use(config).ranges;
    t.equal(rangesAt('10.96.0.1'), rangesAt('10.96.0.2'), 'their union is the same');
    control.down.add(control.backendId('b1'));
    t.equal(control.use(config).ranges, before, 'the configuration is the same, health has changed');
    control.load(text('10.1.0.0/16', '10.0.0.0/8'));
    t.not(control.snapshot.ranges, before);
    t.same([isIn('10.96.0.1', '10.2.0.1'), isIn('10.96.0.2', '10.2.0.1')], [false, true]);
    control.load(text('', '10.1.0.0/16'));
    t.equal(control.serviceWord(control.serviceId('10.96.0.1'), S.RANGES_COUNT), 0);
    t.same([isIn('10.96.0.2', '10.1.0.1'), isIn('10.96.0.2', '10.2.0.1')], [true, false]);
  },
);

t.test('counters are one array for as long as they fit, and move with their counts when they grow', async (t) => {
  const control = new Control();
  const { counters } = control.load(web('b1 b2'));
  const at = control.backendId('b2') * S.COUNTER_ROWS + S.COUNTER_CONNECTIONS;
  counters[at] = 42;
  t.equal(control.load(web('b1 b2 b3')).counters, counters);
  const many = Array.from({ length: 200 }, (_, i) => `b${i + 1}`).join(' ');
  const grown = control.load(web(many)).counters;
  t.ok(grown.length >= 201 * S.COUNTER_ROWS && grown !== counters);
  t.equal(grown[at], 42);
  t.equal(control.load(web('b1')).counters, grown, 'they never shrink');
});

t.test('ids nobody holds any more are given away, with nothing left of their owner', async (t) => {
  const control = new Control();
  control.load(web('b1 b2 b3'));
  const b2 = control.backendId('b2');
  control.snapshot.counters.fill(7, b2 * S.COUNTER_ROWS, (b2 + 1) * S.COUNTER_ROWS);
  control.load(web('b1 b3'), 1000);
  control.identities.forgetBackend(b2);
  control.identities.forgetBackend(b2);
  t.equal(control.identities.backendName(b2), undefined);
  control.load(web('b1 b3'), 2000);
  control.load(web('b1 b3 b4 b5'), 3000);
  t.equal(control.backendId('b4'), b2);
  t.not(control.backendId('b5'), b2, 'once');
  t.equal(control.snapshot.cutAt[b2], Number.POSITIVE_INFINITY);
  t.equal(control.backendWord(b2, S.BACKEND_ADDRESS), parseIpv4('10.2.0.4'));
  t.ok(control.snapshot.counters.subarray(b2 * S.COUNTER_ROWS, (b2 + 1) * S.COUNTER_ROWS).every((n) => n === 0));
  control.load(web('b1 b3 b5'), 4000);
  t.equal(control.snapshot.cutAt[b2], 304_000, 'and can be removed in turn');

  control.load('{}', 5000);
  for (let id = 1; id < control.identities.backendRows; id++) control.identities.forgetBackend(id);
  control.identities.forgetService(1);
  t.equal(control.identities.serviceName(1), undefined);
  control.load('services: [{ name: fresh, address: 10.96.7.7, port: 7, protocol: udp, backends: [] }]', 6000);
  t.equal(control.serviceId('10.96.7.7', 7, UDP), 1);
  t.equal(control.serviceWord(1, S.SERVICE_FLAGS), S.SERVICE_MAGLEV);
  t.equal(control.serviceId('10.96.0.1'), 0);
});

t.test('a thousand services of ten backends: the second time no table is built', async (t) => {
  let text = 'services:\n';
  for (let i = 0; i < 1000; i++) {
    const members = Array.from({ length: 10 }, (_, j) => `{ address: 10.${i >> 8}.${i & 255}.${j + 1}, port: 8080 }`);
    text += `- { name: s${i}, address: 10.100.${i >> 8}.${i & 255}, port: 80, backends: [${members.join(', ')}] }\n`;
  }
  const config = configOf(text);
  const identities = new Identities();
  const isUp = () => true;
  let startMs = performance.now();
  const first = compile(config, identities, { isUp, nowMs: 0 });
  const coldMs = performance.now() - startMs;
  startMs = performance.now();
  const again = compile(config, identities, { isUp, nowMs: 0, previous: first });
  const againMs = performance.now() - startMs;
  t.comment(`cold ${Math.round(coldMs)} ms, unchanged ${Math.round(againMs)} ms`);
  t.equal(again.snapshot.maglev, first.snapshot.maglev, 'the second builds no table');
});
