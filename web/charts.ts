import type Plot from 'uplot';
import { type Look, resolveColour } from './colours.js';
import { make, setText } from './dom.js';
import { bits, si } from './format.js';
import type { History, Measure } from './history.js';

/** Loaded before this module, by a script of its own. */
declare const uPlot: typeof Plot;

/** Room for the names at the ends of the lines, in CSS pixels; where all is narrower than that, they go. */
const NAMES_WIDTH = 84;
const NARROW = 300;
const HEIGHT = 168;
/** Of the time that is shown, in seconds: what there is, within these. */
const SHORTEST = 60;
const LONGEST = 300;

const FONT = '11px system-ui, sans-serif';
const NAME_LINE = 13;

/** Lines with a name and a look of their own; what is beyond is one line together. */
const MOST_LINES = 8;

export interface Charted {
  readonly key: string;
  readonly name: string;
  readonly look: Look;
}

const TITLES: Readonly<Record<Measure, { title: string; format: (value: number) => string }>> = {
  packets: { title: 'Packets per second', format: si },
  bits: { title: 'Bits per second', format: bits },
  connections: { title: 'New connections per second', format: si },
};

/** One measure over the last minutes: the figure of now, and a line for each service or backend with its name at the end. */
export class Chart {
  readonly element: HTMLElement;
  readonly #measure: Measure;
  readonly #history: History;
  readonly #value = make('p', { class: 'value' });
  readonly #detail = make('p', { class: 'muted detail' });
  readonly #readout = make('p', { class: 'readout', 'aria-hidden': 'true' });
  readonly #place = make('div', { class: 'plot', role: 'img' });
  readonly #empty = make('p', { class: 'empty over' }, 'No traffic yet.');
  #plot: Plot | undefined;
  #shown: readonly Charted[] = [];
  #beyond: readonly Charted[] = [];

