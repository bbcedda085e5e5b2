/**
 * What DESIGN calls tracking a TCP connection, once more and naively: one object a connection, numbers compared by their
 * distance, no fast path. For the two-way entries of dnat and snat.
 */

export type Side = 'original' | 'reply';

/** Numbers as on the wire; `scale` is the option's shift, -1 without it. */
export interface Segment {
  readonly flags: string;
  readonly seq: number;
  readonly ack: number;
  readonly window: number;
  readonly payload: number;
  readonly scale: number;
}

/** What a packet does to the entry's timer: sets it, leaves it, or makes it no longer than tcpFin. */
export type Timer = 'tcpSyn' | 'tcp' | 'tcpFin' | 'keep' | 'shorten';

/** One direction, as far as it was seen. */
export interface Stream {
  /** Of its SYN. */
  isn: number;
  /** After the last byte sent. */
  end: number;
  /** The first byte its receiver has not acknowledged. */
  acked: number;
  /** Its sender's own receive window, in bytes. */
  window: number;
  scale: number;
}

/** How old an acknowledgement may be that still counts for a FIN. */
const OLD_ACK_BYTES = 66_000;

/** From b to a, at most 2^31 either way. */
export function distance(a: number, b: number): number {
  return (a - b) | 0;
}

/** A SYN that opens a connection; ECN bits do not matter. */
export function isOpening({ flags }: Segment): boolean {
  return flags.includes('S') && !/[AFR]/.test(flags);
}

export class TcpModel {
  state = 'SYN_SENT';
  readonly flags = new Set<string>();
  readonly original = stream();
  readonly reply = stream();
  /** The client's SYN was seen; else the connection was picked up and no number can be judged. */
  isFromStart = false;
  /** The SYN-ACK was seen as well: all numbers hold. */
  hasNumbers = false;
  /** A SYN on an established entry, in case the backend takes it. */
  second: Segment | undefined;
  /** SYNs that the backend answered with an RST. */
  refusals = 0;

  /** The first packet of an entry. */
  open(from: Side, segment: Segment): Timer {
    this.state = from === 'original' ? 'SYN_SENT' : 'SYN_RECV';
    const timer = this.see(from, segment);
    if (timer === 'keep') return 'tcpSyn';
    return timer === 'shorten' ? 'tcpFin' : timer;
  }

  see(from: Side, segment: Segment): Timer {
    const { flags } = segment;
    if (flags.includes('R')) return this.#reset(from, segment);
    if (flags.includes('S')) {
      if (from === 'original') return isOpening(segment) ? this.#syn(segment) : 'keep';
      return flags.includes('A') ? this.#synAck(segment) : 'keep';
    }
    return this.#other(from, segment);
  }

