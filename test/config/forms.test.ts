import { readFileSync, writeFileSync } from 'node:fs';
import fc from 'fast-check';
import t from 'tap';
import type { Config } from '../../lib/config/config.js';
import { formatDuration, parseDuration } from '../../lib/config/duration.js';
import { parseConfig } from '../../lib/config/load.js';
import { configReference } from '../../lib/config/reference.js';
import { configSchema } from '../../lib/config/schema.js';
import {
  addressFault,
  cidrFault,
  listenFault,
  portRangeFault,
  toAddress,
  toListen,
  toRange,
} from '../../lib/config/text-forms.js';
import { formatIpv4 } from '../../lib/wire/address.js';

t.test('durations', async (t) => {
  for (const [text, ms] of [
    ['500ms', 500],
    ['60s', 60_000],
    ['5m', 300_000],
    ['3h', 10_800_000],
    ['2h13m20s', 8_000_000],
    ['1m500ms', 60_500],
    ['90m', 5_400_000],
    ['0s', 0],
    ['007s', 7000],
  ] as const) {
    t.equal(parseDuration(text), ms, text);
  }
  for (const text of [
    '',
    '5',
    '5 s',
    '5S',
    '1.5s',
    '-5s',
    '+5s',
    's',
    '5s5m',
    '5s5s',
    '5ms5s',
    '1d',
    '5sec',
    '1h ',
    '1_000s',
    '٣s',
    '9999999999s',
  ]) {
    t.equal(parseDuration(text), null, text);
  }
  fc.assert(fc.property(fc.nat(2 ** 31), (ms) => parseDuration(formatDuration(ms)) === ms));
  fc.assert(
    fc.property(fc.nat(1000), fc.nat(1000), fc.nat(1000), fc.nat(5000), (h, m, s, ms) => {
      return parseDuration(`${h}h${m}m${s}s${ms}ms`) === ((h * 60 + m) * 60 + s) * 1000 + ms;
    }),
  );
  t.equal(formatDuration(8_000_000), '2h13m20s');
  t.equal(formatDuration(0), '0s');
});

t.test('addresses, ranges and listeners', async (t) => {
  fc.assert(
    fc.property(fc.nat(0xffffffff), (word) => {
      const text = formatIpv4(word);
      const first = word >>> 24;
      const isUsable = first !== 0 && first !== 127 && first < 224;
      return (
        (addressFault(text) === null) === isUsable && toAddress(text).word === word && toAddress(text).text === text
      );
    }),
  );
  fc.assert(
    fc.property(fc.nat(0xffffffff), fc.nat(32), (word, length) => {
      const size = 2 ** (32 - length);
      const network = Math.floor(word / size) * size;
      const text = `${formatIpv4(network)}/${length}`;
      const { first, last } = toRange(text);
      const hasHostBits = word !== network;
      const fault = cidrFault(`${formatIpv4(word)}/${length}`);
      if (first !== network || last !== network + size - 1 || cidrFault(text) !== null) return false;
      return hasHostBits ? fault?.endsWith(`write ${text}`) === true : fault === null;
    }),
  );
  for (const bad of [
    '10.0.0.0/',
    '10.0.0.0/-1',
    '10.0.0.0/+8',
    '10.0.0.0/8/8',
    '/8',
    '010.0.0.0/8',
    '10.0.0.0/255.0.0.0',
  ]) {
    t.type(cidrFault(bad), 'string', bad);
  }
  for (const [text, host, port] of [
    ['127.0.0.1:9650', '127.0.0.1', 9650],
    ['0.0.0.0:1', '0.0.0.0', 1],
    ['[::1]:65535', '::1', 65535],
  ] as const) {
    t.equal(listenFault(text), null);
    t.same(toListen(text), { host, port });
  }
  t.equal(toListen('off'), null);
  for (const bad of [
    '',
    '9650',
    '127.0.0.1',
    '127.0.0.1:',
    '127.0.0.1:0',
    '::1:80',
    '[::1]',
    '[127.0.0.1]:80',
    '[fe80::1%eth0]:80',
    'OFF',
  ]) {
    t.type(listenFault(bad), 'string', bad);
  }
  for (const bad of ['', '1', '0-5', '5-', '-5', '1-2-3', '01-5', '5 - 6']) t.type(portRangeFault(bad), 'string', bad);
  t.equal(portRangeFault('1-65535'), null);
});

