import { closeSync, openSync, readSync, writeSync } from 'node:fs';
import { WeirError } from '../base/errors.js';
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
      throw new WeirError('CAPTURE_INVALID', `cannot read ${path}: ${(error as Error).message}`, '', error);
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
      throw new WeirError('CAPTURE_INVALID', `cannot read ${path}: ${(error as Error).message}`, '', error);
    }
  }
}

/** A file that is written from start to end. */
export class OutputFile {
  readonly #path: string;
  readonly #fd: number;

  /** Creates or truncates it. @throws WeirError USAGE when it cannot be written. */
  constructor(path: string) {
    this.#path = path;
    try {
      this.#fd = openSync(path, 'w');
    } catch (error) {
      throw this.#failure(error);
    }
  }

  /** Writes all of it. @throws WeirError USAGE, when the disk is full for example. */
  write(bytes: Uint8Array): void {
    try {
      for (let at = 0; at < bytes.length; ) at += writeSync(this.#fd, bytes, at);
    } catch (error) {
      throw this.#failure(error);
    }
  }

  close(): void {
    closeSync(this.#fd);
  }

  #failure(error: unknown): WeirError {
    return new WeirError('USAGE', `cannot write ${this.#path}: ${(error as Error).message}`, '', error);
  }
}
