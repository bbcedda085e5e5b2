import { type FSWatcher, lstatSync, readlinkSync, watch } from 'node:fs';
import { stat } from 'node:fs/promises';
import { dirname, resolve } from 'node:path';

/**
 * Notices that a file, or one of several, may have changed, however it is done: written in place, replaced by a rename, reached through a symbolic
 * link that is swapped (as Kubernetes does with the folder above a mounted ConfigMap), deleted and made anew.
 *
 * Two ways lead to a look at it. The kernel tells of changes in every folder that the file, or a link on the way to it, stands in:
 * a watch on the file itself would stay with the old one. And once a second it is looked at anyway, since some file systems tell
 * nothing: those of a network, overlays, a single file mounted into a container.
 *
 *     event, or another stamp --> quiet for QUIET_MS, or MAX_DELAY_MS gone by --> look: another stamp? tell
 *
 * The stamp is what stat says: device, inode, size and times. Whether the contents are others, too, is for whoever is told to find
 * out. Waiting for quiet lets most writers finish; a file that is found half-written nevertheless is judged as it is, and once more
 * when the rest has come.
 */
export interface ConfigWatchOptions {
  /** The file; or what finds the files, which may come and go, and the folders they are found in. It may throw. */
  readonly path: string | (() => WatchedFiles);
  /** Called for each change, not again before the last call has ended. Must not throw. */
  readonly onChange: () => Promise<void>;
  /** False: only looks once a second. */
  readonly hearEvents?: boolean;
}

export interface WatchedFiles {
  readonly files: readonly string[];
  readonly folders: readonly string[];
}

export const QUIET_MS = 200;
export const MAX_DELAY_MS = 800;
export const POLL_MS = 1000;

/** What the kernel follows before it gives up (MAXSYMLINKS). */
const MAX_LINKS = 40;

export class ConfigWatch {
  readonly #find: () => WatchedFiles;
  readonly #onChange: () => Promise<void>;
  readonly #hearsEvents: boolean;
  readonly #poll: NodeJS.Timeout;
  /** By folder, with the folder's stamp when the watch began: one that was replaced is watched anew. */
  #watchers = new Map<string, { readonly watcher: FSWatcher; readonly stamp: string }>();
  #quiet: NodeJS.Timeout | undefined;
  /** When the first event of those waited for came. */
  #waitingSinceMs = 0;
  #stamp = '';
  #looking: Promise<void> = Promise.resolve();
  #isClosed = false;

  /** Begins with a look, so that nothing is missed since the file was last read. */
  constructor({ path, onChange, hearEvents = true }: ConfigWatchOptions) {
    const files = typeof path === 'string' ? [resolve(path)] : [];
    this.#find = typeof path === 'string' ? () => ({ files, folders: [] }) : path;
    this.#onChange = onChange;
    this.#hearsEvents = hearEvents;
    this.#poll = setInterval(() => void this.#lookForStamp(), POLL_MS);
    this.#follow();
    this.#noticed();
  }

  /** Lets a call under way end, and makes no more. */
  async close(): Promise<void> {
    this.#isClosed = true;
    clearInterval(this.#poll);
    clearTimeout(this.#quiet);
    for (const { watcher } of this.#watchers.values()) watcher.close();
    this.#watchers.clear();
    await this.#looking;
  }

  /** Something has happened: look when it is quiet. */
  #noticed(): void {
    if (this.#isClosed) return;
    const nowMs = performance.now();
    if (this.#quiet === undefined) this.#waitingSinceMs = nowMs;
    clearTimeout(this.#quiet);
    const waitMs = Math.max(0, Math.min(QUIET_MS, this.#waitingSinceMs + MAX_DELAY_MS - nowMs));
    this.#quiet = setTimeout(() => {
      this.#quiet = undefined;
      this.#looking = this.#looking.then(() => this.#look());
    }, waitMs);
  }

  async #look(): Promise<void> {
    if (this.#isClosed) return;
    const stamp = await this.#stampNow();
    this.#follow();
    if (stamp === this.#stamp) return;
    this.#stamp = stamp;
    if (stamp !== NO_FILE) await this.#onChange();
  }

  async #lookForStamp(): Promise<void> {
    if (this.#quiet === undefined && (await this.#stampNow()) !== this.#stamp) this.#noticed();
    else this.#follow();
  }

  /** Of one file its stamp, of several all of them with their names. */
  async #stampNow(): Promise<string> {
    try {
      const { files, folders } = this.#find();
      if (files.length === 1 && folders.length === 0) return await stampOf(files[0]!);
      return (await Promise.all(files.map(async (file) => `${file} ${await stampOf(file)}`))).join('\n');
    } catch (error) {
      return (error as NodeJS.ErrnoException).code ?? String(error);
    }
  }

  #foldersNow(): Set<string> {
    try {
      const { files, folders } = this.#find();
      return new Set([
        ...folders.map((folder) => resolve(folder)),
        ...files.flatMap((file) => [...foldersOf(resolve(file))]),
      ]);
    } catch {
      // Until it can be found again, the looks remain.
      return new Set();
    }
  }

  /** Watches the folders that matter now, and no others. */
  #follow(): void {
    if (this.#isClosed || !this.#hearsEvents) return;
    const before = this.#watchers;
    this.#watchers = new Map();
    for (const folder of this.#foldersNow()) {
      const stamp = folderStamp(folder);
      const known = before.get(folder);
      if (known !== undefined && known.stamp === stamp) {
        this.#watchers.set(folder, known);
        before.delete(folder);
      } else if (stamp !== undefined) this.#watch(folder, stamp);
    }
    for (const { watcher } of before.values()) watcher.close();
  }

  /** Without events (no such file system, too many watches) the looks remain. */
  #watch(folder: string, stamp: string): void {
    try {
      const watcher = watch(folder, { persistent: false }, () => this.#noticed());
      watcher.on('error', () => {
        watcher.close();
        if (this.#watchers.get(folder)?.watcher === watcher) this.#watchers.delete(folder);
      });
      this.#watchers.set(folder, { watcher, stamp });
    } catch {
      // See above.
    }
  }
}

/** Something that is no file, and whose reading might not end. */
const NO_FILE = 'no file';

async function stampOf(path: string): Promise<string> {
  try {
    const found = await stat(path, { bigint: true });
    if (!found.isFile()) return NO_FILE;
    const { dev, ino, size, mtimeNs, ctimeNs } = found;
    return [dev, ino, size, mtimeNs, ctimeNs].join();
  } catch (error) {
    return (error as NodeJS.ErrnoException).code ?? String(error);
  }
}

function folderStamp(folder: string): string | undefined {
  const found = lstatSync(folder, { throwIfNoEntry: false });
  return found?.isDirectory() ? `${found.dev},${found.ino}` : undefined;
}

/** The folders of the file and of every link on the way to it, links resolved; as far as the way can be followed. */
function foldersOf(path: string): Set<string> {
  const folders = new Set<string>();
  let links = 0;
  const follow = (absolute: string): string => {
    let reached = '/';
    for (const name of absolute.split('/').filter((part) => part !== '')) {
      const here = resolve(reached, name);
      const target = links < MAX_LINKS ? linkTarget(here) : undefined;
      if (target === undefined) reached = here;
      else {
        links++;
        folders.add(reached);
        reached = follow(resolve(reached, target));
      }
    }
    return reached;
  };
  folders.add(dirname(follow(path)));
  return folders;
}

function linkTarget(path: string): string | undefined {
  try {
    return readlinkSync(path);
  } catch {
    return undefined;
  }
}
