import { WeirError } from '../base/errors.js';
import { requireConfig } from '../config/load.js';
import type { ExplainView, OutcomeView, SentView, StepView } from '../control/explain/explain-view.js';
import type { ExplainQuery } from '../control/explain/request.js';
import { plural } from '../control/summary.js';
import { callJson } from './client.js';
import { print, printJson } from './output.js';
import { renderTable } from './render.js';
import type { SocketOptions } from './running.js';

export interface ExplainOptions extends SocketOptions {
  /** Instead of a running weir: what one would do that has just begun with this file. */
  readonly config?: string;
  readonly packet?: string;
  readonly flags?: string;
  readonly without: readonly string[];
  readonly assumeDown: readonly string[];
  readonly output: 'table' | 'json';
}

/** `weir explain`. @param ends protocol, source and destination */
export async function explain(
  ends: readonly (string | undefined)[],
  { socket, config, output, packet, flags, without, assumeDown }: ExplainOptions,
): Promise<void> {
  const [proto, src, dst] = ends;
  if (packet === undefined && dst === undefined) {
    throw new WeirError('USAGE', 'nothing says which packet', 'Give PROTO SRC:PORT DST:PORT, or --packet HEX.');
  }
  const query = defined({ proto, src, dst, flags, packet: packet?.replace(/\s/g, ''), without, assumeDown });
  const view =
    config === undefined
      ? await callJson<ExplainView>({ socket, path: '/v1/explain', query: { ...query } })
      : await explainFile(config, query);
  await (output === 'json' ? printJson(view) : print(renderExplain(view)));
}

async function explainFile(path: string, query: ExplainQuery): Promise<ExplainView> {
  const config = requireConfig(path);
  const [{ explain }, { sceneOfFile }] = await Promise.all([
    import('../control/explain/explain.js'),
    import('../control/explain/scene.js'),
  ]);
  return explain(query, sceneOfFile(config), { path, version: null });
}

/** What is undefined is left out. */
function defined<T extends object>(fields: T): { [K in keyof T]?: Exclude<T[K], undefined> } {
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined)) as never;
}

export function renderExplain({ config, assumed, packet, steps, outcomes, untried }: ExplainView): string {
  const where =
    config.version === null
      ? `${config.path}, with an empty table`
      : `${config.path}, in use as version ${config.version}`;
  const lines = [
    line('packet', packet.text),
    line('by', where),
    ...assumed.map((each) => line('assumed', each)),
    ...steps.flatMap(stepLines),
  ];
  const [only] = outcomes;
  if (outcomes.length === 1) return [...lines, ...only!.steps.flatMap(stepLines), ...endLines(only!)].join('');
  return `${lines.join('')}\n${renderOutcomes(outcomes, untried)}`;
}

function stepLines({ step, text, notes }: StepView): string[] {
  return [line(step, text), ...notes.map((note) => line('', note))];
}

/** How it ends. */
function endLines(outcome: OutcomeView): string[] {
  const { meaning, portDrawn, out } = outcome;
  return [
    line('verdict', sayVerdict(outcome)),
    ...(meaning === null ? [] : [line('', meaning)]),
    ...(portDrawn ? [line('', 'the source port is one that was drawn: another packet gets another')] : []),
    ...out.flatMap(sentLines),
  ];
}

function sayVerdict({ verdict, reason, service, backend }: OutcomeView): string {
  const whose = service === null ? '' : ` ${service}${backend === null ? '' : `/${backend}`}`;
  return reason === null ? `${verdict}${whose}` : `${verdict} ${reason}${whose}`;
}

function sentLines({ text, route }: SentView): string[] {
  return [line('out', text), ...(route === null ? [] : [line('route', route === '' ? 'ip says nothing' : route)])];
}

function renderOutcomes(outcomes: readonly OutcomeView[], untried: number): string {
  const rows = outcomes.map((outcome) => [
    `${Number((outcome.probability * 100).toPrecision(4))} %`,
    outcome.backend ?? '-',
    outcome.verdict,
    outcome.reason ?? '-',
    outcome.out[0]?.text ?? '-',
    outcome.out[0]?.route ?? '-',
  ]);
  const table = renderTable(['CHANCE', 'BACKEND', 'VERDICT', 'REASON', 'OUT', 'ROUTE'], rows);
  const more = untried > 0 ? `and ${plural(untried, 'more backend')}\n` : '';
  const isDrawn = outcomes.some(({ portDrawn }) => portDrawn);
  const ports = isDrawn ? 'source ports are drawn, too: another packet gets another\n' : '';
  const others = outcomes.filter(({ verdict }) => verdict !== 'forward');
  const why = others.flatMap((outcome) => [
    `\n${outcome.backend ?? 'no backend'}:\n`,
    ...outcome.steps.flatMap(stepLines),
    ...endLines(outcome),
  ]);
  return table + more + ports + why.join('');
}

function line(name: string, text: string): string {
  return `${name.padEnd(14)} ${text}\n`;
}
