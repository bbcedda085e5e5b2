import fc from 'fast-check';
import t from 'tap';
import { seededRandom } from '../../../lib/base/random.js';
import type { Config, ServiceConfig } from '../../../lib/config/config.js';
import { explain } from '../../../lib/control/explain/explain.js';
import type { ExplainView, OutcomeView } from '../../../lib/control/explain/explain-view.js';
import type { ExplainQuery } from '../../../lib/control/explain/request.js';
import type { FlowJson } from '../../../lib/control/flows.js';
import { CLIENT_PORTS, CLIENTS, SERVICES, type Setup, splitEndpoint, VIPS, World } from '../../datapath/model/world.js';
import { describe } from '../../fixtures/packet-text.js';
import { echoRequest, fragment, icmpError, tcp, udp } from '../../fixtures/packets.js';
import { type Fate, LiveGateway } from '../../support/live-gateway.js';
import { mutate } from '../../support/mutate.js';

/**
 * Whatever the pipeline has been through, `explain` says of the next packet what the pipeline then does with it: verdict, reason,
 * backend, connection and bytes. And having been asked changes nothing. WEIR_EXPLAIN_RUNS sets the number of runs.
 */
const RUNS = Number(process.env.WEIR_EXPLAIN_RUNS ?? 40);

/** The model's world, with tunnels and health checks: every mode and every algorithm. */
function configOf(world: World): Config {
  const { tunnel, services, ...config } = world.config();
  const address = { text: '192.0.2.1', word: 0xc0000201 };
  return {
    ...config,
    tunnel: { ...tunnel, address },
    services: services.map((service): ServiceConfig => {
      const health = { type: 'tcp', port: null, intervalMs: 2000, timeoutMs: 1000, rise: 2, fall: 3 } as const;
      return {
        ...service,
        mode: DSR_ENDS.includes(`${service.address.text}:${service.port}`) ? 'dsr' : service.mode,
        health,
        allDown: service.port === 80 ? 'use-all' : 'reject',
      };
    }),
  };
}

const DSR_ENDS: readonly string[] = [`${VIPS[1]}:80`, `${VIPS[0]}:53`];

type Step = (live: LiveGateway, world: World) => Promise<void>;

function hex(bytes: Uint8Array): string {
  return Buffer.from(bytes).toString('hex');
}

/** Two datagrams may not leave with one identification; which one a first fragment gets, alone or in a tunnel, is not foretold. */
function withoutIdentification(bytes: Uint8Array): string {
  const copy = bytes.slice();
  const isTunnelled = bytes.length > 82 && bytes[9] === 17 && ((bytes[22]! << 8) | bytes[23]!) === 6081;
  const at = isTunnelled ? 62 : 0;
  const isFragment = bytes.length >= 20 && ((bytes[at + 6]! & 0x3f) | bytes[at + 7]!) !== 0;
  if (isFragment) for (const offset of [4, 5, 10, 11]) copy[at + offset] = 0;
  return hex(copy);
}

function summary({ verdict, reason, direction, service, backend, state }: Fate | OutcomeView): string {
  return JSON.stringify([verdict, reason, direction, service, backend, state]);
}

/** Verdicts that were met. */
const seen = new Set<string>();

/** Asks, sends, and compares. @param assumed what is asked besides, and how it comes true */
async function check(
  live: LiveGateway,
  packet: Uint8Array,
  assumed: Partial<ExplainQuery> = {},
  comeTrue: () => void = () => {},
): Promise<void> {
  const before = JSON.stringify([live.flows(), [...live.stats], [...live.desired.snapshot.counters]]);
  const view = await explain({ packet: hex(packet), ...assumed }, live.scene(), { path: 'weir.yaml', version: 1 });
  const after = JSON.stringify([live.flows(), [...live.stats], [...live.desired.snapshot.counters]]);
  if (before !== after) throw new Error(`the question changed something: ${before}\n${after}`);
  comeTrue();
  const fate = live.send(packet);
  seen.add(fate.verdict);
  compare(view, fate, live, packet);
  if (live.device.slotsHeld !== 0) throw new Error('a slot is missing');
}

