import { plural } from '../control/summary.js';
import type { FlowEventView, LostView } from '../control/view.js';
import { callLines, untilStopped } from './lines.js';
import { print } from './output.js';
import { renderEvent, renderEventHead } from './render.js';
import { type FilterOptions, filterOf } from './running.js';

export interface WatchOptions extends FilterOptions {
  readonly output: 'table' | 'json';
  /** How many events to print. */
  readonly count?: number;
}

/**
 * Prints events as they happen, until `count` of them, a signal, or the end of the weir that is watched.
 *
 * @throws WeirError NOT_RUNNING when weir ends, and as callStream does
 */
export async function ctWatch({ output, count = Number.POSITIVE_INFINITY, ...options }: WatchOptions): Promise<void> {
  let left = count;
  await untilStopped((signal, stop) => {
    const call = {
      socket: options.socket,
      path: '/v1/ct/watch',
      query: filterOf(options),
      signal,
      accepted: () => (output === 'table' ? print(renderEventHead()) : undefined),
    };
    return callLines(call, async (line) => {
      if (left === 0) return;
      const event = JSON.parse(line) as FlowEventView | LostView;
      if (output === 'json') await print(`${line}\n`);
      else await show(event);
      if (event.event !== 'lost' && --left === 0) stop();
    });
  });
}

async function show(event: FlowEventView | LostView): Promise<void> {
  if (event.event !== 'lost') await print(renderEvent(event));
  else console.error(`weir: ${plural(event.count, 'event')} lost, having come faster than they were taken.`);
}