  constructor(measure: Measure, history: History) {
    this.#measure = measure;
    this.#history = history;
    const { title } = TITLES[measure];
    this.element = make(
      'figure',
      { class: 'card chart', 'data-measure': measure },
      make('figcaption', {}, make('h3', {}, title), make('div', { class: 'now' }, this.#value, this.#detail)),
      make('div', { class: 'frame' }, this.#place, this.#empty),
      this.#readout,
    );
    new ResizeObserver(() => this.#fit()).observe(this.#place);
  }

  /** Shows other lines, or the same in another theme. */
  setLines(lines: readonly Charted[]): void {
    this.#shown = lines.length > MOST_LINES ? lines.slice(0, MOST_LINES - 1) : lines;
    this.#beyond = lines.slice(this.#shown.length);
    this.#plot?.destroy();
    this.#plot = undefined;
    if (lines.length > 0) this.#plot = new uPlot(this.#options(), this.#data(), this.#place);
  }

  /** @param now the figure, and what it is made of */
  update(now: number | null, detail: string): void {
    const { title, format } = TITLES[this.#measure];
    const figure = now === null ? '–' : format(now);
    setText(this.#value, figure);
    setText(this.#detail, detail);
    this.#place.setAttribute('aria-label', `${title}, last five minutes; now ${figure}`);
    const data = this.#data();
    const isQuiet = data.slice(1).every((line) => (line as (number | null)[]).every((value) => !value));
    this.#empty.hidden = !isQuiet;
    this.#plot?.setData(data);
  }

  #data(): Plot.AlignedData {
    const { times } = this.#history;
    const lines = this.#shown.map(({ key }) => this.#history.line(key, this.#measure));
    if (this.#beyond.length === 0) return [times, ...lines];
    const others = this.#beyond.map(({ key }) => this.#history.line(key, this.#measure));
    const sum = times.map((_, i) => others.reduce((total, line) => total + (line[i] ?? 0), 0));
    return [times, ...lines, sum];
  }

  #names(): { name: string; colour: string; dash: readonly number[] }[] {
    const named = this.#shown.map(({ name, look: { colour, dash } }) => ({
      name,
      colour: resolveColour(`--line-${colour}`),
      dash,
    }));
    if (this.#beyond.length === 0) return named;
    return [...named, { name: `${this.#beyond.length} others`, colour: resolveColour('--muted'), dash: [1, 3] }];
  }

  #options(): Plot.Options {
    const { format } = TITLES[this.#measure];
    const names = this.#names();
    const width = this.#place.clientWidth || 320;
    const text = resolveColour('--muted');
    const grid = { stroke: resolveColour('--line'), width: 1 };
    return {
      width,
      height: HEIGHT,
      padding: [8, width < NARROW ? 8 : NAMES_WIDTH, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: 'weir' }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: {
          time: true,
          range: (_, first, last) => [Math.max(last - LONGEST, Math.min(first, last - SHORTEST)), last],
        },
        y: { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] },
      },
      axes: [
        {
          stroke: text,
          grid: { show: false },
          ticks: { show: false },
          font: FONT,
          size: 24,
          space: 80,
          values: (_, splits) => splits.map(timeOfDay),
        },
        {
          stroke: text,
          grid,
          ticks: { show: false },
          font: FONT,
          size: 62,
          space: 36,
          values: (_, splits) => splits.map(format),
        },
      ],
      series: [
        {},
        ...names.map(({ name, colour, dash }) => ({
          label: name,
          stroke: colour,
          width: 1.75,
          dash: [...dash],
          points: { show: false },
          spanGaps: false,
        })),
      ],
      hooks: {
        draw: [(plot) => drawNames(plot, names)],
        setCursor: [(plot) => this.#say(plot, names)],
      },
    };
  }

  /** What the lines are where the pointer is. */
  #say({ cursor: { idx }, data }: Plot, names: readonly { name: string }[]): void {
    if (idx === null || idx === undefined || data[0][idx] === undefined) {
      setText(this.#readout, '');
      return;
    }
    const at = idx;
    const { format } = TITLES[this.#measure];
    const said = names.map(({ name }, i) => ({ name, value: (data[i + 1] as (number | null)[])[at] ?? 0 }));
    const values = said.filter(({ value }) => value > 0).map(({ name, value }) => `${name} ${format(value)}`);
    setText(this.#readout, `${timeOfDay(data[0][at]!)}  ${values.join(' · ') || format(0)}`);
  }

  #fit(): void {
    const width = this.#place.clientWidth;
    if (this.#plot === undefined || width === 0 || width === this.#plot.width) return;
    const isNarrow = (of: number): boolean => of < NARROW;
    if (isNarrow(width) !== isNarrow(this.#plot.width)) this.setLines([...this.#shown, ...this.#beyond]);
    else this.#plot.setSize({ width, height: HEIGHT });
  }
}

function timeOfDay(seconds: number): string {
  return new Date(seconds * 1000).toLocaleTimeString('en-GB');
}

/** At the end of each line its name, moved apart where lines end close together; those that say nothing now have none. */
function drawNames(plot: Plot, names: readonly { name: string; colour: string }[]): void {
  const ratio = devicePixelRatio;
  const { ctx, bbox, data } = plot;
  if (plot.width < NARROW) return;
  const labels = names
    .map(({ name, colour }, i) => ({ name, colour, value: (data[i + 1] as (number | null)[]).at(-1) ?? null }))
    .filter((label): label is { name: string; colour: string; value: number } => !!label.value)
    .map((label) => ({ ...label, y: plot.valToPos(label.value, 'y', true) }))
    .sort((a, b) => a.y - b.y);
  for (let i = 1; i < labels.length; i++) {
    labels[i]!.y = Math.max(labels[i]!.y, labels[i - 1]!.y + NAME_LINE * ratio);
  }
  let floor = bbox.top + bbox.height;
  for (const label of [...labels].reverse()) {
    label.y = Math.min(label.y, floor);
    floor = label.y - NAME_LINE * ratio;
  }
  ctx.save();
  ctx.font = `600 ${11 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = 'middle';
  ctx.textAlign = 'left';
  for (const { name, colour, y } of labels) {
    ctx.fillStyle = colour;
    ctx.fillText(shorten(ctx, name, (NAMES_WIDTH - 12) * ratio), bbox.left + bbox.width + 6 * ratio, y);
  }
  ctx.restore();
}

function shorten(ctx: CanvasRenderingContext2D, name: string, width: number): string {
  if (ctx.measureText(name).width <= width) return name;
  let kept = name.slice(0, 40);
  while (kept.length > 1 && ctx.measureText(`${kept}…`).width > width) kept = kept.slice(0, -1);
  return `${kept}…`;
}
