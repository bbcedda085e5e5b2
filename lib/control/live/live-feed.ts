import type { Clock } from '../../base/clock.js';
import { WeirError } from '../../base/errors.js';
import type { BackendView, ConntrackView, ServiceView, StatusView } from '../view.js';
import type { LiveView, LiveWatch } from './live-view.js';
import { addRates, type Counted, deviceRates, ratesOf, reasonRates } from './rates.js';
import type { Survey } from './survey.js';

/** Between two views. */
const TICK_MS = 1000;

/**
 * Between two surveys: at least so long, and so many times the work that one was. A hundred thousand connections are some 15 ms of work: 0.3 %
 * of a processor; ten million would be surveyed less often, and cost no more.
 */
const SURVEY_MS = 5000;
const SURVEY_FACTOR = 250;

/** At the same time. */
export const LIVE_WATCHES = 32;

/** Views that a watch may let pass before it is given up. */
export const MISSED_VIEWS = 20;

/** All counters at one moment, and of the connections what the last survey found. */
export interface Sample {
  readonly status: StatusView;
  readonly services: readonly SampledService[];
  readonly omittedServices: number;
  readonly conntrack: ConntrackView;
}

export interface SampledService {
  readonly view: ServiceView;
  /** Of each of its backends. */
  readonly shares: readonly number[];
}

export interface LiveFeedParts {
  readonly clock: Clock;
  sample(survey: Survey): Sample;
  /** A walk over all connections, with rests. @param worked hears of each stretch of work, in ms */
  survey(worked: (ms: number) => void): Promise<Survey>;
  /** Runs something later, and returns how to call that off. */
  later(run: () => void, ms: number): () => void;
  /** The time of day, in ISO 8601. */
  timeOfDay(): string;
}

/**
 * One producer of views for all who watch: counters are read and compared once a second, connections are surveyed every few seconds, and a
 * view is made and written once, whoever takes it. While nobody watches nothing is done.
 *
 * A watch is given the newest view when it comes for one; those that it has let pass are not kept. One that lets MISSED_VIEWS pass
 * in a row is given up.
 */
export class LiveFeed {
  readonly #parts: LiveFeedParts;
  readonly #watchers = new Set<LiveWatcher>();
  #survey: { readonly found: Survey; readonly atMs: number; readonly tookMs: number } | undefined;
  #isSurveying = false;
  #callOff: (() => void) | undefined;
  #before:
    | { readonly atMs: number; readonly sample: Sample; readonly counted: ReadonlyMap<string, Counted> }
    | undefined;
  #last: string | undefined;

  constructor(parts: LiveFeedParts) {
    this.#parts = parts;
  }

  /** @throws WeirError NOT_SUPPORTED when LIVE_WATCHES watch already */
  watch(): LiveWatch {
    if (this.#watchers.size >= LIVE_WATCHES) {
      throw new WeirError('NOT_SUPPORTED', `${LIVE_WATCHES} are watching already`, 'Close one of them.');
    }
    const watcher = new LiveWatcher();
    return {
      next: () => {
        if (!watcher.isOver) this.#join(watcher);
        return watcher.next();
      },
      close: () => this.#leave(watcher),
    };
  }

  #join(watcher: LiveWatcher): void {
    if (this.#watchers.has(watcher)) return;
    if (this.#watchers.size >= LIVE_WATCHES) {
      watcher.end();
      return;
    }
    this.#watchers.add(watcher);
    if (this.#last !== undefined) watcher.give(this.#last);
    else if (this.#watchers.size === 1) this.#begin();
  }

  #leave(watcher: LiveWatcher): void {
    watcher.end();
    this.#watchers.delete(watcher);
    if (this.#watchers.size > 0) return;
    this.#callOff?.();
    this.#callOff = undefined;
    this.#before = undefined;
    this.#last = undefined;
  }

  /** The first view waits for a survey that is due. */
  #begin(): void {
    this.#surveyIfDue();
    if (!this.#isSurveying) this.#tick();
  }

  #tick(): void {
    const { clock, later } = this.#parts;
    const beganMs = clock.nowMs();
    this.#callOff = later(() => this.#tick(), TICK_MS);
    this.#surveyIfDue();
    this.#last = JSON.stringify(this.#view(beganMs));
    for (const watcher of this.#watchers) {
      watcher.give(this.#last);
      if (watcher.isOver) this.#leave(watcher);
    }
  }

  #surveyIfDue(): void {
    const { clock, survey } = this.#parts;
    const { atMs = Number.NEGATIVE_INFINITY, tookMs = 0 } = this.#survey ?? {};
    if (this.#isSurveying || clock.nowMs() - atMs < Math.max(SURVEY_MS, SURVEY_FACTOR * tookMs)) return;
    this.#isSurveying = true;
    let workMs = 0;
    const take = async (): Promise<void> => {
      try {
        const found = await survey((ms) => {
          workMs += ms;
        });
        this.#survey = { found, atMs: clock.nowMs(), tookMs: workMs };
      } finally {
        this.#isSurveying = false;
      }
      if (this.#callOff === undefined && this.#watchers.size > 0) this.#tick();
    };
    void take();
  }

  #view(nowMs: number): LiveView {
    const { found, atMs, tookMs } = this.#survey!;
    const sample = this.#parts.sample(found);
    const seconds = this.#before === undefined ? 0 : (nowMs - this.#before.atMs) / 1000;
    const before = this.#before?.sample.status.traffic;
    const counted = new Map<string, Counted>();
    const services = sample.services.map(({ view, shares }) => {
      const backends = view.backends.map((backend, i) => {
        const key = identityOf(view, backend);
        counted.set(key, backend);
        return { ...backend, share: shares[i]!, rates: ratesOf(this.#before?.counted.get(key), backend, seconds) };
      });
      return { ...view, rates: addRates(backends.map(({ rates }) => rates)), backends };
    });
    this.#before = { atMs: nowMs, sample, counted };
    const { status, conntrack, omittedServices } = sample;
    return {
      at: this.#parts.timeOfDay(),
      intervalSeconds: Math.round(seconds * 1000) / 1000,
      status,
      rates: deviceRates(before, status.traffic, seconds, services),
      services,
      omittedServices,
      conntrack,
      reasons: reasonRates(before, status.traffic, seconds),
      count: { secondsAgo: Math.round(nowMs - atMs) / 1000, tookSeconds: Math.round(tookMs * 1000) / 1e6 },
      clients: found.clients,
    };
  }
}

function identityOf({ address, port, protocol }: ServiceView, backend: BackendView): string {
  return `${address}:${port}/${protocol} ${backend.address}:${backend.port}`;
}

/** One watch: the newest view that it has not taken, or that it waits for one. */
class LiveWatcher {
  isOver = false;
  #newest: string | undefined;
  #missed = 0;
  #take: ((view: string | null) => void) | undefined;

  next(): Promise<string | null> {
    return new Promise((resolve) => {
      this.#take = resolve;
      this.#hand();
    });
  }

  give(view: string): void {
    if (this.#newest !== undefined && ++this.#missed >= MISSED_VIEWS) this.isOver = true;
    this.#newest = view;
    this.#hand();
  }

  end(): void {
    this.isOver = true;
    this.#hand();
  }

  #hand(): void {
    if (this.#take === undefined || (this.#newest === undefined && !this.isOver)) return;
    this.#take(this.isOver ? null : this.#newest!);
    this.#take = undefined;
    this.#newest = undefined;
    this.#missed = 0;
  }
}
