import type { MemoryPacket } from '../../../lib/io/memory-device.js';
import type { Outcome } from '../../support/pipeline.js';
import { Ends, type Expected } from './ends.js';
import {
  backendName,
  type Flow,
  Flows,
  isClosing,
  isHalfOpen,
  isUnanswered,
  originalOf,
  stateOf,
  translate,
} from './flows.js';
import { type Decision, FragmentsModel } from './fragments.js';
import { build, buildError, buildOwnUnreachable, buildRst, type IcmpError, type Packet } from './packets.js';
import { Rates } from './rates.js';
import { Selection } from './selection.js';
import { isOpening, type Side, TcpModel, type Timer } from './tcp.js';
import {
  type Backend,
  DRAIN_MS,
  endpointOf,
  keyOf,
  RECOVERY_MS,
  type Service,
  splitEndpoint,
  TIMEOUTS,
  type World,
} from './world.js';

/** What the real one did: its lots are taken over when they may be. */
export interface Hint {
  readonly outcome: Outcome;
  /** Original tuples of the flows that live now. */
  readonly listed: ReadonlySet<string>;
}

/**
 * The gateway as sections 3 and 4 of the design describe it, naively: Maps keyed by the text of tuples, no hashes, no bytes, no
 * second place where the same is known. An expired entry is gone at once; a full table is one with as many live flows.
 */
export class GatewayModel {
  readonly world: World;
  readonly flows = new Flows((flow) => {
    if (isUnanswered(flow)) this.ends.countersOf(flow.backendKey).unanswered++;
  });
  readonly selection: Selection;
  readonly ends = new Ends();
  nowMs: number;

  readonly #fragments = new FragmentsModel();
  readonly #rates = new Rates();
  readonly #configured = new Map<string, Service>();
  readonly #cutAt = new Map<string, number>();
  readonly #recoveringUntilMs: number;
  readonly #statelessUntilMs = { tcp: Number.NEGATIVE_INFINITY, udp: Number.NEGATIVE_INFINITY };

  constructor(world: World, nowMs: number) {
    this.world = world;
    this.nowMs = nowMs;
    this.selection = new Selection(world, this.flows);
    this.#recoveringUntilMs = world.setup.recovering ? nowMs + RECOVERY_MS : Number.NEGATIVE_INFINITY;
    this.reload();
  }

