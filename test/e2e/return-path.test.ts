import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import t from 'tap';
import { callJson } from '../../lib/cli/client.js';
import type { FlowJson } from '../../lib/control/flows.js';
import { backendAddress, CLIENT_ADDRESS, HTTP_PORT, type Lab, VIP, type WeirProcess } from '../../lib/lab/topology.js';
import { createGatewayLab } from '../support/gateway-lab.js';
import { needsRoot } from '../support/skip.js';

/** What leads answers of live connections back into weir, when the configuration does not ask for it any more. */

t.setTimeout(120_000);

const BYTES = 30_000_000;
const OLD_POOL = '10.96.255.1';
const NEW_POOL = '10.96.255.2';

interface Wanted {
  readonly mode: 'dnat' | 'snat';
  readonly pool?: string;
  /** Numbers of the lab's backends. */
  readonly backends?: readonly number[];
  readonly stateFile?: string;
}

/** Two services on all backends: `turning` of the mode wanted, and `nat` of mode snat. */
function config({ mode, pool = OLD_POOL, backends = [1, 2, 3], stateFile }: Wanted): string {
  const members = backends.map((n) => `{ name: b${n}, address: ${backendAddress(n)}, port: ${HTTP_PORT} }`).join(', ');
  return [
    `snat: { addresses: [${pool}] }`,
    'admin: { listen: off }',
    ...(stateFile === undefined ? [] : [`conntrack: { stateFile: ${stateFile} }`]),
    'services:',
    `  - { name: turning, address: ${VIP}, port: 80, mode: ${mode}, backends: [${members}] }`,
    `  - { name: nat, address: ${VIP}, port: 81, mode: snat, backends: [${members}] }`,
    '',
  ].join('\n');
}

function list(weir: WeirProcess, query: Record<string, string>): Promise<FlowJson[]> {
  return callJson<FlowJson[]>({ socket: weir.socket, path: '/v1/ct', query });
}

interface Download {
  readonly backend: string;
  /** The bytes that came. */
  readonly done: Promise<number>;
}

/** Begins a download that takes some seconds; resolves when it is under way. */
async function download(lab: Lab, weir: WeirProcess, from: number, port: number): Promise<Download> {
  const url = `http://${VIP}:${port}/bytes/${BYTES}`;
  const options = ['-sS', '-m', '30', '--limit-rate', '6M', '--local-port', String(from), '-w', '%{size_download}'];
  const done = lab.exec('client', 'curl', [...options, '-o', '/dev/null', url], { timeoutMs: 60_000 }).then(
    ({ stdout }) => Number(stdout),
    (error: Error) => Number(/^\d+$/m.exec(error.message)?.[0] ?? -1),
  );
  for (;;) {
    const [flow] = await list(weir, { client: `${CLIENT_ADDRESS}:${from}`, state: 'ESTABLISHED' });
    if (flow !== undefined) return { backend: flow.backend, done };
    await sleep(20);
  }
}

async function rules(lab: Lab): Promise<string> {
  return (await lab.exec('gw', 'ip', ['rule', 'show'])).stdout;
}

t.test('connections outlive the mode and the pool they began with', needsRoot(t, 'ip', 'curl'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  const weir = await lab.startWeir(config({ mode: 'dnat' }));
  const kept: Download[] = [];
  for (let i = 0; i < 6; i++) kept.push(await download(lab, weir, 41_000 + i, 80 + (i % 2)));
  const isOf =
    (n: number) =>
    (each: Download): boolean =>
      each.backend.startsWith(`${backendAddress(n)}:`);
  t.ok(kept.length === 6);

  await weir.reload(config({ mode: 'snat', pool: NEW_POOL, backends: [1, 2] }));
  t.match(await rules(lab), /from 10\.2\.0\.1[123] ipproto tcp/, 'the way back of dnat is there');
  const began = await download(lab, weir, 42_000, 80);
  t.match(await list(weir, { client: `${CLIENT_ADDRESS}:42000` }), [{ snat: /^10\.96\.255\.2:/ }]);
  for (const { backend, done } of [...kept, began]) t.equal(await done, BYTES, `the download from ${backend} is whole`);
  t.comment(`of them from the removed backend: ${kept.filter(isOf(3)).length}`);

  await callJson({ socket: weir.socket, path: '/v1/ct/flush', method: 'POST' });
  await weir.reload(`${config({ mode: 'snat', pool: NEW_POOL, backends: [1, 2] })}# again\n`);
  const left = await rules(lab);
  t.notMatch(left, /ipproto tcp/, 'and goes with the last that needed it');
  t.notMatch(left, /10\.96\.255\.1/);
  t.equal(await weir.stop(), 0);
});

t.test('so they do in a restart with another file', needsRoot(t, 'ip', 'curl'), async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  const stateFile = join(lab.dir, 'state');
  const first = await lab.startWeir(config({ mode: 'dnat', stateFile }));
  const kept = [await download(lab, first, 41_000, 80), await download(lab, first, 41_001, 81)];
  t.equal(await first.stop(), 0);
  const second = await lab.startWeir(config({ mode: 'snat', pool: NEW_POOL, stateFile }));
  for (const { backend, done } of kept) t.equal(await done, BYTES, `the download from ${backend} is whole`);
  t.equal(await second.stop(), 0);
});
