import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { closeSync, mkdirSync, openSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { WeirError } from '../base/errors.js';
import { must, nodeCommand, type Result, type RunOptions, run } from './process.js';

/*
 *                              PREFIX-gw
 *   PREFIX-client         +-------------------+
 *  +-----------+          |       weir0       |         PREFIX-b1
 *  |           |   veth   |  VIP 10.96.0.10   |  veth  +--------------+
 *  |    eth0 --+----------+- client     br0 --+----+---+- eth0        |
 *  | 10.1.0.2  |          |  10.1.0.1         |    |   |  10.2.0.11   |
 *  +-----------+          |         10.2.0.1  |    |   +--------------+
 *   default via           +-------------------+    +---- PREFIX-b2 10.2.0.12
 *   10.1.0.1                                       +---- PREFIX-b3 10.2.0.13, default via 10.2.0.1
 *
 * The gateway forwards and has no more of its own; weir, when it runs there, brings the rest. Without weir the client reaches
 * the backends directly.
 *
 * A lab owns its namespaces, the processes it started in them and /run/PREFIX-lab. lab.json there names the processes, so
 * that another process, later, can take down what this one left. Nothing is ended that is not both listed there and in one
 * of the lab's namespaces: a pid may have come to mean another program.
 */

export const VIP = '10.96.0.10';
export const CLIENT_ADDRESS = '10.1.0.2';
export const GATEWAY_ADDRESS = '10.2.0.1';
/** Ports of the servers in each backend. */
export const HTTP_PORT = 8080;
export const ECHO_PORT = 9000;

const START_LIMIT_MS = 15_000;
const STOP_LIMIT_MS = 3000;
const POLL_MS = 15;
const MAX_BACKENDS = 200;

/** The address of backend 1, 2, ... */
export function backendAddress(number: number): string {
  return `10.2.0.${10 + number}`;
}

export interface LabOptions {
  /** Of the namespaces' names: `weir` makes weir-client, weir-gw, weir-b1. */
  readonly prefix?: string;
  readonly backends?: number;
  /** Of every link. */
  readonly mtu?: number;
  /** The command line to run weir by, without arguments. */
  readonly weir?: readonly string[];
}

export interface ServiceProcess {
  readonly pid: number;
  readonly logPath: string;
  /** Resolves with the exit status, or null after a signal. */
  readonly ended: Promise<number | null>;
}

/** weir, running in a namespace. */
export interface WeirProcess extends ServiceProcess {
  readonly configPath: string;
  readonly socket: string;
  /** From the start of the program to its `ready`. */
  readonly readyMs: number;
  /** Its log so far, one object per event. */
  readonly events: () => Record<string, unknown>[];
  /** Any command that talks to it: `['ct', 'list']`. */
  readonly command: (args: readonly string[]) => Promise<Result>;
  /** Writes the file anew and has it read. @throws WeirError LAB_FAILED when it is refused */
  readonly reload: (configText: string) => Promise<void>;
  /** Ends it and resolves when it has ended, with its status. */
  readonly stop: (signal?: NodeJS.Signals) => Promise<number | null>;
}

interface StateFile {
  readonly owner: number;
  readonly namespaces: readonly string[];
  readonly pids: readonly number[];
}

export class Lab {
  readonly prefix: string;
  /** Where configuration, socket and logs are. */
  readonly dir: string;
  /** `b1`, `b2`, ...: they name namespaces in `exec` and `spawn`, as `client` and `gw` do. */
  readonly backends: readonly string[];
  readonly #weirCommand: readonly string[];
  readonly #children = new Set<ChildProcess>();
  readonly #daemons: number[] = [];
  #isUp = true;

  private constructor({ prefix = 'weir', backends = 3, weir = defaultWeirCommand() }: LabOptions) {
    this.prefix = checkPrefix(prefix);
    if (!(backends >= 0 && backends <= MAX_BACKENDS)) {
      throw new WeirError('USAGE', `a lab has up to ${MAX_BACKENDS} backends, not ${backends}`);
    }
    this.dir = labDirectory(prefix);
    this.backends = Array.from({ length: backends }, (_, i) => `b${i + 1}`);
    this.#weirCommand = weir;
  }

  /**
   * Builds the namespaces. What a lab of this prefix left that was killed is removed first. Until `destroy`, the end of the
   * process, however it comes about except by SIGKILL, takes the lab with it.
   *
   * @throws WeirError LAB_FAILED (one of this prefix is up, or the kernel refuses something), MISSING_TOOL
   */
  static async create(options: LabOptions = {}): Promise<Lab> {
    const lab = new Lab(options);
    if (isAlive(lab.prefix) || [...guarded].some(({ prefix }) => prefix === lab.prefix)) {
      throw new WeirError(
        'LAB_FAILED',
        `a lab of prefix ${lab.prefix} is up already`,
        'Take it down with `weir lab down`.',
      );
    }
    removeLab(lab.prefix);
    mkdirSync(lab.dir, { recursive: true, mode: 0o755 });
    guard(lab);
    try {
      lab.#writeState();
      await lab.#build(options.mtu ?? 1500);
    } catch (error) {
      await lab.destroy();
      throw error;
    }
    return lab;
  }

  /** The full name of the namespace of `client`, `gw`, `b1`, ... */
  namespace(role: string): string {
    return `${this.prefix}-${role}`;
  }

  /** Runs a program to its end in a namespace. */
  exec(role: string, command: string, args: readonly string[] = [], options: RunOptions = {}): Promise<Result> {
    const started = (child: ChildProcess): void => {
      this.#own(child);
      options.started?.(child);
    };
    return run('ip', ['netns', 'exec', this.namespace(role), command, ...args], { ...options, started });
  }

  /** Starts a program in a namespace; its output goes to `NAME.log` in the lab's folder. */
  spawn(role: string, name: string, command: string, args: readonly string[] = []): ServiceProcess {
    const logPath = join(this.dir, `${name}.log`);
    const log = openSync(logPath, 'w');
    const child = spawn('ip', ['netns', 'exec', this.namespace(role), command, ...args], {
      stdio: ['ignore', log, log],
      detached: true,
    });
    closeSync(log);
    const ended = new Promise<number | null>((resolve) => {
      child.once('exit', resolve);
      child.once('error', () => resolve(null));
    });
    if (child.pid === undefined) throw new WeirError('LAB_FAILED', `${command} cannot be started in ${role}`);
    this.#own(child);
    this.#daemons.push(child.pid);
    this.#writeState();
    return { pid: child.pid, logPath, ended };
  }

  /** The HTTP and UDP servers of every backend; resolves when all of them listen. */
  async startServers(): Promise<void> {
    const [command, ...args] = nodeCommand('server');
    await Promise.all(
      this.backends.map((name) => {
        const ports = ['--http', String(HTTP_PORT), '--udp', String(ECHO_PORT)];
        const server = this.spawn(name, name, command!, [...args, '--name', name, ...ports]);
        return waitForLine(server, name, (line) => line === 'ready');
      }),
    );
  }

  /**
   * Starts weir in the gateway, or in another namespace; resolves when it says that it is ready.
   *
   * @throws WeirError LAB_FAILED with the last of its log
   */
  async startWeir(
    configText: string,
    { role = 'gw', name = 'weir', socket = join(this.dir, `${name}.sock`) } = {},
  ): Promise<WeirProcess> {
    const configPath = join(this.dir, `${name}.yaml`);
    writeFileSync(configPath, configText);
    const [command, ...args] = this.#weirCommand;
    const startedMs = performance.now();
    const process = this.spawn(role, name, command!, [...args, 'run', '-c', configPath, '--socket', socket]);
    await waitForLine(process, 'weir', (line) => parseEvent(line)?.event === 'ready');
    const readyMs = performance.now() - startedMs;
    const ask = (parts: readonly string[]): Promise<Result> =>
      this.exec(role, command!, [...args, ...parts, '--socket', socket]);
    return {
      ...process,
      configPath,
      socket,
      readyMs,
      events: () =>
        readLines(process.logPath)
          .map(parseEvent)
          .filter((event) => event !== undefined),
      command: ask,
      reload: async (text) => {
        writeFileSync(configPath, text);
        const { status, stderr, stdout } = await ask(['reload']);
        if (status !== 0) throw new WeirError('LAB_FAILED', `weir reload failed: ${(stderr || stdout).trim()}`);
      },
      stop: async (signal = 'SIGTERM') => {
        this.#signal(process.pid, signal);
        return await process.ended;
      },
    };
  }

  /** Leaves the lab standing when this process ends; `takeDown` removes it later. */
  release(): void {
    for (const child of this.#children) child.unref();
    this.#children.clear();
    this.#isUp = false;
    unguard(this);
  }

  /** Ends what was started, politely at first, and removes the namespaces. Idempotent. */
  async destroy(): Promise<void> {
    if (!this.#isUp) return;
    const leaving = [...this.#children].map((child) => new Promise((resolve) => child.once('exit', resolve)));
    for (const child of this.#children) child.kill('SIGTERM');
    await Promise.race([Promise.all(leaving), sleep(STOP_LIMIT_MS, undefined, { ref: false })]);
    this.abandon();
  }

  /** The same at once, without waiting for anything. */
  abandon(): void {
    if (!this.#isUp) return;
    this.#isUp = false;
    for (const child of this.#children) child.kill('SIGKILL');
    removeLab(this.prefix);
    unguard(this);
  }

  #own(child: ChildProcess): void {
    this.#children.add(child);
    child.once('exit', () => this.#children.delete(child));
    child.once('error', () => this.#children.delete(child));
  }

  #signal(pid: number, signal: NodeJS.Signals): void {
    for (const child of this.#children) if (child.pid === pid) child.kill(signal);
  }

  #writeState(): void {
    const namespaces = ['client', 'gw', ...this.backends].map((role) => this.namespace(role));
    const state: StateFile = { owner: process.pid, namespaces, pids: this.#daemons };
    writeFileSync(stateFile(this.prefix), JSON.stringify(state));
  }

  async #build(mtu: number): Promise<void> {
    const client = this.namespace('client');
    const gateway = this.namespace('gw');
    const all = [client, gateway, ...this.backends.map((name) => this.namespace(name))];
    await must('ip', ['-batch', '-'], {
      input: lines([
        ...all.map((name) => `netns add ${name}`),
        `link add eth0 mtu ${mtu} netns ${client} type veth peer name client mtu ${mtu} netns ${gateway}`,
        ...this.backends.map(
          (name) =>
            `link add ${name} mtu ${mtu} netns ${gateway} type veth peer name eth0 mtu ${mtu} netns ${this.namespace(name)}`,
        ),
      ]),
    });
    await must('ip', ['-n', gateway, '-batch', '-'], {
      input: lines([
        'link set lo up',
        'addr add 10.1.0.1/24 dev client',
        'link set client up',
        `link add br0 mtu ${mtu} type bridge`,
        `addr add ${GATEWAY_ADDRESS}/24 dev br0`,
        'link set br0 up',
        ...this.backends.map((name) => `link set ${name} master br0 up`),
      ]),
    });
    const host = (role: string, address: string, router: string): Promise<string> =>
      must('ip', ['-n', this.namespace(role), '-batch', '-'], {
        input: lines([
          'link set lo up',
          `addr add ${address}/24 dev eth0`,
          'link set eth0 up',
          `route add default via ${router}`,
        ]),
      });
    await Promise.all([
      host('client', CLIENT_ADDRESS, '10.1.0.1'),
      ...this.backends.map((name, i) => host(name, backendAddress(i + 1), GATEWAY_ADDRESS)),
      this.#set('gw', { ip_forward: '1', 'conf/all/rp_filter': '0', 'conf/default/rp_filter': '0' }),
      // Many short connections from one address: all ports, and those in TIME_WAIT again.
      this.#set('client', { ip_local_port_range: '1024 65535', tcp_tw_reuse: '1' }),
    ]);
  }

  async #set(role: string, settings: Record<string, string>): Promise<void> {
    const script = Object.entries(settings).map(([name, value]) => `echo ${value} > /proc/sys/net/ipv4/${name}`);
    const { status, stderr } = await this.exec(role, 'sh', ['-ec', script.join('\n')]);
    if (status !== 0)
      throw new WeirError('LAB_FAILED', `a setting in ${this.namespace(role)} failed: ${stderr.trim()}`);
  }
}

/**
 * Removes the lab of a prefix, whoever built it: the command `weir lab down`.
 *
 * @returns whether there was one
 */
export function takeDown(prefix = 'weir'): boolean {
  return removeLab(checkPrefix(prefix));
}

/** Short enough that nothing made of it exceeds a limit: a UNIX socket's path has 107 bytes. */
function checkPrefix(prefix: string): string {
  if (/^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$/.test(prefix)) return prefix;
  throw new WeirError(
    'USAGE',
    `${JSON.stringify(prefix)} cannot be a lab's prefix`,
    'Use up to 40 letters, digits, - and _.',
  );
}

function labDirectory(prefix: string): string {
  return `/run/${prefix}-lab`;
}

function stateFile(prefix: string): string {
  return join(labDirectory(prefix), 'lab.json');
}

function readState(prefix: string): StateFile | null {
  try {
    return JSON.parse(readFileSync(stateFile(prefix), 'utf8')) as StateFile;
  } catch {
    return null;
  }
}

function isAlive(prefix: string): boolean {
  const state = readState(prefix);
  if (state === null) return false;
  return survivors(state).length > 0 || (state.owner !== process.pid && isLabProcess(state.owner));
}

/** The listed processes that still are in one of the lab's namespaces. */
function survivors({ namespaces, pids }: StateFile): number[] {
  const inodes = new Set(namespaces.map((name) => inodeOf(`/run/netns/${name}`)).filter((inode) => inode !== 0));
  return pids.filter((pid) => inodes.has(inodeOf(`/proc/${pid}/ns/net`)));
}

function inodeOf(path: string): number {
  try {
    return statSync(path).ino;
  } catch {
    return 0;
  }
}

/** Whether a pid still is a Node.js program: a builder that was killed may have left its number to another. */
function isLabProcess(pid: number): boolean {
  try {
    return readFileSync(`/proc/${pid}/cmdline`, 'utf8').split('\0')[0]!.includes('node');
  } catch {
    return false;
  }
}

function removeLab(prefix: string): boolean {
  const state = readState(prefix);
  if (state === null) return false;
  for (const pid of survivors(state)) {
    try {
      process.kill(pid, 'SIGKILL');
    } catch {
      // It has just ended by itself.
    }
  }
  const existing = state.namespaces.filter((name) => inodeOf(`/run/netns/${name}`) !== 0);
  const input = lines(existing.map((name) => `netns del ${name}`));
  if (existing.length > 0) spawnSync('ip', ['-force', '-batch', '-'], { input });
  rmSync(labDirectory(prefix), { recursive: true, force: true });
  return true;
}

function defaultWeirCommand(): string[] {
  return [process.execPath, fileURLToPath(new URL('../../bin/weir.js', import.meta.url))];
}

function lines(commands: readonly string[]): string {
  return commands.map((command) => `${command}\n`).join('');
}

function readLines(path: string): string[] {
  const text = readFileSync(path, 'utf8');
  return text.slice(0, text.lastIndexOf('\n') + 1).split('\n');
}

function parseEvent(line: string): Record<string, unknown> | undefined {
  if (!line.startsWith('{')) return undefined;
  try {
    return JSON.parse(line) as Record<string, unknown>;
  } catch {
    return undefined;
  }
}

/** Waits until a process has written a line; it may not end before. */
async function waitForLine(service: ServiceProcess, what: string, test: (line: string) => boolean): Promise<void> {
  let ended = false;
  void service.ended.then(() => {
    ended = true;
  });
  const limitMs = performance.now() + START_LIMIT_MS;
  for (;;) {
    const wasEnded = ended;
    const written = readLines(service.logPath);
    if (written.some(test)) return;
    const last = written.filter(Boolean).slice(-3).join('; ');
    if (wasEnded) throw new WeirError('LAB_FAILED', `${what} ended at once: ${last || 'it said nothing'}`);
    if (performance.now() > limitMs)
      throw new WeirError('LAB_FAILED', `${what} does not get ready: ${last || 'it says nothing'}`);
    await sleep(POLL_MS);
  }
}

const SIGNALS = { SIGINT: 2, SIGTERM: 15, SIGHUP: 1 } as const;
const guarded = new Set<Lab>();

function abandonAll(): void {
  for (const lab of guarded) lab.abandon();
}

function onSignal(signal: NodeJS.Signals): void {
  abandonAll();
  process.exit(128 + SIGNALS[signal as keyof typeof SIGNALS]);
}

/** However this process ends, the lab ends with it. */
function guard(lab: Lab): void {
  if (guarded.size === 0) {
    process.on('exit', abandonAll);
    for (const signal of Object.keys(SIGNALS) as NodeJS.Signals[]) process.on(signal, onSignal);
  }
  guarded.add(lab);
}

function unguard(lab: Lab): void {
  if (!guarded.delete(lab) || guarded.size > 0) return;
  process.off('exit', abandonAll);
  for (const signal of Object.keys(SIGNALS) as NodeJS.Signals[]) process.off(signal, onSignal);
}
