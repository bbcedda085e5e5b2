/** What a snapshot says to a node alone. */
export interface NodeSettings {
  /** From whom tunnelled packets are taken, as a block of balance/ranges.ts; null: from everyone. */
  readonly peers: Uint32Array | null;

  /** The largest MSS that a SYN-ACK may tell a client. */
  readonly mssLimit: number;

  /**
   * (address, port, protocol) -> 1 of each endpoint whose replies the kernel leads into the device: those of the configuration and
   * those learned from traffic. null: whoever set up the network knows which.
   */
  readonly ledIn: Int32Array | null;

  /** (address, port, protocol) of each configured backend -> 1 + the first of its rows in `members`. */
  readonly memberIndex: Int32Array;

  /** [service id, backend id] rows of each backend, the last one of it with a service id of 0. */
  readonly members: Int32Array;
}
