import { readFileSync, renameSync, statfsSync } from 'node:fs';
import { restoreTable } from '../conntrack/restore.js';
import {
  bootIdWords,
  formatImage,
  IMAGE_HEADER_BYTES,
  type ImageSizes,
  imageBytes,
  imageMistake,
  tablesOf,
} from '../conntrack/state-image.js';
import type { MappedTables, Tables } from '../datapath/tables.js';
import { MappedFile, mapFile } from '../io/mapped-file.js';
import type { EventLog } from './log.js';
import { plural } from './summary.js';

const TMPFS_MAGIC = 0x01021994;

/** The tables of a `conntrack.stateFile`, whole and ready for the data path. */
export interface StateFile {
  /** For the data path's thread to map them itself. */
  readonly mapped: MappedTables;
  /** For this thread. */
  readonly tables: Tables;
  /** The tables are those of an earlier run: nothing is lost that needs to be picked up. */
  readonly isResumed: boolean;
  close(): void;
}

/**
 * Opens the file, or makes it; takes up the connections in it, or says why it cannot and begins with none. A file that is none
 * of weir's is set aside under the name PATH.refused.
 *
 * @param nowMs the data path's clock
 * @throws WeirError STATE_FILE, NO_PERMISSION
 */
export function openStateFile(path: string, sizes: ImageSizes, nowMs: number, log: EventLog): StateFile {
  const bootId = bootIdWords(readFileSync('/proc/sys/kernel/random/boot_id', 'utf8'));
  let file = new MappedFile(path);
  try {
    const wanted = imageBytes(sizes);
    const size = file.sizeBytes;
    const mistake = size === 0 ? undefined : imageMistake(file.readHead(IMAGE_HEADER_BYTES), size, sizes, bootId);
    const isResumed = size > 0 && mistake === undefined;
    if (mistake !== undefined) {
      const aside = mistake.isForeign ? `${path}.refused` : undefined;
      log.warn(
        'state-file-refused',
        `${path} ${mistake.text}: ${aside === undefined ? 'replaced' : `kept as ${aside}`}, starting with an empty table`,
        { path, ...(aside === undefined ? {} : { aside }) },
      );
      if (aside !== undefined) {
        renameSync(path, aside);
        file.close();
        file = new MappedFile(path);
      }
    }
    if (isResumed) file.reserve(wanted);
    else file.reset(wanted);
    const buffer = mapFile(file.fd, wanted);
    if (!isResumed) formatImage(buffer, sizes, bootId);
    if (statfsSync(path).type !== TMPFS_MAGIC) {
      log.warn('state-file-on-disk', `${path} is not on a tmpfs: writing it to disk can hold packets up`, { path });
    }
    const tables = tablesOf(buffer, sizes);
    if (isResumed) resume(path, tables, nowMs, log);
    else if (mistake === undefined) log.info('state-file', `${path} made`, { path });
    return { mapped: { fd: file.fd, ...sizes }, tables, isResumed, close: () => file.close() };
  } catch (error) {
    file.close();
    throw error;
  }
}

function resume(path: string, tables: Tables, nowMs: number, log: EventLog): void {
  const beganMs = performance.now();
  const [tcp, any] = [restoreTable(tables.tcp, true, nowMs), restoreTable(tables.any, false, nowMs)];
  const kept = tcp.kept + any.kept;
  const expired = tcp.expired + any.expired;
  const damaged = tcp.damaged + any.damaged;
  const tookMs = Math.round(performance.now() - beganMs);
  log.info('state-file', `${path}: ${plural(kept, 'connection', 'connections')} go on`, {
    path,
    kept,
    expired,
    damaged,
    tookMs,
  });
  if (damaged > 0) {
    log.warn('state-file-damaged', `${path}: ${plural(damaged, 'record', 'records')} made no sense and were left out`, {
      path,
      damaged,
    });
  }
}
