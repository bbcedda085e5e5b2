import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import type { Lab } from '../../lib/lab/topology.js';
import { verifyChecksums } from '../fixtures/packets.js';

/** What comes to a host of a lab, as tcpdump sees it. */
export interface WireCapture {
  readonly role: string;
  /** Ends it. @returns IP packets, whole */
  readonly stop: () => Promise<Uint8Array[]>;
}

/** Of these hosts neither sends or takes what no wire would carry: super-packets, checksums to be completed. Before they send. */
export async function dropOffloads(lab: Lab, roles: readonly string[]): Promise<void> {
  const off = ['tx', 'off', 'tso', 'off', 'gso', 'off', 'gro', 'off'];
  for (const role of roles) await lab.exec(role, 'ethtool', ['-K', 'eth0', ...off]);
}

/** Records what each of these hosts receives. */
export async function captureAt(lab: Lab, roles: readonly string[], filter = 'ip'): Promise<WireCapture[]> {
  const captures = roles.map((role): WireCapture => {
    const file = join(lab.dir, `${role}.pcap`);
    const command = ['-i', 'eth0', '-Q', 'in', '-U', '-s', '0', '-B', '16384', '-w', file, filter];
    const dump = lab.spawn(role, `tcpdump-${role}`, 'tcpdump', command);
    const stop = async (): Promise<Uint8Array[]> => {
      process.kill(dump.pid, 'SIGTERM');
      await dump.ended;
      return readCapture(file);
    };
    return { role, stop };
  });
  await new Promise((resolve) => setTimeout(resolve, 700)); // tcpdump has no sign of being ready that a file would hold
  return captures;
}

/** IP packets of an Ethernet capture. */
function readCapture(file: string): Uint8Array[] {
  const bytes = readFileSync(file);
  const packets: Uint8Array[] = [];
  for (let at = 24; at + 16 <= bytes.length; ) {
    const captured = bytes.readUInt32LE(at + 8);
    packets.push(bytes.subarray(at + 16 + 14, at + 16 + captured));
    at += 16 + captured;
  }
  return packets;
}

/** Fragments have no L4 checksum of their own; padding of short frames is not the packet's. */
export function verifyWire(frame: Uint8Array): string[] {
  const total = (frame[2]! << 8) | frame[3]!;
  const packet = frame.subarray(0, total);
  const isFragment = ((packet[6]! << 8) | packet[7]!) & 0x3fff;
  return verifyChecksums(packet).filter((mistake) => !isFragment || mistake.startsWith('IP'));
}

/** The address at `at`, as text: 12 the source, 16 the destination. */
export function addressOf(packet: Uint8Array, at: 12 | 16): string {
  return packet.subarray(at, at + 4).join('.');
}
