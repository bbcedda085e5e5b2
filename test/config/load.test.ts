import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import fc from 'fast-check';
import t from 'tap';
import { WeirError } from '../../lib/base/errors.js';
import { formatProblem, loadConfig, parseConfig, requireConfig } from '../../lib/config/load.js';

/** All problems of a text, as `line:column path: message`. */
function problemsOf(text: string): string[] {
  return parseConfig(text).problems.map((problem) => formatProblem('', problem).slice(1));
}

/** A service to which lines are added, from line 5 on. */
function service(lines: string, top = ''): string {
  return `services:\n  - name: web\n    address: 10.96.0.10\n    port: 80\n${lines}${top}`;
}

const NO_BACKENDS = '    backends: []\n';

interface Row {
  readonly name: string;
  readonly text: string;
  /** Each begins with `line:column path:`; the rest must be found in the message. */
  readonly problems: readonly string[];
}

const ADDRESS = 'must be an IPv4 address such as 10.0.0.1';

const ROWS: readonly Row[] = [
  // The text.
  { name: 'an empty file', text: '', problems: ['1:1 the file is empty'] },
  { name: 'nothing but comments', text: '# nothing\n', problems: ['1:1 the file is empty'] },
  { name: 'a list', text: '- 1', problems: ['1:1 must be a map of keys and values, not a list'] },
  { name: 'a scalar', text: 'hello', problems: ['1:1 must be a map of keys and values, not the text "hello"'] },
  { name: 'two documents', text: 'role: node\n---\nrole: node\n', problems: ['2:1 starts a second document'] },
  { name: 'tabs', text: 'device:\n\t- 1\n', problems: ['2:1 YAML: tabs are not allowed'] },
  {
    name: 'an open brace',
    text: 'device: {name: a',
    problems: ['1:17 YAML: a bracket before this is not closed: `}` is missing'],
  },
  {
    name: 'an open bracket, and what follows from it',
    text: `services:
  - name: web
    backends: [{ address: 10.2.0.11, port: 8080 }
  - name: api
    address: 10.96.0.11
    port: 80
`,
    problems: ['4:3 YAML: a bracket before this is not closed: `]` is missing'],
  },
  {
    name: 'a line too far to the left, and what follows from it',
    text: 'services:\n  - name: web\n    address: 10.96.0.10\n   port: 80\n    backends: []\n',
    problems: ['4:1 YAML: this line is indented neither'],
  },
  {
    name: 'another one',
    text: 'services:\n  - name: web\n  address: 10.96.0.10\n    port: 80\n    backends: []\n',
    problems: ['3:1 YAML: this line is not indented as those before it'],
  },
  {
    name: 'a line too far to the right',
    text: 'services:\n  - name: web\n    address: 10.96.0.10\n      port: 80\n    backends: []\n',
    problems: ['3:14 YAML: no map may begin here: is the next line indented too far'],
  },
  {
    name: 'two of them, in sections of their own',
    text: 'device: { mtu: 1500\nservices:\n  - name: web\n    address: 10.96.0.10\n      port: 80\nsnat: { ports: 1-2\nseed: x\n',
    problems: [
      '2:1 YAML: a bracket before this is not closed: `}` is missing',
      '4:14 YAML: no map may begin here',
      '7:1 YAML: a bracket before this is not closed: `}` is missing',
    ],
  },
  {
    name: 'what is wrong with a value, beside them',
    text: 'device: { mtu: 1500\nseed: !secret abc\nrole: "gate\\way"\n',
    problems: ['2:1 YAML: a bracket before', '2:7 YAML: unresolved tag', '3:'],
  },
  { name: 'an open quote', text: 'seed: "abc', problems: ['1:11 YAML: missing closing "quote'] },
  { name: 'an unknown tag', text: 'seed: !secret abc', problems: ['1:7 YAML: unresolved tag: !secret'] },
  {
    name: 'duplicate keys, beside other mistakes',
    text: 'role: gateway\nrole: node\nseed: 5\nrole: node\n',
    problems: ['2:1 role: is given again', '3:7 seed: must be text; put it in quotes: "5"', '4:1 role: is given again'],
  },
  { name: 'a key that is a list', text: '? [a]\n: 1\n', problems: ['1:1 has a key that is not plain text'] },
  {
    name: 'a self-referring alias',
    text: 'services: &a [*a]',
    problems: ['1:15 services[0]: is an alias of `&a`, which it is part of'],
  },
  {
    name: 'an undefined alias',
    text: 'seed: *s',
    problems: ['1:7 seed: is an alias of `&s`, which is not defined before it'],
  },
  { name: 'an empty value', text: 'device:\nseed: a', problems: ['1:8 device: is empty'] },
  { name: 'Windows line ends', text: 'role: gateway\r\nseed: 5\r\n', problems: ['2:7 seed: must be text'] },

  // Keys.
  {
    name: 'an unknown key',
    text: 'colour: red',
    problems: ['1:1 colour: is not a known key; here are known: role, device'],
  },
  {
    name: 'a slip',
    text: 'maglev:\n  tablSize: 251\n',
    problems: ['2:3 maglev.tablSize: is not a known key; did you mean `tableSize`?'],
  },
  {
    name: 'a known key elsewhere',
    text: 'tableSize: 251',
    problems: ['1:1 tableSize: is not a known key here; it belongs under `maglev`'],
  },
  {
    name: 'a key with a space',
    text: '"a b": 1',
    problems: ['1:1 ["a b"]: is not a known key'],
  },
  {
    name: 'names of Object',
    text: '__proto__: {}\nconstructor: 1\n',
    problems: ['1:1 __proto__: is not', '2:1 constructor: is not'],
  },
  {
    name: 'another tool’s spelling',
    text: service('    drain-timeout: 5m\n    no_backend: drop\n    backends: []\n'),
    problems: [
      '5:5 services[0].drain-timeout: is not a known key; did you mean `drainTimeout`?',
      '6:5 services[0].no_backend: is not a known key; did you mean `noBackend`?',
    ],
  },
  {
    name: 'keys of a later version',
    text: service('    retries: 9\n    backends: []\n'),
    problems: ['5:5 services[0].retries: is not a known key'],
  },

  // Values.
  {
    name: 'a role',
    text: 'role: gatway',
    problems: ['1:7 role: must be gateway or node (got "gatway"; did you mean gateway?)'],
  },
  {
    name: 'the device',
    text: 'device:\n  name: "a/b"\n  mtu: 575\n  engine: uring\n  offload: 1\n',
    problems: [
      '2:9 device.name: must not contain spaces, slashes',
      '3:8 device.mtu: must be a whole number from 576 to 65535 (got 575)',
      '4:11 device.engine: must be auto, io_uring or readwrite (got "uring")',
      '5:12 device.offload: must be true or false, not 1',
    ],
  },
  {
    name: 'a long device name',
    text: 'device: {name: weir-0123456789a}',
    problems: ['1:16 device.name: must be at most 15 bytes'],
  },
  {
    name: 'the network',
    text: 'network:\n  table: 254\n  returnPath: all\n  untracked: Drop\n',
    problems: [
      '2:10 network.table: must not be 253, 254 or 255',
      '3:15 network.returnPath: must be auto or interface (got "all")',
      '4:14 network.untracked: must be pass or drop (got "Drop"; did you mean drop?)',
    ],
  },
  {
    name: 'routing table 0',
    text: 'network: {table: 0}',
    problems: ['1:18 network.table: must be a whole number from 1 to 4294967295'],
  },
  {
    name: 'a table size',
    text: 'maglev: {tableSize: 1000}',
    problems: ['1:21 maglev.tableSize: must be 251, 509, 1021'],
  },
  {
    name: 'conntrack',
    text: 'conntrack:\n  tcpEntries: 0\n  anyEntries: 16777217\n  stateFile: conntrack\n  gc: {interval: 300}\n  recovery: 60\n',
    problems: [
      '2:15 conntrack.tcpEntries: must be a whole number from 1',
      '3:15 conntrack.anyEntries: must be a whole number from 1 to 8388607',
      '4:14 conntrack.stateFile: must be the absolute path of a file',
      '5:18 conntrack.gc.interval: must have a unit: 300s',
      '6:13 conntrack.recovery: must have a unit: 60s, 60ms, 60m or 60h',
    ],
  },
  {
    name: 'durations',
    text: 'conntrack:\n  timeouts:\n    tcp: 0s\n    tcpSyn: 60 s\n    tcpFin: "10"\n    any: 1d\n    serviceTcp: 8761h\n    serviceAny: -5s\n    serviceTcpGrace: 1s1m\n',
    problems: [
      '3:10 conntrack.timeouts.tcp: must be longer than 0',
      '4:13 conntrack.timeouts.tcpSyn: must be a duration',
      '5:13 conntrack.timeouts.tcpFin: must have a unit: 10s',
      '6:10 conntrack.timeouts.any: must be a duration',
      '7:17 conntrack.timeouts.serviceTcp: must be at most 8760h',
      '8:17 conntrack.timeouts.serviceAny: must be a duration',
      '9:22 conntrack.timeouts.serviceTcpGrace: must be a duration',
    ],
  },
  {
    name: 'the snat pool',
    text: 'snat:\n  addresses: [10.0.0.1, 10.0.0.1, 224.0.0.1]\n  ports: 2000-1000\n',
    problems: [
      '2:25 snat.addresses[1]: is already snat.addresses[0]',
      '2:35 snat.addresses[2]: is a multicast address',
      '3:10 snat.ports: must have its lower end first: 1000-2000',
    ],
  },
  { name: 'one port', text: 'snat: {ports: 40000}', problems: ['1:15 snat.ports: must be a range of ports such as'] },
  {
    name: 'ports beyond the last',
    text: 'snat: {ports: 1-65536}',
    problems: ['1:15 snat.ports: must stay within the ports 1 to 65535'],
  },
  {
    name: 'the tunnel',
    text: 'tunnel:\n  address: fe80::1\n  port: 0\n  vni: 16777216\n  inner: ipv4\n  option: never\n  clampMss: "no"\n  peers: [192.0.2.1, 10.0.0.1/8, fe80::1, 127.0.0.1, "10.0.0.0/"]\n',
    problems: [
      '2:12 tunnel.address: is an IPv6 address; weir balances IPv4 only, IPv6 is not supported yet',
      '3:9 tunnel.port: must be a whole number from 1 to 65535',
      '4:8 tunnel.vni: must be a whole number from 0 to 16777215',
      '5:10 tunnel.inner: must be ethernet or ip (got "ipv4"',
      '6:11 tunnel.option: must be always or syn',
      '7:13 tunnel.clampMss: must be true or false, not the text "no"',
      '8:22 tunnel.peers[1]: has address bits beyond its prefix; write 10.0.0.0/8',
      '8:34 tunnel.peers[2]: is an IPv6 address; weir balances IPv4 only, IPv6 is not supported yet',
      '8:43 tunnel.peers[3]: is a loopback address',
      '8:54 tunnel.peers[4]: must have a prefix length from 0 to 32',
    ],
  },
  {
    name: 'the admin listeners',
    text: 'admin:\n  socket: weir.sock\n  listen: 9650\n',
    problems: [
      '2:11 admin.socket: must be the absolute path',
      '3:11 admin.listen: must be text; put it in quotes: "9650"',
    ],
  },
  {
    name: 'a listener without address',
    text: 'admin: {listen: ":9650"}',
    problems: ['1:17 admin.listen: must be address:port'],
  },
  {
    name: 'a listener on a name',
    text: 'admin: {listen: "localhost:80"}',
    problems: ['1:17 admin.listen: must be address:port'],
  },
  {
    name: 'a listener on port 65536',
    text: 'admin: {listen: "127.0.0.1:65536"}',
    problems: ['1:17 admin.listen: must have a port from 1 to 65535'],
  },
  {
    name: 'state file and socket',
    text: 'conntrack: {stateFile: /run/w}\nadmin: {socket: /run/w}\n',
    problems: ['1:24 conntrack.stateFile: is also `admin.socket`'],
  },

  // Services.
  {
    name: 'a service that is a number',
    text: 'services: [5]',
    problems: ['1:12 services[0]: must be a map of keys and values, not 5'],
  },
  { name: 'services that are a map', text: 'services: {}', problems: ['1:11 services: must be a list, not a map'] },
  {
    name: 'a service without anything',
    text: 'services:\n  - {}\n',
    problems: ['name', 'address', 'port', 'backends'].map((key) => `2:5 services[0].${key}: is missing`),
  },
  {
    name: 'enumerations of a service',
    text: service(
      '    protocol: sctp\n    algorithm: rr\n    mode: nat\n    noBackend: ignore\n    onRemove: cut\n    icmpEcho: yes\n    backends: []\n',
    ),
    problems: [
      '5:15 services[0].protocol: must be tcp or udp (got "sctp"',
      '6:16 services[0].algorithm: must be random or maglev (got "rr")',
      '7:11 services[0].mode: must be dnat, snat or dsr (got "nat"; did you mean dnat?)',
      '8:16 services[0].noBackend: must be reject or drop',
      '9:15 services[0].onRemove: must be keep or reset',
      '10:15 services[0].icmpEcho: must be true or false, not the text "yes"',
    ],
  },
  {
    name: 'a name with a slash',
    text: 'services:\n  - { name: a/b, address: 10.0.0.1, port: 1, backends: [] }\n',
    problems: ['2:13 services[0].name: must not contain spaces or slashes'],
  },
  {
    name: 'sourceRanges',
    text: service('    sourceRanges: [10.0.0.1/8, 10.0.0.0, "::/0", 10.0.0.0/08, 10.0.0.0/33, 5]\n    backends: []\n'),
    problems: [
      '5:20 services[0].sourceRanges[0]: has address bits beyond its prefix; write 10.0.0.0/8',
      '5:32 services[0].sourceRanges[1]: must have a prefix length; write 10.0.0.0/32',
      '5:42 services[0].sourceRanges[2]: is an IPv6 range',
      '5:50 services[0].sourceRanges[3]: must have a prefix length from 0 to 32',
      '5:63 services[0].sourceRanges[4]: must have a prefix length from 0 to 32',
      '5:76 services[0].sourceRanges[5]: must be a range such as',
    ],
  },
  {
    name: 'limits',
    text: service(
      '    maxConnections: 0\n    newConnectionsPerSecond: 1.5\n    backends: [{ address: 10.2.0.1, port: 1, maxConnections: -1, newConnectionsPerSecond: 1 }]\n',
    ),
    problems: [
      '5:21 services[0].maxConnections: must be a whole number from 1 to 8388607 (got 0)',
      '6:30 services[0].newConnectionsPerSecond: must be a whole number from 1 to 1000000 (got 1.5)',
      '7:62 services[0].backends[0].maxConnections: must be a whole number from 1 to 8388607 (got -1)',
      '7:66 services[0].backends[0].newConnectionsPerSecond: is not a known key here; it belongs under `services[]`',
    ],
  },
  {
    name: 'affinity as a duration',
    text: service('    affinity: 3h\n    backends: []\n'),
    problems: ['5:15 services[0].affinity: must be a map of keys and values, not the text "3h"'],
  },
  {
    name: 'health of no type',
    text: service(`    health: { interval: 2s }\n${NO_BACKENDS}`),
    problems: ['5:13 services[0].health.type: is missing'],
  },
  {
    name: 'health of an unknown type',
    text: service(`    health: { type: tpc }\n${NO_BACKENDS}`),
    problems: ['5:21 services[0].health.type: must be tcp, http or icmp (got "tpc"; did you mean tcp?)'],
  },
  {
    name: 'health keys of another type, and bad ones',
    text: service(`    health: { type: icmp, path: /x, rise: 0, timeout: 25h }\n${NO_BACKENDS}`),
    problems: [
      '5:27 services[0].health.path: is not a key of type icmp',
      '5:43 services[0].health.rise: must be a whole number from 1',
      '5:55 services[0].health.timeout: must be at most 24h',
    ],
  },
  {
    name: 'what else health can get wrong',
    text: service(`    allDown: maybe\n    health: { type: http, host: a/b, body: "" }\n${NO_BACKENDS}`),
    problems: [
      '5:14 services[0].allDown: must be reject or use-all (got "maybe")',
      '6:33 services[0].health.host: must be a host name, without spaces and slashes',
      '6:44 services[0].health.body: must have 1 to 1024 characters',
    ],
  },
  {
    name: 'a port where there is none',
    text: service(`    health: { type: icmp, port: 80 }\n${NO_BACKENDS}`),
    problems: ['5:27 services[0].health.port: is not a key of type icmp'],
  },
  {
    name: 'health over http',
    text: service(`    health: { type: http, path: x, status: 1000, port: 0 }\n${NO_BACKENDS}`),
    problems: [
      '5:33 services[0].health.path: must be a URL path that starts with /',
      '5:44 services[0].health.status: must be a whole number from 100 to 599',
      '5:56 services[0].health.port: must be a whole number from 1',
    ],
  },

  // Backends.
  ...['010.0.0.1', '1.2.3', '1.2.3.4/32', '0x0a000001', '10.0.0.256', '10.0.0.1.', '１0.0.0.1', 'localhost'].map(
    (bad) => ({
      name: `the address ${bad}`,
      text: service(`    backends:\n      - { address: "${bad}", port: 80 }\n`),
      problems: [`6:20 services[0].backends[0].address: ${ADDRESS}`],
    }),
  ),
  ...[
    ['0.0.0.0', 'is in the unspecified block 0.0.0.0/8'],
    ['0.1.2.3', 'is in the unspecified block 0.0.0.0/8'],
    ['127.0.0.1', 'is a loopback address'],
    ['239.1.1.1', 'is a multicast address'],
    ['240.0.0.1', 'is in the reserved block'],
    ['255.255.255.255', 'is the broadcast address'],
    ['::ffff:10.0.0.1', 'is an IPv6 address'],
  ].map(([bad, message]) => ({
    name: `the address ${bad}`,
    text: service(`    backends:\n      - { address: "${bad}", port: 80 }\n`),
    problems: [`6:20 services[0].backends[0].address: ${message}`],
  })),
  ...['-1', '65536', '1.5', '"1"', '.nan', '[1]', 'true'].map((bad) => ({
    name: `the weight ${bad}`,
    text: service(`    backends:\n      - { address: 10.2.0.1, port: 80, weight: ${bad} }\n`),
    problems: ['6:48 services[0].backends[0].weight: must be a whole number from 0 to 65535 (got '],
  })),
  {
    name: 'several mistakes in several backends, in the order of the file',
    text: service(
      '    weight: 1\n    backends:\n      - {}\n      - address: 10.2.0.1\n        port: 70000\n        wieght: 1\n',
    ),
    problems: [
      '5:5 services[0].weight: is not a known key here; it belongs under `services[].backends[]`',
      '7:9 services[0].backends[0].address: is missing',
      '7:9 services[0].backends[0].port: is missing',
      '9:15 services[0].backends[1].port: must be a whole number from 1 to 65535 (got 70000)',
      '10:9 services[0].backends[1].wieght: is not a known key; did you mean `weight`?',
    ],
  },
  {
    name: 'the same alias twice, wrong where it is defined',
    text: `services:
  - { name: a, address: 10.0.0.1, port: 1, health: &h { type: tcp, rise: 0 }, backends: [] }
  - { name: b, address: 10.0.0.2, port: 1, health: *h, backends: [] }
`,
    problems: [
      '2:74 services[0].health.rise: must be a whole number',
      '2:74 services[1].health.rise: must be a whole number',
    ],
  },
];

