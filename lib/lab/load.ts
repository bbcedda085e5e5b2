import { createSocket } from 'node:dgram';
import { connect, type NetConnectOpts } from 'node:net';
import { parseArgs } from 'node:util';

/*
 *   this program --+--- connection, request, answer, closed: again and again   PARALLEL at a time
 *                  +--- connections that stay open, a request every 100 ms     KEPT of them
 *                  +--- datagrams that must come back as they were sent        --udp
 *        client                         VIP
 *
 * One JSON object a line on standard output, with totals since the start: a LoadReport several times a second, the last with
 * `done`. SIGTERM ends the load in order: what was begun is finished first.
 */

export interface LoadReport {
  readonly elapsedMs: number;
  /** Connections that got their answer; with --udp, datagrams that came back. */
  readonly ok: number;
  readonly failed: number;
  /** By who answered. */
  readonly backends: Readonly<Record<string, number>>;
  /** By what went wrong. */
  readonly errors: Readonly<Record<string, number>>;
  /** Connections that stay open. */
  readonly kept: {
    readonly open: number;
    readonly requests: number;
    readonly backends: Readonly<Record<string, number>>;
  };
  /** With --rounds: how many source ports were asked again, and how many of them met the same backend. */
  readonly asked: number;
  readonly same: number;
  readonly done: boolean;
}

const REPORT_MS = 200;
const KEPT_PAUSE_MS = 100;
const TIMEOUT_MS = 3000;
const UDP_WINDOW = 64;
/** Empty, tiny, and the largest that needs no fragments. */
const UDP_SIZES = [0, 1, 64, 512, 1472];

const { values } = parseArgs({
  options: {
    target: { type: 'string' },
    seconds: { type: 'string', default: '3600' },
    requests: { type: 'string' },
    parallel: { type: 'string', default: '16' },
    kept: { type: 'string', default: '0' },
    /** Source ports from here on, one per request; the same ones in every round. */
    'first-port': { type: 'string' },
    rounds: { type: 'string', default: '1' },
    udp: { type: 'boolean', default: false },
  },
});
const [host, port] = (values.target ?? '').split(':') as [string, string];
const perRound = values.requests === undefined ? Number.POSITIVE_INFINITY : Number(values.requests);
const firstPort = values['first-port'] === undefined ? null : Number(values['first-port']);
const startedMs = performance.now();
const deadlineMs = startedMs + Number(values.seconds) * 1000;

let stopping = false;
let ok = 0;
let failed = 0;
let asked = 0;
let same = 0;
const backends: Record<string, number> = {};
const errors: Record<string, number> = {};
const kept = { open: 0, requests: 0, backends: {} as Record<string, number> };
const seen = new Map<number, string>();

function report(done: boolean): void {
  const elapsedMs = Math.round(performance.now() - startedMs);
  console.log(
    JSON.stringify({ elapsedMs, ok, failed, backends, errors, kept, asked, same, done } satisfies LoadReport),
  );
}

function fail(error: unknown): void {
  failed++;
  const { code, message } = error as NodeJS.ErrnoException;
  const reason = code ?? message;
  errors[reason] = (errors[reason] ?? 0) + 1;
}

function isOver(): boolean {
  return stopping || performance.now() > deadlineMs;
}

/** Asks once over a connection of its own. @returns who answered */
function ask(localPort: number | null): Promise<string> {
  return new Promise((resolve, reject) => {
    const options: NetConnectOpts = { host, port: Number(port), ...(localPort === null ? {} : { localPort }) };
    const socket = connect(options, () => socket.write('GET / HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n'));
    let text = '';
    socket.setEncoding('utf8').on('data', (part: string) => (text += part));
    socket.setTimeout(TIMEOUT_MS, () => socket.destroy(new Error('timeout')));
    socket.once('error', reject);
    socket.once('close', () => {
      const backend = backendOf(text);
      if (backend === null) reject(new Error('closed without an answer'));
      else resolve(backend);
    });
  });
}

function backendOf(text: string): string | null {
  return /"backend":"([^"]+)"[^}]*}/.exec(text)?.[1] ?? null;
}

