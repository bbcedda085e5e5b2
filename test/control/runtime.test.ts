/*
 * weir as a process, in a network namespace of its own: start, stop and everything that can go wrong with them.
 *
 *     weir-rPID   br0 10.2.0.1/24 === peer (veth, both ends here)     nobody answers; one-way flows are enough
 */
import { type ChildProcess, execFileSync, spawn, spawnSync } from 'node:child_process';
import {
  appendFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  symlinkSync,
  unlinkSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import { NotifyReceiver } from '../support/notify-receiver.js';
import { needsRoot } from '../support/skip.js';

const program = fileURLToPath(new URL('../../bin/weir.js', import.meta.url));
const built = existsSync(fileURLToPath(new URL('../../dist/weir.js', import.meta.url)));
const namespace = `weir-r${process.pid}`;
const folder = mkdtempSync(join(tmpdir(), 'weir-run-'));
const config = join(folder, 'weir.yaml');
const socket = join(folder, 'weir.sock');

const B1 = '{ name: b1, address: 10.2.0.11, port: 53 }';
const B2 = '{ name: b2, address: 10.2.0.12, port: 53 }';

function textOf(backends: string[], more = ''): string {
  const dns = `{ name: dns, address: 10.96.0.10, port: 53, protocol: udp, backends: [${backends.join(', ')}] }`;
  return `admin: { socket: ${socket}, listen: 127.0.0.1:9650 }\n${more}\nservices: [${dns}]\n`;
}

function write(backends: string[], more = ''): void {
  writeFileSync(config, textOf(backends, more));
}

function inside(command: string, ...args: string[]): { code: number | null; stdout: string; stderr: string } {
  const { status, stdout, stderr } = spawnSync('ip', ['netns', 'exec', namespace, command, ...args], {
    encoding: 'utf8',
    timeout: 20_000,
  });
  return { code: status, stdout, stderr };
}

function weir(...args: string[]): ReturnType<typeof inside> {
  return inside(process.execPath, program, ...args);
}

/** The answer to a question over the admin socket. */
function ask<T>(...args: string[]): T {
  return JSON.parse(weir(...args, '-o', 'json', '--socket', socket).stdout) as T;
}

interface LogLine {
  readonly event: string;
  readonly level: string;
  readonly msg: string;
  readonly [field: string]: unknown;
}

class Run {
  readonly log: LogLine[] = [];
  stderr = '';
  readonly ended: Promise<number | null>;
  readonly #child: ChildProcess;
  readonly #waiting = new Set<() => void>();

  constructor(...args: string[]) {
    const command = ['netns', 'exec', namespace, process.execPath, program, 'run', '-c', config, ...args];
    this.#child = spawn('ip', command, { stdio: ['ignore', 'pipe', 'pipe'] });
    createInterface({ input: this.#child.stdout! }).on('line', (line) => {
      this.log.push(JSON.parse(line) as LogLine);
      for (const look of this.#waiting) look();
    });
    this.#child.stderr!.setEncoding('utf8').on('data', (text) => (this.stderr += text));
    this.ended = new Promise((resolve) => this.#child.on('close', (code) => resolve(code)));
  }

  /** Resolves with the n-th line of an event; rejects when the process ends without it. */
  event(name: string, count = 1): Promise<LogLine> {
    return new Promise((resolve, reject) => {
      const look = (): void => {
        const found = this.log.filter(({ event }) => event === name)[count - 1];
        if (found === undefined) return;
        this.#waiting.delete(look);
        resolve(found);
      };
      this.#waiting.add(look);
      void this.ended.then(() => {
        look();
        reject(new Error(`ended without ${name}: ${this.stderr}`));
      });
      look();
    });
  }

  /** Resolves with the first line, from the beginning, that is as wanted. */
  async line(isWanted: (line: LogLine) => boolean): Promise<LogLine> {
    for (;;) {
      const found = this.log.find(isWanted);
      if (found !== undefined) return found;
      await new Promise<void>((resolve) => {
        const look = (): void => {
          this.#waiting.delete(look);
          resolve();
        };
        this.#waiting.add(look);
      });
    }
  }

  kill(signal: NodeJS.Signals): void {
    this.#child.kill(signal);
  }
}

/** A thousand connections to each place the API is served at: every second says nothing, the others half a head. */
const CROWD = `
const { connect } = require('node:net');
let next = 0;
function more() {
  const i = next++;
  if (i === 2050) console.log('all');
  if (i >= 2000) return;
  const where = i % 2 ? { port: 9650, host: '127.0.0.1' } : { path: process.argv[1] };
  const client = connect(where, () => {
    if (i % 4 > 1) client.write('GET /v1/status HTTP/1.1\\r\\nhost: x\\r\\n');
    more();
  });
  client.on('error', (error) => console.error(error.message));
}
for (let i = 0; i < 51; i++) more();
`;

const HOLD_PORT = `require('node:net').createServer().listen(9650, '127.0.0.1', () => console.log('held'))`;

/** Everything of weir's that is in the namespace or in its folder. */
function traces(): string[] {
  const commands = ['ip -o link show', 'ip rule show', 'ip route show table all'];
  const lines = commands.flatMap((command) => inside('sh', '-c', command).stdout.split('\n'));
  return [...lines.filter((line) => /weir0|proto 196|10096/.test(line)), ...(existsSync(socket) ? [socket] : [])];
}

function endpointRules(): string[] {
  const rules = inside('ip', 'rule', 'show').stdout.split('\n');
  return rules.flatMap((line) => /from (10\.2\.0\.\d+)/.exec(line)?.[1] ?? []).sort();
}

/** A datagram to the VIP, from this very host. */
function sendDatagram(): void {
  inside('bash', '-c', 'echo x > /dev/udp/10.96.0.10/53');
}

const options = built ? needsRoot(t, 'ip', 'bash') : { skip: 'needs npm run build' };

t.test('a running weir', options, async (t) => {
  execFileSync('ip', ['netns', 'add', namespace]);
  t.teardown(() => {
    execFileSync('ip', ['netns', 'del', namespace]);
    rmSync(folder, { recursive: true });
  });
  for (const command of [
    'link set lo up',
    'link add br0 type veth peer name peer',
    'addr add 10.2.0.1/24 dev br0',
    'link set br0 up',
    'link set peer up',
  ]) {
    t.equal(inside('ip', ...command.split(' ')).code, 0, `ip ${command}`);
  }
  const settings = (): string => inside('sysctl', 'net.ipv4.ip_forward', 'net.ipv4.ip_early_demux').stdout;
  const settingsBefore = settings();

  t.test('start and stop', async (t) => {
    write([B1, B2]);
    const run = new Run();
    const ready = await run.event('ready');
    t.strictSame(
      run.log.map(({ event }) => event),
      ['starting', 'device-opened', 'engine', 'network-applied', 'ready'],
    );
    t.match(ready, { level: 'info', socket, services: 1, backends: 2, time: /^\d{4}-\d\d-\d\dT.*Z$/ });
    t.comment(`ready after ${ready.startMs} ms`);
    t.equal(statSync(socket).mode & 0o777, 0o600);
    t.not(traces().length, 0);
    t.strictSame(endpointRules(), ['10.2.0.11', '10.2.0.12']);

    const scrape = inside('curl', '-s', 'http://127.0.0.1:9650/metrics').stdout;
    t.match(scrape, 'weir_config_last_reload_success 1');
    t.match(scrape, 'weir_conntrack_limit{table="tcp"} 524288');

    run.kill('SIGTERM');
    t.equal(await run.ended, 0);
    t.equal(run.stderr, '');
    t.match(run.log.slice(-2), [{ event: 'stopping', why: 'SIGTERM' }, { event: 'stopped' }]);
    t.ok(Number(run.log.at(-1)?.tookMs) < 2000);
    t.strictSame(traces(), []);
    t.equal(settings(), settingsBefore, 'settings have their former values');
  });

  t.test('a signal in the middle of the start', async (t) => {
    for (const event of ['starting', 'device-opened', 'engine', 'network-applied']) {
      const run = new Run();
      await run.event(event);
      run.kill(event === 'engine' ? 'SIGINT' : 'SIGTERM');
      t.equal(await run.ended, 0, `after ${event}`);
      t.strictSame(traces(), []);
    }
  });

  t.test('a start that fails undoes itself', async (t) => {
    write([B1, B2]);
    const holder = spawn('ip', ['netns', 'exec', namespace, process.execPath, '-e', HOLD_PORT], { stdio: 'pipe' });
    await new Promise((resolve) => holder.stdout.once('data', resolve));
    const run = new Run();
    t.equal(await run.ended, 1);
    t.equal(run.stderr, 'weir: 127.0.0.1:9650 is taken. Choose another admin.listen, or `off`.\n');
    t.equal(run.log.at(-1)?.event, 'network-applied');
    t.strictSame(traces(), []);
    holder.kill();

    write([B1], 'device: { name: br0 }');
    const device = new Run();
    t.equal(await device.ended, 1);
    t.match(device.stderr, /^weir: device br0: EINVAL: an interface of this name exists/);
    write([B1], 'nonsense: 1');
    const invalid = new Run();
    t.equal(await invalid.ended, 2);
    t.match(invalid.stderr, /weir\.yaml:2:1 nonsense: is not a known key/);
    t.strictSame(traces(), []);
  });

  t.test('a second weir is refused; a killed one is no obstacle', async (t) => {
    write([B1, B2]);
    const first = new Run();
    await first.event('ready');
    const sameSocket = new Run();
    t.equal(await sameSocket.ended, 1);
    t.match(sameSocket.stderr, /^weir: a running weir answers on .*\. Stop that one first/);
    const sameDevice = new Run('--socket', join(folder, 'other.sock'));
    t.equal(await sameDevice.ended, 1);
    t.match(sameDevice.stderr, /^weir: device weir0: EBUSY\. Stop the program that holds weir0/);
    t.match(weir('status', '--socket', socket).stdout, 'weir0', 'the first has felt nothing');
    t.strictSame(endpointRules(), ['10.2.0.11', '10.2.0.12']);

    first.kill('SIGKILL');
    await first.ended;
    t.ok(existsSync(socket));
    t.match(weir('status', '--socket', socket), { code: 1, stderr: /^weir: no weir answers on/ });
    write([B1]);
    const next = new Run();
    await next.event('ready');
    t.strictSame(endpointRules(), ['10.2.0.11'], 'rules of before are gone');
    next.kill('SIGTERM');
    t.equal(await next.ended, 0);
    t.strictSame(traces(), []);
  });

  t.test('reload', async (t) => {
    write([B1, B2]);
    const run = new Run();
    await run.event('ready');
    sendDatagram();
    const [flow] = ask<{ backend: string; state: string }[]>('ct', 'list');
    t.match(flow, { client: /^10\.2\.0\.1:/, vip: '10.96.0.10:53', service: 'dns', state: 'UNREPLIED' });
    const isFirst = flow!.backend === '10.2.0.11:53';
    const [used, other, usedAddress] = isFirst ? [B1, B2, '10.2.0.11'] : [B2, B1, '10.2.0.12'];

    write([used], 'bogus: 1');
    run.kill('SIGHUP');
    t.match(await run.event('reload-refused'), { level: 'error', code: 'CONFIG_INVALID', problems: [{ line: 2 }] });
    const refused = weir('reload', '--socket', socket);
    t.strictSame([refused.code, refused.stdout], [2, '']);
    t.match(refused.stderr, /^.*weir\.yaml:2:1 bogus: is not a known key/);
    const status = ask<{ config: object }>('status');
    t.match(status.config, { version: 1, backends: 2, lastReload: { success: false, message: /bogus/ } });
    t.match(inside('curl', '-s', 'http://127.0.0.1:9650/metrics').stdout, 'weir_config_last_reload_success 0');

    write([used, other], 'device: { mtu: 1400 }');
    t.match(weir('reload', '--socket', socket), { code: 1, stderr: /^weir: device cannot change while weir runs\./ });

    write([used]);
    t.match(ask('reload'), { backends: 1, removedBackends: 0 }, 'a backend without flows is forgotten at once');
    t.strictSame(endpointRules(), [usedAddress]);
    write([other]);
    t.match(ask('reload'), { backends: 1, removedBackends: 1 }, 'one with flows is kept');
    t.strictSame(endpointRules(), ['10.2.0.11', '10.2.0.12'], 'and so is the way back from it');
    const views = ask<{ backends: { removed: boolean; state: string; flows: number }[] }[]>('services');
    t.match(views[0]!.backends, [
      { removed: false, state: 'active', flows: 0 },
      { removed: true, state: 'draining', flows: 1, packets: { original: 1 } },
    ]);

    const flushed = weir('ct', 'flush', '--service', 'dns', '--socket', socket);
    t.equal(flushed.stdout, '1 connection forgotten\n');
    t.strictSame(ask('ct', 'list'), []);
    t.match(ask('reload'), { removedBackends: 0 });
    t.equal(endpointRules().length, 1);
    t.match(ask<{ config: object }>('status').config, { backends: 1, lastReload: { success: true } });

    writeFileSync(config, `admin: { socket: ${socket}, listen: 127.0.0.1:9650 }\nservices: []\n`);
    run.kill('SIGHUP');
    await run.line(({ event, services }) => event === 'reload-applied' && services === 0);
    t.notMatch(inside('ip', 'route', 'show').stdout, '10.96.0.10');
    run.kill('SIGTERM');
    t.equal(await run.ended, 0);
    t.strictSame(traces(), []);
  });

  t.test('connections are written out, forgotten, and taken over again', async (t) => {
    write([B1, B2]);
    const run = new Run();
    await run.event('ready');
    sendDatagram();
    const [before] = ask<{ client: string; backend: string }[]>('ct', 'list');
    const exported = weir('ct', 'export', '--socket', socket);
    t.strictSame([exported.code, exported.stdout.split('\n').length], [0, 4], 'header, flow, end');
    const file = join(folder, 'flows.jsonl');
    writeFileSync(file, exported.stdout);
    weir('ct', 'flush', '--all', '--socket', socket);
    t.strictSame(ask('ct', 'list'), []);
    const imported = weir('ct', 'import', file, '--socket', socket);
    t.strictSame(imported, { code: 0, stdout: '1 connection imported\n', stderr: '' });
    const [after] = ask<{ client: string; backend: string }[]>('ct', 'list');
    t.match(after, { client: before!.client, backend: before!.backend, service: 'dns', state: 'UNREPLIED' });
    t.match(ask('ct', 'import', file), { imported: 0, skipped: { exists: 1 } });
    t.match(await run.event('imported', 2), { imported: 0, skipped: { exists: 1 }, complete: true });
    run.kill('SIGTERM');
    t.equal(await run.ended, 0);
  });

  t.test('the file changes, and is read by itself', async (t) => {
    const current = join(folder, '..data');
    let generation = 0;
    const mount = (text: string): void => {
      const target = join(folder, `..${++generation}`);
      mkdirSync(target);
      writeFileSync(join(target, 'weir.yaml'), text);
      symlinkSync(target, `${current}_tmp`);
      renameSync(`${current}_tmp`, current);
    };
    const ways: readonly (readonly [string, (text: string) => void])[] = [
      ['written in place', (text) => writeFileSync(config, text)],
      [
        'renamed',
        (text) => {
          writeFileSync(`${config}.new`, text);
          renameSync(`${config}.new`, config);
        },
      ],
      [
        'deleted and created',
        (text) => {
          unlinkSync(config);
          writeFileSync(config, text);
        },
      ],
      ['a link swapped', mount],
    ];
    write([B1, B2]);
    const run = new Run();
    await run.event('ready');
    let applied = 0;
    for (const [way, replace] of ways) {
      if (replace === mount) {
        mount(textOf([B1, B2]));
        unlinkSync(config);
        symlinkSync('..data/weir.yaml', config);
      }
      for (const backends of [[B1], [B2], [B1, B2]]) {
        const beganMs = performance.now();
        replace(textOf(backends));
        const line = await run.event('reload-applied', ++applied);
        t.equal(line.backends, backends.length, `${way}: after ${Math.round(performance.now() - beganMs)} ms`);
      }
    }
    unlinkSync(config);
    const whole = textOf([B1], '# a comment');
    writeFileSync(config, whole.slice(0, whole.indexOf('port: 53, protocol')));
    t.match(await run.event('reload-refused'), { code: 'CONFIG_INVALID', problems: [{ line: 3 }] });
    t.match(ask<{ config: object }>('status').config, {
      backends: 2,
      version: applied + 1,
      ageSeconds: Number,
      lastReload: { success: false, message: /weir\.yaml:3/ },
    });
    t.match(
      weir('status', '--socket', socket).stdout,
      /config +\S+, version \d+, for \d+ s\n +refused .*\n.*weir\.yaml:3/,
    );
    t.match(inside('curl', '-s', 'http://127.0.0.1:9650/metrics').stdout, 'weir_config_last_reload_success 0');
    appendFileSync(config, whole.slice(whole.indexOf('port: 53, protocol')));
    t.match(await run.event('reload-applied', ++applied), { backends: 1 }, 'half-written, and then whole');

    unlinkSync(config);
    t.match(await run.event('reload-refused', 2), { code: 'CONFIG_UNREADABLE', msg: /it does not exist/ });
    t.match(ask<{ config: object }>('status').config, { backends: 1, lastReload: { success: false } });
    await new Promise((resolve) => setTimeout(resolve, 1500));
    writeFileSync(config, whole);
    t.match(await run.event('reload-applied', ++applied), { backends: 1 }, 'back again');
    t.match(inside('curl', '-s', 'http://127.0.0.1:9650/metrics').stdout, 'weir_config_last_reload_success 1');
    writeFileSync(config, whole);
    writeFileSync(config, `${whole}# the end\n`);
    await run.event('reload-applied', ++applied);
    t.strictSame(
      ['reload-applied', 'reload-refused'].map((name) => run.log.filter(({ event }) => event === name).length),
      [applied, 2],
      'each change once, what is no change never',
    );
    run.kill('SIGTERM');
    t.equal(await run.ended, 0);
    t.strictSame(traces(), []);
  });

  t.test('the service manager is told; events and metrics can be asked for', async (t) => {
    const manager = await NotifyReceiver.bind(join(folder, 'notify'));
    t.teardown(() => manager.close());
    Object.assign(process.env, { NOTIFY_SOCKET: join(folder, 'notify'), WATCHDOG_USEC: '200000' });
    write([B1, B2]);
    const run = new Run();
    delete process.env.NOTIFY_SOCKET;
    delete process.env.WATCHDOG_USEC;
    let { lines, at } = await manager.datagram((line) => line === 'READY=1');
    t.strictSame(lines, ['READY=1', 'STATUS=1 service, 2 backends']);
    await run.event('ready');
    ({ at } = await manager.datagram((line) => line === 'WATCHDOG=1', at));
    await manager.datagram((line) => line === 'WATCHDOG=1', at + 1);
    t.pass('the data path answers');

    for (const [backends, more, status] of [
      [[B1], '', '1 service, 1 backend'],
      [[B1], 'bogus: 1', '1 service, 1 backend; the file was refused and is not in use'],
    ] as const) {
      write([...backends], more);
      run.kill('SIGHUP');
      ({ lines, at } = await manager.datagram((line) => line === 'RELOADING=1', at + 1));
      t.match(lines[1], /^MONOTONIC_USEC=\d+$/);
      // The watch of the file may have come before the signal, or in its middle.
      ({ lines, at } = await manager.datagram((line) => line === `STATUS=${status}`, at + 1));
      t.equal(lines[0], 'READY=1');
    }

    const logged = weir('events', '-o', 'json', '--socket', socket).stdout.trimEnd().split('\n');
    t.ok(run.log.length > 6);
    t.strictSame(
      logged.slice(0, run.log.length),
      run.log.map((line) => JSON.stringify(line)),
      'all that was logged',
    );
    t.match(weir('events', '-n', '1', '--socket', socket).stdout, /^[-\d]+ [:.\d]+ ERROR reload-refused: the former/);

    for (let i = 0; i < 5; i++) sendDatagram();
    const scrape = weir('metrics', '--socket', socket).stdout;
    const value = (name: string): number =>
      Number(
        scrape
          .split('\n')
          .find((line) => line.startsWith(`${name} `))
          ?.split(' ')[1],
      );
    const flows = ask<unknown[]>('ct', 'list').length;
    t.equal(flows, 5);
    t.equal(value('weir_conntrack_entries{table="any"}'), flows);
    t.equal(value('weir_connections_active{service="dns",backend="b1"}'), flows);
    t.equal(value('weir_connections_total{service="dns",backend="b1"}'), flows);
    t.equal(value('weir_batch_packets_count'), value('weir_batches_total'));
    t.equal(value('weir_batch_packets_sum'), value('weir_device_packets_total{direction="rx"}'));
    t.notMatch(scrape, 'backend="b2"', 'what has left has no series');

    const file = join(folder, 'dns.pcapng');
    const command = ['netns', 'exec', namespace, process.execPath, program, 'capture', '--service', 'dns', '-w', file];
    const capture = spawn('ip', [...command, '--socket', socket], { stdio: ['ignore', 'ignore', 'pipe'] });
    const over = new Promise((resolve) => capture.on('close', resolve));
    let said = '';
    capture.stderr.on('data', (chunk) => (said += chunk));
    await run.event('capture-begun');
    const sizes = async (isEnough: (bytes: number) => boolean): Promise<number> => {
      for (;;) {
        const bytes = existsSync(file) ? statSync(file).size : 0;
        if (isEnough(bytes)) return bytes;
        await new Promise((resolve) => setTimeout(resolve, 20));
      }
    };
    const head = await sizes((bytes) => bytes > 0);
    sendDatagram();
    await sizes((bytes) => bytes > head);
    t.match(weir('capture', '-w', join(folder, 'second'), '--socket', socket), {
      code: 1,
      stderr: /capture is running already/,
    });
    capture.kill('SIGINT');
    t.equal(await over, 0);
    t.equal(said, 'weir: 1 packet in, 1 out; none lost.\n');
    t.match(readFileSync(file, 'latin1'), /in: dns -> b1 10\.2\.0\.11:53, new, maglev.*out of packet 1/s);
    t.equal(statSync(file).mode & 0o777, 0o600);
    t.match(await run.event('capture-ended'), { in: 1, out: 1, lost: 0 });

    run.kill('SIGTERM');
    t.equal(await run.ended, 0);
    await manager.datagram((line) => line === 'STOPPING=1', at + 1);
    t.pass('and of the end');
  });

  t.test('a thousand clients that say nothing, or not enough, change nothing', async (t) => {
    write([B1]);
    const run = new Run();
    await run.event('ready');
    const crowd = spawn('ip', ['netns', 'exec', namespace, process.execPath, '-e', CROWD, socket], { stdio: 'pipe' });
    t.teardown(() => crowd.kill());
    await new Promise((resolve) => crowd.stdout.once('data', resolve));
    const forwarded = (): number => ask<{ traffic: { forwarded: number } }>('status').traffic.forwarded;
    const before = forwarded();
    for (let i = 0; i < 3; i++) sendDatagram();
    t.equal(forwarded(), before + 3, 'packets go on, and are told of');
    const url = 'http://127.0.0.1:9650';
    t.match(inside('curl', '-s', `${url}/metrics`).stdout, 'weir_batches_total');
    const status = (...args: string[]): string =>
      inside('curl', '-s', '-o', '/dev/null', '-w', '%{http_code}', ...args).stdout;
    t.equal(status('-X', 'DELETE', `${url}/v1/status`), '405');
    t.equal(status('--data-binary', `@${process.execPath}`, `${url}/v1/status`), '413', 'a hundred megabytes');
    t.equal(status('--unix-socket', socket, '--data-binary', `@${process.execPath}`, 'http://weir/v1/reload'), '413');
    t.equal(status(`${url}/healthz`), '200');
    run.kill('SIGTERM');
    t.equal(await run.ended, 0, 'and the end waits for none of them');
  });

  t.test('the device goes away', async (t) => {
    write([B1]);
    for (const engine of ['io_uring', 'readwrite']) {
      write([B1], `device: { engine: ${engine} }`);
      const run = new Run();
      await run.event('ready');
      inside('ip', 'link', 'del', 'weir0');
      t.equal(await run.ended, 1, engine);
      t.match(
        run.log.slice(-3).map(({ event, level }) => `${event} ${level}`),
        ['device-failed error', 'stopping info', 'stopped info'],
      );
      t.strictSame(traces(), []);
    }
  });

  t.test('a reader of the log that goes away takes nothing along', async (t) => {
    write([B1]);
    const script = `${process.execPath} ${program} run -c ${config} | head -n 1; exit "\${PIPESTATUS[0]}"`;
    const shell = spawn('ip', ['netns', 'exec', namespace, 'bash', '-c', script], { stdio: 'ignore' });
    const ended = new Promise((resolve) => shell.on('close', resolve));
    let status: ReturnType<typeof weir>;
    do status = weir('status', '-o', 'json', '--socket', socket);
    while (status.code !== 0 && shell.exitCode === null);
    t.equal(status.code, 0, 'it runs');
    process.kill((JSON.parse(status.stdout) as { pid: number }).pid, 'SIGTERM');
    t.equal(await ended, 0);
    t.strictSame(traces(), []);
  });
});
