import { spawnSync } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { cpus, release } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { backendAddress, Lab, VIP } from '../lib/lab/topology.js';

/*
 * `npm run bench:net`: weir, HAProxy, nginx stream and kernel nftables in the same lab, in interleaved rounds, so that a noisy
 * machine disturbs all alike. Only ratios mean anything.
 *
 *     client: wrk, iperf3 --- gw: one of the contenders, alone --- b1 b2 b3: nginx, iperf3
 *
 * A contender runs only while it is measured; nftables in particular is unloaded afterwards, since its conntrack hooks would
 * slow down everything that is forwarded.
 */

const { values: options } = parseArgs({
  options: {
    rounds: { type: 'string', default: '5' },
    seconds: { type: 'string', default: '3' },
    json: { type: 'string' },
    only: { type: 'string' },
  },
});
const ROUNDS = Number(options.rounds);
const SECONDS = options.seconds;
const HTTP = 80;
const IPERF = 5201;
/** Where datagrams end: a socket that nobody reads from. */
const SINK = 9;

interface Contender {
  readonly name: string;
  readonly needs: string;
  /** Which measurements it can take part in. */
  readonly does: readonly Measure[];
  /** Returns how to stop it. */
  start(lab: Lab): Promise<() => Promise<void>>;
}

type Measure = 'bulk' | 'connections' | 'keepalive' | 'p50' | 'udp';

const MEASURES: Readonly<Record<Measure, { title: string; unit: string; lowerIsBetter?: true }>> = {
  bulk: { title: 'TCP bulk, 1 stream', unit: 'Gb/s' },
  connections: { title: 'new connections', unit: '/s' },
  keepalive: { title: 'keep-alive requests', unit: '/s' },
  p50: { title: 'p50, one connection', unit: 'us', lowerIsBetter: true },
  udp: { title: 'UDP, 64 bytes', unit: 'packets/s' },
};

const TCP: readonly Measure[] = ['bulk', 'connections', 'keepalive', 'p50'];
const backends = [1, 2, 3].map(backendAddress);

const contenders: readonly Contender[] = [
  {
    name: 'weir',
    needs: 'node',
    does: [...TCP, 'udp'],
    async start(lab) {
      const list = (port: number, count: number): string =>
        backends
          .slice(0, count)
          .map((address) => `{ address: ${address}, port: ${port} }`)
          .join(', ');
      const service = (name: string, port: number, protocol: string, to: string): string =>
        `  - { name: ${name}, address: ${VIP}, port: ${port}, protocol: ${protocol}, algorithm: random, backends: [${to}] }\n`;
      const text = `admin: { listen: off }\nservices:\n${service('web', HTTP, 'tcp', list(HTTP, 3))}${service('bulk', IPERF, 'tcp', list(IPERF, 1))}${service('sink', SINK, 'udp', list(SINK, 1))}`;
      const weir = await lab.startWeir(text);
      return async () => void (await weir.stop());
    },
  },
  {
    name: 'haproxy',
    needs: 'haproxy',
    does: TCP,
    async start(lab) {
      const file = join(lab.dir, 'haproxy.cfg');
      const servers = (port: number, count: number): string =>
        backends
          .slice(0, count)
          .map((address, i) => `  server b${i + 1} ${address}:${port}`)
          .join('\n');
      writeFileSync(
        file,
        `global\n  nbthread 1\n  maxconn 8000\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\nlisten web\n  bind ${VIP}:${HTTP}\n  balance random\n${servers(HTTP, 3)}\nlisten bulk\n  bind ${VIP}:${IPERF}\n${servers(IPERF, 1)}\n`,
      );
      return proxy(lab, 'haproxy', ['-db', '-f', file]);
    },
  },
  {
    name: 'nginx stream',
    needs: 'nginx',
    does: ['udp'],
    async start(lab) {
      const file = join(lab.dir, 'stream.conf');
      const module = '/usr/lib/nginx/modules/ngx_stream_module.so';
      writeFileSync(
        file,
        `load_module ${module};\nworker_processes 1;\ndaemon off;\npid ${lab.dir}/stream.pid;\nerror_log ${lab.dir}/stream.err;\nevents { worker_connections 4096; }\nstream {\n  server { listen ${VIP}:${SINK} udp; proxy_pass ${backends[0]}:${SINK}; }\n}\n`,
      );
      return proxy(lab, 'nginx', ['-c', file]);
    },
  },
  {
    name: 'nftables',
    needs: 'nft',
    does: [...TCP, 'udp'],
    async start(lab) {
      const map = backends.map((address, i) => `${i} : ${address}`).join(', ');
      const rules = [
        'table ip bench {',
        'chain prerouting {',
        'type nat hook prerouting priority -100',
        `ip daddr ${VIP} tcp dport ${HTTP} dnat to numgen random mod 3 map { ${map} }`,
        `ip daddr ${VIP} tcp dport ${IPERF} dnat to ${backends[0]}`,
        `ip daddr ${VIP} udp dport ${SINK} dnat to ${backends[0]}`,
        '}',
        '}\n',
      ].join('\n');
      const { status, stderr } = await lab.exec('gw', 'nft', ['-f', '-'], { input: rules });
      if (status !== 0) throw new Error(`nft: ${stderr}`);
      return async () => void (await lab.exec('gw', 'nft', ['flush', 'ruleset']));
    },
  },
];

