import t from 'tap';
import { renderFindings } from '../../../lib/cli/doctor.js';
import type { Config } from '../../../lib/config/config.js';
import { parseConfig } from '../../../lib/config/load.js';
import type { Finding } from '../../../lib/control/doctor/finding.js';
import { parseRuleset, passageThrough } from '../../../lib/control/doctor/firewall.js';
import { checkHost } from '../../../lib/control/doctor/host-checks.js';
import type { HostFacts } from '../../../lib/control/doctor/host-facts.js';
import type { ForeignRule, NetworkFacts } from '../../../lib/control/doctor/network-facts.js';
import { parsePrefix } from '../../../lib/control/doctor/prefix.js';
import { checkRules } from '../../../lib/control/doctor/rule-checks.js';

/** What a namespace cannot be given, or not without harm to the rest of the machine; all else is doctor-kernel.ts. */

function configOf(text: string): Config {
  const { config, problems } = parseConfig(text);
  if (config === null) throw new Error(JSON.stringify(problems));
  return config;
}

const ALL = (1n << 41n) - 1n;

const HOST: HostFacts = {
  release: '6.12.4',
  kernel: [6, 12],
  capabilities: { effective: ALL, bounding: ALL },
  isFiltered: false,
  tun: {
    problem: null,
    isLoaded: true,
    probe: { note: 'offload: all', offloads: { csum: true, tso4: true, tso6: true, uso: true } },
  },
  ring: { disabled: 0, problem: null },
  openFiles: 1 << 20,
  memory: { availableBytes: 8 << 30, cgroupBytes: null },
  canSetSysctls: true,
};

function complaints(facts: Partial<HostFacts>, config = 'services: []'): Finding[] {
  const findings = checkHost(
    configOf(config),
    { ...HOST, memory: { availableBytes: 2 ** 33, cgroupBytes: null }, ...facts },
    false,
  );
  return findings.filter(({ status }) => status !== 'ok');
}

t.test('the host', async (t) => {
  t.strictSame(complaints({}), []);
  t.match(complaints({ release: '4.9.0', kernel: [4, 9] }), [{ name: 'kernel', status: 'fail' }]);
  t.strictSame(complaints({ kernel: [5, 4] }), []);

  const absent = { problem: 'ENOENT', isLoaded: false, probe: HOST.tun.probe };
  t.match(complaints({ tun: absent }), [{ name: 'tun', status: 'fail', mend: 'modprobe tun' }]);
  const none = { effective: 0n, bounding: ALL };
  t.match(complaints({ capabilities: none }), [{ name: 'net-admin', status: 'warn', mend: 'sudo weir doctor' }]);
  const never = { effective: 0n, bounding: 0n };
  t.match(complaints({ capabilities: never }), [{ name: 'net-admin', status: 'fail', mend: /--cap-add NET_ADMIN/ }]);
  const ping = 'services: [{ name: a, address: 10.96.0.1, port: 80, health: { type: icmp }, backends: [] }]';
  t.match(complaints({ capabilities: { effective: 1n << 12n, bounding: ALL } }, ping), [
    { name: 'net-raw', status: 'warn' },
  ]);
  t.match(complaints({}, 'device: { offload: false }'), [{ name: 'offload', status: 'warn', mend: null }]);

  const refused = { disabled: 2, problem: 'io_uring: EPERM' };
  t.match(complaints({ ring: refused }), [
    {
      name: 'io-uring',
      status: 'warn',
      found: /io_uring_disabled is 2.*falls back/,
      mend: 'sysctl -w kernel.io_uring_disabled=0',
    },
  ]);
  t.match(complaints({ ring: refused }, 'device: { engine: io_uring }'), [{ name: 'io-uring', status: 'fail' }]);
  t.strictSame(complaints({ ring: refused }, 'device: { engine: readwrite }'), []);
  const filtered = { ring: { disabled: 0, problem: 'io_uring: EPERM' }, isFiltered: true };
  t.match(complaints(filtered), [{ name: 'io-uring', mend: /--security-opt seccomp=/ }]);

  t.match(complaints({ memory: { availableBytes: 2 ** 33, cgroupBytes: 2 ** 26 } }), [
    { name: 'memory', status: 'warn', found: /^full tables take 109 MiB, this control group has 64 MiB left$/ },
  ]);
  t.match(complaints({ memory: { availableBytes: 2 ** 26, cgroupBytes: null } }), [{ name: 'memory', status: 'warn' }]);
  t.match(complaints({ memory: { availableBytes: null, cgroupBytes: null } }), [{ name: 'memory', status: 'skip' }]);
});

const CONFIG = configOf(`
services:
  - { name: web, address: 10.96.0.10, port: 80, backends: [{ address: 10.2.0.11, port: 8080 }] }
`);

function rulesOf(
  rules: Partial<ForeignRule>[],
  routes: [string, number][],
  conntrack: NetworkFacts['kernelConntrack'] = null,
): Finding[] {
  const facts = {
    kernel: { hops: new Map([['10.2.0.11', { dev: 'br0', local: false }]]) },
    rules: rules.map((each) => ({
      priority: 100,
      table: 7,
      from: null,
      to: null,
      iif: null,
      isPartial: false,
      text: '',
      ...each,
    })),
    routes: routes.map(([to, table]) => ({ to: parsePrefix(to), table, dev: 'eth0', refusal: null })),
    firewall: null,
    firewallProblem: 'nft is not installed',
    kernelConntrack: conntrack,
  } as unknown as NetworkFacts;
  return checkRules(CONFIG, facts).filter(
    ({ status, name }) => status !== 'ok' && !['forward-policy', 'nat'].includes(name),
  );
}

