import { readFileSync } from 'node:fs';
import { dirname, resolve } from 'node:path';
import { WeirError } from '../base/errors.js';
import { readFault } from '../base/file-faults.js';

/**
 * The timeline of a replay: what happens besides packets. JSON lines, each with `at` in seconds since the first packet:
 *
 *     {"at": 3.5, "config": "v2.yaml"}                      a reload; the path is relative to the timeline's folder
 *     {"at": 4, "backend": "web/b1", "health": "down"}      or "up": what a health check would have found
 *     {"at": 9, "end": true}                                the clock goes on to here
 *
 * Empty lines are skipped.
 */
export type TimelineEvent = { readonly atMs: number; readonly line: number } & (
  | { readonly kind: 'config'; readonly path: string }
  | { readonly kind: 'health'; readonly backend: string; readonly isUp: boolean }
  | { readonly kind: 'end' }
);

/**
 * Reads a timeline. Events are returned in time order, those of one moment in the order of the file.
 *
 * @throws WeirError TIMELINE_INVALID with every mistake of the file, each as `file:line: message`.
 */
export function loadTimeline(file: string): TimelineEvent[] {
  let text: string;
  try {
    text = readFileSync(file, 'utf8');
  } catch (error) {
    const { why, remedy } = readFault(file, error, 'Name a timeline with --timeline FILE.');
    throw new WeirError('TIMELINE_INVALID', `cannot read ${file}: ${why}`, remedy, error);
  }
  return parseTimeline(text, file);
}

/** The same from text; `file` is for messages and for the folder that `config` paths start from. */
export function parseTimeline(text: string, file: string): TimelineEvent[] {
  const events: TimelineEvent[] = [];
  const mistakes: string[] = [];
  for (const [index, source] of text.split('\n').entries()) {
    if (source.trim() === '') continue;
    const event = parseEvent(source, index + 1, dirname(file));
    if (typeof event === 'string') mistakes.push(`${file}:${index + 1}: ${event}`);
    else events.push(event);
  }
  if (mistakes.length > 0) throw new WeirError('TIMELINE_INVALID', mistakes.join('\n'), FORMS);
  return events.sort((a, b) => a.atMs - b.atMs);
}

/** A mistake that only shows when the event is applied: a backend that no configuration has, for example. */
export function timelineError(file: string, event: TimelineEvent, problem: string): WeirError {
  return new WeirError('TIMELINE_INVALID', `${file}:${event.line}: ${problem}`, FORMS);
}

/** Seconds and nanoseconds since the first packet as ms: packets and events of the same moment get the same number. */
export function clockMs(seconds: number, nanoseconds: number): number {
  return (seconds * 1e9 + nanoseconds) / 1e6;
}

const FORMS =
  'A line is {"at":S,"config":"FILE"}, {"at":S,"backend":"SERVICE/BACKEND","health":"up"|"down"} or {"at":S,"end":true}.';

function parseEvent(source: string, line: number, folder: string): TimelineEvent | string {
  let value: unknown;
  try {
    value = JSON.parse(source);
  } catch (error) {
    return `not JSON: ${(error as Error).message}`;
  }
  if (typeof value !== 'object' || value === null || Array.isArray(value)) return 'not a JSON object';
  const fields = value as Record<string, unknown>;
  const { at } = fields;
  if (typeof at !== 'number' || !(at >= 0)) return '`at` must be a number of seconds, 0 or more';
  const base = { atMs: clockMs(0, Math.round(at * 1e9)), line };
  const keys = Object.keys(fields)
    .filter((key) => key !== 'at')
    .sort()
    .join(' ');
  switch (keys) {
    case 'config':
      if (typeof fields.config !== 'string' || fields.config === '') return '`config` must be a path';
      return { ...base, kind: 'config', path: resolve(folder, fields.config) };
    case 'backend health':
      if (typeof fields.backend !== 'string' || !fields.backend.includes('/'))
        return '`backend` must be SERVICE/BACKEND';
      if (fields.health !== 'up' && fields.health !== 'down') return '`health` must be "up" or "down"';
      return { ...base, kind: 'health', backend: fields.backend, isUp: fields.health === 'up' };
    case 'end':
      return fields.end === true ? { ...base, kind: 'end' } : '`end` must be true';
    default:
      return keys === '' ? 'nothing happens: no `config`, `backend` or `end`' : `no event has the keys: ${keys}`;
  }
}
