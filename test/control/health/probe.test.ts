import { EventEmitter, once } from 'node:events';
import { createServer as createHttpServer, type Server as HttpServer } from 'node:http';
import { type AddressInfo, createServer, type Server, type Socket } from 'node:net';
import { setImmediate } from 'node:timers/promises';
import t from 'tap';
import type { HealthConfig, HttpHealth } from '../../../lib/config/config.js';
import type { Finding } from '../../../lib/control/health/attempt.js';
import { IcmpProber } from '../../../lib/control/health/icmp-prober.js';
import { Prober } from '../../../lib/control/health/probe.js';
import { formatIpv4 } from '../../../lib/wire/address.js';
import { packet } from '../../fixtures/packet-text.js';

const HOST = '127.0.0.1';
const TIMING = { intervalMs: 2000, timeoutMs: 10_000, rise: 2, fall: 3 };

const prober = new Prober();

function probe(check: HealthConfig, port: number, by = prober, address = HOST): Promise<Finding> {
  return new Promise((resolve) => {
    by.start({ check, address, port }, resolve);
  });
}

function tcp(more: Partial<HealthConfig> = {}): HealthConfig {
  return { type: 'tcp', port: null, ...TIMING, ...more } as HealthConfig;
}

function http(more: Partial<HttpHealth> = {}): HealthConfig {
  return { type: 'http', port: null, path: '/', host: null, status: 200, body: null, ...TIMING, ...more };
}

/** Listens on a port of its own, until the test is over. */
async function listen(t: { teardown(run: () => unknown): void }, server: Server | HttpServer): Promise<number> {
  const sockets = new Set<Socket>();
  server.on('connection', (socket: Socket) => {
    sockets.add(socket);
    socket.on('close', () => sockets.delete(socket)).on('error', () => {});
  });
  server.listen(0, HOST);
  await once(server, 'listening');
  t.teardown(() => {
    for (const socket of sockets) socket.destroy();
    server.close();
  });
  return (server.address() as AddressInfo).port;
}

/** A port that was just given back. */
async function closedPort(): Promise<number> {
  const server = createServer().listen(0, HOST);
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  server.close();
  await once(server, 'close');
  return port;
}

t.test('tcp', async (t) => {
  const closed: Promise<unknown>[] = [];
  const port = await listen(
    t,
    createServer((socket) => void closed.push(once(socket.resume(), 'close'))),
  );
  t.strictSame(await probe(tcp(), port), { outcome: 'success', text: 'connected' });
  t.strictSame(await probe(tcp({ port }), 1), { outcome: 'success', text: 'connected' }, 'a port of the check’s own');
  t.equal((await Promise.all(closed)).length, 2, 'each connection is closed');
  t.strictSame(await probe(tcp(), await closedPort()), { outcome: 'failure', text: 'connection refused' });
});

t.test('http', async (t) => {
  const seen: (string | undefined)[] = [];
  const server = createHttpServer((request, response) => {
    seen.push(`${request.method} ${request.url} ${request.headers.host} ${request.headers.connection}`);
    switch (request.url) {
      case '/sick':
        return response.writeHead(503).end('sick');
      case '/moved':
        return response.writeHead(302, { location: '/' }).end();
      case '/pieces':
        response.write(`${'x'.repeat(65_530)}al`);
        return void setTimeout(() => response.end('l is well'), 1);
      case '/long':
        response.write('x'.repeat(65_530));
        return response.end('all is well');
      case '/endless':
        return response.write('all is');
      case '/silent':
        return;
      case '/cut':
        response.writeHead(200, { 'content-length': 100 }).write('x');
        return void setTimeout(() => response.destroy(), 1);
      default:
        return response.end('all is well');
    }
  });
  const port = await listen(t, server);
  for (const [more, outcome, text] of [
    [{}, 'success', 'HTTP status 200'],
    [{ path: '/sick' }, 'failure', 'HTTP status 503, not 200'],
    [{ path: '/sick', status: 503 }, 'success', 'HTTP status 503'],
    [{ path: '/moved' }, 'failure', 'HTTP status 302, not 200'],
    [{ body: 'is well' }, 'success', 'HTTP status 200, and the body is right'],
    [{ body: 'is ill' }, 'failure', 'HTTP status 200, but "is ill" is not in the body'],
    [{ path: '/sick', body: 'sick' }, 'failure', 'HTTP status 503, not 200'],
    [{ path: '/pieces', body: 'xall' }, 'success', 'HTTP status 200, and the body is right'],
    [{ path: '/long', body: 'well' }, 'failure', 'HTTP status 200, but "well" is not in the body'],
    [{ path: '/endless' }, 'success', 'HTTP status 200'],
    [{ path: '/endless', body: 'all is' }, 'success', 'HTTP status 200, and the body is right'],
    [{ path: '/endless', body: '?', timeoutMs: 200 }, 'failure', 'HTTP status 200, but no whole body within 200ms'],
    [{ path: '/silent', timeoutMs: 200 }, 'failure', 'connected, but no answer within 200ms'],
    [{ path: '/cut', body: 'well' }, 'failure', 'the connection was closed early'],
  ] as const) {
    t.strictSame(await probe(http(more), port), { outcome, text }, JSON.stringify(more));
  }
  await probe(http({ path: '/healthz?deep=1', host: 'shop.example:8080' }), port);
  t.equal(seen[0], `GET / ${HOST}:${port} close`);
  t.equal(seen.at(-1), 'GET /healthz?deep=1 shop.example:8080 close');
  server.closeAllConnections();
  t.strictSame(await probe(http(), await closedPort()), { outcome: 'failure', text: 'connection refused' });
});

