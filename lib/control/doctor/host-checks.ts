import { WeirError } from '../../base/errors.js';
import type { Config } from '../../config/config.js';
import { tableBytes } from '../../conntrack/memory.js';
import { imageBytes } from '../../conntrack/state-image.js';
import { Check, type Finding } from './finding.js';
import { type HostFacts, readSpace } from './host-facts.js';

/** Policy rules with protocol and port came with 4.17; what the TUN device and the sockets want is older. */
const OLDEST_KERNEL = [4, 17] as const;

const CAP_NET_ADMIN = 12n;
const CAP_NET_RAW = 13n;

/** Files of a weir besides probes: devices, rings, sockets, watches, and room for clients of the admin API. */
const OWN_FILES = 256;
/** Of health checks, at most as many as are under way at once. */
const MOST_PROBES = 1024;

/** Of the machine and the process, in the order in which a start would meet them. */
export function checkHost(config: Config, facts: HostFacts, isRunning: boolean): Finding[] {
  return [
    checkKernel(facts),
    checkTun(facts),
    ...checkCapabilities(config, facts),
    checkOffload(config, facts),
    checkRing(config, facts),
    checkOpenFiles(config, facts),
    checkMemory(config, facts),
    ...checkStateFile(config, isRunning),
  ];
}

function checkKernel({ release, kernel }: HostFacts): Finding {
  const check = new Check(
    'kernel',
    'weir needs Linux 4.17; from 5.11 on io_uring is used, from 6.2 on UDP leaves in super-packets',
  );
  if (isBefore(kernel, OLDEST_KERNEL)) return check.fail(release, 'apt-get install linux-image-amd64');
  return check.ok(release);
}

function isBefore([major, minor]: readonly [number, number], [least, then]: readonly [number, number]): boolean {
  return major < least || (major === least && minor < then);
}

function checkTun({ tun: { problem, isLoaded } }: HostFacts): Finding {
  const check = new Check('tun', 'packets come and go through a TUN device');
  if (problem === null) return check.ok('/dev/net/tun can be opened');
  if (problem === 'EACCES' || problem === 'EPERM') {
    return check.warn(`/dev/net/tun: ${problem} for this user`, 'chmod 666 /dev/net/tun');
  }
  const node = 'mkdir -p /dev/net && mknod -m 666 /dev/net/tun c 10 200';
  return check.fail(
    `/dev/net/tun: ${problem}${isLoaded ? ', though the kernel has the driver' : ''} (in a container: --device /dev/net/tun)`,
    isLoaded ? node : 'modprobe tun',
  );
}

function checkCapabilities(config: Config, { capabilities: { effective, bounding } }: HostFacts): Finding[] {
  const has = (set: bigint, capability: bigint): boolean => ((set >> capability) & 1n) === 1n;
  const judge = (check: Check, capability: bigint, name: string): Finding => {
    if (has(effective, capability)) return check.ok(`this process has ${name}`);
    if (!has(bounding, capability)) {
      return check.fail(`no process here can get ${name}`, `docker run --cap-add ${name.slice('CAP_'.length)} IMAGE`);
    }
    return check.warn(
      `this user has no ${name}; root has it, and a service gets it by AmbientCapabilities=`,
      'sudo weir doctor',
    );
  };
  const findings = [
    judge(new Check('net-admin', 'devices, routes and rules take CAP_NET_ADMIN'), CAP_NET_ADMIN, 'CAP_NET_ADMIN'),
  ];
  const { role, services } = config;
  const hearsErrors = role === 'gateway' && services.some(({ mode }) => mode === 'dsr');
  const pings = services.some(({ health }) => health?.type === 'icmp');
  if (hearsErrors || pings) {
    const why = hearsErrors
      ? 'without CAP_NET_RAW a gateway does not hear what routers say about its tunnels'
      : 'health checks of type icmp take CAP_NET_RAW';
    findings.push(judge(new Check('net-raw', why), CAP_NET_RAW, 'CAP_NET_RAW'));
  }
  return findings;
}

function checkOffload({ device }: Config, { tun: { probe } }: HostFacts): Finding {
  const check = new Check(
    'offload',
    'with offloads one rewrite covers a super-packet of some 45 segments: ten times the throughput',
  );
  if (!device.offload) return check.warn('switched off in the file', null);
  if (probe instanceof WeirError) return check.skip(`no device could be made to ask it (${probe.message})`);
  if (!probe.offloads.csum || !probe.offloads.tso4) return check.warn(probe.note, null);
  return check.ok(probe.note);
}

