import { once } from 'node:events';
import { type ClientRequest, type IncomingMessage, request } from 'node:http';
import type { Readable } from 'node:stream';
import { ERROR_MEANINGS, type ErrorCode, WeirError } from '../base/errors.js';
import type { ErrorView } from '../control/view.js';

/** A call to a running weir over its admin socket. */
export interface Call {
  readonly socket: string;
  readonly method?: 'GET' | 'POST';
  readonly path: string;
  /** A list stands for a parameter that is there several times. */
  readonly query?: Readonly<Record<string, string | readonly string[] | undefined>>;
  /** Cuts the call short; it fails then. */
  readonly signal?: AbortSignal;
  /** Called when weir has accepted it. */
  readonly accepted?: () => void | Promise<void>;
  /** Sent as it comes and as fast as it is taken; destroyed once there is an answer. */
  readonly body?: Readable;
  /** Hears of each piece of the body that was handed over. */
  readonly sent?: (chunk: Buffer) => void;
}

/** The JSON a call answers with. @throws WeirError NOT_RUNNING, NO_PERMISSION, or what the answer says */
export async function callJson<T>(call: Call): Promise<T> {
  const chunks: Uint8Array[] = [];
  await callStream(call, (chunk) => void chunks.push(chunk));
  return JSON.parse(Buffer.concat(chunks).toString()) as T;
}

/**
 * Hands over the answer's bytes as they come; `sink` may return a promise to slow them down.
 *
 * @throws as callJson, and what `sink` throws
 */
export async function callStream(call: Call, sink: (chunk: Uint8Array) => void | Promise<void>): Promise<void> {
  const response = await open(call);
  if (response.statusCode !== 200) {
    const chunks: Uint8Array[] = [];
    for await (const chunk of bodyOf(response)) chunks.push(chunk);
    throw answerError(response.statusCode ?? 0, Buffer.concat(chunks).toString());
  }
  await call.accepted?.();
  for await (const chunk of bodyOf(response)) await sink(chunk);
}

async function* bodyOf(response: IncomingMessage): AsyncGenerator<Uint8Array> {
  const chunks = response[Symbol.asyncIterator]() as AsyncIterator<Uint8Array>;
  try {
    for (;;) {
      const { done, value } = await chunks.next().catch((error: Error) => {
        throw new WeirError('NOT_RUNNING', 'weir ended in the middle of its answer', 'See its log.', error);
      });
      if (done) return;
      yield value;
    }
  } finally {
    response.destroy();
  }
}

function open({ socket, method = 'GET', path, query = {}, signal, body, sent }: Call): Promise<IncomingMessage> {
  const parameters = new URLSearchParams();
  for (const [key, value = []] of Object.entries(query)) {
    for (const each of typeof value === 'string' ? [value] : value) parameters.append(key, each);
  }
  return new Promise((resolve, reject) => {
    const where = { socketPath: socket, path: `${path}?${parameters}`, method };
    const message = request(signal === undefined ? where : { ...where, signal }, resolve);
    message.on('error', (error: NodeJS.ErrnoException) => reject(connectError(socket, error)));
    if (body === undefined) message.end();
    else send(message, body, sent).catch(reject);
  });
}

async function send(message: ClientRequest, body: Readable, sent: Call['sent']): Promise<void> {
  const over = new AbortController();
  const { signal } = over;
  message.once('close', () => over.abort());
  message.once('response', (response) => {
    over.abort();
    // Answered in the middle of the body: nobody waits for the rest.
    response.once('end', () => {
      if (!message.writableEnded) message.destroy();
    });
  });
  signal.addEventListener('abort', () => body.destroy());
  // Before a body that is slow to come, it should be known whether anybody listens.
  message.flushHeaders();
  try {
    for await (const chunk of body as AsyncIterable<Buffer>) {
      const isTaken = message.write(chunk);
      sent?.(chunk);
      if (!isTaken) await once(message, 'drain', { signal });
    }
    message.end();
  } catch (error) {
    if (signal.aborted) return;
    message.destroy();
    throw new WeirError('FLOWS_INVALID', `the input broke off: ${(error as Error).message}`, 'Send it again.', error);
  }
}

function connectError(socket: string, error: NodeJS.ErrnoException): WeirError {
  if (error.code === 'EACCES' || error.code === 'EPERM') {
    return new WeirError('NO_PERMISSION', `${socket} may not be opened`, 'Run this as the user weir runs as.', error);
  }
  if (error.code === 'ECONNRESET' || error.code === 'EPIPE') {
    return new WeirError('NOT_RUNNING', 'weir ended before it had answered', 'See its log.', error);
  }
  return new WeirError(
    'NOT_RUNNING',
    `no weir answers on ${socket}`,
    'Start it with `weir run -c FILE`, or name its socket with --socket or $WEIR_SOCKET.',
    error,
  );
}

function answerError(status: number, body: string): WeirError {
  let view: Partial<ErrorView>;
  try {
    view = JSON.parse(body) as Partial<ErrorView>;
  } catch {
    return new WeirError('NOT_RUNNING', `what answers is no weir (status ${status})`, 'Name another --socket.');
  }
  const { code = '', message = `the answer was ${status}`, remedy = '' } = view;
  return new WeirError(code in ERROR_MEANINGS ? (code as ErrorCode) : 'NOT_SUPPORTED', message, remedy);
}
