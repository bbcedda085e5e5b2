import { request } from 'node:http';
import { connect } from 'node:net';
import type { HealthConfig, HttpHealth } from '../../config/config.js';
import { clip } from '../../config/text-forms.js';
import { Attempt, type Finding } from './attempt.js';
import { IcmpProber } from './icmp-prober.js';

/** Where a probe goes, and what it asks. */
export interface ProbeRequest {
  readonly check: HealthConfig;
  /** IPv4, as text. */
  readonly address: string;
  /** Of the backend; the check may name another. */
  readonly port: number;
}

/** Of an answer's body; what is looked for must come within. */
const MAX_BODY_BYTES = 64 * 1024;

/**
 * Makes probes through the host's own network stack. Its local table comes before weir's rules, so that answers to the host's
 * own addresses never enter the device.
 */
export class Prober {
  readonly #icmp: IcmpProber;

  constructor(icmp = new IcmpProber()) {
    this.#icmp = icmp;
  }

  /**
   * Begins a probe; `done` is called once, not before this returns, and with nothing left open.
   *
   * @returns what ends it without a word.
   */
  start({ check, address, port }: ProbeRequest, done: (finding: Finding) => void): () => void {
    const attempt = new Attempt(check.timeoutMs, done);
    if (check.type === 'icmp') this.#icmp.begin(attempt, address);
    else if (check.type === 'tcp') beginTcp(attempt, address, check.port ?? port);
    else beginHttp(attempt, address, check.port ?? port, check);
    return () => attempt.cancel();
  }

  close(): void {
    this.#icmp.close();
  }
}

function beginTcp(attempt: Attempt, host: string, port: number): void {
  const socket = connect({ host, port });
  attempt.release = () => socket.destroy();
  socket.on('connect', () => attempt.settle('success', 'connected'));
  socket.on('error', (error) => settleError(attempt, error));
}

function beginHttp(attempt: Attempt, host: string, port: number, { path, host: name, status, body }: HttpHealth): void {
  const headers = { host: name ?? `${host}:${port}`, 'user-agent': 'weir', connection: 'close' };
  // Without an agent, there is nothing that could keep the connection.
  const message = request({ host, port, path, headers, agent: false });
  attempt.release = () => message.destroy();
  message.on('socket', (socket) => {
    socket.on('connect', () => {
      attempt.awaited = 'connected, but no answer';
    });
  });
  message.on('response', (response) => {
    response.on('error', (error) => settleError(attempt, error));
    const got = response.statusCode ?? 0;
    if (got !== status) attempt.settle('failure', `HTTP status ${got}, not ${status}`);
    else if (body === null) attempt.settle('success', `HTTP status ${got}`);
    else {
      attempt.awaited = `HTTP status ${got}, but no whole body`;
      lookFor(Buffer.from(body), response, (isFound) => {
        if (isFound) attempt.settle('success', `HTTP status ${got}, and the body is right`);
        else attempt.settle('failure', `HTTP status ${got}, but "${clip(body)}" is not in the body`);
      });
    }
  });
  message.on('error', (error) => settleError(attempt, error));
  message.on('close', () => attempt.settle('failure', 'the connection was closed early'));
  message.end();
}

/** Reads as much of a body as it takes to tell. */
function lookFor(wanted: Buffer, body: NodeJS.ReadableStream, tell: (isFound: boolean) => void): void {
  let read = Buffer.alloc(0);
  body.on('data', (chunk: Buffer) => {
    read = Buffer.concat([read, chunk]);
    const found = read.indexOf(wanted);
    if (found >= 0) tell(found + wanted.length <= MAX_BODY_BYTES);
    else if (read.length >= MAX_BODY_BYTES) tell(false);
  });
  body.on('end', () => tell(false));
}

/** What a failed system call says of the backend; or, where the host has run out of something, does not say. */
function settleError(attempt: Attempt, { code = '', message }: NodeJS.ErrnoException): void {
  const text = FAILURES[code];
  if (text !== undefined) attempt.settle('failure', text);
  else if (EXHAUSTED.has(code)) attempt.settle('unknown', `this host cannot make probes: ${code}`);
  else if (code.startsWith('HPE_')) attempt.settle('failure', `the answer is not HTTP: ${code}`);
  else attempt.settle('failure', code || message);
}

const FAILURES: Readonly<Record<string, string>> = {
  ECONNREFUSED: 'connection refused',
  ECONNRESET: 'connection reset',
  EPIPE: 'connection reset',
  EHOSTUNREACH: 'host unreachable',
  ENETUNREACH: 'network unreachable',
  ETIMEDOUT: 'no answer',
  EACCES: 'not permitted by this host (EACCES)',
  EPERM: 'not permitted by this host (EPERM)',
};

const EXHAUSTED: ReadonlySet<string> = new Set(['EMFILE', 'ENFILE', 'ENOBUFS', 'ENOMEM', 'EADDRNOTAVAIL']);
