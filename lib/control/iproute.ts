import { WeirError } from '../base/errors.js';
import { type Ended, runChild } from '../io/child.js';
import { ENOENT, errnoName } from '../io/syscalls.js';
import { PROTO_ICMP, PROTO_TCP, PROTO_UDP } from '../wire/ipv4.js';

/**
 * Routes, policy rules and links as iproute2 knows them. Changes go out as one `ip -batch -`, readings come in as
 * `ip -j -N`: everything is a number there, so that neither /etc/iproute2 nor /etc/protocols has a say.
 */

/** Marks routes and rules as weir's (rtm_protocol, FRA_PROTOCOL): a number that no routing daemon has registered. */
export const WEIR_PROTOCOL = 196;

export const MAIN_TABLE = 254;

/** Behind every other route to the same place, and never first by accident: a route without metric has 0. */
export const BLACKHOLE_METRIC = 65535;

/** A route of weir's. `dev` null: a blackhole of BLACKHOLE_METRIC. */
export interface Route {
  /** A host's address, or `default`. */
  readonly to: string;
  readonly dev: string | null;
  readonly table: number;
  /** Absent: the device's. */
  readonly mtu?: number;
  /** What a local sender that has not chosen an address gets as its own. */
  readonly src: string | null;
}

/** A rule of weir's; null: any. `table` 0: no table, an answer of "network unreachable". */
export interface Rule {
  readonly priority: number;
  readonly from: string | null;
  readonly to: string | null;
  readonly iif: string | null;
  readonly protocol: number | null;
  readonly sport: number | null;
  readonly table: number;
}

export interface Link {
  readonly name: string;
  readonly mtu: number;
  readonly up: boolean;
  /** Something is at its other end: of a TUN device, a process. */
  readonly carrier: boolean;
  /** Of IPv4 and its own alone (/32, scope host). */
  readonly hostAddresses: readonly string[];
}

/** Where the kernel would send a packet. */
export interface Hop {
  readonly dev: string;
  /** The address is this host's own. */
  readonly local: boolean;
  /** What the route allows; absent: what its link does. */
  readonly mtu?: number;
}

/** `names`: protocols as text, to be read by people. */
export function formatRoute({ to, dev, table, src, mtu }: Route): string {
  const target = dev === null ? `blackhole ${to} metric ${BLACKHOLE_METRIC}` : `${to} dev ${dev}`;
  const size = mtu === undefined ? '' : ` mtu ${mtu}`;
  const place = table === MAIN_TABLE ? '' : ` table ${table}`;
  return `${target}${size}${place} proto ${WEIR_PROTOCOL}${src === null ? '' : ` src ${src}`}`;
}

const PROTOCOL_NAMES: Readonly<Record<number, string>> = {
  [PROTO_ICMP]: 'icmp',
  [PROTO_TCP]: 'tcp',
  [PROTO_UDP]: 'udp',
};

/** @param names protocols by name, for people: `ip` takes a name only where there is an /etc/protocols */
export function formatRule(rule: Rule, names = false): string {
  let text = `priority ${rule.priority}`;
  if (rule.from !== null) text += ` from ${rule.from}`;
  if (rule.to !== null) text += ` to ${rule.to}`;
  if (rule.iif !== null) text += ` iif ${rule.iif}`;
  if (rule.protocol !== null) text += ` ipproto ${(names && PROTOCOL_NAMES[rule.protocol]) || rule.protocol}`;
  if (rule.sport !== null) text += ` sport ${rule.sport}`;
  if (rule.table === 0) text += ' unreachable';
  else text += ` lookup ${rule.table === MAIN_TABLE ? 'main' : rule.table}`;
  return `${text} protocol ${WEIR_PROTOCOL}`;
}

/** A command as people read it, and may type it: whole, and with protocols by name. */
export function sayCommand(command: string): string {
  return `ip ${command.replace(/(?<= ipproto )\d+/, (number) => PROTOCOL_NAMES[Number(number)] ?? number)}`;
}

