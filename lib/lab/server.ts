import { createHash } from 'node:crypto';
import { createSocket } from 'node:dgram';
import { once } from 'node:events';
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { blocks, hashBytes } from './blocks.js';

/*
 *   client --- weir --- b1 | b2 | b3:  this program
 *                        TCP --http PORT   GET  /           {"backend":"b1","client":"10.1.0.2","port":40000}
 *                                          GET  /bytes/N    N bytes, no two blocks of them alike; ?rate=R: R a second
 *                                          GET  /sha256/N   the SHA-256 of the same bytes
 *                                          PUT  /upload     {"bytes":N,"sha256":"..."} of what was sent
 *                        UDP --udp PORT    every datagram back as it came
 *
 * Prints `ready` when both listen. Ends on SIGTERM.
 */

const { values } = parseArgs({
  options: { name: { type: 'string' }, http: { type: 'string' }, udp: { type: 'string' } },
});
const name = values.name ?? 'backend';

/** @param rate bytes a second, at most */
async function sendBytes(response: ServerResponse, totalBytes: number, rate: number): Promise<void> {
  response.writeHead(200, { 'content-type': 'application/octet-stream', 'content-length': totalBytes });
  const startedMs = performance.now();
  let sentBytes = 0;
  for (const block of blocks(totalBytes)) {
    const earlyMs = startedMs + (sentBytes / rate) * 1000 - performance.now();
    if (earlyMs > 0) await sleep(earlyMs);
    if (response.destroyed) return;
    sentBytes += block.length;
    if (!response.write(block)) await Promise.race([once(response, 'drain'), once(response, 'close')]);
  }
  response.end();
}

async function receive(request: IncomingMessage): Promise<{ bytes: number; sha256: string }> {
  const hash = createHash('sha256');
  let bytes = 0;
  for await (const chunk of request as AsyncIterable<Buffer>) {
    hash.update(chunk);
    bytes += chunk.length;
  }
  return { bytes, sha256: hash.digest('hex') };
}

function answer(response: ServerResponse, status: number, body: object): void {
  const text = `${JSON.stringify(body)}\n`;
  response.writeHead(status, { 'content-type': 'application/json', 'content-length': Buffer.byteLength(text) });
  response.end(text);
}

async function handle(request: IncomingMessage, response: ServerResponse): Promise<void> {
  response.setHeader('x-backend', name);
  const path = request.url ?? '/';
  if (request.method === 'PUT' || request.method === 'POST') return answer(response, 200, await receive(request));
  const sized = /^\/(bytes|sha256)\/(\d{1,15})(?:\?rate=(\d{1,15}))?$/.exec(path);
  if (sized?.[1] === 'bytes')
    return sendBytes(response, Number(sized[2]), Number(sized[3] ?? Number.POSITIVE_INFINITY));
  if (sized?.[1] === 'sha256') return answer(response, 200, { sha256: hashBytes(Number(sized[2])) });
  if (path !== '/') return answer(response, 404, { error: 'try /, /bytes/N, /sha256/N or PUT /upload' });
  const { remoteAddress, remotePort } = request.socket;
  answer(response, 200, { backend: name, client: remoteAddress, port: remotePort });
}

const listening: Promise<unknown>[] = [];

if (values.http !== undefined) {
  const server = createServer((request, response) => {
    // A client that leaves in the middle is its own affair.
    handle(request, response).catch(() => response.destroy());
  });
  server.keepAliveTimeout = 120_000;
  server.requestTimeout = 0;
  server.listen(Number(values.http), '0.0.0.0', 4096);
  listening.push(once(server, 'listening'));
}

if (values.udp !== undefined) {
  const socket = createSocket({ type: 'udp4', recvBufferSize: 4 << 20 });
  socket.on('message', (message, { port, address }) => socket.send(message, port, address, () => {}));
  socket.bind(Number(values.udp), '0.0.0.0');
  listening.push(once(socket, 'listening'));
}

process.on('SIGTERM', () => process.exit(0));
await Promise.all(listening);
console.log('ready');
