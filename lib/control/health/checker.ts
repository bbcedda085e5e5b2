import type { Clock } from '../../base/clock.js';
import type { Random } from '../../base/random.js';
import { formatEndpoint, formatIpv4 } from '../../wire/address.js';
import type { BackendIdentity } from '../identity.js';
import type { EventLog } from '../log.js';
import { plural } from '../summary.js';
import type { Finding } from './attempt.js';
import { CheckSchedule, type Report, type Target } from './check-schedule.js';
import type { Prober } from './probe.js';

/** Probes under way at once. More that are due wait, longest first. */
const MAX_PROBES = 1024;

/** The schedule is looked at no more often than this. */
const TICK_MS = 10;

export interface CheckerParts {
  /** Time of the checks' own: nothing else depends on it, and it on nothing else. */
  readonly clock: Clock;
  readonly random: Random;
  readonly prober: Pick<Prober, 'start' | 'close'>;
  readonly log: EventLog;
  /** A backend is up or down that was not before. */
  readonly onChange: () => void;
}

/** A backend's health, for people. */
export interface BackendHealth {
  readonly isUp: boolean;
  readonly forMs: number;
  readonly reason: string;
  readonly last: string;
}

/** The active health checks: makes the probes that are due, and tells of what changes. */
export class HealthChecker {
  readonly #parts: CheckerParts;
  readonly #schedule: CheckSchedule;
  /** Ends the probes under way. */
  readonly #cancels = new Set<() => void>();
  /** What was said of probes that cannot be made: once is enough. */
  readonly #said = new Set<string>();
  #timer: NodeJS.Timeout | undefined;
  #timerMs = Number.POSITIVE_INFINITY;
  #isClosed = false;

  constructor(parts: CheckerParts) {
    this.#parts = parts;
    this.#schedule = new CheckSchedule(parts.random);
  }

  /** Checks these from now on, and no others. */
  configure(targets: readonly Target[]): void {
    this.#schedule.configure(targets, this.#parts.clock.nowMs());
    this.#wakeAt(this.#schedule.nextDueMs());
  }

  /** False for a backend that was found to be down. */
  isUp(backend: BackendIdentity): boolean {
    return this.#schedule.standing(backend)?.isUp ?? true;
  }

  /** Undefined for a backend that is not checked. */
  healthOf(backend: BackendIdentity): BackendHealth | undefined {
    const standing = this.#schedule.standing(backend);
    if (standing === undefined) return undefined;
    const { isUp, sinceMs, reason, last } = standing;
    return { isUp, forMs: this.#parts.clock.nowMs() - sinceMs, reason, last };
  }

  /** Ends all probes; nothing is told from then on. */
  close(): void {
    this.#isClosed = true;
    clearTimeout(this.#timer);
    for (const cancel of this.#cancels) cancel();
    this.#cancels.clear();
    this.#parts.prober.close();
  }

  #wakeAt(dueMs: number): void {
    if (this.#isClosed || dueMs >= this.#timerMs) return;
    clearTimeout(this.#timer);
    this.#timerMs = dueMs;
    const waitMs = Math.max(TICK_MS, dueMs - this.#parts.clock.nowMs());
    this.#timer = setTimeout(() => this.#tick(), waitMs);
  }

  #tick(): void {
    this.#timerMs = Number.POSITIVE_INFINITY;
    const due = this.#schedule.takeDue(this.#parts.clock.nowMs(), MAX_PROBES - this.#cancels.size);
    for (const target of due) this.#probe(target);
    // With as many under way as may be, the end of one wakes.
    if (this.#cancels.size < MAX_PROBES) this.#wakeAt(this.#schedule.nextDueMs());
  }

  #probe(target: Target): void {
    const { prober, clock } = this.#parts;
    const { check, backend } = target;
    const request = { check, address: formatIpv4(backend.address), port: backend.port };
    const cancel = prober.start(request, (finding) => {
      const wasFull = this.#cancels.size >= MAX_PROBES;
      this.#cancels.delete(cancel);
      const report = this.#schedule.report(target, finding, clock.nowMs());
      if (report !== undefined) this.#tell(target, finding, report);
      this.#wakeAt(wasFull ? clock.nowMs() : (report?.dueMs ?? Number.POSITIVE_INFINITY));
    });
    this.#cancels.add(cancel);
  }

  #tell({ service, backend, check }: Target, { outcome, text }: Finding, { change }: Report): void {
    const { log, onChange } = this.#parts;
    const name = `${service.name}/${backend.name}`;
    if (outcome === 'unknown' && !this.#said.has(text)) {
      this.#said.add(text);
      const state = this.isUp(backend) ? 'up' : 'down';
      log.warn('health-unknown', `${name} cannot be probed and stays ${state}: ${text}`, {
        service: service.name,
        backend: backend.name,
        reason: text,
      });
    }
    if (change === undefined) return;
    const fields = {
      service: service.name,
      backend: backend.name,
      address: formatEndpoint(backend.address, backend.port),
      state: change ? 'up' : 'down',
      reason: text,
    };
    if (change) log.info('health-changed', `${name} is up after ${plural(check.rise, 'good probe')}: ${text}`, fields);
    else log.warn('health-changed', `${name} is down after ${plural(check.fall, 'failed probe')}: ${text}`, fields);
    onChange();
  }
}
