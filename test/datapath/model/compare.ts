import type { MemoryPacket } from '../../../lib/io/memory-device.js';
import { describe } from '../../fixtures/packet-text.js';
import type { Outcome } from '../../support/pipeline.js';
import type { Expected } from './ends.js';

export function compareOutcome(outcome: Outcome, expected: Expected): void {
  const { verdict, reason = '', direction = 'none', service, backend, state = '', out } = expected;
  const { out: sent, ...account } = outcome;
  same('account', account, { verdict, reason, direction, service, backend, state });
  compareOut(sent, out);
}

/** The same packets, in any order. */
export function compareOut(actual: readonly MemoryPacket[], wanted: readonly MemoryPacket[]): void {
  if (actual.map(hex).sort().join() === wanted.map(hex).sort().join()) return;
  const text = (packet: MemoryPacket): string => `${describe(packet.bytes)} ${hex(packet)}`;
  same('out', actual.map(text), wanted.map(text));
}

function hex({ bytes, vnet }: MemoryPacket): string {
  return `${Buffer.from(bytes).toString('hex')} ${vnet ? Buffer.from(vnet).toString('hex') : ''}`;
}

/** @throws Error when they differ */
export function same(what: string, actual: unknown, wanted: unknown): void {
  const [is, should] = [JSON.stringify(actual), JSON.stringify(wanted)];
  if (is !== should) throw new Error(`${what}: is ${is}, wanted ${should}`);
}
