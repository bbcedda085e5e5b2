import t from 'tap';
import { lookup } from '../../lib/balance/lookup.js';
import type { Config } from '../../lib/config/config.js';
import { parseConfig } from '../../lib/config/load.js';
import { Desired } from '../../lib/control/desired.js';
import { findBackend, requireNames } from '../../lib/control/find-backend.js';
import { NO_NEEDS } from '../../lib/control/network-plan.js';
import { requireReloadable } from '../../lib/control/reloadable.js';
import * as S from '../../lib/datapath/snapshot.js';
import { parseIpv4 } from '../../lib/wire/address.js';

function configOf(text: string): Config {
  const { config, problems } = parseConfig(text);
  if (config === null) throw new Error(JSON.stringify(problems));
  return config;
}

const B1 = '{ name: b1, address: 10.2.0.1, port: 80 }';
const B2 = '{ name: b2, address: 10.2.0.2, port: 80 }';

function service(name: string, vip: string, backends: string[], more = ''): string {
  return `  - { name: ${name}, address: ${vip}, port: 80, protocol: tcp, ${more} backends: [${backends.join(', ')}] }`;
}

function file(...services: string[]): Config {
  return configOf(services.length === 0 ? 'services: []' : `services:\n${services.join('\n')}`);
}

function names(parts: readonly { readonly name: string }[]): string[] {
  return parts.map(({ name }) => name);
}

t.test('what leaves the file is remembered while flows use it, and its ids then given to others', async (t) => {
  const web = service('web', '10.96.0.1', [B1, B2]);
  const desired = new Desired(file(web, service('old', '10.96.0.2', [B1])), 0);
  const [webId, oldId] = desired.configured().map(({ id }) => id);
  const [b1, b2] = desired.configured()[0]!.backends.map(({ id }) => id);
  const oldB1 = desired.configured()[1]!.backends[0]!.id;
  t.strictSame([desired.removedServices(), desired.removedBackends()], [[], []]);
  t.strictSame(desired.retainedNeeds(), { addresses: [], endpoints: [] });

  const next = file(service('web', '10.96.0.1', [B1]));
  const proposal = desired.propose(next, 1000);
  t.strictSame(names(desired.removedBackends()), [], 'a proposal changes nothing');
  t.strictSame(names(desired.removedBackends(proposal.compiled)), ['b2', 'b1']);
  t.equal(desired.config.services.length, 2);
  // b1 of the removed service is still led in as that of the other.
  const needs = { addresses: ['10.96.0.2'], endpoints: [{ address: '10.2.0.2', port: 80, protocol: 6 }] };
  t.strictSame(desired.retainedNeeds(proposal), needs);
  desired.take(proposal);
  t.equal(desired.config, next);
  t.strictSame(names(desired.removedServices()), ['old']);
  t.strictSame(desired.retainedNeeds(), needs);

  const flows = new Float64Array(desired.identities.backendRows);
  flows[oldB1] = 3;
  const used = { addresses: ['10.96.0.2'], endpoints: [] };
  t.strictSame(desired.forget(flows, used), { forgotten: 1, kept: 1 });
  t.strictSame(desired.retainedNeeds(), used);
  t.strictSame(names(desired.removedBackends()), ['b1'], 'b2 is gone; b1 of the removed service has flows');
  t.strictSame(names(desired.removedServices()), ['old'], 'and so its service stays');
  t.equal(desired.identities.backendName(b2!), undefined);

  flows[oldB1] = 0;
  t.strictSame(desired.forget(flows, NO_NEEDS), { forgotten: 2, kept: 0 });
  t.strictSame([desired.removedServices(), desired.removedBackends()], [[], []]);
  t.strictSame(desired.retainedNeeds(), { addresses: [], endpoints: [] });

  desired.take(desired.propose(file(web, service('new', '10.96.0.3', [B2])), 2000));
  const [again, fresh] = desired.configured();
  t.equal(again!.id, webId, 'what stayed has its id');
  t.equal(again!.backends[0]!.id, b1);
  t.equal(fresh!.id, oldId, 'an id that nobody holds is used again');
});

