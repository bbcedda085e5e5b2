import { lookup } from '../balance/lookup.js';
import type { Clock } from '../base/clock.js';
import { WeirError } from '../base/errors.js';
import { ADOPTED, EXISTS, RecordRows, TABLE_FULL, timerOf, UPDATED } from '../conntrack/adopt.js';
import * as R from '../conntrack/record.js';
import * as S from '../datapath/snapshot.js';
import { formatEndpoint, formatIpv4 } from '../wire/address.js';
import { PROTO_TCP } from '../wire/ipv4.js';
import type { Desired } from './desired.js';
import { headerFault, isEndLine, MAX_LINE_BYTES, parseFlowLine } from './flow-lines.js';
import { protocolName } from './flows.js';
import { type ImportView, SKIP_REASONS, type SkipReason } from './view.js';

/**
 * Connections of another weir become this one's: `weir ct import`.
 *
 *     body -> lines -> rows in the record's own layout -> judged by the configuration, given ids -> data path, a batch at a time
 *
 * A line that is refused is counted and the first of them are named; the others go on. Nothing is undone: a body that
 * breaks off leaves the connections that came before, as an import of that part would.
 *
 * Ids mean what they mean under one configuration. They are given, and the batch is sent and answered, in one turn between
 * reloads: else a reload could give the id of a removed backend to another while records with it are under way.
 *
 * Memory is flat: a line at most, two batches, and the first refusals. Of a chunk nothing waits for the next one but its last,
 * unfinished line, so that a sender may take its time.
 */
export interface ImportParts {
  readonly desired: Pick<Desired, 'snapshot' | 'identities'>;
  readonly clock: Clock;
  /** Reloader.inTurn */
  inTurn<T>(step: () => Promise<T>): Promise<T>;
  /** DataPath.adopt */
  adopt(table: 'tcp' | 'any', records: Int32Array): Promise<Uint8Array>;
}

/** Records in a message to the data path. */
export const ADOPT_RECORDS = 128;

/** How many refusals are named. */
const NAMED_REFUSALS = 10;

export class FlowImport {
  readonly #parts: ImportParts;
  readonly #tcp = new Batch('tcp');
  readonly #any = new Batch('any');
  readonly #skipped = Object.fromEntries(SKIP_REASONS.map((reason) => [reason, 0])) as Record<SkipReason, number>;
  readonly #refused: ImportView['refused'][number][] = [];
  #imported = 0;
  #updated = 0;
  #line = 0;
  #hasHeader = false;
  #isComplete = false;

  constructor(parts: ImportParts) {
    this.#parts = parts;
  }

