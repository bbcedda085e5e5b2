import './plain-children.js';
import { execFileSync, spawnSync } from 'node:child_process';
import t from 'tap';

t.test('a Node.js below a test loads nothing of the test runner', async (t) => {
  const script = 'process.stdout.write(JSON.stringify([process.env.NODE_OPTIONS ?? null, process.env.KEPT]))';
  const env = { ...process.env, KEPT: 'yes', NODE_OPTIONS: '--no-warnings' };
  t.same(JSON.parse(execFileSync(process.execPath, ['-e', script], { env, encoding: 'utf8' })), [null, 'yes']);
  t.same(JSON.parse(spawnSync(process.execPath, ['-e', script], { env, encoding: 'utf8' }).stdout), [null, 'yes']);
});
