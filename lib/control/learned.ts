import type { Clock } from '../base/clock.js';
import { LEARNED_ENDPOINTS } from '../base/limits.js';
import { BACKEND, PROTOCOL, REPLY_PORTS } from '../conntrack/record.js';
import type { TableReader } from '../conntrack/table-reader.js';
import { formatEndpoint, formatIpv4, parseIpv4 } from '../wire/address.js';
import type { Desired } from './desired.js';
import type { EventLog } from './log.js';
import { networkNeeds, type ReturnEndpoint } from './network-plan.js';
import type { Reloader } from './reloader.js';
import { plural } from './summary.js';

/** Between two looks at which endpoints are in use, and how long one stays that is not. */
const SWEEP_MS = 60_000;
const IDLE_MS = 300_000;

export interface LearnedParts {
  readonly desired: Desired;
  readonly reloader: Pick<Reloader, 'refresh' | 'forget'>;
  readonly readers: { readonly tcp: TableReader; readonly any: TableReader };
  readonly clock: Clock;
  readonly log: EventLog;
}

/**
 * The endpoints of a node that no file names: the data path asks for them when a packet comes through the tunnel, and gets them with the next
 * snapshot, after the kernel has got its rules. At most LEARNED_ENDPOINTS; each goes when no flow has used it for IDLE_MS.
 *
 * What a killed weir had learned is taken over by the next: its rules are still there, and without them answers of flows that go on
 * would leave untranslated.
 */
export class LearnedEndpoints {
  #parts: LearnedParts | undefined;
  /** Asked for before the parts were there. */
  #early: [address: number, port: number, protocol: number][] = [];
  readonly #usedAtMs = new Map<ReturnEndpoint, number>();
  #timer: NodeJS.Timeout | undefined;
  #hasComplained = false;

  /** Goes to work: everything before was only noted down. */
  async begin(parts: LearnedParts): Promise<void> {
    this.#parts = parts;
    for (const endpoint of parts.desired.learned) this.#usedAtMs.set(endpoint, parts.clock.nowMs());
    this.#timer = setInterval(() => void this.sweep(), SWEEP_MS).unref();
    await parts.reloader.refresh();
    for (const endpoint of this.#early) this.learn(...endpoint);
    this.#early = [];
  }

  /** @param address a word */
  learn(address: number, port: number, protocol: number): void {
    if (this.#parts === undefined) {
      if (this.#early.length < LEARNED_ENDPOINTS) this.#early.push([address, port, protocol]);
      return;
    }
    const { desired, reloader, clock, log } = this.#parts;
    const endpoint = { address: formatIpv4(address), port, protocol };
    const known = [...networkNeeds(desired.config).endpoints, ...desired.learned];
    if (known.some((each) => isSame(each, endpoint))) return;
    const text = `${formatEndpoint(address, port)}, protocol ${protocol}`;
    if (desired.learned.length >= LEARNED_ENDPOINTS) {
      if (!this.#hasComplained) {
        log.warn('endpoint-refused', `${LEARNED_ENDPOINTS} endpoints were learned, ${text} and more are not`, endpoint);
      }
      this.#hasComplained = true;
      return;
    }
    desired.learned = [...desired.learned, endpoint];
    this.#usedAtMs.set(endpoint, clock.nowMs());
    log.info('endpoint-learned', `answers of ${text} are led in`, endpoint);
    reloader.refresh().catch((error: Error) => {
      desired.learned = desired.learned.filter((each) => each !== endpoint);
      this.#usedAtMs.delete(endpoint);
      log.error('step-failed', `could not lead in answers of ${text}: ${error.message}`, endpoint);
    });
  }

  /** Forgets what was not used for long. */
  async sweep(): Promise<void> {
    if (this.#parts === undefined) return;
    const { desired, reloader, clock, log } = this.#parts;
    const nowMs = clock.nowMs();
    for (const endpoint of this.#used()) this.#usedAtMs.set(endpoint, nowMs);
    const idle = desired.learned.filter((endpoint) => nowMs - this.#usedAtMs.get(endpoint)! >= IDLE_MS);
    if (idle.length === 0) return;
    try {
      await reloader.forget(idle, () => this.#used());
    } catch (error) {
      log.error('step-failed', `could not forget endpoints: ${(error as Error).message}`);
    }
    for (const endpoint of idle) {
      if (desired.learned.includes(endpoint)) this.#usedAtMs.set(endpoint, nowMs);
      else this.#usedAtMs.delete(endpoint);
    }
    const forgotten = idle.filter((endpoint) => !desired.learned.includes(endpoint)).length;
    if (forgotten === 0) return;
    this.#hasComplained = false;
    log.info('endpoints-forgotten', `${plural(forgotten, 'endpoint')} without connections forgotten`, { forgotten });
  }

  close(): void {
    clearInterval(this.#timer);
    this.#parts = undefined;
  }

  /** Those that live flows have. */
  #used(): ReturnEndpoint[] {
    const { desired, readers, clock } = this.#parts!;
    const wanted = new Map<number, ReturnEndpoint[]>();
    for (const endpoint of desired.learned) {
      const address = parseIpv4(endpoint.address) | 0;
      wanted.set(address, [...(wanted.get(address) ?? []), endpoint]);
    }
    const used = new Set<ReturnEndpoint>();
    for (const reader of [readers.tcp, readers.any]) {
      const { words, bytes } = reader;
      reader.forEachLive(clock.nowMs(), () => {
        for (const endpoint of wanted.get(words[BACKEND]!) ?? []) {
          const isIts = endpoint.port === words[REPLY_PORTS]! >>> 16 && endpoint.protocol === bytes[PROTOCOL];
          if (isIts) used.add(endpoint);
        }
      });
    }
    return [...used];
  }
}

function isSame(a: ReturnEndpoint, b: ReturnEndpoint): boolean {
  return a.address === b.address && a.port === b.port && a.protocol === b.protocol;
}