  /** What has become of the lines so far. */
  get view(): ImportView {
    return {
      imported: this.#imported,
      updated: this.#updated,
      skipped: { ...this.#skipped },
      refused: [...this.#refused],
      complete: this.#isComplete,
    };
  }

  /** @throws WeirError FLOWS_INVALID, NOT_RUNNING */
  async run(body: AsyncIterable<Uint8Array>): Promise<void> {
    for await (const lines of splitLines(body)) {
      for (const text of lines) {
        const full = this.#read(text);
        if (full !== undefined) await this.#send(full);
      }
      await this.#send(this.#tcp);
      await this.#send(this.#any);
    }
    if (!this.#hasHeader) throw invalid('there is nothing to import: not even a header');
  }

  /** Takes one line; null: it was too long. @returns a batch that is full */
  #read(text: string | null): Batch | undefined {
    const number = ++this.#line;
    if (text?.trim() === '') return undefined;
    if (!this.#hasHeader) {
      const fault = headerFault(text ?? '');
      if (fault !== '') throw invalid(`line ${number}: ${fault}`);
      this.#hasHeader = true;
      return undefined;
    }
    this.#isComplete = text !== null && isEndLine(text.trim());
    if (this.#isComplete) return undefined;
    if (text === null) {
      this.#refuse(number, 'malformed', `it is longer than ${MAX_LINE_BYTES} bytes`);
      return undefined;
    }
    // Which table it belongs to is known when it is read.
    const { rows } = this.#tcp;
    const row = this.#tcp.count;
    const fault = parseFlowLine(text, rows, row, this.#parts.clock.nowMs());
    if (fault !== '') {
      this.#refuse(number, 'malformed', fault);
      return undefined;
    }
    const batch = rows.bytes[row * R.RECORD_BYTES + R.PROTOCOL] === PROTO_TCP ? this.#tcp : this.#any;
    batch.add(rows, row, number);
    return batch.count === ADOPT_RECORDS ? batch : undefined;
  }

  async #send(batch: Batch): Promise<void> {
    if (batch.count === 0) return;
    await this.#parts.inTurn(async () => {
      this.#judge(batch);
      for (let done = 0; done < batch.count; ) {
        const outcomes = await this.#parts.adopt(batch.table, batch.copy(done));
        if (outcomes.length === 0) throw new WeirError('NOT_RUNNING', 'weir is stopping', 'Import again when it runs.');
        for (const outcome of outcomes) this.#tally(outcome, batch, done++);
      }
    });
    batch.count = 0;
  }

  /** Gives ids to the rows that fit the configuration, and takes out the others. */
  #judge(batch: Batch): void {
    const { words, bytes, doubles } = batch.rows;
    const { snapshot, identities } = this.#parts.desired;
    const nowMs = this.#parts.clock.nowMs();
    const count = batch.count;
    batch.count = 0;
    for (let row = 0; row < count; row++) {
      const word = row * R.RECORD_WORDS;
      const line = batch.lines[row]!;
      const protocol = bytes[row * R.RECORD_BYTES + R.PROTOCOL]!;
      const ports = words[word + R.ORIGINAL_PORTS]! & 0xffff;
      const service = lookup(snapshot.serviceIndex, words[word + R.VIP]!, ports, protocol);
      if (service === 0) {
        const vip = formatEndpoint(words[word + R.VIP]!, ports);
        this.#refuse(line, 'unknown-service', `${vip}/${protocolName(protocol)} is no service here`);
        continue;
      }
      const port = words[word + R.REPLY_PORTS]! >>> 16;
      const backend = identities.findBackend(service, words[word + R.BACKEND]! >>> 0, port);
      if (backend === undefined || snapshot.cutAt[backend.id] !== Number.POSITIVE_INFINITY) {
        const text = formatEndpoint(words[word + R.BACKEND]!, port);
        this.#refuse(line, 'unknown-backend', `${text} is no backend of ${identities.serviceName(service)}`);
        continue;
      }
      if (!this.#fitsMode(batch, row, service)) continue;
      words[word + R.SERVICE] = service;
      words[word + R.BACKEND_ID] = backend.id;
      const type = bytes[row * R.RECORD_BYTES + R.TYPE]!;
      const longestMs = snapshot.timeouts[timerOf(type, bytes[row * R.RECORD_BYTES + R.STATE]!)]!;
      const double = row * R.RECORD_DOUBLES;
      doubles[double + R.EXPIRES] = Math.min(doubles[double + R.EXPIRES]!, nowMs + longestMs);
      batch.add(batch.rows, row, line);
    }
  }

  /** What admission would not have let in must not come in this way. */
  #fitsMode(batch: Batch, row: number, service: number): boolean {
    const { words, bytes } = batch.rows;
    const { snapshot, identities } = this.#parts.desired;
    const word = row * R.RECORD_WORDS;
    const line = batch.lines[row]!;
    const name = identities.serviceName(service);
    const client = words[word + R.CLIENT]!;
    const isVip = lookup(snapshot.vipIndex, client, 0, 0) !== 0;
    if (isVip || lookup(snapshot.snatIndex, client, 0, 0) !== 0) {
      const what = isVip ? 'a VIP' : 'an snat address';
      this.#refuse(line, 'hairpin-refused', `the client ${formatIpv4(client)} is ${what}`);
      return false;
    }
    const mode = snapshot.services[service * S.SERVICE_WORDS + S.SERVICE_MODE]!;
    const isOneWay = bytes[row * R.RECORD_BYTES + R.TYPE] === R.TYPE_SVC;
    if (isOneWay !== (mode === S.MODE_DSR)) {
      const is = isOneWay ? 'one-way' : 'two-way';
      this.#refuse(line, 'wrong-mode', `flows of ${name} are ${isOneWay ? 'two-way' : 'one-way'} and this is ${is}`);
      return false;
    }
    if (isOneWay) return true;
    const source = words[word + R.RETURN]!;
    if (lookup(snapshot.snatIndex, source, 0, 0) !== 0) return true;
    const clientPort = words[word + R.ORIGINAL_PORTS]! >>> 16;
    const isDirect = source === client && (words[word + R.REPLY_PORTS]! & 0xffff) === clientPort;
    if (mode === S.MODE_SNAT || !isDirect) {
      this.#refuse(line, 'wrong-mode', `${name} needs an snat address here, which ${formatIpv4(source)} is not`);
      return false;
    }
    if (words[word + R.BACKEND] === client) {
      this.#refuse(line, 'hairpin-refused', `${formatIpv4(client)} is client and backend`);
      return false;
    }
    return true;
  }

