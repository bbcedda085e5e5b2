import { execFileSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmdirSync, rmSync, truncateSync, unlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setImmediate } from 'node:timers/promises';
import t from 'tap';
import { ManualClock } from '../../lib/base/clock.js';
import { MAX_CONFIG_BYTES } from '../../lib/base/limits.js';
import { readConfigText, requireConfig } from '../../lib/config/load.js';
import { allocateTable } from '../../lib/conntrack/memory.js';
import { TableReader } from '../../lib/conntrack/table-reader.js';
import { Desired } from '../../lib/control/desired.js';
import { EventLog } from '../../lib/control/log.js';
import { Reloader, type ReloaderParts } from '../../lib/control/reloader.js';
import * as S from '../../lib/datapath/snapshot.js';
import { STAT_RX_PACKETS } from '../../lib/datapath/stats.js';

const folder = mkdtempSync(join(tmpdir(), 'weir-reloader-'));
t.teardown(() => rmSync(folder, { recursive: true }));
const path = join(folder, 'weir.yaml');

function text(weights: Record<string, number>, more = ''): string {
  const members = Object.entries(weights).map(
    ([name, weight]) => `{ name: ${name}, address: 10.2.0.${name.slice(1)}, port: 80, weight: ${weight} }`,
  );
  const health = 'health: { type: tcp }';
  return `services: [{ name: web, address: 10.96.0.1, port: 80, ${health}, backends: [${members.join(', ')}] }]\n${more}`;
}

/** A reloader whose data path takes snapshots when the test says so, and whose kernel takes everything. */
class Office {
  readonly lines: Record<string, unknown>[] = [];
  readonly published: S.Snapshot[] = [];
  readonly down = new Set<string>();
  readonly desired: Desired;
  readonly reloader: Reloader;
  applied = 0;
  /** The data path's answers that are awaited. */
  #held: (() => void)[] | undefined;
  /** Snapshots on their way, and the most there were at once. */
  #underWay = 0;
  mostUnderWay = 0;

  updateNetwork = (): { commands: string[]; notes: string[] } => ({ commands: [], notes: [] });

  constructor(reader = new TableReader(allocateTable(16))) {
    const configText = readConfigText(path);
    const clock = new ManualClock();
    this.desired = new Desired(requireConfig(path, configText), 0, undefined, ({ name }) => !this.down.has(name));
    this.reloader = new Reloader({
      configPath: path,
      configText,
      desired: this.desired,
      path: {
        stats: new Float64Array(STAT_RX_PACKETS + 1),
        publish: (snapshot: S.Snapshot) => this.#publish(snapshot),
      } as unknown as ReloaderParts['path'],
      network: { update: async () => this.updateNetwork() } as unknown as ReloaderParts['network'],
      readers: { tcp: reader, any: reader },
      clock,
      log: new EventLog({ write: (line) => void this.lines.push(JSON.parse(line)) }),
      onApplied: () => {
        this.applied++;
      },
    });
  }

  hold(): void {
    this.#held = [];
  }

