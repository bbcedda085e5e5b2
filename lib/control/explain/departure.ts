import { REPLIES_PER_SECOND, REPLIES_PER_SOURCE_PER_SECOND } from '../../base/limits.js';
import { REASON, REASON_MEANINGS, REASON_NAMES } from '../../base/reasons.js';
import { STATE_NAMES } from '../../conntrack/record.js';
import * as S from '../../datapath/snapshot.js';
import { DIRECTION_NAMES, DIRECTION_REPLY, DROP, FORWARD, REPLY, VERDICT_NAMES } from '../../datapath/verdict.js';
import { OUTER_HEADER_BYTES, overheadBytes } from '../../tunnel/encapsulation.js';
import { formatEndpoint, formatIpv4 } from '../../wire/address.js';
import * as ipv4 from '../../wire/ipv4.js';
import { TCP_CHECKSUM } from '../../wire/tcp.js';
import { UDP_CHECKSUM } from '../../wire/udp.js';
import { flowJson } from '../flows.js';
import { plural, sayTime } from '../summary.js';
import { describeFlow } from './arrival.js';
import { type KnownCase, serviceWord, step } from './case.js';
import type { DryRun, Lookup } from './dry-run.js';
import type { OutcomeView, StepView } from './explain-view.js';
import { describeTuple, headersOf, hexOf, packetView, viewOf } from './packet-summary.js';

/** Headers that are shown whole: IP and L4 without options have 40 bytes at most. */
const SHOWN_BYTES = 60;

/** How a packet ends in a dry run, and the steps to there that a lot may have decided. */
export function outcomeOf(known: KnownCase, run: DryRun, probability: number, portDrawn: boolean): OutcomeView {
  const { identities } = known.scene.desired;
  return {
    probability,
    portDrawn,
    steps: [
      ...tupleSteps(known, run),
      ...tunnelSteps(known, run),
      ...entrySteps(known, run),
      ...answerSteps(known, run),
      ...rewriteSteps(known, run),
    ],
    verdict: VERDICT_NAMES[run.verdict]!,
    reason: run.reason === 0 ? null : REASON_NAMES[run.reason]!,
    meaning: run.reason === 0 ? null : REASON_MEANINGS[run.reason]!,
    direction: DIRECTION_NAMES[run.direction]!,
    service: identities.serviceName(run.service) ?? null,
    backend: identities.backendName(run.backend) ?? null,
    state: run.state === 0 ? null : STATE_NAMES[run.state]!,
    entry: run.entry === undefined ? null : flowJson(run.entry),
    out: run.sent.map((bytes) => ({ ...packetView(bytes), route: null })),
  };
}

/** Whose the tuples are that answers could come back by: what Admission asked the table after the packet's own. */
function tupleSteps({ service, headers, snapshot }: KnownCase, { lookups, made, reason }: DryRun): StepView[] {
  if (service === 0) return [];
  const { source, sourcePort } = headers;
  const asked = lookups.slice(1);
  const isOfClient = (each: Lookup): boolean => each.destination === source && (each.ports & 0xffff) === sourcePort;
  const steps = asked.filter(isOfClient).map(replyTupleStep);
  const tries = asked.filter((each) => !isOfClient(each));
  const isSnat = made !== undefined && ((made.source.address | 0) !== source || made.source.port !== sourcePort);
  if (tries.length === 0 && !isSnat) return steps;
  const taken = tries.filter(({ flow, isGone }) => flow !== undefined && !isGone).length;
  const pool = `${[...snapshot.snatAddresses].map(formatIpv4).join(', ')}, ports ${snapshot.snatFirstPort} to ${snapshot.snatLastPort}`;
  const details = { tries: tries.length, taken };
  const notes = [`the pool is ${pool}; a port is free when no reply to it is awaited from this backend`];
  if (reason === REASON['no-snat-port']) {
    return [...steps, step('source-port', 'none', `all ${tries.length} that were tried are taken`, details, notes)];
  }
  if (made === undefined) return steps;
  const got = formatEndpoint(made.source.address, made.source.port);
  const how =
    made.source.port === sourcePort
      ? 'the client’s own port'
      : `drawn by lot, after ${plural(taken, 'port')} that ${taken === 1 ? 'was' : 'were'} taken`;
  const result = made.source.port === sourcePort ? 'kept' : 'drawn';
  return [...steps, step('source-port', result, `${got}: ${how}`, { ...details, source: got }, notes)];
}

