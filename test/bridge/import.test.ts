import { mkdirSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import fc from 'fast-check';
import t from 'tap';
import { stringify } from 'yaml';
import { seededRandom } from '../../lib/base/random.js';
import { configText } from '../../lib/bridge/config-text.js';
import { type Draft, formatRemark, settle } from '../../lib/bridge/draft.js';
import { importIpvs, importManifests } from '../../lib/bridge/import.js';
import { draftOfIpvs } from '../../lib/bridge/ipvs.js';
import { draftOfManifests } from '../../lib/bridge/kubernetes.js';
import { findManifests } from '../../lib/bridge/manifest-files.js';
import { replaceFile } from '../../lib/cli/replace-file.js';
import { parseConfig } from '../../lib/config/load.js';
import { expectedServices, objectsOf, sampleService } from '../support/manifests.js';

const NOTHING = parseConfig('{}').config!;

function kubernetes(text: string, node?: string): Draft {
  return settle(draftOfManifests([{ file: 'm.yaml', text }], node === undefined ? {} : { node }), NOTHING);
}

const said = (remarks: Draft['warnings']): string[] => remarks.map(formatRemark);

const service = (spec: string, more = ''): string => `apiVersion: v1
kind: Service
metadata: { name: web }
spec: { clusterIP: 10.96.0.10, ports: [{ port: 80 }], ${spec} }
${more}`;

const slice = (endpoints: string, ports = '[{ port: 8080 }]', more = ''): string => `---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: web-1${more}, labels: { kubernetes.io/service-name: web } }
addressType: IPv4
ports: ${ports}
endpoints: ${endpoints}
`;

const weights = ({ services }: Draft, i = 0): string[] =>
  services[i]!.backends.map(({ address, weight }) => `${address} ${weight}`);

t.test('whatever is generated becomes a valid configuration that says the same', async () => {
  const space = { addresses: ['10.2.0.1', '10.2.0.2', '10.2.0.3', '10.2.0.10'], targets: [80, 8080, 9000] };
  fc.assert(
    fc.property(fc.integer(), fc.integer({ min: 1, max: 30 }), (seed, count) => {
      const random = seededRandom(seed);
      const samples = Array.from({ length: count }, (_, i) => sampleService(random, i, space));
      const objects = samples.flatMap(objectsOf);
      const draft = kubernetes(objects.map((object) => stringify(object)).join('---\n'));
      const text = configText(draft.services, '', 'kubernetes');
      const { config, problems } = parseConfig(text);
      const shuffled = kubernetes(JSON.stringify({ kind: 'List', apiVersion: 'v1', items: [...objects].reverse() }));
      const names = [...expectedServices(samples)].sort().map(([name, { address, port, protocol, backends }]) => {
        return `${name} ${address}:${port} ${protocol} ${[...backends].sort()}`;
      });
      const made = config!.services.map(({ name, address, port, protocol, backends }) => {
        const active = backends
          .filter(({ weight }) => weight > 0)
          .map(({ address, port }) => `${address.text}:${port}`);
        return `${name} ${address.text}:${port} ${protocol} ${active.sort()}`;
      });
      return (
        problems.length === 0 &&
        draft.faults.length + draft.warnings.length === 0 &&
        configText(shuffled.services, '', 'kubernetes') === text &&
        configText(draft.services, text, 'kubernetes') === text &&
        made.sort().join() === names.sort().join()
      );
    }),
    { numRuns: 60 },
  );
});

t.test('kubernetes: who is ready, serving, terminating', async (t) => {
  const endpoint = (n: number, conditions: string): string => `{ addresses: [10.2.0.${n}], conditions: ${conditions} }`;
  const leaving = endpoint(3, '{ ready: false, serving: true, terminating: true }');
  const list = [endpoint(1, '{}'), endpoint(2, '{ ready: false }'), leaving, '{ addresses: [10.2.0.4] }'];
  t.strictSame(weights(kubernetes(service('') + slice(`[${list}]`))), [
    '10.2.0.1 1',
    '10.2.0.2 0',
    '10.2.0.3 0',
    '10.2.0.4 1',
  ]);
  const nobody = [endpoint(2, '{ ready: false }'), leaving];
  t.strictSame(
    weights(kubernetes(service('') + slice(`[${nobody}]`))),
    ['10.2.0.2 0', '10.2.0.3 1'],
    'for want of others',
  );
  const twice =
    slice(`[${endpoint(1, '{ ready: false }')}]`) +
    slice(`[${endpoint(1, '{ ready: true }')}]`, '[{ port: 8080 }]', '2');
  t.strictSame(weights(kubernetes(service('') + twice)), ['10.2.0.1 1'], 'in two slices at once');
  t.strictSame(kubernetes(service('') + slice('null', 'null')).services[0]!.backends, []);
});

t.test('kubernetes: addresses, ports, affinity, ranges', async (t) => {
  const text = service(
    'type: LoadBalancer, sessionAffinity: ClientIP, externalIPs: [203.0.113.1], loadBalancerSourceRanges: [" 10.1.2.3/8", "fd00::/8"], externalTrafficPolicy: Local, internalTrafficPolicy: Local',
    'status: { loadBalancer: { ingress: [{ ip: 198.51.100.1 }, { ip: 198.51.100.2, ipMode: Proxy }, { hostname: lb.example }] } }\n',
  );
  const endpoints = '[{ addresses: [10.2.0.1], nodeName: n1 }, { addresses: [10.2.0.2], nodeName: n2 }]';
  const all = kubernetes(text + slice(endpoints));
  t.strictSame(
    all.services.map(({ name, address, affinity, sourceRanges, backends }) => [
      name,
      address,
      affinity,
      sourceRanges,
      backends.length,
    ]),
    [
      ['default.web', '10.96.0.10', '3h', [], 2],
      ['default.web@198.51.100.1', '198.51.100.1', '3h', ['10.0.0.0/8'], 2],
      ['default.web@203.0.113.1', '203.0.113.1', '3h', [], 2],
    ],
  );
  t.match(said(all.warnings).join('\n'), /externalTrafficPolicy Local.*\n(.*\n)*.*internalTrafficPolicy Local/);
  const ofOne = kubernetes(text + slice(endpoints), 'n2');
  t.strictSame(
    ofOne.services.map((_, i) => weights(ofOne, i)),
    [['10.2.0.2 1'], ['10.2.0.2 1'], ['10.2.0.2 1']],
  );
  t.notMatch(said(ofOne.warnings).join('\n'), 'TrafficPolicy');
  const six = kubernetes(text.replace('" 10.1.2.3/8", ', '') + slice(endpoints));
  t.strictSame(
    six.services.map(({ name }) => name),
    ['default.web', 'default.web@203.0.113.1'],
    'nobody may connect: not served',
  );
});

t.test('kubernetes: what cannot be kept, each in its place', async (t) => {
  for (const [text, ...expected] of [
    [service('type: ExternalName'), 'm.yaml:4:61 Service default/web: left out: ExternalName is a name of the DNS'],
    [
      service('').replace('10.96.0.10', 'None'),
      'm.yaml:4:20 Service default/web: left out: headless: clients talk to its endpoints',
    ],
    [
      service('').replace('clusterIP: 10.96.0.10, ', ''),
      'm.yaml:4:7 Service default/web: left out: no IPv4 address; `kubectl get -o yaml` has what the cluster gave',
    ],
    [
      service('').replace('port: 80 ', 'port: 80, protocol: SCTP ') + slice('[]'),
      'm.yaml:4:40 Service default/web: port 80 is left out: SCTP is not balanced',
    ],
    [service(''), 'm.yaml:1:1 Service default/web: no EndpointSlice of it: it has no backends'],
    [slice('[]'), 'm.yaml:4:11 EndpointSlice default/web-1: its Service default/web is not there'],
    [
      slice('[]').replace(/labels.*}/, '}'),
      'm.yaml:4:11 EndpointSlice default/web-1: has no label kubernetes.io/service-name: nobody’s endpoints',
    ],
    [
      service('') + slice('[{ addresses: [127.0.0.1] }]'),
      'm.yaml:4:20 Service default/web: backend 127.0.0.1 is a loopback address, which nothing can be forwarded to: left out',
    ],
    [
      service('externalIPs: [10.2.0.1]') + slice('[{ addresses: [10.2.0.1] }]'),
      'm.yaml:4:69 Service default/web: address 10.2.0.1 is also a backend’s: not served there',
    ],
    [
      'kind: Endpoints\napiVersion: v1\n',
      'm.yaml:1:1 Endpoints: are not read: EndpointSlices are, which the cluster makes of them',
    ],
    ['kind: Pod\napiVersion: v1\n'],
    [''],
  ] as const) {
    const { warnings, faults } = kubernetes(text);
    t.strictSame([said(warnings), faults], [expected, []]);
  }
});

