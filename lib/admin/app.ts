import { type Context, Hono, type MiddlewareHandler } from 'hono';
import { bodyLimit } from 'hono/body-limit';
import { WeirError } from '../base/errors.js';
import { MAX_CONFIG_BYTES } from '../base/limits.js';
import { FLOW_FORMATS, type FlowFormat } from '../control/flow-formats.js';
import type { FlowFilter } from '../control/flows.js';
import { HISTORY_LINES } from '../control/log-history.js';
import { Pace, pause } from '../control/pace.js';
import { RefusedConfig } from '../control/reloader.js';
import type { ErrorView, RunningWeir, Watch } from '../control/view.js';
import { answerFile, dashboardFiles } from './dashboard.js';
import { limitAtOnce, refuse, refuseStrangers } from './guards.js';
import { streamLive } from './live.js';
import { createMetrics, type Metrics } from './metrics.js';

/** Where no body matters. */
const MAX_BODY_BYTES = 64 * 1024;

/** What is listed at once on the TCP listener, and how many requests of the dashboard that are some work it answers at a time. */
const PUBLIC_FLOWS = 500;
const PUBLIC_AT_ONCE = 4;

const LINES_TYPE = 'application/x-ndjson';

export interface Route {
  readonly method: 'GET' | 'POST';
  readonly path: string;
  /** Served on the TCP listener too; `dashboard`: if that has the dashboard. */
  readonly isPublic?: true | 'dashboard';
  /** MAX_BODY_BYTES when absent; Infinity: it is read as it comes. */
  readonly maxBodyBytes?: number;
  /** The query it understands; others are refused. */
  readonly parameters: readonly string[];
  answer(context: Context, weir: RunningWeir, metrics: Metrics, scope: Scope): Response | Promise<Response>;
}

/**
 * `all`: for whoever may do everything. The others are for anybody who reaches the port: `dashboard` and its data, or what else is public
 * alone.
 */
export type Scope = 'all' | 'dashboard' | 'public';

const FILTER_KEYS = ['service', 'backend', 'client', 'state'] as const satisfies readonly (keyof FlowFilter)[];
const WATCH_KEYS = [...FILTER_KEYS, 'format'] as const;
const LIST_KEYS = [...WATCH_KEYS, 'limit'] as const;
const CAPTURE_KEYS = ['service', 'backend', 'client', 'count', 'seconds', 'snaplen'] as const;
const EVENTS_KEYS = ['count', 'follow'] as const;
const EXPLAIN_KEYS = ['proto', 'src', 'dst', 'flags', 'packet', 'without', 'assumeDown'] as const;
const PLAN_KEYS = ['name'] as const;
const BACKEND_KEYS = ['service', 'backend'] as const;

/** The whole API, as docs/api.md explains it; the types of its answers are in control/view.ts. */
export const ROUTES: readonly Route[] = [
  get('/healthz', [], (context) => context.json({ status: 'ok' }), true),
  get('/metrics', [], scrape, true),
  get('/v1/status', [], async (context, weir) => context.json(await weir.status()), true),
  get('/v1/live', [], (context, weir) => streamLive(context, weir.live()), 'dashboard'),
  get('/v1/services', [], async (context, weir) => context.json(await weir.services())),
  get('/v1/ct', LIST_KEYS, listFlows, 'dashboard'),
  get('/v1/ct/watch', WATCH_KEYS, watchFlows),
  get('/v1/ct/stats', [], async (context, weir) => context.json(await weir.conntrack())),
  get('/v1/ct/export', FILTER_KEYS, exportFlows),
  get('/v1/capture', CAPTURE_KEYS, capture),
  get('/v1/events', EVENTS_KEYS, listEvents),
  { ...post('/v1/ct/import', [], importFlows), maxBodyBytes: Number.POSITIVE_INFINITY },
  post('/v1/ct/flush', FILTER_KEYS, flushFlows),
  post('/v1/drain', BACKEND_KEYS, (context, weir) => setDrained(context, weir, true)),
  post('/v1/undrain', BACKEND_KEYS, (context, weir) => setDrained(context, weir, false)),
  get('/v1/explain', EXPLAIN_KEYS, explain, 'dashboard'),
  { ...post('/v1/plan', PLAN_KEYS, plan), maxBodyBytes: MAX_CONFIG_BYTES },
  post('/v1/reload', [], reload),
];

function get(
  path: string,
  parameters: Route['parameters'],
  answer: Route['answer'],
  isPublic?: Route['isPublic'],
): Route {
  return { method: 'GET', path, parameters, answer, ...(isPublic === undefined ? {} : { isPublic }) };
}

function post(path: string, parameters: Route['parameters'], answer: Route['answer']): Route {
  return { method: 'POST', path, parameters, answer };
}