function replyTupleStep({ source, destination, ports, protocol, flow, isGone }: Lookup): StepView {
  const tuple = describeTuple(source, destination, ports, protocol);
  if (flow === undefined) return step('reply-tuple', 'free', `answers ${tuple} are nobody else’s`);
  const details = { entry: flowJson(flow) };
  return isGone
    ? step('reply-tuple', 'replaced', `answers ${tuple} are taken over from ${describeFlow(flow)}`, details)
    : step('reply-tuple', 'taken', `answers ${tuple} would be those of ${describeFlow(flow)}`, details);
}

/** Of what goes, or does not fit, into a tunnel. */
function tunnelSteps(known: KnownCase, run: DryRun): StepView[] {
  const { snapshot, headers, recollection, scene, service } = known;
  const isOneWay = run.entry?.type === 'SVC' || run.lookups[0]?.flow?.type === 'SVC';
  const isDsr = isOneWay || (service !== 0 && serviceWord(known, S.SERVICE_MODE) === S.MODE_DSR);
  const { tunnel, backends } = snapshot;
  if (!isDsr || run.backend === 0 || tunnel.address === 0) return [];
  const node = backends[run.backend * S.BACKEND_WORDS + S.BACKEND_NODE]!;
  const lowered = recollection.pathMtus.find(([each, { expiresMs }]) => each === node && expiresMs > scene.nowMs)?.[1];
  const mtu = Math.min(tunnel.mtu, lowered?.mtu ?? tunnel.mtu);
  const room = mtu - overheadBytes(tunnel.inner);
  const fits = headers.length <= room;
  const path = lowered === undefined ? `the device takes ${mtu} bytes` : `a router on the way takes ${mtu} bytes`;
  const text = `to node ${formatIpv4(node)}: ${path}, ${room} inside the tunnel; the packet has ${headers.length}`;
  return [step('tunnel', fits ? 'fits' : 'too-big', text, { node: formatIpv4(node), mtu, room })];
}

/** What becomes of the connection. */
function entrySteps(
  known: KnownCase,
  { made, entry, direction, verdict, reason, lookups: [first] }: DryRun,
): StepView[] {
  if (made !== undefined) {
    const how = direction === DIRECTION_REPLY ? 'made, the hash telling whose reply this is' : 'made';
    return [step('entry', 'made', `${how}: ${describeFlow(made)}`, { entry: flowJson(made) })];
  }
  if (first === undefined) return [];
  if (entry !== undefined && verdict === FORWARD) {
    const before = first.flow!;
    const change = before.state === entry.state ? `stays ${entry.state}` : `${before.state} becomes ${entry.state}`;
    return [step('entry', 'kept', `${change}, expires in ${sayTime(entry.expiresInMs)}`, { entry: flowJson(entry) })];
  }
  if (first.isGone) return [step('entry', 'removed', 'none is left')];
  if ((known.service !== 0 || known.quote !== undefined) && entry === undefined && verdict === FORWARD) {
    return [step('entry', 'none', 'none is made: the hash alone leads every such packet there')];
  }
  return verdict === DROP && reason === REASON['table-full'] ? [step('entry', 'full', 'there is no room for one')] : [];
}

