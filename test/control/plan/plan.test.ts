import fc from 'fast-check';
import t from 'tap';
import { maglevTable } from '../../../lib/balance/maglev.js';
import { keyFromString } from '../../../lib/base/hash.js';
import type { Config, ServiceConfig } from '../../../lib/config/config.js';
import { parseConfig } from '../../../lib/config/load.js';
import { BACKEND_ID, COMMIT } from '../../../lib/conntrack/record.js';
import { Desired } from '../../../lib/control/desired.js';
import type { NetworkNeeds } from '../../../lib/control/network-plan.js';
import { compareFiles, type PlanParts, planReload } from '../../../lib/control/plan/plan.js';
import type { PlanView } from '../../../lib/control/plan/plan-view.js';
import { compareSlots } from '../../../lib/control/plan/slots.js';
import { STAT_CUT } from '../../../lib/datapath/stats.js';
import { tcp, udp } from '../../fixtures/packets.js';
import { LiveGateway } from '../../support/live-gateway.js';

function configOf(text: string): Config {
  const { config, problems } = parseConfig(text);
  if (config === null) throw new Error(JSON.stringify(problems));
  return config;
}

/** Histories; WEIR_PLAN_RUNS sets another number. */
const RUNS = Number(process.env.WEIR_PLAN_RUNS ?? 40);

t.setTimeout(3_600_000);

const AGAINST = { path: 'weir.yaml', version: 4 };

/** What the kernel was to be asked for. */
interface Asked {
  needs: readonly NetworkNeeds[];
}

function partsOf(live: LiveGateway, asked: Asked = { needs: [] }, more: Partial<PlanParts> = {}): PlanParts {
  return {
    desired: live.desired,
    readers: live.readers,
    clock: { nowMs: () => live.nowMs },
    network: {
      preview: async (_, needs) => {
        asked.needs = needs;
        return { steps: needs.map(() => []), notes: [] };
      },
    },
    packetsRead: () => 0,
    countAffinity: async () => {
      const clients = new Map<number, number>();
      live.gateway.countAffinity(Number.POSITIVE_INFINITY, 1e9, live.nowMs, clients);
      return clients;
    },
    ...more,
  };
}

function plan(live: LiveGateway, text: string, more?: Partial<PlanParts>): Promise<PlanView> {
  return planReload('new.yaml', text, AGAINST, partsOf(live, undefined, more));
}

const B = (n: number, more = ''): string => `{ name: b${n}, address: 10.2.0.${n}, port: 80${more} }`;

function web(backends: readonly string[], more = ''): string {
  return `{ name: web, address: 10.96.0.10, port: 80, protocol: tcp${more}, backends: [${backends.join(', ')}] }`;
}

t.test('nothing, comments and order are no change; mistakes are refused', async (t) => {
  const live = new LiveGateway(configOf(`services: [${web([B(1), B(2)])}]`));
  const view = await plan(live, `# a comment\nservices: [${web([B(2), B(1)])}]\n`);
  t.strictSame(view, {
    path: 'new.yaml',
    against: AGAINST,
    changes: false,
    refusal: null,
    settings: [],
    services: [],
    drainsEnded: [],
    flows: { live: 0, kept: 0, moved: 0, cutLater: 0, cut: 0 },
    network: { commands: [], later: [], notes: [] },
  });
  await t.rejects(plan(live, 'services: [{ name: x }]'), { code: 'CONFIG_INVALID', message: /^new\.yaml:1:/ });
  const restart = await plan(live, `device: { mtu: 1400 }\nservices: [${web([B(1)])}]`);
  t.match(restart, {
    changes: true,
    refusal: { code: 'NOT_SUPPORTED', message: 'device cannot change while weir runs', remedy: /Restart weir/ },
    settings: [{ key: 'device.mtu', before: '1500', after: '1400', restart: true }],
    services: [{ name: 'web', change: 'changed', slots: null, flows: null }],
    flows: null,
    network: null,
  });
  const seeded = await plan(live, `seed: other\nservices: [${web([B(1), B(2)])}]`);
  t.match(seeded.settings, [{ key: 'seed', restart: false }]);
  t.match(seeded.services, [{ change: 'same', slots: { size: 16381, changed: Number } }], 'what follows from that');
  const refused = await plan(live, `services: [${web([B(1)])}]`, {
    network: { preview: () => Promise.reject(Object.assign(new Error('x'), { code: 'x' })) },
  }).catch((error) => error);
  t.type(refused, Error, 'a bug stays one');
});

