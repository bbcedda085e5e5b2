/*
 *   heading      what comes now
 *   line         anything
 *   check        a tick or a cross, remembered
 *   bar          label, bar, number
 *   during       something that takes time: a clock on a terminal, nothing elsewhere
 */

const BOLD = '1';
const DIM = '2';
const RED = '31';
const GREEN = '32';
/** Of backends, in turn. */
const HUES = ['36', '35', '33', '34', '32', '31'];
const EIGHTHS = ['', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
const SPINNER = ['⠋', '⠙', '⠹', '⠸', '⠼', '⠴', '⠦', '⠧', '⠇', '⠏'];
const SPIN_MS = 80;
/** What is faster needs no clock. */
const PATIENCE_MS = 300;

export interface ScreenOptions {
  readonly out: NodeJS.WritableStream;
  /** Default: on a terminal, unless NO_COLOR is set (https://no-color.org). */
  readonly colour?: boolean;
}

/** Where the demo is shown. Moving text is for terminals; a file gets plain lines. */
export class Screen {
  readonly #out: NodeJS.WritableStream;
  readonly #isTerminal: boolean;
  readonly #isColoured: boolean;
  #failures = 0;

  constructor({ out, colour }: ScreenOptions) {
    this.#out = out;
    this.#isTerminal = 'isTTY' in out && out.isTTY === true;
    this.#isColoured = colour ?? (this.#isTerminal && !process.env.NO_COLOR && process.env.TERM !== 'dumb');
  }

  /** Checks that failed so far. */
  get failures(): number {
    return this.#failures;
  }

  heading(text: string): void {
    this.line();
    this.line(this.paint(text, BOLD));
  }

  line(text = ''): void {
    this.#out.write(`${text}\n`);
  }

  dim(text: string): string {
    return this.paint(text, DIM);
  }

  /** In the colour of the backend of this number, from 0. */
  hue(text: string, number: number): string {
    return this.paint(text, HUES[number % HUES.length]!);
  }

  check(passed: boolean, text: string): void {
    if (!passed) this.#failures++;
    this.line(`  ${passed ? this.paint('✓', GREEN) : this.paint('✗', RED)} ${text}`);
  }

  /** A bar of up to `width` columns, padded to them. */
  bar(value: number, max: number, width: number, number: number): string {
    const eighths = max === 0 ? 0 : Math.round((Math.min(value, max) / max) * width * 8);
    const text = '█'.repeat(eighths >> 3) + EIGHTHS[eighths & 7];
    return (text && this.hue(text, number)) + ' '.repeat(width - text.length);
  }

  /** Cuts what a terminal would break into two lines; for text without colours. */
  fit(text: string): string {
    const columns =
      'columns' in this.#out && typeof this.#out.columns === 'number' ? this.#out.columns : Number.POSITIVE_INFINITY;
    return text.length <= columns ? text : `${text.slice(0, columns - 1)}…`;
  }

  /** Waits for `work`, with a running clock after a moment. */
  async during<T>(text: string, work: Promise<T>): Promise<T> {
    if (!this.#isTerminal) return work;
    const startedMs = performance.now();
    let frame = 0;
    const timer = setInterval(() => {
      const elapsedMs = performance.now() - startedMs;
      if (elapsedMs < PATIENCE_MS) return;
      const spinner = SPINNER[frame++ % SPINNER.length]!;
      this.#out.write(`\r\x1b[K  ${spinner} ${text} ${this.dim(`${(elapsedMs / 1000).toFixed(1)} s`)}`);
    }, SPIN_MS);
    try {
      return await work;
    } finally {
      clearInterval(timer);
      if (frame > 0) this.#out.write('\r\x1b[K');
    }
  }

  paint(text: string, code: string): string {
    return this.#isColoured ? `\x1b[${code}m${text}\x1b[0m` : text;
  }
}
