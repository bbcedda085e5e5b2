import { closeSync, ftruncateSync, openSync, readSync, writeSync } from 'node:fs';
import { WeirError } from '../base/errors.js';
import { readFault, writeFault } from '../base/file-faults.js';
import type { CaptureReader } from '../wire/capture.js';
import { openCapture } from '../wire/pcap.js';

/** A capture on disk, read in one pass: a pipe will do. */
export class CaptureFile {
  readonly reader: CaptureReader;
  /** Bytes read so far. */
  bytesRead = 0;
  readonly #fd: number;

  /** @throws WeirError CAPTURE_INVALID when the file cannot be read or is no capture. */
  constructor(path: string) {
    try {
      this.#fd = openSync(path, 'r');
    } catch (error) {
      throw unreadable(path, error);
    }
    try {
      this.reader = openCapture((into) => this.#read(into, path), path);
    } catch (error) {
      closeSync(this.#fd);
      throw error;
    }
  }

  close(): void {
    closeSync(this.#fd);
  }

  #read(into: Uint8Array, path: string): number {
    try {
      const count = readSync(this.#fd, into);
      this.bytesRead += count;
      return count;
    } catch (error) {
      throw unreadable(path, error);
    }
  }
}

function unreadable(path: string, error: unknown): WeirError {
  const { why, remedy } = readFault(path, error, 'Name a pcap or pcapng file.');
  return new WeirError('CAPTURE_INVALID', `cannot read ${path}: ${why}`, remedy, error);
}

/** A file that is written from start to end: of each piece all of it, or nothing. */
export class OutputFile {
  readonly #path: string;
  readonly #fd: number;
  #bytes = 0;

  /** Creates or truncates it. @throws WeirError OUTPUT_FAILED. */
  constructor(path: string, mode = 0o666) {
    this.#path = path;
    try {
      this.#fd = openSync(path, 'w', mode);
    } catch (error) {
      throw this.#failure(error);
    }
  }

  /** Writes all of it. @throws WeirError OUTPUT_FAILED, when the disk is full for example. */
  write(bytes: Uint8Array): void {
    try {
      for (let at = 0; at < bytes.length; ) at += writeSync(this.#fd, bytes, at);
    } catch (error) {
      this.#cutBack();
      throw this.#failure(error);
    }
    this.#bytes += bytes.length;
  }

  close(): void {
    closeSync(this.#fd);
  }

  /** Takes away what was written of the last piece; from a pipe nothing can be. */
  #cutBack(): void {
    try {
      ftruncateSync(this.#fd, this.#bytes);
    } catch {
      // See above.
    }
  }

  #failure(error: unknown): WeirError {
    const { why, remedy } = writeFault(this.#path, error);
    return new WeirError('OUTPUT_FAILED', `cannot write ${this.#path}: ${why}`, remedy, error);
  }
}
