import { WeirError } from '../base/errors.js';
import { type Call, callStream } from './client.js';

/** Hands over an answer's lines, without their ends, one after the other. @throws as callStream */
export async function callLines(call: Call, onLine: (line: string) => void | Promise<void>): Promise<void> {
  let rest = '';
  const decoder = new TextDecoder();
  await callStream(call, async (chunk) => {
    const lines = (rest + decoder.decode(chunk, { stream: true })).split('\n');
    rest = lines.pop()!;
    for (const line of lines) await onLine(line);
  });
}

const SIGNALS = ['SIGINT', 'SIGTERM'] as const;

/**
 * Runs what lasts until somebody ends it: a signal to this process, or `stop`. That is no failure.
 *
 * @param follow to be cut short by `signal`; where it returns, the other side has ended, which is one
 * @throws WeirError NOT_RUNNING then, and what `follow` throws by itself
 */
export async function untilStopped(follow: (signal: AbortSignal, stop: () => void) => Promise<void>): Promise<void> {
  const end = new AbortController();
  const stop = (): void => end.abort();
  for (const signal of SIGNALS) process.once(signal, stop);
  try {
    await follow(end.signal, stop);
    if (!end.signal.aborted) throw new WeirError('NOT_RUNNING', 'weir has ended', 'See its log.');
  } catch (error) {
    if (!end.signal.aborted) throw error;
  } finally {
    for (const signal of SIGNALS) process.off(signal, stop);
  }
}
