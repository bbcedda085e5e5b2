/**
 * Sends 64-byte datagrams as fast as one core can, 64 a system call (sendmmsg): `node udp-sender.mjs ADDRESS PORT SECONDS`.
 * iperf3 spends a system call on each and is slower than what is measured.
 */
import koffi from 'koffi';

const AF_INET = 2;
const SOCK_DGRAM = 2;
const BATCH = 64;
const DATAGRAM_BYTES = 64;
const MMSGHDR_BYTES = 64;

const libc = koffi.load('libc.so.6');
const socket = libc.func('int socket(int, int, int)');
const connect = libc.func('int connect(int, void*, uint)');
const sendmmsg = libc.func('int sendmmsg(int, void*, uint, int)');

const [address, port, seconds] = process.argv.slice(2);
const fd = socket(AF_INET, SOCK_DGRAM, 0);
const peer = Buffer.alloc(16);
peer.writeUInt16LE(AF_INET, 0);
peer.writeUInt16BE(Number(port), 2);
for (const [i, part] of address.split('.').entries()) peer[4 + i] = Number(part);
if (connect(fd, peer, peer.length) !== 0) throw new Error('connect');

const payload = Buffer.alloc(DATAGRAM_BYTES);
const iov = Buffer.alloc(16);
iov.writeBigUInt64LE(BigInt(koffi.address(payload)), 0);
iov.writeBigUInt64LE(BigInt(DATAGRAM_BYTES), 8);
const messages = Buffer.alloc(BATCH * MMSGHDR_BYTES);
for (let i = 0; i < BATCH; i++) {
  messages.writeBigUInt64LE(BigInt(koffi.address(iov)), i * MMSGHDR_BYTES + 16); // msg_iov
  messages.writeBigUInt64LE(1n, i * MMSGHDR_BYTES + 24); // msg_iovlen
}
const end = performance.now() + Number(seconds) * 1000;
let sent = 0;
while (performance.now() < end) sent += Math.max(0, sendmmsg(fd, messages, BATCH, 0));
console.log(sent);
