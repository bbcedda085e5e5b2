import { closeSync, constants, fstatSync, ftruncateSync, lstatSync, mkdirSync, openSync, readSync } from 'node:fs';
import { dirname } from 'node:path';
import { WeirError } from '../base/errors.js';
import { writeFault } from '../base/file-faults.js';
import {
  EAGAIN,
  ENOSPC,
  errnoName,
  lockFile,
  MAP_POPULATE,
  MAP_SHARED,
  mmap,
  reserveSpace,
  unlockFile,
  viewMemory,
} from './syscalls.js';

/**
 * A file whose pages are memory: what is stored there survives the process, however it ends, as long as the machine runs. One
 * process at a time may hold it. Its space is taken from the file system beforehand: a page that could not be had later
 * would end the process (SIGBUS).
 */
export class MappedFile {
  readonly fd: number;
  readonly path: string;

  /** Opens the file, or makes an empty one that only its owner may read. @throws WeirError STATE_FILE, NO_PERMISSION */
  constructor(path: string) {
    this.path = path;
    this.fd = openLocked(path);
  }

  get sizeBytes(): number {
    return fstatSync(this.fd).size;
  }

  /** Up to `lengthBytes` from the file's beginning. */
  readHead(lengthBytes: number): Uint8Array {
    const head = new Uint8Array(lengthBytes);
    return head.subarray(0, readSync(this.fd, head, 0, lengthBytes, 0));
  }

  /** Makes the file `lengthBytes` of zeros, whatever it was before. @throws WeirError STATE_FILE */
  reset(lengthBytes: number): void {
    ftruncateSync(this.fd, 0);
    this.reserve(lengthBytes);
  }

  /** Takes what space the file's `lengthBytes` do not have yet; files can have holes. @throws WeirError STATE_FILE */
  reserve(lengthBytes: number): void {
    const result = reserveSpace(this.fd, lengthBytes);
    if (result >= 0) return;
    throw result === -ENOSPC
      ? new WeirError(
          'STATE_FILE',
          `${this.path}: no space for ${Math.ceil(lengthBytes / 2 ** 20)} MiB`,
          'Make room, enlarge the tmpfs (mount -o remount,size=...), or lower conntrack.tcpEntries and anyEntries.',
        )
      : new WeirError(
          'STATE_FILE',
          `${this.path}: its space cannot be reserved: ${errnoName(result)}`,
          'Use a tmpfs, such as /run.',
        );
  }

  /** Gives the file up for others to open. Memory that is mapped stays mapped until the process ends. */
  close(): void {
    unlockFile(this.fd);
    closeSync(this.fd);
  }
}

/**
 * The first `lengthBytes` of an open file as memory, for this thread; each thread maps for itself. Pages are there from
 * the start. @throws WeirError STATE_FILE
 */
export function mapFile(fd: number, lengthBytes: number): ArrayBuffer {
  const address = mmap(lengthBytes, MAP_SHARED | MAP_POPULATE, fd);
  if (address < 0) {
    throw new WeirError(
      'STATE_FILE',
      `${lengthBytes} bytes cannot be mapped: ${errnoName(address)}`,
      'Is the address space limited (ulimit -v)? Or lower conntrack.tcpEntries and anyEntries.',
    );
  }
  return viewMemory(address, lengthBytes);
}

function openLocked(path: string): number {
  try {
    mkdirSync(dirname(path), { recursive: true });
    for (;;) {
      const fd = openSync(path, constants.O_RDWR | constants.O_CREAT | constants.O_NOFOLLOW, 0o600);
      if (!fstatSync(fd).isFile()) {
        closeSync(fd);
        throw new WeirError('STATE_FILE', `${path} is not an ordinary file`, 'Name another conntrack.stateFile.');
      }
      const locked = lockFile(fd);
      if (locked < 0) {
        closeSync(fd);
        const isTaken = locked === -EAGAIN;
        throw new WeirError(
          'STATE_FILE',
          isTaken ? `${path} is in use by another weir` : `${path} cannot be locked: ${errnoName(locked)}`,
          isTaken ? 'Stop that one, or give each its own conntrack.stateFile.' : 'Use a tmpfs, such as /run.',
        );
      }
      // Another weir may have put a new file in its place meanwhile.
      if (lstatSync(path, { throwIfNoEntry: false })?.ino === fstatSync(fd).ino) return fd;
      closeSync(fd);
    }
  } catch (error) {
    if (error instanceof WeirError) throw error;
    const { code } = error as NodeJS.ErrnoException;
    const { why } = writeFault(path, error);
    if (code === 'EACCES' || code === 'EPERM') {
      const remedy = 'Run weir as its owner, or name another conntrack.stateFile.';
      throw new WeirError('NO_PERMISSION', `${path} cannot be opened: ${why}`, remedy, error);
    }
    throw new WeirError('STATE_FILE', `${path} cannot be opened: ${why}`, 'Name another conntrack.stateFile.', error);
  }
}
