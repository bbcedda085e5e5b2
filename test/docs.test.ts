import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import { ERROR_MEANINGS } from '../lib/base/errors.js';
import { REASON_KINDS, REASON_NAMES } from '../lib/base/reasons.js';

function pathOf(path: string): string {
  return fileURLToPath(new URL(`../${path}`, import.meta.url));
}

function read(path: string): string {
  return readFileSync(pathOf(path), 'utf8');
}

/** The names in headings of the third level, with the heading of the second that they stand under and their text. */
function sections(text: string): { name: string; under: string; text: string }[] {
  let under = '';
  const found: { name: string; under: string; text: string }[] = [];
  for (const line of text.split('\n')) {
    const heading = /^(##|###) (.*)$/.exec(line);
    if (heading?.[1] === '##') under = heading[2]!;
    else if (heading) found.push({ name: heading[2]!.replaceAll('`', ''), under, text: '' });
    else if (found.length > 0) found.at(-1)!.text += line;
  }
  return found;
}

t.test('every reason is documented, in the order of the table, under what becomes of the packet', async (t) => {
  const KINDS: Readonly<Record<string, string>> = { drop: 'Dropped', reply: 'Answered', pass: 'Passed on' };
  const documented = sections(read('docs/reasons.md'));
  t.strictSame(
    documented.map(({ name, under }) => `${under}: ${name}`),
    REASON_NAMES.map((name, id) => `${KINDS[REASON_KINDS[id]!]}: ${name}`).slice(1),
  );
  for (const { name, text } of documented) t.ok(text.length > 40, `${name} is explained`);
});

t.test('every error code is documented', async (t) => {
  const documented = sections(read('docs/errors.md'));
  t.strictSame(
    documented.map(({ name }) => name),
    Object.keys(ERROR_MEANINGS),
  );
  for (const { name, text } of documented) t.ok(text.length > 40, `${name} is explained`);
});

t.test('the TCP state table is documented as it stands above the tracker', async (t) => {
  const source = /^ \* {5}from {2}packet.*?^ \* {5}timer.*?$/ms.exec(read('lib/conntrack/tcp-tracker.ts'))![0];
  const table = source.split('\n').map((line) => line.slice(7));
  t.ok(table.length > 15);
  t.match(read('docs/conntrack.md'), ['```text', ...table, '```'].join('\n'));
});

t.test('every dependency is documented, with its licence', async (t) => {
  const rows = [...read('docs/dependencies.md').matchAll(/^\| (\S+) \| .* \| ([^|]+) \|$/gm)]
    .map(([, name, licence]) => ({ name: name!, licence: licence! }))
    .filter(({ name }) => name !== 'package');
  const { dependencies, devDependencies, optionalDependencies = {} } = JSON.parse(read('package.json'));
  const declared = Object.keys({ ...dependencies, ...devDependencies, ...optionalDependencies });
  t.strictSame(rows.map(({ name }) => name).sort(), declared.sort());
  for (const { name, licence } of rows) {
    // What needs a compiler may have been left out.
    if (name in optionalDependencies && !existsSync(pathOf(`node_modules/${name}`))) continue;
    t.equal(licence, JSON.parse(read(`node_modules/${name}/package.json`)).license, `${name} is under ${licence}`);
  }
});

t.test('links between the pages lead somewhere', async (t) => {
  const pages = readdirSync(pathOf('docs'), { recursive: true, encoding: 'utf8' })
    .filter((name) => name.endsWith('.md'))
    .map((name) => `docs/${name}`);
  for (const page of ['README.md', ...pages]) {
    for (const [, target] of read(page).matchAll(/\]\(([^)#:]+)[^)]*\)/g)) {
      t.ok(existsSync(join(dirname(pathOf(page)), target!)), `${page}: ${target}`);
    }
  }
});
