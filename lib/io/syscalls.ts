import type Koffi from 'koffi';
import { WeirError } from '../base/errors.js';

/**
 * The system calls weir makes itself, through koffi: the one file that knows of it. Every wrapper returns what the call
 * returned, or `-errno`, and throws nothing, so that the callers' loops read like C. Addresses are plain numbers: user
 * space ends below 2^47 (2^48 on arm64), far inside what a double holds exactly.
 *
 * `null` loads the symbols of the process itself, which are those of glibc or musl, whichever Node runs on.
 */
const koffi = await loadKoffi();
const libc = koffi.load(null);

const cOpen = libc.func('open', 'int', ['str', 'int']);
const cClose = libc.func('close', 'int', ['int']);
const cIoctl = libc.func('ioctl', 'int', ['int', 'ulong', 'void *']);
const cIoctlValue = libc.func('ioctl', 'int', ['int', 'ulong', 'ulong']);
const cFcntl = libc.func('fcntl', 'int', ['int', 'int', 'long']);
const cMmap = libc.func('mmap', 'int64', ['size_t', 'size_t', 'int', 'int', 'int', 'int64']);
const cMunmap = libc.func('munmap', 'int', ['size_t', 'size_t']);
const cMadvise = libc.func('madvise', 'int', ['size_t', 'size_t', 'int']);
const cFlock = libc.func('flock', 'int', ['int', 'int']);
const cFallocate = libc.func('fallocate', 'int', ['int', 'int', 'int64', 'int64']);
const cRead = libc.func('read', 'int64', ['int', 'size_t', 'size_t']);
const cWrite = libc.func('write', 'int64', ['int', 'size_t', 'size_t']);
const cWriteBuffer = libc.func('write', 'int64', ['int', 'void *', 'size_t']);
const cPoll = libc.func('poll', 'int', ['size_t', 'ulong', 'int']);
const cEventfd = libc.func('eventfd', 'int', ['uint', 'int']);
const cSocket = libc.func('socket', 'int', ['int', 'int', 'int']);
const cBind = libc.func('bind', 'int', ['int', 'void *', 'uint']);
const cSetsockopt = libc.func('setsockopt', 'int', ['int', 'int', 'int', 'void *', 'uint']);
const cSendto = libc.func('sendto', 'int64', ['int', 'void *', 'size_t', 'int', 'void *', 'uint']);
const cRecvmsg = libc.func('recvmsg', 'int64', ['int', 'size_t', 'int']);
const cPipe = libc.func('pipe2', 'int', ['void *', 'int']);
const cActionsInit = libc.func('posix_spawn_file_actions_init', 'int', ['void *']);
const cActionsDup2 = libc.func('posix_spawn_file_actions_adddup2', 'int', ['void *', 'int', 'int']);
const cActionsDestroy = libc.func('posix_spawn_file_actions_destroy', 'int', ['void *']);
const cAttributesInit = libc.func('posix_spawnattr_init', 'int', ['void *']);
const cAttributesSetFlags = libc.func('posix_spawnattr_setflags', 'int', ['void *', 'short']);
const strings = koffi.pointer('str');
const cSpawn = libc.func('posix_spawnp', 'int', ['void *', 'str', 'void *', 'void *', strings, strings]);
const cWaitpid = libc.func('waitpid', 'int', ['int', 'void *', 'int']);
const cClockGettime = libc.func('clock_gettime', 'int', ['int', 'size_t']);
const cSetup = libc.func('syscall', 'long', ['long', 'uint', 'void *']);
const cEnter = libc.func('syscall', 'long', ['long', 'int', 'uint', 'uint', 'uint', 'size_t', 'size_t']);
const cRegister = libc.func('syscall', 'long', ['long', 'int', 'uint', 'void *', 'uint']);

// The same on every architecture Node has: numbers above 423 are shared.
const IO_URING_SETUP = 425;
const IO_URING_ENTER = 426;
const IO_URING_REGISTER = 427;

export const O_RDWR = 2;
export const O_NONBLOCK = 0x800;
export const O_CLOEXEC = 0x80000;
export const EFD_CLOEXEC = 0x80000;
export const PROT_READ_WRITE = 3;
export const MAP_SHARED = 1;
export const MAP_PRIVATE_ANONYMOUS = 0x22;
export const MAP_POPULATE = 0x8000;
export const CLOCK_BOOTTIME = 7;
export const POLLIN = 1;
export const AF_UNIX = 1;
export const AF_INET = 2;
export const AF_PACKET = 17;
export const SOCK_DGRAM = 2;
export const SOCK_RAW = 3;
export const SOCK_CLOEXEC = 0x80000;
export const MSG_DONTWAIT = 0x40;
export const MSG_NOSIGNAL = 0x4000;

