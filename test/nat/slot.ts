import type { PacketMemory } from '../../lib/io/device.js';
import type { MemoryPacket } from '../../lib/io/memory-device.js';
import type { Answer } from '../../lib/nat/answer.js';

/** One packet in a slot whose other bytes are all `canary`: what is read or written outside shows. */
export interface Slot {
  readonly memory: PacketMemory;
  readonly at: number;
  readonly length: number;
  readonly canary: number;
}

const HEADROOM = 128;
const TAILROOM = 64;

export function slotOf(packet: Uint8Array | MemoryPacket, canary = 0xa5): Slot {
  const { bytes, vnet } = packet instanceof Uint8Array ? { bytes: packet, vnet: undefined } : packet;
  const memory = new Uint8Array(HEADROOM + bytes.length + TAILROOM).fill(canary);
  memory.set(vnet ?? new Uint8Array(10), HEADROOM - 10);
  memory.set(bytes, HEADROOM);
  return {
    memory: { bytes: memory, view: new DataView(memory.buffer), slotBytes: memory.length, slots: 1 },
    at: HEADROOM,
    length: bytes.length,
    canary,
  };
}

/** The packet where it was put. */
export function packetIn({ memory, at, length }: Slot): Uint8Array {
  return memory.bytes.slice(at, at + length);
}

export function vnetIn({ memory, at }: Slot): Uint8Array {
  return memory.bytes.slice(at - 10, at);
}

/** The packet an answer lies at, with the vnet header it would be sent with. */
export function answerIn({ memory }: Slot, { offset, length }: Answer): { bytes: Uint8Array; vnet: Uint8Array } {
  return { bytes: memory.bytes.slice(offset, offset + length), vnet: memory.bytes.slice(offset - 10, offset) };
}

/** Whether all bytes before `from` and from `to` on are untouched; the packet and its vnet header by default. */
export function isIntactOutside(slot: Slot, from = slot.at - 10, to = slot.at + slot.length): boolean {
  const { bytes } = slot.memory;
  return bytes.every((byte, i) => (i >= from && i < to) || byte === slot.canary);
}