t.test('every mistake has its position, its path and advice', async (t) => {
  for (const { name, text, problems } of ROWS) {
    const found = problemsOf(text);
    t.equal(found.length, problems.length, `${name}: ${JSON.stringify(found)}`);
    problems.forEach((wanted, i) => {
      t.ok(found[i]?.startsWith(wanted), `${name}: ${wanted}`, { found: found[i] });
    });
  }
});

t.test('hostile text is refused in bounded time, and nothing throws', async (t) => {
  const bomb = [
    'a: &a [1,1,1,1,1,1,1,1,1]',
    ...'bcdefghi'.split('').map((name, i) => `${name}: &${name} [${`*${'abcdefgh'[i]},`.repeat(9).slice(0, -1)}]`),
  ];
  t.match(problemsOf(bomb.join('\n')).join('\n'), /expands to too much/);
  t.match(problemsOf('['.repeat(50_000)), [/nested too deeply/]);
  t.match(problemsOf(`seed: ${'['.repeat(40)}${']'.repeat(40)}`).join('\n'), /nested too deeply/);
  fc.assert(
    fc.property(fc.string({ unit: fc.constantFrom(...'ab:-{}[],*&!|>\'"%@`# \n\t?0') }), (text) => {
      const { config, problems } = parseConfig(text);
      return (config === null) === problems.length > 0;
    }),
    { numRuns: 600 },
  );
});

