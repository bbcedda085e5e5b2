import {
  AF_UNIX,
  close,
  errnoName,
  MSG_DONTWAIT,
  MSG_NOSIGNAL,
  SOCK_CLOEXEC,
  SOCK_DGRAM,
  sendTo,
  socket,
} from './syscalls.js';

/** sun_path of struct sockaddr_un. */
const MAX_PATH_BYTES = 108;
const FAMILY_BYTES = 2;

/** Sends datagrams to a UNIX socket, which Node cannot. Nothing waits: a receiver that does not receive misses some. */
export class NotifySocket {
  readonly #address: Uint8Array;
  readonly #fd: number;

  /** @param path of the receiver; `@` at its beginning: a name in the abstract namespace */
  constructor(path: string) {
    this.#address = addressOf(path);
    this.#fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  }

  /** @returns why nothing was sent; undefined: it was */
  send(text: string): string | undefined {
    const result =
      this.#fd < 0
        ? this.#fd
        : sendTo(this.#fd, new TextEncoder().encode(text), MSG_DONTWAIT | MSG_NOSIGNAL, this.#address);
    return result < 0 ? errnoName(result) : undefined;
  }

  close(): void {
    if (this.#fd >= 0) close(this.#fd);
  }
}

/** unix(7): a path ends with a zero; an abstract name begins with one and ends with the address. Longer ones are cut, and lead nowhere. */
function addressOf(path: string): Uint8Array {
  const isAbstract = path.startsWith('@');
  const name = new TextEncoder().encode(isAbstract ? path.slice(1) : path).subarray(0, MAX_PATH_BYTES - 1);
  const address = new Uint8Array(FAMILY_BYTES + 1 + name.length);
  address[0] = AF_UNIX;
  address.set(name, FAMILY_BYTES + (isAbstract ? 1 : 0));
  return address;
}