t.test('a plan leaves no trace', async (t) => {
  const live = new LiveGateway(configOf(`services: [${web([B(1), B(2)])}]`));
  const { desired } = live;
  desired.setDrained(desired.identities.backendById(1)!, 1, true);
  live.configure();
  live.down.add('web/b2');
  const { snapshot, identities } = desired;
  const bytes = JSON.stringify([snapshot.services, snapshot.backends, snapshot.cutAt, snapshot.counters]);
  const rows = [identities.serviceRows, identities.backendRows];
  const other = web([B(2).replace('b2', 'renamed'), B(3)]).replace('name: web', 'name: www');
  const asked: Asked = { needs: [] };
  const view = await planReload('new.yaml', `services: [${other}]`, AGAINST, partsOf(live, asked));
  t.match(view, { changes: true, drainsEnded: ['www/b1'] });
  t.equal(desired.snapshot, snapshot);
  t.equal(JSON.stringify([snapshot.services, snapshot.backends, snapshot.cutAt, snapshot.counters]), bytes);
  t.strictSame([identities.serviceRows, identities.backendRows], rows);
  t.strictSame([identities.serviceName(1), identities.backendName(2)], ['web', 'b2']);
  t.ok(desired.isDrained(identities.backendById(1)!));
  t.strictSame(
    asked.needs.map(({ endpoints }) => endpoints.map(({ address }) => address)),
    [['10.2.0.1'], [], []],
    'first with what the reload keeps, then without what no connection uses',
  );
});

/** Names of the owners of a table's slots. */
function ownersOf({ backends, protocolNumber }: ServiceConfig, seed: string, size: number): string[] {
  const taking = backends
    .filter(({ weight }) => weight > 0)
    .map(({ address, port, weight }) => ({ address: address.word, port, weight }));
  if (taking.length === 0) return Array<string>(size).fill('');
  const table = maglevTable(taking, protocolNumber, size, keyFromString(seed));
  return Array.from(table, (i) => `${taking[i]!.address}:${taking[i]!.port}`);
}

t.test('slots that change owner, counted one by one', async (t) => {
  const weights = fc.array(fc.constantFrom(0, 1, 1, 1, 2, 7), { minLength: 6, maxLength: 6 });
  const text = (size: number, seed: string, list: readonly number[]): string => {
    const backends = list.flatMap((weight, i) => (weight === 7 ? [] : [B(i + 1, `, weight: ${weight}`)]));
    return `seed: ${seed}\nmaglev: { tableSize: ${size} }\nservices: [${web(backends)}]`;
  };
  fc.assert(
    fc.property(weights, weights, fc.constantFrom(251, 509), fc.constantFrom('one', 'two'), (old, next, size, seed) => {
      const [from, to] = [configOf(text(251, 'one', old)), configOf(text(size, seed, next))];
      const desired = new Desired(from, 0);
      const slots = compareSlots(desired.compiled, desired.propose(to, 0).compiled, 1);
      const [a, b] = [ownersOf(from.services[0]!, 'one', 251), ownersOf(to.services[0]!, seed, size)];
      if (a[0] === '' && b[0] === '') return slots === null;
      if (size === 251 && seed === 'one') {
        const changed = a.filter((owner, i) => owner !== b[i]).length;
        return slots?.changed === changed && slots.share === changed / size;
      }
      // Every pair of slots is some client's.
      let moved = 0;
      for (const owner of a) for (const other of b) if (owner !== other) moved++;
      return Math.abs(slots!.share - moved / (a.length * b.length)) < 1e-9;
    }),
    { numRuns: 150 },
  );
  const desired = new Desired(configOf(`services: [${web([B(1)], ', algorithm: random')}]`), 0);
  const { compiled } = desired.propose(configOf(`services: [${web([B(1)])}]`), 0);
  t.equal(compareSlots(desired.compiled, compiled, 1), null, 'where there was no table, none changes');
});

