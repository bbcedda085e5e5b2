import { createHash } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import type { Clock } from '../base/clock.js';
import { WeirError } from '../base/errors.js';
import type { Config } from '../config/config.js';
import { formatProblem, type Problem, parseConfig, readConfigFile } from '../config/load.js';
import type { YamlPieces } from '../config/yaml-pieces.js';
import type { TableReader } from '../conntrack/table-reader.js';
import type { DataPath } from '../datapath/data-path.js';
import { STAT_RX_PACKETS } from '../datapath/stats.js';
import { censusInSteps } from './census.js';
import type { Desired, Proposal } from './desired.js';
import { findBackend, type NamedMember } from './find-backend.js';
import type { BackendIdentity } from './identity.js';
import type { EventLog } from './log.js';
import type { NetworkReport, NetworkSetup } from './network.js';
import type { ReturnEndpoint } from './network-plan.js';
import { inSteps } from './pace.js';
import { requireReloadable } from './reloadable.js';
import { isNothing, needsWithout, usedNeeds } from './retained-needs.js';
import { countParts, plural, sayCounts } from './summary.js';
import type { ReloadView } from './view.js';

/**
 * Changes while packets flow, one after the other. Of the configuration, all or nothing:
 *
 *     read, judge whole -> compile -> kernel (additions and what old flows need) -> publish -> forget what no flow uses
 *
 * A failure before `publish` leaves everything as it was; the kernel is led back. Of health and drains, from the configuration in
 * use: compile -> publish. As many of these as come while one is made, or in the pause after it, are one.
 *
 * Backends and services that left the file keep their ids, and the kernel its rules for them, while connections use them.
 * That is looked at after each reload, and every SWEEP_MS as long as there are any.
 */
export interface ReloaderParts {
  readonly configPath: string;
  /** What was in the file at the start. */
  readonly configText: string;
  /** Of that text. */
  readonly pieces?: YamlPieces;
  readonly desired: Desired;
  readonly path: DataPath;
  readonly network: NetworkSetup;
  readonly readers: { readonly tcp: TableReader; readonly any: TableReader };
  readonly clock: Clock;
  readonly log: EventLog;
  /** Another configuration is in use. */
  readonly onApplied?: () => void;
  /** A file was read and is about to be judged and applied (false); that is over, one way or the other (true). */
  readonly onLoading?: (isOver: boolean) => void;
}

/** What became of the last file that was read. */
export interface LastReload {
  readonly success: boolean;
  readonly at: Date;
  readonly message: string;
  readonly tookMs: number;
}

/** Mistakes that a running weir tells of a file. `weir check` tells all. */
const MAX_PROBLEMS = 100;

/** A configuration that was refused, with its mistakes one by one. */
export class RefusedConfig extends WeirError {
  readonly problems: readonly Problem[];

  constructor(path: string, problems: readonly Problem[]) {
    const told = problems.slice(0, MAX_PROBLEMS);
    const lines = told.map((problem) => formatProblem(path, problem));
    if (told.length < problems.length) lines.push(`${problems.length - told.length} more mistakes`);
    super(
      'CONFIG_INVALID',
      lines.join('\n'),
      'Correct the file and reload again; the former configuration is still in use.',
    );
    this.problems = told;
  }
}

/** What a file says. @param pieces as for parseConfig @throws RefusedConfig */
export function judge(path: string, text: string, pieces?: YamlPieces): Config {
  const { config, problems } = parseConfig(text, pieces);
  if (config === null) throw new RefusedConfig(path, problems);
  return config;
}

const SWEEP_MS = 10_000;

/** From one change of health to the next: at least this, and PAUSE_FACTOR times what the last one took. */
const PAUSE_MS = 100;
const PAUSE_FACTOR = 3;

/** What is in the file, or why that cannot be read. Where nothing has changed, the fingerprints are equal. */
interface Reading {
  readonly fingerprint: string;
  readonly text: string | WeirError;
}

export class Reloader {
  readonly #parts: ReloaderParts;
  #queue: Promise<unknown> = Promise.resolve();
  #sweepTimer: NodeJS.Timeout | undefined;
  #isClosed = false;
  readonly #closing = new AbortController();
  #refresh: Promise<void> | undefined;
  /** A reload by command that has not begun. */
  #waiting: Promise<ReloadView> | undefined;
  /** Somebody who asked for it only sees the log. */
  #isAwaited = false;
  #refreshNotBeforeMs = 0;
  /** The fingerprint of what was last read. */
  #seen: string;
  #version = 1;
  #appliedAt = new Date();
  #appliedMs: number;
  #last: LastReload;
  #refusals = 0;

