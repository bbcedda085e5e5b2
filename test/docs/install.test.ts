import { fileURLToPath } from 'node:url';
import t from 'tap';
import { needsRoot } from '../support/skip.js';

const tools = ['ip', 'unshare', 'nsenter', 'chroot', 'mmdebstrap', 'npm', 'sysctl'];

t.test('docs/install.md, from a bare Debian', needsRoot(t, ...tools), async (t) => {
  const inside = fileURLToPath(new URL('./install-hosts.ts', import.meta.url));
  await t.spawn('unshare', ['-m', process.execPath, '--import=tsx', inside], {}, 'install-hosts');
});
