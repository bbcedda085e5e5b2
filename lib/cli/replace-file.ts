import {
  closeSync,
  fchmodSync,
  fsyncSync,
  openSync,
  readFileSync,
  realpathSync,
  renameSync,
  rmSync,
  statSync,
  writeSync,
} from 'node:fs';
import { basename, dirname, join } from 'node:path';
import { WeirError } from '../base/errors.js';
import { writeFault } from '../base/file-faults.js';

const NEW_MODE = 0o644;

/**
 * Gives a file a new content in one step: who reads it finds the old or the new one, whole, also after a crash. A link stays one, the mode
 * of a file that is there too.
 *
 * @returns false when it had this content already, and nothing was done
 * @throws WeirError OUTPUT_FAILED
 */
export function replaceFile(path: string, text: string): boolean {
  try {
    const target = realPath(path);
    const before = statSync(target, { throwIfNoEntry: false });
    if (before !== undefined && readFileSync(target, 'utf8') === text) return false;
    const draft = join(dirname(target), `.${basename(target)}.${process.pid}`);
    try {
      write(draft, text, before === undefined ? NEW_MODE : before.mode & 0o777);
      renameSync(draft, target);
    } catch (error) {
      rmSync(draft, { force: true });
      throw error;
    }
    return true;
  } catch (error) {
    const { why, remedy } = writeFault(path, error);
    throw new WeirError('OUTPUT_FAILED', `cannot write ${path}: ${why}`, remedy, error);
  }
}

function realPath(path: string): string {
  try {
    return realpathSync(path);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return path;
    throw error;
  }
}

function write(path: string, text: string, mode: number): void {
  const file = openSync(path, 'w', mode);
  try {
    fchmodSync(file, mode);
    const bytes = Buffer.from(text);
    for (let at = 0; at < bytes.length; ) at += writeSync(file, bytes, at);
    fsyncSync(file);
  } finally {
    closeSync(file);
  }
}
