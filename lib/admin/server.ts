import { chmodSync, mkdirSync, rmSync } from 'node:fs';
import { createServer, type Server } from 'node:http';
import { connect, type ListenOptions } from 'node:net';
import { dirname } from 'node:path';
import { getRequestListener } from '@hono/node-server';
import { Hono } from 'hono';
import { bodyLimit } from 'hono/body-limit';
import { WeirError } from '../base/errors.js';
import { REASON_NAMES } from '../base/reasons.js';
import { FLOW_FORMATS, type FlowFormat, formatFlows } from '../control/flow-formats.js';
import { type FlowFilter, filterMistake } from '../control/flows.js';
import type { Runtime } from '../control/runtime.js';
import type { ConntrackStatsView, ErrorView } from '../control/views.js';
import { STAT_FORWARDED, STAT_REASONS, STAT_RX_PACKETS, STAT_STATELESS, STAT_TX_PACKETS } from '../datapath/stats.js';
import { PROTO_TCP } from '../wire/ipv4.js';
import { createMetrics } from './metrics.js';

const MAX_BODY_BYTES = 64 * 1024;
/** A chunk of a streamed list: large enough to be cheap, small enough not to hold up the main thread. */
const CHUNK_BYTES = 64 * 1024;

/** The admin API: everything on a UNIX socket for its owner, what only reads on a TCP port too. */
export class AdminServer {
  /**
   * Starts to listen.
   *
   * @throws WeirError ALREADY_RUNNING when another weir answers on the socket, ADDRESS_IN_USE for the TCP port
   */
  static async start(
    runtime: Runtime,
    socket: string,
    listen: { host: string; port: number } | null,
  ): Promise<AdminServer> {
    await clearStaleSocket(socket);
    mkdirSync(dirname(socket), { recursive: true });
    const servers = [await listenOn(fullApi(runtime), { path: socket })];
    chmodSync(socket, 0o600);
    try {
      if (listen !== null) servers.push(await listenOn(readOnlyApi(runtime), listen));
    } catch (error) {
      for (const server of servers) server.close();
      throw error;
    }
    return new AdminServer(servers);
  }

  readonly #servers: readonly Server[];

  private constructor(servers: readonly Server[]) {
    this.#servers = servers;
  }

  /** Stops listening, which removes the socket, and ends every connection. */
  async stop(): Promise<void> {
    await Promise.all(
      this.#servers.map((server) => {
        const closed = new Promise((resolve) => server.close(resolve));
        server.closeAllConnections();
        return closed;
      }),
    );
  }
}

/** @throws WeirError ALREADY_RUNNING when somebody answers on the socket; a socket nobody listens on is removed. */
export async function clearStaleSocket(path: string): Promise<void> {
  const answers = await new Promise<boolean>((resolve) => {
    const probe = connect(path);
    probe.once('connect', () => {
      probe.destroy();
      resolve(true);
    });
    probe.once('error', () => resolve(false));
  });
  if (answers) {
    throw new WeirError(
      'ALREADY_RUNNING',
      `another weir answers on ${path}`,
      'Stop it first, or give this one another --socket.',
    );
  }
  rmSync(path, { force: true });
}

function listenOn(app: Hono, where: ListenOptions): Promise<Server> {
  const server = createServer(getRequestListener(app.fetch));
  server.headersTimeout = 5000;
  server.requestTimeout = 10_000;
  server.maxConnections = 2048;
  return new Promise((resolve, reject) => {
    server.once('error', (error: NodeJS.ErrnoException) => {
      const place = where.path ?? `${where.host}:${where.port}`;
      const remedy =
        error.code === 'EADDRINUSE' ? 'Choose another admin.listen, or stop what uses it.' : 'Choose another place.';
      reject(new WeirError('ADDRESS_IN_USE', `cannot listen on ${place}: ${error.code}`, remedy, error));
    });
    server.listen(where, () => resolve(server));
  });
}

function readOnlyApi(runtime: Runtime): Hono {
  const app = new Hono();
  const metrics = createMetrics(runtime);
  app.get('/healthz', (context) => context.json({ status: 'ok' }));
  app.get('/metrics', async (context) =>
    context.body(await metrics.metrics(), 200, { 'content-type': metrics.contentType }),
  );
  app.get('/v1/status', (context) => context.json(runtime.status()));
  app.get('/v1/services', (context) => context.json(runtime.services()));
  app.notFound((context) =>
    context.json(error('USAGE', `there is no ${context.req.method} ${context.req.path} here`), 404),
  );
  app.onError((cause, context) => context.json(error('USAGE', cause.message), 500));
  return app;
}

