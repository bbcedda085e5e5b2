import { WeirError } from '../base/errors.js';
import {
  close,
  EAGAIN,
  EINVAL,
  errnoName,
  ioUringEnter,
  ioUringRegister,
  ioUringSetup,
  MAP_POPULATE,
  MAP_PRIVATE_ANONYMOUS,
  MAP_SHARED,
  mmap,
  munmap,
  storeAddress,
  viewMemory,
} from './syscalls.js';

// linux/io_uring.h
const OFFSET_RINGS = 0;
const OFFSET_ENTRIES = 0x10000000;
const SETUP_SUBMIT_ALL = 1 << 7; // 5.18: a refused entry does not end the submission
const SETUP_COOP_TASKRUN = 1 << 8; // 5.19
const SETUP_SINGLE_ISSUER = 1 << 12; // 6.0
const SETUP_DEFER_TASKRUN = 1 << 13; // 6.1
const FEAT_SINGLE_MMAP = 1 << 0;
const FEAT_NODROP = 1 << 1;
const FEAT_EXT_ARG = 1 << 8; // 5.11
const FEAT_CQE_SKIP = 1 << 11; // 5.17
const ENTER_GETEVENTS = 1 << 0;
const ENTER_EXT_ARG = 1 << 3;
const REGISTER_PROBE = 8;
const REGISTER_PBUF_RING = 22;

// struct io_uring_params
const PARAMS_BYTES = 120;
const PARAMS_FLAGS = 8;
const PARAMS_FEATURES = 20;
const PARAMS_SQ_OFFSETS = 40;
const PARAMS_CQ_OFFSETS = 80;
const SQ_TAIL = 4;
const SQ_ARRAY = 24;
const CQ_HEAD = 0;
const CQ_TAIL = 4;
const CQ_CQES = 20;

const REQUIRED_FEATURES = FEAT_SINGLE_MMAP | FEAT_NODROP | FEAT_EXT_ARG;

/** Best first. */
const SETUPS: readonly number[] = [
  SETUP_SUBMIT_ALL | SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN,
  SETUP_SUBMIT_ALL | SETUP_COOP_TASKRUN,
  SETUP_SUBMIT_ALL,
  0,
];

const SUBMISSION_ENTRIES = 256;
/** The kernel's default. */
const COMPLETION_ENTRIES = 2 * SUBMISSION_ENTRIES;
const BUFFER_ENTRIES = 128;

/** Attempts to submit entries the kernel has no memory for at the moment. */
const SUBMIT_TRIES = 100;

// The scratch page: struct io_uring_getevents_arg { sigmask u64, sigmask_sz u32, min_wait_usec u32, timespec * }, then the
// timespec { seconds i64, nanoseconds i64 }, then room for small results.
const PAGE_BYTES = 4096;
const ARGUMENT_BYTES = 24;
const ARGUMENT_TIMESPEC_WORD = 4;
const TIMESPEC_AT = 32;
const RESULT_AT = 64;

/**
 * An io_uring as weir needs it: one thread that submits and reaps, through two rings of memory shared with the kernel.
 *
 * Theory of operation. `queue` fills the next submission entry with plain stores; `enter` publishes the new tail with a
 * releasing store, makes one system call that submits everything queued and waits, and `next` walks the completions: an
 * acquiring load of the tail first, plain loads after it, a releasing store of the head when it has seen them all. Atomics on
 * these arrays compile to the machine's ordered instructions, whether the memory is a SharedArrayBuffer or not.
 *
 * - **Task work.** With DEFER_TASKRUN (Linux 6.1) a completion that comes later is only processed inside `enter` with
 *   GETEVENTS, on this thread, after the submissions. Without it, it may happen at any system call. `deferred` tells which.
 * - **Order.** The kernel issues entries in the order they were queued and posts completions in the order requests end.
 * - **Overflow.** The user must not have more completions outstanding than `COMPLETION_ENTRIES`. If it happened, the kernel
 *   (NODROP, 5.5) would keep them back and post them in the next `enter`, which always passes GETEVENTS.
 * - **Partial submission.** When the kernel runs short of memory it takes fewer entries than there are; `enter` tries again
 *   until all are taken, so that afterwards every request queued before has at least been issued.
 *
 * Layouts and numbers: linux/io_uring.h, the same on every 64-bit architecture.
 */
export class Ring {
  /** Task work runs in `enter` only. */
  readonly deferred: boolean;
  /** Requests may be marked SKIP_SUCCESS (Linux 5.17). */
  readonly canSkipSuccess: boolean;

  /** The completion that `next` went to. */
  tag = 0;
  result = 0;
  flags = 0;

  readonly #fd: number;
  readonly #rings: Mapping;
  readonly #entries: Mapping;
  readonly #scratch: Mapping;
  readonly #sqTailWord: number;
  readonly #cqHeadWord: number;
  readonly #cqTailWord: number;
  readonly #cqes: number;

  #sqTail: number;
  #queued = 0;
  #cqHead: number;
  #cqSeen: number;

