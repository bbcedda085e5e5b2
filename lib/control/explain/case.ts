import { lookup } from '../../balance/lookup.js';
import type { ServiceConfig } from '../../config/config.js';
import { BACKEND_ID } from '../../conntrack/record.js';
import { swapPorts } from '../../datapath/packet.js';
import type { Recollection, RecollectionQuery } from '../../datapath/recollection.js';
import * as S from '../../datapath/snapshot.js';
import { makeQuote, parseQuote, type Quote } from '../../nat/icmp-error.js';
import * as icmp from '../../wire/icmp.js';
import { PROTO_ICMP, PROTO_TCP, PROTO_UDP } from '../../wire/ipv4.js';
import type { StepName, StepView } from './explain-view.js';
import { type Headers, headersOf, viewOf } from './packet-summary.js';
import type { Scene } from './scene.js';

/** A packet that is to be explained, and what is known of it before anything is done. */
export interface Case {
  readonly scene: Scene;
  readonly snapshot: S.Snapshot;
  readonly bytes: Uint8Array;
  readonly headers: Headers;
  /** Whose destination it is: an id; 0: none. */
  readonly service: number;
  /** The same as the file has it. */
  readonly configured: ServiceConfig | undefined;
  /** Of an ICMP error that quotes something that can be a flow's. */
  readonly quote: Quote | undefined;
  readonly query: RecollectionQuery;
}

/** A case, with what the data path knew besides. */
export interface KnownCase extends Case {
  readonly recollection: Recollection;
}

export function openCase(scene: Scene, bytes: Uint8Array): Case {
  const { snapshot, config } = scene.desired;
  const headers = headersOf(bytes);
  const { source, destination, destinationPort, protocol, identification, fragmentOffset } = headers;
  const hasPorts = fragmentOffset === 0 && (protocol === PROTO_TCP || protocol === PROTO_UDP);
  const service = hasPorts ? lookup(snapshot.serviceIndex, destination, destinationPort, protocol) : 0;
  const quote = quoteOf(bytes, headers);
  const nodes = nodesOf(scene, headers, quote, service);
  return {
    scene,
    snapshot,
    bytes,
    headers,
    service,
    configured: config.services.find(
      ({ address, port, protocolNumber }) =>
        service !== 0 && (address.word | 0) === destination && port === destinationPort && protocolNumber === protocol,
    ),
    quote,
    query: { source, destination, protocol, identification, service, nodes },
  };
}

/** What the service's row of the snapshot says in a word. */
export function serviceWord({ snapshot, service }: Case, word: number): number {
  return snapshot.services[service * S.SERVICE_WORDS + word]!;
}

/** @param notes more sentences */
export function step(
  name: StepName,
  result: string,
  text: string,
  details: Readonly<Record<string, unknown>> = {},
  notes: readonly string[] = [],
): StepView {
  return { step: name, result, text, notes, details };
}

function quoteOf(bytes: Uint8Array, { reason, protocol, l4, length, isFragment }: Headers): Quote | undefined {
  if (reason !== 0 || protocol !== PROTO_ICMP || isFragment || !icmp.isError(icmp.type(bytes, l4))) return undefined;
  const quote = makeQuote();
  return parseQuote(viewOf(bytes), bytes, 0, l4, length, quote) === 0 ? quote : undefined;
}

/** Where the packet may be sent through a tunnel: to the node of its connection's backend, or of any that may be chosen. */
function nodesOf(
  { desired: { snapshot }, readers }: Scene,
  { source, destination, ports, protocol }: Headers,
  quote: Quote | undefined,
  service: number,
): number[] {
  const { services, choices, backends } = snapshot;
  const nodeOf = (backend: number): number => backends[backend * S.BACKEND_WORDS + S.BACKEND_NODE]!;
  const nodes = new Set<number>();
  const chosenFrom =
    quote === undefined ? service : lookup(snapshot.serviceIndex, quote.source, quote.ports >>> 16, quote.protocol);
  const row = chosenFrom * S.SERVICE_WORDS;
  if (services[row + S.SERVICE_MODE] === S.MODE_DSR && chosenFrom !== 0) {
    const first = services[row + S.CHOICES_AT]!;
    for (let i = 0; i < services[row + S.CHOICES_COUNT]!; i++) nodes.add(nodeOf(choices[(first + i) * 2]!));
  }
  const key = quote ?? { source: destination, destination: source, ports: swapPorts(ports), protocol };
  const reader = key.protocol === PROTO_TCP ? readers.tcp : readers.any;
  const reference = reader.find(key.destination, key.source, swapPorts(key.ports), key.protocol);
  if (reference >= 0) nodes.add(nodeOf(reader.words[BACKEND_ID]!));
  return [...nodes];
}