function fullApi(runtime: Runtime): Hono {
  const app = readOnlyApi(runtime);
  app.use(
    '*',
    bodyLimit({
      maxSize: MAX_BODY_BYTES,
      onError: (context) => context.json(error('USAGE', 'the body is too large'), 413),
    }),
  );
  app.get('/v1/ct', (context) => {
    const filter = filterOf(context.req.query());
    const format = (context.req.query('format') ?? 'json') as FlowFormat;
    const mistake = FLOW_FORMATS.includes(format)
      ? filterMistake(filter)
      : `format is one of ${FLOW_FORMATS.join(', ')}`;
    if (mistake !== undefined) return context.json(error('USAGE', mistake), 400);
    return context.body(streamOf(formatFlows(runtime.flows(filter), format)), 200, {
      'content-type': format === 'json' ? 'application/json' : 'text/plain; charset=utf-8',
    });
  });
  app.get('/v1/ct/stats', (context) => context.json(conntrackStats(runtime)));
  app.post('/v1/ct/flush', async (context) => {
    const filter = filterOf(context.req.query());
    const mistake = filterMistake(filter);
    if (mistake !== undefined) return context.json(error('USAGE', mistake), 400);
    return context.json({ flushed: await runtime.flushFlows(filter) });
  });
  app.post('/v1/reload', async (context) => {
    const result = await runtime.reload();
    return context.json(result, result.success ? 200 : 422);
  });
  return app;
}

function conntrackStats(runtime: Runtime): ConntrackStatsView {
  const states = new Map<string, Record<string, number>>();
  for (const { protocol, state } of runtime.flows({})) {
    const table = protocol === PROTO_TCP ? 'tcp' : 'any';
    const counts = states.get(table) ?? {};
    counts[state] = (counts[state] ?? 0) + 1;
    states.set(table, counts);
  }
  const { stats } = runtime;
  const gc = runtime.collection();
  const reasons = REASON_NAMES.map((name, reason) => [name, stats[STAT_REASONS + reason]!] as const);
  return {
    tables: runtime.tables().map(({ name, live, figures }) => ({
      table: name,
      entries: live,
      limit: figures.capacity,
      states: states.get(name) ?? {},
      inserted: figures.inserted,
      insertFailures: figures.insertFailures,
      evicted: { expired: figures.evictedExpired, closing: figures.evictedClosing, halfOpen: figures.evictedHalfOpen },
    })),
    gc: {
      runs: gc.runs,
      intervalSeconds: gc.intervalMs / 1000,
      lastPassMs: gc.lastPassMs,
      lastDeleted: gc.lastDeleted,
    },
    packets: {
      received: stats[STAT_RX_PACKETS]!,
      sent: stats[STAT_TX_PACKETS]!,
      forwarded: stats[STAT_FORWARDED]!,
      stateless: stats[STAT_STATELESS]!,
    },
    reasons: Object.fromEntries(reasons.filter(([, count]) => count > 0)),
  };
}

function filterOf(query: Record<string, string>): FlowFilter {
  const { service, backend, client, state } = query;
  return {
    ...(service === undefined ? {} : { service }),
    ...(backend === undefined ? {} : { backend }),
    ...(client === undefined ? {} : { client }),
    ...(state === undefined ? {} : { state }),
  };
}

function error(code: string, message: string): ErrorView {
  return { code, message, remedy: '' };
}

/** Text as a stream that goes as fast as its reader, and lets other work in between two chunks. */
function streamOf(lines: Generator<string, void, void>): ReadableStream<Uint8Array> {
  const encoder = new TextEncoder();
  return new ReadableStream<Uint8Array>({
    async pull(controller) {
      let chunk = '';
      while (chunk.length < CHUNK_BYTES) {
        const { value, done } = lines.next();
        if (done) {
          if (chunk !== '') controller.enqueue(encoder.encode(chunk));
          controller.close();
          return;
        }
        chunk += value;
      }
      controller.enqueue(encoder.encode(chunk));
      await new Promise((resolve) => setImmediate(resolve));
    },
    cancel() {
      lines.return();
    },
  });
}
