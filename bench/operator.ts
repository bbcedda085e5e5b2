import { spawn } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { Readable } from 'node:stream';
import { setTimeout as sleep } from 'node:timers/promises';
import { callJson, callStream } from '../lib/cli/client.js';
import type { StatusView } from '../lib/control/view.js';
import { backendAddress, type Lab, VIP, type WeirProcess } from '../lib/lab/topology.js';
import { HTTP } from './measures.js';

/*
 * What an operator does, and what the packets feel of it: a configuration of 1,000 services with 10 backends each under as many
 * requests as the machine does, and a table with a million connections.
 *
 *     client: wrk --- gw: weir --- b1 b2 b3: nginx           meanwhile on gw: reloads, scrapes, lists, explanations
 *
 * Batches are counted by weir itself, from their arrival to the last packet's verdict. Client, servers and weir share the machine, so
 * that some are interrupted whatever weir does: what counts is the difference to the first row, in which nobody asks for anything.
 */

const SERVICES = 1000;
const BACKENDS = 10;
const FLOWS = 1_000_000;
/** A bucket of weir_batch_duration_seconds: the nearest to 2 ms. */
const LONG_BATCH = '0.002048';
const CLIENTS = 64;

/** One action: how often, how long each, and what became of batches and requests meanwhile. */
export interface OperatorRow {
  readonly what: string;
  readonly times: number;
  readonly medianMs: number;
  readonly worstMs: number;
  /** Until the first byte of the answer. */
  readonly firstByteMs: number;
  readonly requestsPerSecond: number;
  readonly failedRequests: number;
  readonly batches: number;
  readonly longBatches: number;
}

/** @param lab of shape inline, with three backends and their servers @param seconds for each row, at the least */
export async function measureOperator(lab: Lab, seconds: number): Promise<OperatorRow[]> {
  const rows: OperatorRow[] = [];
  const weir = await lab.startWeir(configuration(0));
  const take = async (what: string, act?: (n: number) => Promise<number>): Promise<void> => {
    const row = await measureWhile(lab, weir, seconds, what, act);
    console.error(`operator  ${renderRow(row)}`);
    rows.push(row);
  };
  try {
    await take('nothing');
    await take('reload: a weight', (n) => reload(weir, configuration(n)));
    await take('reload: 100 services leave or return', (n) => reload(weir, configuration(0, n % 2 === 0 ? 0 : 100)));
    await reload(weir, configuration(0));
    await take('scrape', () => get(weir, '/metrics'));
    await importFlows(weir);
    await take('nothing, at 1M flows');
    await take('reload: a weight, at 1M flows', (n) => reload(weir, configuration(n)));
    await take('scrape, at 1M flows', () => get(weir, '/metrics'));
    await take('ct list of a client, at 1M flows', () => get(weir, '/v1/ct', { client: '10.9.0.1' }));
    await take('explain, at 1M flows', () =>
      get(weir, '/v1/explain', { proto: 'tcp', src: '10.1.0.2:4000', dst: `${VIP}:80` }),
    );
  } finally {
    await weir.stop();
  }
  return rows;
}

export function renderOperator(rows: readonly OperatorRow[]): string {
  const head =
    '| meanwhile | times | median | worst | first byte | requests/s | failed | batches | > 2 ms |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|';
  return [head, ...rows.map(renderRow), ''].join('\n');
}

function renderRow(row: OperatorRow): string {
  const ms = (value: number): string => (row.times === 0 ? '-' : `${value.toFixed(value < 100 ? 1 : 0)} ms`);
  const share = `${row.longBatches} (${((100 * row.longBatches) / row.batches).toFixed(3)} %)`;
  const cells = [row.times, ms(row.medianMs), ms(row.worstMs), ms(row.firstByteMs), Math.round(row.requestsPerSecond)];
  return `| ${[row.what, ...cells, row.failedRequests, row.batches, share].join(' | ')} |`;
}

/** The real service is the last; the others have backends that nobody calls. */
function configuration(variant: number, absent = 0): string {
  const services = Array.from({ length: SERVICES - 1 - absent }, (_, i) => {
    const backends = Array.from({ length: BACKENDS }, (_, j) => {
      const weight = i === 0 && j === 0 ? 1 + (variant % 7) : 1;
      return `{ name: b${j}, address: 10.2.0.${50 + ((i + j) % 200)}, port: ${2000 + i}, weight: ${weight} }`;
    });
    return `  - { name: s${i}, address: 10.96.${1 + (i >> 7)}.${1 + (i & 127)}, port: 80, backends: [${backends.join(', ')}] }`;
  });
  const real = [1, 2, 3].map((n) => `{ address: ${backendAddress(n)}, port: ${HTTP} }`).join(', ');
  services.push(`  - { name: web, address: ${VIP}, port: 80, backends: [${real}] }`);
  return `admin: { listen: off }\nconntrack: { tcpEntries: 2097152 }\nservices:\n${services.join('\n')}\n`;
}