/** Of answers: how much of their limits is used up. */
function answerSteps({ recollection: { answers }, scene }: KnownCase, { verdict, reason }: DryRun): StepView[] {
  if (verdict !== REPLY && reason !== REASON['rate-limited']) return [];
  const inWindow = (window: { startMs: number; count: number } | null): number =>
    window !== null && scene.nowMs - window.startMs < 1000 ? window.count : 0;
  const all = inWindow(answers.all);
  const source = inWindow(answers.source);
  const text = `in this second ${all} of ${REPLIES_PER_SECOND} answers were given, ${source} of ${REPLIES_PER_SOURCE_PER_SECOND} to this source`;
  return [step('answer', verdict === REPLY ? 'given' : 'refused', text, { all, source })];
}

/** What was made of a packet that leaves in one piece. */
function rewriteSteps({ bytes, headers }: KnownCase, { verdict, sent }: DryRun): StepView[] {
  if (verdict !== FORWARD || sent.length !== 1) return [];
  const [out] = sent;
  const outerBytes = out!.length - headers.length;
  const before = bytes.subarray(0, headers.length);
  const inner = out!.subarray(outerBytes);
  const changes = changesOf(before, inner, headers.l4, headers.protocol, headers.fragmentOffset !== 0);
  const shown = changes.map(({ field, from, to }) => `${field} ${from} becomes ${to}`);
  const steps = [
    step(
      'rewrite',
      changes.length === 0 ? 'none' : 'rewritten',
      shown.length === 0 ? 'nothing is changed' : shown.join(', '),
      { changes, before: hexOf(before), after: hexOf(inner) },
      [`before ${clipHex(before)}`, `after  ${clipHex(inner)}`],
    ),
  ];
  if (outerBytes === 0) return steps;
  const outer = out!.subarray(0, outerBytes);
  const { source, destination, ports, protocol } = headersOf(out!);
  const text = `${describeTuple(source, destination, ports, protocol)}, ${outerBytes} bytes before the packet`;
  const details = {
    outer: hexOf(outer.subarray(0, OUTER_HEADER_BYTES)),
    tunnel: hexOf(outer.subarray(OUTER_HEADER_BYTES)),
  };
  const notes = [`outer  ${details.outer}`, `tunnel ${details.tunnel}`];
  return [...steps, step('encapsulation', 'geneve', text, details, notes)];
}

interface Change {
  readonly field: string;
  readonly from: string;
  readonly to: string;
}

function changesOf(before: Uint8Array, after: Uint8Array, l4: number, protocol: number, isLater: boolean): Change[] {
  const changes: Change[] = [];
  const note = (field: string, from: string, to: string): void => {
    if (from !== to) changes.push({ field, from, to });
  };
  const half = (bytes: Uint8Array, at: number): string => hexOf(bytes.subarray(at, at + 2));
  const fields = (bytes: Uint8Array) => ({ view: viewOf(bytes), headers: headersOf(bytes) });
  const [a, b] = [fields(before), fields(after)];
  note('source', formatIpv4(ipv4.source(a.view, 0)), formatIpv4(ipv4.source(b.view, 0)));
  note('destination', formatIpv4(ipv4.destination(a.view, 0)), formatIpv4(ipv4.destination(b.view, 0)));
  note('identification', String(a.headers.identification), String(b.headers.identification));
  if (!isLater) {
    note('source port', String(a.headers.sourcePort), String(b.headers.sourcePort));
    note('destination port', String(a.headers.destinationPort), String(b.headers.destinationPort));
  }
  note('header checksum', half(before, ipv4.checksumOffset(0)), half(after, ipv4.checksumOffset(0)));
  if (isLater) return changes;
  if (protocol === ipv4.PROTO_TCP)
    note('TCP checksum', half(before, l4 + TCP_CHECKSUM), half(after, l4 + TCP_CHECKSUM));
  if (protocol === ipv4.PROTO_UDP)
    note('UDP checksum', half(before, l4 + UDP_CHECKSUM), half(after, l4 + UDP_CHECKSUM));
  return changes;
}

function clipHex(bytes: Uint8Array): string {
  return `${hexOf(bytes.subarray(0, SHOWN_BYTES))}${bytes.length > SHOWN_BYTES ? '...' : ''}`;
}
