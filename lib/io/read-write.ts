import { WeirError } from '../base/errors.js';
import { BATCH_PACKETS, HEADROOM_BYTES } from '../base/limits.js';
import { VNET_HEADER_BYTES } from '../wire/vnet.js';
import { DatagramBuffers } from './datagrams.js';
import { type BatchDevice, type DeviceFeatures, PacketBatch, type PacketMemory } from './device.js';
import { ReadFaults } from './faults.js';
import { type KernelDevice, maxPacketBytes, SlotPool } from './slots.js';
import {
  EAGAIN,
  EINTR,
  errnoName,
  MAP_PRIVATE_ANONYMOUS,
  MSG_DONTWAIT,
  mmap,
  munmap,
  POLLIN,
  poll,
  read,
  setNonBlocking,
  viewMemory,
  write,
} from './syscalls.js';

const PAGE_BYTES = 4096;
const WAKE_RESULT_AT = 64;
const LONGEST_POLL_MS = 0x7fffffff;

// Three pollfds: { fd i32, events i16, revents i16 }.
const POLLFD_COUNT = 3;
const TUN_FD_WORD = 0;
const TUN_EVENTS_WORD = 1;
const WAKE_FD_WORD = 2;
const WAKE_EVENTS_WORD = 3;
const TUNNEL_FD_WORD = 4;
const TUNNEL_EVENTS_WORD = 5;
const REVENTS_SHIFT = 16;

/** A pollfd with this fd is left out. */
const IGNORED_FD = -1;

/**
 * A TUN device driven by non-blocking reads and writes: a system call a packet, for kernels and containers where io_uring is
 * not to be had. A write is made at once, so its slot is free again when `transmit` returns and the order is that of the
 * calls. Reading comes before polling: under load a batch fills up without a poll, and a wake-up then ends the first
 * `receive` that finds nothing to read. With a tunnel's socket, each of the two may fill half of a batch.
 */
export class ReadWriteDevice implements BatchDevice {
  readonly memory: PacketMemory;
  readonly rx = new PacketBatch(BATCH_PACKETS);
  readonly features: DeviceFeatures;

  readonly #fd: number;
  readonly #wakeFd: number;
  readonly #tunnelFd: number;
  readonly #headerBytes: number;
  readonly #readBytes: number;
  readonly #pool: SlotPool;
  readonly #datagrams: DatagramBuffers | undefined;
  readonly #faults = new ReadFaults();
  readonly #pollfds: Int32Array;
  readonly #pollAddress: number;
  #writeErrors = 0;
  #closed = false;

