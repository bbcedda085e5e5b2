import { setImmediate, setTimeout } from 'node:timers/promises';
import { type Context, Hono } from 'hono';
import { bodyLimit } from 'hono/body-limit';
import { WeirError } from '../base/errors.js';
import { FLOW_FORMATS, type FlowFormat } from '../control/flow-formats.js';
import type { FlowFilter } from '../control/flows.js';
import { HISTORY_LINES } from '../control/log-history.js';
import { RefusedConfig } from '../control/reloader.js';
import type { ErrorView, RunningWeir, Watch } from '../control/view.js';
import { createMetrics } from './metrics.js';
import { Pace } from './pace.js';

/** Where no body matters. */
const MAX_BODY_BYTES = 64 * 1024;

const LINES_TYPE = 'application/x-ndjson';

interface Route {
  readonly method: 'GET' | 'POST';
  readonly path: string;
  /** Served on the TCP listener too. */
  readonly isPublic: boolean;
  /** Its body is read as it comes, however long it is. */
  readonly takesBody?: true;
  answer(context: Context, weir: RunningWeir): Response | Promise<Response>;
}

/** The whole API; the types of its answers are in control/view.ts. */
const ROUTES: readonly Route[] = [
  { method: 'GET', path: '/healthz', isPublic: true, answer: (context) => context.json({ status: 'ok' }) },
  { method: 'GET', path: '/v1/status', isPublic: true, answer: (context, weir) => context.json(weir.status()) },
  { method: 'GET', path: '/v1/services', isPublic: false, answer: (context, weir) => context.json(weir.services()) },
  { method: 'GET', path: '/v1/ct', isPublic: false, answer: listFlows },
  { method: 'GET', path: '/v1/ct/watch', isPublic: false, answer: watchFlows },
  { method: 'GET', path: '/v1/ct/stats', isPublic: false, answer: (context, weir) => context.json(weir.conntrack()) },
  { method: 'GET', path: '/v1/ct/export', isPublic: false, answer: exportFlows },
  { method: 'GET', path: '/v1/capture', isPublic: false, answer: capture },
  { method: 'GET', path: '/v1/events', isPublic: false, answer: listEvents },
  { method: 'POST', path: '/v1/ct/import', isPublic: false, takesBody: true, answer: importFlows },
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
      answer: (context) =>
        context.body(ReadableStream.from(paced(metrics.scrape(), weir)), 200, { 'content-type': metrics.contentType }),
    },
  ];
  const app = new Hono();
  const limit = bodyLimit({
    maxSize: MAX_BODY_BYTES,
    onError: (context) => refuse(context, 413, `the body is larger than ${MAX_BODY_BYTES} bytes`, 'Send none.'),
  });
  for (const { method, path, takesBody, answer } of routes) {
    if (!takesBody) app.use(path, limit);
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
  requireFormat(format, FLOW_FORMATS);
  const chunks = weir.listFlows(filter, format as FlowFormat);
  return context.body(ReadableStream.from(paced(chunks, weir)), 200, {
    'content-type': format === 'json' ? 'application/json' : 'text/plain; charset=utf-8',
  });
}

/** A line of JSON for each event, until one side ends it. Nothing is watched before the body is read: not for a HEAD. */
function watchFlows(context: Context, weir: RunningWeir): Response {
  const { format = 'json', ...filter } = queryOf(context, [...FILTER_KEYS, 'format']);
  requireFormat(format, ['json']);
  return streamLines(context, weir.watch(filter));
}

/** A pcapng file that grows, until it has what was asked for or its reader goes. */
function capture(context: Context, weir: RunningWeir): Response {
  const { count, seconds, snaplen, ...filter } = queryOf(context, CAPTURE_KEYS);
  const capture = weir.capture({
    ...filter,
    ...numberOf('count', count, 1),
    ...numberOf('seconds', seconds, 1),
    ...(snaplen === undefined ? {} : { snapBytes: numberOf('snaplen', snaplen, MIN_SNAP_BYTES).snaplen! }),
  });
  const body = new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        const bytes = await capture.next();
        if (bytes === null) controller.close();
        else controller.enqueue(bytes);
      },
      cancel: () => capture.close(),
    },
    { highWaterMark: 0 },
  );
  return context.body(body, 200, { 'content-type': 'application/x-pcapng' });
}

