import { readdirSync, readFileSync, writeFileSync } from 'node:fs';

/** Kernel settings of this network namespace: as the sysctl command knows them, through the files it uses. */

export interface Sysctl {
  /** From the root: `['net', 'ipv4', 'conf', 'eth0.5', 'rp_filter']`. A step may contain dots. */
  readonly path: readonly string[];
  readonly value: number;
  /** Nothing works without it; the others only make some traffic work. */
  readonly required: boolean;
  /** What goes wrong without it; null: nothing that anybody has to know. */
  readonly without: string | null;
}

/** `net.ipv4.ip_forward=1`; slashes instead of dots where a step has dots of its own, as sysctl(8) takes both. */
export function formatSysctl({ path, value }: Pick<Sysctl, 'path' | 'value'>): string {
  return `${path.join(path.some((step) => step.includes('.')) ? '/' : '.')}=${value}`;
}

/** The present value; null when this kernel has no such setting. */
export function readSysctl(path: readonly string[]): number | null {
  try {
    return Number(readFileSync(fileOf(path), 'utf8'));
  } catch {
    return null;
  }
}

/** @returns null, or the code of the error: EROFS in most containers */
export function writeSysctl(path: readonly string[], value: number): string | null {
  try {
    writeFileSync(fileOf(path), `${value}\n`);
    return null;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code ?? String(error);
  }
}

/** The interfaces that have IPv4 settings; besides them `all` and `default`. */
export function listConfigured(): string[] {
  try {
    return readdirSync(fileOf(['net', 'ipv4', 'conf']));
  } catch {
    return [];
  }
}

function fileOf(path: readonly string[]): string {
  return `/proc/sys/${path.join('/')}`;
}