t.test('what is no HTTP', async (t) => {
  for (const [answer, text] of [
    ['SSH-2.0-OpenSSH_9.2\r\n', /^the answer is not HTTP: HPE_/],
    [`HTTP/1.1 200 OK\r\nx: ${'y'.repeat(100_000)}\r\n\r\n`, /^the answer is not HTTP: HPE_HEADER_OVERFLOW/],
    ['', /^connection reset$/],
  ] as const) {
    const server = createServer((socket) => void socket.once('data', () => socket.end(answer)));
    const port = await listen(t, server);
    t.match(await probe(http(), port), { outcome: 'failure', text });
  }
});

t.test('a probe that is cancelled says nothing, and leaves nothing open', async (t) => {
  const server = createServer();
  const port = await listen(t, server);
  for (const check of [tcp({ timeoutMs: 1 }), http()]) {
    const closed = once(server, 'connection').then(([socket]) => once((socket as Socket).resume(), 'close'));
    let isSettled = false;
    const cancel = prober.start({ check, address: HOST, port }, () => {
      isSettled = true;
    });
    if (check.type === 'http') await once(server, 'connection');
    cancel();
    if (check.type === 'http') await closed;
    await setImmediate();
    t.notOk(isSettled);
  }
});

t.test('a thread that was busy counts nothing as missing that had come', async (t) => {
  const port = await listen(t, createServer());
  const found = probe(tcp({ timeoutMs: 20 }), port);
  const untilMs = performance.now() + 200;
  while (performance.now() < untilMs);
  t.strictSame(await found, { outcome: 'success', text: 'connected' });
});

/** What raw-socket is to the prober. */
class FakeRaw extends EventEmitter {
  readonly sent: { echo: Buffer; address: string }[] = [];
  sendError: Error | null = null;
  isClosed = false;

  send(buffer: Buffer, offset: number, length: number, address: string, after: (error: Error | null) => void): void {
    this.sent.push({ echo: buffer.subarray(offset, offset + length), address });
    after(this.sendError);
    this.emit('sent');
  }

  close(): void {
    this.isClosed = true;
  }

  /** An answer, in the one buffer that all are handed out in. */
  answer(text: string): void {
    this.emit('message', Buffer.from(packet(text)), / (\S+) > /.exec(text)![1]);
  }
}

function fakeIcmp(open: () => FakeRaw): Prober {
  const raw = { Protocol: { ICMP: 1 }, createSocket: open } as unknown as typeof import('raw-socket')['default'];
  return new Prober(new IcmpProber(77, async () => ({ default: raw })));
}

const ECHO: HealthConfig = { type: 'icmp', ...TIMING };

