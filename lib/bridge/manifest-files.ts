import { readdirSync, readFileSync, statSync } from 'node:fs';
import { extname, join } from 'node:path';
import { WeirError } from '../base/errors.js';
import { readFault } from '../base/file-faults.js';
import { compareText } from './draft.js';
import type { Manifest } from './kubernetes-objects.js';

/** Of files in a folder; those that are named are read whatever they are called. */
const EXTENSIONS: readonly string[] = ['.yaml', '.yml', '.json'];

/** As deep as folders may be; links in a circle end here. */
const MAX_DEPTH = 16;

export const STANDARD_INPUT = '-';

export interface Found {
  readonly files: readonly string[];
  /** In which files may come. */
  readonly folders: readonly string[];
}

/**
 * The files that paths stand for: themselves, or the manifests in and under them, sorted. Hidden ones are passed over: in a mounted
 * ConfigMap these are the same once more.
 *
 * @throws WeirError IMPORT_INVALID where a path leads nowhere
 */
export function findManifests(paths: readonly string[]): Found {
  const files = new Set<string>();
  const folders = new Set<string>();
  const visit = (folder: string, depth: number): void => {
    folders.add(folder);
    for (const name of readdirSync(folder).sort(compareText)) {
      if (name.startsWith('.')) continue;
      const path = join(folder, name);
      // What goes away meanwhile, or is a link to nothing, is not there.
      const found = statSync(path, { throwIfNoEntry: false });
      if (found?.isDirectory() && depth < MAX_DEPTH) visit(path, depth + 1);
      else if (found?.isFile() && EXTENSIONS.includes(extname(name))) files.add(path);
    }
  };
  for (const path of paths) {
    try {
      if (path !== STANDARD_INPUT && statSync(path).isDirectory()) visit(path, 0);
      else files.add(path);
    } catch (error) {
      throw unreadable(path, error);
    }
  }
  return { files: [...files], folders: [...folders] };
}

/** @throws WeirError IMPORT_INVALID */
export function readInput(path: string): string {
  try {
    return readFileSync(path === STANDARD_INPUT ? 0 : path, 'utf8');
  } catch (error) {
    throw unreadable(path, error);
  }
}

/** @throws WeirError IMPORT_INVALID */
export function readManifests(paths: readonly string[]): Manifest[] {
  return findManifests(paths).files.map((path) => ({
    file: path === STANDARD_INPUT ? '(standard input)' : path,
    text: readInput(path),
  }));
}

function unreadable(path: string, error: unknown): WeirError {
  const { why, remedy } = readFault(path, error, 'Name what is to be imported, or - for standard input.');
  return new WeirError('IMPORT_INVALID', `weir: cannot read ${path}: ${why}. ${remedy}`, '', error);
}