/** @throws Error when what was foretold is not what happened */
function compare(view: ExplainView, fate: Fate, live: LiveGateway, packet: Uint8Array): void {
  const same = (what: string, foretold: string, real: string): void => {
    if (foretold === real) return;
    const steps = view.steps.map(({ step, result, text }) => `${step} ${result}: ${text}`).join('\n');
    throw new Error(`${describe(packet)}\n${steps}\n${what}: foretold ${foretold}, but ${real}`);
  };
  const total = view.outcomes.reduce((sum, { probability }) => sum + probability, 0);
  same('sum of probabilities', total.toFixed(9), '1.000000000');
  const wanted = summary(fate);
  const outcome = view.outcomes.find((each) => summary(each) === wanted) ?? view.outcomes[0]!;
  same('outcome', summary(outcome), wanted);
  if (outcome.portDrawn) return;
  const bytes = outcome.out.map((each) => withoutIdentification(Buffer.from(each.bytes, 'hex')));
  same('bytes', bytes.join(), fate.out.map(withoutIdentification).join());
  const { entry } = outcome;
  if (entry === null) return;
  const isIt = ({ proto, client, vip }: FlowJson): boolean =>
    proto === entry.proto && client === entry.client && vip === entry.vip;
  same('entry', JSON.stringify(entry), JSON.stringify(live.flows().find(isIt)));
}

/** A packet of a connection that is there, from either end; of one that is not, towards a service. */
function packetOf(live: LiveGateway, world: World, want: Wanted): Uint8Array {
  const flows = live.flows();
  const flow = flows[want.flow % Math.max(1, flows.length)];
  const service = world.services[want.service]!;
  const isKnown = want.isOfFlow && flow !== undefined;
  const proto = isKnown ? flow.proto : service.protocol;
  const client = `${CLIENTS[want.client]}:${CLIENT_PORTS[want.port]}`;
  const backend = service.backends[want.flow % service.backends.length]!;
  const port = want.isAstray ? service.port + 1000 : service.port;
  const [from, to] = isKnown
    ? want.isReply
      ? [flow.backend, flow.snat ?? flow.client]
      : [flow.client, flow.vip]
    : want.isReply
      ? [`${backend.address}:${backend.port}`, client]
      : [client, `${service.address}:${port}`];
  const [src, sport] = splitEndpoint(from);
  const [dst, dport] = splitEndpoint(to);
  const ends = { src, sport, dst, dport, ...(want.kind === 'fragments' ? { id: want.flow } : {}) };
  const payload = want.kind === 'fragments' ? 64 : want.payload;
  const whole =
    proto === 'tcp'
      ? tcp({ ...ends, flags: want.flags, seq: want.seq, ack: want.ack, payload })
      : udp({ ...ends, payload });
  switch (want.kind) {
    case 'fragments':
      return fragment(whole, 32)[want.piece]!;
    case 'echo':
      return echoRequest({ src, dst: VIPS[want.flow % 2]!, id: 7 });
    case 'error':
      // What the other end sent is complained of.
      return icmpError({
        src: want.isAstray ? '10.9.0.1' : src,
        dst,
        type: 3,
        code: 4,
        mtu: 1400,
        quoted:
          proto === 'tcp'
            ? tcp({ src: dst, sport: dport, dst: src, dport: sport, payload: 20 })
            : udp({ src: dst, sport: dport, dst: src, dport: sport, payload: 20 }),
      });
    default:
      return whole;
  }
}

interface Wanted {
  readonly kind: 'whole' | 'fragments' | 'echo' | 'error';
  readonly flow: number;
  readonly isOfFlow: boolean;
  readonly isReply: boolean;
  readonly isAstray: boolean;
  readonly client: number;
  readonly port: number;
  readonly service: number;
  readonly flags: string;
  readonly seq: number;
  readonly ack: number;
  readonly payload: number;
  readonly piece: number;
}

const mostly = <T>(usual: T, ...others: readonly T[]): fc.Arbitrary<T> =>
  fc.oneof({ weight: 5, arbitrary: fc.constant(usual) }, { weight: 2, arbitrary: fc.constantFrom(...others) });

const wanted = fc.record<Wanted>({
  kind: mostly<Wanted['kind']>('whole', 'fragments', 'echo', 'error'),
  flow: fc.nat(5),
  isOfFlow: fc.boolean(),
  isReply: mostly(false, true),
  isAstray: mostly(false, true),
  client: mostly(0, 1, 2),
  port: mostly(0, 1, 2),
  service: fc.nat(SERVICES - 1),
  flags: fc.constantFrom('S', 'S', 'S', 'SA', 'A', 'PA', 'FA', 'R', 'RA', 'F', ''),
  seq: fc.constantFrom(1000, 1001, 5000, 5001, 77),
  ack: fc.constantFrom(0, 1001, 5001, 77),
  payload: mostly(0, 100),
  piece: fc.nat(2),
});

function kind<T>(
  weight: number,
  name: string,
  args: fc.Arbitrary<T>,
  act: (live: LiveGateway, world: World, args: T) => Promise<void>,
): fc.WeightedArbitrary<Step> {
  const arbitrary = args.map((values) => {
    const step = (live: LiveGateway, world: World): Promise<void> => act(live, world, values);
    return Object.assign(step, { [fc.toStringMethod]: () => `\n  ${name} ${JSON.stringify(values)}` });
  });
  return { weight, arbitrary };
}