t.test('icmp: a request is answered by its own reply alone', async (t) => {
  const raw = new FakeRaw();
  const icmp = fakeIcmp(() => raw);
  const found = probe(ECHO, 0, icmp, '10.2.0.11');
  await once(raw, 'sent');
  const [{ echo, address }] = raw.sent as [(typeof raw.sent)[0]];
  t.equal(address, '10.2.0.11');
  t.equal(echo[0], 8);
  t.strictSame([echo.readUInt16BE(4), echo.readUInt16BE(6)], [77, 1]);
  let total = 0;
  for (let i = 0; i < echo.length; i += 2) total += echo.readUInt16BE(i);
  t.equal((total & 0xffff) + (total >>> 16), 0xffff, 'its checksum is right');

  let isFound = false;
  void found.then(() => {
    isFound = true;
  });
  for (const other of [
    'icmp 10.2.0.11 > 10.2.0.1 echo-request id=77 seq=1 len=8',
    'icmp 10.2.0.11 > 10.2.0.1 echo-reply id=78 seq=1 len=8',
    'icmp 10.2.0.11 > 10.2.0.1 echo-reply id=77 seq=2 len=8',
    'icmp 10.2.0.12 > 10.2.0.1 echo-reply id=77 seq=1 len=8',
  ]) {
    raw.answer(other);
    await setImmediate();
    t.notOk(isFound, other);
  }
  raw.emit('message', Buffer.from([0x45]), '10.2.0.11');
  raw.answer('icmp 10.2.0.11 > 10.2.0.1 echo-reply id=77 seq=1 len=8');
  t.strictSame(await found, { outcome: 'success', text: 'echo reply' });
  raw.answer('icmp 10.2.0.11 > 10.2.0.1 echo-reply id=77 seq=1 len=8');

  const late = probe({ ...ECHO, timeoutMs: 1 }, 0, icmp, '10.2.0.11');
  t.strictSame(await late, { outcome: 'failure', text: 'no answer within 1ms' });
  icmp.close();
  t.ok(raw.isClosed);
});

t.test('icmp: what the host cannot do says nothing about the backend', async (t) => {
  const none = new Prober(
    new IcmpProber(1, () => Promise.reject(Object.assign(new Error('no'), { code: 'ERR_MODULE_NOT_FOUND' }))),
  );
  t.strictSame(await probe(ECHO, 0, none), {
    outcome: 'unknown',
    text: 'the optional package raw-socket is not installed',
  });
  const broken = new Prober(new IcmpProber(1, () => Promise.reject(new Error('other ABI'))));
  t.match(await probe(ECHO, 0, broken), { outcome: 'unknown', text: /raw-socket cannot be loaded: other ABI/ });
  const forbidden = fakeIcmp(() => {
    throw new Error('Operation not permitted');
  });
  t.match(await probe(ECHO, 0, forbidden), { outcome: 'unknown', text: /Operation not permitted.*CAP_NET_RAW/ });

  const opened: FakeRaw[] = [];
  const icmp = fakeIcmp(() => {
    opened.push(new FakeRaw());
    opened.at(-1)!.sendError = [new Error('No route to host'), new Error('No buffer space available'), null][
      Math.min(opened.length - 1, 2)
    ]!;
    return opened.at(-1)!;
  });
  t.strictSame(await probe(ECHO, 0, icmp), { outcome: 'failure', text: 'no route to host' });
  opened[0]!.emit('error', new Error('ENETDOWN'));
  t.ok(opened[0]!.isClosed);
  t.strictSame(await probe(ECHO, 0, icmp), { outcome: 'unknown', text: 'no buffer space available' });
  opened[1]!.emit('error', new Error('ENETDOWN'));
  const found = probe(ECHO, 0, icmp);
  while (opened.length < 3 || opened[2]!.sent.length === 0) await setImmediate();
  opened[2]!.emit('error', new Error('ENETDOWN'));
  t.strictSame(await found, { outcome: 'unknown', text: 'the raw socket failed: ENETDOWN' });
});

t.test('icmp: this very host', { skip: await icmpIsMissing() }, async (t) => {
  const icmp = new Prober();
  t.strictSame(await probe(ECHO, 0, icmp, formatIpv4(0x7f000001)), { outcome: 'success', text: 'echo reply' });
  icmp.close();
});

async function icmpIsMissing(): Promise<string | false> {
  const asked = new Prober();
  const { outcome, text } = await probe({ ...ECHO, timeoutMs: 5000 }, 0, asked);
  asked.close();
  return outcome === 'unknown' && text;
}
