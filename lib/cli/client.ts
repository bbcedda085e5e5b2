import { request } from 'node:http';
import { WeirError } from '../base/errors.js';
import type { ErrorView } from '../control/views.js';

/** A call to a running weir over its admin socket. */
export interface Call {
  readonly socket: string;
  readonly method?: 'GET' | 'POST';
  readonly path: string;
  readonly query?: Readonly<Record<string, string | undefined>>;
}

/** The JSON a call answers with. @throws WeirError NOT_RUNNING, NO_PERMISSION, or what the answer says */
export async function callJson<T>(call: Call): Promise<T> {
  let text = '';
  await callStream(call, (chunk) => {
    text += chunk;
  });
  return JSON.parse(text) as T;
}

/** Hands over the answer as it comes; `sink` may return a promise to slow it down. */
export async function callStream(call: Call, sink: (chunk: string) => void | Promise<void>): Promise<void> {
  const query = new URLSearchParams(
    Object.entries(call.query ?? {}).filter((entry): entry is [string, string] => entry[1] !== undefined),
  ).toString();
  const path = query === '' ? call.path : `${call.path}?${query}`;
  const response = await new Promise<import('node:http').IncomingMessage>((resolve, reject) => {
    const message = request({ socketPath: call.socket, path, method: call.method ?? 'GET' }, resolve);
    message.once('error', (error: NodeJS.ErrnoException) => reject(connectError(call.socket, error)));
    message.end();
  });
  response.setEncoding('utf8');
  if (response.statusCode !== 200) {
    let body = '';
    for await (const chunk of response) body += chunk;
    throw answerError(response.statusCode ?? 0, body);
  }
  for await (const chunk of response) await sink(chunk as string);
}

function connectError(socket: string, error: NodeJS.ErrnoException): WeirError {
  if (error.code === 'EACCES' || error.code === 'EPERM') {
    return new WeirError('NO_PERMISSION', `${socket} may not be opened`, 'Run this as the user weir runs as.', error);
  }
  const remedy = 'Start it with `weir run -c FILE`, or name its socket with --socket or $WEIR_SOCKET.';
  return new WeirError('NOT_RUNNING', `no weir answers on ${socket}`, remedy, error);
}

function answerError(status: number, body: string): WeirError {
  let parsed: Partial<ErrorView> & { problems?: string[] } = {};
  try {
    parsed = JSON.parse(body);
  } catch {
    // Not ours; the status says it.
  }
  if (parsed.problems !== undefined) return new WeirError('CONFIG_INVALID', parsed.problems.join('\n'));
  return new WeirError('USAGE', parsed.message ?? `the answer was ${status}`, parsed.remedy ?? '');
}