t.test('any value anywhere is judged without an exception, and with a position inside the text', async (t) => {
  const example = parseConfig(readFileSync('conf/weir.yaml', 'utf8')).config;
  t.ok(example);
  const paths = [
    ['role'],
    ['device'],
    ['device', 'mtu'],
    ['network', 'table'],
    ['conntrack', 'timeouts'],
    ['conntrack', 'gc', 'interval'],
    ['snat', 'addresses'],
    ['tunnel', 'address'],
    ['services'],
    ['services', '0'],
    ['services', '0', 'address'],
    ['services', '0', 'health'],
    ['services', '0', 'affinity'],
    ['services', '0', 'sourceRanges'],
    ['services', '0', 'backends'],
    ['services', '0', 'backends', '0'],
  ];
  fc.assert(
    fc.property(fc.constantFrom(...paths), fc.jsonValue({ maxDepth: 2 }), (path, value) => {
      const written: Record<string, unknown> = {
        device: { mtu: 1500 },
        network: { table: 5 },
        conntrack: { timeouts: { tcp: '1s' }, gc: { interval: 'auto' } },
        snat: { addresses: ['10.0.0.1'] },
        tunnel: { address: '192.0.2.1' },
        services: [
          {
            name: 'a',
            address: '10.1.0.1',
            port: 1,
            health: { type: 'tcp' },
            backends: [{ address: '10.2.0.1', port: 1 }],
          },
        ],
      };
      let parent = written;
      for (const step of path.slice(0, -1)) parent = parent[step] as Record<string, unknown>;
      parent[path.at(-1)!] = value;
      const text = JSON.stringify(written, null, 1);
      const lines = text.split('\n');
      for (const { line, column } of parseConfig(text).problems) {
        if (line < 1 || line > lines.length || column < 1 || column > lines[line - 1]!.length + 1) return false;
      }
      return true;
    }),
    { numRuns: 200 },
  );
});

