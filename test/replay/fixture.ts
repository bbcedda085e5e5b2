import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { stringify } from 'yaml';
import type { FlowJson } from '../../lib/control/flows.js';
import { replay } from '../../lib/replay/replay.js';
import { pcapFile, readPcap } from '../fixtures/captures.js';
import { describe, packet } from '../fixtures/packet-text.js';
import { verifyChecksums } from '../fixtures/packets.js';

/** Runs cases of test/fixtures (see its README) through the real replay. */

export interface FixtureFile {
  readonly title: string;
  readonly names?: Readonly<Record<string, string>>;
  readonly config?: unknown;
  readonly configs?: Readonly<Record<string, unknown>>;
  /** By the mode that stands for MODE in configurations: names besides the others. Cases are run in each. */
  readonly modes?: Readonly<Record<string, Readonly<Record<string, string>>>>;
  readonly cases: readonly FixtureCase[];
}

export interface FixtureCase {
  readonly name: string;
  /** The only mode it is for. */
  readonly mode?: string;
  readonly config?: unknown;
  readonly recovering?: boolean;
  readonly seed?: number;
  readonly rows: string;
}

/** A line of OUT.jsonl. */
export interface ReplayLine {
  readonly n: number;
  readonly t: number;
  readonly verdict: string;
  readonly reason?: string;
  readonly direction?: string;
  readonly service?: string;
  readonly backend?: string;
  readonly state?: string;
  readonly out: readonly string[];
}

export interface ReplayInput {
  readonly config: unknown;
  readonly configs?: Readonly<Record<string, unknown>>;
  readonly packets: ReadonlyArray<{ readonly at: number; readonly bytes: Uint8Array }>;
  readonly events?: readonly object[];
  readonly recovering?: boolean;
  readonly seed?: number;
}

export interface ReplayOutput {
  readonly lines: readonly ReplayLine[];
  readonly conntrack: readonly FlowJson[];
  readonly sent: readonly Uint8Array[];
  /** The three files as they are. */
  readonly files: { readonly pcap: Uint8Array; readonly json: string; readonly conntrack: string };
}

/** The epoch second that packet 1 of every capture here is captured at. */
export const EPOCH_SECONDS = 1_700_000_000;

/** Writes the files of a replay, runs it, and reads what it wrote. */
export async function runReplay(input: ReplayInput): Promise<ReplayOutput> {
  const folder = mkdtempSync(join(tmpdir(), 'weir-replay-'));
  try {
    const path = (name: string): string => join(folder, name);
    writeFileSync(path('weir.yaml'), stringify(input.config, { aliasDuplicateObjects: false }));
    for (const [name, config] of Object.entries(input.configs ?? {})) {
      writeFileSync(path(`${name}.yaml`), stringify(config, { aliasDuplicateObjects: false }));
    }
    writeFileSync(path('in.pcap'), capture(input.packets));
    writeFileSync(path('t.jsonl'), (input.events ?? []).map((event) => JSON.stringify(event)).join('\n'));
    await replay({
      config: path('weir.yaml'),
      in: path('in.pcap'),
      out: path('out.pcap'),
      json: path('out.jsonl'),
      conntrack: path('ct.json'),
      timeline: path('t.jsonl'),
      ...(input.seed === undefined ? {} : { seed: input.seed }),
      ...(input.recovering === undefined ? {} : { recovering: input.recovering }),
    });
    const json = readFileSync(path('out.jsonl'), 'utf8');
    const pcap = readFileSync(path('out.pcap'));
    const conntrack = readFileSync(path('ct.json'), 'utf8');
    return {
      lines: json
        .split('\n')
        .filter((line) => line !== '')
        .map((line) => JSON.parse(line)),
      conntrack: JSON.parse(conntrack),
      sent: readPcap(pcap).records.map(({ bytes }) => bytes),
      files: { pcap, json, conntrack },
    };
  } finally {
    rmSync(folder, { recursive: true });
  }
}

/** A capture with microsecond times `at` seconds after EPOCH_SECONDS. */
export function capture(packets: ReplayInput['packets']): Uint8Array {
  return pcapFile(
    packets.map(({ at, bytes }) => {
      const microseconds = Math.round(at * 1e6);
      return {
        seconds: EPOCH_SECONDS + Math.floor(microseconds / 1e6),
        fraction: microseconds % 1e6,
        bytes,
      };
    }),
  );
}

/** The file once for each of its modes, with the cases for that one; as it is, if it has none. */
export function* inModes(file: FixtureFile): Generator<FixtureFile> {
  if (file.modes === undefined) yield file;
  for (const [mode, names] of Object.entries(file.modes ?? {})) {
    const { title, cases, ...rest } = JSON.parse(JSON.stringify(file).replaceAll('"MODE"', JSON.stringify(mode)));
    const own = (cases as readonly FixtureCase[]).filter((item) => (item.mode ?? mode) === mode);
    yield { ...rest, title: `${title}, ${mode}`, names: { ...file.names, ...names }, cases: own };
  }
}

