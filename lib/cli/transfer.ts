import { createReadStream, fstatSync, openSync } from 'node:fs';
import type { Readable } from 'node:stream';
import { WeirError } from '../base/errors.js';
import { readFault } from '../base/file-faults.js';
import { Progress } from '../control/progress.js';
import { countRefused, plural } from '../control/summary.js';
import type { ImportView } from '../control/view.js';
import { callJson, callStream } from './client.js';
import { print, printJson } from './output.js';
import { Exit } from './report.js';
import { type FilterOptions, filterOf, type SocketOptions } from './running.js';

/** Connections from one running weir to another: `weir ct export`, `weir ct import`. */

/** Read at once. */
const READ_BYTES = 256 * 1024;

export async function ctExport({ socket, ...filter }: FilterOptions): Promise<void> {
  await callStream({ socket, path: '/v1/ct/export', query: filterOf(filter) }, print);
}

/** Exits with 1 when a connection of the file is not there afterwards, or the file is not whole. */
export async function ctImport(
  file: string,
  { socket, output }: SocketOptions & { output: 'table' | 'json' },
): Promise<void> {
  const body = openInput(file);
  const progress = new Progress(file, (lines) => `sent ${plural(lines, 'line')}`);
  let bytes = 0;
  const sent = (chunk: Buffer): void => {
    bytes += chunk.length;
    progress.step(bytes, countLines(chunk));
  };
  let view: ImportView;
  try {
    view = await callJson<ImportView>({ socket, method: 'POST', path: '/v1/ct/import', body, sent });
  } finally {
    progress.end();
    body.destroy();
  }
  await (output === 'json' ? printJson(view) : print(sayImport(view)));
  const refused = countRefused(view.skipped);
  if (refused === 0 && view.complete) return;
  if (output === 'table') console.error(sayRefused(view, refused));
  throw new Exit(1);
}

function openInput(file: string): Readable {
  if (file === '-') return process.stdin;
  let fd: number;
  try {
    fd = openSync(file, 'r');
  } catch (error) {
    throw unreadable(file, error);
  }
  if (fstatSync(fd).isDirectory()) throw unreadable(file, { code: 'EISDIR' });
  return createReadStream(file, { fd, highWaterMark: READ_BYTES });
}

function unreadable(file: string, error: unknown): WeirError {
  const { why, remedy } = readFault(file, error, 'Name what `weir ct export` wrote, or - for standard input.');
  return new WeirError('FLOWS_INVALID', `cannot read ${file}: ${why}`, remedy, error);
}

function countLines(chunk: Buffer): number {
  let lines = 0;
  for (let at = chunk.indexOf(10); at >= 0; at = chunk.indexOf(10, at + 1)) lines++;
  return lines;
}

function sayImport({ imported, updated, skipped }: ImportView): string {
  const parts = [`${plural(imported, 'connection')} imported`];
  if (updated > 0) parts.push(`${updated} brought up to date`);
  if (skipped.exists > 0) parts.push(`${skipped.exists} there already`);
  return `${parts.join(', ')}\n`;
}

function sayRefused(view: ImportView, count: number): string {
  const lines: string[] = [];
  if (count > 0) {
    const reasons = Object.entries(view.skipped).filter(([reason, lines]) => lines > 0 && reason !== 'exists');
    lines.push(`weir: ${count} refused: ${reasons.map(([reason, lines]) => `${reason} ${lines}`).join(', ')}.`);
    for (const { line, reason, message } of view.refused) lines.push(`  line ${line}: ${reason}: ${message}`);
    if (count > view.refused.length) lines.push('  ...');
  }
  if (!view.complete) lines.push('weir: the end of the export is missing: it was cut short. Export again.');
  return lines.join('\n');
}
