import type { Random } from '../../base/random.js';
import type { HealthConfig } from '../../config/config.js';
import type { BackendIdentity, ServiceIdentity } from '../identity.js';
import type { Finding } from './attempt.js';

/**
 * When each backend is probed, and what the findings make of it. Pure: time and randomness are arguments.
 *
 *              success                  failure                            unknown
 *     up       the row ends             fall in a row: down                nothing changes
 *     down     rise in a row: up        the row ends                       nothing changes
 *
 * A backend begins up, so that a start or a new check takes nothing out of service that was not seen to fail. `unknown` is a probe
 * that could not be made: it says something about the gateway and nothing about the backend.
 *
 * A backend has one probe under way at most. The first comes at a random moment within one interval, each further one an interval
 * after the start of the last, less up to JITTER of it, so that neither backends nor gateways fall into step; or when the last is
 * over, if that took longer. Backends are told apart by identity, so that reloads change nothing for those that stay; a check that
 * changes keeps the state and begins its row anew.
 */

/** A backend that is to be checked. */
export interface Target {
  readonly service: ServiceIdentity;
  readonly backend: BackendIdentity;
  readonly check: HealthConfig;
}

/** What is known of a backend's health; points in time are of the schedule's clock. */
export interface Standing {
  readonly isUp: boolean;
  readonly sinceMs: number;
  /** Why it is so: the finding that made it so, or the first one. */
  readonly reason: string;
  /** What the last probe found. */
  readonly last: string;
}

/** What came of a finding. */
export interface Report {
  /** The target is up now (true), down (false), or what it was (undefined). */
  readonly change: boolean | undefined;
  /** When it is to be probed next. */
  readonly dueMs: number;
}

const JITTER = 0.1;
const NOTHING_YET = 'not probed yet';

interface Entry {
  readonly target: Target;
  /** Equal for checks that are the same. */
  readonly key: string;
  isUp: boolean;
  sinceMs: number;
  reason: string;
  last: string;
  /** Findings in a row that speak against the state. */
  row: number;
  dueMs: number;
  startedMs: number;
  isUnderWay: boolean;
}

export class CheckSchedule {
  readonly #random: Random;
  #entries = new Map<BackendIdentity, Entry>();

  constructor(random: Random) {
    this.#random = random;
  }

  /** Checks these from now on, and no others. */
  configure(targets: readonly Target[], nowMs: number): void {
    const before = this.#entries;
    this.#entries = new Map();
    for (const target of targets) {
      const known = before.get(target.backend);
      const key = JSON.stringify(target.check);
      this.#entries.set(target.backend, known?.key === key ? known : this.#entry(target, key, known, nowMs));
    }
  }

  /** The targets whose time has come, those that have waited longest first; each is under way until `report`. */
  takeDue(nowMs: number, limit: number): Target[] {
    const due: Entry[] = [];
    for (const entry of this.#entries.values()) if (!entry.isUnderWay && entry.dueMs <= nowMs) due.push(entry);
    due.sort((a, b) => a.dueMs - b.dueMs).splice(limit);
    for (const entry of due) {
      entry.isUnderWay = true;
      entry.startedMs = nowMs;
    }
    return due.map(({ target }) => target);
  }

  /** When the next probe is due; Infinity: none waits. */
  nextDueMs(): number {
    let nextMs = Number.POSITIVE_INFINITY;
    for (const { isUnderWay, dueMs } of this.#entries.values()) if (!isUnderWay && dueMs < nextMs) nextMs = dueMs;
    return nextMs;
  }

  /** Takes in what a probe found; undefined when nobody waits for it any more. */
  report(target: Target, { outcome, text }: Finding, nowMs: number): Report | undefined {
    const entry = this.#entries.get(target.backend);
    if (entry?.target !== target) return undefined;
    const { rise, fall, intervalMs } = target.check;
    entry.isUnderWay = false;
    entry.dueMs = Math.max(nowMs, entry.startedMs + intervalMs * (1 - JITTER * this.#share()));
    entry.last = text;
    if (outcome === 'unknown') return { change: undefined, dueMs: entry.dueMs };

    if (entry.reason === NOTHING_YET) entry.reason = text;
    const isAgainst = (outcome === 'success') !== entry.isUp;
    entry.row = isAgainst ? entry.row + 1 : 0;
    if (entry.row < (entry.isUp ? fall : rise)) return { change: undefined, dueMs: entry.dueMs };
    entry.isUp = !entry.isUp;
    entry.sinceMs = nowMs;
    entry.reason = text;
    entry.row = 0;
    return { change: entry.isUp, dueMs: entry.dueMs };
  }

  /** Of a backend that is checked; undefined of any other. */
  standing(backend: BackendIdentity): Standing | undefined {
    return this.#entries.get(backend);
  }

  #entry(target: Target, key: string, known: Entry | undefined, nowMs: number): Entry {
    const { isUp, sinceMs, reason, last } = known ?? {
      isUp: true,
      sinceMs: nowMs,
      reason: NOTHING_YET,
      last: NOTHING_YET,
    };
    const dueMs = nowMs + target.check.intervalMs * this.#share();
    return { target, key, isUp, sinceMs, reason, last, row: 0, dueMs, startedMs: nowMs, isUnderWay: false };
  }

  /** Uniform in [0, 1). */
  #share(): number {
    return this.#random() / 0x100000000;
  }
}
