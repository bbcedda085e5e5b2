import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import '../support/plain-children.js';

const program = fileURLToPath(new URL('../../bin/weir.js', import.meta.url));

t.test('without koffi’s binary: what is missing, and how to get it', async (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'weir-no-koffi-'));
  t.teardown(() => rmSync(folder, { recursive: true }));
  const write = (name: string, text: string): string => {
    writeFileSync(join(folder, name), text);
    return join(folder, name);
  };
  const hooks = write(
    'hooks.mjs',
    `export async function resolve(name, context, next) {
      if (name === 'koffi') throw new Error('no native module');
      return next(name, context);
    }`,
  );
  const hide = write(
    'hide.mjs',
    `import { register } from 'node:module'; register(${JSON.stringify(`file://${hooks}`)});`,
  );
  const config = write('weir.yaml', 'services: [{ name: web, address: 10.96.0.10, port: 80, backends: [] }]\n');
  const weir = (...args: string[]) =>
    spawnSync(process.execPath, ['--import', hide, program, ...args], { encoding: 'utf8' });
  for (const command of ['run', 'net']) {
    const { status, stderr } = weir(command, '-c', config);
    t.equal(status, 1, command);
    t.match(stderr, /^weir: koffi, .* does not load: no native module\. Install .*optional/);
    t.notMatch(stderr, /bug in weir/);
  }
  t.match(weir('check', '-c', config), { status: 0, stderr: '' }, 'what needs none of it works');
});
