import { REASON_NAMES } from '../base/reasons.js';
import { STATE_NAMES } from '../conntrack/record.js';
import { DIRECTION_NAMES, VERDICT_NAMES } from '../datapath/verdict.js';

const BUFFER_CHARS = 256 * 1024;

/** Ids as the pipeline gives them; 0 where nothing is known. */
export interface JournalRow {
  readonly verdict: number;
  readonly reason: number;
  readonly direction: number;
  readonly state: number;
  readonly service: string | undefined;
  readonly backend: string | undefined;
}

/**
 * OUT.jsonl: a line per input packet. The keys stand in one fixed order and are left out where nothing is known;
 * `out` is always there. Written by hand, since `t` must be exact to the nanosecond and look the same on every run.
 */
export class Journal {
  readonly #write: (bytes: Uint8Array) => void;
  #text = '';
  #out = '';
  #n = 0;
  #emitted = 0;

  constructor(write: (bytes: Uint8Array) => void) {
    this.#write = write;
  }

  /** Lines so far. */
  get lines(): number {
    return this.#n;
  }

  /** Packets sent so far. */
  get emittedCount(): number {
    return this.#emitted;
  }

  /** Notes a packet that was sent: it goes into the next line. */
  emitted(bytes: Uint8Array, offset: number, length: number): void {
    const hex = Buffer.from(bytes.buffer, bytes.byteOffset + offset, length).toString('hex');
    this.#emitted++;
    this.#out += this.#out === '' ? `"${hex}"` : `,"${hex}"`;
  }

  /** Ends the line of one packet; its time is relative to the first packet. */
  line(seconds: number, nanoseconds: number, row: JournalRow): void {
    let text = `{"n":${++this.#n},"t":${formatSeconds(seconds, nanoseconds)},"verdict":"${VERDICT_NAMES[row.verdict]}"`;
    if (row.reason !== 0) text += `,"reason":"${REASON_NAMES[row.reason]}"`;
    text += `,"direction":"${DIRECTION_NAMES[row.direction]}"`;
    if (row.service !== undefined) text += `,"service":${JSON.stringify(row.service)}`;
    if (row.backend !== undefined) text += `,"backend":${JSON.stringify(row.backend)}`;
    if (row.state !== 0) text += `,"state":"${STATE_NAMES[row.state]}"`;
    this.#text += `${text},"out":[${this.#out}]}\n`;
    this.#out = '';
    if (this.#text.length > BUFFER_CHARS) this.flush();
  }

  flush(): void {
    if (this.#text !== '') this.#write(Buffer.from(this.#text));
    this.#text = '';
  }
}

/** A JSON number with the digits that are needed and at least one after the point: `0.0`, `3.000001`, `-0.5`. */
export function formatSeconds(seconds: number, nanoseconds: number): string {
  const isNegative = seconds < 0;
  // A time before the first packet: -1 s + 600 ms is -0.4 s.
  const whole = isNegative ? -seconds - (nanoseconds > 0 ? 1 : 0) : seconds;
  const fraction = isNegative && nanoseconds > 0 ? 1e9 - nanoseconds : nanoseconds;
  const digits = String(fraction).padStart(9, '0').replace(/0+$/, '');
  return `${isNegative ? '-' : ''}${whole}.${digits === '' ? '0' : digits}`;
}