const step = fc.oneof(
  kind(12, 'packet', wanted, (live, world, want) => check(live, packetOf(live, world, want))),
  kind(2, 'mangled', fc.tuple(wanted, fc.nat()), (live, world, [want, seed]) =>
    check(live, mutate({ bytes: packetOf(live, world, want) }, seededRandom(seed)).bytes),
  ),
  kind(2, 'handshake', wanted, async (live, world, want) => {
    const opening = { ...want, kind: 'whole' as const, isReply: false, isAstray: false, isOfFlow: false };
    const { out } = live.send(packetOf(live, world, { ...opening, flags: 'S', seq: 1000 }));
    const flow = live.flows().at(-1);
    if (out.length !== 1 || flow?.proto !== 'tcp') return;
    const [src, sport] = splitEndpoint(flow.backend);
    const [dst, dport] = splitEndpoint(flow.snat ?? flow.client);
    await check(live, tcp({ src, sport, dst, dport, flags: 'SA', seq: 5000, ack: 1001 }));
    const [client, port] = splitEndpoint(flow.client);
    const [vip, vport] = splitEndpoint(flow.vip);
    await check(live, tcp({ src: client, sport: port, dst: vip, dport: vport, flags: 'A', seq: 1001, ack: 5001 }));
  }),
  kind(2, 'datagram', fc.tuple(wanted, fc.shuffledSubarray([0, 1, 2])), async (live, world, [want, pieces]) => {
    for (const piece of pieces) await check(live, packetOf(live, world, { ...want, kind: 'fragments', piece }));
  }),
  kind(2, 'assumption', fc.tuple(wanted, fc.boolean()), (live, world, [want, isGone]) => {
    const packet = packetOf(live, world, want);
    const service = world.services[want.service]!;
    const backend = service.backends[want.flow % service.backends.length]!;
    if (!service.isPresent || !backend.isPresent) return check(live, packet);
    const name = `${service.name}/${backend.name}`;
    return check(live, packet, isGone ? { without: [name] } : { assumeDown: [name] }, () => {
      if (isGone) backend.isPresent = false;
      else live.down.add(name);
      live.configure(configOf(world));
    });
  }),
  kind(2, 'knocks', fc.nat(60), async (live, world, count) => {
    const want = { kind: 'whole', isOfFlow: false, isReply: false, isAstray: true, flags: 'S' } as Wanted;
    const knock = packetOf(live, world, {
      ...want,
      flow: 0,
      client: 0,
      port: 0,
      service: 0,
      seq: 1,
      ack: 0,
      payload: 0,
    });
    for (let i = 0; i < count; i++) live.send(knock);
    await check(live, knock);
  }),
  kind(3, 'wait', fc.constantFrom(1, 500, 1000, 9000, 10_000, 20_000, 50_000, 60_000, 100_000), async (live, _, ms) => {
    live.nowMs += ms;
  }),
  kind(2, 'flush', fc.constant(0), async (live) => void live.flush()),
  kind(
    3,
    'change',
    fc.tuple(fc.constantFrom('weight', 'backend', 'service', 'health'), fc.nat(SERVICES - 1), fc.nat(2), fc.nat(2)),
    async (live, world, [what, place, member, value]) => {
      const service = world.services[place]!;
      const backend = service.backends[member % service.backends.length]!;
      if (what === 'weight') backend.weight = value;
      else if (what === 'backend') backend.isPresent = !backend.isPresent;
      else if (what === 'service') service.isPresent = !service.isPresent;
      else if (value > 0) live.down.delete(`${service.name}/${backend.name}`);
      else live.down.add(`${service.name}/${backend.name}`);
      live.configure(configOf(world));
    },
  ),
);

const setups = fc.record<Setup>({
  poolAddresses: fc.nat(2),
  poolPorts: fc.integer({ min: 1, max: 4 }),
  tcpEntries: fc.integer({ min: 1, max: 8 }),
  anyEntries: fc.integer({ min: 1, max: 4 }),
  recovering: fc.boolean(),
  seed: fc.nat(1000),
  serviceLimit: mostly(0, 1, 3),
  backendLimit: mostly(0, 1, 2),
  clientRate: mostly(0, 1, 3),
});

t.setTimeout(3_600_000);

t.test(`${RUNS} random histories: what is foretold of the next packet is what happens`, async (t) => {
  const property = fc.asyncProperty(
    setups,
    fc.array(step, { minLength: 10, maxLength: 60, size: 'max' }),
    async (setup, steps) => {
      const world = new World(setup);
      const live = new LiveGateway(configOf(world), setup);
      for (const act of steps) await act(live, world);
    },
  );
  await fc.assert(property, { numRuns: RUNS });
  t.strictSame([...seen].sort(), ['drop', 'forward', 'hold', 'pass', 'reply'], 'every end there is was met');
});