  constructor(device: KernelDevice) {
    this.#fd = device.fd;
    this.#wakeFd = device.wakeFd;
    this.#headerBytes = device.vnetHeader ? VNET_HEADER_BYTES : 0;
    this.#tunnelFd = device.tunnelFd ?? IGNORED_FD;
    this.#pool = new SlotPool(maxPacketBytes(device));
    this.#datagrams = device.tunnelFd === undefined ? undefined : new DatagramBuffers(this.#pool);
    this.memory = this.#pool.memory;
    this.#readBytes = this.memory.slotBytes - HEADROOM_BYTES + this.#headerBytes;
    this.features = { engine: 'readwrite', vnetHeader: device.vnetHeader, udpSegmentation: device.udpSegmentation };
    this.#pollAddress = mmap(PAGE_BYTES, MAP_PRIVATE_ANONYMOUS);
    this.#pollfds = new Int32Array(viewMemory(this.#pollAddress, PAGE_BYTES));
    this.#pollfds[WAKE_FD_WORD] = device.wakeFd;
    setNonBlocking(this.#fd, true);
  }

  get writeErrors(): number {
    return this.#writeErrors;
  }

  /** Slots that are free: all of them, when the data path has given back what it had. */
  get slotsOwned(): number {
    return this.#pool.free;
  }

  receive(timeoutMs: number): number {
    const { rx } = this;
    rx.count = 0;
    const startMs = timeoutMs > 0 && timeoutMs !== Infinity ? performance.now() : 0;
    for (let leftMs = timeoutMs; ; leftMs = timeoutMs - (performance.now() - startMs)) {
      const pauseMs = this.#faults.pauseMs();
      if (pauseMs === 0) {
        this.#fill();
        this.#fillFromTunnel();
      }
      if (rx.count > 0 || leftMs <= 0) return rx.count;
      if (this.#wait(Math.min(leftMs, pauseMs > 0 ? pauseMs : Infinity), pauseMs === 0)) return 0;
    }
  }

  transmit(slot: number, offset: number, length: number): void {
    const result = write(this.#fd, this.#pool.addressOf(offset - this.#headerBytes), length + this.#headerBytes);
    if (result < 0) this.#writeErrors++;
    this.#pool.give(slot);
  }

  release(slot: number): void {
    this.#pool.give(slot);
  }

  take(): number {
    return this.#pool.take();
  }

  close(): void {
    if (this.#closed) return;
    this.#closed = true;
    munmap(this.#pollAddress, PAGE_BYTES);
    this.#datagrams?.close();
    this.#pool.close();
  }

  /** Reads until the device has no more, its share is full or slots run out. */
  #fill(): void {
    const { rx } = this;
    const limit = this.#datagrams ? BATCH_PACKETS / 2 : BATCH_PACKETS;
    while (rx.count < limit) {
      const slot = this.#pool.take();
      if (slot < 0) return;
      const offset = slot * this.memory.slotBytes + HEADROOM_BYTES;
      const result = read(this.#fd, this.#pool.addressOf(offset - this.#headerBytes), this.#readBytes);
      if (result <= this.#headerBytes) {
        this.#pool.give(slot);
        if (result >= 0) continue;
        if (result !== -EAGAIN && result !== -EINTR) this.#faults.record(result);
        return;
      }
      this.#pool.describe(slot, result - this.#headerBytes, this.#headerBytes > 0, rx, rx.count++);
      this.#faults.clear();
    }
  }

  /** The same from the tunnel's socket, until the batch is full. */
  #fillFromTunnel(): void {
    const { rx } = this;
    const datagrams = this.#datagrams;
    while (datagrams && rx.count < BATCH_PACKETS) {
      const slot = this.#pool.take();
      if (slot < 0) return;
      datagrams.prepare(slot);
      const result = datagrams.receive(this.#tunnelFd, slot, MSG_DONTWAIT);
      if (result < 0) {
        this.#pool.give(slot);
        if (result !== -EAGAIN && result !== -EINTR) this.#faults.record(result);
        return;
      }
      datagrams.describe(slot, result, false, rx, rx.count++);
      this.#faults.clear();
    }
  }

  /** @returns whether a wake-up came */
  #wait(timeoutMs: number, forPackets: boolean): boolean {
    const pollfds = this.#pollfds;
    pollfds[TUN_FD_WORD] = forPackets ? this.#fd : IGNORED_FD;
    pollfds[TUN_EVENTS_WORD] = POLLIN;
    pollfds[WAKE_EVENTS_WORD] = POLLIN;
    pollfds[TUNNEL_FD_WORD] = forPackets ? this.#tunnelFd : IGNORED_FD;
    pollfds[TUNNEL_EVENTS_WORD] = POLLIN;
    const wholeMs = timeoutMs === Infinity ? -1 : Math.min(Math.ceil(timeoutMs), LONGEST_POLL_MS);
    const result = poll(this.#pollAddress, POLLFD_COUNT, wholeMs);
    if (result < 0 && result !== -EINTR) {
      throw new WeirError('DEVICE_FAILED', `poll: ${errnoName(result)}`, 'see what the kernel log says');
    }
    if (result <= 0 || pollfds[WAKE_EVENTS_WORD]! >>> REVENTS_SHIFT === 0) return false;
    read(this.#wakeFd, this.#pollAddress + WAKE_RESULT_AT, 8);
    return true;
  }
}