/** What the kernel holds, as far as weir cares. */
export interface KernelState {
  /** Every link of this network namespace, by name. */
  readonly links: ReadonlyMap<string, Link>;
  /** The routes that carry weir's protocol number, of every table. */
  readonly routes: readonly Route[];
  /** The rules that carry weir's protocol number. */
  readonly rules: readonly Rule[];
  /** Where packets to each of the addresses asked about would leave; what nothing leads to is missing. */
  readonly hops: ReadonlyMap<string, Hop>;
}

/**
 * Reads it all with one process: starting one costs more than what it does.
 *
 * @throws WeirError NETWORK_SETUP, MISSING_TOOL
 */
export async function readKernel(addresses: Iterable<string> = []): Promise<KernelState> {
  const questions = ['address show', 'rule show', `route show table all proto ${WEIR_PROTOCOL}`];
  for (const address of addresses) questions.push(`route get ${address}`);
  const links = new Map<string, Link>();
  const routes: Route[] = [];
  const rules: Rule[] = [];
  const hops = new Map<string, Hop>();
  // Which question a row answers shows in the row.
  const { rows, stderr } = await readRows(questions);
  for (const row of rows) {
    if (row.ifname !== undefined) links.set(String(row.ifname), toLink(row));
    else if (row.priority !== undefined) {
      if (Number(row.protocol) === WEIR_PROTOCOL) rules.push(toRule(row));
    } else if (row.cache !== undefined) hops.set(String(row.dst), toHop(row));
    else if (row.dst !== undefined) routes.push(toRoute(row));
  }
  if (links.size === 0) throw failure(stderr, questions);
  return { links, routes, rules, hops };
}

/** An object of ip's JSON, with numbers for every name. */
export type Row = Readonly<Record<string, unknown>>;

/**
 * Asks several things (`rule show`) with one process. What cannot be answered, as the way to an address without a route, has no rows
 * and a line in `stderr`. Not every version of ip prints an array for an empty answer: rows must tell by themselves what they are.
 *
 * @param details what kind of device a link is, and more that is rarely asked
 * @throws WeirError MISSING_TOOL
 */
export async function readRows(
  questions: readonly string[],
  details = false,
): Promise<{ rows: Row[]; stderr: string }> {
  const { stdout, stderr } = await runIp([...(details ? ['-d'] : []), '-j', '-N', '-force', '-batch', '-'], questions);
  const arrays = stdout.split('\n').filter((line) => line.startsWith('['));
  return { rows: arrays.flatMap((line) => JSON.parse(line) as Row[]), stderr };
}

/**
 * Executes commands (without their `ip`) in order, in one process, and stops at the first that fails.
 *
 * @throws WeirError NETWORK_SETUP with the command that failed, NO_PERMISSION, MISSING_TOOL
 */
export async function execute(commands: readonly string[]): Promise<void> {
  if (commands.length === 0) return;
  const { stderr, status } = await runIp(['-batch', '-'], commands);
  if (status !== 0) throw failure(stderr, commands);
}

/**
 * The same for taking away: goes on after failures, and what is not there any more is none.
 *
 * @throws WeirError as `execute`, after the last command
 */
export async function executeRemovals(commands: readonly string[]): Promise<void> {
  if (commands.length === 0) return;
  const { stderr, status } = await runIp(['-force', '-batch', '-'], commands);
  if (status === 0) return;
  const gone =
    /(RTNETLINK answers: )?(No such process|No such file or directory|Cannot find device .*)\nCommand failed -:\d+\n?/g;
  const rest = stderr.replace(gone, '');
  if (rest.trim() !== '') throw failure(rest, commands);
}

/** A packet's ends, as text. */
export interface Ends {
  readonly source: string;
  readonly destination: string;
}

/**
 * Where the kernel would send packets, in ip's own words: `10.2.0.11 from 10.1.0.2 dev br0`, or why it would not.
 *
 * @param iif the device they come out of; null: the host's own
 * @throws WeirError MISSING_TOOL
 */
