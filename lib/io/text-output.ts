import { closeSync, constants, fstatSync, openSync, writeSync } from 'node:fs';
import { errnoName, MSG_DONTWAIT, MSG_NOSIGNAL, sendTo } from './syscalls.js';

/** What waits for a reader that does not read, at most; and how often it is tried again. */
const MAX_WAITING_BYTES = 1024 * 1024;
const RETRY_MS = 100;
/** How long the end of the process may wait for it. */
const LAST_MS = 200;
const LAST_RETRY_MS = 5;

const NO_ADDRESS = new Uint8Array(0);

/**
 * Lines to a descriptor of the process, its standard output, whatever that is: written before the call returns when there is room. Nobody
 * waits for a reader that does not read: what a pipe, a socket or a stopped terminal does not take waits here, in bounds, and what there
 * is no room for is lost and counted. A reader that goes away takes the lines with it.
 *
 * Others may have the same descriptor and want it as it is, so that O_NONBLOCK may not be set on it: a pipe or a terminal is opened anew,
 * and a socket, which cannot be, has a flag for each call. What else can be written to never waits.
 */
export class TextOutput {
  /** Called when lines were lost and there is room again. */
  onLost: (lines: number) => void = () => {};

  readonly #fd: number;
  readonly #isOwn: boolean;
  readonly #isSocket: boolean;
  #waiting: Uint8Array[] = [];
  #waitingBytes = 0;
  #lost = 0;
  #timer: NodeJS.Timeout | undefined;

  constructor(fd: number) {
    const kind = kindOf(fd);
    const own = kind === 'stream' ? openAnew(fd) : -1;
    this.#isOwn = own >= 0;
    this.#fd = this.#isOwn ? own : fd;
    this.#isSocket = kind === 'socket';
  }

  /** @param line with its line feed */
  write(line: string): void {
    if (this.#waiting.length > 0) this.#flush();
    if (this.#waitingBytes > MAX_WAITING_BYTES) {
      this.#lost++;
      return;
    }
    const bytes = Buffer.from(line);
    this.#waiting.push(bytes);
    this.#waitingBytes += bytes.length;
    if (this.#waiting.length === 1) this.#flush();
  }

  /** Tries a little longer, at the end of a process. What is not taken then is lost. */
  end(): void {
    const pause = new Int32Array(new SharedArrayBuffer(4));
    const endMs = performance.now() + LAST_MS;
    for (this.#flush(); this.#waiting.length > 0 && performance.now() < endMs; this.#flush()) {
      Atomics.wait(pause, 0, 0, LAST_RETRY_MS);
    }
    clearTimeout(this.#timer);
    this.#waiting = [];
    if (this.#isOwn) closeSync(this.#fd);
  }

  #flush(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    while (this.#waiting.length > 0) {
      const bytes = this.#waiting[0]!;
      const taken = this.#tryWrite(bytes);
      this.#waitingBytes -= taken;
      if (taken === bytes.length) this.#waiting.shift();
      else {
        this.#waiting[0] = bytes.subarray(taken);
        this.#timer = setTimeout(() => this.#flush(), RETRY_MS).unref();
        return;
      }
    }
    if (this.#lost === 0) return;
    const lost = this.#lost;
    this.#lost = 0;
    this.onLost(lost);
  }

  /** Returns how many bytes were taken; all, of those that nobody will ever take. */
  #tryWrite(bytes: Uint8Array): number {
    if (this.#isSocket) {
      const sent = sendTo(this.#fd, bytes, MSG_DONTWAIT | MSG_NOSIGNAL, NO_ADDRESS);
      return sent >= 0 ? sent : errnoName(sent) === 'EAGAIN' ? 0 : bytes.length;
    }
    try {
      return writeSync(this.#fd, bytes);
    } catch (error) {
      return (error as NodeJS.ErrnoException).code === 'EAGAIN' ? 0 : bytes.length;
    }
  }
}

function kindOf(fd: number): 'stream' | 'socket' | 'other' {
  try {
    const found = fstatSync(fd);
    if (found.isSocket()) return 'socket';
    return found.isFIFO() || found.isCharacterDevice() ? 'stream' : 'other';
  } catch {
    // It is closed.
    return 'other';
  }
}

/** @returns -1 where that is not possible: nobody reads, or another user made it */
function openAnew(fd: number): number {
  try {
    return openSync(`/proc/self/fd/${fd}`, constants.O_WRONLY | constants.O_NONBLOCK | constants.O_NOCTTY);
  } catch {
    return -1;
  }
}