t.test('names are those of the file in use: what is proposed and not taken changes none', async (t) => {
  const desired = new Desired(file(service('web', '10.96.0.1', [B1])), 0);
  const [{ id, backends }] = desired.configured() as [ReturnType<Desired['configured']>[number]];
  const called = (): unknown => [desired.identities.serviceName(id), desired.identities.backendName(backends[0]!.id)];
  const renamed = desired.propose(file(service('shop', '10.96.0.1', [B1.replace('b1', 'first')])), 1);
  t.strictSame(called(), ['web', 'b1']);
  desired.take(renamed);
  t.strictSame(called(), ['shop', 'first']);
});

t.test('the return path is kept for dnat alone; its deadline ends when the backend comes back', async (t) => {
  const snat = 'mode: snat,';
  const top = 'snat: { addresses: [10.99.0.1] }\nservices:\n';
  const both = (backends: string[]): Config =>
    configOf(top + [service('a', '10.96.0.1', backends, snat), service('b', '10.96.0.2', backends)].join('\n'));
  const desired = new Desired(both([B1, B2]), 0);
  desired.take(desired.propose(both([B1]), 10));
  t.strictSame(names(desired.removedBackends()), ['b2', 'b2']);
  t.strictSame(desired.retainedNeeds(), { addresses: [], endpoints: [{ address: '10.2.0.2', port: 80, protocol: 6 }] });
  desired.take(desired.propose(both([B1, B2]), 20));
  t.strictSame(desired.removedBackends(), []);
});

t.test(
  'the return path outlives a change of mode, and pools a change of addresses, until they are not used',
  async (t) => {
    const of = (mode: string, pool: string, backends: string[]): Config =>
      configOf(
        `snat: { addresses: [${pool}] }\ntunnel: { address: 10.2.0.99 }\nservices:\n${service('web', '10.96.0.1', backends, `mode: ${mode},`)}`,
      );
    const [b1, b2] = ['10.2.0.1', '10.2.0.2'].map((address) => ({ address, port: 80, protocol: 6 }));
    const desired = new Desired(of('dnat', '10.99.0.1', [B1, B2]), 0);
    const turn = (...next: Parameters<typeof of>): void => desired.take(desired.propose(of(...next), 0));
    turn('snat', '10.99.0.2', [B1]);
    t.strictSame(
      desired.retainedNeeds(),
      { addresses: ['10.99.0.1'], endpoints: [b1, b2] },
      'also of what was removed with it',
    );
    turn('dsr', '10.99.0.3', [B1]);
    const all = { addresses: ['10.99.0.2', '10.99.0.1'], endpoints: [b1, b2] };
    t.strictSame(desired.retainedNeeds(), all);
    const other = desired.fork();
    turn('dnat', '10.99.0.1', [B1]);
    t.strictSame(
      desired.retainedNeeds(),
      { addresses: ['10.99.0.3', '10.99.0.2'], endpoints: [b2] },
      'the file sees to the rest',
    );
    t.strictSame(other.retainedNeeds(), all, 'a fork goes its own way');
    other.forget(new Float64Array(other.identities.backendRows), { addresses: [], endpoints: [b1!] });
    t.strictSame(other.retainedNeeds(), { addresses: [], endpoints: [b1] });
    other.take(other.propose(other.config, 1));
    t.strictSame(other.retainedNeeds(), { addresses: [], endpoints: [b1] });
  },
);