  constructor(parts: ReloaderParts) {
    this.#parts = parts;
    this.#appliedMs = parts.clock.nowMs();
    this.#last = { success: true, at: this.#appliedAt, message: 'start', tookMs: 0 };
    this.#seen = fingerprintOf(parts.configText);
    // Connections of an earlier run may need what the file no longer has.
    this.#queue = this.#sweepLater();
  }

  get configPath(): string {
    return this.#parts.configPath;
  }

  /** Of the configuration in use: 1 for that of the start, one more with each that is applied. */
  get version(): number {
    return this.#version;
  }

  /** Since when the configuration in use is in use. */
  get appliedAt(): Date {
    return this.#appliedAt;
  }

  /** The same on the data path's clock, which nobody sets. */
  get appliedMs(): number {
    return this.#appliedMs;
  }

  get last(): LastReload {
    return this.#last;
  }

  /** Files that were read and not taken. */
  get refusals(): number {
    return this.#refusals;
  }

  /**
   * Those that wait for their turn are one.
   *
   * @param isTold whoever asks is told of a refusal: one that is in the log already is not written once more
   * @throws WeirError: a RefusedConfig, CONFIG_UNREADABLE, NOT_SUPPORTED, or one of NetworkSetup's
   */
  reload(isTold = false): Promise<ReloadView> {
    this.#isAwaited ||= !isTold;
    this.#waiting ??= this.inTurn(() => {
      const isAwaited = this.#isAwaited;
      this.#waiting = undefined;
      this.#isAwaited = false;
      return this.#load(this.#read(), isAwaited);
    });
    return this.#waiting;
  }

  /** Reloads if the file is not what was last read, taken or refused. A refusal is logged, and no more. */
  async reloadIfChanged(): Promise<void> {
    await this.inTurn(async () => {
      const reading = this.#read();
      if (reading.fingerprint !== this.#seen) await this.#load(reading);
    }).catch(() => {});
  }

  /** Puts changes of health to use, those that come close together as one. */
  refreshHealth(): Promise<void> {
    this.#refresh ??= this.#refreshSoon();
    return this.#refresh;
  }

  /**
   * Drains a backend by command, or ends that.
   *
   * @returns the backend, and whether that changed anything
   * @throws WeirError USAGE when the names mean nothing
   */
  setDrained(service: string, backend: string, isDrained: boolean): Promise<NamedMember & { changed: boolean }> {
    return this.inTurn(async () => {
      const { desired, log } = this.#parts;
      const member = findBackend(desired, service, backend);
      const changed = desired.isDrained(member.identity) !== isDrained;
      if (!changed) return { ...member, changed };
      desired.setDrained(member.identity, member.weight, isDrained);
      await this.#publish();
      const fields = { service, backend: member.name };
      if (isDrained) log.info('drain-begun', `${service}/${member.name} is drained by command`, fields);
      else log.info('drain-ended', `${service}/${member.name} is no longer drained, by command`, fields);
      return { ...member, changed };
    });
  }

  /** Brings the kernel, then the data path in line with what has changed besides the file. @throws WeirError of NetworkSetup */
  refresh(): Promise<void> {
    return this.inTurn(async () => {
      const { desired, network, log } = this.#parts;
      logNetwork(log, desired.config, await network.update(desired.config, desired.retainedNeeds()));
      await this.#publish();
    });
  }

  /**
   * The same for endpoints that are to be forgotten: the data path goes first, and those that a flow came for meanwhile stay.
   *
   * @param stillUsed of those that were learned
   */
  forget(endpoints: readonly ReturnEndpoint[], stillUsed: () => readonly ReturnEndpoint[]): Promise<void> {
    return this.inTurn(async () => {
      const { desired, network } = this.#parts;
      const before = desired.learned;
      desired.learned = before.filter((endpoint) => !endpoints.includes(endpoint));
      await this.#publish();
      const used = stillUsed();
      const kept = endpoints.filter((endpoint) => used.includes(endpoint));
      if (kept.length > 0) {
        desired.learned = [...desired.learned, ...kept];
        await this.#publish();
      }
      await network.update(desired.config, desired.retainedNeeds());
    });
  }

  async #publish(): Promise<void> {
    const { desired, path, clock } = this.#parts;
    const proposal = desired.propose(desired.config, clock.nowMs());
    await path.publish(proposal.compiled.snapshot);
    desired.take(proposal);
  }

  /** Whether weir is stopping. */
  get isClosed(): boolean {
    return this.#isClosed;
  }

  /** Lets a reload under way finish and takes no more. */
  async close(): Promise<void> {
    this.#isClosed = true;
    this.#closing.abort();
    clearTimeout(this.#sweepTimer);
    await this.#queue;
  }

  #read(): Reading {
    try {
      const text = readConfigFile(this.#parts.configPath);
      return { fingerprint: fingerprintOf(text), text };
    } catch (error) {
      return { fingerprint: (error as WeirError).message, text: error as WeirError };
    }
  }

  async #load({ fingerprint, text }: Reading, isAwaited = true): Promise<ReloadView> {
    const isNew = fingerprint !== this.#seen;
    this.#seen = fingerprint;
    const beganMs = performance.now();
    const { onLoading } = this.#parts;
    onLoading?.(false);
    try {
      if (typeof text !== 'string') throw text;
      const view = await this.#apply(text);
      this.#version++;
      this.#appliedAt = new Date();
      this.#appliedMs = this.#parts.clock.nowMs();
      this.#last = { success: true, at: this.#appliedAt, message: sayCounts(view), tookMs: view.tookMs };
      this.#parts.log.info('reload-applied', `applied ${view.path}: ${sayCounts(view)}`, {
        services: view.services,
        backends: view.backends,
        removedBackends: view.removedBackends,
        tookMs: view.tookMs,
      });
      return view;
    } catch (error) {
      this.#refused(error as Error, performance.now() - beganMs, isNew || isAwaited);
      throw error;
    } finally {
      onLoading?.(true);
    }
  }

  async #apply(text: string): Promise<ReloadView> {
    const { configPath, pieces, desired, path, clock, log, onApplied } = this.#parts;
    const beganMs = performance.now();
    const config = judge(configPath, text, pieces);
    requireReloadable(desired.config, config);
    const proposal = desired.propose(config, clock.nowMs());
    const report = await this.#changeNetwork(proposal);
    logNetwork(log, config, report);
    await path.publish(proposal.compiled.snapshot);
    const released = desired.releasedBy(proposal);
    desired.take(proposal);
    onApplied?.();
    this.#tellReleased(released);
    const commands = [...report.commands, ...(await this.#sweepLater())];
    return {
      path: configPath,
      ...countParts(config),
      removedBackends: desired.removedBackends().length,
      commands,
      tookMs: Math.round(performance.now() - beganMs),
    };
  }

  #tellReleased(released: readonly BackendIdentity[]): void {
    const { desired, log } = this.#parts;
    for (const { service: id, name: backend } of released) {
      const service = desired.identities.serviceName(id);
      log.info('drain-ended', `${service}/${backend} is no longer drained by command: the file has changed it`, {
        service,
        backend,
      });
    }
  }

  async #refreshSoon(): Promise<void> {
    const waitMs = Math.max(0, this.#refreshNotBeforeMs - performance.now());
    const step = async (): Promise<void> => {
      // What changes from here on needs another.
      this.#refresh = undefined;
      const beganMs = performance.now();
      await this.#publish();
      const endedMs = performance.now();
      this.#refreshNotBeforeMs = endedMs + Math.max(PAUSE_MS, PAUSE_FACTOR * (endedMs - beganMs));
    };
    await sleep(waitMs, undefined, { signal: this.#closing.signal })
      .then(() => this.inTurn(step))
      .catch(() => {});
  }

  async #changeNetwork(proposal: Proposal): Promise<NetworkReport> {
    const { desired, network } = this.#parts;
    const before = { config: desired.config, needs: desired.retainedNeeds() };
    try {
      return await network.update(proposal.config, desired.retainedNeeds(proposal));
    } catch (error) {
      await network.update(before.config, before.needs).catch(() => {});
      throw error;
    }
  }

  /** Forgets what left the file and is not in use any more. @returns the commands that took */
  async #sweep(): Promise<readonly string[]> {
    const { desired, path, network, readers, clock, log } = this.#parts;
    clearTimeout(this.#sweepTimer);
    const { retained } = desired;
    if (isNothing(retained) && desired.removedBackends().length === 0 && desired.removedServices().length === 0)
      return [];
    const tables = [readers.tcp, readers.any];
    const nowMs = clock.nowMs();
    const packetsRead = (): number => path.stats[STAT_RX_PACKETS]!;
    const used = await inSteps(this.#untilClosed(usedNeeds(tables, retained, nowMs)), packetsRead);
    if (used === null) return [];
    const counting = censusInSteps(tables, nowMs, desired.identities.backendRows);
    const census = await inSteps(this.#untilClosed(counting), packetsRead);
    if (census === null) return [];
    const { forgotten, kept } = desired.forget(census.backends, used);
    if ((kept > 0 || !isNothing(used)) && !this.#isClosed) {
      this.#sweepTimer = setTimeout(() => void this.inTurn(() => this.#sweepLater()).catch(() => {}), SWEEP_MS).unref();
    }
    const isLess = !isNothing(needsWithout(retained, used));
    const commands = isLess ? (await network.update(desired.config, desired.retainedNeeds())).commands : [];
    if (forgotten > 0) {
      log.info(
        'drained',
        `${plural(forgotten, 'removed service or backend', 'removed services and backends')} without connections forgotten`,
        { forgotten, kept },
      );
    }
    return commands;
  }

  /** The same where a failure changes nothing of what is in use. */
  async #sweepLater(): Promise<readonly string[]> {
    try {
      return await this.#sweep();
    } catch (error) {
      this.#parts.log.error('step-failed', `could not tidy up after a removed backend: ${(error as Error).message}`);
      return [];
    }
  }

  /** Of a large table, steps with their rests take seconds, which whoever stops weir does not have. Null: they were given up. */
  *#untilClosed<T>(steps: Generator<void, T>): Generator<void, T | null> {
    for (;;) {
      if (this.#isClosed) return null;
      const { done, value } = steps.next();
      if (done) return value;
      yield;
    }
  }

  #refused(error: Error, tookMs: number, isNews: boolean): void {
    const problems = error instanceof RefusedConfig ? error.problems : undefined;
    const code = error instanceof WeirError ? error.code : 'NOT_SUPPORTED';
    const isLogged = !isNews && !this.#last.success && this.#last.message === error.message;
    this.#refusals++;
    this.#last = { success: false, at: new Date(), message: error.message, tookMs };
    if (isLogged) return;
    this.#parts.log.error('reload-refused', `the former configuration stays: ${firstLines(error.message)}`, {
      code,
      ...(problems === undefined ? {} : { problems }),
    });
  }

  /**
   * Runs a step between two reloads, for what must not see the configuration, or the meaning of its ids, change.
   *
   * @throws WeirError NOT_RUNNING when weir is stopping
   */
  inTurn<T>(step: () => Promise<T>): Promise<T> {
    const result = this.#queue.then(() => {
      if (this.#isClosed) throw new WeirError('NOT_RUNNING', 'weir is stopping', 'Start it again.');
      return step();
    });
    this.#queue = result.catch(() => {});
    return result;
  }
}

/** Of a list of mistakes, as many as a line of the log has room for. */
function firstLines(message: string): string {
  const lines = message.split('\n');
  if (lines.length <= LOGGED_MISTAKES) return message;
  return [...lines.slice(0, LOGGED_MISTAKES), `and ${lines.length - LOGGED_MISTAKES} more`].join('\n');
}

const LOGGED_MISTAKES = 3;

function fingerprintOf(text: string): string {
  return createHash('sha256').update(text).digest('hex');
}

/** A line for what was done to the kernel, and one for each thing to know. */
export function logNetwork(log: EventLog, { network }: Config, { commands, notes }: NetworkReport): void {
  if (!network.manage) log.info('network-applied', 'network.manage is false: `weir net` prints what is needed');
  else if (commands.length > 0) {
    log.info(
      'network-applied',
      `${plural(commands.length, 'route, rule or setting', 'routes, rules and settings')} changed`,
      {
        commands: commands.length,
      },
    );
  }
  for (const note of notes) log.warn('network-note', note);
}
