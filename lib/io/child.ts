import { Socket } from 'node:net';
import { constants } from 'node:os';
import { close, pipe, spawn, waitForEnd } from './syscalls.js';

/*
 * Other programs, without a copy of this one. Node's child_process forks: the kernel copies the page tables of the whole process and
 * makes every page copy-on-write, so that the data path waits until that is done, and then for a fault at each page it writes to. With
 * 300 MB of tables packets waited up to 30 ms, several times for each program. posix_spawn shares the memory until the program
 * begins.
 */

/** What a program that has ended has said. */
export interface Ended {
  readonly stdout: string;
  readonly stderr: string;
  /** null: it was ended by a signal. */
  readonly status: number | null;
  readonly signal: NodeJS.Signals | null;
}

/**
 * Runs a program to its end, in a session of its own.
 *
 * @param input its standard input; that it did not read all of it is no failure
 * @returns -errno when it cannot be started
 */
export async function runChild(file: string, args: readonly string[], input: string): Promise<Ended | number> {
  const pipes = openPipes();
  if (typeof pipes === 'number') return pipes;
  const [stdin, stdout, stderr] = pipes;
  const environment = Object.entries(process.env).map(([name, value]) => `${name}=${value}`);
  const pid = spawn(file, [file, ...args], environment, [stdin.reader, stdout.writer, stderr.writer]);
  for (const fd of [stdin.reader, stdout.writer, stderr.writer]) close(fd);
  if (pid < 0) {
    for (const fd of [stdin.writer, stdout.reader, stderr.reader]) close(fd);
    return pid;
  }
  const writing = new Socket({ fd: stdin.writer, readable: false, writable: true });
  writing.on('error', () => {}).end(input);
  const [said, complained] = await Promise.all([readAll(stdout.reader), readAll(stderr.reader)]);
  writing.destroy();
  return { stdout: said, stderr: complained, ...decode(await waitForEnd(pid)) };
}

type Pipe = Exclude<ReturnType<typeof pipe>, number>;

function openPipes(): readonly [Pipe, Pipe, Pipe] | number {
  const open: Pipe[] = [];
  for (let i = 0; i < 3; i++) {
    const next = pipe();
    if (typeof next === 'number') {
      for (const { reader, writer } of open) {
        close(reader);
        close(writer);
      }
      return next;
    }
    open.push(next);
  }
  return open as unknown as [Pipe, Pipe, Pipe];
}

async function readAll(fd: number): Promise<string> {
  const socket = new Socket({ fd, readable: true, writable: false }).setEncoding('utf8');
  let text = '';
  for await (const part of socket) text += part;
  return text;
}

/** A wait status, as wait(2) has it. */
function decode(waitStatus: number): Pick<Ended, 'status' | 'signal'> {
  const number = waitStatus & 0x7f;
  if (number === 0) return { status: waitStatus >> 8, signal: null };
  const name = Object.entries(constants.signals).find(([, value]) => value === number)?.[0];
  return { status: null, signal: (name as NodeJS.Signals | undefined) ?? null };
}
