import { createHash } from 'node:crypto';
import fc from 'fast-check';
import t from 'tap';
import { chain, lot } from '../../lib/bridge/chances.js';
import { toIptables } from '../../lib/bridge/iptables.js';
import { kernelView, shortHash } from '../../lib/bridge/kernel-view.js';
import { toNft } from '../../lib/bridge/nft.js';
import { parseConfig } from '../../lib/config/load.js';

const B = (n: number): string =>
  Array.from({ length: n }, (_, i) => `{ name: b${i + 1}, address: 10.2.0.${11 + i}, port: 8080 }`).join(', ');

function view(...services: string[]) {
  const { config, problems } = parseConfig(`snat: { addresses: [10.96.255.1] }\nservices:\n${services.join('\n')}\n`);
  t.strictSame(problems, []);
  return kernelView(config!);
}

const rulesWith = (text: string, part: string): string[] => text.split('\n').filter((line) => line.includes(part));

t.test('equal weights: 1/n, 1/(n-1), ..., 1/2, and no condition', async (t) => {
  t.strictSame(chain([1]), []);
  t.strictSame(chain([1, 1]), ['0.5000000000']);
  t.strictSame(chain([9, 9, 9]), ['0.3333333333', '0.5000000000']);
  t.strictSame(chain(new Array(7).fill(1)), [
    '0.1428571429',
    '0.1666666667',
    '0.2000000000',
    '0.2500000000',
    '0.3333333333',
    '0.5000000000',
  ]);
  t.strictSame(chain([1, 2, 5]), ['0.1250000000', '0.2857142857']);
});

t.test('the chain multiplies out to the weights, and so do the tickets', async (t) => {
  const weights = fc.array(fc.integer({ min: 1, max: 65535 }), { minLength: 1, maxLength: 40 });
  fc.assert(
    fc.property(weights, (weights) => {
      const total = weights.reduce((sum, weight) => sum + weight, 0);
      let left = 1;
      const shares = [...chain(weights).map(Number), 1].map((chance) => {
        const share = left * chance;
        left -= share;
        return share;
      });
      const drawn = lot(weights);
      return (
        shares.every((share, i) => Math.abs(share - weights[i]! / total) < 1e-9) &&
        drawn.tickets.every(({ first, last }, i) => (last - first + 1) * total === weights[i]! * drawn.total) &&
        drawn.tickets.every(({ first }, i) => first === (i === 0 ? 0 : drawn.tickets[i - 1]!.last + 1)) &&
        drawn.tickets.at(-1)!.last === drawn.total - 1
      );
    }),
  );
  t.strictSame(lot([4, 8, 4]), {
    total: 4,
    tickets: [
      { first: 0, last: 0 },
      { first: 1, last: 2 },
      { first: 3, last: 3 },
    ],
  });
});

t.test('names are those that kube-proxy would give: base32 of SHA-256, 16 letters', async (t) => {
  const alphabet = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ234567';
  for (const text of ['', 'a', '10.96.0.10:80/tcp', 'ns/name:port']) {
    const bits = [...createHash('sha256').update(text).digest()]
      .map((byte) => byte.toString(2).padStart(8, '0'))
      .join('');
    const letters = Array.from({ length: 16 }, (_, i) => alphabet[Number.parseInt(bits.slice(i * 5, i * 5 + 5), 2)]);
    t.equal(shortHash(text), letters.join(''));
  }
});

