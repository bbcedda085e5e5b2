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

/**
 * For whom does not finish a request; an idle connection is kept KEEP_ALIVE_MS. On the UNIX socket only its head has to come
 * in this time: an import takes as long as its sender does, and whoever may open that socket may do anything.
 */
const REQUEST_MS = 10_000;
const KEEP_ALIVE_MS = 5000;
const MAX_CONNECTIONS = 2048;

/**
 * Serves everything on a UNIX socket that only its owner may open, and what only reads on a TCP port.
 *
 * @throws WeirError ALREADY_RUNNING, ADDRESS_IN_USE, NO_PERMISSION
 */
export async function serveAdmin(weir: RunningWeir, { socket, listen }: AdminPlaces): Promise<AdminEndpoint> {
  const servers: Server[] = [];
  const close = async (): Promise<void> => {
    await Promise.all(servers.map(closeServer));
  };
  try {
    const local = makeServer(createApp(weir, 'all'), 0);
    await listenOnSocket(local, socket);
    servers.push(local);
    if (listen !== null) {
      const open = makeServer(createApp(weir, 'public'), REQUEST_MS);
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

function makeServer(app: Hono, requestTimeout: number): Server {
  const server = createServer(
    { headersTimeout: REQUEST_MS, requestTimeout, keepAliveTimeout: KEEP_ALIVE_MS },
    getRequestListener(app.fetch),
  );
  server.maxConnections = MAX_CONNECTIONS;
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