t.test('clients that affinity leads nowhere any more', async (t) => {
  const sticky = (backends: string[], more = ', affinity: { clientIp: 1h }'): string =>
    `services: [${web(backends, more)}]`;
  const live = new LiveGateway(configOf(sticky([B(1), B(2)])));
  const counts = new Map<string, number>();
  for (let i = 1; i <= 40; i++) {
    const packet = tcp({ src: `10.1.0.${i}`, sport: 1000, dst: '10.96.0.10', dport: 80, flags: 'S', seq: 1 });
    const { backend } = live.send(packet);
    counts.set(backend!, (counts.get(backend!) ?? 0) + 1);
  }
  for (const [backends, more, lost] of [
    [[B(1)], undefined, counts.get('b2')],
    [[B(1, ', weight: 0'), B(2)], undefined, counts.get('b1')],
    [[B(1), B(2)], '', 40],
    [[B(1), B(2), B(3)], undefined, 0],
  ] as const) {
    const { services } = await plan(live, sticky([...backends], more));
    t.equal(services[0]!.affinityLost, lost);
  }
  const { services } = await plan(live, 'services: []');
  t.match(services, [{ change: 'removed', affinityLost: 40 }]);
});

t.test('two files', async (t) => {
  const from = configOf(`services: [${web([B(1), B(2)])}]`);
  const to = configOf(`conntrack: { recovery: 5s }\nservices: [${web([B(1)])}]`);
  const view = await compareFiles('new.yaml', to, 'old.yaml', from);
  t.match(view, {
    path: 'new.yaml',
    against: { path: 'old.yaml', version: null },
    changes: true,
    refusal: null,
    settings: [{ key: 'conntrack.recovery', before: '1m', after: '5s', restart: false }],
    services: [{ name: 'web', slots: { changed: Number }, flows: null, affinityLost: null }],
    flows: null,
  });
  t.match(await compareFiles('a', from, 'b', structuredClone(from)), {
    changes: false,
    services: [],
    network: { commands: [] },
  });
  t.match(await compareFiles('a', configOf('role: node\ntunnel: { address: 192.0.2.1 }'), 'b', from), {
    refusal: { code: 'NOT_SUPPORTED' },
    network: null,
  });
});

const SERVICES = [
  { at: '10.96.0.10:80', protocol: 'tcp', mode: 'dnat', algorithm: 'maglev' },
  { at: '10.96.0.11:80', protocol: 'tcp', mode: 'snat', algorithm: 'random' },
  { at: '10.96.0.12:80', protocol: 'tcp', mode: 'dsr', algorithm: 'maglev' },
  { at: '10.96.0.10:53', protocol: 'udp', mode: 'dnat', algorithm: 'random' },
  { at: '10.96.0.12:53', protocol: 'udp', mode: 'dsr', algorithm: 'maglev' },
] as const;

interface Shape {
  /** Of each service: its backends' weights, -1 for one that is not in the file; null: it is not itself. */
  readonly services: readonly (readonly number[] | null)[];
  readonly onRemove: 'keep' | 'reset';
  readonly hasTunnel: boolean;
  /** A backend's address becomes a VIP. */
  readonly takesOver: boolean;
}

