import { formatEndpoint, formatIpv4 } from '../wire/address.js';
import { PROTO_ICMP, PROTO_TCP } from '../wire/ipv4.js';
import { type Endpoint, type Flow, flagNames, flowJson, protocolName } from './flows.js';
import { sayTime } from './summary.js';

/**
 * The four forms a list of flows is printed in. Each is a stream of text chunks: a consumer that waits between them lets a
 * list of a million flows pass with flat memory.
 *
 * - `table`: for people, columns of fixed width;
 * - `json`: an array with one flow a line;
 * - `cilium`: as `cilium bpf ct list global` prints entries: for each two-way flow its OUT entry, then the SVC entry of the
 *   client's side; for a one-way flow (dsr) the latter alone;
 * - `conntrack`: as conntrack-tools does (`conntrack -L`), with the kernel's names of states.
 */
export type FlowFormat = 'table' | 'json' | 'cilium' | 'conntrack';

export const FLOW_FORMATS: readonly FlowFormat[] = ['table', 'json', 'cilium', 'conntrack'];

const CHUNK_CHARS = 32 * 1024;

/**
 * Every chunk but the last has at least CHUNK_CHARS, or is empty: a place for a rest. Lines are never cut.
 *
 * @param flows null: a place for a rest
 */
export function* formatFlows(flows: Iterable<Flow | null>, format: FlowFormat): Generator<string, void, void> {
  let chunk = format === 'table' ? TABLE_HEAD : '';
  if (format === 'json') {
    let separator = '[\n';
    for (const flow of flows) {
      if (flow === null) {
        yield '';
        continue;
      }
      chunk += separator + JSON.stringify(flowJson(flow));
      separator = ',\n';
      if (chunk.length >= CHUNK_CHARS) {
        yield chunk;
        chunk = '';
      }
    }
    yield separator === '[\n' ? '[]\n' : `${chunk}\n]\n`;
    return;
  }
  const line = format === 'table' ? tableLine : format === 'cilium' ? ciliumLines : conntrackLine;
  for (const flow of flows) {
    if (flow === null) {
      yield '';
      continue;
    }
    chunk += line(flow);
    if (chunk.length >= CHUNK_CHARS) {
      yield chunk;
      chunk = '';
    }
  }
  if (chunk !== '') yield chunk;
}

const COLUMNS = [5, 4, 21, 21, 21, 16, 11, 8, 15, 17] as const;

const TABLE_HEAD = `${columns(['PROTO', 'TYPE', 'CLIENT', 'VIP', 'BACKEND', 'SERVICE', 'STATE', 'EXPIRES', 'PACKETS', 'BYTES'])} FLAGS\n`;

function columns(cells: readonly string[]): string {
  return cells.map((cell, i) => cell.padEnd(COLUMNS[i]!)).join(' ');
}

function tableLine(flow: Flow): string {
  const cells = columns([
    protocolName(flow.protocol),
    flow.type,
    text(flow.client),
    text(flow.vip),
    text(flow.backend),
    flow.serviceName ?? '',
    flow.state,
    sayTime(flow.expiresInMs),
    `${flow.txPackets}/${flow.rxPackets}`,
    `${flow.txBytes}/${flow.rxBytes}`,
  ]);
  return `${`${cells} ${flagNames(flow.flags).join(' ')}`.trimEnd()}\n`;
}

/** Seconds are of the data path's clock, as Cilium's are of the kernel's. */
function ciliumLines(flow: Flow): string {
  const proto = protocolName(flow.protocol).toUpperCase();
  const flags = flagNames(flow.flags).map((name) => `${name} `);
  const tail =
    `TxFlagsSeen=${hex(flow.txFlagsSeen, 2)} LastTxReport=${flow.txSeenSeconds} ` +
    `Flags=${hex(flow.flags, 4)} [ ${flags.join('')}] RevNAT=${flow.serviceId} BackendID=${flow.backendId}\n`;
  const expires = `expires=${Math.floor(flow.expiresMs / 1000)}`;
  const client = text(flow.client);
  const service = `${proto} SVC ${client} -> ${text(flow.vip)} ${expires} RxFlagsSeen=0x00 LastRxReport=0 ${tail}`;
  if (flow.type === 'SVC') return service;
  const rx = `RxFlagsSeen=${hex(flow.rxFlagsSeen, 2)} LastRxReport=${flow.rxSeenSeconds}`;
  return `${proto} OUT ${client} -> ${text(flow.backend)} ${expires} ${rx} ${tail}${service}`;
}

/** weir's states of TCP that the kernel calls by another name. */
const KERNEL_STATES: Readonly<Record<string, string>> = { CLOSING: 'TIME_WAIT', CLOSED: 'CLOSE' };

function conntrackLine(flow: Flow): string {
  const isTcp = flow.protocol === PROTO_TCP;
  const state = isTcp ? `${KERNEL_STATES[flow.state] ?? flow.state} ` : '';
  const seconds = Math.max(0, Math.floor(flow.expiresInMs / 1000));
  const isReplied = flow.rxPackets > 0;
  const isAssured = isTcp ? isReplied && flow.state !== 'SYN_SENT' && flow.state !== 'SYN_RECV' : isReplied;
  const original = tuple(flow, flow.client, flow.vip, flow.txPackets, flow.txBytes);
  const reply = tuple(flow, flow.backend, flow.source, flow.rxPackets, flow.rxBytes);
  return (
    `${protocolName(flow.protocol).padEnd(8)} ${flow.protocol} ${seconds} ${state}${original} ` +
    `${isReplied ? '' : '[UNREPLIED] '}${reply} ${isAssured ? '[ASSURED] ' : ''}mark=0 use=1\n`
  );
}

function tuple({ protocol }: Flow, from: Endpoint, to: Endpoint, packets: number, octets: number): string {
  const ports = protocol === PROTO_ICMP ? `id=${from.port}` : `sport=${from.port} dport=${to.port}`;
  return `src=${formatIpv4(from.address)} dst=${formatIpv4(to.address)} ${ports} packets=${packets} bytes=${octets}`;
}

function text({ address, port }: Endpoint): string {
  return formatEndpoint(address, port);
}

function hex(value: number, digits: number): string {
  return `0x${value.toString(16).padStart(digits, '0')}`;
}
