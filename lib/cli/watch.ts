import { WeirError } from '../base/errors.js';
import { plural } from '../control/summary.js';
import type { FlowEventView, LostView } from '../control/view.js';
import { callStream } from './client.js';
import { print } from './output.js';
import { renderEvent, renderEventHead } from './render.js';
import { type FilterOptions, filterOf } from './running.js';

export interface WatchOptions extends FilterOptions {
  readonly output: 'table' | 'json';
  /** How many events to print. */
  readonly count?: number;
}

const SIGNALS = ['SIGINT', 'SIGTERM'] as const;

/**
 * Prints events as they happen, until `count` of them, a signal, or the end of the weir that is watched.
 *
 * @throws WeirError NOT_RUNNING when weir ends, and as callStream does
 */
export async function ctWatch({ output, count = Number.POSITIVE_INFINITY, ...options }: WatchOptions): Promise<void> {
  const end = new AbortController();
  const stop = (): void => end.abort();
  for (const signal of SIGNALS) process.once(signal, stop);
  const call = {
    socket: options.socket,
    path: '/v1/ct/watch',
    query: filterOf(options),
    signal: end.signal,
    accepted: () => (output === 'table' ? print(renderEventHead()) : undefined),
  };
  let left = count;
  let rest = '';
  const decoder = new TextDecoder();
  try {
    await callStream(call, async (chunk) => {
      const lines = (rest + decoder.decode(chunk, { stream: true })).split('\n');
      rest = lines.pop()!;
      for (const line of lines) {
        const event = JSON.parse(line) as FlowEventView | LostView;
        if (output === 'json') await print(`${line}\n`);
        else await show(event);
        if (event.event !== 'lost' && --left === 0) return stop();
      }
    });
    throw new WeirError('NOT_RUNNING', 'weir has ended', 'See its log.');
  } catch (error) {
    if (!end.signal.aborted) throw error;
  } finally {
    for (const signal of SIGNALS) process.off(signal, stop);
  }
}

async function show(event: FlowEventView | LostView): Promise<void> {
  if (event.event !== 'lost') await print(renderEvent(event));
  else console.error(`weir: ${plural(event.count, 'event')} lost, having come faster than they were taken.`);
}
