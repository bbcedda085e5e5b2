import {
  AF_INET,
  close,
  errnoName,
  MAP_PRIVATE_ANONYMOUS,
  mmap,
  munmap,
  O_NONBLOCK,
  read,
  SOCK_CLOEXEC,
  SOCK_RAW,
  setSocketOption,
  socket,
  viewMemory,
} from './syscalls.js';

const IPPROTO_ICMP = 1;
const SOL_RAW = 255;
const ICMP_FILTER = 1;
const DESTINATION_UNREACHABLE = 3;

const PAGE_BYTES = 4096;

/** Where a message lies in `bytes`: there is room for a vnet header before it, which is zero. */
export const ERROR_AT = 64;

/**
 * What ICMP says to this very host about packets it cannot know: those that weir makes with one of the host's own addresses as
 * source. The kernel finds no socket that sent them and keeps the errors; a raw socket gets a copy of each. Nothing waits for
 * it: it is looked at now and then while there is traffic, and what it has no room for meanwhile is said again.
 */
export class ErrorSocket {
  readonly bytes: Uint8Array;
  readonly view: DataView;
  /** Why nothing is heard; empty: it is. */
  readonly problem: string;
  readonly #fd: number;
  readonly #address: number;

  /** @throws RangeError when memory cannot be mapped */
  constructor() {
    this.#fd = socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC | O_NONBLOCK, IPPROTO_ICMP);
    if (this.#fd >= 0) setSocketOption(this.#fd, SOL_RAW, ICMP_FILTER, ~(1 << DESTINATION_UNREACHABLE));
    this.problem =
      this.#fd < 0 ? `errors about tunnels are not heard: ${errnoName(this.#fd)} (it takes CAP_NET_RAW)` : '';
    this.#address = mmap(PAGE_BYTES, MAP_PRIVATE_ANONYMOUS);
    if (this.#address < 0) throw new RangeError(`${PAGE_BYTES} bytes cannot be mapped`);
    const memory = viewMemory(this.#address, PAGE_BYTES);
    this.bytes = new Uint8Array(memory);
    this.view = new DataView(memory);
  }

  /** Takes the next error, an IP packet, to ERROR_AT. @returns its bytes; 0: there is none */
  receive(): number {
    return Math.max(0, read(this.#fd, this.#address + ERROR_AT, PAGE_BYTES - ERROR_AT));
  }

  close(): void {
    if (this.#fd >= 0) close(this.#fd);
    munmap(this.#address, PAGE_BYTES);
  }
}
