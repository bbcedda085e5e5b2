import { setImmediate } from 'node:timers/promises';
import { type Context, Hono } from 'hono';
import { bodyLimit } from 'hono/body-limit';
import { WeirError } from '../base/errors.js';
import { FLOW_FORMATS, type FlowFormat } from '../control/flow-formats.js';
import type { FlowFilter } from '../control/flows.js';
import { RefusedConfig } from '../control/reloader.js';
import type { ErrorView, RunningWeir } from '../control/view.js';
import { createMetrics } from './metrics.js';

/** No request has a body that matters. */
const MAX_BODY_BYTES = 64 * 1024;

interface Route {
  readonly method: 'GET' | 'POST';
  readonly path: string;
  /** Served on the TCP listener too. */
  readonly isPublic: boolean;
  answer(context: Context, weir: RunningWeir): Response | Promise<Response>;
}

/** The whole API; the types of its answers are in control/view.ts. */
const ROUTES: readonly Route[] = [
  { method: 'GET', path: '/healthz', isPublic: true, answer: (context) => context.json({ status: 'ok' }) },
  { method: 'GET', path: '/v1/status', isPublic: true, answer: (context, weir) => context.json(weir.status()) },
  { method: 'GET', path: '/v1/services', isPublic: false, answer: (context, weir) => context.json(weir.services()) },
  { method: 'GET', path: '/v1/ct', isPublic: false, answer: listFlows },
  { method: 'GET', path: '/v1/ct/stats', isPublic: false, answer: (context, weir) => context.json(weir.conntrack()) },
  { method: 'POST', path: '/v1/ct/flush', isPublic: false, answer: flushFlows },
  { method: 'POST', path: '/v1/drain', isPublic: false, answer: (context, weir) => setDrained(context, weir, true) },
  { method: 'POST', path: '/v1/undrain', isPublic: false, answer: (context, weir) => setDrained(context, weir, false) },
  { method: 'POST', path: '/v1/reload', isPublic: false, answer: reload },
];

/** @param only `public`: the part that reads and may be seen by anybody who reaches the port */
export function createApp(weir: RunningWeir, only: 'all' | 'public'): Hono {
  const metrics = createMetrics(weir);
  const routes: Route[] = [
    ...ROUTES.filter(({ isPublic }) => isPublic || only === 'all'),
    {
      method: 'GET',
      path: '/metrics',
      isPublic: true,
      answer: async (context) => context.body(await metrics.scrape(), 200, { 'content-type': metrics.contentType }),
    },
  ];
  const app = new Hono();
  app.use(
    bodyLimit({
      maxSize: MAX_BODY_BYTES,
      onError: (context) => refuse(context, 413, `the body is larger than ${MAX_BODY_BYTES} bytes`, 'Send none.'),
    }),
  );
  for (const { method, path, answer } of routes) {
    app.on(method, path, (context) => answer(context, weir));
    app.all(path, (context) => {
      context.header('allow', method === 'GET' ? 'GET, HEAD' : method);
      return refuse(context, 405, `${path} does not take ${context.req.method}`, `Use ${method}.`);
    });
  }
  app.notFound((context) =>
    refuse(context, 404, `there is no ${context.req.path}`, `There are ${routes.map(({ path }) => path).join(', ')}.`),
  );
  app.onError((error, context) => answerError(context, error));
  return app;
}

function listFlows(context: Context, weir: RunningWeir): Response {
  const { format = 'json', ...filter } = queryOf(context, [...FILTER_KEYS, 'format']);
  if (!FLOW_FORMATS.includes(format as FlowFormat)) {
    throw new WeirError('USAGE', `there is no format "${format}"`, `There are ${FLOW_FORMATS.join(', ')}.`);
  }
  const chunks = weir.listFlows(filter, format as FlowFormat);
  return context.body(ReadableStream.from(paced(chunks)), 200, {
    'content-type': format === 'json' ? 'application/json' : 'text/plain; charset=utf-8',
  });
}

async function flushFlows(context: Context, weir: RunningWeir): Promise<Response> {
  return context.json(await weir.flush(queryOf(context, FILTER_KEYS)));
}

async function setDrained(context: Context, weir: RunningWeir, isDrained: boolean): Promise<Response> {
  const { service, backend } = queryOf(context, ['service', 'backend']);
  if (!service || !backend) throw new WeirError('USAGE', 'a parameter is missing', 'Give service and backend.');
  return context.json(await weir.setDrained(service, backend, isDrained));
}

async function reload(context: Context, weir: RunningWeir): Promise<Response> {
  return context.json(await weir.reload());
}

const FILTER_KEYS = ['service', 'backend', 'client', 'state'] as const satisfies readonly (keyof FlowFilter)[];

/** A slip in a parameter's name must not list, or flush, everything. */
function queryOf<Key extends string>(context: Context, known: readonly Key[]): { [K in Key]?: string } {
  const query = context.req.query();
  for (const key of Object.keys(query)) {
    if (known.includes(key as Key)) continue;
    throw new WeirError('USAGE', `there is no parameter "${key}"`, `There are ${known.join(', ')}.`);
  }
  return query as { [K in Key]?: string };
}

/** One chunk each time the reader wants one and everything else had its turn. */
async function* paced(chunks: Iterable<string>): AsyncGenerator<Uint8Array> {
  const encoder = new TextEncoder();
  for (const chunk of chunks) {
    yield encoder.encode(chunk);
    await setImmediate();
  }
}

function answerError(context: Context, error: Error): Response {
  if (!(error instanceof WeirError)) {
    return context.json({ code: 'INTERNAL', message: error.message, remedy: 'This is a bug in weir.' }, 500);
  }
  const { code, message, remedy } = error;
  const view: ErrorView = {
    code,
    message,
    remedy,
    ...(error instanceof RefusedConfig ? { problems: error.problems } : {}),
  };
  return context.json(view, code === 'USAGE' ? 400 : code === 'NOT_RUNNING' ? 503 : 422);
}

function refuse(context: Context, status: 404 | 405 | 413, message: string, remedy: string): Response {
  return context.json({ code: 'USAGE', message, remedy } satisfies ErrorView, status);
}
