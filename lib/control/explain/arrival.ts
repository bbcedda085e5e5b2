import { lookup } from '../../balance/lookup.js';
import { probabilityChain } from '../../balance/pick.js';
import { REASON, REASON_NAMES } from '../../base/reasons.js';
import { isInSourceRanges } from '../../datapath/limits.js';
import { isOwnAddress } from '../../datapath/own-address.js';
import { choiceOfHash, selectionHash } from '../../datapath/pick-up.js';
import * as S from '../../datapath/snapshot.js';
import { VERDICT_NAMES } from '../../datapath/verdict.js';
import { formatEndpoint, formatIpv4 } from '../../wire/address.js';
import * as icmp from '../../wire/icmp.js';
import { PROTO_ICMP, PROTO_TCP, PROTO_UDP } from '../../wire/ipv4.js';
import { faultOf } from '../../wire/ipv4-fault.js';
import { isOpeningSyn } from '../../wire/tcp.js';
import { type Flow, flowJson, protocolName } from '../flows.js';
import { nameAndAddress, plural, sayTime } from '../summary.js';
import { describeBackends } from './backends.js';
import { type KnownCase, serviceWord, step } from './case.js';
import type { DryRun } from './dry-run.js';
import type { StepView } from './explain-view.js';
import { describeTuple } from './packet-summary.js';
import { flagNames } from './request.js';

/**
 * What happens to a packet before a lot could decide, as steps. Each looks at what the data path looks at, by its functions; how it
 * all ends is not concluded from that but told by the dry run.
 */
export function arrivalSteps(known: KnownCase, run: DryRun): StepView[] {
  const { headers, service } = known;
  if (headers.reason !== 0) return [parseStep(known)];
  const steps = [parseStep(known), destinationStep(known)];
  if (headers.fragmentOffset !== 0) return [...steps, fragmentStep(known)];
  if (headers.protocol === PROTO_ICMP) steps.push(icmpStep(known));
  const [first] = run.lookups;
  if (first === undefined) return steps;
  steps.push(conntrackStep(known, run));
  if (service === 0 || !isAdmitted(known, run)) return steps;
  return [...steps, ...admissionSteps(known, run)];
}

/** Whether the packet was taken for the first of a flow. */
function isAdmitted({ scene, snapshot, headers }: KnownCase, { lookups: [first] }: DryRun): boolean {
  if (first?.flow === undefined) return true;
  // A TCP connection that is cut ends with this packet.
  const isCut = scene.nowMs >= snapshot.cutAt[first.flow.backendId]!;
  const isExpired = first.flow.expiresInMs <= 0;
  return first.isGone && (isExpired || !isCut || headers.protocol !== PROTO_TCP);
}

function parseStep({ bytes, headers }: KnownCase): StepView {
  if (headers.reason !== 0) {
    const fault = faultOf(bytes, 0, bytes.length)!;
    return step('parse', 'refused', `refused at sight: ${fault}`, { fault });
  }
  const { protocol, tcpFlags, isFragment, fragmentOffset, identification, length } = headers;
  const beyond = bytes.length - length;
  const what =
    fragmentOffset !== 0
      ? `a fragment of datagram ${identification}, from byte ${fragmentOffset} on`
      : isFragment
        ? `the first fragment of datagram ${identification}`
        : `${protocolName(protocol)}${protocol === PROTO_TCP ? ` with ${flagNames(tcpFlags)}` : ''}`;
  const notes = beyond > 0 ? [`${plural(beyond, 'byte')} behind it are not sent on`] : [];
  if (isFragment && fragmentOffset === 0)
    notes.push('it may leave with another identification, if a datagram has this one there');
  return step('parse', 'ok', `IPv4, ${what}: all headers are whole`, { protocol, length }, notes);
}

function destinationStep(known: KnownCase): StepView {
  const { snapshot, headers, service, configured, scene } = known;
  const { destination, destinationPort, protocol, fragmentOffset } = headers;
  const address = formatIpv4(destination);
  const bits = lookup(snapshot.vipIndex, destination, 0, 0);
  if (service !== 0 && bits !== 0) {
    const { name, algorithm, mode } = configured!;
    const endpoint = `${formatEndpoint(destination, destinationPort)}/${protocolName(protocol)}`;
    const details = { service: name, algorithm, mode };
    const text = `${endpoint} is service ${name}: ${algorithm}, ${mode}`;
    return step('destination', 'service', text, details, mode === 'dnat' ? localNotes(known) : []);
  }
  if (bits !== 0) {
    const hasPort = fragmentOffset === 0 && (protocol === PROTO_TCP || protocol === PROTO_UDP);
    const of = hasPort ? `; no service has its port ${destinationPort}/${protocolName(protocol)}` : '';
    return step('destination', 'vip', `${address} is a VIP${of}`, { services: servicesOf(known, address) });
  }
  if (lookup(snapshot.snatIndex, destination, 0, 0) !== 0) {
    return step('destination', 'snat', `${address} is an snat address: what comes to it are replies`);
  }
  const removed = scene.desired.removedServices().filter(({ vip }) => (vip | 0) === destination);
  const notes = removed.map(({ name }) => `service ${name} had it, and has left the file`);
  return step('destination', 'other', `${address} is no VIP and no snat address: a reply, or not weir’s`, {}, notes);
}

