import { spawn } from 'node:child_process';
import {
  appendFileSync,
  existsSync,
  mkdirSync,
  readFileSync,
  renameSync,
  statSync,
  symlinkSync,
  unlinkSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import type { Finding } from '../../lib/control/doctor/finding.js';
import { NotifyReceiver } from '../support/notify-receiver.js';
import {
  ask,
  B1,
  B2,
  config,
  createNamespace,
  endpointRules,
  folder,
  inside,
  namespace,
  needsWeir,
  program,
  Run,
  sendDatagram,
  socket,
  textOf,
  traces,
  weir,
  write,
} from '../support/weir-namespace.js';

/* A weir that runs: changed, asked and watched. */

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

t.test('a running weir', needsWeir(t), async (t) => {
  t.teardown(createNamespace());

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

  t.test('doctor sees what somebody has taken away, and its commands bring it back', async (t) => {
    write([B1, B2]);
    const run = new Run();
    await run.event('ready');
    const complaints = (): { name: string; found: string; mend: string }[] =>
      (JSON.parse(weir('doctor', '-c', config, '-o', 'json').stdout) as (Finding & { mend: string })[]).filter(
        ({ status }) => status === 'fail',
      );
    t.strictSame(complaints(), []);
    inside('ip', 'rule', 'del', 'priority', '1001');
    inside('ip', 'route', 'del', '10.96.0.10', 'dev', 'weir0');
    inside('sysctl', '-qw', 'net.ipv4.ip_forward=0');
    const found = complaints();
    t.strictSame(
      found.map(({ name }) => name),
      ['ip-forward', 'set-up'],
    );
    t.match(found[1]!.found, /ip rule add priority 1001 .*ip route replace 10\.96\.0\.10 /);
    t.equal(found[1]!.mend, `weir reload --socket ${socket}`);
    inside('sh', '-c', found[0]!.mend);
    t.equal(weir(...found[1]!.mend.split(' ').slice(1)).code, 0);
    t.strictSame(complaints(), []);
    run.kill('SIGTERM');
    t.equal(await run.ended, 0);
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
    t.match(await run.event('imported', 2), { level: 'info', imported: 0, skipped: { exists: 1 }, complete: true });

    const lines = exported.stdout.split('\n');
    for (const [text, msg] of [
      ['nonsense\n', /^an import failed: line 1: /],
      [`${lines.slice(0, 2).join('\n')}\n`, /^an import was cut short; 0 connections taken over$/],
      [[lines[0], '{}', ...lines.slice(1)].join('\n'), /^0 connections taken over, 1 refused$/],
    ] as const) {
      const count = run.log.filter(({ event }) => event === 'imported').length;
      writeFileSync(file, text);
      t.equal(weir('ct', 'import', file, '--socket', socket).code, 1);
      t.match(await run.event('imported', count + 1), { level: 'warn', msg });
    }
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
});