function fileOf({ services, onRemove, hasTunnel, takesOver }: Shape): string {
  const list = services.flatMap((weights, i) => {
    if (weights === null) return [];
    const { at, protocol, mode, algorithm } = SERVICES[i]!;
    if (mode === 'dsr' && !hasTunnel) return [];
    const [address, port] = at.split(':');
    const backends = weights.flatMap((weight, k) =>
      weight < 0 || (takesOver && k === 2)
        ? []
        : [`{ name: b${k}, address: 10.2.0.${10 + k}, port: ${8000 + i}, weight: ${weight} }`],
    );
    return [
      `{ name: s${i}, address: ${address}, port: ${port}, protocol: ${protocol}, mode: ${mode}, algorithm: ${algorithm}, onRemove: ${onRemove}, backends: [${backends.join(', ')}] }`,
    ];
  });
  if (takesOver) list.push('{ name: own, address: 10.2.0.12, port: 9, protocol: tcp, backends: [] }');
  const tunnel = hasTunnel ? 'tunnel: { address: 192.0.2.1 }\n' : '';
  return `${tunnel}snat: { addresses: [10.96.255.1] }\nservices: [${list.join(',\n ')}]`;
}

const shape = fc.record<Shape>({
  services: fc.array(
    fc.option(fc.array(fc.constantFrom(1, 1, 2, 0, -1), { minLength: 3, maxLength: 3 }), { freq: 5 }),
    {
      minLength: 5,
      maxLength: 5,
    },
  ),
  onRemove: fc.constantFrom('keep', 'keep', 'reset'),
  hasTunnel: fc.constantFrom(true, true, true, false),
  takesOver: fc.constantFrom(false, false, false, true),
});

const ALL: Shape = { services: SERVICES.map(() => [1, 1, 1]), onRemove: 'keep', hasTunnel: true, takesOver: false };

/** Connections of every service, as far as `depth`: a first packet, an answer, and one more. */
function traffic(live: LiveGateway, count: number, depth: (i: number) => number): void {
  for (let i = 0; i < count; i++) {
    const { at, protocol, mode } = SERVICES[i % SERVICES.length]!;
    const [dst, dport] = [at.split(':')[0]!, Number(at.split(':')[1])];
    const ends = { src: `10.1.${i >> 8}.${1 + (i & 0x7f)}`, sport: 40_000 + i, dst, dport };
    const packet = (flags: string, seq: number, ack: number): Uint8Array =>
      protocol === 'tcp' ? tcp({ ...ends, flags, seq, ack }) : udp({ ...ends, payload: 5 });
    const { out } = live.send(packet('S', 1000, 0));
    if (depth(i) === 0) continue;
    if (mode !== 'dsr') {
      const view = new DataView(out[0]!.buffer, out[0]!.byteOffset);
      const quad = (offset: number): string => out[0]!.subarray(offset, offset + 4).join('.');
      const back = { src: quad(16), sport: view.getUint16(22), dst: quad(12), dport: view.getUint16(20) };
      live.send(
        protocol === 'tcp' ? tcp({ ...back, flags: 'SA', seq: 5000, ack: 1001 }) : udp({ ...back, payload: 5 }),
      );
    }
    live.send(packet('A', 1001, 5001));
    if (depth(i) === 2) live.send(packet('R', 1001, 0));
  }
}

t.test('a node keeps what it has', async (t) => {
  const node = (backends: string): string =>
    `role: node\ntunnel: { address: 192.0.2.1 }\nservices: [{ name: web, address: 10.96.0.10, port: 80, mode: dsr, onRemove: reset, backends: [${backends}] }]`;
  const live = new LiveGateway(configOf(fileOf(ALL)));
  traffic(live, 20, () => 1);
  const desired = new Desired(configOf(node('{ address: 192.0.2.1, port: 8080 }')), 0);
  const endpoint = { address: '192.0.2.1', port: 53, protocol: 17 };
  desired.learned = [endpoint];
  const asked: Asked = { needs: [] };
  const view = await planReload('new.yaml', node(''), AGAINST, { ...partsOf(live, asked), desired });
  t.match(view, {
    flows: { live: 20, kept: 20 },
    services: [{ change: 'changed', backends: [{ change: 'removed' }] }],
  });
  t.strictSame(asked.needs.at(-1), { addresses: [], endpoints: [endpoint] }, 'and what it has learned');
});