function checkRing({ device: { engine } }: Config, { ring, isFiltered, kernel }: HostFacts): Finding {
  const check = new Check('io-uring', 'through io_uring small packets cost a third less than through read and write');
  if (engine === 'readwrite') return check.ok('not asked for: device.engine is readwrite');
  if (ring.problem === null) return check.ok('a ring could be made');
  const isSwitchedOff = ring.disabled === 2 || (ring.disabled === 1 && process.getuid?.() !== 0);
  const mend = isSwitchedOff
    ? 'sysctl -w kernel.io_uring_disabled=0'
    : isBefore(kernel, [5, 11])
      ? 'apt-get install linux-image-amd64'
      : isFiltered
        ? 'docker run --security-opt seccomp=PROFILE.json IMAGE'
        : null;
  const found = isSwitchedOff ? `kernel.io_uring_disabled is ${ring.disabled}` : ring.problem;
  if (engine === 'auto') return check.warn(`${found}: weir falls back to readwrite by itself`, mend);
  return check.fail(
    `${found}, and device.engine asks for io_uring`,
    mend ?? 'sed -i "s/engine: io_uring/engine: auto/" FILE',
  );
}

function checkOpenFiles({ services }: Config, { openFiles }: HostFacts): Finding {
  const check = new Check('open-files', 'each probe of a backend and each client of the admin API is an open file');
  const checked = services.reduce((sum, { health, backends }) => sum + (health === null ? 0 : backends.length), 0);
  const needed = OWN_FILES + Math.min(MOST_PROBES, checked);
  if (openFiles >= needed) return check.ok(`${openFiles} may be open, ${needed} are enough`);
  return check.fail(
    `${openFiles} may be open; ${needed} are needed (of a service: LimitNOFILE=)`,
    `ulimit -n ${needed}`,
  );
}

function checkMemory({ conntrack }: Config, { memory: { availableBytes, cgroupBytes } }: HostFacts): Finding {
  const check = new Check(
    'memory',
    'a full connection table takes some 145 bytes a connection; an empty one takes nothing',
  );
  const needed = tableBytes(conntrack.tcpEntries) + tableBytes(conntrack.anyEntries);
  const size = `full tables take ${mebibytes(needed)}`;
  if (cgroupBytes !== null && cgroupBytes < needed) {
    return check.warn(
      `${size}, this control group has ${mebibytes(cgroupBytes)} left`,
      `systemctl set-property weir.service MemoryMax=${mebibytes(needed + 256 * MIB).replace(' MiB', 'M')}`,
    );
  }
  if (availableBytes === null) return check.skip(`${size}; /proc/meminfo cannot be read`);
  if (availableBytes < needed) return check.warn(`${size}, the machine has ${mebibytes(availableBytes)} left`, null);
  return check.ok(`${size} of ${mebibytes(availableBytes)} available`);
}

function checkStateFile({ conntrack: { stateFile, tcpEntries, anyEntries } }: Config, isRunning: boolean): Finding[] {
  if (stateFile === null) return [];
  const check = new Check('state-file', 'the space of the whole table is reserved at the start');
  if (isRunning) return [check.ok(`${stateFile}: in use`)];
  const needed = imageBytes({ tcpEntries, anyEntries });
  const { folder, freeBytes, existingBytes, problem } = readSpace(stateFile);
  if (problem !== null) return [check.fail(`${folder}: ${problem}`, `mkdir -p ${folder} && chmod 755 ${folder}`)];
  if (freeBytes + existingBytes < needed) {
    const found = `${mebibytes(needed)} are needed for ${stateFile}, ${folder} has ${mebibytes(freeBytes)} left`;
    return [
      check.fail(found, `mount -o remount,size=${Math.ceil((needed * 1.1 + 16 * MIB) / MIB)}M $(stat -c %m ${folder})`),
    ];
  }
  return [check.ok(`${stateFile}: ${mebibytes(needed)} of ${mebibytes(freeBytes + existingBytes)}`)];
}

const MIB = 1 << 20;

function mebibytes(bytes: number): string {
  return `${Math.ceil(bytes / MIB)} MiB`;
}
