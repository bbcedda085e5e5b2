import { createHash } from 'node:crypto';
import { Agent, type ClientRequest, type IncomingMessage, request } from 'node:http';
import { Readable } from 'node:stream';
import { parseArgs } from 'node:util';
import { blocks, hashBytes } from './blocks.js';

/*
 *   this program --+--- GET /bytes/BYTES?rate=RATE     DOWNLOADS at a time, a connection each
 *                  +--- PUT /upload of BYTES           UPLOADS at a time
 *        client                         VIP
 *
 * Each happens once. It is whole when its length and its SHA-256 are right, and broken otherwise. One JSON object a line on
 * standard output: a TransferReport several times a second, the last with `done`.
 */

export interface TransferReport {
  readonly elapsedMs: number;
  /** Of contents, both ways. */
  readonly bytes: number;
  readonly running: number;
  readonly whole: number;
  readonly broken: number;
  /** By what went wrong. */
  readonly errors: Readonly<Record<string, number>>;
  /** By who served. */
  readonly backends: Readonly<Record<string, number>>;
  /** The longest that any download had waited for the bytes that came since the report before. */
  readonly longestPauseMs: number;
  readonly done: boolean;
}

const REPORT_MS = 100;
/** A transfer in which nothing moves for so long is broken. */
const STALL_MS = 30_000;

const { values } = parseArgs({
  options: {
    target: { type: 'string' },
    bytes: { type: 'string' },
    downloads: { type: 'string', default: '0' },
    uploads: { type: 'string', default: '0' },
    /** Of each download, bytes a second. */
    rate: { type: 'string' },
  },
});
const [host, port] = (values.target ?? '').split(':') as [string, string];
const totalBytes = Number(values.bytes);
const expected = hashBytes(totalBytes);
const agent = new Agent({ keepAlive: false, maxSockets: Number.POSITIVE_INFINITY });
const startedMs = performance.now();

let bytes = 0;
let running = 0;
let whole = 0;
let broken = 0;
let longestPauseMs = 0;
const errors: Record<string, number> = {};
const backends: Record<string, number> = {};

function report(done: boolean): void {
  const elapsedMs = Math.round(performance.now() - startedMs);
  const counts = { bytes, running, whole, broken, errors, backends, longestPauseMs: Math.round(longestPauseMs) };
  console.log(JSON.stringify({ elapsedMs, ...counts, done } satisfies TransferReport));
  longestPauseMs = 0;
}

async function transfer(work: () => Promise<void>): Promise<void> {
  running++;
  try {
    await work();
    whole++;
  } catch (error) {
    broken++;
    const { code, message } = error as NodeJS.ErrnoException;
    const reason = code ?? message;
    errors[reason] = (errors[reason] ?? 0) + 1;
  }
  running--;
}

function open(method: string, path: string): ClientRequest {
  const opened = request({ host, port: Number(port), agent, method, path });
  return opened.setTimeout(STALL_MS, () => opened.destroy(new Error('nothing moves')));
}

function answerTo(asked: ClientRequest): Promise<IncomingMessage> {
  return new Promise((resolve, reject) => {
    // What breaks later breaks the reading of the answer.
    asked.on('error', reject).once('response', (response) => {
      const name = String(response.headers['x-backend']);
      backends[name] = (backends[name] ?? 0) + 1;
      if (response.statusCode === 200) resolve(response);
      else reject(new Error(`status ${response.statusCode}`));
    });
  });
}

async function download(): Promise<void> {
  const rate = values.rate === undefined ? '' : `?rate=${values.rate}`;
  const asked = open('GET', `/bytes/${totalBytes}${rate}`);
  asked.end();
  const hash = createHash('sha256');
  let received = 0;
  let lastMs = performance.now();
  for await (const part of (await answerTo(asked)) as AsyncIterable<Buffer>) {
    const nowMs = performance.now();
    longestPauseMs = Math.max(longestPauseMs, nowMs - lastMs);
    lastMs = nowMs;
    hash.update(part);
    received += part.length;
    bytes += part.length;
  }
  check(received, hash.digest('hex'));
}

async function upload(): Promise<void> {
  const asked = open('PUT', '/upload');
  const sent = Readable.from(count(blocks(totalBytes)));
  sent.pipe(asked);
  let text = '';
  for await (const part of (await answerTo(asked)).setEncoding('utf8')) text += part;
  const receipt = JSON.parse(text) as { bytes: number; sha256: string };
  check(receipt.bytes, receipt.sha256);
}

function* count(parts: Iterable<Buffer>): Generator<Buffer> {
  for (const part of parts) {
    bytes += part.length;
    yield part;
  }
}

function check(received: number, sha256: string): void {
  if (received !== totalBytes) throw new Error('wrong length');
  if (sha256 !== expected) throw new Error('wrong contents');
}

const reporting = setInterval(() => report(false), REPORT_MS);
await Promise.all([
  ...Array.from({ length: Number(values.downloads) }, () => transfer(download)),
  ...Array.from({ length: Number(values.uploads) }, () => transfer(upload)),
]);
clearInterval(reporting);
report(true);
