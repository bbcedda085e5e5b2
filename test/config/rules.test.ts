import { readFileSync } from 'node:fs';
import t from 'tap';
import { formatProblem, parseConfig } from '../../lib/config/load.js';

interface ServiceRow {
  readonly name?: string;
  readonly address?: string;
  readonly backends?: readonly object[];
  readonly [key: string]: unknown;
}

/** A file in which each service and each backend has a line of its own: services begin on line `top + 2`. */
function problemsOf(top: string, services: readonly ServiceRow[]): string[] {
  let text = `${top}services:${services.length === 0 ? ' []' : ''}\n`;
  services.forEach(({ backends = [], ...rest }, i) => {
    text += ` - ${JSON.stringify({ name: `s${i}`, address: `10.96.0.${i + 1}`, port: 80, ...rest }).slice(0, -1)}, "backends": [\n`;
    text += `${backends.map((backend) => `   ${JSON.stringify({ port: 80, ...backend })},\n`).join('')}   ]}\n`;
  });
  return parseConfig(text).problems.map((problem) => formatProblem('', problem).replace(/^:(\d+):\d+/, '$1'));
}

const SNAT = 'snat: {addresses: [10.255.0.1]}\n';
const TUNNEL = 'tunnel: {address: 192.0.2.1}\n';

t.test('names and identities are unique', async (t) => {
  t.same(problemsOf('', [{ name: 'a' }, { name: 'b' }, { name: 'a' }]), [
    '6 services[2].name: is already the name of services[0]',
  ]);
  t.same(problemsOf('', [{ address: '10.0.0.1' }, { address: '10.0.0.1' }]), [
    '4 services[1].address: makes 10.0.0.1:80/tcp, which is already services[0]',
  ]);
  t.same(
    problemsOf('', [
      { address: '10.0.0.1' },
      { address: '10.0.0.1', protocol: 'udp' },
      { address: '10.0.0.1', port: 81 },
    ]),
    [],
  );
  const twins = [{ address: '10.2.0.1' }, { address: '10.2.0.2' }, { address: '10.2.0.1' }];
  t.same(problemsOf('', [{ backends: twins }]), [
    '5 services[0].backends[2].address: makes 10.2.0.1:80, which is already backends[0]',
  ]);
  t.same(problemsOf('', [{ backends: [...twins.slice(0, 2), { address: '10.2.0.1', port: 81 }] }]), []);
  t.same(problemsOf('', [{ backends: twins.slice(0, 2) }, { backends: twins.slice(0, 2) }]), [], 'of two services');
  t.same(
    problemsOf('', [
      {
        backends: [
          { name: 'x', address: '10.2.0.1' },
          { name: 'x', address: '10.2.0.2' },
        ],
      },
    ]),
    ['4 services[0].backends[1].name: is already the name of backends[0]'],
  );
  t.same(
    problemsOf('', [{ backends: [{ name: '10.2.0.2:80', address: '10.2.0.1' }, { address: '10.2.0.2' }] }]),
    ['4 services[0].backends[1].name: is already the name of backends[0]'],
    'a name given and a default one',
  );
});

t.test('a mode has what it needs', async (t) => {
  t.same(problemsOf('', [{ mode: 'snat' }]), [
    '2 services[0].mode: needs `snat.addresses`, the source addresses that backends see',
  ]);
  t.same(problemsOf('snat: {addresses: []}\n', [{ mode: 'snat' }]).length, 1);
  t.same(problemsOf(SNAT, [{ mode: 'snat' }]), []);
  t.same(problemsOf('', [{ mode: 'dsr' }]), [
    '2 services[0].mode: needs `tunnel.address`, this host’s end of the tunnel',
  ]);
  t.same(problemsOf(TUNNEL, [{ mode: 'dsr' }]), []);
  t.match(problemsOf('role: node\n', []), ['1 role: needs `tunnel.address`']);
  t.same(problemsOf(`role: node\n${TUNNEL}`, []), []);
  t.equal(parseConfig('role: node\ntunnel: {address: 192.0.2.1}\n').problems.length, 0, 'services are optional');

  const withNode = [{ address: '10.2.0.1', node: '10.9.0.1' }];
  t.match(problemsOf('', [{ backends: withNode }]), ['3 services[0].backends[0].node: is for services of mode dsr']);
  t.same(
    problemsOf('', [{ backends: [{ address: '10.2.0.1', node: '10.2.0.1' }] }]),
    [],
    'its own address says nothing',
  );
  t.same(problemsOf(TUNNEL, [{ mode: 'dsr', backends: withNode }]), []);

  const many = Array.from({ length: 252 }, (_, i) => ({ address: `10.2.0.${i + 1}` }));
  t.match(problemsOf('maglev: {tableSize: 251}\n', [{ backends: many }]), [
    /services\[0\].backends: are 252, more than `maglev.tableSize`/,
  ]);
  t.same(problemsOf('maglev: {tableSize: 251}\n', [{ backends: many, algorithm: 'random' }]), []);
});