t.test('the used form', async (t) => {
  const { config } = parseConfig(`
conntrack: { gc: { interval: 5m } }
snat: { addresses: [10.255.0.1], ports: 40000-40099 }
tunnel: { address: 192.0.2.1, vni: 7, inner: ip, option: syn, peers: [10.1.0.0/16, 192.0.2.9] }
admin: { listen: off }
services:
  - name: web
    address: 200.0.0.1
    port: 443
    protocol: udp
    mode: dsr
    affinity: { clientIp: 90m }
    sourceRanges: [128.0.0.0/1]
    maxConnections: 1000
    newConnectionsPerSecond: 20
    health: { type: http, path: /h }
    backends:
      - { address: 10.2.0.1, port: 80 }
      - { name: b2, address: 10.2.0.2, port: 80, weight: 0, maxConnections: 50, node: 10.9.0.1 }
`);
  t.match(config, {
    role: 'gateway',
    conntrack: {
      gcIntervalMs: 300_000,
      recoveryMs: 60_000,
      timeoutsMs: { tcp: 8_000_000, tcpFin: 10_000 },
      stateFile: null,
    },
    snat: { addresses: [{ text: '10.255.0.1', word: 0x0aff0001 }], firstPort: 40_000, lastPort: 40_099 },
    admin: { socket: '/run/weir/weir.sock', listen: null },
  });
  t.same(config!.tunnel, {
    address: { text: '192.0.2.1', word: 0xc0000201 },
    port: 6081,
    vni: 7,
    inner: 'ip',
    option: 'syn',
    clampMss: true,
    peers: [
      { text: '10.1.0.0/16', first: 0x0a010000, last: 0x0a01ffff },
      { text: '192.0.2.9', first: 0xc0000209, last: 0xc0000209 },
    ],
  });
  t.same(config!.services[0], {
    name: 'web',
    address: { text: '200.0.0.1', word: 0xc8000001 },
    port: 443,
    protocol: 'udp',
    protocolNumber: 17,
    algorithm: 'maglev',
    mode: 'dsr',
    affinityMs: 5_400_000,
    sourceRanges: [{ text: '128.0.0.0/1', first: 0x80000000, last: 0xffffffff }],
    maxConnections: 1000,
    newConnectionsPerSecond: 20,
    noBackend: 'reject',
    onRemove: 'keep',
    drainMs: 300_000,
    icmpEcho: true,
    health: {
      type: 'http',
      path: '/h',
      port: null,
      host: null,
      status: 200,
      body: null,
      intervalMs: 2000,
      timeoutMs: 1000,
      rise: 2,
      fall: 3,
    },
    allDown: 'use-all',
    backends: [
      {
        name: '10.2.0.1:80',
        address: toAddress('10.2.0.1'),
        port: 80,
        weight: 1,
        maxConnections: null,
        node: toAddress('10.2.0.1'),
      },
      {
        name: 'b2',
        address: toAddress('10.2.0.2'),
        port: 80,
        weight: 0,
        maxConnections: 50,
        node: toAddress('10.9.0.1'),
      },
    ],
  });
  const isFrozen = (value: unknown): boolean =>
    typeof value !== 'object' || value === null || (Object.isFrozen(value) && Object.values(value).every(isFrozen));
  t.ok(isFrozen(config));
  t.ok(isFrozen(parseConfig('{}').config));
  t.same(
    configSchema.parse({}).device,
    { name: 'weir0', mtu: 1500, engine: 'auto', offload: true },
    'freezing touched no default',
  );
});

t.test('what is checked, and what is done when all are down', async (t) => {
  const of = (text: string) => {
    const service = `services: [{ name: a, address: 10.96.0.1, port: 80, backends: [], ${text} }]`;
    const { health, allDown } = parseConfig(service).config!.services[0]!;
    return { health, allDown };
  };
  const timing = { intervalMs: 2000, timeoutMs: 1000, rise: 2, fall: 3 };
  t.same(of(''), { health: null, allDown: 'reject' });
  t.same(of('allDown: use-all'), { health: null, allDown: 'use-all' });
  t.same(of('health: { type: tcp }'), { health: { type: 'tcp', port: null, ...timing }, allDown: 'use-all' });
  t.same(of('allDown: reject, health: { type: tcp, port: 81, rise: 9 }'), {
    health: { type: 'tcp', port: 81, ...timing, rise: 9 },
    allDown: 'reject',
  });
  t.same(of('health: { type: icmp }').health, { type: 'icmp', ...timing });
  t.same(of('health: { type: http, host: "shop:81", port: 81, status: 204, body: well }').health, {
    type: 'http',
    path: '/',
    port: 81,
    host: 'shop:81',
    status: 204,
    body: 'well',
    ...timing,
  });
});

t.test('JSON is the same as YAML', async (t) => {
  const written = {
    role: 'gateway',
    services: [{ name: 'a', address: '10.96.0.1', port: 80, backends: [{ address: '10.2.0.1', port: 80, weight: 3 }] }],
  };
  const json: Config = parseConfig(JSON.stringify(written, null, '\t')).config!;
  const yaml: Config = parseConfig(
    'role: gateway\nservices:\n- name: a\n  address: 10.96.0.1\n  port: 80\n  backends:\n  - {address: 10.2.0.1, port: 80, weight: 3}\n',
  ).config!;
  t.same(json, yaml);
  const aliased = parseConfig(`services:
- { name: a, address: 10.96.0.1, port: 80, health: &h {type: tcp}, backends: &b [{address: 10.2.0.1, port: 80}] }
- { name: b, address: 10.96.0.2, port: 80, health: *h, backends: *b }
`).config!;
  t.same(aliased.services[1]!.backends, aliased.services[0]!.backends);
});

t.test('docs/configuration.md is what the schema says; WEIR_WRITE_DOCS=1 writes it anew', async (t) => {
  const path = 'docs/configuration.md';
  if (process.env.WEIR_WRITE_DOCS === '1') writeFileSync(path, configReference());
  t.equal(readFileSync(path, 'utf8'), configReference());
});
