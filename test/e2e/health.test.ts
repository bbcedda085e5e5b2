import t from 'tap';
import { nodeCommand, type ServiceProcess } from '../../lib/lab/process.js';
import { backendAddress, HTTP_PORT, Lab, VIP, type WeirProcess } from '../../lib/lab/topology.js';
import { needsRoot } from '../support/skip.js';

/**
 * The life of backends with real servers behind a real weir: health checks that go through the gateway's own stack while weir steers
 * what backends send, and drains by command. States are waited for, never times.
 */

t.setTimeout(900_000);

const REJECT_PORT = 81;
const HEALTH = 'health: { type: tcp, interval: 200ms, timeout: 1s, rise: 2, fall: 3 }';

interface Member {
  readonly name: string;
  readonly state: string;
  readonly drainedBy: string | null;
  readonly takesNew: boolean;
  readonly flows: number;
  readonly health: { readonly state: string; readonly reason: string; readonly last: string } | null;
  readonly signals: { readonly refused: number; readonly unanswered: number };
}

/** A lab whose servers are in the test's hands. */
class Ward {
  readonly lab: Lab;
  readonly #servers = new Map<string, ServiceProcess>();

  private constructor(lab: Lab) {
    this.lab = lab;
  }

  static async create(): Promise<Ward> {
    const weir = process.env.WEIR_COMMAND?.split(' ');
    const lab = await Lab.create({ prefix: `weir-t${process.pid}`, ...(weir ? { weir } : {}) });
    const ward = new Ward(lab);
    for (const name of lab.backends) ward.begin(name);
    return ward;
  }

  begin(name: string): void {
    const [command, ...args] = nodeCommand('server');
    this.#servers.set(name, this.lab.spawn(name, name, command!, [...args, '--name', name, '--http', `${HTTP_PORT}`]));
  }

  async end(name: string): Promise<void> {
    const server = this.#servers.get(name)!;
    process.kill(server.pid, 'SIGKILL');
    await server.ended;
  }

  config(weights: Record<string, number> = {}): string {
    const list = this.lab.backends.map(
      (name, i) =>
        `{ name: ${name}, address: ${backendAddress(i + 1)}, port: ${HTTP_PORT}, weight: ${weights[name] ?? 1} }`,
    );
    const service = (name: string, port: number, rest: string): string =>
      `  - { name: ${name}, address: ${VIP}, port: ${port}, ${rest}, ${HEALTH}, backends: [${list.join(', ')}] }`;
    return [
      'admin: { listen: off }',
      'network: { untracked: drop }',
      'services:',
      service('web', 80, 'algorithm: random'),
      service('strict', REJECT_PORT, 'allDown: reject'),
      service('ping', 82, 'mode: dnat').replace('type: tcp', 'type: icmp'),
      '',
    ].join('\n');
  }

  /** The backends that answer `count` new connections, sorted; and how many fail. */
  async ask(count: number, port = 80): Promise<{ names: string[]; failed: number }> {
    const url = `http://${VIP}:${port}/bytes/[1-${count}]`;
    const options = [
      '-s',
      '-m',
      '5',
      '-H',
      'Connection: close',
      '-o',
      '/dev/null',
      '-w',
      '%{http_code} %header{x-backend}\\n',
    ];
    const { stdout } = await this.lab.exec('client', 'curl', [...options, url], { timeoutMs: 120_000 });
    const answers = stdout.trimEnd().split('\n');
    const names = answers.flatMap((line) => /^200 (\w+)$/.exec(line)?.[1] ?? []);
    return { names: [...new Set(names)].sort(), failed: count - names.length };
  }
}

async function members(weir: WeirProcess, service = 'web'): Promise<Member[]> {
  const { stdout } = await weir.command(['services', '-o', 'json']);
  return (JSON.parse(stdout) as { name: string; backends: Member[] }[]).find(({ name }) => name === service)!.backends;
}