  /** The file of the world has become the configuration. */
  reload(): void {
    const before = new Map(this.#configured);
    this.#configured.clear();
    for (const service of this.world.services.filter(({ isPresent }) => isPresent)) {
      for (const backend of service.backends) {
        if (backend.isPresent) this.#configured.set(keyOf(service, backend), service);
      }
    }
    for (const key of this.#configured.keys()) this.#cutAt.delete(key);
    for (const [key, { onRemove }] of before) {
      if (this.#configured.has(key)) continue;
      this.#cutAt.set(key, this.nowMs + (onRemove === 'reset' ? 0 : DRAIN_MS));
    }
  }

  advance(ms: number): void {
    this.nowMs += ms;
    for (const flow of this.flows) if (flow.expiresMs <= this.nowMs) this.flows.remove(flow);
  }

  /** What is due by time alone; returns what the ends of flows whose time is over are told. */
  flush(): MemoryPacket[] {
    const expired = this.#fragments.expire(this.nowMs);
    for (let i = 0; i < expired; i++) this.ends.count('fragment-expired');
    const over = [...this.flows].filter((flow) => this.#isOver(flow));
    for (const flow of over) this.flows.remove(flow);
    this.ends.stats.cut += over.length;
    return over.flatMap(farewell);
  }

  /** What comes of a packet of TCP or UDP. */
  see(packet: Packet, hint: Hint): Expected {
    if (packet.fragment === undefined) return this.#seeHeader(packet, hint)[0];
    if (packet.fragment.from === 0) return this.#seeFirst(packet, hint);
    const decision = this.#fragments.find(packet, this.nowMs);
    if (decision !== undefined) return this.#seeOther(packet, decision);
    this.#fragments.hold(packet, this.nowMs);
    return { verdict: 'hold', out: [] };
  }

  /** What comes of an ICMP error: it goes with the flow it quotes, and changes nothing. */
  seeError(error: IcmpError): Expected {
    const { from, quoted } = error;
    const found = this.flows.find(quoted.protocol, quoted.destination, quoted.source);
    if (found === undefined) {
      if (this.#isOwn(quoted.source)) return this.ends.drop('icmp-unknown-flow');
      this.ends.count('not-tracked');
      return { verdict: 'pass', reason: 'not-tracked', out: [buildError(error)] };
    }
    const [flow, side] = found;
    const [receiver, peer, sender] =
      side === 'original' ? [flow.backend, flow.source, flow.client] : [flow.client, flow.vip, flow.backend];
    const isSender = splitEndpoint(sender)[0] === from;
    const translated = { ...quoted, source: receiver, destination: peer };
    const out = buildError({ ...error, from: isSender ? splitEndpoint(peer)[0] : from, quoted: translated });
    return { ...this.ends.forward(out), ...about(flow, side) };
  }

  // --- packets with ports

  /** Returns the flow it is of afterwards as well. */
  #seeHeader(packet: Packet, hint: Hint): [Expected, Flow?] {
    const { protocol, source, destination } = packet;
    const found = this.flows.find(protocol, source, destination);
    if (found === undefined) return this.#unknown(packet, hint);
    const [flow, side] = found;
    if (side === 'original' && this.#startsAnew(flow, packet)) {
      this.flows.remove(flow);
      return this.#unknown(packet, hint);
    }
    return this.#isOver(flow) ? this.#over(flow, side, packet, hint) : this.#follow(flow, side, packet);
  }

  #startsAnew({ tcp, isReplied, service, backend }: Flow, { segment }: Packet): boolean {
    if (tcp !== undefined) {
      if (!isOpening(segment!)) return false;
      if (tcp.state === 'CLOSING' || tcp.state === 'CLOSED') return true;
      if (tcp.flags.has('SeenNonSyn')) return false;
    } else if (isReplied) return false;
    return !this.selection.takesNew(service, service.backends.find((each) => endpointOf(each) === backend)!);
  }

  #isOver({ backendKey }: Flow): boolean {
    return (this.#cutAt.get(backendKey) ?? Number.POSITIVE_INFINITY) <= this.nowMs;
  }

  /** A packet of a flow whose drain time is over, before anything else was done about it. */
  #over(flow: Flow, side: Side, packet: Packet, hint: Hint): [Expected, Flow?] {
    this.flows.remove(flow);
    this.ends.stats.cut++;
    const told = farewell(flow);
    if (flow.tcp === undefined) {
      if (side === 'original') return this.#unknown(packet, hint);
      return [{ ...this.ends.drop('untracked-reply'), ...about(flow, side), out: told }];
    }
    if (told.length === 0)
      return [{ ...this.ends.refuseTcp(packet, this.nowMs, 'rst-mid-stream', 'unknown-flow'), ...about(flow, side) }];
    this.ends.count('rst-mid-stream');
    return [{ verdict: 'reply', reason: 'rst-mid-stream', ...about(flow, side), out: told }];
  }

  #follow(flow: Flow, side: Side, packet: Packet, isNew = false): [Expected, Flow] {
    const { segment } = packet;
    const refusals = flow.tcp?.refusals ?? 0;
    if (segment === undefined) this.#refreshAny(flow, side);
    else this.#refreshTcp(flow, isNew ? flow.tcp!.open(side, segment) : flow.tcp!.see(side, segment));
    this.ends.countersOf(flow.backendKey).refused += (flow.tcp?.refusals ?? 0) - refusals;
    this.#account(flow, side, packet);
    return [{ ...this.ends.forward(translate(flow, side, packet)), ...about(flow, side) }, flow];
  }

  #refreshAny(flow: Flow, side: Side): void {
    if (side === 'reply') flow.isReplied = true;
    flow.expiresMs = this.nowMs + TIMEOUTS.any;
  }