const FATES = ['kept', 'moved', 'cutLater', 'cut'] as const;

t.test('what a plan says of connections is what the reload does to them', async (t) => {
  const met = new Set<string>();
  const property = fc.asyncProperty(
    fc.oneof(fc.constant(ALL), shape),
    shape,
    fc.nat(2),
    fc.nat(400_000),
    async (first, second, shift, waitMs) => {
      const live = new LiveGateway(configOf(fileOf(ALL)));
      traffic(live, 60, (i) => Math.floor((i + shift) / 5) % 3);
      // A reload before: some drain already when the plan is made.
      live.configure(configOf(fileOf(first)));
      live.flush();
      live.nowMs += waitMs % 7 === 0 ? waitMs : 1000;
      const view = await plan(live, fileOf(second));
      const before = live.flows().length;
      if (view.flows?.live !== before) throw new Error(`${view.flows?.live} live, but ${before}`);

      const cutBefore = live.stats[STAT_CUT]!;
      live.configure(configOf(fileOf(second)));
      const due = [...live.desired.snapshot.cutAt].filter((atMs) => atMs <= live.nowMs).length;
      live.flush();
      const cut = live.stats[STAT_CUT]! - cutBefore;
      // Those whose time had come before were not the reload's doing.
      if (waitMs % 7 !== 0 && cut !== view.flows.cut)
        throw new Error(`${view.flows.cut} to be cut, but ${cut}; ${due} due`);
      const found = { moved: 0, cutLater: 0 };
      for (const flow of live.flows()) {
        const table = flow.proto === 'tcp' ? live.readers.tcp : live.readers.any;
        const [[src, sport], [dst, dport]] = [flow.client.split(':'), flow.vip.split(':')] as [string[], string[]];
        const word = (text: string): number => text.split('.').reduce((sum, part) => (sum << 8) | Number(part), 0);
        const key = [
          word(src!),
          word(dst!),
          (Number(sport) << 16) | Number(dport),
          flow.proto === 'tcp' ? 6 : 17,
        ] as const;
        table.find(...key);
        const [commit, backend] = [table.words[COMMIT], table.words[BACKEND_ID]!];
        const isClosing = flow.state === 'CLOSING' || flow.state === 'CLOSED';
        const ends = { src: src!, sport: Number(sport), dst: dst!, dport: Number(dport) };
        if (!isClosing)
          live.send(flow.proto === 'tcp' ? tcp({ ...ends, flags: 'S', seq: 77 }) : udp({ ...ends, payload: 5 }));
        const isSame = table.find(...key) >= 0 && table.words[COMMIT] === commit;
        if (!isSame) found.moved++;
        else if (live.desired.snapshot.cutAt[backend] !== Number.POSITIVE_INFINITY) found.cutLater++;
      }
      for (const fate of FATES) if (view.flows[fate] > 0) met.add(fate);
      if (found.cutLater !== view.flows.cutLater)
        throw new Error(`${view.flows.cutLater} later, but ${found.cutLater}`);
      // What would have picked again anyway is kept as it was.
      if (found.moved < view.flows.moved) throw new Error(`${view.flows.moved} to move, but ${found.moved}`);
      const isFirst = JSON.stringify(first) === JSON.stringify(ALL);
      if (isFirst && found.moved !== view.flows.moved)
        throw new Error(`${view.flows.moved} to move, but ${found.moved}`);
      const sum = view.services.reduce((total, { flows }) => total + (flows?.moved ?? 0) + (flows?.cut ?? 0), 0);
      if (sum !== view.flows.moved + view.flows.cut) throw new Error('services do not add up');
    },
  );
  await fc.assert(property, {
    numRuns: RUNS,
    examples: [[ALL, { ...ALL, services: [[1, -1, 0], null, [-1, 1, 1], [0, 0, 0], [-1, 0, 1]] }, 0, 1]],
  });
  t.strictSame([...met].sort(), [...FATES].sort(), 'every fate was met');
});
