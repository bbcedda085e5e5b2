import { plural } from '../control/summary.js';
import type { LogLineView, LostView } from '../control/view.js';
import { callLines, untilStopped } from './lines.js';
import { print } from './output.js';
import { renderLogLine } from './render.js';
import type { SocketOptions } from './running.js';

export interface EventsOptions extends SocketOptions {
  readonly output: 'table' | 'json';
  readonly follow?: boolean;
  /** How many of the last lines to begin with. */
  readonly count?: number;
}

/** Prints what a running weir logged lately; with `follow` also what it logs from now on, until a signal or its end. */
export async function events({ socket, output, follow = false, count }: EventsOptions): Promise<void> {
  const query = { count: count === undefined ? undefined : String(count), follow: follow ? 'true' : undefined };
  const show = async (line: string): Promise<void> => {
    const view = JSON.parse(line) as LogLineView | LostView;
    if (output === 'json') await print(`${line}\n`);
    else if ('level' in view) await print(renderLogLine(view));
    else console.error(`weir: ${plural(view.count, 'line')} lost, having come faster than they were taken.`);
  };
  const call = { socket, path: '/v1/events', query };
  if (follow) await untilStopped((signal) => callLines({ ...call, signal }, show));
  else await callLines(call, show);
}
