import { readdirSync, readFileSync, renameSync, writeFileSync } from 'node:fs';
import { Readable } from 'node:stream';
import { setTimeout as sleep } from 'node:timers/promises';
import t from 'tap';
import { below, type Random, seededRandom } from '../../lib/base/random.js';
import { callJson, callStream } from '../../lib/cli/client.js';
import {
  backendAddress,
  CLIENT_ADDRESS,
  ECHO_PORT,
  HTTP_PORT,
  type Lab,
  VIP,
  type WeirProcess,
} from '../../lib/lab/topology.js';
import { createGatewayLab, IPERF_PORT } from '../support/gateway-lab.js';
import { Load } from '../support/load.js';
import { needsRoot } from '../support/skip.js';

/**
 * Everything at once, for a while: requests, one long stream and datagrams, while the configuration changes in every way that may cost
 * nobody a request, backends are drained and fall ill, and the operator looks at all there is to see.
 *
 * By hand: WEIR_SOAK_SECONDS=600 WEIR_SOAK_REPORT=docs/soak.md
 */

const { WEIR_SOAK_SECONDS = '60', WEIR_SOAK_REPORT, WEIR_SOAK_SEED = '1' } = process.env;
const SECONDS = Number(WEIR_SOAK_SECONDS);
/** At the least, however long that takes: 200 in ten minutes. */
const RELOADS = Math.ceil(SECONDS / 3);
const CLIENTS = 50;
/** From one thing that the operator does to the next. */
const PAUSE_MS = 100;
/** Where a backend says that it is well: a listener beside its servers. */
const HEALTH_PORT = 8099;
const LISTENER = `
import socket
s = socket.create_server(('', ${HEALTH_PORT}))
while True: s.accept()[0].close()
`;

/** A configuration that serves all that goes on, and differs from others in what a reload may change. */
function variant(lab: Lab, random: Random): string {
  const pick = <T>(...choices: readonly T[]): T => choices[below(random, choices.length)]!;
  const health = `health: { type: tcp, port: ${HEALTH_PORT}, interval: ${pick('200ms', '300ms')}, timeout: 1s, rise: 2, fall: ${pick(2, 3)} }`;
  // One backend keeps its weight, so that there always is one.
  const members = lab.backends.map((name, i) => ({
    name,
    address: backendAddress(i + 1),
    weight: i === 0 ? 1 : pick(0, 1, 1, 5),
  }));
  const list = (port: number): string => {
    const named = members.map(
      ({ name, address, weight }) => `{ name: ${name}, address: ${address}, port: ${port}, weight: ${weight} }`,
    );
    const present = below(random, 4) === 0 ? named.slice(0, 2) : named;
    return `[${(below(random, 2) === 0 ? present : present.toReversed()).join(', ')}]`;
  };
  const services = [
    `{ name: web, address: ${VIP}, port: 80, algorithm: ${pick('random', 'maglev')}, ${health}, backends: ${list(HTTP_PORT)} }`,
    `{ name: hidden, address: ${VIP}, port: 81, mode: snat, algorithm: ${pick('random', 'maglev')}, ${health}, backends: ${list(HTTP_PORT)} }`,
    `{ name: echo, address: ${VIP}, port: 7, protocol: udp, algorithm: ${pick('random', 'maglev')}, backends: ${list(ECHO_PORT)} }`,
    `{ name: bulk, address: ${VIP}, port: ${IPERF_PORT}, backends: [{ address: ${backendAddress(1)}, port: ${IPERF_PORT} }] }`,
    ...(below(random, 2) === 0
      ? [`{ name: more, address: 10.96.0.${20 + below(random, 5)}, port: 80, backends: ${list(HTTP_PORT)} }`]
      : []),
  ];
  return [
    `# ${below(random, 1e6)}`,
    'snat: { addresses: [10.96.255.1] }',
    'admin: { listen: off }',
    // Small tables are soon touched as a whole: from then on memory grows by what leaks.
    `conntrack: { tcpEntries: 65536, anyEntries: 16384, timeouts: { any: ${pick('50s', '60s')} } }`,
    'services:',
    ...(below(random, 2) === 0 ? services : services.toReversed()).map((service) => `  - ${service}`),
    '',
  ].join('\n');
}

