import { closeSync, constants, fstatSync, openSync, readFileSync } from 'node:fs';
import { WeirError } from '../base/errors.js';
import { readFault } from '../base/file-faults.js';
import { MAX_CONFIG_BYTES } from '../base/limits.js';
import type { Config } from './config.js';
import { deriveConfig } from './derive.js';
import { type Fault, faultsOf, UNWORDED } from './faults.js';
import { checkRules } from './rules.js';
import { configSchema } from './schema.js';
import type { YamlPieces } from './yaml-pieces.js';
import { YamlSource } from './yaml-source.js';

/** One mistake and where it stands; lines and columns count from 1. */
export interface Problem {
  readonly line: number;
  readonly column: number;
  /** `services[0].backends[1].weight`; empty for the file as a whole. */
  readonly path: string;
  readonly message: string;
}

export type LoadResult =
  | { readonly config: Config; readonly problems: readonly [] }
  | { readonly config: null; readonly problems: readonly Problem[] };

/**
 * Judges a configuration's text, YAML or JSON. Never throws. All mistakes are reported at once, in the order of the file;
 * only mistakes of syntax hide the others, since what the rest means is not known then.
 *
 * @param pieces of the text judged before this one: what is in both is not parsed again
 */
export function parseConfig(text: string, pieces?: YamlPieces): LoadResult {
  const known = pieces?.read(text);
  if (known !== undefined && checkRules(known).length === 0) {
    const result = configSchema.safeParse(known);
    if (result.success) return { config: deriveConfig(result.data), problems: [] };
  }
  const source = new YamlSource(text);
  if (source.syntaxErrors.length > 0) {
    return refused(source.syntaxErrors.map(({ line, column, message }) => ({ line, column, path: '', message })));
  }
  const { value } = source;
  if (source.faults.length === 0 && (value === undefined || value === null)) {
    return refused([{ line: 1, column: 1, path: '', message: 'the file is empty; write {} for nothing but defaults' }]);
  }
  const result = configSchema.safeParse(value, { error: () => UNWORDED });
  const faults: Fault[] = [...source.faults, ...checkRules(value)];
  if (!result.success) {
    const known = new Set(faults.map((fault) => formatPath(fault.path)));
    // A bad alias reads as nothing: that it is missing is no second mistake.
    faults.push(
      ...faultsOf(result.error, value).filter((fault) => !(known.has(formatPath(fault.path)) && isHollow(fault))),
    );
  }
  if (faults.length > 0 || !result.success) {
    return { config: null, problems: place(source, faults) };
  }
  return { config: deriveConfig(result.data), problems: [] };
}

/** Reads and judges a file. @throws WeirError CONFIG_UNREADABLE */
export function loadConfig(path: string): LoadResult {
  return parseConfig(readConfigText(path));
}

/**
 * Reads a file that must be right.
 *
 * @param text what is in it, when that was read already
 * @param pieces as for parseConfig
 * @throws WeirError CONFIG_UNREADABLE, or CONFIG_INVALID, whose message is one line per problem.
 */
export function requireConfig(path: string, text = readConfigText(path), pieces?: YamlPieces): Config {
  const { config, problems } = parseConfig(text, pieces);
  if (config === null) {
    const lines = problems.map((problem) => formatProblem(path, problem));
    throw new WeirError(
      'CONFIG_INVALID',
      lines.join('\n'),
      `Correct ${path}; \`weir check -c ${path}\` reads it again.`,
    );
  }
  return config;
}

/** `file:line:column path: message`, as compilers print it, so that editors can jump there. */
export function formatProblem(file: string, { line, column, path, message }: Problem): string {
  return `${file}:${line}:${column} ${path === '' ? '' : `${path}: `}${message}`;
}

/** Where the values of `faults` stand in a text that can be read, in the order of the text. */
export function placeFaults(text: string, faults: readonly Fault[]): Problem[] {
  return place(new YamlSource(text), faults);
}

function place(source: YamlSource, faults: readonly Fault[]): Problem[] {
  return inOrder(
    faults.map(({ path, message, at }) => ({ ...source.locate(path, at), path: formatPath(path), message })),
  );
}

function refused(problems: Problem[]): LoadResult {
  return { config: null, problems: inOrder(problems) };
}

function inOrder(problems: Problem[]): Problem[] {
  return problems.sort((a, b) => a.line - b.line || a.column - b.column);
}

function isHollow(fault: Fault): boolean {
  return fault.message === 'is missing';
}

/** `services[0].backends[1].weight` */
export function formatPath(path: readonly PropertyKey[]): string {
  let text = '';
  for (const step of path) {
    if (typeof step === 'number') text += `[${step}]`;
    else if (/^[\w-]+$/.test(String(step))) text += text === '' ? String(step) : `.${String(step)}`;
    else text += `[${JSON.stringify(step)}]`;
  }
  return text;
}

/** @throws WeirError CONFIG_UNREADABLE */
export function readConfigText(path: string): string {
  return readText(path, false);
}

/**
 * The same, of what has to be a file: a pipe might keep the reader waiting for ever, and a directory has nothing to say.
 *
 * @throws WeirError CONFIG_UNREADABLE
 */
export function readConfigFile(path: string): string {
  return readText(path, true);
}

function readText(path: string, mustBeFile: boolean): string {
  let fd = -1;
  try {
    fd = openSync(path, constants.O_RDONLY | (mustBeFile ? constants.O_NONBLOCK : 0));
    const found = fstatSync(fd);
    if (found.isDirectory() || (mustBeFile && !found.isFile()))
      throw unreadable(path, mustBeFile ? 'it is no file' : 'it is a directory');
    requireSize(path, found.size);
    const text = readFileSync(fd, 'utf8');
    requireSize(path, text.length);
    return text;
  } catch (error) {
    if (error instanceof WeirError) throw error;
    const { why, remedy } = readFault(path, error, NAME_ONE);
    throw unreadable(path, why, remedy, error);
  } finally {
    if (fd >= 0) closeSync(fd);
  }
}

function requireSize(path: string, bytes: number): void {
  if (bytes > MAX_CONFIG_BYTES) throw unreadable(path, `it has ${bytes} bytes, and may have ${MAX_CONFIG_BYTES}`);
}

const NAME_ONE = 'Name an existing file with -c FILE.';

function unreadable(path: string, why: string, remedy = NAME_ONE, cause?: unknown): WeirError {
  return new WeirError('CONFIG_UNREADABLE', `cannot read ${path}: ${why}`, remedy, cause);
}
