/** What a terminal is asked for: the alternate screen, without a cursor; and back. */
const ENTER = '\x1b[?1049h\x1b[?25l';
const LEAVE = '\x1b[?25h\x1b[?1049l';

const HOME = '\x1b[H';
const ERASE_LINE = '\x1b[K';
const ERASE_BELOW = '\x1b[J';

/**
 * The terminal while a program has all of it: keys come as they are pressed, and frames replace each other. What it was before comes back
 * on `close`, and with the end of the process however that comes about, but for SIGKILL.
 */
export class Terminal {
  readonly #onKey: (key: string) => void;
  readonly #onResize: () => void;
  readonly #restore = (): void => this.close();
  #isOpen = true;

  constructor(onKey: (key: string) => void, onResize: () => void) {
    this.#onKey = onKey;
    this.#onResize = onResize;
    process.on('exit', this.#restore).on('uncaughtExceptionMonitor', this.#restore);
    process.stdout.write(ENTER);
    process.stdin.setRawMode(true).setEncoding('utf8').on('data', this.#onKey).resume();
    process.stdout.on('resize', this.#onResize);
  }

  get columns(): number {
    return process.stdout.columns || 80;
  }

  get rows(): number {
    return process.stdout.rows || 24;
  }

  /** @param lines as many as there are rows, at most */
  draw(lines: readonly string[]): void {
    if (this.#isOpen) process.stdout.write(`${HOME}${lines.join(`${ERASE_LINE}\r\n`)}${ERASE_LINE}${ERASE_BELOW}`);
  }

  /** Idempotent. */
  close(): void {
    if (!this.#isOpen) return;
    this.#isOpen = false;
    process.off('exit', this.#restore).off('uncaughtExceptionMonitor', this.#restore);
    process.stdout.off('resize', this.#onResize);
    process.stdin.off('data', this.#onKey).pause().setRawMode(false);
    process.stdout.write(LEAVE);
  }
}
