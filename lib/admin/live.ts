import { setTimeout } from 'node:timers/promises';
import type { Context } from 'hono';
import type { LiveWatch } from '../control/live/live-view.js';

/** After which a comment shows that the connection still stands: on the way, some cut what is silent. */
const HEARTBEAT_MS = 10_000;

/** A browser that lost the connection tries again after so long. */
const RETRY_MS = 1000;

/**
 * Views as server-sent events (WHATWG HTML, section 9.2), until one side ends it. The reader's pace is the watch's: the next view is asked for
 * once this one is on its way. One that has stopped reading costs nothing more, and finds the end of the stream if it goes on.
 */
export function streamLive(context: Context, watch: LiveWatch): Response {
  const encoder = new TextEncoder();
  let next: Promise<string | null> | undefined;
  const body = new ReadableStream<Uint8Array>(
    {
      start: (controller) => controller.enqueue(encoder.encode(`retry: ${RETRY_MS}\n\n`)),
      async pull(controller) {
        next ??= watch.next();
        const heartbeat = new AbortController();
        const silence = setTimeout(HEARTBEAT_MS, undefined, { signal: heartbeat.signal, ref: false }).catch(
          () => undefined,
        );
        const view = await Promise.race([next, silence]);
        heartbeat.abort();
        if (view === undefined) {
          controller.enqueue(encoder.encode(':\n\n'));
          return;
        }
        next = undefined;
        if (view === null) controller.close();
        else controller.enqueue(encoder.encode(`data: ${view}\n\n`));
      },
      cancel: () => watch.close(),
    },
    { highWaterMark: 0 },
  );
  return context.body(body, 200, {
    'content-type': 'text/event-stream',
    'cache-control': 'no-store',
    'x-accel-buffering': 'no',
  });
}
