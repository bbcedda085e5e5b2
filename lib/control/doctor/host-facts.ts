import { accessSync, closeSync, constants, openSync, readFileSync, statfsSync, statSync } from 'node:fs';
import { release } from 'node:os';
import { dirname } from 'node:path';
import { WeirError } from '../../base/errors.js';
import { Ring } from '../../io/ring.js';
import { openTun, type Tun } from '../../io/tun.js';

/** What is true of the kernel and of this process, before any interpretation. `null` is what cannot be seen from here. */
export interface HostFacts {
  /** `6.12.4`; as numbers, what comes behind the second is of no interest. */
  readonly release: string;
  readonly kernel: readonly [number, number];
  readonly capabilities: { readonly effective: bigint; readonly bounding: bigint };
  /** Some filter of system calls is on, as in a container. */
  readonly isFiltered: boolean;
  readonly tun: TunFacts;
  readonly ring: RingFacts;
  /** Open files at most; what Node.js can raise its limit to by itself. */
  readonly openFiles: number;
  readonly memory: { readonly availableBytes: number | null; readonly cgroupBytes: number | null };
  /** Whoever has CAP_NET_ADMIN may write below /proc/sys: it is not mounted read-only, as in most containers. */
  readonly canSetSysctls: boolean;
}

export interface TunFacts {
  /** The code of the error when /dev/net/tun is opened, `null`: it can be. */
  readonly problem: string | null;
  /** The driver is there, with or without its device node. */
  readonly isLoaded: boolean;
  /** What a device made for a moment was given; or why none could be made. */
  readonly probe: Pick<Tun, 'offloads' | 'note'> | WeirError;
}

export interface RingFacts {
  /** `kernel.io_uring_disabled`; null: this kernel has no such setting. */
  readonly disabled: number | null;
  /** Why there is no ring for weir; null: one was made. */
  readonly problem: string | null;
}

/** Devices this short-lived are told from each other by the process. */
function probeName(): string {
  return `weir-dr${process.pid}`;
}

/** Reads it all, and makes a TUN device and a ring for a moment where it may. Blocks for some milliseconds. */
export function readHostFacts(): HostFacts {
  const status = readText('/proc/self/status') ?? '';
  const [major, minor] = release().split('.').map(Number.parseFloat);
  return {
    release: release(),
    kernel: [major ?? 0, minor ?? 0],
    capabilities: { effective: capabilities(status, 'CapEff'), bounding: capabilities(status, 'CapBnd') },
    isFiltered: /^Seccomp:\s*2$/m.test(status),
    tun: readTun(),
    ring: readRing(),
    openFiles: readOpenFiles(),
    memory: { availableBytes: readAvailable(), cgroupBytes: readCgroup() },
    canSetSysctls: !isReadOnly('/proc/sys/net/ipv4/ip_forward'),
  };
}

export function readText(path: string): string | null {
  try {
    return readFileSync(path, 'utf8');
  } catch {
    return null;
  }
}

export interface Space {
  /** The nearest that exists. */
  readonly folder: string;
  readonly freeBytes: number;
  /** Of the file, if it is there. */
  readonly existingBytes: number;
  /** Why this process may not make files there. */
  readonly problem: string | null;
}

/** The room for a file that may not exist yet, nor its folder. */
export function readSpace(path: string): Space {
  let folder = dirname(path);
  while (statSync(folder, { throwIfNoEntry: false }) === undefined && folder !== '/') folder = dirname(folder);
  const { bavail, bsize } = statfsSync(folder);
  const existing = statSync(path, { throwIfNoEntry: false });
  const room = { folder, freeBytes: bavail * bsize, existingBytes: (existing?.blocks ?? 0) * 512 };
  try {
    accessSync(folder, constants.W_OK | constants.X_OK);
    return { ...room, problem: null };
  } catch (error) {
    return { ...room, problem: (error as NodeJS.ErrnoException).code ?? String(error) };
  }
}

function capabilities(status: string, name: string): bigint {
  return BigInt(`0x${new RegExp(`^${name}:\\s*([0-9a-f]+)$`, 'm').exec(status)?.[1] ?? '0'}`);
}

function readTun(): TunFacts {
  const isLoaded = /^\s*200 tun$/m.test(readText('/proc/misc') ?? '');
  try {
    closeSync(openSync('/dev/net/tun', 'r+'));
  } catch (error) {
    const problem = (error as NodeJS.ErrnoException).code ?? String(error);
    return { problem, isLoaded, probe: new WeirError('NO_TUN', `/dev/net/tun: ${problem}`) };
  }
  try {
    const { fd, offloads, note } = openTun(probeName(), { offload: true });
    closeSync(fd);
    return { problem: null, isLoaded: true, probe: { offloads, note } };
  } catch (error) {
    if (!(error instanceof WeirError)) throw error;
    return { problem: null, isLoaded: true, probe: error };
  }
}

function readRing(): RingFacts {
  const setting = readText('/proc/sys/kernel/io_uring_disabled');
  const disabled = setting === null ? null : Number(setting);
  try {
    new Ring().close();
    return { disabled, problem: null };
  } catch (error) {
    return { disabled, problem: (error as Error).message };
  }
}

function readOpenFiles(): number {
  const hard = /^Max open files\s+\S+\s+(\S+)/m.exec(readText('/proc/self/limits') ?? '')?.[1];
  return hard === undefined || hard === 'unlimited' ? Number.POSITIVE_INFINITY : Number(hard);
}

function readAvailable(): number | null {
  const kibibytes = /^MemAvailable:\s+(\d+) kB$/m.exec(readText('/proc/meminfo') ?? '')?.[1];
  return kibibytes === undefined ? null : Number(kibibytes) * 1024;
}

/** What the narrowest of the groups above this process has left. */
function readCgroup(): number | null {
  const path = /^0::(.*)$/m.exec(readText('/proc/self/cgroup') ?? '')?.[1];
  if (path === undefined) return null;
  let least: number | null = null;
  for (let at = path; ; at = dirname(at)) {
    const most = readText(`/sys/fs/cgroup${at}/memory.max`)?.trim();
    if (most !== undefined && most !== 'max') {
      const left = Number(most) - Number(readText(`/sys/fs/cgroup${at}/memory.current`) ?? 0);
      if (least === null || left < least) least = left;
    }
    if (at === '/' || at === '.') return least;
  }
}

function isReadOnly(path: string): boolean {
  try {
    accessSync(path, constants.W_OK);
    return false;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === 'EROFS';
  }
}
