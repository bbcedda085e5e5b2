import fc from 'fast-check';
import t from 'tap';
import { addressWord } from '../fixtures/packets.js';
import type { Flow } from './model/flows.js';
import { GatewayModel } from './model/gateway.js';
import type { IcmpError, Packet } from './model/packets.js';
import { compare, compareTwin, flush, Real, START_MS, send, sendError } from './model/real.js';
import { type Segment, type Side, TcpModel } from './model/tcp.js';
import {
  CLIENT_PORTS,
  CLIENTS,
  endpointOf,
  SERVICES,
  type Service,
  type Setup,
  splitEndpoint,
  VIPS,
  World,
} from './model/world.js';

/**
 * The whole pipeline against a naive model (model/gateway.ts): random packets of both ends, fragments, ICMP errors, clock steps,
 * reloads, health and garbage collections must never make them disagree; and the same packets in batches must come to the same.
 * WEIR_MODEL_RUNS sets the number of runs. A change of the pipeline deserves 10,000: `npx tap --timeout=3600 ...`.
 */
const RUNS = Number(process.env.WEIR_MODEL_RUNS ?? 400);

/** Which flow a command is about, whether it is there or not. */
interface Target {
  readonly client: number;
  readonly port: number;
  readonly service: number;
  /** Where a packet of the backend comes from when there is no flow. */
  readonly backend: number;
}

function clientOf({ client, port }: Target): string {
  return `${CLIENTS[client]}:${CLIENT_PORTS[port]}`;
}

function flowOf(model: GatewayModel, target: Target): Flow | undefined {
  const service = serviceOf(model, target);
  return model.flows.find(service.protocol, clientOf(target), endpointOf(service))?.[0];
}

function serviceOf({ world }: GatewayModel, { service }: Target): Service {
  return world.services[service]!;
}

/** The two ends of a packet towards the service, or of one that comes back. */
function endsOf(model: GatewayModel, target: Target, side: Side): { source: string; destination: string } {
  const service = serviceOf(model, target);
  if (side === 'original') return { source: clientOf(target), destination: endpointOf(service) };
  const flow = flowOf(model, target);
  if (flow) return { source: flow.backend, destination: flow.source };
  const { pool } = model.world;
  const [, port] = splitEndpoint(clientOf(target));
  const destination = service.mode === 'snat' ? `${pool[target.client % pool.length]}:${port}` : clientOf(target);
  return { source: endpointOf(service.backends[target.backend % service.backends.length]!), destination };
}

/** A segment in terms of what its connection has seen; of one that is unknown, of nothing. */
interface Shape {
  readonly flags: string;
  /** What `seq` and `ack` count from: the SYN, the next byte, the first one not acknowledged; or they are any number. */
  readonly from: 'isn' | 'end' | 'acked' | 'edge' | 'any';
  readonly seq: number;
  readonly ackFrom: 'end' | 'acked' | 'second';
  readonly ack: number;
  readonly payload: number;
  readonly window: number;
  readonly isOffloaded: boolean;
}

const UNSEEN = new TcpModel();

function segmentOf(model: GatewayModel, target: Target, side: Side, shape: Shape): Segment {
  const tracker = flowOf(model, target)?.tcp ?? UNSEEN;
  const own = tracker[side];
  const peer = tracker[side === 'original' ? 'reply' : 'original'];
  const { second } = tracker;
  const base = { isn: own.isn, end: own.end, acked: own.acked, edge: own.acked + peer.window, any: 0 }[shape.from];
  const ackBase =
    shape.ackFrom === 'second' && second
      ? second.seq + 1 + Math.min(second.payload, shape.payload)
      : shape.ackFrom === 'acked'
        ? peer.acked
        : peer.end;
  const ends = endsOf(model, target, side);
  const scales = side === 'original' ? [4, -1, 2] : [3, -1, 0];
  const scale = scales[(side === 'original' ? target.port : addressWord(splitEndpoint(ends.source)[0])) % 3]!;
  const { flags, payload } = shape;
  // A SYN's is kept in units of the scale it may get: one that those cannot express is rounded up.
  const window = flags.includes('S') ? (shape.window + 15) & ~15 : shape.window;
  const ack = flags.includes('A') ? ackBase + shape.ack : 0;
  return { flags, seq: base + shape.seq, ack, window, payload, scale: flags.includes('S') ? scale : -1 };
}

