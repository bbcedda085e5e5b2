import type { ChildProcess } from 'node:child_process';
import { IPERF_PORT } from './demo-config.js';
import type { LoadReport } from './load.js';
import { nodeCommand } from './process.js';
import { type Lab, VIP } from './topology.js';
import type { TransferReport } from './transfers.js';

/*
 *   client ---+--- load          many short connections, some long ones, or datagrams
 *             +--- transfers     downloads and uploads, checked at the end
 *             +--- iperf3        as fast as it goes
 */

const IPERF_SECONDS = 2;

interface Watching<Report> {
  readonly onReport?: (report: Report) => void;
  readonly started?: (child: ChildProcess) => void;
  readonly timeoutMs?: number;
}

/** Runs the load of load.ts from the client against a port of the VIP and resolves with its last report. */
export function load(
  lab: Lab,
  port: number,
  options: readonly string[],
  watching: Watching<LoadReport> = {},
): Promise<LoadReport> {
  return watch(lab, 'load', port, options, watching);
}

/** The same for transfers.ts. */
export function transfers(
  lab: Lab,
  port: number,
  options: readonly string[],
  watching: Watching<TransferReport> = {},
): Promise<TransferReport> {
  return watch(lab, 'transfers', port, options, watching);
}

async function watch<Report extends { readonly done: boolean }>(
  lab: Lab,
  program: 'load' | 'transfers',
  port: number,
  options: readonly string[],
  { onReport, ...running }: Watching<Report>,
): Promise<Report> {
  const [command, ...args] = nodeCommand(program);
  let text = '';
  let last: Report | undefined;
  const { stderr } = await lab.exec('client', command!, [...args, '--target', `${VIP}:${port}`, ...options], {
    ...running,
    onOutput: (part) => {
      text += part;
      const end = text.lastIndexOf('\n') + 1;
      for (const line of text.slice(0, end).split('\n')) {
        if (line === '') continue;
        last = JSON.parse(line) as Report;
        onReport?.(last);
      }
      text = text.slice(end);
    },
  });
  if (last?.done) return last;
  throw new Error(`the ${program} ended early: ${stderr.trim() || 'nothing was said'}`);
}

export interface IperfSum {
  readonly bits_per_second?: number;
  readonly packets?: number;
  readonly lost_packets?: number;
  readonly seconds?: number;
}

/** Starts iperf3's server in the first backend. @returns false when there is no iperf3 here */
export async function startIperf(lab: Lab): Promise<boolean> {
  const found = await lab.exec('client', 'sh', ['-c', 'command -v iperf3']);
  if (found.status !== 0) return false;
  const server = lab.spawn('b1', 'iperf3', 'iperf3', ['-s', '-p', String(IPERF_PORT)]);
  const script = `for i in $(seq 100); do [ -n "$(ss -Hltn sport = :${IPERF_PORT})" ] && exit; sleep 0.02; done`;
  await Promise.race([lab.exec('b1', 'sh', ['-c', script]), server.ended]);
  return true;
}

/** Two seconds of iperf3 through the VIP. @returns what arrived, and ` (what went wrong)` or nothing */
export async function iperf(lab: Lab, options: readonly string[]): Promise<{ sum?: IperfSum; error: string }> {
  const args = ['-c', VIP, '-p', String(IPERF_PORT), '-t', String(IPERF_SECONDS), '-J', ...options];
  const { stdout, stderr } = await lab.exec('client', 'iperf3', args, { timeoutMs: (IPERF_SECONDS + 8) * 1000 });
  try {
    const { end, error } = JSON.parse(stdout) as { end?: { sum_received?: IperfSum; sum?: IperfSum }; error?: string };
    const sum = options.includes('-u') ? end?.sum : end?.sum_received;
    return { ...(sum ? { sum } : {}), error: error ? ` (iperf3: ${error})` : '' };
  } catch {
    return { error: ` (iperf3: ${stderr.trim() || 'no result'})` };
  }
}
