/*
 * weir as a process, in a network namespace of its own, for tests of its start, its stop and everything in between.
 *
 *     weir-rPID   br0 10.2.0.1/24 === peer (veth, both ends here)     nobody answers; one-way flows are enough
 */
import { type ChildProcess, execFileSync, spawn, spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { needsRoot } from './skip.js';

export const program = fileURLToPath(new URL('../../bin/weir.js', import.meta.url));
const built = existsSync(fileURLToPath(new URL('../../dist/weir.js', import.meta.url)));
export const namespace = `weir-r${process.pid}`;
export const folder = mkdtempSync(join(tmpdir(), 'weir-run-'));
export const config = join(folder, 'weir.yaml');
export const socket = join(folder, 'weir.sock');

export const B1 = '{ name: b1, address: 10.2.0.11, port: 53 }';
export const B2 = '{ name: b2, address: 10.2.0.12, port: 53 }';

export function textOf(backends: string[], more = ''): string {
  const dns = `{ name: dns, address: 10.96.0.10, port: 53, protocol: udp, backends: [${backends.join(', ')}] }`;
  return `admin: { socket: ${socket}, listen: 127.0.0.1:9650 }\n${more}\nservices: [${dns}]\n`;
}

export function write(backends: string[], more = ''): void {
  writeFileSync(config, textOf(backends, more));
}

export function inside(command: string, ...args: string[]): { code: number | null; stdout: string; stderr: string } {
  const { status, stdout, stderr } = spawnSync('ip', ['netns', 'exec', namespace, command, ...args], {
    encoding: 'utf8',
    timeout: 20_000,
  });
  return { code: status, stdout, stderr };
}

export function weir(...args: string[]): ReturnType<typeof inside> {
  return inside(process.execPath, program, ...args);
}

/** The answer to a question over the admin socket. */
export function ask<T>(...args: string[]): T {
  return JSON.parse(weir(...args, '-o', 'json', '--socket', socket).stdout) as T;
}

interface LogLine {
  readonly event: string;
  readonly level: string;
  readonly msg: string;
  readonly [field: string]: unknown;
}

export class Run {
  readonly log: LogLine[] = [];
  stderr = '';
  readonly ended: Promise<number | null>;
  readonly #child: ChildProcess;
  readonly #waiting = new Set<() => void>();

  constructor(...args: string[]) {
    const command = ['netns', 'exec', namespace, process.execPath, program, 'run', '-c', config, ...args];
    // A process group of its own, as a shell gives it to a command.
    this.#child = spawn('ip', command, { stdio: ['ignore', 'pipe', 'pipe'], detached: true });
    createInterface({ input: this.#child.stdout! }).on('line', (line) => {
      this.log.push(JSON.parse(line) as LogLine);
      for (const look of this.#waiting) look();
    });
    this.#child.stderr!.setEncoding('utf8').on('data', (text) => (this.stderr += text));
    this.ended = new Promise((resolve) => this.#child.on('close', (code) => resolve(code)));
  }

  /** Resolves with the n-th line of an event; rejects when the process ends without it. */
  event(name: string, count = 1): Promise<LogLine> {
    return new Promise((resolve, reject) => {
      const look = (): void => {
        const found = this.log.filter(({ event }) => event === name)[count - 1];
        if (found === undefined) return;
        this.#waiting.delete(look);
        resolve(found);
      };
      this.#waiting.add(look);
      void this.ended.then(() => {
        look();
        reject(new Error(`ended without ${name}: ${this.stderr}`));
      });
      look();
    });
  }

  /** Resolves with the first line, from the beginning, that is as wanted. */
  async line(isWanted: (line: LogLine) => boolean): Promise<LogLine> {
    for (;;) {
      const found = this.log.find(isWanted);
      if (found !== undefined) return found;
      await new Promise<void>((resolve) => {
        const look = (): void => {
          this.#waiting.delete(look);
          resolve();
        };
        this.#waiting.add(look);
      });
    }
  }

  kill(signal: NodeJS.Signals): void {
    this.#child.kill(signal);
  }

  /** To weir and all it has started, as a terminal does it. False: none of them is there any more. */
  killGroup(signal: NodeJS.Signals): boolean {
    try {
      return process.kill(-this.#child.pid!, signal);
    } catch {
      return false;
    }
  }
}

/** Everything of weir's that is in the namespace or in its folder. */
export function traces(): string[] {
  const commands = ['ip -o link show', 'ip rule show', 'ip route show table all'];
  const lines = commands.flatMap((command) => inside('sh', '-c', command).stdout.split('\n'));
  return [...lines.filter((line) => /weir0|proto 196|10096/.test(line)), ...(existsSync(socket) ? [socket] : [])];
}

export function endpointRules(): string[] {
  const rules = inside('ip', 'rule', 'show').stdout.split('\n');
  return rules.flatMap((line) => /from (10\.2\.0\.\d+)/.exec(line)?.[1] ?? []).sort();
}

/** A datagram to the VIP, from this very host. */
export function sendDatagram(): void {
  inside('bash', '-c', 'echo x > /dev/udp/10.96.0.10/53');
}

/** What a test of it needs: root, and weir built. */
export function needsWeir(t: Parameters<typeof needsRoot>[0]): { skip?: string } {
  return built ? needsRoot(t, 'ip', 'bash') : { skip: 'needs npm run build' };
}

/** Makes the namespace. Returns how to remove it, with the folder. */
export function createNamespace(): () => void {
  execFileSync('ip', ['netns', 'add', namespace]);
  for (const command of [
    'link set lo up',
    'link add br0 type veth peer name peer',
    'addr add 10.2.0.1/24 dev br0',
    'link set br0 up',
    'link set peer up',
  ]) {
    execFileSync('ip', ['-n', namespace, ...command.split(' ')]);
  }
  return () => {
    execFileSync('ip', ['netns', 'del', namespace]);
    rmSync(folder, { recursive: true });
  };
}
