import type { Config } from '../config/config.js';

export interface Counts {
  readonly services: number;
  readonly backends: number;
}

export function countParts({ services }: Config): Counts {
  return { services: services.length, backends: services.reduce((sum, { backends }) => sum + backends.length, 0) };
}

/** `3 services, 1 backend` */
export function sayCounts({ services, backends }: Counts): string {
  return `${plural(services, 'service')}, ${plural(backends, 'backend')}`;
}

export function plural(count: number, noun: string, nouns = `${noun}s`): string {
  return `${count} ${count === 1 ? noun : nouns}`;
}

/** Of an import's lines: those whose connection is not there afterwards. */
export function countRefused(skipped: Readonly<Record<string, number>> & { readonly exists: number }): number {
  return Object.values(skipped).reduce((sum, count) => sum + count, 0) - skipped.exists;
}

/** A time as people take it in: `2h13m`, `13m20s`, `20s`, below ten seconds `9.5s`. Rounded up, but to minutes down. */
export function sayTime(ms: number): string {
  const tenths = Math.ceil(ms / 100);
  if (tenths < 100) return `${tenths / 10}s`;
  const seconds = Math.ceil(ms / 1000);
  if (seconds < 60) return `${seconds}s`;
  const [big, small, units] = seconds < 3600 ? [60, 1, 'ms'] : [3600, 60, 'hm'];
  const rest = Math.floor((seconds % big) / small);
  return `${Math.floor(seconds / big)}${units[0]}${rest === 0 ? '' : `${rest}${units[1]}`}`;
}

/** `b1 10.2.0.11:8080`; once, where the address is the name. */
export function nameAndAddress(name: string, endpoint: string): string {
  return name === endpoint ? name : `${name} ${endpoint}`;
}