export async function askRoutes(packets: readonly Ends[], iif: string | null): Promise<string[]> {
  const questions = packets.map(({ source, destination }) =>
    iif === null ? `route get ${destination}` : `route get ${destination} from ${source} iif ${iif}`,
  );
  const { stdout, stderr } = await runIp(['-o', '-force', '-batch', '-'], questions);
  const refusals = new Map<number, string>();
  for (const [, message, line] of stderr.matchAll(/(.*)\nCommand failed -:(\d+)/g)) {
    refusals.set(Number(line) - 1, message!.replace('RTNETLINK answers: ', ''));
  }
  const answers = stdout.split('\n');
  return questions.map((_, i) => refusals.get(i) ?? (answers.shift() ?? '').replace(/\s*\\.*$/, '').trim());
}

function text(value: unknown): string | null {
  return value === undefined ? null : String(value);
}

const HOST_SCOPE = 254;

function toLink(row: Row): Link {
  const flags = row.flags as string[];
  return {
    name: String(row.ifname),
    mtu: Number(row.mtu),
    up: flags.includes('UP'),
    carrier: flags.includes('LOWER_UP'),
    hostAddresses: ((row.addr_info ?? []) as Row[])
      .filter(({ family, prefixlen, scope }) => family === 'inet' && prefixlen === 32 && Number(scope) === HOST_SCOPE)
      .map(({ local }) => String(local)),
  };
}

function toRoute(row: Row): Route {
  return {
    to: String(row.dst),
    dev: text(row.dev),
    table: Number(row.table ?? MAIN_TABLE),
    src: text(row.prefsrc),
    ...mtuOf(row),
  };
}

function mtuOf({ metrics }: Row): { mtu?: number } {
  const mtu = (metrics as { mtu?: number }[] | undefined)?.find((metric) => metric.mtu !== undefined)?.mtu;
  return mtu === undefined ? {} : { mtu };
}

function toRule(row: Row): Rule {
  return {
    priority: Number(row.priority),
    from: row.src === 'all' ? null : text(row.src),
    to: text(row.dst),
    iif: text(row.iif),
    protocol: row.ipproto === undefined ? null : Number(String(row.ipproto).replace('ipproto-', '')),
    sport: row.sport === undefined ? null : Number(row.sport),
    table: Number(row.table ?? 0),
  };
}

const LOCAL_ROUTE = 2;

function toHop(row: Row): Hop {
  // One that expires was learned by a connection of this host: it does not hold for what is forwarded.
  const mtu = row.expires === undefined ? mtuOf(row) : {};
  return { dev: String(row.dev), local: Number(row.type) === LOCAL_ROUTE, ...mtu };
}

/** What is for weir's whole process group: Ctrl-C, the end of a terminal, a supervisor. */
const GROUP_SIGNALS: ReadonlySet<string | null> = new Set(['SIGINT', 'SIGTERM', 'SIGHUP']);

async function runIp(args: readonly string[], input: readonly string[]): Promise<Ended> {
  for (;;) {
    const ended = await runChild('ip', args, input.length === 0 ? '' : `${input.join('\n')}\n`);
    if (ended === -ENOENT) throw missingTool('ip is not installed');
    if (typeof ended === 'number') throw new WeirError('NETWORK_SETUP', `cannot run ip: ${errnoName(ended)}`);
    if (ended.stderr.includes('BusyBox')) throw missingTool('the ip command found is BusyBox’s, which cannot do this');
    // weir needs it for its end: such signals reach it no more once it is in its session, which it may not have entered.
    if (!GROUP_SIGNALS.has(ended.signal)) return ended;
  }
}

function missingTool(message: string): WeirError {
  return new WeirError('MISSING_TOOL', message, 'Install iproute2 (apt install iproute2, apk add iproute2).');
}

function failure(stderr: string, commands: readonly string[]): WeirError {
  const line = Number(/Command failed -:(\d+)/.exec(stderr)?.[1] ?? 1);
  const reason = (stderr.split('\n')[0] ?? '').replace('RTNETLINK answers: ', '');
  const message = `${sayCommand(commands[line - 1] ?? '')}: ${reason || 'failed without a word'}`;
  if (reason.includes('Operation not permitted')) {
    return new WeirError('NO_PERMISSION', message, 'Run weir as root or with CAP_NET_ADMIN.');
  }
  return new WeirError('NETWORK_SETUP', message, '`weir net -c FILE` prints all commands, to be tried by hand.');
}