/** A proxy in the gateway, which owns the VIP while it runs. */
async function proxy(lab: Lab, command: string, args: readonly string[]): Promise<() => Promise<void>> {
  await lab.exec('gw', 'ip', ['addr', 'add', `${VIP}/32`, 'dev', 'lo']);
  const { pid, ended, logPath } = lab.spawn('gw', command, command, args);
  let hasEnded = false;
  void ended.then(() => {
    hasEnded = true;
  });
  await new Promise((resolve) => setTimeout(resolve, 500));
  if (hasEnded) console.error(`${command} did not stay: ${readFileSync(logPath, 'utf8').trim()}`);
  return async () => {
    if (!hasEnded) process.kill(pid, 'SIGTERM');
    await ended;
    await lab.exec('gw', 'ip', ['addr', 'del', `${VIP}/32`, 'dev', 'lo']);
  };
}

async function measure(lab: Lab, what: Measure): Promise<number> {
  const url = `http://${VIP}:${HTTP}/`;
  const limit = { timeoutMs: (Number(SECONDS) + 20) * 1000 };
  const client = async (command: string, ...args: string[]): Promise<string> =>
    (await lab.exec('client', command, args, limit)).stdout;
  switch (what) {
    case 'bulk':
      return JSON.parse(await client('iperf3', '-c', VIP, '-t', SECONDS, '-J')).end.sum_received.bits_per_second / 1e9;
    case 'udp':
      return datagramRate(lab);
    case 'connections':
      return requestRate(await client('wrk', '-t1', '-c64', `-d${SECONDS}`, '-H', 'Connection: close', url));
    case 'keepalive':
      return requestRate(await client('wrk', '-t1', '-c64', `-d${SECONDS}`, url));
    case 'p50': {
      const [, value, unit] = /50%\s+([\d.]+)(us|ms)/.exec(
        await client('wrk', '-t1', '-c1', `-d${SECONDS}`, '--latency', url),
      )!;
      return Number(value) * (unit === 'ms' ? 1000 : 1);
    }
  }
}

