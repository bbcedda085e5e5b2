import t from 'tap';
import { below, seededRandom } from '../../lib/base/random.js';
import { RECORD_BYTES, STATE, STATE_NAMES } from '../../lib/conntrack/record.js';
import { isInWindow } from '../../lib/conntrack/tcp-sequence.js';
import { account, openTcp, trackTcp } from '../../lib/conntrack/tcp-tracker.js';
import { ACK, FIN, SYN } from '../../lib/wire/tcp.js';
import { insertFlow, makeTable, TIMEOUTS } from './connection.js';

/**
 * The TCP tracker between two ends that know nothing of it, over paths that lose, reorder and delay.
 *
 *     client  --near-->  tracker  --far-->  backend          and back; each arrow a queue of its own
 *
 * The ends do as RFC 9293 says, in little: windows that close and open, retransmissions, keepalives, probes of a closed window,
 * data that waits for what is missing before it, a FIN each. What they know is the truth that the tracker is held to.
 */
const RUNS = Number(process.env.WEIR_MODEL_RUNS ?? 3000);

/** After so many steps nothing is lost any more: all must come to its end. */
const LOSSY_STEPS = 3000;
const STEPS = 20_000;

interface Segment {
  readonly flags: number;
  readonly seq: number;
  readonly ack: number;
  readonly window: number;
  readonly payload: number;
  readonly scale: number;
}

type Draw = (n: number) => number;

class End {
  state: 'closed' | 'opening' | 'open' = 'closed';
  /** What it has sent: the first not acknowledged, the next to send, and up to where the peer lets it. */
  una: number;
  next: number;
  limit = 0;
  /** What it expects, and up to where it has promised to take it. */
  expected = 0;
  edge = 0;
  hasSentFin = false;
  scale: number;
  readonly isn: number;
  readonly #isClient: boolean;
  readonly #draw: Draw;
  readonly #room: number;
  readonly #early: [from: number, to: number][] = [];
  #unread = 0;
  #left: number;
  #peerScale = 0;

  constructor(isClient: boolean, draw: Draw) {
    this.#isClient = isClient;
    this.#draw = draw;
    this.isn = [0, -1, -5000, 0x7ffff000, draw(2 ** 32)][draw(5)]! | 0;
    this.una = this.isn;
    this.next = this.isn + 1;
    this.#room = [1000, 5000, 65_535, 300_000, 4_000_000][draw(5)]!;
    this.#left = [0, 1, 5000, 100_000][draw(4)]!;
    this.scale = [-1, 0, 2, 7][draw(4)]!;
  }

  get isDone(): boolean {
    return this.hasSentFin && this.una === this.next;
  }