function sendSegment(model: GatewayModel, real: Real, target: Target, side: Side, shape: Shape): void {
  const segment = segmentOf(model, target, side, shape);
  const { payload, isOffloaded } = shape;
  send(model, real, { protocol: 'tcp', ...endsOf(model, target, side), segment, payload, isOffloaded });
}

const PLAIN: Omit<Shape, 'flags' | 'from'> = {
  seq: 0,
  ackFrom: 'end',
  ack: 0,
  payload: 0,
  window: 1024,
  isOffloaded: false,
};

/** SYN, SYN-ACK, ACK. */
function handshake(model: GatewayModel, real: Real, target: Target, isn: number): void {
  sendSegment(model, real, target, 'original', { ...PLAIN, flags: 'S', from: 'any', seq: isn });
  sendSegment(model, real, target, 'reply', { ...PLAIN, flags: 'SA', from: 'any', seq: ~isn });
  sendSegment(model, real, target, 'original', { ...PLAIN, flags: 'A', from: 'end' });
}

function complain(
  model: GatewayModel,
  real: Real,
  [target, from, isOfEnd, isWhole]: [Target, Side, boolean, boolean],
): void {
  const { protocol } = serviceOf(model, target);
  // What the other side sent, as it is beyond weir: the packet that is complained of.
  const { source, destination } = endsOf(model, target, from);
  const quoted: Packet = {
    protocol,
    source: destination,
    destination: source,
    payload: 100,
    isOffloaded: false,
    ...(protocol === 'tcp' ? { segment: { flags: 'A', seq: 7, ack: 8, window: 9, payload: 100, scale: -1 } } : {}),
  };
  const error: IcmpError = {
    from: isOfEnd ? splitEndpoint(source)[0] : '10.9.0.1',
    type: 3,
    code: 4,
    rest: 1400,
    quoted,
    quoteBytes: isWhole ? 1500 : 28,
  };
  sendError(model, real, error);
}

/** Some pieces of a datagram, in any order; its id is one that others have too. */
function sendFragments(
  model: GatewayModel,
  real: Real,
  [target, from, id, shape, pieces]: [Target, Side, number, Shape, readonly number[]],
): void {
  const { protocol } = serviceOf(model, target);
  const payload = 70;
  const segment = segmentOf(model, target, from, { ...shape, payload: FIRST_PIECE - TCP_HEADER });
  const header = protocol === 'udp' ? 8 : TCP_HEADER + (segment.scale >= 0 ? 4 : 0);
  const carried = { ...segment, payload: FIRST_PIECE - header };
  for (const piece of pieces) {
    send(model, real, {
      protocol,
      ...endsOf(model, target, from),
      payload,
      ...(protocol === 'tcp' ? { segment: carried } : {}),
      fragment: { id, from: [0, FIRST_PIECE, 56][piece]!, to: [FIRST_PIECE, 56, header + payload][piece]! },
    });
  }
}

const FIRST_PIECE = 40;
const TCP_HEADER = 20;

const CHANGES = ['weight', 'backend', 'service', 'arrangement', 'health'] as const;