/** Runs a case; returns what differs from what it says, one sentence each. */
export async function runCase(file: FixtureFile, item: FixtureCase): Promise<string[]> {
  const rows = parseRows(item.rows, file.names ?? {});
  const output = await runReplay({
    config: item.config ?? file.config,
    configs: file.configs ?? {},
    packets: rows.packets.map(({ at, bytes }) => ({ at, bytes })),
    events: rows.events,
    ...(item.recovering === undefined ? {} : { recovering: item.recovering }),
    ...(item.seed === undefined ? {} : { seed: item.seed }),
  });

  const problems: string[] = [];
  const sent: string[] = [];
  if (output.lines.length !== rows.packets.length)
    problems.push(`${output.lines.length} lines for ${rows.packets.length} packets`);
  for (const [i, expected] of rows.packets.entries()) {
    const line = output.lines[i];
    if (line === undefined) break;
    const where = `row ${i + 1} (${expected.text})`;
    if (line.n !== i + 1) problems.push(`${where}: n is ${line.n}`);
    problems.push(...compareLine(line, expected.is).map((problem) => `${where}: ${problem}`));
    const wanted = expected.out.map((text) => (text === 'same' ? expected.bytes : packet(text)));
    for (let k = 0; k < Math.max(wanted.length, line.out.length); k++) {
      const actual = line.out[k] === undefined ? undefined : Uint8Array.from(Buffer.from(line.out[k]!, 'hex'));
      const expectedBytes = wanted[k];
      if (actual === undefined) problems.push(`${where}: missing out: ${describe(expectedBytes!)}`);
      else if (expectedBytes === undefined) problems.push(`${where}: unexpected out: ${describe(actual)}`);
      else if (Buffer.compare(actual, expectedBytes) !== 0) {
        problems.push(`${where}:\n    out    ${describe(actual)}\n    wanted ${describe(expectedBytes)}`);
      }
    }
    for (const hex of line.out) {
      const bytes = Uint8Array.from(Buffer.from(hex, 'hex'));
      sent.push(hex);
      for (const problem of verifyChecksums(bytes)) problems.push(`${where}: sent a packet with a wrong ${problem}`);
    }
  }
  const captured = output.sent.map((bytes) => Buffer.from(bytes).toString('hex'));
  if (captured.slice(0, sent.length).join() !== sent.join()) problems.push('OUT.pcap and OUT.jsonl differ');
  if (rows.conntrack !== undefined) problems.push(...compareConntrack(output.conntrack, rows.conntrack));
  return problems;
}

interface Row {
  readonly at: number;
  readonly text: string;
  readonly bytes: Uint8Array;
  is: string;
  readonly out: string[];
}

function parseRows(text: string, names: Readonly<Record<string, string>>) {
  const packets: Row[] = [];
  const events: object[] = [];
  let conntrack: string[] | undefined;
  let now = 0;
  const resolve = (words: string): string => words.replace(/[\w.]+(?=:|\s|\]|$)/g, (word) => names[word] ?? word);
  for (const line of text.split('\n')) {
    const match = /^\s*(?:(\+?[\d.]+)\s+)?([a-z]+)\s*(.*?)\s*$/.exec(line.replace(/(^|\s)#.*$/, ''));
    if (match === null) {
      if (line.trim() === '' || line.trim().startsWith('#')) continue;
      throw new Error(`no row: ${line}`);
    }
    const [, time, word, rest = ''] = match;
    if (time !== undefined) now = time.startsWith('+') ? now + Number(time.slice(1)) : Number(time);
    switch (word) {
      case 'in':
        packets.push({ at: now, text: rest, bytes: packet(resolve(rest)), is: '', out: [] });
        break;
      case 'is':
        packets.at(-1)!.is = rest;
        break;
      case 'out':
        packets.at(-1)!.out.push(resolve(rest));
        break;
      case 'ct':
        conntrack ??= [];
        if (rest !== 'empty') conntrack.push(resolve(rest));
        break;
      case 'backend': {
        const [backend, health] = rest.split(/\s+/);
        events.push({ at: now, backend, health });
        break;
      }
      case 'config':
        events.push({ at: now, config: `${rest}.yaml` });
        break;
      case 'end':
        events.push({ at: now, end: true });
        break;
      default:
        throw new Error(`"${word}" begins no row: ${line}`);
    }
  }
  return { packets, events, conntrack };
}

function compareLine(line: ReplayLine, is: string): string[] {
  const words = is.split(/\s+/);
  const target = line.backend === undefined ? line.service : `${line.service}/${line.backend}`;
  const known = [line.verdict, line.reason, line.direction, target, line.service, line.state];
  const shown = known.filter((word, i) => word !== undefined && i !== 4).join(' ');
  if (words[0] !== line.verdict) return [`is ${shown}, wanted ${is}`];
  if (words.some((word) => !known.includes(word))) return [`is ${shown}, wanted ${is}`];
  if (line.reason !== undefined && !words.includes(line.reason)) return [`is ${shown}, wanted ${is}`];
  return [];
}

function compareConntrack(actual: readonly FlowJson[], wanted: readonly string[]): string[] {
  if (actual.length !== wanted.length)
    return [`the table has ${JSON.stringify(actual)}, wanted ${wanted.length} entries`];
  return wanted.flatMap((text, i) => {
    const flow = actual[i]!;
    const words = [flow.proto, flow.type, flow.client, flow.vip, flow.backend, flow.service, flow.state, ...flow.flags];
    const values: Record<string, string> = {
      expiresIn: String(flow.expiresIn),
      packets: `${flow.packets.original}/${flow.packets.reply}`,
      bytes: `${flow.bytes.original}/${flow.bytes.reply}`,
      snat: flow.snat ?? 'none',
    };
    return text
      .split(/\s+/)
      .filter((word) => {
        const [key, value] = word.split('=');
        return value === undefined ? !words.includes(word) : values[key!] !== value;
      })
      .map((word) => `ct entry ${i + 1}: wanted ${word}, is ${JSON.stringify(flow)}`);
  });
}