  /** @throws WeirError ENGINE_UNAVAILABLE: the kernel has no io_uring, too old a one, or forbids it. */
  constructor() {
    const { fd, params, setup } = setUp();
    this.#fd = fd;
    const features = params.readUInt32LE(PARAMS_FEATURES);
    if ((features & REQUIRED_FEATURES) !== REQUIRED_FEATURES) {
      close(fd);
      throw unavailable('the kernel is older than 5.11');
    }
    this.deferred = (setup & SETUP_DEFER_TASKRUN) !== 0;
    this.canSkipSuccess = (features & FEAT_CQE_SKIP) !== 0;

    const sqOffset = (field: number) => params.readUInt32LE(PARAMS_SQ_OFFSETS + field);
    const cqOffset = (field: number) => params.readUInt32LE(PARAMS_CQ_OFFSETS + field);
    const ringBytes = Math.max(
      sqOffset(SQ_ARRAY) + SUBMISSION_ENTRIES * 4,
      cqOffset(CQ_CQES) + COMPLETION_ENTRIES * 16,
    );
    this.#rings = map(ringBytes, MAP_SHARED | MAP_POPULATE, fd, OFFSET_RINGS);
    this.#entries = map(SUBMISSION_ENTRIES * 64, MAP_SHARED | MAP_POPULATE, fd, OFFSET_ENTRIES);
    this.#scratch = map(PAGE_BYTES, MAP_PRIVATE_ANONYMOUS, -1, 0);
    this.#sqTailWord = sqOffset(SQ_TAIL) >> 2;
    this.#cqHeadWord = cqOffset(CQ_HEAD) >> 2;
    this.#cqTailWord = cqOffset(CQ_TAIL) >> 2;
    this.#cqes = cqOffset(CQ_CQES) >> 2;
    this.#sqTail = this.#rings.words[this.#sqTailWord]!;
    this.#cqHead = this.#rings.words[this.#cqHeadWord]!;
    this.#cqSeen = this.#cqHead;
    // The indirection array of the submission ring is of no use here: entry i is always at place i.
    const array = sqOffset(SQ_ARRAY) >> 2;
    for (let i = 0; i < SUBMISSION_ENTRIES; i++) this.#rings.words[array + i] = i;

    storeAddress(this.#scratch.words, ARGUMENT_TIMESPEC_WORD, this.#scratch.address + TIMESPEC_AT);
  }

  /** Where the kernel can write a small result nobody looks at: an eventfd's 8 bytes. */
  get resultAddress(): number {
    return this.#scratch.address + RESULT_AT;
  }

  /**
   * Queues one request. The fields are those of struct io_uring_sqe; `tag` comes back with the completion. There must be room.
   *
   * @param entryFlags IOSQE_*
   * @param operationFlags RWF_* for reads and writes, otherwise what the operation defines
   * @param priority the field of this name, which holds flags of receiving operations
   * @param bufferGroup whose buffers the kernel picks from
   */
  queue(
    opcode: number,
    fd: number,
    address: number,
    lengthBytes: number,
    tag: number,
    entryFlags: number,
    operationFlags: number,
    priority = 0,
    bufferGroup = 0,
  ): void {
    const words = this.#entries.words;
    const at = (this.#sqTail & (SUBMISSION_ENTRIES - 1)) << 4;
    words[at] = opcode | (entryFlags << 8) | (priority << 16);
    words[at + 1] = fd;
    words[at + 2] = 0;
    words[at + 3] = 0;
    storeAddress(words, at + 4, address);
    words[at + 6] = lengthBytes;
    words[at + 7] = operationFlags;
    words[at + 8] = tag;
    words[at + 9] = 0;
    words[at + 10] = bufferGroup;
    words[at + 11] = 0;
    this.#sqTail = (this.#sqTail + 1) | 0;
    this.#queued++;
  }

  /**
   * Submits what is queued and waits until `minComplete` completions are there, a signal comes or time is up.
   *
   * @param timeoutMs Infinity: no limit. Only looked at when `minComplete` is not 0.
   * @returns 0, or `-errno`: -ETIME, -EINTR, or what the kernel refuses for good. After a wait that submitted something a
   * time-out is not reported: the caller looks at its clock.
   */
  enter(minComplete: number, timeoutMs: number): number {
    Atomics.store(this.#rings.words, this.#sqTailWord, this.#sqTail);
    const timed = minComplete > 0 && timeoutMs !== Infinity;
    if (timed) this.#storeTimeout(timeoutMs);
    const flags = timed ? ENTER_GETEVENTS | ENTER_EXT_ARG : ENTER_GETEVENTS;
    const argument = timed ? this.#scratch.address : 0;
    const argumentBytes = timed ? ARGUMENT_BYTES : 0;
    for (let tries = 1; ; tries++) {
      const result = ioUringEnter(this.#fd, this.#queued, minComplete, flags, argument, argumentBytes);
      if (result > 0) this.#queued -= result;
      if (this.#queued === 0) return Math.min(result, 0);
      if (tries === SUBMIT_TRIES) return result < 0 ? result : -EAGAIN;
    }
  }

  /** Goes to the next completion and fills `tag`, `result` and `flags`. @returns false when there is none */
  next(): boolean {
    const words = this.#rings.words;
    if (this.#cqHead === this.#cqSeen) {
      Atomics.store(words, this.#cqHeadWord, this.#cqHead);
      this.#cqSeen = Atomics.load(words, this.#cqTailWord);
      if (this.#cqHead === this.#cqSeen) return false;
    }
    const at = this.#cqes + ((this.#cqHead & (COMPLETION_ENTRIES - 1)) << 2);
    this.tag = words[at]!;
    this.result = words[at + 2]!;
    this.flags = words[at + 3]!;
    this.#cqHead = (this.#cqHead + 1) | 0;
    return true;
  }

  /** A relative timespec, in 32-bit words: no BigInt is allocated. Never shorter than asked for. */
  #storeTimeout(timeoutMs: number): void {
    const words = this.#scratch.words;
    const seconds = Math.min(Math.floor(timeoutMs / 1000), 0x7fffffff);
    words[TIMESPEC_AT >> 2] = seconds;
    words[(TIMESPEC_AT >> 2) + 2] = Math.min(Math.ceil((timeoutMs - seconds * 1000) * 1e6), 999_999_999);
  }

  /** Whether the kernel knows an operation. */
  supports(opcode: number): boolean {
    const probe = Buffer.alloc(16);
    return ioUringRegister(this.#fd, REGISTER_PROBE, probe, 0) >= 0 && probe[0]! >= opcode;
  }

  /** Registers a ring of buffers the kernel picks from. @returns undefined when the kernel cannot */
  createBuffers(group: number): BufferRing | undefined {
    const mapping = map(BUFFER_ENTRIES * 16, MAP_PRIVATE_ANONYMOUS, -1, 0);
    const registration = Buffer.alloc(40);
    registration.writeBigUInt64LE(BigInt(mapping.address), 0);
    registration.writeUInt32LE(BUFFER_ENTRIES, 8);
    registration.writeUInt16LE(group, 12);
    if (ioUringRegister(this.#fd, REGISTER_PBUF_RING, registration, 1) >= 0) return new BufferRing(mapping);
    munmap(mapping.address, mapping.lengthBytes);
    return undefined;
  }

  /** No request may be in flight. */
  close(): void {
    close(this.#fd);
    for (const { address, lengthBytes } of [this.#rings, this.#entries, this.#scratch]) munmap(address, lengthBytes);
  }
}

/**
 * Buffers provided to the kernel (IORING_REGISTER_PBUF_RING, Linux 5.19): it takes them in the order they were added, one for
 * each completion, which names it in the upper half of its flags.
 *
 *     entry, 16 bytes: address u64 | length u32 | buffer id u16 | reserved u16, which in entry 0 is the ring's tail
 */
export class BufferRing {
  readonly #mapping: Mapping;
  readonly #halves: Uint16Array;
  #tail = 0;

  constructor(mapping: Mapping) {
    this.#mapping = mapping;
    this.#halves = new Uint16Array(mapping.buffer);
  }

  /** At most BUFFER_ENTRIES buffers may be with the kernel. Visible to it after `publish`. */
  add(id: number, address: number, lengthBytes: number): void {
    const entry = this.#tail & (BUFFER_ENTRIES - 1);
    const words = this.#mapping.words;
    storeAddress(words, entry << 2, address);
    words[(entry << 2) + 2] = lengthBytes;
    this.#halves[(entry << 3) + 6] = id;
    this.#tail = (this.#tail + 1) & 0xffff;
  }

  publish(): void {
    Atomics.store(this.#halves, 7, this.#tail);
  }

  /** After the ring it was registered with. */
  close(): void {
    munmap(this.#mapping.address, this.#mapping.lengthBytes);
  }
}

interface Mapping {
  readonly address: number;
  readonly lengthBytes: number;
  readonly buffer: ArrayBuffer;
  readonly words: Int32Array;
}

function map(lengthBytes: number, flags: number, fd: number, offset: number): Mapping {
  const address = mmap(lengthBytes, flags, fd, offset);
  if (address < 0) throw unavailable(`its rings cannot be mapped (${errnoName(address)})`);
  const buffer = viewMemory(address, lengthBytes);
  return { address, lengthBytes, buffer, words: new Int32Array(buffer) };
}

/** Asks for the set-up that suits a single thread best, and for less where the kernel is older. */
function setUp(): { fd: number; params: Buffer; setup: number } {
  for (const setup of SETUPS) {
    const params = Buffer.alloc(PARAMS_BYTES);
    params.writeUInt32LE(setup, PARAMS_FLAGS);
    const fd = ioUringSetup(SUBMISSION_ENTRIES, params);
    if (fd >= 0) return { fd, params, setup };
    if (fd !== -EINVAL) throw unavailable(`io_uring_setup: ${errnoName(fd)}`);
  }
  throw unavailable(`io_uring_setup: ${errnoName(-EINVAL)}`);
}

function unavailable(reason: string): WeirError {
  return new WeirError(
    'ENGINE_UNAVAILABLE',
    `io_uring cannot be used: ${reason}`,
    'set device.engine to readwrite, or allow io_uring (kernel 5.11 or later, sysctl kernel.io_uring_disabled, seccomp profile)',
  );
}
