import { execFileSync } from 'node:child_process';
import {
  appendFileSync,
  closeSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readFileSync,
  renameSync,
  rmSync,
  symlinkSync,
  unlinkSync,
  utimesSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import t from 'tap';
import { ConfigWatch, MAX_DELAY_MS, POLL_MS, QUIET_MS } from '../../lib/control/config-watch.js';

t.setTimeout(900_000);

const root = mkdtempSync(join(tmpdir(), 'weir-watch-'));
t.teardown(() => rmSync(root, { recursive: true }));
let folders = 0;

function newFolder(): string {
  const folder = join(root, String(folders++));
  mkdirSync(folder);
  return folder;
}

/** A watch, and what was in the file each time it told of a change. */
class Watched {
  readonly seen: string[] = [];
  readonly #watch: ConfigWatch;
  #wake: () => void = () => {};

  constructor(path: string, hearEvents = true) {
    this.#watch = new ConfigWatch({
      path,
      hearEvents,
      onChange: async () => {
        this.seen.push(contents(path));
        this.#wake();
      },
    });
  }

  /** Resolves when the last thing seen is this, with the time it took. */
  async sees(text: string): Promise<number> {
    const beganMs = performance.now();
    while (this.seen.at(-1) !== text) {
      await new Promise<void>((resolve) => {
        this.#wake = resolve;
      });
    }
    return performance.now() - beganMs;
  }

  close(): Promise<void> {
    return this.#watch.close();
  }
}

function contents(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch (error) {
    return (error as NodeJS.ErrnoException).code!;
  }
}

/** How a file is replaced: a place is made, and then comes one text after the other. */
const WAYS: Readonly<Record<string, (folder: string, path: string) => (text: string) => void>> = {
  'written in place': (_, path) => (text) => writeFileSync(path, text),
  'appended to': (_, path) => (text) => appendFileSync(path, text.slice(contents(path).length)),
  'an atomic rename': (folder, path) => (text) => {
    writeFileSync(join(folder, '.new'), text);
    renameSync(join(folder, '.new'), path);
  },
  'a rename from another folder': (_, path) => (text) => {
    const elsewhere = join(newFolder(), 'new');
    writeFileSync(elsewhere, text);
    renameSync(elsewhere, path);
  },
  'deleted and created': (_, path) => (text) => {
    unlinkSync(path);
    writeFileSync(path, text);
  },
  'a mounted ConfigMap': (folder, path) => {
    let generation = 0;
    const publish = (text: string): void => {
      const before = generation++;
      mkdirSync(join(folder, `..${generation}`));
      writeFileSync(join(folder, `..${generation}`, 'weir.yaml'), text);
      symlinkSync(`..${generation}`, join(folder, '..data_tmp'));
      renameSync(join(folder, '..data_tmp'), join(folder, '..data'));
      if (before > 0) rmSync(join(folder, `..${before}`), { recursive: true });
    };
    publish('first');
    unlinkSync(path);
    symlinkSync('..data/weir.yaml', path);
    return publish;
  },
  'a link far away that leads elsewhere': (folder, path) => {
    const far = newFolder();
    let generation = 0;
    const publish = (text: string): void => {
      const target = join(newFolder(), `weir-${++generation}.yaml`);
      writeFileSync(target, text);
      symlinkSync(target, join(far, 'next'));
      renameSync(join(far, 'next'), join(far, 'current'));
    };
    publish('first');
    symlinkSync(far, join(folder, 'link'));
    unlinkSync(path);
    symlinkSync('link/current', path);
    return publish;
  },
  'the whole folder': (folder, path) => (text) => {
    const next = newFolder();
    writeFileSync(join(next, 'weir.yaml'), text);
    renameSync(folder, newFolder());
    renameSync(next, folder);
    if (contents(path) !== text) throw new Error('not replaced');
  },
};

for (const hearEvents of [true, false]) {
  t.test(`every way of replacing it, ${hearEvents ? 'heard of' : 'without events'}`, async (t) => {
    t.ok(Math.max(POLL_MS + QUIET_MS, MAX_DELAY_MS) < 2000, 'within 2 s, if the machine has time');
    const cases = Object.entries(WAYS).map(async ([name, prepare]) => {
      const folder = newFolder();
      const path = join(folder, 'weir.yaml');
      writeFileSync(path, 'first');
      const replace = prepare(folder, path);
      const watched = new Watched(path, hearEvents);
      await watched.sees('first');
      const tookMs: number[] = [];
      for (const text of ['first, second', 'first, second, third', 'first, second, third, fourth']) {
        replace(text);
        tookMs.push(await watched.sees(text));
      }
      await watched.close();
      t.pass(`${name}: after ${tookMs.map((ms) => `${Math.round(ms)} ms`).join(', ')}`);
    });
    await Promise.all(cases);
  });
}

t.test('half-written, then whole', async (t) => {
  const path = join(newFolder(), 'weir.yaml');
  writeFileSync(path, 'old');
  const watched = new Watched(path);
  await watched.sees('old');
  for (const round of ['a', 'b', 'c']) {
    const fd = openSync(path, 'w');
    writeSync(fd, `${round} half`);
    await watched.sees(`${round} half`);
    writeSync(fd, ' whole');
    closeSync(fd);
    await watched.sees(`${round} half whole`);
  }
  for (let i = 0; i < 50; i++) writeFileSync(path, `burst ${i}`);
  const before = watched.seen.length;
  await watched.sees('burst 49');
  t.ok(watched.seen.length - before <= 3, 'many writes in a row are few changes');
  await watched.close();
});

t.test('deleted: told once; back: told again', async (t) => {
  const path = join(newFolder(), 'weir.yaml');
  writeFileSync(path, 'old');
  const watched = new Watched(path);
  await watched.sees('old');
  unlinkSync(path);
  await watched.sees('ENOENT');
  await sleep(POLL_MS + QUIET_MS);
  writeFileSync(path, 'old');
  await watched.sees('old');
  t.strictSame(watched.seen, ['old', 'ENOENT', 'old']);
  rmSync(join(path, '..'), { recursive: true });
  await watched.sees('ENOENT');
  mkdirSync(join(path, '..'));
  writeFileSync(path, 'new');
  await watched.sees('new');
  await watched.close();
});

t.test('what does not concern it', async (t) => {
  const folder = newFolder();
  const path = join(folder, 'weir.yaml');
  writeFileSync(path, 'old');
  const watched = new Watched(path);
  await watched.sees('old');
  for (let i = 0; i < 30; i++) {
    writeFileSync(join(folder, 'weir.log'), String(i));
    await sleep(50);
  }
  t.strictSame(watched.seen, ['old'], 'another file in its folder, for longer than it waits for quiet');
  utimesSync(path, new Date(), new Date(0));
  while (watched.seen.length < 2) await sleep(20);
  t.strictSame(watched.seen, ['old', 'old'], 'a touch is told: the contents are for others to compare');
  await watched.close();
  writeFileSync(path, 'late');

  const fifo = join(folder, 'fifo');
  execFileSync('mkfifo', [fifo]);
  const pipe = new Watched(fifo);
  await sleep(POLL_MS + QUIET_MS + MAX_DELAY_MS);
  t.strictSame(pipe.seen, [], 'a pipe is never read again');
  await pipe.close();
  t.strictSame(watched.seen.length, 2, 'nor is anything told after the end');
});
