import { WeirError } from '../base/errors.js';
import { formatEndpoint } from '../wire/address.js';
import {
  AF_INET,
  bind,
  close,
  EACCES,
  EADDRINUSE,
  EADDRNOTAVAIL,
  errnoName,
  SOCK_CLOEXEC,
  SOCK_DGRAM,
  setSocketOption,
  socket,
} from './syscalls.js';

const SOL_SOCKET = 1;
const SO_RCVBUF = 8;
const SO_RCVBUFFORCE = 33;
const IPPROTO_IP = 0;
const IP_RECVTOS = 13;
const IPPROTO_UDP = 17;
const UDP_GRO = 104; // 5.0

const SOCKADDR_BYTES = 16;

/** Some 100 joined datagrams of 64 KiB: what comes while the data path is busy with a batch. */
const RECEIVE_BUFFER_BYTES = 8 << 20;

/** The UDP socket that tunnels end at. Nothing is ever sent through it. */
export interface TunnelSocket {
  readonly fd: number;
  /** Datagrams of one sender may arrive joined. */
  readonly joins: boolean;
}

/**
 * Opens the socket for datagrams to `address`, one of this host's, and `port`.
 *
 * @throws WeirError ADDRESS_IN_USE, NOT_THIS_HOST, NO_PERMISSION (ports below 1024), DEVICE_FAILED
 */
export function openTunnelSocket(address: number, port: number): TunnelSocket {
  const fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) throw new WeirError('DEVICE_FAILED', `socket: ${errnoName(fd)}`, 'raise the limit of open files');
  const name = Buffer.alloc(SOCKADDR_BYTES);
  name.writeUInt16LE(AF_INET, 0);
  name.writeUInt16BE(port, 2);
  name.writeInt32BE(address | 0, 4);
  const result = bind(fd, name);
  if (result < 0) {
    close(fd);
    throw bindError(formatEndpoint(address, port), result);
  }
  if (setSocketOption(fd, SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES) < 0) {
    setSocketOption(fd, SOL_SOCKET, SO_RCVBUF, RECEIVE_BUFFER_BYTES);
  }
  setSocketOption(fd, IPPROTO_IP, IP_RECVTOS, 1);
  return { fd, joins: setSocketOption(fd, IPPROTO_UDP, UDP_GRO, 1) === 0 };
}

function bindError(endpoint: string, result: number): WeirError {
  switch (-result) {
    case EADDRINUSE:
      return new WeirError(
        'ADDRESS_IN_USE',
        `UDP ${endpoint} is taken`,
        'See who has it (ss -ulnp; a Geneve device of the kernel is not listed there, but in ip -d link), or choose another tunnel.port on gateways and nodes.',
      );
    case EADDRNOTAVAIL:
      return new WeirError(
        'NOT_THIS_HOST',
        `tunnel.address ${endpoint.slice(0, endpoint.indexOf(':'))} is no address of this host`,
        'Set tunnel.address to the address by which gateways reach this host: the `node` of its backends there.',
      );
    case EACCES:
      return new WeirError(
        'NO_PERMISSION',
        `UDP ${endpoint}: ${errnoName(result)}`,
        'Ports below 1024 need root or CAP_NET_BIND_SERVICE.',
      );
    default:
      return new WeirError('DEVICE_FAILED', `UDP ${endpoint}: ${errnoName(result)}`, 'see what the kernel log says');
  }
}
