import { keyOfService, type Service, splitEndpoint } from './world.js';

/** The rate of each client: a bucket of tokens that is full after a second. */
export class Rates {
  readonly #buckets = new Map<string, { tokens: number; atMs: number }>();

  allows(service: Service, client: string, nowMs: number): boolean {
    return service.newConnectionsPerSecond === undefined || this.#tokens(service, client, nowMs) >= 1 - 1e-4;
  }

  count(service: Service, client: string, nowMs: number): void {
    this.#buckets.set(keyOf(service, client), { tokens: this.#tokens(service, client, nowMs) - 1, atMs: nowMs });
  }

  #tokens(service: Service, client: string, nowMs: number): number {
    const { newConnectionsPerSecond: perSecond = 0 } = service;
    const bucket = this.#buckets.get(keyOf(service, client));
    if (bucket === undefined) return perSecond;
    return Math.min(perSecond, bucket.tokens + ((nowMs - bucket.atMs) / 1000) * perSecond);
  }
}

function keyOf(service: Service, client: string): string {
  return `${keyOfService(service)} ${splitEndpoint(client)[0]}`;
}
