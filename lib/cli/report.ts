import { CommanderError } from 'commander';
import { type ErrorCode, WeirError } from '../base/errors.js';

/** Thrown by a command that has said all there is to say. */
export class Exit extends Error {
  readonly code: number;

  constructor(code: number) {
    super(`exit ${code}`);
    this.code = code;
  }
}

/** What was asked for is wrong, rather than something on the way to it. */
const MISTAKES: readonly ErrorCode[] = [
  'CONFIG_INVALID',
  'CONFIG_UNREADABLE',
  'EXPORT_REFUSED',
  'IMPORT_INVALID',
  'USAGE',
];

/** Their messages are lists, a line for each mistake and its position. */
const LISTS: readonly ErrorCode[] = ['CONFIG_INVALID', 'EXPORT_REFUSED', 'IMPORT_INVALID'];

/**
 * Says on standard error what went wrong: one sentence and the remedy, or for a configuration its mistakes line by line. A
 * stack trace only with WEIR_DEBUG.
 *
 * @returns the exit code: 2 for mistakes in the command line or the configuration, 1 for everything else.
 */
export function report(error: unknown): number {
  if (error instanceof Exit) return error.code;
  if (error instanceof CommanderError) return error.exitCode === 0 ? 0 : 2;
  if (process.env.WEIR_DEBUG) console.error(error);
  if (!(error instanceof WeirError)) {
    const message = error instanceof Error ? error.message : String(error);
    console.error(
      `weir: ${sentence(message)} This is a bug in weir; please report it with the output of WEIR_DEBUG=1.`,
    );
    return 1;
  }
  if (LISTS.includes(error.code)) console.error(error.message);
  else console.error(`weir: ${[error.message, capital(error.remedy)].filter(Boolean).map(sentence).join(' ')}`);
  return MISTAKES.includes(error.code) ? 2 : 1;
}

function sentence(text: string): string {
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