const LOCK_EX = 2;
const LOCK_NB = 4;
const LOCK_UN = 8;
const F_GETFL = 3;
const F_SETFL = 4;
const MADV_DONTNEED = 4;
const POSIX_SPAWN_SETSID = 0x80;
/** More than posix_spawn_file_actions_t and posix_spawnattr_t take with glibc or musl: 80 and 336 bytes. */
const SPAWN_STRUCT_BYTES = 1024;

export const {
  EPERM,
  EINTR,
  ENXIO,
  EBADF,
  EAGAIN,
  EACCES,
  EBUSY,
  ENOENT,
  ENODEV,
  EINVAL,
  ENOSPC,
  EBADFD,
  ENOBUFS,
  ETIME,
  EADDRINUSE,
  EADDRNOTAVAIL,
} = koffi.os.errno as Record<Errno, number>;

type Errno =
  | 'EPERM'
  | 'EINTR'
  | 'ENXIO'
  | 'EBADF'
  | 'EAGAIN'
  | 'EACCES'
  | 'EBUSY'
  | 'ENOENT'
  | 'ENODEV'
  | 'EINVAL'
  | 'ENOSPC'
  | 'EBADFD'
  | 'ENOBUFS'
  | 'ETIME'
  | 'EADDRINUSE'
  | 'EADDRNOTAVAIL';

/** Its binary is an optional package, one for each platform. */
async function loadKoffi(): Promise<typeof Koffi> {
  try {
    return (await import('koffi')).default;
  } catch (error) {
    throw new WeirError(
      'MISSING_TOOL',
      `koffi, which system calls are made through, does not load: ${(error as Error).message}`,
      `Install weir's dependencies with the optional ones among them: one is koffi's binary for ${process.platform} on ${process.arch}.`,
      error,
    );
  }
}

/** The name of an error as the wrappers return it, negative: -11 is `EAGAIN`. */
export function errnoName(result: number): string {
  for (const name in koffi.os.errno) if (koffi.os.errno[name] === -result) return name;
  return `errno ${-result}`;
}

function checked(result: number): number {
  return result === -1 ? -koffi.errno() : result;
}

export function open(path: string, flags: number): number {
  return checked(cOpen(path, flags));
}

export function close(fd: number): number {
  return checked(cClose(fd));
}

/** An ioctl whose argument is a struct, read or written in place. */
export function ioctl(fd: number, request: number, argument: Uint8Array): number {
  return checked(cIoctl(fd, request, argument));
}

/** An ioctl whose argument is a plain number. */
export function ioctlValue(fd: number, request: number, argument: number): number {
  return checked(cIoctlValue(fd, request, argument));
}

/** Sets or clears O_NONBLOCK, which belongs to the open file: every holder of the fd sees it. */
export function setNonBlocking(fd: number, nonBlocking: boolean): number {
  const flags = checked(cFcntl(fd, F_GETFL, 0));
  if (flags < 0) return flags;
  return checked(cFcntl(fd, F_SETFL, nonBlocking ? flags | O_NONBLOCK : flags & ~O_NONBLOCK));
}

/** Maps readable and writable memory. @returns its address */
export function mmap(lengthBytes: number, flags: number, fd = -1, offset = 0): number {
  return checked(cMmap(0, lengthBytes, PROT_READ_WRITE, flags, fd, offset));
}

/** No view of the memory may be touched afterwards. */
export function munmap(address: number, lengthBytes: number): number {
  return checked(cMunmap(address, lengthBytes));
}

/** Gives the pages of anonymous memory back to the kernel; the addresses stay valid and read as zero. */
export function discardPages(address: number, lengthBytes: number): number {
  return checked(cMadvise(address, lengthBytes, MADV_DONTNEED));
}

/**
 * The memory at `address` as an ArrayBuffer. It is not copied, not owned and cannot be detached: whoever unmaps the memory
 * sees to it that nobody holds a view.
 */
export function viewMemory(address: number, lengthBytes: number): ArrayBuffer {
  return koffi.view(address, lengthBytes);
}

/** Locks an open file for this process alone, without waiting (EAGAIN); the lock ends with the last fd of the open file. */
export function lockFile(fd: number): number {
  return checked(cFlock(fd, LOCK_EX | LOCK_NB));
}

export function unlockFile(fd: number): number {
  return checked(cFlock(fd, LOCK_UN));
}

/** Makes a file at least `lengthBytes` long, its space taken from the file system now, what is new being zero. */
export function reserveSpace(fd: number, lengthBytes: number): number {
  return checked(cFallocate(fd, 0, 0, lengthBytes));
}