t.test('iptables: names, chains, marks', async (t) => {
  const { services } = view(
    `  - { name: web, address: 10.96.0.10, port: 80, mode: snat, affinity: { clientIp: 3h }, backends: [${B(3)}] }`,
    `  - { name: 'q"é', address: 10.96.0.11, port: 53, protocol: udp, backends: [${B(2)}, { name: gone, address: 10.2.0.99, port: 1, weight: 0 }] }`,
    '  - { name: none, address: 10.96.0.12, port: 80, sourceRanges: [10.0.0.0/8], backends: [] }',
  );
  const text = toIptables(services);
  const [web, other] = services as [(typeof services)[0], (typeof services)[0]];
  const chains = [...text.matchAll(/^:(\S+) - \[0:0\]$/gm)].map((match) => match[1]!);
  t.ok(chains.every((name) => name.length <= 28));
  t.strictSame(
    [...new Set([...text.matchAll(/-j (WEIR-\S+)/g)].map((match) => match[1]!))].filter(
      (name) => !chains.includes(name),
    ),
    [],
    'every chain that is jumped to is declared',
  );
  t.strictSame(
    rulesWith(text, '--probability').map((line) => line.replace(/^.*-m comment --comment "/, '').replace(/-j.*/, '')),
    [
      'web -> b1" -m statistic --mode random --probability 0.3333333333 ',
      'web -> b2" -m statistic --mode random --probability 0.5000000000 ',
      'q__ -> b1" -m statistic --mode random --probability 0.5000000000 ',
    ],
  );
  const lotRules = rulesWith(text, `-A WEIR-SVC-${web.hash} `);
  t.match(lotRules[0], /-j WEIR-MARK-MASQ$/, 'snat is marked first');
  t.equal(rulesWith(text, '--rcheck --seconds 10800 --reap').length, 3);
  t.match(lotRules.at(-1), new RegExp(`-m comment --comment "web -> b3" -j WEIR-SEP-${web.backends[2]!.hash}$`));
  t.equal(rulesWith(text, ': hairpin"').length, 5);
  t.notMatch(text, '10.2.0.99', 'weight 0 is left out');
  t.match(
    text,
    `-A WEIR-SEP-${other.backends[0]!.hash} -p udp -m comment --comment "q__/b1" -m udp -j DNAT --to-destination 10.2.0.11:8080\n`,
  );
  t.match(
    text,
    '-s 10.0.0.0/8 -d 10.96.0.12/32 -p tcp -m tcp --dport 80 -m comment --comment "none: no backend" -j REJECT --reject-with tcp-reset',
  );
  t.equal(
    toIptables(view('  - { name: x, address: 10.96.0.12, port: 80, backends: [] }').services).split('COMMIT').length,
    3,
  );
});

t.test('nft: one table, replaced whole', async (t) => {
  const { services } = view(
    `  - { name: web, address: 10.96.0.10, port: 80, affinity: { clientIp: 1500ms }, sourceRanges: [10.1.0.0/16, 10.0.0.0/8], backends: [${B(2)}] }`,
    '  - { name: w, address: 10.96.0.10, port: 81, backends: [{ address: 10.2.0.1, port: 1, weight: 3 }, { address: 10.2.0.2, port: 1, weight: 6 }] }',
    `  - { name: one, address: 10.96.0.10, port: 82, backends: [${B(1)}] }`,
  );
  const text = toNft(services);
  t.match(text, /\nadd table ip weir\ndelete table ip weir\ntable ip weir \{\n/);
  t.match(
    text,
    `numgen random mod 3 vmap {\n\t\t\t0 : goto backend-${services[1]!.backends[0]!.hash},\n\t\t\t1-2 : goto`,
  );
  t.match(text, '\t\t\t10.0.0.0-10.255.255.255,\n', 'ranges are merged');
  t.match(text, 'timeout 2s\n');
  t.match(text, `chain service-${services[2]!.hash} {\n\t\t# one 10.96.0.10:82/tcp, dnat\n\t\tgoto backend-`);
  t.match(text, `10.96.0.10 . tcp . 80 : goto service-${services[0]!.hash},`);
  t.equal(
    [...text.matchAll(/[{}]/g)].filter(([brace]) => brace === '{').length * 2,
    [...text.matchAll(/[{}]/g)].length,
  );
});

t.test('names of chains are made of identities: order, names and weights change none', async (t) => {
  const hashes = (...services: string[]): string[] =>
    view(...services)
      .services.flatMap(({ hash, backends }) => [hash, ...backends.map((backend) => backend.hash)])
      .sort();
  const one = `  - { name: a, address: 10.96.0.10, port: 80, backends: [${B(2)}] }`;
  const two = `  - { name: b, address: 10.96.0.11, port: 80, backends: [${B(2)}] }`;
  t.strictSame(
    hashes(one, two),
    hashes(two.replace('name: b', 'name: z'), one.replace('port: 8080 }', 'port: 8080, weight: 7 }')),
  );
  t.equal(new Set(hashes(one, two)).size, 6, 'a backend of two services has two');
});

t.test('what rules cannot say is refused, each in its place; what they lose is warned of', async (t) => {
  const dsr = `tunnel: { address: 192.0.2.1 }
services:
  - { name: a, address: 10.96.0.10, port: 80, mode: dsr, health: { type: tcp }, backends: [{ address: 10.2.0.1, port: 80, maxConnections: 3 }] }
  - { name: b, address: 10.96.0.11, port: 80, maxConnections: 3, newConnectionsPerSecond: 9, backends: [] }
`;
  const paths = (faults: readonly { path: readonly PropertyKey[] }[]): string[] =>
    faults.map(({ path }) => path.join('.'));
  t.strictSame(paths(kernelView(parseConfig(dsr).config!).refusals), [
    'services.0.mode',
    'services.0.health',
    'services.0.backends.0.maxConnections',
    'services.1.maxConnections',
    'services.1.newConnectionsPerSecond',
  ]);
  t.strictSame(paths(kernelView(parseConfig('role: node\ntunnel: { address: 192.0.2.1 }').config!).refusals), ['role']);
  const { losses, refusals } = view(
    ...Array.from(
      { length: 7 },
      (_, i) => `  - { name: s${i}, address: 10.96.1.${i + 1}, port: 80, icmpEcho: false, backends: [] }`,
    ),
    '  - { name: r, address: 10.96.0.10, port: 80, algorithm: random, mode: snat, icmpEcho: false, onRemove: reset, drainTimeout: 1m, affinity: { clientIp: 1ms }, backends: [] }',
  );
  t.strictSame(refusals, []);
  t.strictSame(paths(losses), [
    'services.0.algorithm',
    'services.7.mode',
    'services.7.affinity',
    'services.7.onRemove',
    'services.7.drainTimeout',
  ]);
  t.match(losses[0]!.message, '(s0, s1, s2, s3, s4 and 2 more)');
});