/** One change of the file, or of a backend's health, and what is due because of it. */
function change(
  model: GatewayModel,
  real: Real,
  [what, place, member, value]: [(typeof CHANGES)[number], number, number, number],
): void {
  const { world } = model;
  const service = world.services[place]!;
  const backend = service.backends[member % service.backends.length]!;
  if (what === 'weight') backend.weight = value;
  else if (what === 'backend') backend.isPresent = !backend.isPresent;
  else if (what === 'service') service.isPresent = !service.isPresent;
  else if (what === 'arrangement') world.rearrange(value);
  else {
    model.selection.setHealth(service, backend, value > 0);
    real.setHealth(service, backend, value > 0);
  }
  model.reload();
  real.configure(world);
  flush(model, real);
}

const mostly = <T>(usual: T, ...others: readonly T[]): fc.Arbitrary<T> =>
  fc.oneof({ weight: 5, arbitrary: fc.constant(usual) }, { weight: 2, arbitrary: fc.constantFrom(...others) });
const side = fc.constantFrom<Side>('original', 'reply');
const isn = fc.oneof(fc.constantFrom(0xfffffff0, 0x7fffff00, 0xffffffff, 0), fc.nat(0xffffffff));

/** Most of what happens is about the same few flows, or their states would never be deep. */
const anyTarget = (service: fc.Arbitrary<number>): fc.Arbitrary<Target> =>
  fc.record({ client: mostly(0, 1, 2), port: mostly(0, 1, 2), service, backend: fc.nat(2) });
const tcpTarget = anyTarget(mostly(0, 1, 2, 3, 6));
const udpTarget = anyTarget(mostly(4, 5));

const opening = fc.record({ payload: mostly(0, 300), window: fc.constantFrom(1024, 4096), isOffloaded: fc.boolean() });
const numbered = fc.oneof(
  { weight: 5, arbitrary: fc.record({ from: fc.constant('any' as const), seq: isn }) },
  { weight: 2, arbitrary: fc.record({ from: fc.constant('isn' as const), seq: fc.constant(0) }) },
);
const synShape: fc.Arbitrary<Shape> = fc
  .tuple(opening, numbered, mostly('S', 'SEW', 'SF'))
  .map(([more, number, flags]) => ({ ...more, ...number, flags, ackFrom: 'end', ack: 0 }));
const synAckShape: fc.Arbitrary<Shape> = fc
  .tuple(opening, numbered, mostly('SA', 'S'), mostly<Shape['ackFrom']>('end', 'acked', 'second'), mostly(0, -1, 1, 77))
  .map(([more, number, flags, ackFrom, ack]) => ({ ...more, ...number, flags, ackFrom, ack }));
const otherShape = fc.record<Shape>({
  flags: fc.constantFrom('A', 'A', 'PA', 'FA', 'FA', 'R', 'RA', 'F', 'SA', ''),
  from: mostly<Shape['from']>('end', 'acked', 'edge'),
  seq: mostly(0, -1, 1, -100, -70_000, 500, 70_000),
  ackFrom: mostly<Shape['ackFrom']>('end', 'acked', 'second'),
  ack: mostly(0, -1, 1, 15, 16, 500, -66_000, -66_001, 1_000_000),
  payload: mostly(0, 1, 100, 5000),
  window: mostly(1024, 0, 10, 4096),
  isOffloaded: fc.boolean(),
});

const pieces = fc.oneof(fc.shuffledSubarray([0, 1, 2], { minLength: 1 }), fc.constantFrom([0, 1, 2], [2, 1, 0]));

const TIMERS_MS = [10_000, 20_000, 30_000, 40_000, 50_000, 60_000, 100_000, 300_000];
const delay = fc.oneof(
  { weight: 4, arbitrary: fc.constantFrom(1, 500, 1000, 5000, 9000) },
  { weight: 3, arbitrary: fc.constantFrom(...TIMERS_MS.flatMap((timer) => [timer - 1000, timer, timer + 1000])) },
);

type Step = (model: GatewayModel, real: Real) => void;