async function askAll(): Promise<void> {
  for (let round = 0; round < Number(values.rounds); round++) {
    let next = 0;
    const worker = async (): Promise<void> => {
      while (next < perRound && !isOver()) {
        const localPort = firstPort === null ? null : firstPort + next;
        next++;
        try {
          const backend = await ask(localPort);
          ok++;
          backends[backend] = (backends[backend] ?? 0) + 1;
          if (localPort === null) continue;
          const before = seen.get(localPort);
          seen.set(localPort, backend);
          if (before === undefined) continue;
          asked++;
          if (before === backend) same++;
        } catch (error) {
          fail(error);
        }
      }
    };
    await Promise.all(Array.from({ length: Number(values.parallel) }, worker));
  }
}

/** Holds one connection until the end; whatever ends it before is a failure. */
function keep(): Promise<void> {
  return new Promise((resolve) => {
    const request = 'GET / HTTP/1.1\r\nHost: lab\r\n\r\n';
    let backend: string | null = null;
    let waiting = false;
    let text = '';
    const socket = connect({ host, port: Number(port), noDelay: true }, () => {
      kept.open++;
      send();
    });
    const send = (): void => {
      waiting = true;
      socket.write(request);
    };
    socket.setEncoding('utf8').setTimeout(TIMEOUT_MS, () => socket.destroy(new Error('timeout on a kept connection')));
    socket.on('data', (part: string) => {
      text += part;
      const answered = backendOf(text);
      if (answered === null) return;
      text = '';
      waiting = false;
      kept.requests++;
      if (backend === null) kept.backends[answered] = (kept.backends[answered] ?? 0) + 1;
      else if (backend !== answered) fail(new Error('a kept connection changed its backend'));
      backend = answered;
      if (isOver()) socket.end();
      else setTimeout(send, KEPT_PAUSE_MS);
    });
    socket.once('error', fail);
    socket.once('close', (hadError) => {
      kept.open--;
      if (!hadError && (waiting || !isOver())) fail(new Error('a kept connection was closed'));
      resolve();
    });
  });
}

/** A window of datagrams in flight, each with its number where there is room for one. */
function echoAll(): Promise<void> {
  return new Promise((resolve) => {
    const socket = createSocket('udp4');
    const outstanding = new Map<number, number>();
    let next = 0;
    let lastHeardMs = performance.now();
    // What comes back with its own length and no number is some datagram of that length.
    const lengths = new Map<number, number>();
    const send = (): void => {
      const length = UDP_SIZES[next % UDP_SIZES.length]!;
      const datagram = Buffer.alloc(length, next & 255);
      if (length >= 4) datagram.writeUInt32LE(next, 0);
      if (length >= 4) outstanding.set(next, length);
      else lengths.set(length, (lengths.get(length) ?? 0) + 1);
      next++;
      socket.send(datagram, () => {});
    };
    const inFlight = (): number => outstanding.size + [...lengths.values()].reduce((sum, count) => sum + count, 0);
    const end = (): void => {
      clearInterval(watch);
      for (let lost = inFlight(); lost > 0; lost--) fail(new Error('datagram lost'));
      socket.close(() => resolve());
    };
    socket.on('message', (message) => {
      lastHeardMs = performance.now();
      const { length } = message;
      if (length >= 4 ? outstanding.get(message.readUInt32LE(0)) !== length : !lengths.get(length)) {
        fail(new Error('datagram came back changed'));
        return;
      }
      if (length >= 4) outstanding.delete(message.readUInt32LE(0));
      else lengths.set(length, lengths.get(length)! - 1);
      ok++;
      if (next < perRound && !isOver()) send();
      else if (inFlight() === 0) end();
    });
    socket.once('error', (error) => {
      fail(error);
      end();
    });
    const watch = setInterval(() => {
      if (performance.now() - lastHeardMs > 1000) end();
    }, 100);
    socket.connect(Number(port), host, () => {
      for (let i = 0; i < Math.min(UDP_WINDOW, perRound); i++) send();
    });
  });
}

process.on('SIGTERM', () => {
  stopping = true;
});
const reporting = setInterval(() => report(false), REPORT_MS);
if (values.udp) await echoAll();
else await Promise.all([askAll(), ...Array.from({ length: Number(values.kept) }, keep)]);
clearInterval(reporting);
report(true);