/** Answers to an address of this host are its own before any rule of weir's could lead them in. */
function localNotes({ scene, headers }: KnownCase): string[] {
  const source = formatIpv4(headers.source);
  if (!scene.localAddresses.has(source)) return [];
  return [
    `${source} is an address of this host: the backend’s answers go to it past weir, so in mode dnat no connection comes about; ask from another host`,
  ];
}

function servicesOf({ scene }: KnownCase, address: string): string[] {
  return scene.desired.config.services.filter((each) => each.address.text === address).map(({ name }) => name);
}

function fragmentStep({ recollection: { datagram }, scene }: KnownCase): StepView {
  const { decided, held } = datagram;
  if (decided === null || decided.expiresMs <= scene.nowMs) {
    const waiting =
      held.length > 0 ? `, as ${plural(held.length, 'other')} of it already ${held.length > 1 ? 'do' : 'does'}` : '';
    return step('fragment', 'unknown', `its first fragment has not been seen: it waits for that${waiting}`, {
      held: held.length,
    });
  }
  const { verdict, reason } = decided.decision;
  const fate = `${VERDICT_NAMES[verdict]}${reason === 0 ? '' : ` (${REASON_NAMES[reason]})`}`;
  return step('fragment', 'follows', `it follows the first fragment, whose fate was: ${fate}`, {
    verdict: VERDICT_NAMES[verdict],
  });
}

function icmpStep({ bytes, headers: { l4 }, quote }: KnownCase): StepView {
  const type = icmp.type(bytes, l4);
  const code = icmp.code(bytes, l4);
  if (!icmp.isError(type)) {
    const what = type === icmp.ECHO_REQUEST ? 'an echo request' : `a message of type ${type}`;
    return step('icmp', type === icmp.ECHO_REQUEST ? 'echo' : 'message', what, { type, code });
  }
  if (quote === undefined) {
    return step('icmp', 'error', `an error, type ${type} code ${code}, that quotes nothing of a flow’s`, {
      type,
      code,
    });
  }
  const quoted = describeTuple(quote.source, quote.destination, quote.ports, quote.protocol);
  return step('icmp', 'error', `an error, type ${type} code ${code}, that quotes ${quoted}`, { type, code, quoted });
}

function conntrackStep({ scene, snapshot }: KnownCase, { lookups: [first] }: DryRun): StepView {
  const { source, destination, ports, protocol, reference, flow, isGone } = first!;
  const tuple = describeTuple(source, destination, ports, protocol);
  if (flow === undefined) return step('conntrack', 'miss', `no entry for ${tuple}`);
  const direction = (reference & 1) === 0 ? 'original' : 'reply';
  const details = { direction, entry: flowJson(flow) };
  const text = describeFlow(flow);
  if (flow.expiresInMs <= 0)
    return step('conntrack', 'expired', `an entry that counts as none, having expired: ${text}`, details);
  if (!isGone) return step('conntrack', 'hit', `${direction} direction of ${text}`, details);
  if (scene.nowMs >= snapshot.cutAt[flow.backendId]!) {
    return step('conntrack', 'cut', `an entry whose backend has left and whose time is over: ${text}`, details);
  }
  const why = flow.state === 'CLOSING' || flow.state === 'CLOSED' ? 'it is closing' : 'its backend takes no new flows';
  return step('conntrack', 'replaced', `begins anew in place of an entry, since ${why}: ${text}`, details);
}

/** `web/b1 10.2.0.11:8080, ESTABLISHED, expires in 2h13m`, with its client's ends before it. */
export function describeFlow(flow: Flow): string {
  const { client, vip, backend, serviceName = '?', backendName = '?', state, expiresInMs } = flow;
  const ends = `${protocolName(flow.protocol)} ${formatEndpoint(client.address, client.port)} > ${formatEndpoint(vip.address, vip.port)}`;
  const where = `${serviceName}/${nameAndAddress(backendName, formatEndpoint(backend.address, backend.port))}`;
  const when = expiresInMs > 0 ? `expires in ${sayTime(expiresInMs)}` : `expired ${sayTime(-expiresInMs)} ago`;
  return `${ends}, to ${where}, ${state}, ${when}`;
}