/** Lines of the log: the last ones, and with `follow` those to come, until one side ends it. */
function listEvents(context: Context, weir: RunningWeir): Response {
  const { count = String(HISTORY_LINES), follow = 'false' } = queryOf(context, ['count', 'follow']);
  const lines = numberOf('count', count, 0).count!;
  if (follow === 'true') return streamLines(context, weir.followLog(lines));
  if (follow !== 'false') throw new WeirError('USAGE', `follow is "${follow}"`, 'It is true or false.');
  return context.body(weir.logged(lines).join(''), 200, { 'content-type': LINES_TYPE });
}

function streamLines(context: Context, watch: Watch): Response {
  const encoder = new TextEncoder();
  const body = new ReadableStream<Uint8Array>(
    {
      pull: async (controller) => controller.enqueue(encoder.encode(await watch.next())),
      cancel: () => watch.close(),
    },
    { highWaterMark: 0 },
  );
  return context.body(body, 200, { 'content-type': LINES_TYPE });
}

function exportFlows(context: Context, weir: RunningWeir): Response {
  const chunks = weir.exportFlows(queryOf(context, FILTER_KEYS));
  return context.body(ReadableStream.from(paced(chunks, weir)), 200, { 'content-type': LINES_TYPE });
}

async function importFlows(context: Context, weir: RunningWeir): Promise<Response> {
  queryOf(context, []);
  // A refusal must reach a sender that is not done: to cancel the body would cut the connection.
  const body = context.req.raw.body?.values({ preventCancel: true });
  return context.json(await weir.importFlows(body ?? empty()));
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

const CAPTURE_KEYS = ['service', 'backend', 'client', 'count', 'seconds', 'snaplen'] as const;

/** An IPv4 header, and the ports. */
const MIN_SNAP_BYTES = 24;

/** A slip in a parameter's name must not list, or flush, everything. */
function queryOf<Key extends string>(context: Context, known: readonly Key[]): { [K in Key]?: string } {
  const query = context.req.query();
  for (const key of Object.keys(query)) {
    if (known.includes(key as Key)) continue;
    throw new WeirError('USAGE', `there is no parameter "${key}"`, `There are ${known.join(', ') || 'none'}.`);
  }
  return query as { [K in Key]?: string };
}

/** A parameter that is a whole number, if it is there. */
function numberOf<Key extends string>(key: Key, text: string | undefined, least: number): { [K in Key]?: number } {
  if (text === undefined) return {};
  if (/^\d{1,9}$/.test(text) && Number(text) >= least) return { [key]: Number(text) } as { [K in Key]: number };
  throw new WeirError('USAGE', `${key} "${text}" is no number from ${least} on`, 'Correct it.');
}

function requireFormat(format: string, known: readonly string[]): void {
  if (known.includes(format)) return;
  throw new WeirError('USAGE', `there is no format "${format}"`, `There are ${known.join(', ')}.`);
}

/** One chunk each time the reader wants one, everything else had its turn, and the packets have theirs. */
async function* paced(chunks: Iterable<string> | AsyncIterable<string>, weir: RunningWeir): AsyncGenerator<Uint8Array> {
  const encoder = new TextEncoder();
  const pace = new Pace(performance.now(), weir.packetsRead());
  for await (const chunk of chunks) {
    if (chunk !== '') yield encoder.encode(chunk);
    const restMs = pace.restMs(performance.now(), weir.packetsRead());
    await (restMs > 0 ? setTimeout(restMs) : setImmediate());
  }
}

async function* empty(): AsyncGenerator<Uint8Array> {}

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
