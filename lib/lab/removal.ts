import { spawnSync } from 'node:child_process';
import { accessSync, constants, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { WeirError } from '../base/errors.js';

/*
 * A lab owns its namespaces, the processes it started in them and /run/PREFIX-lab. lab.json there names the processes, so
 * that another process, later, can take down what this one left. Nothing is ended that is not both listed there and in one
 * of the lab's namespaces: a pid may have come to mean another program.
 */

export interface StateFile {
  /** The process that builds or built the lab. */
  readonly owner: number;
  readonly namespaces: readonly string[];
  readonly pids: readonly number[];
}

const STOP_LIMIT_MS = 3000;
const POLL_MS = 10;

/**
 * Removes the lab of a prefix, whoever built it: the command `weir lab down`. Its processes are asked to end first, so that
 * what they write is whole. Waits for that without returning to the event loop, three seconds at most.
 *
 * @returns whether there was one
 * @throws WeirError NO_PERMISSION, before anything is done
 */
export function takeDown(prefix = 'weir'): boolean {
  const state = readState(checkPrefix(prefix));
  if (state === null) return false;
  requireWritable(labDirectory(prefix));
  for (const pid of survivors(state)) signal(pid, 'SIGTERM');
  const pause = new Int32Array(new SharedArrayBuffer(4));
  const limitMs = performance.now() + STOP_LIMIT_MS;
  while (survivors(state).length > 0 && performance.now() < limitMs) Atomics.wait(pause, 0, 0, POLL_MS);
  return removeLab(prefix);
}

function requireWritable(folder: string): void {
  try {
    accessSync(folder, constants.W_OK);
  } catch {
    throw new WeirError(
      'NO_PERMISSION',
      `the lab in ${folder} is somebody else’s`,
      'Run this as root: sudo weir lab down.',
    );
  }
}

/** The same at once: whatever still runs is killed. */
export function removeLab(prefix: string): boolean {
  const state = readState(prefix);
  if (state === null) return false;
  for (const pid of survivors(state)) signal(pid, 'SIGKILL');
  const existing = state.namespaces.filter((name) => inodeOf(`/run/netns/${name}`) !== 0);
  const input = existing.map((name) => `netns del ${name}\n`).join('');
  if (existing.length > 0) spawnSync('ip', ['-force', '-batch', '-'], { input });
  rmSync(labDirectory(prefix), { recursive: true, force: true });
  return true;
}

/**
 * Short enough that nothing made of it exceeds a limit: a UNIX socket's path has 107 bytes.
 *
 * @throws WeirError USAGE
 */
export function checkPrefix(prefix: string): string {
  if (/^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$/.test(prefix)) return prefix;
  throw new WeirError(
    'USAGE',
    `${JSON.stringify(prefix)} cannot be a lab's prefix`,
    'Use up to 40 letters, digits, - and _.',
  );
}

export function labDirectory(prefix: string): string {
  return `/run/${prefix}-lab`;
}

export function writeState(prefix: string, state: StateFile): void {
  writeFileSync(stateFile(prefix), JSON.stringify(state));
}

/** Whether somebody's lab of this prefix is in use. */
export function isAlive(prefix: string): boolean {
  const state = readState(prefix);
  if (state === null) return false;
  return survivors(state).length > 0 || (state.owner !== process.pid && isLabProcess(state.owner));
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

/** The listed processes that still are in one of the lab's namespaces. */
function survivors({ namespaces, pids }: StateFile): number[] {
  const inodes = new Set(namespaces.map((name) => inodeOf(`/run/netns/${name}`)).filter((inode) => inode !== 0));
  return pids.filter((pid) => inodes.has(inodeOf(`/proc/${pid}/ns/net`)));
}

function signal(pid: number, name: NodeJS.Signals): void {
  try {
    process.kill(pid, name);
  } catch {
    // It has just ended by itself.
  }
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

/** What ends with this process, however that comes about. */
export interface Guarded {
  readonly prefix: string;
  readonly abandon: () => void;
}

const SIGNALS = { SIGINT: 2, SIGTERM: 15, SIGHUP: 1 } as const;
const guarded = new Set<Guarded>();

export function isGuarded(prefix: string): boolean {
  return [...guarded].some((each) => each.prefix === prefix);
}

export function guard(lab: Guarded): void {
  if (guarded.size === 0) {
    process.on('exit', abandonAll);
    for (const name of Object.keys(SIGNALS) as NodeJS.Signals[]) process.on(name, onSignal);
  }
  guarded.add(lab);
}

export function unguard(lab: Guarded): void {
  if (!guarded.delete(lab) || guarded.size > 0) return;
  process.off('exit', abandonAll);
  for (const name of Object.keys(SIGNALS) as NodeJS.Signals[]) process.off(name, onSignal);
}

function abandonAll(): void {
  for (const lab of guarded) lab.abandon();
}

function onSignal(name: NodeJS.Signals): void {
  abandonAll();
  process.exit(128 + SIGNALS[name as keyof typeof SIGNALS]);
}
