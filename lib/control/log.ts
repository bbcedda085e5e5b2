import { isatty } from 'node:tty';
import { type DestinationStream, destination, type Logger, pino, stdTimeFunctions } from 'pino';
import pretty from 'pino-pretty';

/** The name of what happened: stable, for alerts and searches. Never one line per packet. */
export type LogEvent =
  | 'starting'
  | 'device-opened'
  | 'tunnel-opened'
  | 'endpoint-learned'
  | 'endpoint-refused'
  | 'endpoints-forgotten'
  | 'network-applied'
  | 'network-note'
  | 'engine'
  | 'state-file'
  | 'state-file-refused'
  | 'state-file-damaged'
  | 'state-file-on-disk'
  | 'ready'
  | 'reload-applied'
  | 'reload-refused'
  | 'drained'
  | 'drain-begun'
  | 'drain-ended'
  | 'health-changed'
  | 'health-unknown'
  | 'flushed'
  | 'imported'
  | 'device-failed'
  | 'step-failed'
  | 'stopping'
  | 'stopped';

/** One JSON object a line: level, time (ISO 8601), event, msg, and what belongs to the event. */
export class EventLog {
  readonly #logger: Logger;

  constructor(stream: DestinationStream) {
    this.#logger = pino(
      { base: null, timestamp: stdTimeFunctions.isoTime, formatters: { level: (label) => ({ level: label }) } },
      stream,
    );
  }

  info(event: LogEvent, message: string, fields: object = {}): void {
    this.#logger.info({ event, ...fields }, message);
  }

  warn(event: LogEvent, message: string, fields: object = {}): void {
    this.#logger.warn({ event, ...fields }, message);
  }

  error(event: LogEvent, message: string, fields: object = {}): void {
    this.#logger.error({ event, ...fields }, message);
  }
}

/**
 * The log on standard output, written before the call returns: the last line before an exit is never lost. A reader
 * that goes away takes the log with it, not weir.
 *
 * @param isPretty for people, in colours on a terminal
 */
export function openLog(isPretty: boolean): EventLog {
  const stdout = destination({ dest: 1, sync: true });
  stdout.on('error', () => {});
  if (!isPretty) return new EventLog(stdout);
  return new EventLog(
    pretty({
      destination: stdout,
      colorize: isatty(1),
      translateTime: 'SYS:HH:MM:ss.l',
      messageFormat: '{event}: {msg}',
      ignore: 'event',
    }),
  );
}
