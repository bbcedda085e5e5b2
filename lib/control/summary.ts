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
