import * as ipv4 from '../wire/ipv4.js';

/**
 * The packet the pipeline is working on: one object, reused, whose fields are plain integers. Words of addresses are signed,
 * as DataView.getInt32 reads them and as the flow table stores them.
 */
export class CurrentPacket {
  /** Row in the batch. */
  row = 0;
  slot = 0;
  /** Offset of the IP header. */
  at = 0;
  /** Bytes from the IP header, as its total length says: padding after it is not sent on. */
  length = 0;
  /** Offset of the next header. */
  l4 = 0;
  protocol = 0;
  source = 0;
  destination = 0;
  /** source port << 16 | destination port; 0 where there are none. */
  ports = 0;
  /** Of (source, destination, ports, protocol) in its flow table. */
  hash = 0;
  /** The L4 checksum is in partial form. */
  partial = false;
  /** The first fragment of a datagram, which the others follow. */
  leads = false;

  /** Reads what every packet has, from `at`, where `ipv4.check()` has been. */
  load(view: DataView, bytes: Uint8Array): void {
    const { at } = this;
    this.length = ipv4.totalLength(bytes, at);
    this.l4 = at + ipv4.headerLength(bytes, at);
    this.protocol = ipv4.protocol(bytes, at);
    this.source = ipv4.source(view, at);
    this.destination = ipv4.destination(view, at);
    this.ports = 0;
    this.partial = false;
    this.leads = false;
  }

  get sourcePort(): number {
    return this.ports >>> 16;
  }

  get destinationPort(): number {
    return this.ports & 0xffff;
  }
}

/** Source and destination port exchanged. */
export function swapPorts(ports: number): number {
  return (ports << 16) | (ports >>> 16);
}