/** Stores an address as a pointer: two words, little endian. */
export function storeAddress(words: Int32Array, word: number, address: number): void {
  words[word] = address | 0;
  words[word + 1] = (address / 0x100000000) | 0;
}

export function read(fd: number, address: number, lengthBytes: number): number {
  return checked(cRead(fd, address, lengthBytes));
}

export function write(fd: number, address: number, lengthBytes: number): number {
  return checked(cWrite(fd, address, lengthBytes));
}

/** The same from ordinary JavaScript memory. */
export function writeBuffer(fd: number, bytes: Uint8Array): number {
  return checked(cWriteBuffer(fd, bytes, bytes.length));
}

/** `address` is that of `count` pollfd structs: fd i32, events i16, revents i16. @param timeoutMs -1: no limit */
export function poll(address: number, count: number, timeoutMs: number): number {
  return checked(cPoll(address, count, timeoutMs));
}

export function eventfd(initial: number, flags: number): number {
  return checked(cEventfd(initial, flags));
}

/** @returns the socket's fd */
export function socket(domain: number, type: number, protocol: number): number {
  return checked(cSocket(domain, type, protocol));
}

/** @param address a struct sockaddr of the socket's domain */
export function bind(fd: number, address: Uint8Array): number {
  return checked(cBind(fd, address, address.length));
}

export function setSocketOption(fd: number, level: number, option: number, value: number): number {
  return checked(cSetsockopt(fd, level, option, new Int32Array([value]), 4));
}

/** @param address a struct sockaddr of the socket's domain. @returns the bytes sent */
export function sendTo(fd: number, bytes: Uint8Array, flags: number, address: Uint8Array): number {
  return checked(cSendto(fd, bytes, bytes.length, flags, address, address.length));
}

/** @param message address of a struct msghdr. @returns the bytes of the datagram */
export function recvmsg(fd: number, message: number, flags: number): number {
  return checked(cRecvmsg(fd, message, flags));
}

/** @returns the two ends, to read from and to write to, not inherited by programs; or an error */
export function pipe(): { readonly reader: number; readonly writer: number } | number {
  const ends = new Int32Array(2);
  const result = checked(cPipe(ends, O_CLOEXEC));
  return result < 0 ? result : { reader: ends[0]!, writer: ends[1]! };
}

/**
 * Starts a program, found by PATH, in a session of its own: posix_spawn(3). While it begins this thread waits, and no other.
 *
 * @param args begin with the name of the program @param environment `NAME=value` each
 * @param stdio what becomes its fds 0, 1 and 2
 * @returns its pid
 */
export function spawn(
  file: string,
  args: readonly string[],
  environment: readonly string[],
  stdio: readonly number[],
): number {
  const actions = new Uint8Array(SPAWN_STRUCT_BYTES);
  const attributes = new Uint8Array(SPAWN_STRUCT_BYTES);
  const pid = new Int32Array(1);
  cActionsInit(actions);
  for (const [as, fd] of stdio.entries()) cActionsDup2(actions, fd, as);
  cAttributesInit(attributes);
  cAttributesSetFlags(attributes, POSIX_SPAWN_SETSID);
  // Of all calls here the only one that returns its error.
  const error = cSpawn(pid, file, actions, attributes, [...args, null], [...environment, null]);
  cActionsDestroy(actions);
  return error === 0 ? pid[0]! : -error;
}

/** Waits, in another thread, for the end of a program that was started by `spawn`. @returns its wait status; -1: nobody knows */
export function waitForEnd(pid: number): Promise<number> {
  const status = new Int32Array(1);
  return new Promise((resolve) => {
    cWaitpid.async(pid, status, 0, (error: Error | null, ended: number) =>
      resolve(error === null && ended === pid ? status[0]! : -1),
    );
  });
}

/** Stores a timespec (two i64: seconds, nanoseconds) at `address`. */
export function clockGettime(clock: number, address: number): number {
  return checked(cClockGettime(clock, address));
}

/** @param params struct io_uring_params, 120 bytes, filled in by the kernel. @returns the ring's fd */
export function ioUringSetup(entries: number, params: Uint8Array): number {
  return checked(cSetup(IO_URING_SETUP, entries, params));
}

/** @returns how many entries were submitted, or an error when none was */
export function ioUringEnter(
  ringFd: number,
  submit: number,
  minComplete: number,
  flags: number,
  argument: number,
  argumentBytes: number,
): number {
  return checked(cEnter(IO_URING_ENTER, ringFd, submit, minComplete, flags, argument, argumentBytes));
}

export function ioUringRegister(ringFd: number, opcode: number, argument: Uint8Array, count: number): number {
  return checked(cRegister(IO_URING_REGISTER, ringFd, opcode, argument, count));
}
