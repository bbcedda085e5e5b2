import { spawnSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import { needsRoot } from '../../support/skip.js';

t.test('in namespaces of its own', needsRoot(t, 'ip', 'nft', 'iptables', 'sysctl', 'unshare', 'nsenter'), async (t) => {
  const able = spawnSync('unshare', ['-nm', 'ip', 'tuntap', 'add', 'dev', 'weir-probe', 'mode', 'tun'], {
    encoding: 'utf8',
  });
  t.equal(able.status, 0, able.stderr);
  const inside = fileURLToPath(new URL('./doctor-kernel.ts', import.meta.url));
  await t.spawn('unshare', ['-nm', process.execPath, '--import=tsx', inside], {}, 'doctor-kernel');
});