t.test('a node: what is led in, and what is kept', async (t) => {
  const ends = 'role: node\ntunnel: { address: 10.2.0.1 }\nservices:\n';
  const dsr = (backends: string[]): Config => configOf(ends + service('web', '10.96.0.1', backends, 'mode: dsr,'));
  const own = { address: '10.2.0.1', port: 80, protocol: 6 };
  const taught = { address: '172.17.0.2', port: 53, protocol: 17 };
  const desired = new Desired(dsr([B1, B2]), 0, { learned: [taught] });
  const ledIn = (): boolean[] =>
    [own, taught, { ...own, address: '10.2.0.2' }].map(({ address, port, protocol }) => {
      const table = desired.snapshot.node!.ledIn!;
      return lookup(table, parseIpv4(address), port, protocol) !== 0;
    });
  t.strictSame(ledIn(), [false, false, false], 'nothing, until the kernel has its rules');
  desired.take(desired.propose(desired.config, 0));
  t.strictSame(ledIn(), [true, true, false], 'its own backends and what was learned; not those of other nodes');
  t.strictSame(desired.retainedNeeds(), { addresses: [], endpoints: [taught] });

  desired.take(desired.propose(dsr([B2]), 10));
  t.strictSame(ledIn(), [false, true, false]);
  t.strictSame(desired.retainedNeeds(), { addresses: [], endpoints: [own, taught] }, 'flows of a removed one go on');
  desired.learned = [];
  desired.take(desired.propose(configOf(ends.replace('services:', 'services: []')), 20));
  t.strictSame(desired.retainedNeeds(), { addresses: [], endpoints: [own] }, 'a node never asks for VIPs');

  const unmanaged = configOf('role: node\nnetwork: { manage: false }\ntunnel: { address: 10.2.0.1 }');
  t.equal(new Desired(unmanaged, 0).snapshot.node!.ledIn, null, 'whoever sets up the network knows');
  t.equal(new Desired(file(), 0).snapshot.node, null);
});

/** Names of the backends of the first service that take new flows. */
function takers(desired: Desired): string[] {
  const { backends } = desired.snapshot;
  return desired
    .configured()[0]!
    .backends.filter(({ id }) => backends[id * S.BACKEND_WORDS + S.BACKEND_FLAGS]! & S.TAKES_NEW)
    .map(({ backend }) => backend.name);
}

t.test('health counts where there are checks', async (t) => {
  const down = new Set<string>(['b1']);
  const plain = file(service('web', '10.96.0.1', [B1, B2]));
  const checked = file(service('web', '10.96.0.1', [B1, B2], 'health: { type: tcp },'));
  const desired = new Desired(checked, 0, undefined, ({ name }) => !down.has(name));
  t.strictSame(takers(desired), ['b2']);
  t.match(desired.checked(), [
    { service: { name: 'web' }, backend: { name: 'b1' }, check: { type: 'tcp' } },
    { service: { name: 'web' }, backend: { name: 'b2' } },
  ]);
  down.add('b2');
  desired.take(desired.propose(desired.config, 1));
  t.strictSame(takers(desired), ['b1', 'b2'], 'all down');
  down.delete('b2');
  desired.take(desired.propose(plain, 2));
  t.strictSame(takers(desired), ['b1', 'b2'], 'without checks, what they found is nothing');
  t.strictSame(desired.checked(), []);
});