/** Waits until the backends of a service are as wanted. */
async function until(weir: WeirProcess, isSo: (members: Member[]) => boolean, service = 'web'): Promise<Member[]> {
  for (;;) {
    const now = await members(weir, service);
    if (isSo(now)) return now;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

/** What was found out comes into use a moment after it is known. */
function isOut({ state, takesNew }: Member): boolean {
  return state === 'down' && !takesNew;
}

function isIn({ state, takesNew }: Member): boolean {
  return state === 'active' && takesNew;
}

function states(list: readonly Member[]): string[] {
  return list.map(({ state }) => state);
}

function changes(weir: WeirProcess): string[] {
  return weir
    .events()
    .filter(({ event }) => event === 'health-changed')
    .map(({ service, backend, state, reason }) => `${service}/${backend} ${state}: ${reason}`);
}

t.test('a server dies and comes back; all die', needsRoot(t, 'ip', 'curl'), async (t) => {
  const ward = await Ward.create();
  const { lab } = ward;
  t.teardown(() => lab.destroy());
  await lab.exec('gw', 'sh', ['-c', 'echo 1 > /proc/sys/net/ipv4/conf/br0/rp_filter']);
  const weir = await lab.startWeir(ward.config());

  const begun = await until(weir, (list) => list.every(({ health }) => health?.last === 'connected'));
  t.strictSame(states(begun), ['active', 'active', 'active'], 'probes from the gateway itself reach the backends');
  t.strictSame((await ward.ask(60)).names, ['b1', 'b2', 'b3']);
  const pinged = await until(weir, (list) => list.every(({ health }) => health?.last !== 'not probed yet'), 'ping');
  const isInstalled = !pinged[0]!.health!.last.includes('raw-socket');
  for (const { name, state, health } of pinged) {
    t.equal(state, 'active', name);
    if (isInstalled)
      t.equal(health!.last, 'echo reply', 'ICMP to the gateway itself is not led into the device either');
  }

  const killedMs = performance.now();
  await ward.end('b1');
  const [b1] = await until(weir, ([b1]) => isOut(b1!));
  t.comment(`down ${Math.round(performance.now() - killedMs)} ms after the end of its server`);
  t.match(b1, { takesNew: false, health: { state: 'down', reason: 'connection refused' } });
  t.strictSame(await ward.ask(60), { names: ['b2', 'b3'], failed: 0 }, 'new connections go elsewhere');
  await until(weir, ([b1]) => isOut(b1!), 'strict');

  ward.begin('b1');
  await until(weir, ([b1]) => isIn(b1!));
  t.strictSame(await ward.ask(60), { names: ['b1', 'b2', 'b3'], failed: 0 }, 'and come back');
  await until(weir, ([b1]) => isIn(b1!), 'strict');

  for (const name of lab.backends) await ward.end(name);
  await until(weir, (list) => list.every(({ state }) => state === 'down'));
  await until(weir, (list) => list.every(isOut), 'strict');
  const refusedBefore = sum((await members(weir)).map(({ signals }) => signals.refused));
  t.ok((await until(weir, (list) => list.every(({ takesNew }) => takesNew))).length === 3, 'use-all: all take flows');
  t.equal((await ward.ask(10)).failed, 10);
  const refused = sum((await members(weir)).map(({ signals }) => signals.refused)) - refusedBefore;
  t.equal(refused, 10, 'each was sent to a backend, which refused it');
  t.equal((await ward.ask(10, REJECT_PORT)).failed, 10);
  const { traffic } = JSON.parse((await weir.command(['status', '-o', 'json'])).stdout);
  t.equal(traffic.replies['rst-no-backend'], 10, 'reject: weir refuses them');
  t.equal(traffic.passes['not-tracked'], 0, 'no answer to a probe ever came through the device');
  t.equal(traffic.drops['untracked-reply'], 0);
  const table = (await weir.command(['services'])).stdout;
  t.match(table, /b1 +10\.2\.0\.11:8080 +1 +down \(used: all are\)/);
  t.match(table, /^strict +b3 +down .* connection refused$/m);

  for (const name of lab.backends) ward.begin(name);
  await until(weir, (list) => list.every(isIn));
  t.equal((await ward.ask(10)).failed, 0, 'up again');
  await until(weir, (list) => list.every(isIn), 'strict');
  const expected = ['web', 'strict'].flatMap((service) => [
    ...['down', 'up', 'down', 'up'].map((state) => `${service}/b1 ${state}`),
    ...['b2', 'b3'].flatMap((name) => ['down', 'up'].map((state) => `${service}/${name} ${state}`)),
  ]);
  t.strictSame(
    changes(weir)
      .map((line) => line.slice(0, line.indexOf(':')))
      .sort(),
    expected.sort(),
    'each change was logged once',
  );
  t.equal(await weir.stop(), 0);
});

t.test('drain and undrain with a live flow', needsRoot(t, 'ip', 'curl'), async (t) => {
  const ward = await Ward.create();
  const { lab } = ward;
  t.teardown(() => lab.destroy());
  const weir = await lab.startWeir(ward.config());
  await until(weir, (list) => list.every(({ health }) => health?.last === 'connected'));

  const SIZE = 30_000_000;
  const url = `http://${VIP}:80/bytes/${SIZE}`;
  const download = lab.exec(
    'client',
    'curl',
    ['-sS', '--fail', '--limit-rate', '5M', '-o', '/dev/null', '-w', '%{size_download}', url],
    { timeoutMs: 120_000 },
  );
  const busy = (await until(weir, (list) => list.some(({ flows }) => flows > 0))).find(({ flows }) => flows > 0)!.name;
  const others = lab.backends.filter((name) => name !== busy);
  const place = lab.backends.indexOf(busy);
  const stateOf = async (): Promise<Member> => (await members(weir))[place]!;

  const drained = await weir.command(['drain', 'web', backendAddress(place + 1)]);
  t.equal(drained.stdout, `web/${busy} takes no new connections; it has 1 connection\n`, drained.stderr);
  t.match(await stateOf(), { state: 'draining', drainedBy: 'command', takesNew: false, flows: 1 });
  t.match((await weir.command(['services'])).stdout, / draining \(by command\) /);
  t.strictSame(await ward.ask(40), { names: others, failed: 0 });
  t.match((await weir.command(['drain', 'web', busy])).stdout, /takes no new connections, as before/);

  await weir.reload(`${ward.config()}# another comment\n`);
  t.match(await stateOf(), { drainedBy: 'command' }, 'a reload that says nothing new of it keeps the drain');
  t.strictSame(await ward.ask(20), { names: others, failed: 0 });
  t.match((await members(weir, 'strict'))[place], { state: 'active' }, 'of this service alone');

  t.equal((await weir.command(['undrain', 'web', busy])).stdout, `web/${busy} takes new connections again\n`);
  t.match(await stateOf(), { state: 'active', takesNew: true });
  t.strictSame((await ward.ask(60)).names, lab.backends);
  await weir.command(['drain', 'web', busy]);
  await weir.reload(ward.config({ [busy]: 2 }));
  t.match(await stateOf(), { state: 'active', drainedBy: null }, 'another weight in the file ends a drain');
  t.equal((await download).stdout, String(SIZE), 'the flow has seen nothing of all that');
  t.strictSame(
    weir.events().flatMap(({ event }) => (String(event).startsWith('drain-') ? [event] : [])),
    ['drain-begun', 'drain-ended', 'drain-begun', 'drain-ended'],
  );

  for (const [args, message] of [
    [['drain', 'wob', 'b1'], /no service is called "wob"\. There are: web, strict, ping\./],
    [['drain', 'web', 'b9'], /web has no backend "b9"\. It has b1, b2, b3\./],
    [['undrain', 'web', '10.2.0.99'], /web has no backend "10\.2\.0\.99"/],
  ] as const) {
    const { status, stderr } = await weir.command(args);
    t.equal(status, 2);
    t.match(stderr, message);
  }
  t.equal(await weir.stop(), 0);
});

function sum(numbers: readonly number[]): number {
  return numbers.reduce((total, each) => total + each, 0);
}
