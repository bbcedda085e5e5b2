import type { Clock } from '../base/clock.js';
import { CAUSE_NAMES, EVENT_CLOSED, EVENT_NAMES, EVENT_STATE, EventReader } from '../conntrack/events.js';
import { STATE_NAMES } from '../conntrack/record.js';
import { Backlog } from './backlog.js';
import { compileFilter, type FlowFilter, type FlowNames, flowJson, readFlow } from './flows.js';
import type { FlowEventView, Watch } from './view.js';

/** How long an event may wait to be read. */
const POLL_MS = 50;

/** Events read at a time: some 5 ms, when each is described. */
const SLICE_EVENTS = 1024;

/** From here on the wall clock was set; below, it is only rounded. */
const CLOCK_STEP_MS = 10;

/**
 * What happens to connections, for any number of watchers: the data path's ring of events, read every POLL_MS while somebody
 * watches and left alone, unwritten, while nobody does.
 *
 *     ring --read--> filter of each watcher --accepted--> its backlog (backlog.ts) -----------> taken by its client
 *       |                                                   |
 *       +-- overtaken: lost to all watchers                 +-- full: lost to that one
 *
 * Either loss is a line of its own at the place of what is missing. What was overwritten unread cannot be filtered any more: it is
 * told to everybody.
 */
export class EventFeed {
  readonly #memory: SharedArrayBuffer;
  readonly #names: FlowNames;
  readonly #clock: Clock;
  readonly #watchers = new Set<Watcher>();
  #reader: EventReader | undefined;
  #timer: NodeJS.Timeout | undefined;
  /** From the data path's clock to the time of day. */
  #wallOffsetMs = 0;

  /**
   * @param memory of the ring (conntrack/events.ts)
   * @param clock the data path's
   */
  constructor(memory: SharedArrayBuffer, names: FlowNames, clock: Clock) {
    this.#memory = memory;
    this.#names = names;
    this.#clock = clock;
  }

  /** Events of the connections that meet `filter`, as they are when it happens: a line of JSON each. */
  watch(filter: FlowFilter): Watch {
    const watcher = new Watcher(filter);
    return {
      next: () => {
        this.#join(watcher);
        return watcher.next();
      },
      close: () => this.#leave(watcher),
    };
  }

  #join(watcher: Watcher): void {
    this.#watchers.add(watcher);
    if (this.#reader !== undefined) return;
    this.#reader = new EventReader(this.#memory);
    this.#wallOffsetMs = Number.NEGATIVE_INFINITY;
    this.#schedule(POLL_MS);
  }

  #leave(watcher: Watcher): void {
    this.#watchers.delete(watcher);
    if (this.#watchers.size > 0) return;
    clearTimeout(this.#timer);
    this.#reader?.close();
    this.#reader = undefined;
  }

  #schedule(ms: number): void {
    this.#timer = setTimeout(() => this.#poll(), ms).unref();
  }

  #poll(): void {
    const reader = this.#reader!;
    this.#followWallClock();
    // Names and ids may be others than at the last time.
    const watching = [...this.#watchers].map((watcher) => ({
      watcher,
      accepts: compileFilter(watcher.filter, this.#names),
    }));
    let left = SLICE_EVENTS;
    for (; left > 0; left--) {
      const lost = reader.read();
      if (lost < 0) break;
      let line = '';
      for (const { watcher, accepts } of watching) {
        watcher.lose(lost);
        if (!accepts(reader, 0)) continue;
        if (watcher.isFull) {
          watcher.lose(1);
          continue;
        }
        line ||= this.#describe(reader);
        watcher.give(line);
      }
    }
    for (const { watcher } of watching) watcher.wake();
    this.#schedule(left > 0 ? POLL_MS : 0);
  }

  #describe(reader: EventReader): string {
    const { kind, detail, atMs } = reader;
    const view: FlowEventView = {
      at: new Date(atMs + this.#wallOffsetMs).toISOString(),
      event: EVENT_NAMES[kind] as FlowEventView['event'],
      ...(kind === EVENT_STATE ? { previous: STATE_NAMES[detail]! } : {}),
      ...(kind === EVENT_CLOSED ? { cause: CAUSE_NAMES[detail]! } : {}),
      ...flowJson(readFlow(reader, 0, 0, this.#names, atMs)),
    };
    return `${JSON.stringify(view)}\n`;
  }

  #followWallClock(): void {
    const offsetMs = Date.now() - this.#clock.nowMs();
    if (Math.abs(offsetMs - this.#wallOffsetMs) > CLOCK_STEP_MS) this.#wallOffsetMs = offsetMs;
  }
}

/** One watcher: what waits for it, and what it wants to see. */
class Watcher extends Backlog {
  readonly filter: FlowFilter;

  constructor(filter: FlowFilter) {
    super();
    this.filter = filter;
  }
}
