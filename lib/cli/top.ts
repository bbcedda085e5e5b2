import type { LiveView } from '../control/live/live-view.js';
import { callLines, untilStopped } from './lines.js';
import { print } from './output.js';
import type { SocketOptions } from './running.js';
import { Terminal } from './terminal.js';
import { renderFrame, SORTS, type Sort } from './top-frame.js';

export interface TopOptions extends SocketOptions {
  readonly output: 'table' | 'json';
  readonly once?: boolean;
  readonly service?: string;
  readonly sort: Sort;
}

const EVENT = 'data: ';

/**
 * What goes on, once a second: on a terminal all of it, until `q` or a signal; elsewhere, or with `once`, one frame; with `json` a line for
 * each view. The first view of the stream has no rates yet and is not shown.
 *
 * @throws WeirError NOT_RUNNING when weir ends, and as callStream does
 */
export async function top({ socket, output, once = false, service = '', sort }: TopOptions): Promise<void> {
  const isWhole = output === 'table' && !once && process.stdout.isTTY === true && process.stdin.isTTY === true;
  if (isWhole) return watchScreen(socket, { service, sort });
  await untilStopped((signal, stop) =>
    followViews(socket, signal, async (view) => {
      if (signal.aborted) return;
      if (output === 'json') await print(`${JSON.stringify(onlyOf(view, service))}\n`);
      else await print(`${plainFrame(view, service, sort).join('\n')}\n`);
      if (once || output === 'table') stop();
    }),
  );
}

function followViews(
  socket: string,
  signal: AbortSignal,
  show: (view: LiveView) => void | Promise<void>,
): Promise<void> {
  return callLines({ socket, path: '/v1/live', signal }, async (line) => {
    if (!line.startsWith(EVENT)) return;
    const view = JSON.parse(line.slice(EVENT.length)) as LiveView;
    if (view.intervalSeconds > 0) await show(view);
  });
}

function onlyOf(view: LiveView, service: string): LiveView {
  return { ...view, services: view.services.filter(({ name }) => name.includes(service)) };
}

function plainFrame(view: LiveView, service: string, sort: Sort): string[] {
  const columns = process.stdout.columns || 160;
  const hasColour = process.stdout.isTTY === true && isColourful();
  return renderFrame(view, { columns, rows: Number.POSITIVE_INFINITY, sort, service, skip: 0, hasColour, status: '' });
}

/** https://no-color.org */
function isColourful(): boolean {
  return !process.env.NO_COLOR && process.env.TERM !== 'dumb';
}

async function watchScreen(socket: string, chosen: { service: string; sort: Sort }): Promise<void> {
  await untilStopped(async (signal, stop) => {
    const screen = new Screen(chosen, stop);
    process.once('SIGHUP', stop);
    try {
      await followViews(socket, signal, (view) => screen.show(view));
    } finally {
      process.off('SIGHUP', stop);
      screen.close();
    }
  });
}

const KEYS = 'q quit  s sort  / service  p pause  arrows scroll  ? help';

const HELP = [
  'weir top',
  '',
  'q, Ctrl-C   quit',
  's           sort by: file, packets, bits, new, open',
  '/           show only services with this in their name; Enter ends, Esc clears',
  'p           pause and go on',
  'arrows, PgUp, PgDn   scroll the services',
  '?           this page, and back',
];

/** What is on the screen, and what keys have made of it. */
class Screen {
  readonly #terminal: Terminal;
  readonly #stop: () => void;
  #view: LiveView | undefined;
  #sort: Sort;
  #service: string;
  #skip = 0;
  #isPaused = false;
  #isTyping = false;
  #isHelp = false;

  constructor({ service, sort }: { service: string; sort: Sort }, stop: () => void) {
    this.#service = service;
    this.#sort = sort;
    this.#stop = stop;
    this.#terminal = new Terminal(
      (keys) => this.#press(keys),
      () => this.#draw(),
    );
    this.#draw();
  }

  show(view: LiveView): void {
    if (this.#isPaused) return;
    this.#view = view;
    this.#draw();
  }

  close(): void {
    this.#terminal.close();
  }

  #draw(): void {
    const { columns, rows } = this.#terminal;
    if (this.#isHelp) this.#terminal.draw(HELP.slice(0, rows).map((line) => line.slice(0, columns)));
    else if (this.#view === undefined) this.#terminal.draw(['Waiting for weir.']);
    else {
      const options = { columns, rows, sort: this.#sort, service: this.#service, skip: this.#skip };
      this.#terminal.draw(renderFrame(this.#view, { ...options, hasColour: isColourful(), status: this.#status() }));
    }
  }

  #status(): string {
    if (this.#isTyping) return `Service: ${this.#service}_`;
    const parts = [
      ...(this.#isPaused ? ['PAUSED'] : []),
      ...(this.#service === '' ? [] : [`service ${this.#service}`]),
      `sorted by ${this.#sort}`,
      KEYS,
    ];
    return parts.join('  |  ');
  }

  /** Several keys may come at once; one that is more than a character comes alone. */
  #press(keys: string): void {
    const all = keys.startsWith('\x1b') ? [keys] : [...keys];
    for (const key of all) {
      if (key === '\x03') this.#stop();
      else if (this.#isTyping) this.#type(key);
      else this.#command(key);
    }
    this.#draw();
  }

  #type(key: string): void {
    if (key === '\r' || key === '\n') this.#isTyping = false;
    else if (key === '\x1b') {
      this.#isTyping = false;
      this.#service = '';
    } else if (key === '\x7f' || key === '\b') this.#service = [...this.#service].slice(0, -1).join('');
    else if (!/^[\p{Cc}]/u.test(key)) this.#service += key;
  }

  #command(key: string): void {
    const page = Math.max(1, this.#terminal.rows - 12);
    switch (key) {
      case 'q':
        this.#stop();
        break;
      case 's':
        this.#sort = SORTS[(SORTS.indexOf(this.#sort) + 1) % SORTS.length]!;
        break;
      case '/':
        this.#isTyping = true;
        break;
      case 'p':
        this.#isPaused = !this.#isPaused;
        break;
      case '?':
        this.#isHelp = !this.#isHelp;
        break;
      case '\x1b[A':
      case '\x1b[B':
      case '\x1b[5~':
      case '\x1b[6~':
        this.#skip = Math.max(0, this.#skip + { '\x1b[A': -1, '\x1b[B': 1, '\x1b[5~': -page, '\x1b[6~': page }[key]);
        break;
    }
  }
}
