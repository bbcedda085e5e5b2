import { execFileSync, spawnSync } from 'node:child_process';
import { createHash, randomFillSync } from 'node:crypto';
import dgram from 'node:dgram';
import { once } from 'node:events';
import { closeSync, openSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import net from 'node:net';
import { setImmediate as turn } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { Worker } from 'node:worker_threads';
import t, { type Test } from 'tap';
import type { ErrorCode } from '../../lib/base/errors.js';
import { bootClock } from '../../lib/io/boot-clock.js';
import { openDevice } from '../../lib/io/open.js';
import type { KernelDevice } from '../../lib/io/slots.js';
import { openTun, type Tun } from '../../lib/io/tun.js';
import { createWake, type Wake } from '../../lib/io/wake.js';
import { needsRoot } from '../support/skip.js';
import { type EngineName, engineOn, type MirrorReport, mirrorBatch, RECEIVES, STOP, WORDS } from './mirror.js';

/**
 * The engines on real TUN devices. The file runs itself again in a network namespace of its own, which ends with it:
 *
 *     sockets on 10.9.0.1 -- kernel -- 10.9.0.0/24 -> TUN -> mirror (swaps the addresses) -> TUN -> kernel -- sockets
 */

const HOST = '10.9.0.1';
const MIRRORED = '10.9.0.2';
const ENGINES: readonly EngineName[] = ['multishot', 'single', 'readwrite'];
const FILE = fileURLToPath(import.meta.url);

/** A Worker does not inherit the loader of its parent. */
const MIRROR = `import('tsx/esm/api').then(({ register }) => {
  register();
  return import(${JSON.stringify(new URL('./mirror.ts', import.meta.url).href)});
});`;

if (process.env.WEIR_TEST_NAMESPACE === undefined) {
  t.setTimeout(900_000);
  const options = { ...needsRoot(t, 'unshare', 'ip', 'ping', 'setpriv', 'prlimit'), timeout: 250_000 };
  t.test('in a network namespace', options, async (t) => {
    const env = { ...process.env, WEIR_TEST_NAMESPACE: '1', TAP_TIMEOUT: '240' };
    await t.spawn('unshare', ['--net', '--', process.execPath, ...process.execArgv, FILE], { env, timeout: 250_000 });
  });
} else {
  ip('link set lo up');
  writeFileSync('/proc/sys/net/ipv6/conf/default/disable_ipv6', '1'); // a host says more than it is asked for there
  testClock();
  testNames();
  for (const offload of [true, false]) {
    for (const engine of ENGINES) {
      t.test(`${engine}, offload ${offload ? 'on' : 'off'}`, async (t) => {
        await testTraffic(t, engine, offload);
        await testWake(t, engine, offload);
        await testDeletion(t, engine, offload);
        testSlots(t, engine, offload);
        testTimes(t, engine, offload);
        testLinkDown(t, engine, offload);
      });
    }
  }
  t.test('an engine that is refused', testRefused);
}

function ip(command: string): void {
  execFileSync('ip', command.split(' '), { stdio: ['ignore', 'ignore', 'inherit'] });
}

interface Opened {
  readonly tun: Tun;
  readonly wake: Wake;
  readonly device: KernelDevice;
  close(): void;
}

/** A device that is up and routed. */
function open(name: string, offload: boolean): Opened {
  const tun = openTun(name, { offload });
  const wake = createWake();
  ip(`addr add ${HOST}/24 dev ${name}`);
  ip(`link set ${name} up txqueuelen 20000`);
  const { fd, vnetHeader, udpSegmentation } = tun;
  return {
    tun,
    wake,
    device: { fd, vnetHeader, udpSegmentation, mtu: 1500, wakeFd: wake.fd },
    close() {
      wake.close();
      closeSync(fd);
    },
  };
}

function startMirror(opened: Opened, engine: EngineName) {
  const shared = new Int32Array(new SharedArrayBuffer(WORDS * 4));
  const worker = new Worker(MIRROR, { eval: true, workerData: { device: opened.device, engine, shared } });
  const report = once(worker, 'message').then(([message]) => message as MirrorReport);
  const exit = once(worker, 'exit'); // may come in the same turn as the message
  return {
    shared,
    report,
    async stop(): Promise<MirrorReport> {
      Atomics.store(shared, STOP, 1);
      opened.wake.wake();
      const result = await report;
      await exit;
      return result;
    },
  };
}

/** Echo, a bulk TCP stream whose bytes must survive, and numbered datagrams whose order must. */
async function testTraffic(t: Test, engine: EngineName, offload: boolean): Promise<void> {
  const opened = open('traffic', offload);
  const mirror = startMirror(opened, engine);

  const ping = spawnSync('ping', ['-c', '3', '-i', '0.05', '-W', '5', MIRRORED], { encoding: 'utf8' });
  t.match(ping.stdout, /3 received/, 'echo requests are answered');

  const sent = randomFillSync(Buffer.alloc(8 << 20));
  const received = await throughTcp(sent);
  t.equal(received, createHash('sha256').update(sent).digest('hex'), 'a TCP stream arrives unchanged');

  const datagrams = offload ? 100_000 : 10_000;
  const order = await throughUdp(datagrams, 128);
  t.same(order, { received: datagrams, disordered: 0 }, 'all datagrams arrive, in order');
  const pingPong = 2000;
  t.same(await throughUdp(pingPong, 1), { received: pingPong, disordered: 0 }, 'one at a time, after the burst');
  t.notOk(threadNames().includes('iou-wrk'), 'io_uring left no read to its worker threads, which keep no order');

  const report = await mirror.stop();
  t.equal(report.failure, undefined);
  t.equal(report.slotsLost, 0, 'no slot is lost');
  t.equal(report.writeErrors, 0);
  t.ok(report.packets > datagrams);
  t.ok(report.largestBatch > 1, 'packets come in batches');
  if (offload) t.ok(report.largestBytes > 1500, `super-packets arrive (${report.largestBytes} bytes)`);
  else t.ok(report.largestBytes <= 1500);
  opened.close();
}

function threadNames(): string {
  return readdirSync('/proc/self/task')
    .map((id) => readFileSync(`/proc/self/task/${id}/comm`, 'utf8'))
    .join();
}

async function throughTcp(sent: Buffer): Promise<string> {
  const server = net.createServer().listen(0, HOST);
  await once(server, 'listening');
  const client = net.connect((server.address() as net.AddressInfo).port, MIRRORED);
  client.end(sent);
  const [socket] = (await once(server, 'connection')) as [net.Socket];
  const hash = createHash('sha256');
  for await (const chunk of socket) hash.update(chunk);
  client.destroy();
  server.close();
  return hash.digest('hex');
}

/** Sends datagrams with at most a window of them under way, as many as a receive buffer of the default size can hold. */
async function throughUdp(count: number, window: number): Promise<{ received: number; disordered: number }> {
  const server = dgram.createSocket('udp4');
  const client = dgram.createSocket('udp4');
  server.bind(0, HOST);
  await once(server, 'listening');
  client.connect(server.address().port, MIRRORED);
  await once(client, 'connect');
  let received = 0;
  let disordered = 0;
  let last = -1;
  let progressAtMs = performance.now();
  server.on('message', (message) => {
    const sequence = message.readUInt32BE(0);
    if (sequence <= last) disordered++;
    last = sequence;
    received++;
    progressAtMs = performance.now();
  });
  for (let sent = 0; received < count && performance.now() - progressAtMs < 10_000; await turn()) {
    for (; sent < count && sent - received < window; sent++) {
      const message = Buffer.alloc(32);
      message.writeUInt32BE(sent);
      client.send(message);
    }
  }
  server.close();
  client.close();
  return { received, disordered };
}

/** Every wake-up from another thread ends the `receive` it finds, or the next one. */
async function testWake(t: Test, engine: EngineName, offload: boolean): Promise<void> {
  const opened = open('wake', offload);
  ip('link set wake down');
  const mirror = startMirror(opened, engine);
  let missed = 0;
  for (let turn = 0; turn < 500; turn++) {
    createWake(opened.wake.fd).wake();
    if (Atomics.wait(mirror.shared, RECEIVES, turn, 10_000) === 'timed-out') missed++;
  }
  t.equal(missed, 0, '500 wake-ups are all noticed');
  const report = await mirror.stop();
  t.match(report, { packets: 0, failure: undefined, slotsLost: 0 });
  opened.close();
}

async function testDeletion(t: Test, engine: EngineName, offload: boolean): Promise<void> {
  const opened = open('deleted', offload);
  const mirror = startMirror(opened, engine);
  opened.wake.wake();
  Atomics.wait(mirror.shared, RECEIVES, 0, 10_000);
  ip('link del deleted');
  const report = await mirror.report;
  t.equal(report.failure, 'DEVICE_FAILED', 'a device that is deleted under a blocked receive is an error');
  t.equal(report.slotsLost, 0);
  opened.close();
}

/** Who owns which slot, by hand. */
function testSlots(t: Test, engine: EngineName, offload: boolean): void {
  const opened = open('slots', offload);
  const device = engineOn(opened.device, engine);
  const { memory } = device;
  t.equal(memory.slotBytes % 64, 0);
  t.ok(memory.slotBytes >= 128 + (offload ? 65535 : 1500));
  t.match(device.features, { vnetHeader: offload, engine: engine === 'readwrite' ? 'readwrite' : 'io_uring' });
  drain(device);

  const taken: number[] = [];
  for (let slot = device.take(); slot >= 0; slot = device.take()) taken.push(slot);
  t.ok(taken.length >= 32, 'a reserve can be taken');
  t.equal(new Set(taken).size, taken.length, 'each slot once');
  t.equal(device.take(), -1, 'then there is none');

  // A packet of no IP version is refused; the slot comes back all the same, and those behind it are written.
  for (const slot of taken) memory.bytes.fill(0, slot * memory.slotBytes, slot * memory.slotBytes + 256);
  device.transmit(taken[0]!, taken[0]! * memory.slotBytes + 128, 64);
  t.equal(device.take(), taken[0], 'taking a slot first writes what is queued');
  t.equal(device.writeErrors, 1, 'a refused write is counted');
  for (const slot of taken) device.release(slot);
  t.equal(device.receive(0), 0);
  t.equal(device.slotsOwned, memory.slots, 'all slots are back');

  // Several rounds through the same slots, whose headers are dirtied in between.
  let dirty = 0;
  let short = 0;
  for (let round = 0; round < 5; round++) {
    ping('-c 40 -l 40 -s 100');
    for (let left = 40; left > 0; ) {
      const count = device.receive(5000);
      if (count <= 0) break;
      left -= count;
      for (let row = 0; row < count; row++) {
        const offset = device.rx.offset[row]!;
        if (offset !== device.rx.slot[row]! * memory.slotBytes + 128) short++;
        if (device.rx.length[row] !== 128) short++;
        if (memory.bytes.subarray(offset - 10, offset).some((byte) => byte !== 0)) dirty++;
        memory.bytes.fill(0xff, offset - 10, offset);
        device.release(device.rx.slot[row]!);
      }
    }
  }
  t.equal(short, 0, 'packets start after the headroom and are whole');
  t.equal(dirty, 0, 'the vnet header of a plain packet is zero');

  device.close();
  device.close();
  t.equal(memory.bytes[128], 0, 'memory that was seen stays readable after close');
  opened.close();
}

/** Sends without waiting for answers. */
function ping(flags: string): void {
  spawnSync('ping', ['-q', '-W', '0.01', ...flags.split(' '), MIRRORED]);
}

/** Takes in what the kernel sends on a fresh device by itself. */
function drain(device: ReturnType<typeof engineOn>): void {
  while (device.receive(50) > 0) {
    for (let row = 0; row < device.rx.count; row++) device.release(device.rx.slot[row]!);
  }
}

function testTimes(t: Test, engine: EngineName, offload: boolean): void {
  const opened = open('times', offload);
  execFileSync('ip', ['link', 'set', 'times', 'down']);
  const device = engineOn(opened.device, engine);
  drain(device);
  for (const timeoutMs of [0.4, 1, 7.5, 40]) {
    const startMs = performance.now();
    t.equal(device.receive(timeoutMs), 0);
    const tookMs = performance.now() - startMs;
    t.ok(tookMs >= timeoutMs, `${timeoutMs} ms are not cut short (${tookMs.toFixed(2)})`);
    t.ok(tookMs < timeoutMs + 500, 'nor drawn out');
  }
  const beforeMs = threadCpuMs();
  device.receive(1000);
  const usedMs = threadCpuMs() - beforeMs;
  t.ok(usedMs < 10, `blocked for 1 s, it uses ${usedMs.toFixed(2)} ms of a core`);

  opened.wake.wake();
  opened.wake.wake();
  const startMs = performance.now();
  t.equal(device.receive(60_000), 0, 'a wake-up that came before');
  t.ok(performance.now() - startMs < 10_000);
  device.close();
  opened.close();
}

/** Of this thread alone: V8 tidies up on others. */
function threadCpuMs(): number {
  return Number(readFileSync('/proc/thread-self/schedstat', 'utf8').split(' ')[0]) / 1e6;
}

/** A link that is down is no failure: nothing comes, writes fail and are counted, and all is well when it is up again. */
function testLinkDown(t: Test, engine: EngineName, offload: boolean): void {
  const opened = open('updown', offload);
  const device = engineOn(opened.device, engine);
  drain(device);
  ip('link set updown down');
  const slot = device.take();
  const offset = slot * device.memory.slotBytes + 128;
  device.memory.bytes.fill(0, offset - 10, offset + 20);
  device.memory.bytes.set([0x45, 0, 0, 20, 0, 0, 0, 0, 64, 17, 0, 0, 10, 9, 0, 2, 10, 9, 0, 1], offset);
  device.transmit(slot, offset, 20);
  const startMs = performance.now();
  t.equal(device.receive(100), 0);
  t.ok(performance.now() - startMs >= 100, 'it is waited for');
  t.equal(device.writeErrors, 1);
  ip('link set updown up');
  drain(device);
  ping('-c 1');
  t.ok(device.receive(5000) > 0, 'packets come again');
  mirrorBatch(device);
  device.receive(0);
  t.equal(device.writeErrors, 1);
  device.close();
  opened.close();
}

function testClock(): void {
  const clock = bootClock();
  const uptimeMs = Number(readFileSync('/proc/uptime', 'utf8').split(' ')[0]) * 1000;
  t.ok(Math.abs(clock.nowMs() - uptimeMs) < 1000, 'the clock counts from the boot');
  const first = clock.nowMs();
  t.ok(clock.nowMs() >= first);
  t.not(first % 1, 0, 'in fractions of a millisecond');
}

function testNames(): void {
  const throwsCode = (name: string, code: ErrorCode, message: RegExp) =>
    t.throws(
      () => openTun(name, { offload: true }),
      { code, message, remedy: /./ },
      `${JSON.stringify(name)}: ${code}`,
    );
  const tun = openTun('taken', { offload: true });
  t.match(tun, { name: 'taken', vnetHeader: true, offloads: { csum: true }, note: /offload/ });
  throwsCode('taken', 'DEVICE_TAKEN', /taken: EBUSY: another program holds it/);
  closeSync(tun.fd);
  ip('link add other type bridge');
  throwsCode('other', 'DEVICE_TAKEN', /not a single-queue TUN/);
  throwsCode('sixteen-letters-', 'CONFIG_INVALID', /longer than 15/);
  for (const name of ['', '..', 'a/b', 'a b', 'weir%d']) throwsCode(name, 'CONFIG_INVALID', /cannot be/);
  const plain = openTun('plain', { offload: false });
  t.match(plain, { vnetHeader: false, udpSegmentation: false, offloads: { csum: false, tso4: false, uso: false } });
  closeSync(plain.fd);

  const program = `
    const { openTun } = await import(${JSON.stringify(new URL('../../lib/io/tun.ts', import.meta.url).href)});
    try { openTun('x', { offload: true }); } catch (error) { console.log(error.code, error.message, '|', error.remedy); }`;
  const node = [process.execPath, '--import=tsx', '--input-type=module', '-e', program];
  const without = spawnSync('setpriv', ['--bounding-set=-net_admin', '--inh-caps=-net_admin', ...node], {
    encoding: 'utf8',
  });
  t.match(without.stdout, /^NO_PERMISSION device x: EPERM .*CAP_NET_ADMIN/, 'without the capability');
  const others = 'mount -t tmpfs none /dev/net && mknod -m 600 /dev/net/tun c 10 200 && chown 65534 /dev/net/tun';
  const bounded = ['setpriv', '--bounding-set=-dac_override,-dac_read_search', '--inh-caps=-dac_override'];
  const closed = ['--mount', 'sh', '-c', `${others} && exec "$@"`, 'sh', ...bounded, ...node];
  const refused = spawnSync('unshare', closed, { encoding: 'utf8' });
  t.match(refused.stdout, /^NO_PERMISSION \/dev\/net\/tun: EACCES .*chmod 666/, 'with a device file of somebody else');
  const hidden = ['--mount', 'sh', '-c', 'mount -t tmpfs none /dev/net && exec "$@"', 'sh', ...node];
  const missing = spawnSync('unshare', hidden, { encoding: 'utf8' });
  t.match(missing.stdout, /^NO_TUN \/dev\/net\/tun: ENOENT .*modprobe tun/, 'without the device file');
}

/** No fd is left for a ring: `auto` takes the other engine and says why; by name it is an error. */
async function testRefused(t: Test): Promise<void> {
  const opened = open('refused', true);
  const first = openDevice({ ...opened.device, engine: 'auto' });
  t.match(first.note, /^engine io_uring/);
  first.device.close();
  execFileSync('prlimit', ['--pid', String(process.pid), '--nofile=256:']);
  const fds: number[] = [];
  try {
    for (;;) fds.push(openSync('/dev/null', 'r'));
  } catch {}
  const { device, note } = openDevice({ ...opened.device, engine: 'auto' });
  t.throws(() => openDevice({ ...opened.device, engine: 'io_uring' }), {
    code: 'ENGINE_UNAVAILABLE',
    message: /EMFILE/,
  });
  for (const fd of fds) closeSync(fd);
  t.equal(device.features.engine, 'readwrite');
  t.match(note, /^engine readwrite: io_uring cannot be used: io_uring_setup: EMFILE/);
  ping('-c 1');
  t.ok(device.receive(5000) > 0, 'and it works');
  device.close();
  opened.close();
}