  #refreshTcp(flow: Flow, timer: Timer): void {
    if (timer === 'shorten') flow.expiresMs = Math.min(flow.expiresMs, this.nowMs + TIMEOUTS.tcpFin);
    else if (timer !== 'keep') flow.expiresMs = this.nowMs + TIMEOUTS[timer];
  }

  #account(flow: Flow, side: Side, packet: Packet): void {
    const { length } = build(packet).bytes;
    for (const counters of [flow, this.ends.countersOf(flow.backendKey)]) {
      counters.packets[side]++;
      counters.bytes[side] += length;
    }
  }

  /** No flow has this tuple. */
  #unknown(packet: Packet, hint: Hint): [Expected, Flow?] {
    const { protocol, destination } = packet;
    const services = this.world.services.filter(({ isPresent }) => isPresent);
    const service = services.find((each) => each.protocol === protocol && endpointOf(each) === destination);
    if (service) return this.#admit(packet, service, hint);
    const [address] = splitEndpoint(destination);
    if (services.some((each) => each.address === address)) {
      return [
        protocol === 'tcp'
          ? this.ends.refuseTcp(packet, this.nowMs, 'rst-unknown-port', 'unknown-port')
          : this.ends.refuseUdp(packet, this.nowMs),
      ];
    }
    if (this.#isOwn(destination)) return [this.ends.drop('untracked-reply')];
    const picked = this.#pickUpReply(packet, hint);
    if (picked !== undefined) return picked;
    this.ends.count('not-tracked');
    return [{ verdict: 'pass', reason: 'not-tracked', out: [build(packet)] }];
  }

  #isOwn(endpoint: string): boolean {
    const [address] = splitEndpoint(endpoint);
    const isVip = this.world.services.some((service) => service.isPresent && service.address === address);
    return isVip || this.world.pool.includes(address);
  }

  // --- new flows

  #admit(packet: Packet, service: Service, hint: Hint): [Expected, Flow?] {
    const { segment, protocol, source } = packet;
    const refuse = (refusal: Expected): [Expected] => [{ direction: 'original', service: service.name, ...refusal }];
    if (service.sourceRanges.length > 0 && !source.startsWith('10.1.'))
      return refuse(this.ends.drop('not-in-source-range'));
    const isMidStream = segment !== undefined && !isOpening(segment);
    if (isMidStream && (service.algorithm === 'random' || service.mode === 'snat')) {
      return refuse(this.ends.refuseTcp(packet, this.nowMs, 'rst-mid-stream', 'unknown-flow'));
    }
    const choices = this.selection.choices(service);
    if (choices.length === 0) {
      if (service.noBackend === 'drop') return refuse(this.ends.drop('no-backend'));
      return refuse(
        segment
          ? this.ends.refuseTcp(packet, this.nowMs, 'rst-no-backend', 'no-backend')
          : this.ends.refuseUdp(packet, this.nowMs),
      );
    }
    const wanted = this.selection.starts(source, service, choices, this.nowMs);
    if (isMidStream && segment.flags.includes('R')) return [this.#loneReset(packet, service, wanted[0]!)];
    if (!isMidStream && !this.#rates.allows(service, source, this.nowMs)) return refuse(this.ends.drop('client-rate'));
    const starts = isMidStream ? wanted : this.selection.withRoom(source, service, choices, wanted);
    if (starts.length === 0) {
      if (service.noBackend === 'drop') return refuse(this.ends.drop('connection-limit'));
      return refuse(
        segment
          ? this.ends.refuseTcp(packet, this.nowMs, 'rst-connection-limit', 'connection-limit')
          : this.ends.refuseUdp(packet, this.nowMs),
      );
    }

    const { outcome } = hint;
    const routes = starts.map((start) => this.selection.route(packet, service, choices, start, !isMidStream));
    const route =
      routes.find((each) =>
        'refusal' in each ? each.refusal === outcome.reason : each.backend.name === outcome.backend,
      ) ?? routes[0]!;
    if ('refusal' in route) {
      if (route.refusal !== 'rst-mid-stream') return refuse(this.ends.drop(route.refusal));
      return refuse(this.ends.refuseTcp(packet, this.nowMs, route.refusal, 'unknown-flow'));
    }

    const { backend } = route;
    const returned = this.selection.sourceOf(route.sources, packet, backend, outcome);
    const owner = this.selection.owner(protocol, backend, returned);
    if (owner !== undefined) this.flows.remove(owner);
    if (!this.#makeRoom(protocol, hint)) {
      // What goes on without an entry must be led there by the hash alone.
      const isByHash = service.algorithm === 'maglev' && returned === source && backend === wanted[0];
      if (!isByHash) return refuse({ backend: backend.name, ...this.ends.drop('table-full') });
      this.ends.stats.stateless++;
      this.#statelessUntilMs[protocol] = this.nowMs + RECOVERY_MS;
      return refuse({ backend: backend.name, ...this.ends.forward(build(packet, source, endpointOf(backend))) });
    }
    if (isMidStream) this.ends.stats.pickedUp++;
    const flow = this.#insert(packet, service, backend, source, returned);
    this.ends.countersOf(flow.backendKey).begun++;
    const isElsewhere = this.selection.isSticky(source, service, wanted, this.nowMs) && !starts.includes(wanted[0]!);
    this.selection.stick(flow, isElsewhere, this.nowMs);
    if (!isMidStream) this.#rates.count(service, source, this.nowMs);
    return this.#follow(flow, 'original', packet, true);
  }

  #loneReset(packet: Packet, service: Service, backend: Backend): Expected {
    const known = { direction: 'original', service: service.name, backend: backend.name };
    const { source } = packet;
    if (backend.address === splitEndpoint(source)[0]) return { ...known, ...this.ends.drop('unknown-flow') };
    if (this.selection.owner('tcp', backend, source)) return { ...known, ...this.ends.drop('reply-tuple-clash') };
    return { ...known, ...this.ends.forward(build(packet, source, endpointOf(backend))) };
  }

  /** A backend's packet without a flow that can only be a reply to one that was forwarded without an entry, or forgotten. */
  #pickUpReply(packet: Packet, hint: Hint): [Expected, Flow?] | undefined {
    const { protocol, source, destination, segment } = packet;
    const isRecovering = protocol === 'tcp' && this.nowMs < this.#recoveringUntilMs;
    if (!isRecovering && this.nowMs >= this.#statelessUntilMs[protocol]) return undefined;
    const [service, another] = this.world.services.filter(
      (each) =>
        each.isPresent &&
        each.protocol === protocol &&
        each.algorithm === 'maglev' &&
        each.mode === 'dnat' &&
        each.backends.some((backend) => backend.isPresent && endpointOf(backend) === source),
    );
    if (service === undefined || another !== undefined) return undefined;
    const choices = this.selection.choices(service);
    if (choices.length === 0) return undefined;
    const backend = this.selection.hashed(destination, service, choices);
    const vip = endpointOf(service);
    if (endpointOf(backend) !== source || this.flows.find(protocol, destination, vip)) return undefined;
    if (splitEndpoint(destination)[0] === backend.address) return undefined; // a hairpin is never direct
    const isLoneReset = segment?.flags.includes('R');
    if (isLoneReset || !this.#makeRoom(protocol, hint)) {
      if (!isLoneReset) this.ends.stats.stateless++;
      const known = { direction: 'reply', service: service.name, backend: backend.name };
      return [{ ...known, ...this.ends.forward(build(packet, vip, destination)) }];
    }
    this.ends.stats.pickedUp++;
    const flow = this.#insert({ ...packet, destination: vip }, service, backend, destination, destination);
    return this.#follow(flow, 'reply', packet, true);
  }

  /** Room for one more: closing entries go first, then half-open ones; established ones never. */
  #makeRoom(protocol: 'tcp' | 'udp', { listed }: Hint): boolean {
    const rivals = [...this.flows].filter((flow) => flow.protocol === protocol);
    const { tcpEntries, anyEntries } = this.world.setup;
    if (rivals.length < (protocol === 'tcp' ? tcpEntries : anyEntries)) return true;
    const closing = rivals.filter(isClosing);
    const candidates = closing.length > 0 ? closing : rivals.filter(isHalfOpen);
    if (candidates.length === 0) return false;
    const gone = candidates.filter((flow) => !listed.has(originalOf(flow)));
    if (gone.length !== 1) throw new Error(`${gone.length} of ${candidates.map(originalOf)} were evicted`);
    this.flows.remove(gone[0]!);
    return true;
  }

  #insert({ protocol, destination }: Packet, service: Service, backend: Backend, client: string, source: string): Flow {
    const flow: Flow = {
      protocol,
      client,
      vip: destination,
      backend: endpointOf(backend),
      source,
      service,
      backendKey: keyOf(service, backend),
      isLoopback: splitEndpoint(client)[0] === backend.address,
      tcp: protocol === 'tcp' ? new TcpModel() : undefined,
      isReplied: false,
      expiresMs: Number.POSITIVE_INFINITY,
      packets: { original: 0, reply: 0 },
      bytes: { original: 0, reply: 0 },
    };
    this.flows.add(flow);
    return flow;
  }

  // --- fragments

  #seeFirst(packet: Packet, hint: Hint): Expected {
    const [expected, flow] = this.#seeHeader(packet, hint);
    const decision = this.#decide(packet, expected, flow, hint);
    const { id, source, destination } = decision;
    const out = decision.verdict === 'forward' ? [build(identified(packet, id), source, destination)] : expected.out;
    const followers = this.#fragments.lead(packet, decision).map((each) => this.#seeOther(each, decision));
    return { ...expected, out: [...out, ...followers.flatMap((each) => each.out)] };
  }

  #decide(packet: Packet, expected: Expected, flow: Flow | undefined, { outcome }: Hint): Decision {
    const { verdict, reason = '', direction, service, backend, out } = expected;
    const known = flow?.service ?? this.world.services.find((each) => each.name === service);
    const isForward = verdict === 'forward';
    const [source, destination] = isForward ? endsIn(out[0]!) : [packet.source, packet.destination];
    const given = isForward && outcome.out.length > 0 ? identificationIn(outcome.out[0]!) : 0;
    return {
      atMs: this.nowMs,
      verdict: verdict === 'reply' ? 'drop' : (verdict as Decision['verdict']),
      reason: verdict === 'reply' ? afterAnswer(reason, known) : reason,
      source,
      destination,
      id: isForward ? this.#fragments.identify(packet, source, destination, given, this.nowMs) : 0,
      side: direction as Side | undefined,
      service: known,
      backend: known?.backends.find((each) => each.name === backend),
      flow,
    };
  }

  /** A fragment that is not the first. */
  #seeOther(packet: Packet, decision: Decision): Expected {
    const { verdict, reason, source, destination, id, side, service, backend, flow } = decision;
    const known = {
      ...(side ? { direction: side } : {}),
      ...(service ? { service: service.name } : {}),
      ...(backend ? { backend: backend.name } : {}),
    };
    if (verdict === 'drop') return { ...known, ...this.ends.drop(reason) };
    if (verdict === 'pass') {
      this.ends.count(reason);
      return { verdict, reason, out: [build(packet)] };
    }
    const isAlive = flow !== undefined && this.flows.has(flow);
    if (isAlive) {
      if (flow.tcp) this.#refreshTcp(flow, flow.tcp.seeFragment());
      else this.#refreshAny(flow, side!);
      this.#account(flow, side!, packet);
    }
    const state = isAlive ? { state: stateOf(flow) } : {};
    return { ...known, ...state, ...this.ends.forward(build(identified(packet, id), source, destination)) };
  }
}

