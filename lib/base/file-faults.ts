import { dirname } from 'node:path';

/** Why a file could not be read or written, in words, and what to do about it. */
export interface FileFault {
  readonly why: string;
  readonly remedy: string;
}

/**
 * @param error as node:fs throws it
 * @param other what to do where the fault itself does not say
 */
export function readFault(path: string, error: unknown, other: string): FileFault {
  switch (codeOf(error)) {
    case 'ENOENT':
      return { why: 'it does not exist', remedy: other };
    case 'EACCES':
    case 'EPERM':
      return {
        why: 'permission denied',
        remedy: `Run this as a user who may read it: \`namei -l ${path}\` shows who may.`,
      };
    case 'EISDIR':
      return { why: 'it is a directory', remedy: other };
    case 'ENOTDIR':
      return { why: 'a part of its path is no directory', remedy: other };
    case 'EMFILE':
    case 'ENFILE':
      return { why: 'too many files are open', remedy: 'Raise the limit of open files (ulimit -n).' };
    default:
      return { why: textOf(error), remedy: other };
  }
}

/** The same of a file that is to be written. */
export function writeFault(path: string, error: unknown): FileFault {
  switch (codeOf(error)) {
    case 'ENOENT':
      return { why: 'its folder does not exist', remedy: `Make it (mkdir -p ${dirname(path)}), or name another file.` };
    case 'EACCES':
    case 'EPERM':
      return { why: 'permission denied', remedy: 'Run this as a user who may write there, or name another file.' };
    case 'EISDIR':
      return { why: 'it is a directory', remedy: 'Name a file in it.' };
    case 'ENOTDIR':
      return { why: 'a part of its path is no directory', remedy: 'Name another file.' };
    case 'EEXIST':
      return { why: 'something else has this name', remedy: 'Name another one.' };
    case 'EROFS':
      return { why: 'its file system is read-only', remedy: 'Name a file elsewhere.' };
    case 'ENOSPC':
    case 'EDQUOT':
      return { why: 'no space is left', remedy: 'Make room, or name a file elsewhere.' };
    case 'EBUSY':
      return {
        why: 'it is a mount of its own, and cannot be replaced',
        remedy: 'Mount its folder instead, or name another file.',
      };
    case 'ETXTBSY':
      return { why: 'it is a program that runs', remedy: 'Name another file.' };
    case 'EMFILE':
    case 'ENFILE':
      return { why: 'too many files are open', remedy: 'Raise the limit of open files (ulimit -n).' };
    default:
      return { why: textOf(error), remedy: 'Name another file.' };
  }
}

function codeOf(error: unknown): string | undefined {
  return (error as NodeJS.ErrnoException).code;
}

function textOf(error: unknown): string {
  return codeOf(error) ?? (error as Error).message;
}
