/*
 * npm run release: makes weir-VERSION-linux-ARCH.tar.gz of a built checkout, to be unpacked on hosts that have Node.js and neither npm
 * nor a compiler. It holds the files that package.json names, and what is installed of the production dependencies.
 */
import { execFileSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { relative } from 'node:path';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('..', import.meta.url));
const { version, files } = JSON.parse(readFileSync(`${root}/package.json`, 'utf8'));
const name = process.argv[2] ?? `weir-${version}-linux-${process.arch}.tar.gz`;

if (!existsSync(`${root}/dist/weir.js`)) fail('there is no dist/: run `npm ci` first');

const listed = execFileSync('npm', ['ls', '--omit=dev', '--all', '--parseable'], { cwd: root, encoding: 'utf8' });
const packages = listed
  .split('\n')
  .filter((path) => path.includes('/node_modules/'))
  .map((path) => relative(root, path))
  .sort();
if (packages.length === 0) fail('there is no node_modules/: run `npm ci` first');
// What lies within another comes with it.
const outermost = packages.filter((path) => !packages.some((other) => path.startsWith(`${other}/`)));

execFileSync(
  'tar',
  [
    ...[
      '--create',
      '--gzip',
      '--file',
      name,
      '--directory',
      root,
      '--sort=name',
      '--owner=0',
      '--group=0',
      '--numeric-owner',
    ],
    // A compiled package has its result twice, as links of one another that the new names would break.
    ...['--hard-dereference', '--exclude=build/Release/obj.target', '--exclude=build/Release/.deps'],
    ...['--mode=u=rwX,go=rX', '--exclude=dist/.tsbuildinfo', '--transform=s,^,weir/,'],
    ...['package.json', ...files, ...outermost],
  ],
  { stdio: 'inherit' },
);
console.log(name);

function fail(message) {
  console.error(`release: ${message}.`);
  process.exit(1);
}
