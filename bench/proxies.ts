import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { backendAddress, type Lab, VIP } from '../lib/lab/topology.js';
import { HTTP, IPERF, isInstalled, type Measure, SINK } from './measures.js';
import type { Contender, Section } from './section.js';

/*
 * weir, HAProxy, nginx stream and kernel nftables in the same gateway.
 *
 *     client: wrk, iperf3 --- gw: one of the contenders, alone --- b1 b2 b3: nginx, iperf3
 *
 * nftables is unloaded after its turn, since its conntrack hooks would slow down everything that is forwarded.
 */

const TCP: readonly Measure[] = ['bulk', 'connections', 'keepalive', 'p50'];
const backends = [1, 2, 3].map(backendAddress);

/** A peer that is not installed is left out, by name. */
export function proxies(lab: Lab): Section {
  const contenders = contendersIn(lab).filter(({ name, needs }) => {
    if (isInstalled(needs)) return true;
    console.error(`skipped: ${name} (${needs} is not installed)`);
    return false;
  });
  const peers = contenders.filter(({ name }) => name !== 'weir');
  return { contenders, ratios: peers.map(({ name }) => ['weir', name] as const) };
}

function contendersIn(lab: Lab): (Contender & { readonly needs: string })[] {
  return [
    {
      name: 'weir',
      needs: 'node',
      lab,
      target: VIP,
      does: [...TCP, 'udp'],
      async start() {
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
      lab,
      target: VIP,
      does: TCP,
      async start() {
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
      lab,
      target: VIP,
      does: ['udp'],
      async start() {
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
      lab,
      target: VIP,
      does: [...TCP, 'udp'],
      async start() {
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
}

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
