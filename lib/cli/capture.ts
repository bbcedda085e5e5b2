import { WeirError } from '../base/errors.js';
import { plural } from '../control/summary.js';
import { OutputFile } from '../io/capture-file.js';
import { callStream } from './client.js';
import { untilStopped } from './lines.js';
import { print } from './output.js';
import type { SocketOptions } from './running.js';

export interface CaptureCommand extends SocketOptions {
  readonly service?: string;
  readonly backend?: string;
  readonly client?: string;
  readonly count?: number;
  readonly seconds?: number;
  readonly snaplen?: number;
  /** A file, or - for standard output. */
  readonly write: string;
}

/**
 * Writes a pcapng file until it has what was asked for, or a signal comes. It is whole either way: bytes are written block by
 * block. Says at the end how many packets are in it, and how many are missing.
 */
export async function capture({
  socket,
  write: file,
  count,
  seconds,
  snaplen,
  ...filter
}: CaptureCommand): Promise<void> {
  if (file === '-' && process.stdout.isTTY) {
    throw new WeirError(
      'USAGE',
      'a capture is nothing for a terminal',
      'Name a file, or pipe it: `| wireshark -k -i -`.',
    );
  }
  const blocks = new BlockReader();
  let output: OutputFile | undefined;
  const query = { ...filter, count: text(count), seconds: text(seconds), snaplen: text(snaplen) };
  try {
    await untilStopped(async (signal, stop) => {
      const accepted = (): void => {
        if (file !== '-') output = new OutputFile(file, 0o600);
      };
      const sink = async (chunk: Uint8Array): Promise<void> => {
        const whole = blocks.take(chunk);
        if (whole.length === 0) return;
        if (output === undefined) await print(whole);
        else output.write(whole);
      };
      await callStream({ socket, path: '/v1/capture', query, signal, accepted }, sink);
      // Complete: no other end is one.
      stop();
    });
  } finally {
    output?.close();
  }
  const [packetsIn, packetsOut] = blocks.packets;
  const lost = blocks.lost === 0 ? 'none lost' : `${blocks.lost} lost, having come faster than they were taken`;
  console.error(`weir: ${plural(packetsIn!, 'packet')} in, ${packetsOut} out; ${lost}.`);
}

function text(value: number | undefined): string | undefined {
  return value === undefined ? undefined : String(value);
}

const BLOCK_STATISTICS = 5;
const BLOCK_ENHANCED = 6;
const OPTION_DROPPED = 5;

/** Cuts a stream of pcapng blocks, as lib/wire/pcapng-writer.ts makes them, at their ends. */
export class BlockReader {
  /** By interface. */
  readonly packets = [0, 0];
  lost = 0;
  #rest: Uint8Array = new Uint8Array(0);

  /** @returns all blocks that are whole by now */
  take(chunk: Uint8Array): Uint8Array {
    const bytes = this.#rest.length === 0 ? chunk : Buffer.concat([this.#rest, chunk]);
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
    let at = 0;
    while (at + 8 <= bytes.length) {
      const length = view.getUint32(at + 4, true);
      if (at + length > bytes.length) break;
      this.#note(view, at, length);
      at += length;
    }
    this.#rest = bytes.slice(at);
    return bytes.subarray(0, at);
  }

  #note(view: DataView, at: number, length: number): void {
    const type = view.getUint32(at, true);
    if (type === BLOCK_ENHANCED) this.packets[view.getUint32(at + 8, true)]! += 1;
    if (type !== BLOCK_STATISTICS || view.getUint32(at + 8, true) !== 0) return;
    for (let option = at + 20; option + 12 <= at + length - 4; option += 12) {
      if (view.getUint16(option, true) === OPTION_DROPPED) this.lost = view.getUint32(option + 4, true);
    }
  }
}