t.test('an address has one role', async (t) => {
  const backend = (address: string, node?: string) => [{ address, ...(node === undefined ? {} : { node }) }];
  t.same(problemsOf('', [{ backends: backend('10.96.0.2') }, {}]), [
    '3 services[0].backends[0].address: is also the VIP of services[1]',
  ]);
  t.same(problemsOf(SNAT, [{ address: '10.255.0.1' }]), ['1 snat.addresses[0]: is also the VIP of services[0]']);
  t.same(problemsOf(TUNNEL, [{ address: '192.0.2.1' }]), ['1 tunnel.address: is also the VIP of services[0]']);
  t.same(problemsOf(SNAT, [{ backends: backend('10.255.0.1') }]), [
    '4 services[0].backends[0].address: is also snat.addresses[0]',
  ]);
  t.match(problemsOf(`${TUNNEL}snat: {addresses: [192.0.2.1]}\n`, []), [
    '2 snat.addresses[0]: is also `tunnel.address`',
  ]);
  t.same(problemsOf(TUNNEL, [{ mode: 'dsr', backends: backend('10.2.0.1', '10.96.0.1') }]), [
    '4 services[0].backends[0].node: is also the VIP of services[0]',
  ]);
  t.same(problemsOf(`${TUNNEL}${SNAT}`, [{ mode: 'dsr', backends: backend('10.2.0.1', '10.255.0.1') }]), [
    '5 services[0].backends[0].node: is also snat.addresses[0]',
  ]);
  for (const own of [backend('10.2.0.1', '192.0.2.1'), backend('192.0.2.1')]) {
    t.match(problemsOf(TUNNEL, [{ mode: 'dsr', backends: own }]), [
      /is also `tunnel.address`; a gateway cannot tunnel to itself/,
    ]);
    t.same(
      problemsOf(`role: node\n${TUNNEL}`, [{ mode: 'dsr', backends: own }]),
      [],
      'a node is where its backends are',
    );
  }
  t.same(problemsOf(TUNNEL, [{ backends: backend('192.0.2.1') }]), [], 'a dnat backend on the gateway itself');
});

t.test('rules step over what the schema refuses', async (t) => {
  const found = problemsOf('', [
    { address: 'x', port: 'y', backends: [{ address: '1.2.3' }, { address: '1.2.3' }] },
    { address: 'x', port: 'y', mode: 'dnats' },
  ]);
  t.equal(found.filter((problem) => problem.includes('already')).length, 0);
  t.equal(found.length, 7, found.join('\n'));
  for (const services of ['5', '[null]', '[[]]', '{a: 1}', '[{backends: 5}]', '[{backends: [null, 5]}]']) {
    t.ok(parseConfig(`services: ${services}`).problems.length > 0, services);
  }
});

t.test('the example is right, and nothing in it is what it says is the default and is not', async (t) => {
  const { config, problems } = parseConfig(readFileSync('conf/weir.yaml', 'utf8'));
  t.same(problems, []);
  const defaults = parseConfig('{}').config!;
  t.same({ ...config!.conntrack, stateFile: null }, defaults.conntrack);
  for (const part of ['role', 'device', 'network', 'seed', 'maglev', 'admin'] as const)
    t.same(config![part], defaults[part], part);
  t.same({ ...config!.snat, addresses: [] }, defaults.snat);
  t.same({ ...config!.tunnel, address: null }, defaults.tunnel);
});
