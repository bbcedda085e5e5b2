import { type ChildProcess, spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { extname } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { WeirError } from '../base/errors.js';

/*
 *   lab ---+--- ip netns exec NAMESPACE program     run to its end, output taken
 *          +--- ip netns exec NAMESPACE program &   output to a file, so that it may outlive the lab's own process
 */

const START_LIMIT_MS = 30_000;
const POLL_MS = 15;

export interface Result {
  readonly stdout: string;
  readonly stderr: string;
  /** null: ended by a signal, or by the time-out. */
  readonly status: number | null;
}

export interface RunOptions {
  readonly input?: string;
  /** After which the program is killed; 60 s. */
  readonly timeoutMs?: number;
  /** Called with the child as soon as it runs. */
  readonly started?: (child: ChildProcess) => void;
  /** Called with each piece of standard output. */
  readonly onOutput?: (text: string) => void;
}

/**
 * Runs a program to its end in a process group of its own, so that Ctrl-C reaches the lab only, which then cleans up.
 *
 * @throws WeirError MISSING_TOOL when there is no such program
 */
export function run(command: string, args: readonly string[], options: RunOptions = {}): Promise<Result> {
  return new Promise((resolve, reject) => {
    const child = spawn(command, args, { stdio: 'pipe', detached: true });
    let stdout = '';
    let stderr = '';
    const timer = setTimeout(() => child.kill('SIGKILL'), options.timeoutMs ?? 60_000);
    child.stdout.setEncoding('utf8').on('data', (text: string) => {
      stdout += text;
      options.onOutput?.(text);
    });
    child.stderr.setEncoding('utf8').on('data', (text: string) => (stderr += text));
    child.stdin.on('error', () => {}); // ended without reading: its status says why
    child.stdin.end(options.input ?? '');
    child.on('error', (error: NodeJS.ErrnoException) => {
      clearTimeout(timer);
      reject(error.code === 'ENOENT' ? missing(command) : error);
    });
    child.on('close', (status) => {
      clearTimeout(timer);
      resolve({ stdout, stderr, status });
    });
    if (child.pid !== undefined) options.started?.(child);
  });
}

const PACKAGES: Readonly<Record<string, string>> = { ip: 'iproute2', unshare: 'util-linux' };

function missing(command: string): WeirError {
  const name = PACKAGES[command] ?? command;
  return new WeirError(
    'MISSING_TOOL',
    `${command} is not installed`,
    `Install it (apt install ${name}, apk add ${name}).`,
  );
}

/** @throws WeirError LAB_FAILED with what the program said */
export async function must(command: string, args: readonly string[], options: RunOptions = {}): Promise<string> {
  const { stdout, stderr, status } = await run(command, args, options);
  if (status === 0) return stdout;
  const said = (stderr || stdout).trim().replace(/\s*\n\s*/g, '; ');
  throw new WeirError('LAB_FAILED', `${[command, ...args].join(' ')} failed: ${said || 'it said nothing'}`);
}

/** The command that runs a file of this folder, compiled or from source. */
export function nodeCommand(name: 'server' | 'load' | 'transfers'): string[] {
  const extension = extname(import.meta.url);
  const file = fileURLToPath(new URL(`./${name}${extension}`, import.meta.url));
  const loader = extension === '.ts' ? ['--import', import.meta.resolve('tsx')] : [];
  return [process.execPath, ...loader, file];
}

/** A program that runs in the background, with its output in a file. */
export interface ServiceProcess {
  readonly pid: number;
  readonly logPath: string;
  /** Resolves with the exit status, or null after a signal. */
  readonly ended: Promise<number | null>;
}

/**
 * Waits until a process has written a line; it may not end before.
 *
 * @throws WeirError LAB_FAILED with the last it wrote
 */
export async function waitForLine(
  service: ServiceProcess,
  what: string,
  test: (line: string) => boolean,
): Promise<void> {
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

/** The whole lines of a file that may be growing. */
export function readLines(path: string): string[] {
  const text = readFileSync(path, 'utf8');
  return text.slice(0, text.lastIndexOf('\n') + 1).split('\n');
}

/** One line of weir's log. */
export function parseEvent(line: string): Record<string, unknown> | undefined {
  if (!line.startsWith('{')) return undefined;
  try {
    return JSON.parse(line) as Record<string, unknown>;
  } catch {
    return undefined;
  }
}
