import { readFileSync } from 'node:fs';
import t from 'tap';
import type { Config } from '../../../lib/config/config.js';
import { parseConfig } from '../../../lib/config/load.js';
import { compareSettings, pairServices } from '../../../lib/control/plan/config-diff.js';

function configOf(text: string): Config {
  const { config, problems } = parseConfig(text);
  if (config === null) throw new Error(JSON.stringify(problems));
  return config;
}

/** One of everything. */
const FULL = configOf(`
tunnel: { address: 192.0.2.1, peers: [192.0.2.0/24] }
snat: { addresses: [10.96.255.1] }
conntrack: { stateFile: /run/weir/conntrack, gc: { interval: 60s } }
services:
  - name: web
    address: 10.96.0.10
    port: 80
    protocol: tcp
    affinity: { clientIp: 3h }
    sourceRanges: [10.0.0.0/8]
    health: { type: http, path: /healthz, host: example.org, port: 81, body: ok }
    backends: [{ name: b1, address: 10.2.0.11, port: 8080 }]
`);

type Steps = readonly (string | number)[];

/** The paths of all values that are no map or list of maps; addresses and ranges are values. */
function leavesOf(value: unknown, steps: Steps = []): Steps[] {
  const isValue = typeof value !== 'object' || value === null || 'text' in value;
  if (isValue) return [steps];
  return Object.entries(value).flatMap(([key, part]) =>
    leavesOf(part, [...steps, Array.isArray(value) ? Number(key) : key]),
  );
}

function another(value: unknown): unknown {
  switch (typeof value) {
    case 'boolean':
      return !value;
    case 'number':
      return value + 1;
    case 'string':
      return `${value}x`;
    default:
      return value === null ? 'something' : { ...value, text: '192.0.2.77', word: 0xc000024d, first: 0xc000024d };
  }
}

/** A copy with another value in one place. */
function changed(value: unknown, [step, ...rest]: Steps): unknown {
  if (step === undefined) return another(value);
  if (Array.isArray(value)) return value.map((each, i) => (i === step ? changed(each, rest) : each));
  const map = value as Record<string, unknown>;
  return { ...map, [step]: changed(map[step], rest) };
}

t.test('whatever differs is told, once, under its name in the file', async (t) => {
  const reference = readFileSync(new URL('../../../docs/configuration.md', import.meta.url), 'utf8');
  const leaves = leavesOf(FULL);
  t.ok(leaves.length > 60);
  for (const steps of leaves) {
    const other = changed(FULL, steps) as Config;
    const where = steps.join('.');
    const settings = compareSettings(FULL, other);
    const pairs = pairServices(FULL, other).filter(({ change }) => change !== 'same');
    if (steps[0] !== 'services') {
      t.equal(settings.length, 1, where);
      t.strictSame(pairs, [], where);
    } else t.strictSame(settings, [], where);
    const isIdentity = /^services\.0\.(backends\.0\.)?(address|port|protocol)$/.test(where);
    const isDerived = where.endsWith('protocolNumber');
    if (steps[0] === 'services' && !isDerived) {
      t.equal(pairs.length, isIdentity && !where.includes('backends') ? 2 : 1, where);
      const fields = [...pairs[0]!.fields, ...pairs[0]!.backends.flatMap((backend) => backend.fields)];
      t.equal(fields.length, isIdentity ? 0 : 1, where);
      settings.push(...fields);
    }
    for (const { key, before, after } of settings) {
      const name = key.split('.').at(-1)!;
      t.match(reference, `| \`${name}\` |`, `${where} is ${key} in the file`);
      t.not(JSON.stringify(before), undefined);
      t.ok(typeof after === 'string');
    }
  }
  t.strictSame(compareSettings(FULL, structuredClone(FULL)), []);
  t.ok(pairServices(FULL, structuredClone(FULL)).every(({ change }) => change === 'same'));
});

t.test('in the words of the file', async (t) => {
  const before = configOf(`
conntrack: { timeouts: { tcp: 2h } }
snat: { addresses: [10.96.255.1, 10.96.255.2] }
services:
  - name: web
    address: 10.96.0.10
    port: 80
    protocol: tcp
    health: { type: tcp }
    sourceRanges: [10.0.0.0/8, 172.16.0.0/12]
    backends: [{ name: b1, address: 10.2.0.11, port: 80 }, { name: b2, address: 10.2.0.12, port: 80 }]
  - { name: gone, address: 10.96.0.11, port: 80, protocol: tcp, backends: [] }
`);
  const after = configOf(`
admin: { listen: off }
conntrack: { gc: { interval: 30s } }
snat: { addresses: [10.96.255.2, 10.96.255.3] }
services:
  - { name: new, address: 10.96.0.12, port: 80, protocol: tcp, backends: [{ address: 10.2.0.11, port: 80 }] }
  - name: www
    address: 10.96.0.10
    port: 80
    protocol: tcp
    algorithm: random
    affinity: { clientIp: 90m }
    drainTimeout: 10s
    sourceRanges: [172.16.0.0/12]
    backends: [{ name: b3, address: 10.2.0.13, port: 80 }, { name: b1, address: 10.2.0.11, port: 80, weight: 5 }]
`);
  t.strictSame(compareSettings(before, after), [
    { key: 'conntrack.timeouts.tcp', before: '2h', after: '2h13m20s' },
    { key: 'conntrack.gc.interval', before: 'auto', after: '30s' },
    { key: 'snat.addresses', before: '2', after: '2', added: ['10.96.255.3'], removed: ['10.96.255.1'] },
    { key: 'admin.listen', before: '127.0.0.1:9650', after: 'off' },
  ]);
  const [added, web, removed] = pairServices(before, after);
  t.match(added, {
    change: 'added',
    before: undefined,
    after: { name: 'new' },
    fields: [],
    backends: [{ change: 'added' }],
  });
  t.match(removed, { change: 'removed', before: { name: 'gone' }, after: undefined, fields: [], backends: [] });
  t.equal(web!.change, 'changed');
  const fields = [
    { key: 'name', before: 'web', after: 'www' },
    { key: 'algorithm', before: 'maglev', after: 'random' },
    { key: 'affinity.clientIp', before: 'none', after: '1h30m' },
    { key: 'sourceRanges', before: '2', after: '1', added: [], removed: ['10.0.0.0/8'] },
    { key: 'drainTimeout', before: '5m', after: '10s' },
    { key: 'health.type', before: 'tcp', after: 'none' },
    { key: 'health.interval', before: '2s', after: 'none' },
    { key: 'health.timeout', before: '1s', after: 'none' },
    { key: 'health.rise', before: '2', after: 'none' },
    { key: 'health.fall', before: '3', after: 'none' },
    { key: 'allDown', before: 'use-all', after: 'reject' },
  ];
  t.strictSame(web!.fields, fields);
  t.strictSame(web!.backends, [
    { name: 'b3', address: '10.2.0.13', port: 80, change: 'added', fields: [] },
    {
      name: 'b1',
      address: '10.2.0.11',
      port: 80,
      change: 'changed',
      fields: [{ key: 'weight', before: '1', after: '5' }],
    },
    { name: 'b2', address: '10.2.0.12', port: 80, change: 'removed', fields: [] },
  ]);
});
