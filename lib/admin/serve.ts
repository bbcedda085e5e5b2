import { chmodSync, mkdirSync, rmSync } from 'node:fs';
import { createServer, type Server } from 'node:http';
import type { ListenOptions } from 'node:net';
import { dirname } from 'node:path';
import { getRequestListener } from '@hono/node-server';
import type { Hono } from 'hono';
import { WeirError } from '../base/errors.js';
import { probeSocket } from '../control/admin-socket.js';
import type { AdminEndpoint, AdminPlaces, RunningWeir } from '../control/view.js';
import { createApp } from './app.js';

/** sun_path without its terminating zero. */
const MAX_SOCKET_PATH_BYTES = 107;

/** What clients may take of weir. */
export interface Limits {
  /** Connections on each of the two; beyond, new ones are closed at once. */
  readonly connections: number;
  /**
   * In which a request has to come. On the UNIX socket that is its head: an import takes as long as its sender does, and whoever may open
   * that socket may do anything.
   */
  readonly requestMs: number;
  /** For how long an idle connection is kept after an answer. */
  readonly keepAliveMs: number;
  /** On the TCP port: for how long nothing may be said or taken in the middle of something. */
  readonly silenceMs: number;
  /** How often the above are looked at. */
  readonly lookMs: number;
}

const LIMITS: Limits = {
  connections: 2048,
  requestMs: 10_000,
  keepAliveMs: 5000,
  silenceMs: 30_000,
  lookMs: 2000,
};

/**
 * Serves everything on a UNIX socket that only its owner may open, and what only reads on a TCP port.
 *
 * @throws WeirError ALREADY_RUNNING, ADDRESS_IN_USE, NO_PERMISSION
 */
export async function serveAdmin(
  weir: RunningWeir,
  { socket, listen, dashboard }: AdminPlaces,
  limits = LIMITS,
): Promise<AdminEndpoint> {
  const servers: Server[] = [];
  const close = async (): Promise<void> => {
    await Promise.all(servers.map(closeServer));
  };
  try {
    const local = makeServer(createApp(weir, 'all'), limits);
    await listenOnSocket(local, socket);
    servers.push(local);
    if (listen !== null) {
      const open = makeServer(createApp(weir, dashboard ? 'dashboard' : 'public'), limits);
      open.requestTimeout = limits.requestMs;
      open.setTimeout(limits.silenceMs);
      await listenOn(open, listen).catch((error) => {
        throw tcpError(listen, error);
      });
      servers.push(open);
    }
  } catch (error) {
    await close();
    throw error;
  }
  return { close };
}

function makeServer(app: Hono, { connections, requestMs, keepAliveMs, lookMs }: Limits): Server {
  const server = createServer(
    {
      headersTimeout: requestMs,
      requestTimeout: 0,
      keepAliveTimeout: keepAliveMs,
      connectionsCheckingInterval: lookMs,
      // Load balancers probe with HTTP/1.0, which has none.
      requireHostHeader: false,
    },
    getRequestListener(app.fetch, { hostname: 'weir' }),
  );
  server.maxConnections = connections;
  return server;
}

/** What a killed weir left behind is replaced; what answers, or is no socket, is not. */
async function listenOnSocket(server: Server, path: string): Promise<void> {
  if (Buffer.byteLength(path) > MAX_SOCKET_PATH_BYTES) {
    throw new WeirError(
      'ADDRESS_IN_USE',
      `the socket path ${path} is longer than ${MAX_SOCKET_PATH_BYTES} bytes`,
      'Choose a shorter one.',
    );
  }
  try {
    mkdirSync(dirname(path), { recursive: true });
    if ((await probeSocket(path)) === 'stale') rmSync(path);
    await listenOn(server, { path });
    chmodSync(path, 0o600);
  } catch (error) {
    throw socketError(path, error as NodeJS.ErrnoException);
  }
}

function listenOn(server: Server, where: ListenOptions): Promise<void> {
  return new Promise((resolve, reject) => {
    server.once('error', reject);
    // From its first moment on, the socket is its owner's alone. listen() makes it before it returns.
    const mask = process.umask(0o177);
    server.listen(where, () => {
      server.off('error', reject);
      resolve();
    });
    process.umask(mask);
  });
}

/** Open answers are cut: whoever stops weir waits for nobody. */
function closeServer(server: Server): Promise<void> {
  return new Promise((resolve) => {
    server.close(() => resolve());
    server.closeAllConnections();
  });
}

function socketError(path: string, error: NodeJS.ErrnoException): WeirError {
  switch (error.code) {
    case 'EADDRINUSE':
      return new WeirError(
        'ALREADY_RUNNING',
        `another process has the socket ${path}`,
        'Stop it first, or give this one another --socket.',
        error,
      );
    case 'EACCES':
    case 'EPERM':
    case 'EROFS':
      return new WeirError(
        'NO_PERMISSION',
        `cannot make the socket ${path}: ${error.code}`,
        'Choose a place this user may write to, with --socket or admin.socket.',
        error,
      );
    default:
      return new WeirError(
        'ADDRESS_IN_USE',
        `cannot make the socket ${path}: ${error.message}`,
        'Choose another place with --socket or admin.socket.',
        error,
      );
  }
}

function tcpError({ host, port }: { host: string; port: number }, error: NodeJS.ErrnoException): WeirError {
  const place = `${host}:${port}`;
  if (error.code === 'EACCES') {
    return new WeirError('NO_PERMISSION', `cannot listen on ${place}: EACCES`, 'Choose a port above 1023.', error);
  }
  return new WeirError(
    'ADDRESS_IN_USE',
    error.code === 'EADDRINUSE' ? `${place} is taken` : `cannot listen on ${place}: ${error.code}`,
    'Choose another admin.listen, or `off`.',
    error,
  );
}