t.test('files', async (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'weir-config-'));
  t.teardown(() => rmSync(folder, { recursive: true }));
  const good = join(folder, 'good.yaml');
  const bad = join(folder, 'bad.yaml');
  writeFileSync(good, 'services: []\n');
  writeFileSync(bad, 'role: x\nseed: 1\n');
  t.same(loadConfig(good).config?.services, []);
  t.equal(requireConfig(good).role, 'gateway');
  try {
    requireConfig(bad);
    t.fail('a bad file was accepted');
  } catch (error) {
    t.ok(error instanceof WeirError);
    t.match(error, { code: 'CONFIG_INVALID', message: `${bad}:1:7 role: must be gateway or node` });
    t.equal((error as Error).message.split('\n').length, 2);
  }
  t.throws(() => loadConfig(join(folder, 'none.yaml')), { code: 'CONFIG_UNREADABLE', message: /it does not exist/ });
  t.throws(() => loadConfig(folder), { code: 'CONFIG_UNREADABLE' });
});

t.test('thousands of services are read in seconds, right or wrong', async (t) => {
  let text = 'services:\n';
  for (let i = 0; i < 3000; i++) {
    text += `  - { name: s${i}, address: 10.100.${i >> 8}.${i & 255}, port: 80, backends: [{ address: 10.2.0.1, port: 80 }] }\n`;
  }
  const startMs = performance.now();
  t.equal(parseConfig(text).config?.services.length, 3000);
  t.equal(parseConfig(text.replaceAll('port: 80,', 'port: x,')).problems.length, 3000);
  t.ok(performance.now() - startMs < 20_000, `${Math.round(performance.now() - startMs)} ms for both`);
});
