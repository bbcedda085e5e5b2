import type { Context, MiddlewareHandler } from 'hono';
import type { ErrorView } from '../control/view.js';

/** What stands in front of the dashboard on a port that anybody may reach. */

export function refuse(
  context: Context,
  status: 403 | 404 | 405 | 413 | 503,
  message: string,
  remedy: string,
): Response {
  return context.json({ code: 'USAGE', message, remedy } satisfies ErrorView, status);
}

/**
 * Answers only to whoever names weir by an address or as this host. A page whose own name was made to lead here ("DNS rebinding") is to its
 * browser of one origin with weir, and might read the answers; but it is that name which it asks for. Nor may the pages of others set
 * weir to work, though they could not read what comes of it.
 */
export const refuseStrangers: MiddlewareHandler = async (context, next) => {
  const isOthers = context.req.header('sec-fetch-site') === 'cross-site' && context.req.path.startsWith('/v1/');
  const host = context.req.header('host') ?? '';
  if (isOthers) return refuse(context, 403, `the page of somebody else may not ask for ${context.req.path}`, ALLOWED);
  if (namesThisHost(host)) return next();
  const message = `${context.req.path} answers only to an address or localhost as host, not to "${host}"`;
  return refuse(context, 403, message, ALLOWED);
};

const ALLOWED =
  'Open http://ADDRESS:PORT or http://localhost:PORT; a proxy in front has to send such a host. /healthz, /metrics and /v1/status ' +
  'answer whoever asks, and the UNIX socket (admin.socket) everything: curl --unix-socket PATH http://weir/v1/...';

function namesThisHost(host: string): boolean {
  return /^(\d+\.\d+\.\d+\.\d+|\[[0-9a-fA-F:.]+\]|([\w-]+\.)*localhost)(:\d+)?$/.test(host);
}

/** Whoever comes while `limit` answers are being written is told to come again. */
export function limitAtOnce(limit: number): MiddlewareHandler {
  let open = 0;
  return async (context, next) => {
    if (open >= limit) {
      context.header('retry-after', '1');
      return refuse(context, 503, `${limit} requests of this kind are being answered`, 'Try again in a second.');
    }
    open++;
    let isOver = false;
    const end = (): void => {
      if (!isOver) open--;
      isOver = true;
    };
    try {
      await next();
    } catch (error) {
      end();
      throw error;
    }
    const { body, status, headers } = context.res;
    if (body === null || context.req.method === 'HEAD') end();
    else context.res = new Response(andThen(body, end), { status, headers });
    return undefined;
  };
}

/** The same stream, and `end` once it is over, whichever way. */
function andThen(body: ReadableStream<Uint8Array>, end: () => void): ReadableStream<Uint8Array> {
  const reader = body.getReader();
  return new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        const { done, value } = await reader.read().catch((error) => {
          end();
          throw error;
        });
        if (!done) return controller.enqueue(value);
        end();
        controller.close();
      },
      cancel(reason) {
        end();
        return reader.cancel(reason);
      },
    },
    { highWaterMark: 0 },
  );
}
