import type { Lab } from '../lib/lab/topology.js';
import { MEASURES, type Measure, measure } from './measures.js';

/** A part of `npm run bench:net`: contenders that are measured in turns, so that a noisy machine disturbs all alike. */

export interface Contender {
  readonly name: string;
  readonly lab: Lab;
  /** What the client calls. */
  readonly target: string;
  /** Which measurements it takes part in. */
  readonly does: readonly Measure[];
  /** It runs only while it is measured. Returns how to stop it. */
  start(): Promise<() => Promise<void>>;
}

export interface Section {
  readonly contenders: readonly Contender[];
  /** Names of contenders, the first over the second. */
  readonly ratios: ReadonlyArray<readonly [string, string]>;
}

export interface Extent {
  readonly rounds: number;
  readonly seconds: number;
}

export interface Row {
  readonly what: Measure;
  readonly medians: Readonly<Record<string, number>>;
  readonly ratios: Readonly<Record<string, number>>;
}

/** Measures, says so on stderr as it goes, and returns the medians. */
export async function runSection({ contenders, ratios }: Section, { rounds, seconds }: Extent): Promise<Row[]> {
  const results = new Map(contenders.map(({ name }) => [name, new Map<Measure, number[]>()]));
  for (let round = 1; round <= rounds; round++) {
    for (const { name, lab, target, does, start } of contenders) {
      const stop = await start();
      try {
        for (const what of does) {
          const value = await measure(lab, target, what, seconds).catch(() => Number.NaN);
          const series = results.get(name)!;
          series.set(what, [...(series.get(what) ?? []), value]);
          const { title, unit } = MEASURES[what];
          console.error(`round ${round}/${rounds}  ${name.padEnd(13)} ${title.padEnd(22)} ${format(value)} ${unit}`);
        }
      } finally {
        await stop();
      }
    }
  }
  const measured = (Object.keys(MEASURES) as Measure[]).filter((what) =>
    contenders.some(({ does }) => does.includes(what)),
  );
  return measured.map((what) => {
    const medians = Object.fromEntries([...results].map(([name, series]) => [name, median(series.get(what) ?? [])]));
    const quotients = ratios
      .filter(([a, b]) => a in medians && b in medians)
      .map(([a, b]) => [`${a} / ${b}`, medians[a]! / medians[b]!] as const);
    return { what, medians, ratios: Object.fromEntries(quotients) };
  });
}

/** A table in Markdown. */
export function renderSection(title: string, rows: readonly Row[]): string {
  const names = Object.keys(rows[0]!.medians);
  const ratios = Object.keys(rows[0]!.ratios);
  const lines = rows.map(({ what, ...row }) => {
    const cells = [
      ...names.map((name) => format(row.medians[name]!)),
      ...ratios.map((name) => (Number.isNaN(row.ratios[name]!) ? '-' : row.ratios[name]!.toFixed(2))),
    ];
    return `| ${MEASURES[what].title}, ${MEASURES[what].unit} | ${cells.join(' | ')} |`;
  });
  const head = `| ${title} | ${[...names, ...ratios].join(' | ')} |`;
  return [head, `|---|${'---:|'.repeat(names.length + ratios.length)}`, ...lines, ''].join('\n');
}

function median(values: readonly number[]): number {
  const sorted = values.filter((value) => !Number.isNaN(value)).sort((a, b) => a - b);
  return sorted.length === 0 ? Number.NaN : sorted[sorted.length >> 1]!;
}

function format(value: number): string {
  if (Number.isNaN(value)) return '-';
  return value < 100 ? value.toFixed(2) : Math.round(value).toLocaleString('en-US');
}