  #tally(outcome: number, batch: Batch, row: number): void {
    if (outcome === ADOPTED) this.#imported++;
    else if (outcome === UPDATED) this.#updated++;
    else if (outcome === EXISTS) this.#skipped.exists++;
    else if (outcome === TABLE_FULL) {
      this.#refuse(batch.lines[row]!, 'table-full', 'the table is full of established connections');
    } else {
      this.#refuse(batch.lines[row]!, 'tuple-taken', 'another connection here has the tuple of its client or backend');
    }
  }

  /** Two batches and the parser refuse in no order: the lowest lines are kept. */
  #refuse(line: number, reason: SkipReason, message: string): void {
    this.#skipped[reason]++;
    const refused = this.#refused;
    if (refused.length === NAMED_REFUSALS) {
      if (refused.at(-1)!.line < line) return;
      refused.pop();
    }
    refused.push({ line, reason, message });
    refused.sort((a, b) => a.line - b.line);
  }
}

/** Up to ADOPT_RECORDS records for one table, with the lines they came from. */
class Batch {
  readonly table: 'tcp' | 'any';
  /** One more: the row that is being read. */
  readonly rows = new RecordRows(new Int32Array((ADOPT_RECORDS + 1) * R.RECORD_WORDS));
  readonly lines = new Float64Array(ADOPT_RECORDS);
  count = 0;

  constructor(table: 'tcp' | 'any') {
    this.table = table;
  }

  /** Adds a row, which may be one of its own that lies at or behind its end. */
  add({ words }: RecordRows, row: number, line: number): void {
    const from = row * R.RECORD_WORDS;
    this.rows.words.set(words.subarray(from, from + R.RECORD_WORDS), this.count * R.RECORD_WORDS);
    this.lines[this.count] = line;
    this.count++;
  }

  /** The records from `first` on, in a buffer of their own. */
  copy(first: number): Int32Array {
    return this.rows.words.slice(first * R.RECORD_WORDS, this.count * R.RECORD_WORDS);
  }
}

/** The lines of each chunk, without their ends; null for one that is longer than MAX_LINE_BYTES. */
async function* splitLines(body: AsyncIterable<Uint8Array>): AsyncGenerator<(string | null)[]> {
  let held = Buffer.alloc(0);
  let isTooLong = false;
  const finish = (rest: Buffer): string | null => {
    const line =
      isTooLong || held.length + rest.length > MAX_LINE_BYTES ? null : Buffer.concat([held, rest]).toString();
    held = Buffer.alloc(0);
    isTooLong = false;
    return line;
  };
  try {
    for await (const chunk of body) {
      const bytes = Buffer.from(chunk.buffer, chunk.byteOffset, chunk.byteLength);
      const lines: (string | null)[] = [];
      let from = 0;
      for (let end = bytes.indexOf(NEWLINE); end >= 0; end = bytes.indexOf(NEWLINE, from)) {
        lines.push(finish(bytes.subarray(from, end)));
        from = end + 1;
      }
      isTooLong ||= held.length + bytes.length - from > MAX_LINE_BYTES;
      held = isTooLong ? Buffer.alloc(0) : Buffer.concat([held, bytes.subarray(from)]);
      yield lines;
    }
  } catch (error) {
    throw new WeirError(
      'FLOWS_INVALID',
      'the sender went away before the end',
      'Send it again from the beginning.',
      error,
    );
  }
  if (isTooLong || held.length > 0) yield [finish(Buffer.alloc(0))];
}

const NEWLINE = 10;

function invalid(message: string): WeirError {
  return new WeirError('FLOWS_INVALID', message, 'Give it what `weir ct export` of the same release wrote.');
}
