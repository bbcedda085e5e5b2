import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';

/**
 * Hosts for what runs in a root of its own: a network namespace each, and where it is asked for, an overlay of a common root. Nothing has a
 * name outside: the namespaces end with the processes that hold them, the mounts with the mount namespace of the caller, which must
 * have one of its own.
 */

export interface Outcome {
  readonly code: number | null;
  readonly stdout: string;
  readonly stderr: string;
}

/** A program that goes on; its output so far. */
export interface Running {
  readonly output: () => string;
  readonly ended: Promise<number | null>;
  /** Resolves when a line contains this. @throws Error with the output, when it ends before */
  readonly waitFor: (text: string) => Promise<void>;
  readonly stop: (signal?: NodeJS.Signals) => Promise<number | null>;
}

export interface Options {
  readonly env?: Readonly<Record<string, string>>;
  readonly cwd?: string;
  /** A command of the machine's that starts the program, and all that leads to it: strace. */
  readonly by?: readonly string[];
}

export class Host {
  readonly name: string;
  /** null: that of the machine. */
  readonly root: string | null;
  readonly #holder: ChildProcess;
  readonly #running = new Set<Running>();

  private constructor(name: string, root: string | null, holder: ChildProcess) {
    this.name = name;
    this.root = root;
    this.#holder = holder;
  }

  /** @param lower a root that all hosts build upon; null: the host uses the machine's */
  static async create(name: string, lower: string | null, folder: string): Promise<Host> {
    const root = lower === null ? null : overlay(lower, join(folder, name));
    // It ends with this process at the latest, by the end of its input.
    const holder = spawn('unshare', ['-n', 'sh', '-c', 'ip link set lo up; echo up; exec cat'], {
      stdio: ['pipe', 'pipe', 'inherit'],
    });
    await once(holder.stdout!, 'data');
    return new Host(name, root, holder);
  }

  get pid(): number {
    return this.#holder.pid!;
  }

  /** Runs a script to its end, as a shell that stops at the first failure. */
  async run(script: string, options: Options = {}): Promise<Outcome> {
    return this.exec(['sh', '-ec', script], options);
  }

  async exec(command: readonly string[], options: Options = {}): Promise<Outcome> {
    const child = this.#spawn(command, options);
    const [stdout, stderr] = [collect(child.stdout!), collect(child.stderr!)];
    const [code] = (await once(child, 'close')) as [number | null];
    return { code, stdout: stdout(), stderr: stderr() };
  }

  /** Starts a command. */
  start(command: readonly string[], options: Options = {}): Running {
    const child = this.#spawn(command, options);
    const lines: string[] = [];
    const waiting: { text: string; found: () => void }[] = [];
    const note = (line: string): void => {
      lines.push(line);
      for (const { text, found } of waiting) if (line.includes(text)) found();
    };
    createInterface({ input: child.stdout! }).on('line', note);
    createInterface({ input: child.stderr! }).on('line', note);
    const ended = new Promise<number | null>((resolve) => child.once('close', resolve));
    const running: Running = {
      output: () => lines.join('\n'),
      ended,
      waitFor: async (text) => {
        if (lines.some((line) => line.includes(text))) return;
        const found = new Promise<true>((resolve) => waiting.push({ text, found: () => resolve(true) }));
        if ((await Promise.race([found, ended])) === true) return;
        throw new Error(`${this.name}: ${command.join(' ')} ended before "${text}":\n${lines.join('\n')}`);
      },
      stop: (signal = 'SIGTERM') => {
        if (child.exitCode === null && child.signalCode === null) process.kill(-child.pid!, signal);
        this.#running.delete(running);
        return ended;
      },
    };
    this.#running.add(running);
    return running;
  }

  /** Ends all that runs here, and the network. */
  async close(): Promise<void> {
    await Promise.all([...this.#running].map((each) => each.stop('SIGKILL')));
    this.#holder.kill('SIGKILL');
  }

  #spawn(command: readonly string[], { env = {}, cwd = '/root', by = [] }: Options): ChildProcess {
    const enter = ['nsenter', '--net', '--target', String(this.pid), '--'];
    const clean = [
      'env',
      '-i',
      ...Object.entries({ ...ENVIRONMENT, ...env }).map(([name, value]) => `${name}=${value}`),
    ];
    const move = this.root === null ? [] : ['chroot', this.root, ...clean, 'sh', '-c', `cd ${cwd} && exec "$@"`, 'sh'];
    const [program, ...args] = [...by, ...enter, ...(this.root === null ? clean : move), ...command];
    return spawn(program!, args, { stdio: ['ignore', 'pipe', 'pipe'], detached: true });
  }
}

/** By way of env(1): the test runner adds its own to what Node.js is told to start programs with. */
export const ENVIRONMENT = {
  PATH: '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin',
  HOME: '/root',
  LANG: 'C.UTF-8',
  DEBIAN_FRONTEND: 'noninteractive',
} as const;

function collect(stream: NodeJS.ReadableStream): () => string {
  let text = '';
  stream.setEncoding('utf8').on('data', (part: string) => {
    text += part;
  });
  return () => text;
}

function overlay(lower: string, folder: string): string {
  mkdirSync(folder, { recursive: true });
  const [upper, work, root] = ['upper', 'work', 'root'].map((name) => join(folder, name));
  const script = `
    mount -t tmpfs tmpfs '${folder}' && mkdir '${upper}' '${work}' '${root}'
    mount -t overlay -o 'lowerdir=${lower},upperdir=${upper},workdir=${work}' overlay '${root}'
    mount --bind '${lower}/dev' '${root}/dev' && mount -t proc proc '${root}/proc'`;
  execFileSync('sh', ['-ec', script], { stdio: ['ignore', 'ignore', 'inherit'] });
  return root!;
}

/** A host's place in a network: the name of its interface, and its address there. */
export interface Plug {
  readonly host: Host;
  readonly dev: string;
  /** `10.1.0.2/24` */
  readonly address: string;
}

/** Wires hosts to networks: a bridge each, all in a host that is nothing but a switch. */
export async function wire(hub: Host, networks: Readonly<Record<string, readonly Plug[]>>): Promise<void> {
  let count = 0;
  const commands: string[] = [];
  for (const [name, plugs] of Object.entries(networks)) {
    commands.push(`ip link add ${name} type bridge`, `ip link set ${name} up`);
    for (const { host, dev, address } of plugs) {
      const port = `port${count++}`;
      const inside = `nsenter --net --target ${host.pid}`;
      commands.push(
        `ip link add ${port} type veth peer name ${dev} netns ${host.pid}`,
        `ip link set ${port} master ${name} up`,
        `${inside} ip address add ${address} dev ${dev}`,
        `${inside} ip link set ${dev} up`,
      );
    }
  }
  const { code, stderr } = await hub.run(commands.join('\n'));
  if (code !== 0) throw new Error(`networks cannot be made: ${stderr}`);
}
