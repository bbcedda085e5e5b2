import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import t from 'tap';
import { type Call, callJson } from '../../lib/cli/client.js';
import type { ExplainView } from '../../lib/control/explain/explain-view.js';
import type { FlowFilter, FlowJson } from '../../lib/control/flows.js';
import type { PlanView } from '../../lib/control/plan/plan-view.js';
import type { ReloadView, StatusView } from '../../lib/control/view.js';
import { backendAddress, CLIENT_ADDRESS, HTTP_PORT, type Lab, VIP, type WeirProcess } from '../../lib/lab/topology.js';
import { createGatewayLab } from '../support/gateway-lab.js';
import { needsRoot } from '../support/skip.js';

/** What `weir explain` and `weir plan` foretell of a running weir, and what real connections then meet. */

t.setTimeout(900_000);

/** Nobody is there. */
const DARK = '10.2.0.99';

/** @param webs weights of the lab's backends; -1: not in the file @param dark weights of nobody, and of b1 */
function config(webs: readonly number[], dark: readonly [number, number], more = ''): string {
  const backends = webs.flatMap((weight, i) =>
    weight < 0 ? [] : [`{ name: b${i + 1}, address: ${backendAddress(i + 1)}, port: ${HTTP_PORT}, weight: ${weight} }`],
  );
  const members = `[${backends.join(', ')}]`;
  const hidden = `[{ name: nobody, address: ${DARK}, port: 81, weight: ${dark[0]} }, { name: b1, address: ${backendAddress(1)}, port: ${HTTP_PORT}, weight: ${dark[1]} }]`;
  return [
    'snat: { addresses: [10.96.255.1] }',
    'admin: { listen: off }',
    'services:',
    `  - { name: web, address: ${VIP}, port: 80, protocol: tcp, backends: ${members}${more} }`,
    `  - { name: nat, address: ${VIP}, port: 81, protocol: tcp, mode: snat, backends: ${members} }`,
    `  - { name: sticky, address: ${VIP}, port: 82, protocol: tcp, algorithm: random, affinity: { clientIp: 1h }, backends: ${members} }`,
    `  - { name: dark, address: ${VIP}, port: 83, protocol: tcp, backends: ${hidden} }`,
    '',
  ].join('\n');
}

/** Over the socket, as the commands do: starting a program takes longer than all the rest. */
function call<T>(
  weir: WeirProcess,
  path: string,
  query: Call['query'] = {},
  method: 'GET' | 'POST' = 'GET',
): Promise<T> {
  return callJson<T>({ socket: weir.socket, path, query, method });
}

function explain(weir: WeirProcess, src: string, port: number, without: readonly string[] = []): Promise<ExplainView> {
  return call<ExplainView>(weir, '/v1/explain', { proto: 'tcp', src, dst: `${VIP}:${port}`, without });
}

function list(weir: WeirProcess, filter: FlowFilter): Promise<FlowJson[]> {
  return call<FlowJson[]>(weir, '/v1/ct', { ...filter });
}

/** Which backend answers a request from this very port. */
async function ask(lab: Lab, from: number, port: number): Promise<string> {
  const options = ['-s', '-m', '5', '--local-port', String(from), '-o', '/dev/null', '-w', '%header{x-backend}'];
  return (await lab.exec('client', 'curl', [...options, `http://${VIP}:${port}/bytes/10`])).stdout;
}

/** Begins a slow download, and resolves with the backend it has when it is under way. */
async function download(lab: Lab, weir: WeirProcess, from: number): Promise<string> {
  const options = ['-s', '-m', '60', '--limit-rate', '1M', '--local-port', String(from), '-o', '/dev/null'];
  lab.spawn('client', `download-${from}`, 'curl', [...options, `http://${VIP}:80/bytes/100000000`]);
  for (;;) {
    const client = `${CLIENT_ADDRESS}:${from}`;
    const [flow] = await list(weir, { client, state: 'ESTABLISHED' });
    if (flow !== undefined) return flow.backend;
    await sleep(20);
  }
}