/** The steps of Admission up to the choice of a backend, as far as it goes. */
function admissionSteps(known: KnownCase, run: DryRun): StepView[] {
  const { snapshot, headers } = known;
  const steps = [sourceStep(known)];
  if (steps[0]!.result === 'refused') return steps;
  if (isOwnAddress(snapshot, headers.source)) {
    return [step('source', 'refused', `the client, ${formatIpv4(headers.source)}, is an address of weir’s own`)];
  }
  const isMidStream = headers.protocol === PROTO_TCP && !isOpeningSyn(headers.tcpFlags);
  if (isMidStream) {
    const midStream = midStreamStep(known);
    steps.push(midStream);
    if (midStream.result === 'refused') return steps;
  }
  if (serviceWord(known, S.CHOICES_COUNT) !== 0) {
    if (serviceWord(known, S.AFFINITY_SECONDS) !== 0) steps.push(affinityStep(known));
    if (steps.at(-1)!.result !== 'remembered') steps.push(isByLot(known) ? lotStep(known) : hashStep(known));
    const isLimited = (serviceWord(known, S.SERVICE_FLAGS) & S.SERVICE_LIMITED) !== 0;
    if (isLimited && !isMidStream) steps.push(limitStep(known, run));
  }
  return [...steps, describeBackends(known, run.full)];
}

function sourceStep(known: KnownCase): StepView {
  const { snapshot, headers } = known;
  const count = serviceWord(known, S.RANGES_COUNT);
  if (count === 0) return step('source', 'allowed', 'every client may connect');
  const client = formatIpv4(headers.source);
  return isInSourceRanges(snapshot, known.service * S.SERVICE_WORDS, headers.source)
    ? step('source', 'allowed', `${client} is within sourceRanges`, { ranges: count })
    : step('source', 'refused', `${client} is outside sourceRanges`, { ranges: count });
}

function midStreamStep(known: KnownCase): StepView {
  const mode = serviceWord(known, S.SERVICE_MODE);
  const isMaglev = (serviceWord(known, S.SERVICE_FLAGS) & S.SERVICE_MAGLEV) !== 0;
  const flags = flagNames(known.headers.tcpFlags);
  return mode === S.MODE_DSR || (isMaglev && mode !== S.MODE_SNAT)
    ? step('mid-stream', 'taken-up', `${flags}: the middle of a connection, which is taken up, the hash deciding alone`)
    : step('mid-stream', 'refused', `${flags}: the middle of a connection, whose backend or source port nobody knows`);
}

/** Whether a lot decides where affinity does not. */
export function isByLot(known: KnownCase): boolean {
  return serviceWord(known, S.MAGLEV_SIZE) === 0 && serviceWord(known, S.SERVICE_MODE) !== S.MODE_DSR;
}

/** The backend that affinity decides for; 0: it does not. */
export function rememberedBackend({ recollection: { affinity }, scene, snapshot, service }: KnownCase): number {
  if (affinity === null || affinity.untilMs <= scene.nowMs) return 0;
  const row = affinity.backend * S.BACKEND_WORDS;
  if (snapshot.backends[row + S.BACKEND_SERVICE] !== service) return 0;
  return (snapshot.backends[row + S.BACKEND_FLAGS]! & S.TAKES_NEW) === 0 ? 0 : affinity.backend;
}

function affinityStep(known: KnownCase): StepView {
  const { recollection, scene } = known;
  const { affinity } = recollection;
  if (affinity === null || affinity.untilMs <= scene.nowMs) {
    return step('affinity', 'none', 'the client is not remembered');
  }
  const backend = scene.desired.identities.backendName(affinity.backend) ?? '?';
  const seconds = Math.round((affinity.untilMs - scene.nowMs) / 1000);
  const details = { backend, seconds };
  return rememberedBackend(known) !== 0
    ? step('affinity', 'remembered', `the client was sent to ${backend} before, and is for ${seconds} s more`, details)
    : step('affinity', 'lost', `the client was sent to ${backend} before, which takes no new connections`, details);
}

