import { existsSync, realpathSync } from 'node:fs';
import { resolve } from 'node:path';
import { WeirError } from '../base/errors.js';
import { REASON } from '../base/reasons.js';
import type { Config } from '../config/config.js';
import { requireConfig } from '../config/load.js';
import { Progress } from '../control/progress.js';
import { DIRECTION_NONE, DROP, VERDICT_NAMES } from '../datapath/verdict.js';
import { CaptureFile, OutputFile } from '../io/capture-file.js';
import { PcapDevice } from '../io/pcap-device.js';
import { Journal } from './journal.js';
import { Session } from './session.js';
import { clockMs, loadTimeline, type TimelineEvent, timelineError } from './timeline.js';

/**
 * `weir replay`: the data path on a capture, with the timestamps as its clock. No root, no device, and the same bytes on every
 * run: nothing here reads a clock, draws from the system or depends on how fast it is.
 *
 *     receive a packet -> events and work that fall due before its time -> pipeline -> its line
 *
 * Packets go through one at a time, since each has its own time. The clock never goes back: a packet that is older than the
 * one before it is handled at the time of that one, while its line and what it causes keep its own.
 */
export interface ReplayOptions {
  /** Paths of the configuration and the capture. */
  readonly config: string;
  readonly in: string;
  /** Paths of what is written: packets (pcap), their account (JSON lines), the table at the end (JSON). */
  readonly out: string;
  readonly json: string;
  readonly conntrack?: string;
  readonly timeline?: string;
  /** Of the lots drawn and the secret of the tables; an integer, default 1. */
  readonly seed?: number;
  /** Begin as after a start without a table: replies with no entry may be picked up. */
  readonly recovering?: boolean;
}

export interface ReplaySummary {
  readonly packets: number;
  readonly emitted: number;
  /** From the first packet to the last packet or event. */
  readonly seconds: number;
  /** Packets by verdict. */
  readonly verdicts: Readonly<Record<string, number>>;
}

/**
 * Runs a replay. All inputs are judged before an output is touched, but for the packets of the capture; when it turns out to be
 * cut short, the outputs hold all that came before.
 *
 * @throws WeirError CONFIG_UNREADABLE, CONFIG_INVALID, TIMELINE_INVALID, CAPTURE_INVALID, NOT_SUPPORTED, or USAGE when an
 * output cannot be written or would overwrite another file of the replay.
 */
export function replay(options: ReplayOptions): ReplaySummary {
  refuseOverwriting(options);
  const config = requireConfig(options.config);
  const timeline = options.timeline === undefined ? [] : loadTimeline(options.timeline);
  const configs = loadConfigs(timeline, config, options.timeline ?? '');
  const capture = new CaptureFile(options.in);
  try {
    const outputs: OutputFile[] = [];
    const open = (path: string): OutputFile => {
      outputs.push(new OutputFile(path));
      return outputs.at(-1)!;
    };
    try {
      const out = open(options.out);
      const json = open(options.json);
      const conntrack = options.conntrack === undefined ? undefined : open(options.conntrack);
      return run(options, config, timeline, configs, capture, out, json, conntrack);
    } finally {
      for (const output of outputs) output.close();
    }
  } finally {
    capture.close();
  }
}

function run(
  options: ReplayOptions,
  config: Config,
  timeline: readonly TimelineEvent[],
  configs: ReadonlyMap<string, Config>,
  capture: CaptureFile,
  out: OutputFile,
  json: OutputFile,
  conntrack: OutputFile | undefined,
): ReplaySummary {
  const journal = new Journal((bytes) => json.write(bytes));
  const device = new PcapDevice({
    input: capture.reader,
    write: (bytes) => out.write(bytes),
    onTransmit: (bytes, offset, length) => journal.emitted(bytes, offset, length),
  });
  const session = new Session(config, device, { seed: options.seed ?? 1, recovering: options.recovering ?? false });
  const progress = new Progress(options.in, (packets) => `replayed ${packets} packets`);
  const verdicts = new Map<number, number>();
  let firstSeconds = 0;
  let firstNanoseconds = 0;
  let isTimed = false;
  let nextEvent = 0;

  /** What is sent meanwhile, a reset for example, gets the time of the event. */
  const applyEventsUntil = (ms: number): void => {
    for (; nextEvent < timeline.length && timeline[nextEvent]!.atMs <= ms; nextEvent++) {
      const event = timeline[nextEvent]!;
      session.advance(event.atMs);
      const nanoseconds = firstNanoseconds + Math.round(session.nowMs * 1e6);
      device.seconds = firstSeconds + Math.floor(nanoseconds / 1e9);
      device.nanoseconds = nanoseconds % 1e9;
      if (event.kind === 'config') session.reload(configs.get(event.path)!);
      else if (event.kind === 'health') session.setHealth(event.backend, event.isUp);
    }
  };

  try {
    while (device.receive() > 0) {
      if (device.isTimed && !isTimed) {
        isTimed = true;
        firstSeconds = device.seconds;
        firstNanoseconds = device.nanoseconds;
      }
      const { seconds, nanoseconds } = device;
      const borrow = nanoseconds < firstNanoseconds ? 1 : 0;
      const t = seconds - firstSeconds - borrow;
      const tNanoseconds = nanoseconds - firstNanoseconds + borrow * 1e9;
      const ms = clockMs(t, tNanoseconds);
      applyEventsUntil(ms);
      session.advance(ms);
      device.seconds = seconds;
      device.nanoseconds = nanoseconds;

      const verdict = handlePacket(device, session, journal, t, tNanoseconds);
      verdicts.set(verdict, (verdicts.get(verdict) ?? 0) + 1);
      progress.step(capture.bytesRead);
    }
    applyEventsUntil(Number.POSITIVE_INFINITY);
    if (conntrack !== undefined) {
      for (const chunk of session.formatConntrack('json')) conntrack.write(Buffer.from(chunk));
    }
  } finally {
    progress.end();
    journal.flush();
    device.close();
  }
  return {
    packets: journal.lines,
    emitted: journal.emittedCount,
    seconds: session.nowMs / 1000,
    verdicts: Object.fromEntries(VERDICT_NAMES.map((name, verdict) => [name, verdicts.get(verdict) ?? 0])),
  };
}