t.test('what is foretold of packets and of a reload comes true', needsRoot(t, 'ip', 'curl'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  const weir = await lab.startWeir(config([1, 1, 1], [1, 0], ', onRemove: reset'));

  for (const [from, port] of [
    [40_001, 80],
    [40_002, 80],
    [40_003, 81],
  ] as const) {
    const source = `${CLIENT_ADDRESS}:${from}`;
    const view = await explain(weir, source, port);
    const [outcome] = view.outcomes;
    t.match(outcome, { verdict: 'forward', out: [{ route: / dev br0/ }] }, `${port}: routed to the backends’ side`);
    const without = await explain(weir, source, port, [`${outcome!.service}/${outcome!.backend}`]);
    t.not(without.outcomes[0]!.backend, outcome!.backend);
    t.equal(await ask(lab, from, port), outcome!.backend, `${source} is answered by whom was said`);
    const [flow] = await list(weir, { client: source });
    t.match(flow, { backend: outcome!.entry!.backend, snat: outcome!.entry!.snat });
    while ((await list(weir, { client: source, state: 'CLOSING' })).length === 0) await sleep(20);
    const again = await explain(weir, source, port);
    t.match(
      again.steps.find(({ step }) => step === 'conntrack'),
      { result: 'replaced' },
      'it is closing now',
    );
  }
  const lots = await explain(weir, `${CLIENT_ADDRESS}:40004`, 82);
  t.equal(lots.outcomes.length, 3);
  const drawn = await ask(lab, 40_004, 82);
  const sticky = await explain(weir, `${CLIENT_ADDRESS}:40005`, 82);
  t.match(sticky.outcomes, [{ probability: 1, backend: drawn }], 'the data path was asked whom it remembers');
  t.equal(await ask(lab, 40_005, 82), drawn);

  const downloads: string[] = [];
  for (let from = 41_000; from < 41_004 || new Set(downloads).size < 2; from++) {
    downloads.push(await download(lab, weir, from));
  }
  // Waits for nobody, and says so again a second later.
  const knock = lab.exec('client', 'curl', [
    '-s',
    '-m',
    '20',
    `http://${VIP}:83/bytes/10`,
    '-w',
    '%header{x-backend}',
    '-o',
    '/dev/null',
  ]);
  while ((await list(weir, { service: 'dark' })).length === 0) await sleep(20);

  await call(weir, '/v1/ct/flush', { state: 'CLOSING' }, 'POST');
  const gone = downloads[0]!;
  const weights = lab.backends.map((_, i) => (`${backendAddress(i + 1)}:${HTTP_PORT}` === gone ? -1 : 1));
  const next = config(weights, [0, 1], ', onRemove: reset');
  const file = join(lab.dir, 'next.yaml');
  writeFileSync(file, next);
  const planned = await weir.command(['plan', '-c', file, '-o', 'json']);
  t.equal(planned.status, 3, planned.stderr);
  const view = JSON.parse(planned.stdout) as PlanView;
  const lost = downloads.filter((backend) => backend === gone).length;
  const web = view.services.find(({ name }) => name === 'web')!;
  t.match(web, { change: 'changed', backends: [{ change: 'removed' }], flows: { cut: lost, moved: 0, cutLater: 0 } });
  t.ok(web.slots!.share > 0.3 && web.slots!.share < 0.4, `${web.slots!.changed} slots`);
  t.match(
    view.services.find(({ name }) => name === 'dark'),
    { flows: { live: 1, moved: 1 } },
  );
  t.equal(
    view.services.find(({ name }) => name === 'sticky')!.affinityLost,
    gone === `${backendAddress(Number(drawn.slice(1)))}:${HTTP_PORT}` ? 1 : 0,
  );
  t.match((await weir.command(['plan', '-c', weir.configPath])).stdout, /nothing changes\n$/, 'of the file in use');

  const cutBefore = (await call<StatusView>(weir, '/v1/status')).traffic.cut;
  writeFileSync(weir.configPath, next);
  const applied = await call<ReloadView>(weir, '/v1/reload', {}, 'POST');
  const { commands, later } = view.network!;
  t.strictSame(applied.commands.slice(0, commands.length), commands, 'the kernel was told what was said');
  // What those needed that are cut at once goes as soon as they have.
  for (const command of applied.commands.slice(commands.length)) t.ok(later.includes(command), command);
  while ((await list(weir, { service: 'web', backend: gone })).length > 0) await sleep(20);
  t.equal((await call<StatusView>(weir, '/v1/status')).traffic.cut - cutBefore, lost, 'cut at once');
  const kept = await list(weir, { service: 'web', state: 'ESTABLISHED' });
  t.equal(kept.length, downloads.length - lost, 'the others go on');
  t.equal((await knock).stdout, 'b1', 'the connection that nobody had answered has moved');
  t.equal(await weir.stop(), 0);
});