/** What an operator does, each with its share of the turns. */
function actions(
  lab: Lab,
  weir: WeirProcess,
  random: Random,
): ReadonlyArray<readonly [string, number, () => Promise<void>]> {
  const { socket, configPath } = weir;
  const read = (path: string, query: Record<string, string> = {}): Promise<void> =>
    callStream({ socket, path, query }, () => {});
  const post = async (path: string, query: Record<string, string> = {}): Promise<void> => {
    await callJson({ socket, method: 'POST', path, query });
  };
  const write = (text: string): void => writeFileSync(configPath, text);
  const anyBackend = (): string => `b${2 + below(random, 2)}`;
  return [
    [
      'reloads by command',
      10,
      () => {
        write(variant(lab, random));
        return post('/v1/reload');
      },
    ],
    [
      'reloads by SIGHUP',
      3,
      async () => {
        write(variant(lab, random));
        process.kill(weir.pid, 'SIGHUP');
      },
    ],
    [
      'files replaced',
      3,
      async () => {
        writeFileSync(`${configPath}.new`, variant(lab, random));
        renameSync(`${configPath}.new`, configPath);
      },
    ],
    ['files that are refused', 1, async () => write('services: [{ name: web')],
    ['drains', 2, () => post('/v1/drain', { service: 'web', backend: anyBackend() }).catch(() => {})],
    ['drains ended', 3, () => post('/v1/undrain', { service: 'web', backend: anyBackend() }).catch(() => {})],
    ['lists', 3, () => read('/v1/ct')],
    ['lists of a service', 1, () => read('/v1/ct', { service: 'web', format: 'cilium' })],
    ['scrapes', 3, () => read('/metrics')],
    ['status', 2, () => read('/v1/status')],
    ['statistics', 1, () => read('/v1/ct/stats')],
    ['exports', 1, () => read('/v1/ct/export')],
    ['captures', 1, () => read('/v1/capture', { service: 'web', count: '200', seconds: '2' })],
    [
      'packets explained',
      3,
      () =>
        read('/v1/explain', {
          proto: 'tcp',
          src: `${CLIENT_ADDRESS}:${1024 + below(random, 60_000)}`,
          dst: `${VIP}:80`,
        }),
    ],
    [
      'reloads planned',
      2,
      async () => {
        const body = Readable.from([Buffer.from(variant(lab, random))]);
        await callJson({ socket, method: 'POST', path: '/v1/plan', body });
      },
    ],
  ];
}

interface Sample {
  readonly atSeconds: number;
  readonly rssMiB: number;
  readonly descriptors: number;
}

function sample(pid: number, startedMs: number): Sample {
  const pages = Number(readFileSync(`/proc/${pid}/statm`, 'utf8').split(' ')[1]);
  return {
    atSeconds: Math.round((performance.now() - startedMs) / 1000),
    rssMiB: Math.round((pages * 4096) / (1 << 20)),
    descriptors: readdirSync(`/proc/${pid}/fd`).length,
  };
}

t.setTimeout((SECONDS + 600) * 1000);