t.test('policy rules of others', async (t) => {
  const everywhere = '0.0.0.0/0';
  t.strictSame(rulesOf([{}], []), [], 'a table without routes leads nowhere');
  t.match(rulesOf([{ priority: 5000 }], [[everywhere, 7]]), [
    { status: 'fail', mend: 'ip rule add priority 4999 to 10.96.0.10 lookup main' },
  ]);
  t.strictSame(rulesOf([{ priority: 32766 }], [[everywhere, 7]]), [], 'asked after main');
  const vpn: Partial<ForeignRule>[] = [
    { priority: 32764, table: 254 },
    { priority: 32765, isPartial: true },
  ];
  t.strictSame(rulesOf(vpn, [[everywhere, 7]]), [], 'main is asked first');
  t.match(rulesOf(vpn.slice(1), [[everywhere, 7]]), [{ status: 'warn' }], 'by a mark: some packets');
  const home = { priority: 3000, from: parsePrefix('10.1.0.0/24') };
  t.match(rulesOf([home], [[everywhere, 7]]), [{ status: 'warn' }], 'clients may be there');
  t.strictSame(rulesOf([home], [['10.9.0.0/16', 7]]), [], 'it knows no way to the VIP');
  t.strictSame(rulesOf([{ from: parsePrefix('10.7.0.0/16'), priority: 999 }], [['10.5.0.0/16', 7]]), []);
  t.match(rulesOf([{ from: parsePrefix('10.2.0.0/16'), iif: 'br0' }], [[everywhere, 7]]), [
    { status: 'fail', mend: /^ip rule del priority 100 / },
  ]);
  t.strictSame(
    rulesOf([{ from: parsePrefix('10.2.0.0/16'), iif: 'br9' }], [[everywhere, 7]]),
    [],
    'by another interface',
  );
  t.match(rulesOf([], [], { count: 90, max: 100 }), [
    { name: 'kernel-conntrack', mend: 'sysctl -w net.netfilter.nf_conntrack_max=400' },
  ]);
  t.strictSame(rulesOf([], [], { count: 10, max: 100 }), []);
});

function passage(policy: string, ...rules: unknown[][]): string[] {
  const chain = (name: string, rest: object) => ({ chain: { family: 'inet', table: 'f', name, handle: 1, ...rest } });
  const ruleset = [
    chain('fwd', { type: 'filter', hook: 'forward', prio: 0, policy }),
    chain('sub', {}),
    ...rules.map(([name, ...expr], i) => ({ rule: { family: 'inet', table: 'f', chain: name, handle: i + 2, expr } })),
  ];
  const firewall = { ...parseRuleset(JSON.stringify({ nftables: ruleset })), legacyTables: '' };
  return (['iif', 'oif'] as const).map((side) => passageThrough(firewall, 'weir0', side).passage);
}

t.test('what a firewall does with the device’s packets', async (t) => {
  const match = (left: object, right: unknown, op = '==') => ({ match: { op, left, right } });
  const iif = (name: unknown, op?: string) => match({ meta: { key: 'iifname' } }, name, op);
  const oif = (name: unknown, op?: string) => match({ meta: { key: 'oifname' } }, name, op);
  const state = (...names: string[]) => match({ ct: { key: 'state' } }, names, 'in');
  const [accept, drop] = [{ accept: null }, { drop: null }];
  const jump = { jump: { target: 'sub' } };
  t.strictSame(passage('accept'), ['accepted', 'accepted']);
  t.strictSame(passage('drop'), ['refused', 'refused']);
  t.strictSame(passage('drop', ['fwd', accept]), ['accepted', 'accepted']);
  t.strictSame(
    passage('drop', ['fwd', { counter: {} }, iif('weir*'), accept]),
    ['accepted', 'refused'],
    'what comes out does not go in',
  );
  t.strictSame(passage('drop', ['fwd', iif({ set: ['eth0', 'weir0'] }), accept], ['fwd', oif('weir0'), accept]), [
    'accepted',
    'accepted',
  ]);
  t.strictSame(passage('drop', ['fwd', iif('eth0', '!='), accept]), ['accepted', 'unknown']);
  t.strictSame(passage('drop', ['fwd', state('established', 'related'), accept]), ['refused', 'refused']);
  t.strictSame(passage('drop', ['fwd', jump], ['sub', iif('weir0'), accept], ['sub', oif('weir0'), accept]), [
    'accepted',
    'accepted',
  ]);
  t.strictSame(
    passage('drop', ['fwd', jump], ['sub', iif('br1'), oif('br2'), accept]),
    ['refused', 'refused'],
    'Docker’s way',
  );
  t.strictSame(passage('accept', ['fwd', { xt: { type: 'match', name: 'recent' } }, drop]), ['unknown', 'unknown']);
  t.strictSame(passage('accept', ['fwd', jump], ['sub', jump]), ['accepted', 'accepted'], 'a loop ends');
});

t.test('what is printed', async (t) => {
  const text = renderFindings([
    { name: 'tun', status: 'ok', found: 'there', why: 'packets', mend: null },
    { name: 'nat', status: 'skip', found: 'nft is not installed', why: 'translation', mend: null },
    {
      name: 'ip-forward',
      status: 'fail',
      found: 'off',
      why: 'nothing is forwarded',
      mend: 'sysctl -w net.ipv4.ip_forward=1',
    },
  ]);
  t.equal(
    text,
    `ok    tun         there
skip  nat         nft is not installed
fail  ip-forward  off
                  nothing is forwarded
                  $ sysctl -w net.ipv4.ip_forward=1

1 failure, 0 warnings, 1 not seen
`,
  );
});