  get #timer(): Timer {
    if (this.state === 'ESTABLISHED') return 'tcp';
    if (this.state === 'CLOSING' || this.state === 'CLOSED') return 'tcpFin';
    return !this.isFromStart && this.#isClosing ? 'tcpFin' : 'tcpSyn';
  }

  get #isClosing(): boolean {
    return this.flags.has('RxClosing') || this.flags.has('TxClosing');
  }

  #reset(from: Side, { flags, seq, ack }: Segment): Timer {
    const refusesSecond = from === 'reply' && flags.includes('A') && this.#acknowledgesSecond(ack);
    if (!this.isFromStart && !refusesSecond) return 'shorten';
    const isHandshake = this.state === 'SYN_SENT' || this.state === 'SYN_RECV';
    const refusesSyn = from === 'reply' && isHandshake && flags.includes('A') && this.#acknowledgesSyn(ack);
    const isInWindow = (from === 'original' || this.hasNumbers) && this.#mayExpect(from, seq);
    if (!refusesSyn && !refusesSecond && !isInWindow) return 'keep';
    if (refusesSecond || (from === 'reply' && this.state === 'SYN_SENT')) this.refusals++;
    this.state = 'CLOSED';
    return 'tcpFin';
  }

  #syn(segment: Segment): Timer {
    if (this.state === 'ESTABLISHED') {
      const isOwn = this.hasNumbers && distance(this.original.isn, segment.seq) === 0;
      if (!isOwn) this.second = segment;
      return 'tcp';
    }
    const isRepeat = this.isFromStart && distance(this.original.isn, segment.seq) === 0;
    if (!isRepeat) this.#begin(segment);
    else if (this.state === 'SYN_SENT') this.#offer(segment);
    return 'tcpSyn';
  }

  #begin(syn: Segment): void {
    this.state = 'SYN_SENT';
    this.flags.clear();
    this.isFromStart = true;
    this.hasNumbers = false;
    this.second = undefined;
    Object.assign(this.original, { isn: syn.seq, acked: syn.seq + 1, end: syn.seq + 1 + syn.payload });
    Object.assign(this.reply, stream());
    this.#offer(syn);
  }

  #offer({ window, scale }: Segment): void {
    this.original.window = window;
    this.original.scale = scale;
  }

  #acknowledgesSyn(ack: number): boolean {
    const { acked, end } = this.original;
    return distance(ack, acked) >= 0 && distance(ack, end) <= 0;
  }

  /** All, some or none of its data, which is known to 16 bytes. */
  #acknowledgesSecond(ack: number): boolean {
    if (this.state !== 'ESTABLISHED' || this.second === undefined) return false;
    const { seq, payload } = this.second;
    const beyond = distance(ack, seq + 1);
    return beyond >= 0 && beyond <= Math.ceil(payload / 16) * 16;
  }

  #synAck(segment: Segment): Timer {
    const { seq, ack, window, payload, scale } = segment;
    if (this.state === 'CLOSING' || this.state === 'CLOSED') return 'tcpFin';
    if (this.state === 'ESTABLISHED') {
      if (!this.#acknowledgesSecond(ack)) return 'tcp';
      const second = this.second!;
      this.#begin({ ...second, payload: distance(ack, second.seq + 1) });
    }
    if (!this.isFromStart || !this.#acknowledgesSyn(ack)) return 'keep';
    if (this.state === 'SYN_RECV' && distance(this.reply.isn, seq) === 0) return 'tcpSyn';
    this.state = 'SYN_RECV';
    if (!this.hasNumbers) {
      const isScaled = this.original.scale >= 0 && scale >= 0;
      this.original.scale = isScaled ? this.original.scale : 0;
      this.reply.scale = isScaled ? scale : 0;
      this.hasNumbers = true;
    }
    Object.assign(this.reply, { isn: seq, acked: seq + 1, end: seq + 1 + payload, window });
    return 'tcpSyn';
  }

  /** A fragment that is not the first: it has no header to look at. */
  seeFragment(): Timer {
    return this.#timer;
  }

  /** Neither SYN nor RST. */
  #other(from: Side, segment: Segment): Timer {
    const { flags, payload } = segment;
    const before = this.state;
    const wasClosing = this.#isClosing;
    this.flags.add('SeenNonSyn');
    let isPlausible = !this.isFromStart;
    if (this.hasNumbers) {
      isPlausible = flags.includes('A') && this.#isInOrder(from, segment);
      if (flags.includes('A')) this.#follow(from, segment);
      if (isPlausible && before === 'SYN_RECV' && from === 'original') this.state = 'ESTABLISHED';
    } else if (isPlausible && before === (from === 'reply' ? 'SYN_SENT' : 'SYN_RECV')) {
      // A connection that was only seen to end does not last because somebody acknowledges that.
      if (!wasClosing || payload > 0) this.state = 'ESTABLISHED';
    }
    if (flags.includes('F') && isPlausible && before !== 'CLOSED') {
      this.flags.add(from === 'original' ? 'TxClosing' : 'RxClosing');
      if (this.flags.has('TxClosing') && this.flags.has('RxClosing')) this.state = 'CLOSING';
    }
    return this.#timer;
  }

  #length({ payload, flags }: Segment): number {
    return payload + (flags.includes('F') ? 1 : 0);
  }

  /** Whether the receiver of `from` may expect this number: in its window, or among what is on its way to it. */
  #mayExpect(from: Side, seq: number): boolean {
    const own = this[from];
    const offset = distance(seq, own.acked);
    return offset >= 0 && (offset < this.#windowOver(from) || distance(seq, own.end) <= 0);
  }

  /** Whether a segment of `from` that is ahead of all it has sent may begin here: in the window, or where that ends. */
  #mayBegin(from: Side, seq: number): boolean {
    return distance(seq, this[from].acked) >= 0 && distance(seq, this[from].acked) <= this.#windowOver(from);
  }

  /** The window that the receiver of `from` has opened. */
  #windowOver(from: Side): number {
    const peer = this[from === 'original' ? 'reply' : 'original'];
    return peer.window;
  }

  #isInOrder(from: Side, segment: Segment): boolean {
    const own = this[from];
    const peer = this[from === 'original' ? 'reply' : 'original'];
    const { seq, ack } = segment;
    if (distance(seq + this.#length(segment), own.acked) < 0) return false;
    if (distance(seq, own.end) > 0 && !this.#mayBegin(from, seq)) return false;
    const oldest = this.state === 'SYN_RECV' ? 0 : -Math.max(OLD_ACK_BYTES, own.window);
    return distance(ack, peer.acked) >= oldest && distance(ack, peer.end) <= 0;
  }

  /** Data moves END, an acknowledgement ACKED and the window, unless one of the two lies. */
  #follow(from: Side, segment: Segment): void {
    const own = this[from];
    const peer = this[from === 'original' ? 'reply' : 'original'];
    const { seq, ack, window } = segment;
    if (distance(seq, own.end) > 0 && !this.#mayBegin(from, seq)) return;
    // What it acknowledges was sent, or may have been on a way past weir: within the window its sender gave.
    const isNews = distance(ack, peer.end) > 0;
    // (Ahead of END and more than 2^31 ahead of ACKED is not behind it.)
    if (isNews && (ack - peer.acked) >>> 0 > own.window) return;
    if (isNews) peer.end = ack;
    const end = seq + this.#length(segment);
    if (distance(end, own.end) > 0) own.end = end;
    if (distance(ack, peer.acked) >= 0) {
      // Until a handshake is over only its SYNs are held to be acknowledged, whatever came with them.
      if (this.state !== 'SYN_RECV') peer.acked = ack;
      own.window = window << own.scale;
    }
  }
}

function stream(): Stream {
  return { isn: 0, end: 0, acked: 0, window: 0, scale: -1 };
}