t.test(`${SECONDS} s of everything`, needsRoot(t, 'ip', 'iperf3', 'python3'), async (t) => {
  const random = seededRandom(Number(WEIR_SOAK_SEED));
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  lab.spawn('b1', 'iperf3', 'iperf3', ['-s']);
  const listeners = new Map(
    lab.backends.map((name) => [name, lab.spawn(name, `health-${name}`, 'python3', ['-c', LISTENER])]),
  );
  const weir = await lab.startWeir(variant(lab, random));

  const loads = {
    'requests, dnat': new Load(lab, `${VIP}:80`, '--parallel', `${CLIENTS / 2}`, '--kept', '10'),
    'requests, snat': new Load(lab, `${VIP}:81`, '--parallel', `${CLIENTS / 2}`, '--kept', '10'),
    datagrams: new Load(lab, `${VIP}:7`, '--udp'),
  };
  const stream = lab.exec('client', 'iperf3', ['-c', VIP, '-t', String(SECONDS), '-b', '1G', '-J'], {
    timeoutMs: (SECONDS + 60) * 1000,
  });

  const startedMs = performance.now();
  const elapsedSeconds = (): number => (performance.now() - startedMs) / 1000;
  const deck = actions(lab, weir, random).flatMap(([name, share, act]) =>
    Array<readonly [string, () => Promise<void>]>(share).fill([name, act]),
  );
  const done = new Map<string, number>();
  const count = (name: string): void => void done.set(name, (done.get(name) ?? 0) + 1);
  const samples: Sample[] = [];
  const flap = async (): Promise<void> => {
    const name = `b${2 + below(random, 2)}`;
    process.kill(listeners.get(name)!.pid, 'SIGKILL');
    await sleep(1500);
    listeners.set(name, lab.spawn(name, `health-${name}`, 'python3', ['-c', LISTENER]));
    count('health flaps');
  };
  let flapping = Promise.resolve();
  let nextSampleSeconds = 10;
  let nextFlapSeconds = 3;
  const reloadsSoFar = (): number => weir.events().filter(({ event }) => event === 'reload-applied').length;
  while (elapsedSeconds() < SECONDS - 3 || reloadsSoFar() < RELOADS) {
    const [name, act] = deck[below(random, deck.length)]!;
    await act();
    count(name);
    if (elapsedSeconds() > nextSampleSeconds) {
      samples.push(sample(weir.pid, startedMs));
      nextSampleSeconds += Math.max(5, SECONDS / 20);
    }
    if (elapsedSeconds() > nextFlapSeconds) {
      flapping = flapping.then(flap);
      nextFlapSeconds += 6;
    }
    await sleep(PAUSE_MS);
  }
  await flapping;
  writeFileSync(weir.configPath, variant(lab, random));
  await callJson({ socket: weir.socket, method: 'POST', path: '/v1/reload' });
  const { stdout, status } = await stream;
  for (const load of Object.values(loads)) load.stop();
  await Promise.all(Object.values(loads).map(({ ended }) => ended));
  samples.push(sample(weir.pid, startedMs));

  t.equal(status, 0, 'the stream went on to the end');
  const streamed: number = JSON.parse(stdout).end.sum_received.bytes;
  for (const [name, { report }] of Object.entries(loads)) {
    t.ok(report!.ok > 100, `${name}: ${report!.ok}`);
    t.same({ failed: report!.failed, errors: report!.errors }, { failed: 0, errors: {} }, `${name}: none failed`);
  }
  const { traffic } = await callJson<{ traffic: { drops: Record<string, number> } }>({
    socket: weir.socket,
    path: '/v1/status',
  });
  const drops = Object.entries(traffic.drops).filter(([, drops]) => drops > 0);
  const half = samples[Math.floor(samples.length / 2)]!;
  const last = samples.at(-1)!;
  const rssMiB = samples.map((sample) => sample.rssMiB);
  t.ok(floorGrowth(rssMiB) < 16, `memory is flat: ${rssMiB.join(' ')} MiB`);
  t.ok(
    last.descriptors - half.descriptors < 5,
    `and so are descriptors: ${samples.map(({ descriptors }) => descriptors).join(' ')}`,
  );
  const reloads = reloadsSoFar();
  t.ok(reloads >= RELOADS, `${reloads} configurations came into use`);
  for (const [name, times] of done) t.comment(`${name}: ${times}`);
  t.comment(`drops: ${JSON.stringify(Object.fromEntries(drops))}`);
  t.equal(await weir.stop(), 0);

  if (WEIR_SOAK_REPORT !== undefined) {
    writeFileSync(WEIR_SOAK_REPORT, soakReport({ reloads, done, loads, streamed, samples, drops }));
  }
});

/**
 * By how much the least of the last third exceeds that of the third before. Single samples hold whatever has not been collected
 * yet: 20 MiB more or less; what leaks raises the least as well.
 */
function floorGrowth(samples: readonly number[]): number {
  const third = Math.ceil(samples.length / 3);
  return Math.min(...samples.slice(-third)) - Math.min(...samples.slice(-2 * third, -third));
}

interface Findings {
  readonly reloads: number;
  readonly done: ReadonlyMap<string, number>;
  readonly loads: Readonly<Record<string, Load>>;
  readonly streamed: number;
  readonly samples: readonly Sample[];
  readonly drops: readonly (readonly [string, number])[];
}

function soakReport({ reloads, done, loads, streamed, samples, drops }: Findings): string {
  const rows = (entries: Iterable<readonly [string, number | string]>): string =>
    [...entries].map(([name, value]) => `| ${name} | ${value.toLocaleString('en-US')} |`).join('\n');
  return `# Soak test

What \`test/e2e/soak.test.ts\` found: everything at once, for ${SECONDS} s, on two cores that clients, servers and weir share. It runs for a minute
with every \`npm test\`, and for as long as one likes by hand: \`WEIR_SOAK_SECONDS=600 WEIR_SOAK_REPORT=docs/soak.md npx tap test/e2e/soak.test.ts\`.

| what went through | |
|---|---:|
${rows(Object.entries(loads).map(([name, { report }]) => [name, `${report!.ok.toLocaleString('en-US')}, ${report!.failed} failed`]))}
| requests over connections that stayed open | ${Object.values(loads)
    .reduce((sum, { report }) => sum + report!.kept.requests, 0)
    .toLocaleString('en-US')} |
| one stream of 1 Gb/s, from start to end | ${(streamed / 1e9).toFixed(1)} GB |

| what was done meanwhile | |
|---|---:|
| configurations that came into use | ${reloads} |
${rows(done)}

| at, s | ${samples.map(({ atSeconds }) => atSeconds).join(' | ')} |
|---|${'---:|'.repeat(samples.length)}
| RSS, MiB | ${samples.map(({ rssMiB }) => rssMiB).join(' | ')} |
| open files | ${samples.map(({ descriptors }) => descriptors).join(' | ')} |

Packets dropped, by reason: ${drops.map(([reason, times]) => `${reason} ${times}`).join(', ') || 'none'}.
`;
}
