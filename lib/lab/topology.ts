import { type ChildProcess, spawn } from 'node:child_process';
import { closeSync, mkdirSync, openSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { WeirError } from '../base/errors.js';
import { ECHO_PORT, HTTP_PORT } from './addresses.js';
import {
  must,
  nodeCommand,
  parseEvent,
  type Result,
  type RunOptions,
  readLines,
  run,
  type ServiceProcess,
  waitForLine,
} from './process.js';
import { checkPrefix, guard, isAlive, isGuarded, labDirectory, removeLab, unguard, writeState } from './removal.js';
import { build, makePlan, type Plan, rolesOf, routeToGateways, type Shape } from './shapes.js';

/*
 *   create ---+--- namespaces, links, routes     one of two shapes (shapes.ts)
 *             +--- spawn, startServers, startWeir     processes in them, logs in /run/PREFIX-lab
 *             +--- exec                               programs that run to their end
 *   destroy, or the end of this process               none of it is left (removal.ts)
 *   release                                           all of it stays
 */

export * from './addresses.js';
export type { ServiceProcess } from './process.js';
export { takeDown } from './removal.js';

const STOP_LIMIT_MS = 3000;

export interface LabOptions {
  /** Of the namespaces' names: `weir` makes weir-client, weir-gw, weir-b1. */
  readonly prefix?: string;
  /** How it hangs together: `inline` when absent. */
  readonly shape?: Shape;
  /** More than one are for shape `one-arm`. */
  readonly gateways?: number;
  readonly backends?: number;
  /** Of every link. */
  readonly mtu?: number;
  /** The command line to run weir by, without arguments. */
  readonly weir?: readonly string[];
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

export class Lab {
  readonly prefix: string;
  /** Where configuration, socket and logs are. */
  readonly dir: string;
  readonly plan: Plan;
  readonly #weirCommand: readonly string[];
  readonly #children = new Set<ChildProcess>();
  readonly #daemons: number[] = [];
  #isUp = true;

  private constructor(options: LabOptions) {
    const { prefix = 'weir', shape = 'inline', gateways = 1, backends = 3, weir = defaultWeirCommand() } = options;
    this.prefix = checkPrefix(prefix);
    this.plan = makePlan(shape, gateways, backends);
    this.dir = labDirectory(prefix);
    this.#weirCommand = weir;
  }

  /** `b1`, `b2`, ...: they name namespaces in `exec` and `spawn`, as `client` and `gw` do. */
  get backends(): readonly string[] {
    return this.plan.backends;
  }

  /** `gw`, `gw2`, ... */
  get gateways(): readonly string[] {
    return this.plan.gateways;
  }

  /**
   * Builds the namespaces. What a lab of this prefix left that was killed is removed first. Until `destroy`, the end of the
   * process, however it comes about except by SIGKILL, takes the lab with it.
   *
   * @throws WeirError LAB_FAILED (one of this prefix is up, or the kernel refuses something), MISSING_TOOL
   */
  static async create(options: LabOptions = {}): Promise<Lab> {
    const lab = new Lab(options);
    if (isAlive(lab.prefix) || isGuarded(lab.prefix)) {
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
      await build(lab.plan, { namespace: (role) => lab.namespace(role), mtu: options.mtu ?? 1500 });
    } catch (error) {
      await lab.destroy();
      throw error;
    }
    return lab;
  }

  /** The full names of all namespaces. */
  get namespaces(): readonly string[] {
    return rolesOf(this.plan).map((role) => this.namespace(role));
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

  /** Has the router of a one-arm lab send what is for VIPs to these gateways, and to no others. */
  async routeToGateways(roles: readonly string[]): Promise<void> {
    const { hub, lan } = this.plan;
    const command = routeToGateways(roles.map((role) => lan[role]!));
    await must('ip', ['-n', this.namespace(hub), ...command.split(' ')]);
  }

  /** Starts a program in a namespace; its output goes to `NAME.log` in the lab's folder, or standard output to a file. */
  spawn(role: string, name: string, command: string, args: readonly string[] = [], stdout?: string): ServiceProcess {
    const logPath = join(this.dir, `${name}.log`);
    const log = openSync(logPath, 'w');
    const out = stdout === undefined ? log : openSync(stdout, 'w');
    const child = spawn('ip', ['netns', 'exec', this.namespace(role), command, ...args], {
      stdio: ['ignore', out, log],
      detached: true,
    });
    for (const file of new Set([log, out])) closeSync(file);
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
      stop: (signal) => this.end(process, signal),
    };
  }

  /** Ends what `spawn` started and resolves when it has ended, with its status. */
  async end({ pid, ended }: ServiceProcess, signal: NodeJS.Signals = 'SIGTERM'): Promise<number | null> {
    for (const child of this.#children) if (child.pid === pid) child.kill(signal);
    return await ended;
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

  #writeState(): void {
    writeState(this.prefix, { owner: process.pid, namespaces: this.namespaces, pids: this.#daemons });
  }
}

function defaultWeirCommand(): string[] {
  return [process.execPath, fileURLToPath(new URL('../../bin/weir.js', import.meta.url))];
}
