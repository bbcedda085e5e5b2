/**
 * Errors with a code and a remedy: everything that can go wrong at start-up or in a command. Per-packet trouble is a
 * counter, never an exception. The codes are documented in docs/errors.md, and a test says so.
 */

const TABLE = {
  CONFIG_INVALID: 'The configuration file has mistakes; each is listed with its position.',
  CONFIG_UNREADABLE: 'The configuration file cannot be read.',
  NO_PERMISSION: 'The process may not do this; it needs CAP_NET_ADMIN.',
  NO_TUN: '/dev/net/tun is missing.',
  DEVICE_TAKEN: 'A device of this name exists and is in use.',
  DEVICE_FAILED: 'The device broke or went away while running.',
  ENGINE_UNAVAILABLE: 'The I/O engine that was asked for cannot run here.',
  ADDRESS_IN_USE: 'A socket’s address is taken.',
  NOT_THIS_HOST: 'An address that must be one of this host is not.',
  ALREADY_RUNNING: 'Another weir owns these names.',
  NOT_RUNNING: 'No weir answers on the admin socket.',
  NETWORK_SETUP: 'An ip or sysctl command failed.',
  MISSING_TOOL: 'A program weir needs is not installed.',
  NOT_SUPPORTED: 'This build or kernel cannot do what the configuration asks for.',
  CAPTURE_INVALID: 'The capture file cannot be read.',
  TIMELINE_INVALID: 'The timeline file has a mistake.',
  FLOWS_INVALID: 'The file of connections cannot be imported.',
  EXPORT_REFUSED: 'The configuration asks for what kernel rules cannot do; each place is listed.',
  IMPORT_INVALID: 'What is to be imported has mistakes, or cannot be read.',
  OUTPUT_FAILED: 'A file cannot be written.',
  STATE_FILE: 'The conntrack state file cannot be used.',
  USAGE: 'The command line is wrong.',
  LAB_FAILED: 'The lab could not be built or a check in it failed.',
} as const;

export type ErrorCode = keyof typeof TABLE;

/** What each code means, for the documentation and its test. */
export const ERROR_MEANINGS: Readonly<Record<ErrorCode, string>> = TABLE;

/** One sentence of what went wrong, and what to do about it. */
export class WeirError extends Error {
  readonly code: ErrorCode;
  readonly remedy: string;

  constructor(code: ErrorCode, message: string, remedy = '', cause?: unknown) {
    super(message, cause === undefined ? undefined : { cause });
    this.name = 'WeirError';
    this.code = code;
    this.remedy = remedy;
  }
}
