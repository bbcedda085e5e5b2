import { HEADROOM_BYTES } from '../base/limits.js';

/**
 * The whole contract between weir and whatever packets come from: a TUN device through io_uring or read/write, a capture
 * file, or an array in a test.
 *
 * Packet memory is cut into equal slots. A slot is owned by exactly one side at a time: the device fills it and lists it in
 * `rx`; the data path then gives each slot back exactly once, by `transmit` or by `release`. Within a slot a received packet
 * starts at HEADROOM_BYTES, with its virtio-net header in the 10 bytes before (zero where the device has none), so that an
 * encapsulation can be prepended without copying.
 *
 *     slot: | headroom 118 | vnet 10 | IP packet ... | tail |
 *                                    ^ rx.offset
 */
export interface BatchDevice extends PacketOutput {
  /** What the last `receive` delivered. */
  readonly rx: PacketBatch;

  /** Packets whose write the kernel refused, since the device was opened. */
  readonly writeErrors: number;

  /**
   * Submits everything transmitted or released since the last call, then blocks until packets arrive, `wake` is called
   * from any thread, or `timeoutMs` passes (Infinity: no limit; 0: does not block). Fills `rx`.
   *
   * @returns the number of packets in `rx`; 0 after a wake-up or a time-out; -1 when a device with an end (a capture, an
   * array) has nothing more.
   * @throws WeirError DEVICE_FAILED when the device is gone or keeps failing.
   */
  receive(timeoutMs: number): number;

  /** Frees the memory and ends reads that are in flight. Does not close file descriptors it was given. */
  close(): void;
}

/** The half of a device that the pipeline sees while it works on a batch. Nothing here blocks. */
export interface PacketOutput {
  readonly memory: PacketMemory;

  /** What the kernel accepted, for the log and for the data path's choices. */
  readonly features: DeviceFeatures;

  /**
   * Queues the packet of `length` bytes at `offset` (of its IP header; the vnet header is right before it) for writing,
   * in order, and gives `slot` back.
   */
  transmit(slot: number, offset: number, length: number): void;

  /** Gives a slot back without sending anything: the packet was dropped or held elsewhere. */
  release(slot: number): void;

  /**
   * A free slot for a packet that the data path makes itself, or -1 when there is none. Its packet goes to
   * `slot * slotBytes + HEADROOM_BYTES`.
   */
  take(): number;
}

export interface PacketMemory {
  readonly bytes: Uint8Array;
  readonly view: DataView;
  readonly slotBytes: number;
  readonly slots: number;
}

/**
 * Struct of arrays, filled anew by each `receive`; the first `count` rows are valid. A row is an IP packet of the device, or, on
 * a device that has a tunnel's socket as well, what came through that: the payload of one UDP datagram, or of several from one
 * sender that the kernel joined (UDP_GRO), one after the other.
 */
export class PacketBatch {
  count = 0;
  readonly slot: Int32Array;
  /** Offset of the IP header, or of the first datagram's payload, in the packet memory. */
  readonly offset: Int32Array;
  /** Bytes from there on. */
  readonly length: Int32Array;
  /** 0: an IP packet. Otherwise the bytes of each datagram; only the last may be shorter. */
  readonly datagramBytes: Int32Array;
  /** Of datagrams: the address they came from, a signed word. */
  readonly peer: Int32Array;
  /** Of datagrams: the TOS byte they came with. */
  readonly tos: Uint8Array;

  constructor(capacity: number) {
    this.slot = new Int32Array(capacity);
    this.offset = new Int32Array(capacity);
    this.length = new Int32Array(capacity);
    this.datagramBytes = new Int32Array(capacity);
    this.peer = new Int32Array(capacity);
    this.tos = new Uint8Array(capacity);
  }
}

export interface DeviceFeatures {
  /** `memory`, `pcap`, `io_uring` or `readwrite`. */
  readonly engine: string;
  /** Packets carry a real vnet header: partial checksums and super-packets may arrive and may be sent. */
  readonly vnetHeader: boolean;
  /** The device takes one UDP GSO write for many datagrams. */
  readonly udpSegmentation: boolean;
}

/** Packet memory in ordinary heap memory, for devices without a kernel behind them. */
export function heapMemory(slots: number, slotBytes: number): PacketMemory {
  const bytes = new Uint8Array(slots * slotBytes);
  return { bytes, view: new DataView(bytes.buffer), slotBytes, slots };
}

/** Where a packet starts in a slot. */
export function packetOffset(memory: PacketMemory, slot: number): number {
  return slot * memory.slotBytes + HEADROOM_BYTES;
}
