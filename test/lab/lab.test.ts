import '../support/plain-children.js';
import { type ChildProcess, execFileSync, spawn, spawnSync } from 'node:child_process';
import { createHash, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { existsSync, readFileSync } from 'node:fs';
import { createInterface } from 'node:readline';
import { PassThrough } from 'node:stream';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import { labDown, labUp } from '../../lib/lab/lab-commands.js';
import type { LoadReport } from '../../lib/lab/load.js';
import { nodeCommand } from '../../lib/lab/process.js';
import { Screen } from '../../lib/lab/screen.js';
import { backendAddress, CLIENT_ADDRESS, ECHO_PORT, HTTP_PORT, Lab, takeDown } from '../../lib/lab/topology.js';

/*
 *   client 10.1.0.2 -- gw -- b1 10.2.0.11, b2 10.2.0.12      no weir: the client talks to the backends directly
 */

const PREFIX = `weir-lab${process.pid}`;
/** Stands in for weir: ready at once, and reloads whatever it is given. */
const STAND_IN = [
  process.execPath,
  '-e',
  `if (process.argv[1] === 'run') {
     console.log(JSON.stringify({ level: 'info', event: 'ready' }));
     setInterval(() => {}, 1000);
   }
   else if (process.argv[1] === 'reload' && require('fs').readFileSync(process.argv[3] + '.refuse', { flag: 'a+' }).length) process.exit(1);
   else console.log(process.argv.slice(1).join(' '));`,
];

const able =
  process.getuid?.() === 0 &&
  spawnSync('unshare', ['-n', 'ip', 'link', 'add', 'type', 'veth'], { stdio: 'ignore' }).status === 0;
const skip = able ? false : 'needs root and permission to make network namespaces';

function namespaces(prefix = PREFIX): string[] {
  const names = execFileSync('ip', ['netns', 'list'], { encoding: 'utf8' }).split('\n');
  return names.map((line) => line.split(' ')[0]!).filter((name) => name.startsWith(`${prefix}-`));
}

/** The processes of this lab's namespaces, by what is in /proc, not by what the lab believes. */
function inhabitants(prefix = PREFIX): number[] {
  return namespaces(prefix).flatMap((name) =>
    execFileSync('ip', ['netns', 'pids', name], { encoding: 'utf8' }).split('\n').filter(Boolean).map(Number),
  );
}

function isRunning(pid: number): boolean {
  try {
    return !/^State:\s*Z/m.test(readFileSync(`/proc/${pid}/status`, 'utf8'));
  } catch {
    return false;
  }
}

async function untilGone(pids: readonly number[]): Promise<boolean> {
  for (let i = 0; i < 200 && pids.some(isRunning); i++) await new Promise((resolve) => setTimeout(resolve, 10));
  return !pids.some(isRunning);
}

async function load(lab: Lab, target: string, options: readonly string[]): Promise<LoadReport> {
  const [command, ...args] = nodeCommand('load');
  const { stdout, stderr } = await lab.exec('client', command!, [...args, '--target', target, ...options]);
  t.equal(stderr, '');
  return JSON.parse(stdout.trim().split('\n').at(-1)!) as LoadReport;
}

t.teardown(() => takeDown(PREFIX));

t.test('servers answer from the client, and nothing is left afterwards', { skip }, async (t) => {
  const startedMs = performance.now();
  const lab = await Lab.create({ prefix: PREFIX, backends: 2 });
  t.comment(`built in ${Math.round(performance.now() - startedMs)} ms`);
  t.teardown(() => lab.destroy());
  t.same(namespaces().sort(), ['b1', 'b2', 'client', 'gw'].map((role) => `${PREFIX}-${role}`).sort());
  await lab.startServers();
  const url = (number: number, path: string): string => `http://${backendAddress(number)}:${HTTP_PORT}${path}`;

  const { stdout: hello } = await lab.exec('client', 'curl', ['-si', url(2, '/')]);
  t.match(hello, /x-backend: b2/);
  t.match(hello, `{"backend":"b2","client":"${CLIENT_ADDRESS}","port":`);
  t.match((await lab.exec('client', 'curl', ['-s', url(1, '/nothing')])).stdout, 'error');

  const size = 3 * 1024 * 1024 + 17;
  const { stdout: told } = await lab.exec('client', 'curl', ['-s', url(1, `/sha256/${size}`)]);
  const { stdout: got } = await lab.exec('client', 'sh', ['-c', `curl -s ${url(1, `/bytes/${size}`)} | sha256sum`]);
  t.equal(got.split(' ')[0], (JSON.parse(told) as { sha256: string }).sha256);
  const upload = randomBytes(1_000_003).toString('hex');
  const { stdout: receipt } = await lab.exec('client', 'curl', ['-s', '-T', '-', url(2, '/upload')], { input: upload });
  t.same(JSON.parse(receipt), { bytes: upload.length, sha256: createHash('sha256').update(upload).digest('hex') });

  const endpoint = `${backendAddress(1)}:${HTTP_PORT}`;
  const report = await load(lab, endpoint, ['--requests', '200', '--parallel', '8', '--kept', '2', '--seconds', '1']);
  t.match(report, { ok: 200, failed: 0, backends: { b1: 200 }, kept: { backends: { b1: 2 } }, done: true });
  const again = await load(lab, endpoint, ['--requests', '50', '--rounds', '2', '--first-port', '20000']);
  t.match(again, { ok: 100, failed: 0, asked: 50, same: 50 });
  const echo = await load(lab, `${backendAddress(2)}:${ECHO_PORT}`, ['--udp', '--requests', '500', '--seconds', '5']);
  t.match(echo, { ok: 500, failed: 0 });
  const refused = await load(lab, `${backendAddress(1)}:1`, ['--requests', '5']);
  t.match(refused, { ok: 0, failed: 5, errors: { ECONNREFUSED: 5 } });

  await t.rejects(Lab.create({ prefix: PREFIX }), { code: 'LAB_FAILED', message: /is up already/ });
  const pids = inhabitants();
  t.equal(pids.length, 2);
  await lab.destroy();
  await lab.destroy();
  t.ok(await untilGone(pids), 'no process');
  t.same(namespaces(), []);
  t.notOk(existsSync(lab.dir));
});

t.test('what does not start says why', { skip }, async (t) => {
  await t.rejects(Lab.create({ prefix: 'no/slash' }), { code: 'USAGE' });
  await t.rejects(Lab.create({ prefix: PREFIX, mtu: 1 }), { code: 'LAB_FAILED', message: /^ip -batch - failed: / });
  t.same(namespaces(), [], 'half a lab is taken down again');
  const lab = await Lab.create({ prefix: PREFIX, backends: 1, weir: ['sh', '-c', 'echo "no such option"; exit 3'] });
  t.teardown(() => lab.destroy());
  await t.rejects(lab.startWeir('{}'), { code: 'LAB_FAILED', message: 'weir ended at once: no such option' });
  t.equal((await lab.exec('client', 'sleep', ['60'], { timeoutMs: 50 })).status, null, 'nothing runs for ever');
});

t.test('weir in the gateway: start, command, reload, stop', { skip }, async (t) => {
  const lab = await Lab.create({ prefix: PREFIX, backends: 0, weir: STAND_IN });
  t.teardown(() => lab.destroy());
  const weir = await lab.startWeir('one: 1\n');
  t.equal(readFileSync(weir.configPath, 'utf8'), 'one: 1\n');
  t.match(weir.events(), [{ event: 'ready' }]);
  t.equal((await weir.command(['ct', 'list'])).stdout, `ct list --socket ${weir.socket}\n`);
  await weir.reload('two: 2\n');
  t.equal(readFileSync(weir.configPath, 'utf8'), 'two: 2\n');
  await lab.exec('gw', 'sh', ['-c', `echo no > ${weir.socket}.refuse`]);
  await t.rejects(weir.reload('three: 3\n'), { code: 'LAB_FAILED', message: /^weir reload failed/ });
  t.equal(await weir.stop('SIGKILL'), null);
});

t.test('up leaves it standing, down removes it', { skip }, async (t) => {
  const out = new PassThrough();
  let text = '';
  out.setEncoding('utf8').on('data', (part: string) => (text += part));
  t.equal(await labUp({ out, prefix: PREFIX, weir: STAND_IN }), 0);
  t.match(text, `${PREFIX}-client`);
  t.notMatch(text, '\x1b', 'no colours away from a terminal');
  const pids = inhabitants();
  t.equal(pids.length, 4, 'three servers and weir');
  await t.rejects(labUp({ out, prefix: PREFIX, weir: STAND_IN }), { code: 'LAB_FAILED', message: /is up already/ });
  const guest = spawn('ip', ['netns', 'exec', `${PREFIX}-client`, 'sleep', '60']);
  t.teardown(() => guest.kill());
  while (inhabitants().length < 5) await new Promise((resolve) => setTimeout(resolve, 10));
  t.equal(await labDown({ out, prefix: PREFIX }), 0);
  t.ok(await untilGone(pids));
  t.ok(isRunning(guest.pid!), 'what somebody else started there is not ours to end');
  t.same(namespaces(), []);
  t.equal(await labDown({ out, prefix: PREFIX }), 0);
  t.match(text, /The lab is gone\.\nThere is no lab to remove\.\n$/);
});

t.test('however the builder ends', { skip }, async (t) => {
  const script = `
    import { Lab } from ${JSON.stringify(fileURLToPath(new URL('../../lib/lab/topology.ts', import.meta.url)))};
    const lab = await Lab.create({ prefix: ${JSON.stringify(PREFIX)}, backends: 1 });
    await lab.startServers();
    console.log('up');
    process.stdin.resume().once('data', () => { throw new Error('on purpose'); });
  `;
  const build = async (): Promise<{ child: ChildProcess; pids: number[] }> => {
    const args = ['--import=tsx', '--input-type=module', '-e', script];
    const child = spawn(process.execPath, args, { stdio: ['pipe', 'pipe', 'pipe'] });
    let stderr = '';
    child.stderr.on('data', (part) => (stderr += part));
    const [first] = await Promise.race([once(createInterface(child.stdout), 'line'), once(child, 'exit')]);
    t.equal(first, 'up', stderr);
    return { child, pids: inhabitants() };
  };
  for (const end of ['SIGINT', 'SIGTERM', 'an exception', 'SIGKILL'] as const) {
    const { child, pids } = await build();
    t.equal(pids.length, 1);
    if (end === 'an exception') child.stdin!.write('x\n');
    else child.kill(end);
    const [status] = await once(child, 'exit');
    if (end === 'SIGKILL') {
      t.equal(namespaces().length, 3, 'nobody can clean up after SIGKILL');
      await t.rejects(Lab.create({ prefix: PREFIX }), /is up already/, 'its server still runs');
      t.ok(takeDown(PREFIX));
    } else {
      t.equal(status, { SIGINT: 130, SIGTERM: 143, 'an exception': 1 }[end]);
    }
    t.ok(await untilGone(pids), `${end}: no process`);
    t.same(namespaces(), [], `${end}: no namespace`);
    t.notOk(existsSync(`/run/${PREFIX}-lab`));
  }
});

t.test('the screen', async (t) => {
  const out = new PassThrough();
  let text = '';
  out.setEncoding('utf8').on('data', (part: string) => (text += part));
  const plain = new Screen({ out });
  t.equal(plain.bar(5, 10, 8, 0), '████    ');
  t.equal(plain.bar(1, 64, 8, 0), '▏       ');
  t.equal(plain.bar(20, 10, 8, 0), '████████');
  t.equal(plain.bar(0, 0, 3, 0), '   ');
  t.equal(await plain.during('waiting', Promise.resolve(7)), 7);
  plain.check(true, 'fine');
  plain.check(false, 'not');
  t.equal(plain.failures, 1);
  t.equal(text, '  ✓ fine\n  ✗ not\n');
  t.match(new Screen({ out, colour: true }).hue('b1', 0), '\x1b[36mb1\x1b[0m');
});
