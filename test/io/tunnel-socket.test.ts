import { execFileSync } from 'node:child_process';
import dgram from 'node:dgram';
import { once } from 'node:events';
import { closeSync, writeFileSync } from 'node:fs';
import { setImmediate as turn } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import t, { type Test } from 'tap';
import { setSocketOption } from '../../lib/io/syscalls.js';
import { openTun } from '../../lib/io/tun.js';
import { openTunnelSocket } from '../../lib/io/tunnel-socket.js';
import { createWake } from '../../lib/io/wake.js';
import { addressWord, partial, pattern, udp } from '../fixtures/packets.js';
import { needsRoot } from '../support/skip.js';
import { type EngineName, engineOn } from './mirror.js';

/**
 * The engines with a tunnel's socket beside the device. The file runs itself again in a network namespace of its own:
 *
 *     a socket on 10.9.0.1 -- loopback -> 10.9.0.1:6081 -> device        10.9.0.2 -> TUN -> device
 */

const HOST = '10.9.0.1';
const PORT = 6081;
const ENGINES: readonly EngineName[] = ['multishot', 'single', 'readwrite'];
const FILE = fileURLToPath(import.meta.url);

if (process.env.WEIR_TEST_NAMESPACE === undefined) {
  t.setTimeout(900_000);
  t.test('in a network namespace', { ...needsRoot(t, 'unshare', 'ip'), timeout: 100_000 }, async (t) => {
    const env = { ...process.env, WEIR_TEST_NAMESPACE: '1', TAP_TIMEOUT: '90' };
    await t.spawn('unshare', ['--net', '--', process.execPath, ...process.execArgv, FILE], { env, timeout: 100_000 });
  });
} else {
  ip('link set lo up');
  writeFileSync('/proc/sys/net/ipv6/conf/default/disable_ipv6', '1'); // a host says more than it is asked for there
  for (const engine of ENGINES) for (const offload of [true, false]) testEngine(engine, offload);
  t.test('addresses that cannot be had', async (t) => {
    const first = openTunnelSocket(addressWord('127.0.0.1'), PORT);
    t.throws(() => openTunnelSocket(addressWord('127.0.0.1'), PORT), {
      code: 'ADDRESS_IN_USE',
      message: 'UDP 127.0.0.1:6081 is taken',
      remedy: /ss -ulnp/,
    });
    closeSync(first.fd);
    t.throws(() => openTunnelSocket(addressWord('192.0.2.1'), PORT), {
      code: 'NOT_THIS_HOST',
      message: 'tunnel.address 192.0.2.1 is no address of this host',
      remedy: /node/,
    });
  });
}

function ip(command: string): void {
  execFileSync('ip', command.split(' '), { stdio: ['ignore', 'ignore', 'inherit'] });
}

function testEngine(engine: EngineName, offload: boolean): void {
  t.test(`${engine}, offload ${offload ? 'on' : 'off'}`, async (t) => {
    const tun = openTun('tunnel', { offload });
    ip(`addr add ${HOST}/24 dev tunnel`);
    ip('link set tunnel up txqueuelen 1000');
    const socket = openTunnelSocket(addressWord(HOST), PORT);
    const wake = createWake();
    const { fd, vnetHeader, udpSegmentation } = tun;
    const options = { fd, vnetHeader, udpSegmentation, mtu: 1500, wakeFd: wake.fd, tunnelFd: socket.fd };
    const device = engineOn(options, engine);
    const sender = dgram.createSocket('udp4').bind(0, HOST);
    await once(sender, 'listening');

    await testDatagrams(t, device, sender);
    if (socket.joins) await testJoined(t, device, sender);
    await testBoth(t, device, sender);
    if (offload) await testWrites(t, device);
    wake.wake();
    t.equal(device.receive(60_000), 0, 'a wake-up ends the wait for both');

    t.equal(device.slotsOwned, device.memory.slots, 'all slots are back');
    device.close();
    sender.close();
    wake.close();
    closeSync(socket.fd);
    closeSync(tun.fd);
  });
}

type Device = ReturnType<typeof engineOn>;

interface Row {
  readonly bytes: Uint8Array;
  readonly datagramBytes: number;
  readonly peer: number;
  readonly tos: number;
}

/** Receives until `wanted` bytes came through the socket, and lets go of everything. */
function collect(device: Device, wanted: number): { rows: Row[]; packets: number } {
  const rows: Row[] = [];
  let packets = 0;
  for (let got = 0; got < wanted; ) {
    if (device.receive(5000) <= 0) break;
    const { rx, memory } = device;
    for (let row = 0; row < rx.count; row++) {
      const offset = rx.offset[row]!;
      if (offset !== rx.slot[row]! * memory.slotBytes + 128) throw new Error('no headroom');
      const bytes = memory.bytes.slice(offset, offset + rx.length[row]!);
      const datagramBytes = rx.datagramBytes[row]!;
      if (datagramBytes === 0) packets++;
      else {
        got += Math.max(1, bytes.length);
        rows.push({ bytes, datagramBytes, peer: rx.peer[row]!, tos: rx.tos[row]! });
      }
      memory.bytes.fill(0xff, offset - 128, offset);
      device.release(rx.slot[row]!);
    }
  }
  return { rows, packets };
}

