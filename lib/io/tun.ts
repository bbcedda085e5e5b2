import { WeirError } from '../base/errors.js';
import { VNET_HEADER_BYTES } from '../wire/vnet.js';
import {
  close,
  EACCES,
  EBUSY,
  EINVAL,
  ENODEV,
  ENOENT,
  ENXIO,
  EPERM,
  errnoName,
  ioctl,
  ioctlValue,
  O_CLOEXEC,
  O_RDWR,
  open,
} from './syscalls.js';

const CLONE_DEVICE = '/dev/net/tun';

// linux/if_tun.h
const TUNSETIFF = 0x400454ca;
const TUNSETOFFLOAD = 0x400454d0;
const TUNSETVNETHDRSZ = 0x400454d8;
const IFF_TUN = 0x0001;
const IFF_NO_PI = 0x1000;
const IFF_VNET_HDR = 0x4000;
const TUN_F_CSUM = 0x01;
const TUN_F_TSO4 = 0x02;
const TUN_F_TSO6 = 0x04;
const TUN_F_TSO_ECN = 0x08;
const TUN_F_USO4 = 0x20;
const TUN_F_USO6 = 0x40;

/** IFNAMSIZ less the terminating zero. */
const MAX_NAME_BYTES = 15;

const IFREQ_BYTES = 40;
const IFREQ_FLAGS = 16;

/** Most wanted first; the kernel takes a set whole or not at all. USO came with Linux 6.2. */
const OFFLOAD_SETS: readonly number[] = [
  TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN | TUN_F_USO4 | TUN_F_USO6,
  TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_USO4 | TUN_F_USO6,
  TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN,
  TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6,
  TUN_F_CSUM,
  0,
];

const PERMISSION_REMEDY =
  'run as root, or give the process CAP_NET_ADMIN (setcap, AmbientCapabilities=, or --cap-add NET_ADMIN for a container)';

/** An open TUN device. The device exists as long as `fd` is open, in this process alone (children do not inherit it). */
export interface Tun {
  readonly fd: number;
  readonly name: string;
  /** Every packet read and written has the 10-byte virtio-net header before it. */
  readonly vnetHeader: boolean;
  /** What the kernel may hand over: partial checksums, and TCP and UDP super-packets. */
  readonly offloads: { readonly csum: boolean; readonly tso4: boolean; readonly tso6: boolean; readonly uso: boolean };
  /** The device takes one UDP GSO write for many datagrams. */
  readonly udpSegmentation: boolean;
  /** One line for the log: the offloads that were got. */
  readonly note: string;
}

/**
 * Creates the TUN device `name`, or attaches to a persistent one that nobody holds. It is down and has no address.
 *
 * @throws WeirError NO_TUN, NO_PERMISSION, DEVICE_TAKEN, CONFIG_INVALID (the name cannot be a device's), NOT_SUPPORTED
 */
export function openTun(name: string, { offload }: { readonly offload: boolean }): Tun {
  checkName(name);
  const fd = open(CLONE_DEVICE, O_RDWR | O_CLOEXEC);
  if (fd < 0) throw openError(fd);
  const request = Buffer.alloc(IFREQ_BYTES);
  request.write(name);
  request.writeUInt16LE(IFF_TUN | IFF_NO_PI | (offload ? IFF_VNET_HDR : 0), IFREQ_FLAGS);
  const result = ioctl(fd, TUNSETIFF, request);
  if (result < 0) {
    close(fd);
    throw attachError(name, result);
  }
  // A persistent device keeps what its last owner set.
  const accepted = offload ? setOffloads(fd) : 0;
  if (!offload) ioctlValue(fd, TUNSETOFFLOAD, 0);
  const offloads = {
    csum: (accepted & TUN_F_CSUM) !== 0,
    tso4: (accepted & TUN_F_TSO4) !== 0,
    tso6: (accepted & TUN_F_TSO6) !== 0,
    uso: (accepted & TUN_F_USO4) !== 0,
  };
  return { fd, name, vnetHeader: offload, offloads, udpSegmentation: offloads.uso, note: describe(offload, accepted) };
}

function setOffloads(fd: number): number {
  const headerBytes = Buffer.alloc(4);
  headerBytes.writeInt32LE(VNET_HEADER_BYTES);
  ioctl(fd, TUNSETVNETHDRSZ, headerBytes);
  return OFFLOAD_SETS.find((set) => ioctlValue(fd, TUNSETOFFLOAD, set) === 0) ?? 0;
}

function describe(offload: boolean, accepted: number): string {
  if (!offload) return 'no offload: it is switched off';
  if (accepted === 0) return 'no offload: the kernel refused every set';
  const names = [
    [TUN_F_CSUM, 'checksum'],
    [TUN_F_TSO4, 'TSO4'],
    [TUN_F_TSO6, 'TSO6'],
    [TUN_F_TSO_ECN, 'TSO with ECN'],
    [TUN_F_USO4, 'UDP segmentation'],
  ] as const;
  const got = names.filter(([bit]) => accepted & bit).map(([, text]) => text);
  const refused = names.filter(([bit]) => !(accepted & bit)).map(([, text]) => text);
  return `offload: ${got.join(', ')}${refused.length > 0 ? `; refused by the kernel: ${refused.join(', ')}` : ''}`;
}

/** The rules of dev_valid_name, and no % patterns: weir's rules and routes need to know the name. */
function checkName(name: string): void {
  if (Buffer.byteLength(name) > MAX_NAME_BYTES) {
    throw new WeirError(
      'CONFIG_INVALID',
      `the device name ${JSON.stringify(name)} is longer than ${MAX_NAME_BYTES} bytes`,
      'choose a shorter device.name',
    );
  }
  if (name === '' || name === '.' || name === '..' || /[/:%\s\0]/.test(name)) {
    throw new WeirError(
      'CONFIG_INVALID',
      `${JSON.stringify(name)} cannot be the name of a network device`,
      'choose a device.name without /, :, % and blanks',
    );
  }
}

function openError(result: number): WeirError {
  const reason = `${CLONE_DEVICE}: ${errnoName(result)}`;
  switch (-result) {
    case ENOENT:
    case ENODEV:
    case ENXIO:
      return new WeirError(
        'NO_TUN',
        reason,
        'load the tun module (modprobe tun); in a container, pass the device in (--device /dev/net/tun)',
      );
    case EPERM:
      return new WeirError('NO_PERMISSION', reason, 'in a container, pass the device in (--device /dev/net/tun)');
    case EACCES:
      return new WeirError(
        'NO_PERMISSION',
        reason,
        `run as root, or let every user open it (chmod 666 ${CLONE_DEVICE})`,
      );
    default:
      return new WeirError('NO_TUN', reason, 'see what the kernel log says');
  }
}

function attachError(name: string, result: number): WeirError {
  const reason = `device ${name}: ${errnoName(result)}`;
  switch (-result) {
    case EPERM:
    case EACCES:
      return new WeirError('NO_PERMISSION', reason, PERMISSION_REMEDY);
    case EBUSY:
      return new WeirError(
        'DEVICE_TAKEN',
        `${reason}: another program holds it`,
        `stop that one (a second weir needs another device.name), or choose another device.name`,
      );
    case EINVAL:
      return new WeirError(
        'DEVICE_TAKEN',
        `${reason}: an interface of this name exists and is not a single-queue TUN device`,
        `remove it (ip link del ${name}) or choose another device.name`,
      );
    default:
      return new WeirError('NOT_SUPPORTED', reason, 'see what the kernel log says');
  }
}