t.test('a drain by command lasts until the file says something else', async (t) => {
  const of = (b1: string, more = ''): Config => file(service('web', '10.96.0.1', [b1, B2].filter(Boolean), more));
  const heavy = B1.replace('}', ', weight: 2 }');
  const begin = (): Desired => {
    const desired = new Desired(of(B1), 0);
    const { identity, weight } = findBackend(desired, 'web', 'b1');
    desired.setDrained(identity, weight, true);
    t.strictSame(takers(desired), ['b1', 'b2'], 'nothing changes by itself');
    desired.take(desired.propose(desired.config, 1));
    t.strictSame(takers(desired), ['b2']);
    return desired;
  };
  for (const [name, steps, drained] of [
    ['the same file', [of(B1)], true],
    ['another algorithm, name and order', [of(B1.replace('b1', 'other'), 'algorithm: random,')], true],
    ['another weight', [of(heavy)], false],
    ['another weight, and back', [of(heavy), of(B1)], false],
    ['weight 0, and back', [of(B1.replace('}', ', weight: 0 }')), of(B1)], false],
    ['left out, and back', [of(''), of(B1)], false],
    ['the service left out, and back', [file(), of(B1)], false],
  ] as const) {
    const desired = begin();
    const identity = desired.identities.backendById(desired.configured()[0]!.backends[0]!.id)!;
    const released: number[] = [];
    for (const config of steps) {
      const proposal = desired.propose(config, 2);
      t.ok(desired.isDrained(identity) || released.length > 0, 'a proposal changes nothing');
      released.push(desired.releasedBy(proposal).length);
      desired.take(proposal);
    }
    t.equal(desired.isDrained(identity), drained, name);
    t.equal(released[0], drained ? 0 : 1, 'it is told what the file gives back');
    t.equal(takers(desired).length, drained ? 1 : 2, name);
  }
  const desired = begin();
  const { identity, weight } = findBackend(desired, 'web', '10.2.0.1:80');
  desired.setDrained(identity, weight, false);
  desired.take(desired.propose(desired.config, 3));
  t.strictSame(takers(desired), ['b1', 'b2'], 'undrain');
});

t.test('how commands name a backend', async (t) => {
  const twin = '{ address: 10.2.0.1, port: 81 }';
  const desired = new Desired(file(service('web', '10.96.0.1', [B1, B2, twin]), service('api', '10.96.0.2', [B1])), 0);
  const [web, api] = desired.configured();
  for (const [name, text, id] of [
    ['web', 'b1', web!.backends[0]!.id],
    ['web', '10.2.0.2', web!.backends[1]!.id],
    ['web', '10.2.0.2:80', web!.backends[1]!.id],
    ['web', '10.2.0.1:81', web!.backends[2]!.id],
    ['api', '10.2.0.1', api!.backends[0]!.id],
  ] as const) {
    t.equal(findBackend(desired, name, text).identity.id, id, `${name} ${text}`);
  }
  for (const [name, text, message, remedy] of [
    ['wob', 'b1', 'no service is called "wob"', 'There are: web, api.'],
    ['api', 'b2', 'api has no backend "b2"', 'It has b1.'],
    ['web', '10.2.0.1', '"10.2.0.1" is more than one backend of web', 'Name one: b1, 10.2.0.1:81.'],
    ['web', '10.2.0.2:81', 'web has no backend "10.2.0.2:81"', 'It has b1, b2, 10.2.0.1:81.'],
  ] as const) {
    t.throws(() => findBackend(desired, name, text), { code: 'USAGE', message, remedy });
  }
  desired.take(desired.propose(file(service('web', '10.96.0.1', [B1])), 1));
  t.throws(() => findBackend(desired, 'web', 'b2'), { message: /^web\/b2 has left the file/, remedy: 'It has b1.' });
});

