import { NotifySocket } from '../io/notify-socket.js';
import type { EventLog } from './log.js';

/**
 * What weir tells the service manager that started it, if that wants to know (sd_notify(3), systemd's Type=notify and
 * notify-reload): when it is ready, reloads and stops, in a line what it does, and that it is alive. Alive means that the data
 * path answers; whether it does is asked at half of the time the manager waits.
 *
 *     NOTIFY_SOCKET   where to; absent: nobody wants to know
 *     WATCHDOG_USEC   how long the manager waits for a sign of life; absent: it does not
 *     WATCHDOG_PID    of the process that is meant; absent: this one
 */
export class ServiceManager {
  readonly #log: EventLog;
  readonly #socket: NotifySocket | undefined;
  readonly #periodMs: number;
  #watchdog: NodeJS.Timeout | undefined;
  #isUnreachable = false;
  #isStopping = false;

  constructor(env: Readonly<Record<string, string | undefined>>, log: EventLog) {
    const { NOTIFY_SOCKET: path, WATCHDOG_USEC: wait, WATCHDOG_PID: pid } = env;
    this.#log = log;
    this.#socket = path ? new NotifySocket(path) : undefined;
    const isMeant = pid === undefined || Number(pid) === process.pid;
    this.#periodMs = path && isMeant && wait !== undefined && /^\d+$/.test(wait) ? Number(wait) / 2000 : 0;
  }

  status(text: string): void {
    this.#tell(`STATUS=${text}`);
  }

  ready(status: string): void {
    if (!this.#isStopping) this.#tell('READY=1', `STATUS=${status}`);
  }

  /** To be followed by `ready`, whatever comes of it. */
  reloading(): void {
    if (!this.#isStopping) {
      this.#tell('RELOADING=1', `MONOTONIC_USEC=${process.hrtime.bigint() / 1000n}`, 'STATUS=reloading');
    }
  }

  stopping(why: string): void {
    this.#isStopping = true;
    this.#tell('STOPPING=1', `STATUS=stopping: ${why}`);
  }

  /** Begins to give signs of life. @param answers asks the data path; resolves when it has come round, be it late */
  watch(answers: () => Promise<void>): void {
    if (this.#periodMs <= 0) return;
    let isAsked = false;
    const ask = async (): Promise<void> => {
      if (isAsked) return;
      isAsked = true;
      await answers();
      isAsked = false;
      if (this.#watchdog !== undefined) this.#tell('WATCHDOG=1');
    };
    this.#watchdog = setInterval(ask, this.#periodMs);
    void ask();
  }

  close(): void {
    clearInterval(this.#watchdog);
    this.#watchdog = undefined;
    this.#socket?.close();
  }

  #tell(...lines: string[]): void {
    const problem = this.#socket?.send(lines.join('\n'));
    if (problem === undefined) {
      this.#isUnreachable = false;
      return;
    }
    if (!this.#isUnreachable) this.#log.warn('manager-unreachable', `the service manager cannot be told: ${problem}`);
    this.#isUnreachable = true;
  }
}
