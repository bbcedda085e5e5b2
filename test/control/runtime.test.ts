import { spawn } from 'node:child_process';
import { existsSync, statSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import type { StatusView } from '../../lib/control/view.js';
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
  traces,
  weir,
  write,
} from '../support/weir-namespace.js';

/* weir as a process: start, stop and everything that can go wrong with them. */

const HOLD_PORT = `require('node:net').createServer().listen(9650, '127.0.0.1', () => console.log('held'))`;

/** Once so many packets have been read. */
async function whenRead(packets: number): Promise<StatusView> {
  for (;;) {
    const status = ask<StatusView>('status');
    if (status.traffic.rxPackets >= packets) return status;
  }
}

t.test('weir as a process', needsWeir(t), async (t) => {
  t.teardown(createNamespace());
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

  t.test('the kernel sends nothing of its own into the device', async (t) => {
    write([B1, B2]);
    const run = new Run();
    await run.event('ready');
    const addresses = inside('ip', '-6', 'addr', 'show', 'dev', 'weir0').stdout;
    t.equal(addresses, '');
    // What it would do by itself within some seconds, right now.
    const sent = inside('bash', '-c', 'echo x > /dev/udp/ff02::1%weir0/9');
    t.not(sent.code, 0, 'there is no IPv6');
    sendDatagram();
    const { traffic } = await whenRead(1);
    t.equal(traffic.rxPackets, 1, 'the datagram, and nothing before it');
    t.strictSame(Object.values(traffic.drops).filter(Boolean), []);
    run.kill('SIGTERM');
    t.equal(await run.ended, 0);
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

  t.test('Ctrl-C, over and over, and to every process', async (t) => {
    write([B1, B2]);
    const run = new Run();
    await run.event('ready');
    const pressing = setInterval(() => run.killGroup('SIGINT'), 15);
    // When all is done Node.js takes its handlers away, and the next one may end what is left of the process.
    await run.ended;
    clearInterval(pressing);
    t.strictSame(
      run.log.slice(-2).map(({ event }) => event),
      ['stopping', 'stopped'],
      'every step of the stop went well',
    );
    t.strictSame(traces(), []);
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
    t.match(sameDevice.stderr, /^weir: device weir0: EBUSY: another program holds it\. Stop that one/);
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
