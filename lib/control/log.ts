import { isatty } from 'node:tty';
import { type DestinationStream, type Logger, pino, stdTimeFunctions } from 'pino';
import { prettyFactory } from 'pino-pretty';
import { TextOutput } from '../io/text-output.js';
import { LogHistory } from './log-history.js';

/** What happened, by name: stable, for alerts and searches; docs/logs.md explains each. Never one line per packet. */
export const LOG_EVENTS = [
  'starting',
  'device-opened',
  'tunnel-opened',
  'endpoint-learned',
  'endpoint-refused',
  'endpoints-forgotten',
  'network-applied',
  'network-note',
  'engine',
  'state-file',
  'state-file-refused',
  'state-file-damaged',
  'state-file-on-disk',
  'ready',
  'reload-applied',
  'reload-refused',
  'drained',
  'drain-begun',
  'drain-ended',
  'health-changed',
  'health-unknown',
  'flushed',
  'imported',
  'capture-begun',
  'capture-ended',
  'manager-unreachable',
  'suppressed',
  'lines-lost',
  'device-failed',
  'step-failed',
  'stopping',
  'stopped',
] as const;

export type LogEvent = (typeof LOG_EVENTS)[number];

type Level = 'info' | 'warn' | 'error';

/** Lines of one event in WINDOW_MS; more are counted, and told as `suppressed` when it is over. */
export const LINES_PER_WINDOW = 100;
export const WINDOW_MS = 10_000;

/** Of one event, since `beganMs`. */
interface Window {
  beganMs: number;
  lines: number;
  suppressed: number;
}

/** One JSON object a line: level, time (ISO 8601), event, msg (of one line, too), and what belongs to the event. */
export class EventLog {
  readonly history = new LogHistory();
  readonly #logger: Logger;
  readonly #nowMs: () => number;
  readonly #windows = new Map<LogEvent, Window>();
  #timer: NodeJS.Timeout | undefined;

  /** @param nowMs of a clock that nobody sets, for the rate alone */
  constructor(stream: DestinationStream, nowMs: () => number = () => performance.now()) {
    this.#nowMs = nowMs;
    const both: DestinationStream = {
      write: (line) => {
        this.history.add(line);
        stream.write(line);
      },
    };
    this.#logger = pino(
      { base: null, timestamp: stdTimeFunctions.isoTime, formatters: { level: (label) => ({ level: label }) } },
      both,
    );
  }

  info(event: LogEvent, message: string, fields: object = {}): void {
    this.#write('info', event, message, fields);
  }

  warn(event: LogEvent, message: string, fields: object = {}): void {
    this.#write('warn', event, message, fields);
  }

  error(event: LogEvent, message: string, fields: object = {}): void {
    this.#write('error', event, message, fields);
  }

  /** Says how many lines were left out in windows that are over. By itself it happens within 2 * WINDOW_MS. */
  tellSuppressed(): void {
    for (const [of, { beganMs, suppressed: count }] of this.#windows) {
      if (this.#nowMs() - beganMs < WINDOW_MS) continue;
      this.#windows.delete(of);
      if (count === 0) continue;
      const message = `${count} more of ${of} in ${WINDOW_MS / 1000} s were not written`;
      this.#logger.warn({ event: 'suppressed' satisfies LogEvent, of, count }, message);
    }
  }

  #write(level: Level, event: LogEvent, message: string, fields: object): void {
    this.tellSuppressed();
    if (this.#admits(event)) this.#logger[level]({ event, ...fields }, message.trim().replace(/\s*\n\s*/g, '; '));
  }

  #admits(event: LogEvent): boolean {
    const window = this.#windows.get(event) ?? { beganMs: this.#nowMs(), lines: 0, suppressed: 0 };
    this.#windows.set(event, window);
    if (window.lines++ < LINES_PER_WINDOW) return true;
    window.suppressed++;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.tellSuppressed(), WINDOW_MS).unref();
    return false;
  }
}

/**
 * The log on standard output, written before the call returns: the last line before an exit is never lost to a reader that reads. One that
 * does not read, or goes away, loses lines, and keeps nobody waiting.
 *
 * @param isPretty for people, in colours on a terminal: without what belongs to an event, a line each
 */
export function openLog(isPretty: boolean): EventLog {
  const stdout = new TextOutput(1);
  process.once('exit', () => stdout.end());
  const prettify = isPretty
    ? prettyFactory({
        colorize: isatty(1),
        translateTime: 'SYS:HH:MM:ss.l',
        messageFormat: '{event}: {msg}',
        ignore: 'event',
        hideObject: true,
      })
    : (line: string): string => line;
  const log = new EventLog({ write: (line) => stdout.write(prettify(line)) });
  stdout.onLost = (count) => log.warn('lines-lost', `standard output did not take ${count} lines`, { count });
  return log;
}