/** Takes the packet that the device delivered to its end and writes its line. Returns its verdict. */
function handlePacket(
  device: PcapDevice,
  session: Session,
  journal: Journal,
  seconds: number,
  nanoseconds: number,
): number {
  if (device.isIp[0] === 0) {
    device.release(device.rx.slot[0]!);
    const reason = REASON['unsupported-protocol'];
    journal.line(seconds, nanoseconds, { ...NOTHING_KNOWN, verdict: DROP, reason });
    return DROP;
  }
  session.process();
  const { results, names } = session;
  const verdict = results.verdict[0]!;
  journal.line(seconds, nanoseconds, {
    verdict,
    reason: results.reason[0]!,
    direction: results.direction[0]!,
    state: results.state[0]!,
    service: names.serviceName(results.service[0]!),
    backend: names.backendName(results.backend[0]!),
  });
  return verdict;
}

const NOTHING_KNOWN = { direction: DIRECTION_NONE, state: 0, service: undefined, backend: undefined };

/** Loads every configuration of the timeline, and checks that each backend it speaks of is there at that moment. */
function loadConfigs(timeline: readonly TimelineEvent[], first: Config, file: string): Map<string, Config> {
  const configs = new Map<string, Config>();
  let current = first;
  for (const event of timeline) {
    if (event.kind === 'config') {
      current = configs.get(event.path) ?? loadEventConfig(event.path, event, file);
      requireRole(current, event.path, first);
      configs.set(event.path, current);
    } else if (event.kind === 'health') {
      const known = current.services.flatMap(({ name, backends }) =>
        backends.map((backend) => `${name}/${backend.name}`),
      );
      if (known.includes(event.backend)) continue;
      const list = known.length === 0 ? 'there are none' : `there are ${known.slice(0, 20).join(', ')}`;
      throw timelineError(file, event, `no backend is called ${event.backend} at that moment; ${list}`);
    }
  }
  return configs;
}

function loadEventConfig(path: string, event: TimelineEvent, file: string): Config {
  try {
    return requireConfig(path);
  } catch (error) {
    if (error instanceof WeirError && error.code === 'CONFIG_UNREADABLE')
      throw timelineError(file, event, error.message);
    throw error;
  }
}

function requireRole({ role }: Config, path: string, first: Config): void {
  if (role === first.role) return;
  throw new WeirError(
    'NOT_SUPPORTED',
    `${path} has role ${role}, but the replay begins as a ${first.role}`,
    'A reload cannot change the role: replay each by itself.',
  );
}

/** An output that is also an input, or another output, would be lost without a word. */
function refuseOverwriting({ config, in: input, timeline, out, json, conntrack }: ReplayOptions): void {
  const taken = new Map<string, string>();
  const paths: Array<[option: string, path: string | undefined, isOutput: boolean]> = [
    ['--config', config, false],
    ['--in', input, false],
    ['--timeline', timeline, false],
    ['--out', out, true],
    ['--json', json, true],
    ['--conntrack', conntrack, true],
  ];
  for (const [option, path, isOutput] of paths) {
    if (path === undefined) continue;
    const real = existsSync(path) ? realpathSync(path) : resolve(path);
    const other = taken.get(real);
    if (isOutput && other !== undefined && !real.startsWith('/dev/')) {
      throw new WeirError('USAGE', `${option} and ${other} are the same file, ${path}`, 'Give each its own.');
    }
    taken.set(real, option);
  }
}