export function createApp(weir: RunningWeir, scope: Scope): Hono {
  const metrics = createMetrics(weir);
  const routes = ROUTES.filter(({ isPublic }) => isIn(scope, isPublic));
  const app = new Hono();
  if (scope === 'dashboard') serveDashboard(app);
  for (const { method, path, maxBodyBytes = MAX_BODY_BYTES, parameters, isPublic, answer } of routes) {
    if (maxBodyBytes !== Number.POSITIVE_INFINITY) app.use(path, limitTo(maxBodyBytes));
    app.on(method, path, (context) => {
      // Whoever probes or scrapes may have parameters of its own.
      if (isPublic !== true) requireKnown(context, parameters);
      return answer(context, weir, metrics, scope);
    });
    app.all(path, (context) => {
      context.header('allow', method === 'GET' ? 'GET, HEAD' : method);
      return refuse(context, 405, `${path} does not take ${context.req.method}`, `Use ${method}.`);
    });
  }
  app.notFound((context) => {
    const { path } = context.req;
    const here = `here are ${routes.map((each) => each.path).join(', ')}.`;
    if (!ROUTES.some((each) => each.path === path))
      return refuse(context, 404, `there is no ${path}`, `H${here.slice(1)}`);
    const remedy = `Ask the UNIX socket (admin.socket): curl --unix-socket PATH http://weir${path}; ${here}`;
    return refuse(context, 404, `${path} is not served on admin.listen`, remedy);
  });
  app.onError((error, context) => answerError(context, error));
  return app;
}

function isIn(scope: Scope, isPublic: Route['isPublic']): boolean {
  return scope === 'all' || isPublic === true || (scope === 'dashboard' && isPublic === 'dashboard');
}

/** The page, and what keeps its data from the pages of others, and its readers from asking for too much. */
function serveDashboard(app: Hono): void {
  const files = dashboardFiles().map((name) => ({ path: name === 'index.html' ? '/' : `/${name}`, name }));
  const data = ROUTES.filter(({ isPublic }) => isPublic === 'dashboard').map(({ path }) => path);
  for (const path of [...data, ...files.map(({ path }) => path)]) app.use(path, refuseStrangers);
  const atOnce = limitAtOnce(PUBLIC_AT_ONCE);
  for (const path of data) if (path !== '/v1/live') app.use(path, atOnce);
  for (const { path, name } of files) app.get(path, (context) => answerFile(context, name));
}

function limitTo(bytes: number): MiddlewareHandler {
  const message = `the body is larger than ${bytes} bytes`;
  const remedy = bytes === MAX_BODY_BYTES ? 'Send none.' : 'Send a configuration.';
  return bodyLimit({ maxSize: bytes, onError: (context) => refuse(context, 413, message, remedy) });
}

function scrape(context: Context, weir: RunningWeir, metrics: Metrics): Response {
  const text = ReadableStream.from(paced(metrics.scrape(), weir));
  return context.body(text, 200, { 'content-type': metrics.contentType });
}

function listFlows(context: Context, weir: RunningWeir, _: Metrics, scope: Scope): Response {
  const { format = 'json', limit: limitText, ...filter } = queryOf(context, LIST_KEYS);
  requireFormat(format, FLOW_FORMATS);
  const { limit } = numberOf('limit', limitText, 1);
  const most = scope === 'all' ? limit : Math.min(limit ?? PUBLIC_FLOWS, PUBLIC_FLOWS);
  const chunks = weir.listFlows(filter, format as FlowFormat, most);
  return context.body(ReadableStream.from(paced(chunks, weir)), 200, {
    'content-type': format === 'json' ? 'application/json' : 'text/plain; charset=utf-8',
  });
}

/** A line of JSON for each event, until one side ends it. Nothing is watched before the body is read: not for a HEAD. */
function watchFlows(context: Context, weir: RunningWeir): Response {
  const { format = 'json', ...filter } = queryOf(context, WATCH_KEYS);
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
  const { count = String(HISTORY_LINES), follow = 'false' } = queryOf(context, EVENTS_KEYS);
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
  // A refusal must reach a sender that is not done: to cancel the body would cut the connection.
  const body = context.req.raw.body?.values({ preventCancel: true });
  return context.json(await weir.importFlows(body ?? empty()));
}

async function flushFlows(context: Context, weir: RunningWeir): Promise<Response> {
  return context.json(await weir.flush(queryOf(context, FILTER_KEYS)));
}

async function setDrained(context: Context, weir: RunningWeir, isDrained: boolean): Promise<Response> {
  const { service, backend } = queryOf(context, BACKEND_KEYS);
  if (!service || !backend) throw new WeirError('USAGE', 'a parameter is missing', 'Give service and backend.');
  return context.json(await weir.setDrained(service, backend, isDrained));
}

/** `without` and `assumeDown` may be there more than once. */
async function explain(context: Context, weir: RunningWeir): Promise<Response> {
  const query = queryOf(context, EXPLAIN_KEYS);
  const { without = [], assumeDown = [] } = context.req.queries();
  return context.json(await weir.explain({ ...query, without, assumeDown }));
}

async function plan(context: Context, weir: RunningWeir): Promise<Response> {
  const { name = 'the file' } = queryOf(context, PLAN_KEYS);
  return context.json(await weir.plan(name, await context.req.text()));
}

async function reload(context: Context, weir: RunningWeir): Promise<Response> {
  return context.json(await weir.reload());
}

/** An IPv4 header, and the ports. */
const MIN_SNAP_BYTES = 24;

/** A slip in a parameter's name must not list, or flush, everything. */
function requireKnown(context: Context, known: readonly string[]): void {
  for (const key of Object.keys(context.req.query())) {
    if (known.includes(key)) continue;
    throw new WeirError('USAGE', `there is no parameter "${key}"`, `There are ${known.join(', ') || 'none'}.`);
  }
}

function queryOf<Key extends string>(context: Context, keys: readonly Key[]): { [K in Key]?: string } {
  const query = context.req.query();
  const given = keys.filter((key) => query[key] !== undefined);
  return Object.fromEntries(given.map((key) => [key, query[key]])) as { [K in Key]?: string };
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
    await pause(pace, weir.packetsRead());
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
