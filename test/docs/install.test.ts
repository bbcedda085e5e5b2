import { execFileSync, spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import { needsRoot, needsTools } from '../support/skip.js';

const TOOLS = [
  'ip',
  'unshare',
  'nsenter',
  'chroot',
  'mmdebstrap',
  'npm',
  'sysctl',
  'strace',
  'systemd-analyze',
  'python3',
];

function pathOf(name: string): string {
  return fileURLToPath(new URL(`../../${name}`, import.meta.url));
}

t.test('docs/install.md, from a bare Debian', needsRoot(t, ...TOOLS), async (t) => {
  const inside = fileURLToPath(new URL('./install-hosts.ts', import.meta.url));
  await t.spawn('unshare', ['-m', process.execPath, '--import=tsx', inside], {}, 'install-hosts');
});

t.test('systemd takes the unit', needsTools(t, 'systemd-analyze'), async (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'weir-unit-'));
  t.teardown(() => rmSync(folder, { recursive: true }));
  const unit = join(folder, 'weir.service');
  const text = readFileSync(pathOf('conf/weir.service'), 'utf8');
  // It judges whether the program is there as well.
  writeFileSync(unit, text.replaceAll('/usr/local/bin/weir', pathOf('bin/weir.js')));
  const { status, stdout, stderr } = spawnSync('systemd-analyze', ['verify', unit], { encoding: 'utf8' });
  t.strictSame([status, stdout + stderr], [0, '']);
  const rating = execFileSync('systemd-analyze', ['security', '--offline=true', '--no-pager', unit], {
    encoding: 'utf8',
  });
  const exposure = Number(/Overall exposure level for weir\.service: ([\d.]+)/.exec(rating)![1]);
  t.ok(exposure <= 2.5, `exposure ${exposure}`);
});