/** Datagrams a second that reach the backend when the client sends as many as it can. */
async function datagramRate(lab: Lab): Promise<number> {
  const before = await receivedDatagrams(lab);
  const sender = fileURLToPath(new URL('udp-sender.mjs', import.meta.url));
  await lab.exec('client', process.execPath, [sender, VIP, String(SINK), SECONDS], { timeoutMs: 60_000 });
  return ((await receivedDatagrams(lab)) - before) / Number(SECONDS);
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

function median(values: readonly number[]): number {
  const sorted = values.filter((value) => !Number.isNaN(value)).sort((a, b) => a - b);
  return sorted.length === 0 ? Number.NaN : sorted[sorted.length >> 1]!;
}

function isInstalled(command: string): boolean {
  return spawnSync('sh', ['-c', `command -v ${command}`]).status === 0;
}

async function startBackends(lab: Lab): Promise<void> {
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

async function main(): Promise<void> {
  for (const tool of ['wrk', 'iperf3', 'nginx', 'python3']) {
    if (!isInstalled(tool))
      throw new Error(`bench:net needs ${tool}: apt-get install wrk iperf3 nginx-light libnginx-mod-stream python3`);
  }
  const chosen = contenders.filter(({ name }) => options.only === undefined || options.only.split(',').includes(name));
  const running = chosen.filter(({ name, needs }) => {
    if (isInstalled(needs)) return true;
    console.error(`skipped: ${name} (${needs} is not installed)`);
    return false;
  });
  const results = new Map(running.map(({ name }) => [name, new Map<Measure, number[]>()]));
  const lab = await Lab.create({ prefix: `weir-n${process.pid}` });
  try {
    await startBackends(lab);
    for (let round = 1; round <= ROUNDS; round++) {
      for (const contender of running) {
        const stop = await contender.start(lab);
        try {
          for (const what of contender.does) {
            const value = await measure(lab, what).catch(() => Number.NaN);
            const series = results.get(contender.name)!;
            series.set(what, [...(series.get(what) ?? []), value]);
            console.error(
              `round ${round}/${ROUNDS}  ${contender.name.padEnd(13)} ${MEASURES[what].title.padEnd(22)} ${format(value)} ${MEASURES[what].unit}`,
            );
          }
        } finally {
          await stop();
        }
      }
    }
  } finally {
    await lab.destroy();
  }
  report(results);
}

function report(results: ReadonlyMap<string, ReadonlyMap<Measure, readonly number[]>>): void {
  const names = [...results.keys()];
  const rows = (Object.keys(MEASURES) as Measure[]).map((what) => {
    const medians = Object.fromEntries(names.map((name) => [name, median(results.get(name)!.get(what) ?? [])]));
    const ratios = Object.fromEntries(
      names.filter((name) => name !== 'weir').map((name) => [name, medians.weir! / medians[name]!]),
    );
    return { what, ...MEASURES[what], medians, ratios };
  });
  const machine = `${cpus().length} x ${cpus()[0]?.model}, Linux ${release()}, Node.js ${process.version}`;
  console.log(`${machine}; medians of ${ROUNDS} rounds of ${SECONDS} s\n`);
  console.log(
    `| | ${names.join(' | ')} | ${Object.keys(rows[0]!.ratios)
      .map((name) => `weir / ${name}`)
      .join(' | ')} |`,
  );
  console.log(
    `|---|${names.map(() => '---:').join('|')}|${Object.keys(rows[0]!.ratios)
      .map(() => '---:')
      .join('|')}|`,
  );
  for (const { title, unit, medians, ratios } of rows) {
    const cells = [
      ...names.map((name) => format(medians[name]!)),
      ...Object.values(ratios).map((ratio) => (Number.isNaN(ratio) ? '-' : ratio.toFixed(2))),
    ];
    console.log(`| ${title}, ${unit} | ${cells.join(' | ')} |`);
  }
  if (options.json !== undefined)
    writeFileSync(options.json, `${JSON.stringify({ machine, rounds: ROUNDS, rows }, null, 2)}\n`);
}

function format(value: number): string {
  if (Number.isNaN(value)) return '-';
  return value < 100 ? value.toFixed(2) : Math.round(value).toLocaleString('en-US');
}

await main();