function hashStep(known: KnownCase): StepView {
  const { snapshot, headers, service, scene } = known;
  const { source, sourcePort, destinationPort, protocol } = headers;
  const hash = selectionHash(snapshot, service * S.SERVICE_WORDS, source, sourcePort, destinationPort, protocol);
  const size = serviceWord(known, S.MAGLEV_SIZE);
  const first = serviceWord(known, S.CHOICES_AT);
  const row = service * S.SERVICE_WORDS;
  const choice = choiceOfHash(snapshot, row, source, sourcePort, destinationPort, protocol);
  const backend = scene.desired.identities.backendName(snapshot.choices[(first + choice) * 2]!) ?? '?';
  const hex = `0x${hash.toString(16).padStart(8, '0')}`;
  const covers = serviceWord(known, S.AFFINITY_SECONDS) === 0 ? 'address and port' : 'address';
  if (size === 0) {
    return step('selection', 'hash', `hash ${hex} of the client’s ${covers} draws the lot: ${backend}`, {
      hash,
      backend,
    });
  }
  const slot = hash % size;
  const text = `hash ${hex} of the client’s ${covers}, slot ${slot} of ${size} in the Maglev table: ${backend}`;
  return step('selection', 'maglev', text, { hash, slot, size, backend });
}

/** What the limits of the service are, and how much of them was used up before. */
function limitStep(known: KnownCase, { full, reason }: DryRun): StepView {
  const { recollection, scene, snapshot } = known;
  const { services, backends, clientFullAtMs } = recollection.limits;
  const { identities } = scene.desired;
  const notes: string[] = [];
  const max = serviceWord(known, S.SERVICE_CONNECTIONS);
  const open = services[0]?.[1] ?? 0;
  if (max !== 0) notes.push(`${open} of ${max} connections of the service are open`);
  for (const [backend, count] of backends) {
    const limit = snapshot.backends[backend * S.BACKEND_WORDS + S.BACKEND_CONNECTIONS]!;
    if (limit !== 0) notes.push(`${count} of ${limit} of ${identities.backendName(backend) ?? '?'} are open`);
  }
  const perSecond = serviceWord(known, S.CLIENT_CONNECTIONS);
  if (perSecond !== 0) {
    const aheadMs = Math.max(0, (clientFullAtMs ?? 0) - scene.nowMs);
    const left = Math.max(0, Math.floor(((1000 - aheadMs) * perSecond) / 1000 + 0.01));
    notes.push(`the client may open ${left} more at once, of ${perSecond} a second`);
  }
  const details = { open, max: max === 0 ? null : max, full: full.map((id) => identities.backendName(id)) };
  if (reason === REASON['client-rate']) {
    return step('limits', 'client-rate', 'the client has opened as many connections as it may', details, notes);
  }
  const isRefused = reason === REASON['connection-limit'] || reason === REASON['rst-connection-limit'];
  if (isRefused) return step('limits', 'full', 'there are as many connections as there may be', details, notes);
  if (full.length === 0) return step('limits', 'room', 'there is room', details, notes);
  const names = full.map((id) => identities.backendName(id) ?? '?').join(', ');
  return step(
    'limits',
    'passed-over',
    `there is room, but ${names} ${full.length > 1 ? 'are' : 'is'} full and passed over`,
    details,
    notes,
  );
}

/** As kube-proxy's chain would say it: each rule sees what those before it have left. */
function lotStep(known: KnownCase): StepView {
  const { snapshot, scene } = known;
  const first = serviceWord(known, S.CHOICES_AT);
  const count = serviceWord(known, S.CHOICES_COUNT);
  const weights = Array.from({ length: count }, (_, i) => weightOf(snapshot.choices, first, i));
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  const probabilities = probabilityChain(weights);
  const chain = weights.map((weight, i) => ({
    backend: scene.desired.identities.backendName(snapshot.choices[(first + i) * 2]!) ?? '?',
    probability: probabilities[i]!,
    share: weight / total,
  }));
  let rest = total;
  const rules = chain.slice(0, SHOWN_RULES).map(({ backend, share }, i) => {
    const rule = i === count - 1 ? 'the rest' : fraction(weights[i]!, rest);
    rest -= weights[i]!;
    const left = i === 0 || i === count - 1 ? '' : ' of what is left';
    return `${backend} ${rule}${left}, ${percent(share)} of all`;
  });
  if (count > SHOWN_RULES) rules.push(`and ${count - SHOWN_RULES} more`);
  return step('selection', 'random', `a lot is drawn among ${plural(count, 'backend')}`, { chain }, rules);
}

/** A chain that is longer is cut, for people. */
const SHOWN_RULES = 20;

function fraction(numerator: number, denominator: number): string {
  let [a, b] = [numerator, denominator];
  while (b !== 0) [a, b] = [b, a % b];
  return `${numerator / a}/${denominator / a}`;
}

/** The weight of a choice, from the cumulative ones. */
export function weightOf(choices: Int32Array, first: number, choice: number): number {
  const before = choice === 0 ? 0 : choices[(first + choice - 1) * 2 + 1]! >>> 0;
  return (choices[(first + choice) * 2 + 1]! >>> 0) - before;
}

function percent(share: number): string {
  return `${Number((share * 100).toPrecision(4))} %`;
}
