import { Backlog } from './backlog.js';
import type { Watch } from './view.js';

/** Lines that are kept. */
export const HISTORY_LINES = 1000;

/** The last lines of the log, for whoever asks later, and for those who wait for the next. */
export class LogHistory {
  readonly #lines: string[] = [];
  /** Where the next line goes, and the oldest is once all places are taken. */
  #next = 0;
  readonly #followers = new Set<Backlog>();

  /** @param line with its line feed */
  add(line: string): void {
    this.#lines[this.#next] = line;
    this.#next = (this.#next + 1) % HISTORY_LINES;
    for (const follower of this.#followers) {
      follower.give(line);
      follower.wake();
    }
  }

  /** The last `count` lines there are, oldest first. */
  last(count: number): string[] {
    const lines = [...this.#lines.slice(this.#next), ...this.#lines.slice(0, this.#next)];
    return lines.slice(Math.max(0, lines.length - count));
  }

  /** The same, and each line to come. It begins with the first call of `next`. */
  follow(count: number): Watch {
    const backlog = new Backlog();
    return {
      next: () => {
        if (!this.#followers.has(backlog)) {
          for (const line of this.last(count)) backlog.give(line);
          this.#followers.add(backlog);
        }
        return backlog.next();
      },
      close: () => this.#followers.delete(backlog),
    };
  }
}