t.test('kubernetes: mistakes, all at once', async (t) => {
  const { faults } = kubernetes(`kind: Service
apiVersion: v1
metadata: { name: Web }
spec: { ports: [{ port: 0 }, { port: 80, protocol: ICMP, name: 'A' }], clusterIP: 5 }
---
apiVersion: discovery.k8s.io/v1beta1
kind: EndpointSlice
---
- not an object
---
${service('')}---
${service('')}`);
  t.strictSame(said(faults), [
    'm.yaml:3:19 Service default/Web: metadata.name must be a DNS label: small letters, digits and -, beginning and ending with no -',
    'm.yaml:4:25 Service default/Web: spec.ports[0].port must be at least 1 (got 0)',
    'm.yaml:4:52 Service default/Web: spec.ports[1].protocol must be TCP, UDP or SCTP (got "ICMP")',
    'm.yaml:4:64 Service default/Web: spec.ports[1].name must be a DNS label',
    'm.yaml:4:83 Service default/Web: spec.clusterIP must be text, not 5',
    'm.yaml:6:13 is discovery.k8s.io/v1beta1; EndpointSlice is read as discovery.k8s.io/v1',
    'm.yaml:9:1 is no Kubernetes object: it has no `kind`',
    'm.yaml:18:19 Service default/web: is given already, in m.yaml:13',
  ]);
  t.match(said(kubernetes('a: [').faults), [/^m\.yaml:1:5 YAML: /]);
  t.match(said(kubernetes('kind: Service\nkind: Service\n').faults), [
    'm.yaml:2:1 kind: is given again; a key may be given once',
  ]);
});

