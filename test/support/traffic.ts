import type { Test } from 'tap';
import type { MemoryPacket } from '../../lib/io/memory-device.js';
import { describe } from '../fixtures/packet-text.js';
import { tcp, verifyChecksums } from '../fixtures/packets.js';
import type { Outcome, TestPipeline } from './pipeline.js';

/** What tests of the pipeline send through it: one service with two backends, one client. */

export const B1 = '{ name: b1, address: 10.2.0.11, port: 8080 }';
export const B2 = '{ name: b2, address: 10.2.0.12, port: 8080 }';

export function service(fields: string, backends = `${B1}, ${B2}`): string {
  return `services:\n  - { name: web, address: 10.96.0.10, port: 80, protocol: tcp, ${fields} backends: [${backends}] }\n`;
}

export const client = { src: '10.1.0.2', sport: 40000, dst: '10.96.0.10', dport: 80 };

/** The packet's answer from a backend, as seen by the gateway. */
export function reply(out: MemoryPacket, fields: object): Uint8Array {
  const [src, dst] = [quad(out.bytes, 16), quad(out.bytes, 12)];
  const l4 = (out.bytes[0]! & 15) * 4;
  const [sport, dport] = [half(out.bytes, l4 + 2), half(out.bytes, l4)];
  return tcp({ src, sport, dst, dport, ...fields });
}

export function quad(bytes: Uint8Array, at: number): string {
  return bytes.subarray(at, at + 4).join('.');
}

export function half(bytes: Uint8Array, at: number): number {
  return (bytes[at]! << 8) | bytes[at + 1]!;
}

export function check(t: Test, outcome: Outcome): void {
  for (const { bytes, vnet } of outcome.out) t.same(verifyChecksums(bytes, vnet), [], describe(bytes));
}

/** Opens a connection and brings it to ESTABLISHED; returns its first outcome. */
export function establish(pipeline: TestPipeline, from: typeof client = client): Outcome {
  const first = pipeline.send(tcp({ ...from, flags: 'S', seq: 1000 }));
  pipeline.send(reply(first.out[0]!, { flags: 'SA', seq: 5000, ack: 1001 }));
  const third = pipeline.send(tcp({ ...from, flags: 'A', seq: 1001, ack: 5001 }));
  if (third.state !== 'ESTABLISHED') throw new Error(`state is ${third.state}`);
  return first;
}

/** BACKENDS stands for those of both. */
export const TWO_VIPS = `services:
  - { name: one, address: 10.96.0.10, port: 80, protocol: tcp, backends: [BACKENDS] }
  - { name: two, address: 10.96.0.11, port: 80, protocol: tcp, backends: [BACKENDS] }
`;