function send(sender: dgram.Socket, bytes: Uint8Array): Promise<void> {
  return new Promise((resolve, reject) => {
    sender.send(bytes, PORT, HOST, (error) => (error ? reject(error) : resolve()));
  });
}

function fdOf(socket: dgram.Socket): number {
  return (socket as unknown as { _handle: { fd: number } })._handle.fd;
}

async function testDatagrams(t: Test, device: Device, sender: dgram.Socket): Promise<void> {
  const sizes = [0, 1, 20, 1472, 0, 9000, 60_000];
  setSocketOption(fdOf(sender), 0, 1, 0x2b); // IP_TOS: a DSCP and CE
  for (const size of sizes) await send(sender, pattern(size));
  const { rows } = collect(
    device,
    sizes.reduce((sum, size) => sum + Math.max(1, size), 0),
  );
  t.same(
    rows.map(({ bytes }) => bytes.length),
    sizes,
    'datagrams of every size, in order, and empty ones',
  );
  for (const { bytes, datagramBytes, peer, tos } of rows) {
    t.same(bytes, pattern(bytes.length));
    t.equal(datagramBytes, Math.max(1, bytes.length));
    t.equal(peer >>> 0, addressWord(HOST), 'the sender is known');
    t.equal(tos, 0x2b, 'and the TOS');
  }
  setSocketOption(fdOf(sender), 0, 1, 0);
}

/** One UDP GSO write arrives as one row. */
async function testJoined(t: Test, device: Device, sender: dgram.Socket): Promise<void> {
  const sent = pattern(1000 * 40 + 300);
  setSocketOption(fdOf(sender), 17, 103, 1000); // UDP_SEGMENT
  await send(sender, sent);
  await send(sender, sent);
  setSocketOption(fdOf(sender), 17, 103, 0);
  const { rows } = collect(device, 2 * sent.length);
  t.same(
    rows.map(({ bytes, datagramBytes }) => [bytes.length, datagramBytes]),
    [
      [sent.length, 1000],
      [sent.length, 1000],
    ],
  );
  t.same(rows[1]?.bytes, sent);
}

/** Takes every slot there is, with a write queued: the device then reaps in the middle of a batch, whose first slot is left. */
function reapMeanwhile(device: Device): void {
  const { rx, memory } = device;
  const offset = rx.offset[0]!;
  memory.bytes.fill(0, offset - 10, offset + 20);
  device.transmit(rx.slot[0]!, offset, 20); // refused: no IP packet
  const taken: number[] = [];
  for (let slot = device.take(); slot >= 0; slot = device.take()) taken.push(slot);
  for (const slot of taken) device.release(slot);
}

/** More of both than a batch holds: neither waits for the other for good, and no slot is lost. */
async function testBoth(t: Test, device: Device, sender: dgram.Socket): Promise<void> {
  const toTun = dgram.createSocket('udp4');
  let packets = 0;
  let datagrams = 0;
  let mixed = 0;
  for (let round = 0; round < 5; round++) {
    const sends: Promise<void>[] = [];
    for (let i = 0; i < 100; i++) {
      sends.push(send(sender, pattern(100)));
      sends.push(new Promise((resolve) => toTun.send(pattern(50), 9, '10.9.0.2', () => resolve())));
    }
    await Promise.all(sends);
    for (let left = 200; left > 0; ) {
      const count = device.receive(5000);
      if (count <= 0) break;
      left -= count;
      const { rx } = device;
      const ofTunnel = rx.datagramBytes.subarray(0, count).filter((bytes) => bytes > 0).length;
      datagrams += ofTunnel;
      packets += count - ofTunnel;
      if (ofTunnel > 0 && ofTunnel < count) mixed++;
      for (let row = 1; row < count; row++) device.release(rx.slot[row]!);
      reapMeanwhile(device);
    }
  }
  toTun.close();
  t.same({ packets, datagrams }, { packets: 500, datagrams: 500 });
  t.ok(mixed > 0, 'one batch holds both');
}

/** What is written stays as it is until the kernel has it, though its slot is lent again in the same system call. */
async function testWrites(t: Test, device: Device): Promise<void> {
  const receiver = dgram.createSocket('udp4').bind(0, HOST);
  await once(receiver, 'listening');
  let received = 0;
  receiver.on('message', () => received++);
  const { memory } = device;
  const fields = { src: '10.9.0.2', sport: 9, dst: HOST, dport: receiver.address().port, payload: 50 };
  const { bytes, vnet } = partial(udp(fields));
  for (let round = 0; round < 3; round++) {
    for (let i = 0; i < 20; i++) {
      const slot = device.take();
      const offset = slot * memory.slotBytes + 128;
      memory.bytes.set(bytes, offset);
      memory.bytes.set(vnet!, offset - 10);
      device.transmit(slot, offset, bytes.length);
    }
    device.receive(0);
  }
  for (let turns = 0; received < 60 && turns < 1000; turns++) await turn();
  t.equal(received, 60, 'a checksum left to the kernel arrives completed');
  receiver.close();
}