  release(): void {
    for (const resolve of this.#held ?? []) resolve();
    this.#held = undefined;
  }

  /** Names of the backends that take new flows, as of the last snapshot that was published. */
  takers(): string[] {
    const { backends } = this.published.at(-1)!;
    return this.desired
      .configured()[0]!
      .backends.filter(({ id }) => backends[id * S.BACKEND_WORDS + S.BACKEND_FLAGS]! & S.TAKES_NEW)
      .map(({ backend }) => backend.name);
  }

  events(): unknown[] {
    return this.lines.map(({ event }) => event);
  }

  async #publish(snapshot: S.Snapshot): Promise<void> {
    this.published.push(snapshot);
    this.mostUnderWay = Math.max(this.mostUnderWay, ++this.#underWay);
    if (this.#held !== undefined) await new Promise<void>((resolve) => this.#held!.push(resolve));
    else await setImmediate();
    this.#underWay--;
  }
}

t.test('many changes of health are one snapshot, and none is lost', async (t) => {
  writeFileSync(path, text({ b1: 1, b2: 1, b3: 1 }));
  const office = new Office();
  const { reloader, down, published } = office;
  down.add('b1');
  await Promise.all(Array.from({ length: 100 }, () => reloader.refreshHealth()));
  t.equal(published.length, 1);
  t.strictSame(office.takers(), ['b2', 'b3']);

  office.hold();
  const first = reloader.refreshHealth();
  while (published.length < 2) await new Promise((resolve) => setTimeout(resolve, 5));
  down.add('b2');
  const second = reloader.refreshHealth();
  t.not(first, second, 'what changes while one is on its way needs another');
  down.delete('b1');
  t.equal(reloader.refreshHealth(), second);
  office.release();
  await second;
  t.equal(published.length, 3);
  t.strictSame(office.takers(), ['b1', 'b3']);
  t.strictSame([reloader.version, office.applied, office.lines], [1, 0, []], 'none of this is a reload');
  const late = reloader.refreshHealth();
  await reloader.close();
  await late;
  t.equal(published.length, 3, 'after the end there is nothing more');
});

t.test('a thousand backends go up and down while files come', async (t) => {
  const names = Array.from({ length: 1000 }, (_, i) => `b${i}`);
  const fileWithout = (left: number): string => {
    const members = names
      .filter((_, i) => i % 10 !== left)
      .map((name, i) => `{ name: ${name}, address: 10.2.${i >> 8}.${i & 255}, port: ${1000 + Number(name.slice(1))} }`);
    return `services: [{ name: web, address: 10.96.0.1, port: 80, health: { type: tcp }, backends: [${members.join(', ')}] }]`;
  };
  writeFileSync(path, fileWithout(0));
  const office = new Office();
  const { reloader, down, published } = office;
  const changes: Promise<unknown>[] = [];
  for (let round = 0; round < 40; round++) {
    for (let i = round; i < 1000; i += 7) {
      if (!down.delete(names[i]!)) down.add(names[i]!);
      changes.push(reloader.refreshHealth());
    }
    if (round % 8 === 7) {
      writeFileSync(path, fileWithout(round >> 3));
      changes.push(reloader.reload());
    }
    await setImmediate();
  }
  await Promise.all(changes);
  t.equal(office.mostUnderWay, 1, 'one at a time');
  t.ok(published.length <= 40 + 5 + 1, `${published.length} snapshots for ${changes.length} changes`);
  const expected = names.filter((name, i) => i % 10 !== 4 && !down.has(name));
  t.strictSame(office.takers().sort(), expected.sort(), 'and the last has it all');
  t.equal(reloader.last.success, true);
  await reloader.close();
});

t.test('what cannot be tidied up after a reload does not undo it', async (t) => {
  writeFileSync(path, text({ b1: 1, b2: 1 }));
  const office = new Office();
  let calls = 0;
  office.updateNetwork = () => {
    if (++calls === 2) throw new Error('ip failed');
    return { commands: ['ip'], notes: [] };
  };
  writeFileSync(path, text({ b1: 1 }));
  t.match(await office.reloader.reload(), { backends: 1, removedBackends: 0, commands: ['ip'] });
  t.equal(calls, 2);
  t.match([office.reloader.version, office.applied, office.reloader.refusals], [2, 1, 0]);
  t.match(office.reloader.last, { success: true });
  t.ok(office.events().includes('step-failed'));
  await office.reloader.close();
});

t.test('whoever stops weir does not wait for a walk through a large table', async (t) => {
  writeFileSync(path, text({ b1: 1, b2: 1 }));
  const reader = new TableReader(allocateTable(16));
  let walked = 0;
  Object.defineProperty(reader, 'highWater', { value: 500_000 });
  for (const walk of ['tally', 'visitLive'] as const) {
    Object.defineProperty(reader, walk, {
      value: (_: number, count: number) => {
        walked += count;
        if (walked === 5 * count) closing = office.reloader.close();
      },
    });
  }
  let closing: Promise<void> | undefined;
  const office = new Office(reader);
  writeFileSync(path, text({ b1: 1 }));
  t.match(await office.reloader.reload(), { removedBackends: 1 });
  await closing;
  t.equal(walked, 5 * 8192);
  t.strictSame(office.reloader.last.success, true);
});

t.test('the file is read again if it is another, and judged once', async (t) => {
  writeFileSync(path, text({ b1: 1 }));
  const office = new Office();
  const { reloader } = office;
  await reloader.reloadIfChanged();
  t.strictSame(office.events(), [], 'the file of the start');
  writeFileSync(path, text({ b1: 1, b2: 1 }));
  for (let i = 0; i < 3; i++) await reloader.reloadIfChanged();
  t.strictSame(office.events(), ['reload-applied']);
  t.strictSame([reloader.version, office.applied, reloader.last.success], [2, 1, true]);
  const { appliedAt } = reloader;

  writeFileSync(path, text({ b1: 1, b2: 1 }).slice(0, 60));
  for (let i = 0; i < 3; i++) await reloader.reloadIfChanged();
  t.strictSame(office.events().slice(1), ['reload-refused']);
  t.match(office.lines.at(-1), { code: 'CONFIG_INVALID', problems: [{ line: Number, column: Number }] });
  await t.rejects(reloader.reload(true), { code: 'CONFIG_INVALID' }, 'whoever asks is told');
  t.equal(office.events().length, 2, 'and the log not once more');
  await t.rejects(reloader.reload(), { code: 'CONFIG_INVALID' }, 'but where only the log tells, it does');
  const both = [reloader.reload(true), reloader.reload(), reloader.reload(true)];
  for (const each of both) await t.rejects(each);
  t.equal(office.events().length, 4, 'also if somebody else asked at that moment');
  unlinkSync(path);
  for (let i = 0; i < 3; i++) await reloader.reloadIfChanged();
  t.strictSame(office.events().slice(4), ['reload-refused']);
  t.match(reloader.last, { success: false, message: /it does not exist/ });
  t.strictSame([reloader.version, reloader.appliedAt], [2, appliedAt], 'what is in use is as old as it was');

  writeFileSync(path, text({ b1: 1, b2: 1 }));
  for (let i = 0; i < 3; i++) await reloader.reloadIfChanged();
  t.strictSame(office.events().slice(5), ['reload-applied'], 'the former contents are taken anew');
  await reloader.reload();
  t.equal(reloader.version, 4, 'a command does not ask whether anything has changed');
  await reloader.close();
});

t.test('what is no file, is too large or has mistakes without end is refused at once', async (t) => {
  writeFileSync(path, text({ b1: 1 }));
  const office = new Office();
  const { reloader, lines } = office;
  unlinkSync(path);
  // Nobody writes to it: whoever waited for that would wait for ever.
  execFileSync('mkfifo', [path]);
  await t.rejects(reloader.reload(), { code: 'CONFIG_UNREADABLE', message: /is no file/ });
  unlinkSync(path);
  mkdirSync(path);
  await t.rejects(reloader.reload(), { code: 'CONFIG_UNREADABLE', message: /is no file/ });
  rmdirSync(path);
  writeFileSync(path, '');
  truncateSync(path, MAX_CONFIG_BYTES + 1);
  await t.rejects(reloader.reload(), { code: 'CONFIG_UNREADABLE', message: /has 8388609 bytes, and may have 8388608/ });
  writeFileSync(path, 'k: v\n'.repeat(20_000));
  await t.rejects(reloader.reload(), {
    code: 'CONFIG_INVALID',
    message: /\n19,900 more mistakes|\n19900 more mistakes/,
  });
  t.equal((lines.at(-1)!.problems as unknown[]).length, 100);
  t.ok(reloader.last.message.length < 100_000, 'and told in few words');
  writeFileSync(path, text({ b1: 2 }));
  await reloader.reload();
  t.equal(reloader.version, 2);
  await reloader.close();
});

t.test('reloads that wait for their turn are one, which reads what was written before any of them', async (t) => {
  writeFileSync(path, text({ b1: 1 }));
  const office = new Office();
  const { reloader, published } = office;
  office.hold();
  const first = reloader.reload();
  while (published.length < 1) await new Promise((resolve) => setTimeout(resolve, 5));
  writeFileSync(path, text({ b1: 1, b2: 1 }));
  const storm = Array.from({ length: 1000 }, () => reloader.reload());
  office.release();
  await Promise.all([first, ...storm]);
  t.strictSame([reloader.version, published.length], [3, 2]);
  t.strictSame(office.takers(), ['b1', 'b2']);
  await reloader.reload();
  t.equal(reloader.version, 4);
  await reloader.close();
});

t.test('drains by command, between reloads', async (t) => {
  writeFileSync(path, text({ b1: 1, b2: 1 }));
  const office = new Office();
  const { reloader, published } = office;
  office.hold();
  const reload = reloader.reload();
  const drain = reloader.setDrained('web', 'b1', true);
  while (published.length === 0) await new Promise((resolve) => setTimeout(resolve, 5));
  t.strictSame(office.takers(), ['b1', 'b2'], 'a command waits for the reload before it');
  office.release();
  await reload;
  t.match(await drain, { name: 'b1', weight: 1, changed: true });
  t.strictSame(office.takers(), ['b2']);
  t.match(await reloader.setDrained('web', '10.2.0.1', true), { changed: false });
  t.equal(published.length, 2, 'what is so already needs no snapshot');
  await reloader.reload();
  t.strictSame(office.takers(), ['b2']);
  await t.rejects(reloader.setDrained('web', 'b9', true), { code: 'USAGE' });

  writeFileSync(path, text({ b1: 5, b2: 1 }));
  await reloader.reload();
  t.strictSame(office.takers(), ['b1', 'b2']);
  t.match(await reloader.setDrained('web', 'b1', false), { changed: false, weight: 5 });
  t.match(
    office.lines.filter(({ event }) => String(event).startsWith('drain-')),
    [
      { event: 'drain-begun', service: 'web', backend: 'b1' },
      { event: 'drain-ended', msg: 'web/b1 is no longer drained by command: the file has changed it' },
    ],
  );
  await reloader.close();
  await t.rejects(reloader.setDrained('web', 'b1', true), { code: 'NOT_RUNNING' });
});
