import { spawnSync } from 'node:child_process';
import { chmodSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import { type Ended, runChild } from '../../lib/io/child.js';
import { EACCES, ENOENT } from '../../lib/io/syscalls.js';

const shell = (script: string, input = ''): Promise<Ended | number> => runChild('sh', ['-c', script], input);

t.test('what it says, and how it ends', async (t) => {
  t.strictSame(await shell('cat; echo no >&2; exit 3', 'some\ninput'), {
    stdout: 'some\ninput',
    stderr: 'no\n',
    status: 3,
    signal: null,
  });
  t.strictSame(await shell('kill -INT $$'), { stdout: '', stderr: '', status: null, signal: 'SIGINT' });
});

t.test('its arguments and environment', async (t) => {
  process.env.WEIR_CHILD_TEST = 'ä b=c';
  t.teardown(() => delete process.env.WEIR_CHILD_TEST);
  const ended = await runChild('sh', ['-c', 'echo "$WEIR_CHILD_TEST|$1|$#"', 'sh', 'x  y', ''], '');
  t.match(ended, { stdout: 'ä b=c|x  y|2\n', status: 0 });
});

t.test('much of everything; an input that nobody reads', async (t) => {
  const much = 'line of text\n'.repeat(200_000);
  const ended = (await shell('tee /dev/stderr', much)) as Ended;
  t.equal(ended.stdout, much);
  t.equal(ended.stderr, much);
  t.match(await shell('exit 0', much), { status: 0, stdout: '' });
});

t.test('what cannot be started', async (t) => {
  t.equal(await runChild('weir-no-such-program', [], ''), -ENOENT);
  const folder = mkdtempSync(join(tmpdir(), 'weir-child-'));
  t.teardown(() => rmSync(folder, { recursive: true }));
  const file = join(folder, 'program');
  writeFileSync(file, '#!/bin/sh\n');
  chmodSync(file, 0o644);
  t.equal(await runChild(file, [], ''), -EACCES);
});

t.test('in a session of its own, with nothing of ours open, and leaving nothing', async (t) => {
  const { stdout } = (await shell('cut -d" " -f1,6 /proc/$$/stat; ls /proc/self/fd | wc -l')) as Ended;
  const [ids, fds] = stdout.trim().split('\n') as [string, string];
  const [pid, session] = ids.split(' ');
  t.equal(session, pid);
  const usual = spawnSync('sh', ['-c', 'ls /proc/self/fd | wc -l'], { encoding: 'utf8' }).stdout.trim();
  t.equal(fds, usual, 'as many open files as Node gives');

  const open = (): number => readdirSync('/proc/self/fd').length;
  await shell('true');
  const before = open();
  await Promise.all(Array.from({ length: 20 }, () => shell('cat', 'x')));
  await Promise.all(Array.from({ length: 20 }, () => runChild('weir-no-such-program', [], '')));
  t.ok(open() <= before, `${open()} open files, ${before} before`);
  const children = readFileSync(`/proc/self/task/${process.pid}/children`, 'utf8').trim().split(' ').filter(Boolean);
  const dead = children.filter((child) => / Z /.test(readFileSync(`/proc/${child}/stat`, 'utf8')));
  t.strictSame(dead, [], 'none waits to be buried');
});

t.test('our memory is not copied for it', async (t) => {
  const PAGES = 16_384;
  const memory = new Uint8Array(new SharedArrayBuffer(PAGES * 4096));
  const touch = (): number => {
    const before = process.resourceUsage().minorPageFault;
    for (let page = 0; page < PAGES; page++) memory[page * 4096]!++;
    return process.resourceUsage().minorPageFault - before;
  };
  touch();
  touch();
  for (let i = 0; i < 3; i++) await shell('true');
  const faults = touch();
  t.ok(faults < PAGES / 4, `${faults} faults at ${PAGES} pages`);
});
