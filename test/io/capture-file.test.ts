import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmdirSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import { OutputFile } from '../../lib/io/capture-file.js';
import { needsRoot } from '../support/skip.js';

t.test('on a disk that is full, a file ends with its last whole piece', needsRoot(t, 'mount', 'umount'), async (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'weir-test-'));
  execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=64k', 'weir-test', folder]);
  t.teardown(() => {
    execFileSync('umount', ['-l', folder]);
    rmdirSync(folder);
  });
  const path = join(folder, 'file');
  const output = new OutputFile(path, 0o600);
  const piece = Buffer.alloc(10_000, 'x');
  const fill = (): void => {
    for (;;) output.write(piece);
  };
  t.throws(fill, { code: 'OUTPUT_FAILED', message: /cannot write .*no space is left/ });
  output.close();
  t.equal(readFileSync(path).length, 60_000);
  t.equal(statSync(path).mode & 0o777, 0o600);
});
