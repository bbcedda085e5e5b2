import type { LostView } from './view.js';

/** What waits for a reader that does not take it, at most. */
const MAX_WAITING_CHARS = 4 * 1024 * 1024;

/**
 * Lines on their way to one reader, who takes them as fast as it can. What there is no room for is lost, and said so, in a line at
 * its place.
 */
export class Backlog {
  #text = '';
  #lost = 0;
  #take: ((text: string) => void) | undefined;

  /** What waits, or what comes next. */
  next(): Promise<string> {
    return new Promise((resolve) => {
      this.#take = resolve;
      this.wake();
    });
  }

  get isFull(): boolean {
    return this.#text.length >= MAX_WAITING_CHARS;
  }

  /** Takes a line, while there is room; it is handed over by `wake`. */
  give(line: string): void {
    if (this.isFull) {
      this.lose(1);
      return;
    }
    this.#sayLosses();
    this.#text += line;
  }

  lose(count: number): void {
    this.#lost += count;
  }

  /** Hands over what waits, if it is waited for. */
  wake(): void {
    if (this.#take === undefined || (this.#text === '' && this.#lost === 0)) return;
    this.#sayLosses();
    this.#take(this.#text);
    this.#take = undefined;
    this.#text = '';
  }

  #sayLosses(): void {
    if (this.#lost === 0) return;
    this.#text += `${JSON.stringify({ event: 'lost', count: this.#lost } satisfies LostView)}\n`;
    this.#lost = 0;
  }
}
