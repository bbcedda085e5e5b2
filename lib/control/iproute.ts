import { spawn } from 'node:child_process';
import { WeirError } from '../base/errors.js';
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
}

/** Where the kernel would send a packet. */
export interface Hop {
  readonly dev: string;
  /** The address is this host's own. */
  readonly local: boolean;
}

/** `names`: protocols as text, to be read by people. */
export function formatRoute({ to, dev, table }: Route): string {
  const target = dev === null ? `blackhole ${to} metric ${BLACKHOLE_METRIC}` : `${to} dev ${dev}`;
  return `${target}${table === MAIN_TABLE ? '' : ` table ${table}`} proto ${WEIR_PROTOCOL}`;
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

/** The routes that carry weir's protocol number, of every table. */
export async function readRoutes(): Promise<Route[]> {
  const rows = await readRows(['-4', 'route', 'show', 'table', 'all', 'proto', String(WEIR_PROTOCOL)]);
  return rows.map((row) => ({ to: String(row.dst), dev: text(row.dev), table: Number(row.table ?? MAIN_TABLE) }));
}

/** The rules that carry weir's protocol number. */
export async function readRules(): Promise<Rule[]> {
  const rows = await readRows(['-4', 'rule', 'show']);
  return rows
    .filter((row) => Number(row.protocol) === WEIR_PROTOCOL)
    .map((row) => ({
      priority: Number(row.priority),
      from: row.src === 'all' ? null : text(row.src),
      to: text(row.dst),
      iif: text(row.iif),
      protocol: row.ipproto === undefined ? null : Number(String(row.ipproto).replace('ipproto-', '')),
      sport: row.sport === undefined ? null : Number(row.sport),
      table: Number(row.table ?? 0),
    }));
}

/** Every link of this network namespace, by name. */
export async function readLinks(): Promise<Map<string, Link>> {
  const links = new Map<string, Link>();
  for (const row of await readRows(['link', 'show'])) {
    const flags = row.flags as string[];
    const name = String(row.ifname);
    links.set(name, { name, mtu: Number(row.mtu), up: flags.includes('UP'), carrier: flags.includes('LOWER_UP') });
  }
  return links;
}

/** Where packets to each address would leave; an address that nothing leads to is missing. */
export async function readHops(addresses: Iterable<string>): Promise<Map<string, Hop>> {
  const hops = new Map<string, Hop>();
  const lines = [...addresses].map((address) => `route get ${address}`);
  if (lines.length === 0) return hops;
  const { stdout } = await runIp(['-j', '-force', '-batch', '-'], lines);
  for (const line of stdout.split('\n')) {
    if (!line.startsWith('[')) continue;
    for (const row of JSON.parse(line) as Row[]) {
      const dev = text(row.dev);
      if (dev !== null) hops.set(String(row.dst), { dev, local: row.type === 'local' });
    }
  }
  return hops;
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
  const gone = /(No such process|No such file or directory|Cannot find device .*)\nCommand failed -:\d+\n?/g;
  const rest = stderr.replace(gone, '');
  if (rest.trim() !== '') throw failure(rest, commands);
}

type Row = Record<string, unknown>;

function text(value: unknown): string | null {
  return value === undefined ? null : String(value);
}

async function readRows(args: string[]): Promise<Row[]> {
  const { stdout, stderr, status } = await runIp(['-j', '-N', ...args], []);
  if (status !== 0) throw failure(stderr, [args.join(' ')]);
  // A list without rows is printed as nothing, or as one empty object, depending on the version.
  const rows = stdout.trim() === '' ? [] : (JSON.parse(stdout) as Row[]);
  return rows.filter((row) => Object.keys(row).length > 0);
}

interface Output {
  readonly stdout: string;
  readonly stderr: string;
  readonly status: number | null;
}

function runIp(args: readonly string[], input: readonly string[]): Promise<Output> {
  return new Promise((resolve, reject) => {
    const child = spawn('ip', args, { stdio: 'pipe' });
    let stdout = '';
    let stderr = '';
    child.stdout.setEncoding('utf8').on('data', (part: string) => (stdout += part));
    child.stderr.setEncoding('utf8').on('data', (part: string) => (stderr += part));
    child.on('error', (error: NodeJS.ErrnoException) => {
      if (error.code !== 'ENOENT') reject(new WeirError('NETWORK_SETUP', `cannot run ip: ${error.message}`, '', error));
      else reject(missingTool('ip is not installed'));
    });
    child.on('close', (status) => {
      if (stderr.includes('BusyBox')) reject(missingTool('the ip command found is BusyBox’s, which cannot do this'));
      else resolve({ stdout, stderr, status });
    });
    // An ip that ends early says why on stderr; that it did not read its input is no second failure.
    child.stdin.on('error', () => {});
    child.stdin.end(input.length === 0 ? '' : `${input.join('\n')}\n`);
  });
}

function missingTool(message: string): WeirError {
  return new WeirError('MISSING_TOOL', message, 'Install iproute2 (apt install iproute2, apk add iproute2).');
}

function failure(stderr: string, commands: readonly string[]): WeirError {
  const line = Number(/Command failed -:(\d+)/.exec(stderr)?.[1] ?? 1);
  const reason = (stderr.split('\n')[0] ?? '').replace('RTNETLINK answers: ', '');
  const message = `ip ${commands[line - 1]}: ${reason || 'failed without a word'}`;
  if (reason.includes('Operation not permitted')) {
    return new WeirError('NO_PERMISSION', message, 'Run weir as root or with CAP_NET_ADMIN.');
  }
  return new WeirError('NETWORK_SETUP', message, '`weir net -c FILE` prints all commands, to be tried by hand.');
}