t.test('a base keeps what is not its services, comments too', async (t) => {
  const { services } = kubernetes(service('') + slice('[{ addresses: [10.2.0.1] }]'));
  const made = configText(services, '', 'kubernetes');
  const base = `# mine\nseed: abc # kept\nservices: # old\n  - { name: old, address: 10.96.0.1, port: 1, backends: [] }\n  # old, too\n\n# about admin\nadmin: { listen: off }\n`;
  t.equal(
    configText(services, base, 'kubernetes'),
    `# mine\nseed: abc # kept\n# about admin\nadmin: { listen: off }\n\n${made}`,
  );
  for (const rest of [
    'services: []\nseed: abc',
    'seed: abc\nservices: []',
    '{ seed: abc, services: [] }',
    '---\nseed: abc\n...\n',
    'seed: abc\nservices:\n- name: x\n  address: 10.96.0.1\n  port: 1\n  backends: []\n',
  ])
    t.match(configText(services, rest, 'kubernetes'), /^(---\n)?seed: abc\n\n# Services by/, rest);
  t.equal(configText(services, '{}', 'kubernetes'), made);
  t.equal(configText([], '', 'ipvs'), '# Services by `weir import ipvs`: the next one replaces them.\nservices: []\n');
  t.throws(() => configText(services, 'services: &s []\nsnat: { addresses: *s }', 'kubernetes'), {
    code: 'IMPORT_INVALID',
  });
  const { config } = parseConfig('snat: { addresses: [10.96.0.10, 10.2.0.1] }');
  const clash = settle({ services, warnings: [], faults: [] }, config!);
  t.strictSame(clash.services, []);
  t.equal(clash.warnings.length, 2);
});

t.test('ipvs: services, servers, and what changes', async (t) => {
  const read = (text: string, hasTunnel = true): Draft => settle(draftOfIpvs('f', text, hasTunnel), NOTHING);
  const { services, warnings, faults } = read(`# saved
-A -t 10.96.0.10:80 -s rr -p 10800
-a -t 10.96.0.10:80 -r 10.2.0.11:8080 -m -w 3
-a -t 10.96.0.10:80 -r 10.2.0.12:8080 -m -w 0 -x 100 -y 20

ipvsadm --add-service --udp-service 10.96.0.10:53 --scheduler sh
ipvsadm --add-server --udp-service=10.96.0.10:53 --real-server 10.2.0.11:99 --ipip --weight=2
-A -t 10.96.0.10:81 -s mh -b mh-port -p 60 -M 255.255.255.0
-A -f 1 -s rr
-a -f 1 -r 10.2.0.1:0 -g -w 1
-A -t [fd00::1]:80 -s rr
`);
  t.strictSame(faults, []);
  t.strictSame(
    services.map(({ name, algorithm, mode, affinity, backends }) => [
      name,
      algorithm,
      mode,
      affinity,
      backends.map((b) => `${b.address}:${b.port} ${b.weight} ${b.maxConnections}`),
    ]),
    [
      ['tcp-10.96.0.10:80', 'random', undefined, '3h', ['10.2.0.11:8080 1 undefined', '10.2.0.12:8080 0 100']],
      ['tcp-10.96.0.10:81', undefined, undefined, '1m', []],
      ['udp-10.96.0.10:53', undefined, 'dsr', '5m', ['10.2.0.11:53 2 undefined']],
    ],
  );
  t.strictSame(
    warnings.map(({ line }) => line),
    [2, 4, 6, 7, 7, 8, 8, 9, 11],
  );
  const wrong = read(
    '-A -t web:http -s rr\n-A -t 10.96.0.1:80 -s best\n-a -t 10.96.0.2:80 -r 10.2.0.1:80 -m\n-D -t 10.96.0.2:80\n-A -t 10.96.0.3:80 -p soon\n-a -t 10.96.0.3:80 -r 10.2.0.1:1 -m -w 70000\n-A\n-A -t 10.96.0.3:80\n-A -s\n',
  );
  t.strictSame(said(wrong.faults), [
    'f:1:7 "web:http" must be an IPv4 address and a port, not a name: print with `ipvsadm -S -n`',
    'f:2:23 -t 10.96.0.1:80: scheduler best is none that is known',
    'f:3:1 -t 10.96.0.2:80: has no -A line above',
    'f:4:1 -D is nothing that `ipvsadm -S -n` prints',
    'f:5:23 -t 10.96.0.3:80: -p must be a number of seconds (got "soon")',
    'f:6:40 -t 10.96.0.3:80: -w must be a number up to 65535 (got "70000")',
    'f:7:1 must name one service: -t, -u or -f',
    'f:8:1 -t 10.96.0.3:80: is added already, in line 5',
    'f:9:4 -s must have a value',
  ]);
  const direct = '-A -t 10.96.0.1:80\n-a -t 10.96.0.1:80 -r 10.2.0.1:80\n';
  t.match(said(read(direct, false).faults), [
    'f:2:1 -t 10.96.0.1:80: direct routing (-g) is mode dsr: name a --base FILE that has `tunnel.address`',
  ]);
  const mixed = read(`${direct}-a -t 10.96.0.1:80 -r 10.2.0.2:80 -m\n`, false);
  t.strictSame([mixed.services[0]!.mode, mixed.faults], [undefined, []]);
  const ports = read(
    `${direct}-a -t 10.96.0.1:80 -r 10.2.0.2:8080 -m\n-a -t 10.96.0.1:80 -r 10.2.0.3:8080 -g\n-a -t 10.96.0.1:80 -r 10.2.0.4 -g\n`,
  );
  t.strictSame(
    ports.services[0]!.backends.map(({ address, port }) => `${address}:${port}`),
    ['10.2.0.1:80', '10.2.0.2:8080', '10.2.0.3:80', '10.2.0.4:80'],
  );
  t.strictSame(
    said(ports.warnings).filter((each) => each.includes('port')),
    [
      'f:4:23 -t 10.96.0.1:80: port 8080 of 10.2.0.3 is not kept: with -g IPVS delivers to port 80 of the service, whatever is written',
    ],
  );
});

t.test('files: folders and what is in them, a base, a file written in one step', async (t) => {
  const dir = t.testdir({
    'a.yaml': 'kind: Pod',
    'b.txt': 'x',
    sub: { 'c.json': '{ "kind": "Pod" }', 'd.yml': '' },
    '.hidden.yaml': 'x',
  });
  symlinkSync('.', join(dir, 'sub', 'loop'));
  const { files } = findManifests([dir]);
  t.ok(files.includes(join(dir, 'a.yaml')) && files.includes(join(dir, 'sub', 'c.json')));
  t.notOk(files.some((file) => /b\.txt|hidden/.test(file)));
  t.throws(() => importManifests([join(dir, 'none')], undefined, {}), {
    code: 'IMPORT_INVALID',
    message: /it does not exist/,
  });
  t.throws(() => importIpvs(dir, undefined), { code: 'IMPORT_INVALID', message: /it is a directory/ });
  writeFileSync(join(dir, 'base.yaml'), 'sed: 1');
  t.throws(() => importManifests([join(dir, 'a.yaml')], join(dir, 'base.yaml'), {}), { code: 'CONFIG_INVALID' });
  t.strictSame(importManifests([join(dir, 'a.yaml')], undefined, {}).config.services, []);

  mkdirSync(join(dir, 'real'));
  symlinkSync('real/weir.yaml', join(dir, 'weir.yaml'));
  writeFileSync(join(dir, 'real', 'weir.yaml'), 'old', { mode: 0o600 });
  t.equal(replaceFile(join(dir, 'weir.yaml'), 'new'), true);
  t.equal(replaceFile(join(dir, 'weir.yaml'), 'new'), false);
  t.equal(readFileSync(join(dir, 'real', 'weir.yaml'), 'utf8'), 'new', 'through the link');
  t.equal(replaceFile(join(dir, 'fresh.yaml'), 'x'), true);
  t.throws(() => replaceFile(join(dir, 'none', 'x'), 'x'), { code: 'OUTPUT_FAILED' });
});