async function measureWhile(
  lab: Lab,
  weir: WeirProcess,
  seconds: number,
  what: string,
  act?: (n: number) => Promise<number>,
): Promise<OperatorRow> {
  const load = startLoad(lab, seconds + 60);
  await sleep(1000);
  const before = await batches(weir);
  const beganMs = performance.now();
  const took: number[] = [];
  const firstBytes: number[] = [];
  while (performance.now() - beganMs < seconds * 1000) {
    if (act === undefined) {
      await sleep(100);
      continue;
    }
    const startMs = performance.now();
    firstBytes.push(await act(took.length + 1));
    took.push(performance.now() - startMs);
    await sleep(200);
  }
  const after = await batches(weir);
  const { requestsPerSecond, failed } = await load.stop();
  return {
    what,
    times: took.length,
    medianMs: middle(took),
    worstMs: Math.max(...took),
    firstByteMs: middle(firstBytes),
    requestsPerSecond,
    failedRequests: failed,
    batches: after.all - before.all,
    longBatches: after.long - before.long,
  };
}

/** wrk says what it did when it is interrupted. */
function startLoad(lab: Lab, seconds: number): { stop(): Promise<{ requestsPerSecond: number; failed: number }> } {
  const args = ['-t1', `-c${CLIENTS}`, `-d${seconds}`, `http://${VIP}:80/`];
  const wrk = spawn('ip', ['netns', 'exec', lab.namespace('client'), 'wrk', ...args], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let said = '';
  wrk.stdout.setEncoding('utf8').on('data', (text) => (said += text));
  const ended = new Promise((resolve) => wrk.on('close', resolve));
  return {
    async stop() {
      wrk.kill('SIGINT');
      await ended;
      const errors = /connect (\d+), read (\d+), write (\d+), timeout (\d+)/.exec(said)?.slice(1).map(Number) ?? [];
      const refused = Number(/Non-2xx or 3xx responses: (\d+)/.exec(said)?.[1] ?? 0);
      return {
        requestsPerSecond: Number(/Requests\/sec:\s+([\d.]+)/.exec(said)?.[1] ?? Number.NaN),
        failed: errors.reduce((sum, count) => sum + count, refused),
      };
    },
  };
}

async function batches({ socket }: WeirProcess): Promise<{ all: number; long: number }> {
  const chunks: Uint8Array[] = [];
  await callStream({ socket, path: '/metrics' }, (chunk) => void chunks.push(chunk));
  const text = Buffer.concat(chunks).toString();
  const value = (name: string): number =>
    Number(
      text
        .split('\n')
        .find((line) => line.startsWith(name))!
        .split(' ')[1],
    );
  const all = value('weir_batch_duration_seconds_count');
  return { all, long: all - value(`weir_batch_duration_seconds_bucket{le="${LONG_BATCH}"}`) };
}

/** @returns ms until the first byte of the answer */
async function get({ socket }: WeirProcess, path: string, query: Record<string, string> = {}): Promise<number> {
  const beganMs = performance.now();
  let firstMs = 0;
  await callStream({ socket, path, query }, () => {
    firstMs ||= performance.now() - beganMs;
  });
  return firstMs;
}

/** @returns ms until weir says that the configuration is in use */
async function reload({ socket, configPath }: WeirProcess, text: string): Promise<number> {
  writeFileSync(configPath, text);
  const beganMs = performance.now();
  await callJson({ socket, method: 'POST', path: '/v1/reload' });
  return performance.now() - beganMs;
}

async function importFlows({ socket }: WeirProcess): Promise<void> {
  console.error(`operator  ${FLOWS} flows are imported`);
  const body = Readable.from(exportedFlows());
  await callJson({ socket, method: 'POST', path: '/v1/ct/import', body });
  const { conntrack } = await callJson<StatusView>({ socket, path: '/v1/status' });
  if (conntrack.tcp.entries < FLOWS) throw new Error(`only ${conntrack.tcp.entries} flows`);
}

function* exportedFlows(): Generator<string> {
  yield '{"weir":"conntrack","version":1,"release":"0.1.0"}\n';
  const ends = '{"end":1001,"acked":1001,"window":502,"scale":7}';
  const counts = '{"original":3,"reply":2}';
  const rest = `"backend":"${backendAddress(1)}:${HTTP}","state":"ESTABLISHED","flags":["SeenNonSyn"],"expiresIn":7999,"age":12,"idle":{"original":0,"reply":1},"flagsSeen":{"original":26,"reply":18},"packets":${counts},"bytes":${counts},"tcp":{"windows":true,"original":${ends},"reply":${ends}}}\n`;
  for (let i = 0; i < FLOWS; i++) {
    const client = `10.9.${(i >> 15) & 255}.${1 + ((i >> 8) & 127)}:${1024 + (i & 255)}`;
    yield `{"proto":"tcp","type":"OUT","client":"${client}","vip":"${VIP}:80",${rest}`;
  }
  yield '{"end":true}\n';
}

function middle(values: readonly number[]): number {
  return [...values].sort((a, b) => a - b)[values.length >> 1] ?? Number.NaN;
}