  /** Something to do on its own: to begin, to send what is new, what may be lost, or that it is still there. */
  act(): Segment[] {
    if (this.state !== 'open') {
      const begins = this.#isClient || this.state === 'opening';
      if (this.state === 'closed' && begins) this.state = 'opening';
      return begins ? [this.#syn()] : [];
    }
    const what = this.#draw(10);
    if (what === 0) {
      this.#unread = 0;
      return [this.#segment(ACK, this.next)];
    }
    if (what < 3) return this.#again();
    const room = Math.max(0, (this.limit - this.next) | 0);
    const payload = Math.min(room, this.#left, [1, 1400, 64_000][this.#draw(3)]!);
    const isFin = payload === this.#left && room > payload && !this.hasSentFin && this.#draw(4) === 0;
    if (payload === 0 && !isFin) return [];
    const segment = this.#segment(ACK | (isFin ? FIN : 0), this.next, payload);
    this.next = (this.next + payload + (isFin ? 1 : 0)) | 0;
    this.#left -= payload;
    this.hasSentFin ||= isFin;
    return [segment];
  }

  /** What it answers. */
  take(segment: Segment): Segment[] {
    const { flags, seq, ack, window, payload, scale } = segment;
    if ((flags & SYN) !== 0) {
      // A repeat: an end that is open only says where it stands.
      if (this.state === 'open') return [this.#segment(ACK, this.next)];
      if (this.#isClient !== ((flags & ACK) !== 0)) return [];
      if (this.state === 'opening' && !this.#isClient) return [this.#syn()];
      this.expected = (seq + 1) | 0;
      this.edge = (this.expected + Math.min(this.#room, 65_535)) | 0;
      const isScaled = scale >= 0 && this.scale >= 0;
      this.#peerScale = isScaled ? scale : 0;
      if (!isScaled) this.scale = this.#isClient ? 0 : -1;
      this.limit = ((this.#isClient ? ack : this.next) + window) | 0;
      this.state = this.#isClient ? 'open' : 'opening';
      if (!this.#isClient) return [this.#syn()];
      this.una = this.next;
      return [this.#segment(ACK, this.next)];
    }
    if (this.state === 'closed' || (this.state === 'opening' && this.#isClient)) return [];
    this.state = 'open';
    if (this.scale < 0) this.scale = 0;
    if (((ack - this.una) | 0) > 0) this.una = ack;
    const limit = (ack + window * 2 ** this.#peerScale) | 0;
    if (((limit - this.limit) | 0) > 0) this.limit = limit;
    const length = payload + (flags & FIN);
    if (length > 0) this.#receive(seq, (seq + length) | 0);
    // A keepalive, or a probe, is answered as well.
    return length > 0 || ((seq - this.expected) | 0) < 0 ? [this.#segment(ACK, this.next)] : [];
  }

  #receive(from: number, to: number): void {
    this.#early.push([from, to]);
    for (let i = 0; i < this.#early.length; ) {
      const [begin, end] = this.#early[i]!;
      if (((begin - this.expected) | 0) > 0) i++;
      else {
        this.#unread += Math.max(0, (end - this.expected) | 0);
        if (((end - this.expected) | 0) > 0) this.expected = end;
        this.#early.splice(i, 1);
        i = 0;
      }
    }
    if (this.#draw(2) === 0) this.#unread = 0;
    else if (this.#draw(6) === 0) this.#unread = this.#room;
  }

  /** What was not acknowledged once more, as much of it as comes to mind; a keepalive when there is nothing. */
  #again(): Segment[] {
    if (this.una === this.next) return [this.#segment(ACK, (this.next - 1) | 0)];
    const segments: Segment[] = [];
    let seq = this.una === this.isn ? (this.isn + 1) | 0 : this.una;
    do {
      const rest = (this.next - seq) | 0;
      const data = this.hasSentFin ? rest - 1 : rest;
      const payload = Math.min(data, 1400);
      const isFin = this.hasSentFin && payload === data;
      segments.push(this.#segment(ACK | (isFin ? FIN : 0), seq, payload));
      seq = (seq + payload + (isFin ? 1 : 0)) | 0;
    } while (seq !== this.next && this.#draw(2) === 0);
    return segments;
  }

  #syn(): Segment {
    const [flags, ack] = this.#isClient ? [SYN, 0] : [SYN | ACK, this.expected];
    const window = Math.min(this.#room, 65_535);
    return { flags, seq: this.isn, ack, window, payload: 0, scale: this.scale };
  }

  /** Its window never shrinks: what was promised holds. */
  #segment(flags: number, seq: number, payload = 0): Segment {
    const unit = 2 ** this.scale;
    const free = Math.max((this.edge - this.expected) | 0, this.#room - this.#unread);
    const window = Math.min(65_535, Math.ceil(free / unit));
    this.edge = (this.expected + window * unit) | 0;
    return { flags, seq, ack: this.expected, window, payload, scale: -1 };
  }
}

/** The client's side and the backend's: what is on its way to the tracker, and what is on its way on. */
class Line {
  readonly ends: readonly [End, End];
  readonly #near: readonly [Segment[], Segment[]] = [[], []];
  readonly #far: readonly [Segment[], Segment[]] = [[], []];
  readonly #draw: Draw;
  readonly #losses: number;
  readonly #table = makeTable(4);
  #record = -1;
  #nowMs = 1_000_000;

  constructor(draw: Draw) {
    this.#draw = draw;
    this.#losses = [0, 2, 20][draw(3)]!;
    this.ends = [new End(true, draw), new End(false, draw)];
  }

  get state(): string {
    return this.#record < 0 ? '' : STATE_NAMES[this.#table.bytes[this.#record * RECORD_BYTES + STATE]!]!;
  }

  /** Whether an RST of this side would close the entry. */
  believes(side: number, seq: number): boolean {
    return isInWindow(this.#table, this.#record, side === 1, seq);
  }

  step(isLossy: boolean): void {
    const side = this.#draw(2);
    const what = this.#draw(3);
    if (what === 0) for (const segment of this.ends[side]!.act()) this.#send(side, segment, isLossy);
    else if (what === 1) {
      const segment = this.#near[side]!.shift();
      if (segment === undefined) return;
      this.#track(side, segment);
      if (!isLossy || this.#draw(100) >= this.#losses) this.#far[side]!.push(segment);
    } else {
      const segment = this.#far[side]!.shift();
      const answers = segment === undefined ? [] : this.ends[1 - side]!.take(segment);
      for (const answer of answers) this.#send(1 - side, answer, isLossy);
    }
  }

  #send(side: number, segment: Segment, isLossy: boolean): void {
    const queue = this.#near[side]!;
    if (!isLossy) queue.push(segment);
    else if (this.#draw(100) >= this.#losses) {
      queue.splice(this.#draw(10) === 0 ? this.#draw(queue.length + 1) : queue.length, 0, segment);
    }
  }

  #track(side: number, { flags, seq, ack, window, payload, scale }: Segment): void {
    const table = this.#table;
    const nowMs = this.#nowMs++;
    const isNew = this.#record < 0;
    if (isNew) this.#record = insertFlow(table, 1, 6, nowMs);
    const record = this.#record;
    if (isNew) openTcp(table, record, flags, seq, ack, window, payload, scale, nowMs, TIMEOUTS);
    else trackTcp(table, record, side === 1, flags, seq, ack, window, payload, scale, nowMs, TIMEOUTS);
    account(table, record, side === 1, 40 + payload, nowMs);
  }
}

/** What is wrong in a run, or undefined. */
function play(seed: number): string | undefined {
  const random = seededRandom(seed);
  const line = new Line((n) => below(random, n));
  const [client, backend] = line.ends;
  for (let step = 0; step < STEPS; step++) {
    line.step(step < LOSSY_STEPS);
    const { state } = line;
    if (state === 'CLOSED') return `step ${step}: closed without an RST`;
    if (state === 'CLOSING' && !(client.hasSentFin && backend.hasSentFin)) return `step ${step}: closing too early`;
    for (const [side, peer] of [backend, client].entries()) {
      // A SYN's window is rounded up to the unit it may get.
      const unit = 2 ** Math.max(0, peer.scale);
      if (state === 'ESTABLISHED' && line.believes(side, (peer.edge + unit) | 0)) {
        return `step ${step}: believes what no end could`;
      }
    }
    if (client.isDone && backend.isDone) return state === 'CLOSING' ? undefined : `ends as ${state}`;
  }
  return 'does not come to an end';
}

t.test(`${RUNS} connections over bad paths: none ends too early, and the end of each is known`, async (t) => {
  const wrong: string[] = [];
  for (let seed = 1; seed <= RUNS && wrong.length < 5; seed++) {
    const mistake = play(seed);
    if (mistake !== undefined) wrong.push(`seed ${seed}: ${mistake}`);
  }
  t.same(wrong, []);
});