function about(flow: Flow, side: Side) {
  return { direction: side, service: flow.service.name, backend: backendName(flow), state: stateOf(flow) };
}

/** What the ends of a flow are told that is cut. */
function farewell({ client, vip, backend, source, tcp, isReplied }: Flow): MemoryPacket[] {
  if (tcp === undefined) return isReplied ? [buildOwnUnreachable(client, vip)] : [];
  const { state, isFromStart, hasNumbers, original, reply } = tcp;
  if (state === 'CLOSING' || state === 'CLOSED' || !isFromStart || (state !== 'SYN_SENT' && !hasNumbers)) return [];
  return [
    buildRst(vip, client, 'RA', reply.end, original.end),
    // Of the backend nothing was seen that could be acknowledged.
    state === 'SYN_SENT'
      ? buildRst(source, backend, 'R', original.end, 0)
      : buildRst(source, backend, 'RA', original.end, reply.end),
  ];
}

function identified(packet: Packet, id: number): Packet {
  return { ...packet, fragment: { ...packet.fragment!, id } };
}

function endsIn({ bytes }: MemoryPacket): [source: string, destination: string] {
  const end = (address: number, port: number): string =>
    `${bytes.subarray(address, address + 4).join('.')}:${(bytes[port]! << 8) | bytes[port + 1]!}`;
  return [end(12, 20), end(16, 22)];
}

function identificationIn({ bytes }: MemoryPacket): number {
  return (bytes[4]! << 8) | bytes[5]!;
}

/** Why the rest of a datagram is dropped whose first fragment was answered. */
function afterAnswer(reason: string, service: Service | undefined): string {
  if (reason === 'rst-mid-stream') return 'unknown-flow';
  if (reason === 'rst-connection-limit') return 'connection-limit';
  return service === undefined ? 'unknown-port' : 'no-backend';
}