t.test('names in filters: what is unknown is a mistake, what was there lately is not', async (t) => {
  const desired = new Desired(file(service('web', '10.96.0.1', [B1, B2]), service('api', '10.96.0.2', [B1])), 0);
  const { identities } = desired;
  for (const filter of [
    {},
    { service: 'web' },
    ...['b2', '10.2.0.2', '10.2.0.2:80', 'web/b2', 'web/10.2.0.2'].map((backend) => ({ backend })),
    { service: 'api', backend: 'b1' },
    { service: 'api', backend: 'b2' },
    { backend: '10.2.0.9' },
    { backend: '10.2.0.2:81' },
  ]) {
    t.doesNotThrow(() => requireNames(identities, filter), JSON.stringify(filter));
  }
  for (const [filter, message, remedy] of [
    [{ service: 'wob' }, 'no service is called "wob"', 'There are: web, api.'],
    [{ service: '' }, 'no service is called ""', 'There are: web, api.'],
    [{ backend: 'b9' }, 'no backend is called "b9"', 'There are: web/b1, web/b2, api/b1.'],
    [{ backend: 'wob/b1' }, 'no service is called "wob"', 'There are: web, api.'],
    [{ backend: 'api/b2' }, 'api has no backend "b2"', 'It has b1.'],
    [{ service: 'wob', backend: 'web/b1' }, 'no service is called "wob"', 'There are: web, api.'],
  ] as const) {
    t.throws(() => requireNames(identities, filter), { code: 'USAGE', message, remedy }, JSON.stringify(filter));
  }

  const [b1, b2] = desired.configured()[0]!.backends.map(({ id }) => id);
  desired.take(desired.propose(file(service('web', '10.96.0.1', [B1])), 1));
  for (const filter of [{ backend: 'web/b2' }, { backend: '10.2.0.2' }, { service: 'api' }, { backend: 'api/b1' }]) {
    t.doesNotThrow(() => requireNames(identities, filter), `${JSON.stringify(filter)}, removed`);
  }
  const flows = new Float64Array(identities.backendRows);
  flows[b2!] = 1;
  desired.forget(flows, NO_NEEDS);
  t.doesNotThrow(() => requireNames(identities, { backend: 'web/b2' }), 'it has flows');
  desired.forget(new Float64Array(identities.backendRows), NO_NEEDS);
  t.equal(identities.backendById(b1!)!.name, 'b1');
  for (const filter of [{ backend: 'web/b2' }, { backend: 'b2' }, { service: 'api' }, { backend: 'api/b1' }]) {
    t.doesNotThrow(() => requireNames(identities, filter), `${JSON.stringify(filter)}, forgotten`);
  }
  desired.take(desired.propose(file(service('site', '10.96.0.1', [B1.replace('b1', 'first')])), 2));
  for (const filter of [{ service: 'web' }, { backend: 'web/b1' }, { backend: 'site/first' }]) {
    t.doesNotThrow(() => requireNames(identities, filter), `${JSON.stringify(filter)}, renamed`);
  }
  t.throws(() => requireNames(identities, { backend: 'site/b1' }), { code: 'USAGE', remedy: 'It has first.' });

  const many = Array.from({ length: 22 }, (_, i) => service(`s${i}`, `10.96.1.${i}`, []));
  const { identities: names } = new Desired(file(...many), 0);
  t.throws(() => requireNames(names, { service: 'x' }), {
    code: 'USAGE',
    remedy: /^There are: s0, .*, s19 and 2 more\.$/,
  });
});

t.test('what only a restart can change', async (t) => {
  const before = configOf('{}');
  for (const [text, key] of [
    ['device: { mtu: 1400 }', 'device'],
    ['admin: { listen: off }', 'admin'],
    ['network: { manage: false }', 'network.manage'],
    ['network: { table: 99 }', 'network.table'],
    ['conntrack: { tcpEntries: 1000 }', 'conntrack.tcpEntries'],
    ['conntrack: { gc: { interval: 1m } }', 'conntrack.gc'],
    ['device: { mtu: 1400 }\nconntrack: { anyEntries: 1000 }', 'device, conntrack.anyEntries'],
  ] as const) {
    const expected = { code: 'NOT_SUPPORTED', message: `${key} cannot change while weir runs` };
    t.throws(() => requireReloadable(before, configOf(text)), expected, text);
  }
  const node = configOf('role: node\ntunnel: { address: 192.0.2.1 }');
  for (const tunnel of ['address: 192.0.2.2', 'address: 192.0.2.1, port: 6082']) {
    const key = tunnel.includes('port') ? 'tunnel.port' : 'tunnel.address';
    t.throws(() => requireReloadable(node, configOf(`role: node\ntunnel: { ${tunnel} }`)), {
      message: `${key} cannot change while weir runs`,
    });
    t.doesNotThrow(() => requireReloadable(before, configOf(`tunnel: { ${tunnel} }`)), 'of a gateway it may');
  }
  for (const text of ['seed: other', 'network: { untracked: drop }', 'conntrack: { timeouts: { any: 5s } }']) {
    t.doesNotThrow(() => requireReloadable(before, configOf(text)), text);
  }
});