/** A kind of step: its weight, its arguments, and what it does. */
function kind<T>(
  weight: number,
  name: string,
  args: fc.Arbitrary<T>,
  act: (model: GatewayModel, real: Real, args: T) => void,
): fc.WeightedArbitrary<Step> {
  const arbitrary = args.map((values) => {
    const step = (model: GatewayModel, real: Real): void => act(model, real, values);
    return Object.assign(step, { [fc.toStringMethod]: () => `\n  ${name} ${JSON.stringify(values)}` });
  });
  return { weight, arbitrary };
}

const step = fc.oneof(
  kind(4, 'handshake', fc.tuple(tcpTarget, isn), (model, real, [target, number]) =>
    handshake(model, real, target, number),
  ),
  kind(4, 'syn', fc.tuple(tcpTarget, synShape), (model, real, [target, shape]) =>
    sendSegment(model, real, target, 'original', shape),
  ),
  kind(3, 'syn-ack', fc.tuple(tcpTarget, synAckShape), (model, real, [target, shape]) =>
    sendSegment(model, real, target, 'reply', shape),
  ),
  kind(12, 'segment', fc.tuple(tcpTarget, side, otherShape), (model, real, [target, from, shape]) =>
    sendSegment(model, real, target, from, shape),
  ),
  kind(
    8,
    'datagram',
    fc.tuple(udpTarget, side, fc.nat(600), fc.boolean()),
    (model, real, [target, from, payload, isOffloaded]) =>
      send(model, real, { protocol: 'udp', ...endsOf(model, target, from), payload, isOffloaded }),
  ),
  kind(6, 'wait', fc.tuple(delay, mostly(true, false)), (model, real, [ms, isPrompt]) => {
    model.advance(ms);
    real.advance(ms);
    if (isPrompt) flush(model, real);
  }),
  kind(3, 'error', fc.tuple(fc.oneof(tcpTarget, udpTarget), side, fc.boolean(), fc.boolean()), complain),
  kind(6, 'fragments', fc.tuple(fc.oneof(tcpTarget, udpTarget), side, fc.nat(1), otherShape, pieces), sendFragments),
  kind(1, 'knock', fc.nat(60), (model, real, count) => {
    const segment = { flags: 'S', seq: 1, ack: 0, window: 1024, payload: 0, scale: -1 };
    const packet: Packet = {
      protocol: 'tcp',
      source: `${CLIENTS[0]}:1`,
      destination: `${VIPS[0]}:99`,
      segment,
      payload: 0,
    };
    for (let i = 0; i < count; i++) send(model, real, packet);
  }),
  kind(2, 'collect', fc.tuple(fc.constantFrom(1, 4, 1000), fc.boolean()), (_, real, [records, isWhole]) =>
    real.collection.run(real.pipeline.nowMs, records, isWhole),
  ),
  kind(
    5,
    'change',
    fc.tuple(fc.constantFrom(...CHANGES), fc.nat(SERVICES - 1), fc.nat(2), fc.constantFrom(0, 1, 5)),
    change,
  ),
);

const setups = fc.record<Setup>({
  poolAddresses: fc.nat(2),
  poolPorts: fc.integer({ min: 1, max: 4 }),
  tcpEntries: fc.integer({ min: 1, max: 8 }),
  anyEntries: fc.integer({ min: 1, max: 4 }),
  recovering: fc.boolean(),
  seed: fc.nat(1000),
  serviceLimit: mostly(0, 1, 2, 3),
  backendLimit: mostly(0, 1, 2),
  clientRate: mostly(0, 1, 3),
});

t.setTimeout(3_600_000);

t.test(`${RUNS} random interleavings never make pipeline and model disagree`, async (t) => {
  const steps = fc.array(step, { maxLength: 100, size: 'max' });
  const property = fc.property(setups, steps, (setup, run) => {
    const world = new World(setup);
    const model = new GatewayModel(world, START_MS);
    const real = new Real(world);
    for (const act of run) {
      act(model, real);
      compare(model, real);
    }
    compareTwin(real);
  });
  fc.assert(property, { numRuns: RUNS });
  t.pass();
});
