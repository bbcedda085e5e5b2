import {
  AF_PACKET,
  close,
  errnoName,
  MAP_PRIVATE_ANONYMOUS,
  mmap,
  munmap,
  O_NONBLOCK,
  POLLIN,
  poll,
  read,
  SOCK_CLOEXEC,
  SOCK_DGRAM,
  sendTo,
  socket,
  viewMemory,
} from './syscalls.js';

// linux/if_ether.h, linux/if_arp.h
const ETHERTYPE_ARP = 0x0806;
const ETHERTYPE_IPV4 = 0x0800;
const HARDWARE_ETHERNET = 1;
const REQUEST = 1;
const REPLY = 2;

// struct sockaddr_ll
const SOCKADDR_BYTES = 20;
const ETHERNET_BYTES = 6;

// An ARP packet: types and lengths, the operation, then the sender's and the target's addresses.
const ARP_BYTES = 28;
const OPERATION = 6;
const SENDER_HARDWARE = 8;
const SENDER_ADDRESS = 14;
const TARGET_ADDRESS = 24;

const PAGE_BYTES = 4096;
const PACKET_AT = 64;
/** Packets of others that are looked at while one waits. */
const MOST_PACKETS = 1000;

/**
 * Asks a link who has an address, as a host does before it takes one (RFC 5227: the question has no sender, and changes nobody's table).
 * Blocks for up to `waitMs`; takes CAP_NET_RAW.
 *
 * @returns the hardware address of who answered, `null`: nobody did; or why it could not be asked
 */
export function probeArp(
  { index, hardwareAddress }: { readonly index: number; readonly hardwareAddress: string },
  address: number,
  waitMs: number,
): { readonly owner: string | null } | { readonly problem: string } {
  const protocol = Buffer.alloc(2);
  protocol.writeUInt16BE(ETHERTYPE_ARP);
  const fd = socket(AF_PACKET, SOCK_DGRAM | SOCK_CLOEXEC | O_NONBLOCK, protocol.readUInt16LE());
  if (fd < 0) return { problem: errnoName(fd) };
  const memory = mmap(PAGE_BYTES, MAP_PRIVATE_ANONYMOUS);
  try {
    if (memory < 0) return { problem: errnoName(memory) };
    const sent = sendTo(fd, question(hardwareAddress, address), 0, broadcast(index));
    if (sent < 0) return { problem: errnoName(sent) };
    return { owner: awaitAnswer(fd, memory, address, waitMs) };
  } finally {
    if (memory > 0) munmap(memory, PAGE_BYTES);
    close(fd);
  }
}

function awaitAnswer(fd: number, memory: number, address: number, waitMs: number): string | null {
  const view = Buffer.from(viewMemory(memory, PAGE_BYTES));
  view.writeInt32LE(fd, 0);
  view.writeInt16LE(POLLIN, 4);
  const untilMs = performance.now() + waitMs;
  for (let i = 0; i < MOST_PACKETS; i++) {
    const leftMs = Math.ceil(untilMs - performance.now());
    if (leftMs <= 0 || poll(memory, 1, leftMs) <= 0) return null;
    const length = read(fd, memory + PACKET_AT, PAGE_BYTES - PACKET_AT);
    const packet = view.subarray(PACKET_AT, PACKET_AT + length);
    if (length < ARP_BYTES || packet.readUInt16BE(OPERATION) !== REPLY) continue;
    if (packet.readUInt32BE(SENDER_ADDRESS) !== address) continue;
    return packet.toString('hex', SENDER_HARDWARE, SENDER_ADDRESS).replace(/..(?=.)/g, '$&:');
  }
  return null;
}

function question(hardwareAddress: string, address: number): Uint8Array {
  const packet = Buffer.alloc(ARP_BYTES);
  packet.writeUInt16BE(HARDWARE_ETHERNET, 0);
  packet.writeUInt16BE(ETHERTYPE_IPV4, 2);
  packet[4] = ETHERNET_BYTES;
  packet[5] = 4;
  packet.writeUInt16BE(REQUEST, OPERATION);
  packet.write(hardwareAddress.replaceAll(':', ''), SENDER_HARDWARE, 'hex');
  packet.writeUInt32BE(address, TARGET_ADDRESS);
  return packet;
}

function broadcast(index: number): Uint8Array {
  const name = Buffer.alloc(SOCKADDR_BYTES);
  name.writeUInt16LE(AF_PACKET, 0);
  name.writeUInt16BE(ETHERTYPE_ARP, 2);
  name.writeInt32LE(index, 4);
  name[11] = ETHERNET_BYTES;
  name.fill(0xff, 12, 12 + ETHERNET_BYTES);
  return name;
}
