import { spawnSync } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import type { Lab } from '../lib/lab/topology.js';

/** What is measured between the client of a lab and its backends. */

export const HTTP = 80;
export const IPERF = 5201;
/** Where datagrams end: a socket that nobody reads from. */
export const SINK = 9;

export type Measure = 'bulk' | 'download' | 'connections' | 'keepalive' | 'p50' | 'udp';

export const MEASURES: Readonly<Record<Measure, { title: string; unit: string }>> = {
  bulk: { title: 'TCP upload, 1 stream', unit: 'Gb/s' },
  download: { title: 'TCP download, 1 stream', unit: 'Gb/s' },
  connections: { title: 'new connections', unit: '/s' },
  keepalive: { title: 'keep-alive requests', unit: '/s' },
  p50: { title: 'p50, one connection', unit: 'us' },
  udp: { title: 'UDP, 64 bytes', unit: 'packets/s' },
};

/** @param target the address the client calls: a VIP, or a backend's */
export async function measure(lab: Lab, target: string, what: Measure, seconds: number): Promise<number> {
  const url = `http://${target}:${HTTP}/`;
  const client = async (command: string, ...args: string[]): Promise<string> =>
    (await lab.exec('client', command, args, { timeoutMs: (seconds + 20) * 1000 })).stdout;
  switch (what) {
    case 'bulk':
    case 'download': {
      const reverse = what === 'download' ? ['-R'] : [];
      const report = JSON.parse(await client('iperf3', '-c', target, '-t', String(seconds), '-J', ...reverse));
      return report.end.sum_received.bits_per_second / 1e9;
    }
    case 'udp':
      return datagramRate(lab, target, seconds);
    case 'connections':
      return requestRate(await client('wrk', '-t1', '-c64', `-d${seconds}`, '-H', 'Connection: close', url));
    case 'keepalive':
      return requestRate(await client('wrk', '-t1', '-c64', `-d${seconds}`, url));
    case 'p50': {
      const report = await client('wrk', '-t1', '-c1', `-d${seconds}`, '--latency', url);
      const [, value, unit] = /50%\s+([\d.]+)(us|ms)/.exec(report)!;
      return Number(value) * (unit === 'ms' ? 1000 : 1);
    }
  }
}

/** Datagrams a second that reach the backend when the client sends as many as it can. */
async function datagramRate(lab: Lab, target: string, seconds: number): Promise<number> {
  const before = await receivedDatagrams(lab);
  const sender = fileURLToPath(new URL('udp-sender.mjs', import.meta.url));
  await lab.exec('client', process.execPath, [sender, target, String(SINK), String(seconds)], { timeoutMs: 60_000 });
  return ((await receivedDatagrams(lab)) - before) / seconds;
}

/** Delivered to the sink's socket, or to its full queue: what matters is that they came. */
async function receivedDatagrams(lab: Lab): Promise<number> {
  const { stdout } = await lab.exec('b1', 'cat', ['/proc/net/snmp']);
  const [names, values] = stdout
    .split('\n')
    .filter((line) => line.startsWith('Udp:'))
    .map((line) => line.split(' '));
  const field = (name: string): number => Number(values![names!.indexOf(name)]);
  return field('InDatagrams') + field('RcvbufErrors') + field('NoPorts');
}

function requestRate(output: string): number {
  return Number(/Requests\/sec:\s+([\d.]+)/.exec(output)?.[1] ?? Number.NaN);
}

export function isInstalled(command: string): boolean {
  return spawnSync('sh', ['-c', `command -v ${command}`]).status === 0;
}

/** Servers in every backend, for all that is measured. */
export async function startBackends(lab: Lab): Promise<void> {
  for (const name of lab.backends) {
    const file = join(lab.dir, `nginx-${name}.conf`);
    writeFileSync(
      file,
      `worker_processes 1;\ndaemon off;\npid ${lab.dir}/nginx-${name}.pid;\nerror_log ${lab.dir}/nginx-${name}.err;\nevents { worker_connections 8192; }\nhttp { access_log off; keepalive_requests 1000000000; server { listen ${HTTP} backlog=8192; location / { return 200 "${name}\\n"; } } }\n`,
    );
    lab.spawn(name, `nginx-${name}`, 'nginx', ['-c', file]);
    lab.spawn(name, `iperf-${name}`, 'iperf3', ['-s']);
  }
  const sink = `import socket, time\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.bind(('0.0.0.0', ${SINK}))\ntime.sleep(1e6)`;
  lab.spawn('b1', 'sink', 'python3', ['-c', sink]);
  await lab.exec('client', 'sysctl', ['-qw', 'net.ipv4.ip_local_port_range=1024 65535', 'net.ipv4.tcp_tw_reuse=1']);
  await new Promise((resolve) => setTimeout(resolve, 700));
}
