import { readdirSync, readFileSync } from 'node:fs';
import { dirname, join, relative, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import t from 'tap';

/** Rows are ranks: a folder imports from those above its row only, and from itself. */
const RANKS: readonly (readonly string[])[] = [
  ['base'],
  ['wire'],
  ['conntrack', 'balance', 'io', 'config'],
  ['nat', 'tunnel', 'bridge'],
  ['datapath'],
  ['control'],
  ['admin', 'lab', 'replay', 'cli'],
  ['weir.ts'],
];

/** Files of the package that lib reads or runs, never imports. */
const OUTSIDE = ['../package.json', '../bin/weir.js', '../dist/web'];

const MAX_LINES = 500;

const ROOT = fileURLToPath(new URL('..', import.meta.url));
const LIB = join(ROOT, 'lib');

const files = readdirSync(LIB, { recursive: true, encoding: 'utf8' })
  .filter((name) => name.endsWith('.ts'))
  .map((name) => ({ name, text: readFileSync(join(LIB, name), 'utf8') }));

function rankOf(name: string): number {
  const part = name.split('/')[0]!;
  return RANKS.findIndex((parts) => parts.includes(part));
}

function codeOf(text: string): string {
  return text.replace(/\/\*[\s\S]*?\*\//g, '').replace(/^\s*\/\/.*$/gm, '');
}

/** Everything that `import`, `export ... from`, `import()`, and `new URL(..., import.meta.url)` of a Worker name. */
function importsOf(text: string): string[] {
  const code = codeOf(text);
  const forms = [
    /\bfrom\s+'([^']+)'/g,
    /\bimport\s+'([^']+)'/g,
    /\bimport\(\s*'([^']+)'\s*\)/g,
    /\bnew URL\(\s*'([^']+)',\s*import\.meta\.url/g,
  ];
  return forms.flatMap((form) => [...code.matchAll(form)].map((match) => match[1]!));
}

t.test('every folder has a rank', async (t) => {
  t.not(files.length, 0);
  for (const { name } of files) t.not(rankOf(name), -1, `${name} is in a folder of the table`);
});

t.test('imports go downward only', async (t) => {
  for (const { name, text } of files) {
    const own = name.split('/')[0]!;
    for (const target of importsOf(text)) {
      if (!target.startsWith('.')) continue;
      const path = relative(LIB, resolve(dirname(join(LIB, name)), target));
      if (path.startsWith('..')) {
        t.ok(OUTSIDE.includes(path), `${name} refers to ${path}`);
        continue;
      }
      t.match(path, /\.js$/, `${name}: ${target} ends in .js`);
      if (path.split('/')[0] === own) continue;
      t.ok(rankOf(path.replace(/\.js$/, '.ts')) < rankOf(name), `${name} imports ${path}`);
    }
  }
});

t.test('no cycles within a folder', async (t) => {
  const edges = new Map(
    files.map(({ name, text }) => {
      // Types are gone at run time; a cycle of them does no harm.
      const code = text.replace(/\b(import|export) type [^;]*;/g, '');
      const targets = importsOf(code)
        .filter((target) => target.startsWith('.') && target.endsWith('.js'))
        .map((target) => relative(LIB, resolve(dirname(join(LIB, name)), target)).replace(/\.js$/, '.ts'));
      return [name, targets] as const;
    }),
  );
  const state = new Map<string, 'open' | 'done'>();
  const visit = (name: string, path: readonly string[]): void => {
    if (state.get(name) === 'done') return;
    if (state.get(name) === 'open') {
      t.fail([...path.slice(path.indexOf(name)), name].join(' -> '));
      return;
    }
    state.set(name, 'open');
    for (const target of edges.get(name) ?? []) visit(target, [...path, name]);
    state.set(name, 'done');
  };
  for (const name of edges.keys()) visit(name, []);
  t.pass(`${edges.size} files`);
});

t.test('system calls have one home', async (t) => {
  const users = files.filter(({ text }) => importsOf(text).includes('koffi')).map(({ name }) => name);
  t.strictSame(users, ['io/syscalls.ts']);
});

t.test('the wall clock is shown, and nothing is measured by it: a step changes nothing', async (t) => {
  const shown = ['control', 'admin', 'cli'];
  for (const { name, text } of files) {
    const code = codeOf(text);
    // What is of the data path's clock is shown by the time of day: events, which follow its steps, and a capture, from its start on.
    if (!['control/event-feed.ts', 'control/capture.ts'].includes(name))
      t.notMatch(code, /\bDate\.now\b|\.getTime\(/, name);
    if (!shown.includes(name.split('/')[0]!)) t.notMatch(code, /\bDate\b/, `${name} knows no date`);
  }
});

t.test('files stay readable', async (t) => {
  for (const { name, text } of files) {
    const lines = text.split('\n').length - 1;
    t.ok(lines <= MAX_LINES, `${name} has ${lines} lines`);
  }
});

t.test('only declared packages are imported', async (t) => {
  const { dependencies, optionalDependencies = {} } = JSON.parse(readFileSync(join(ROOT, 'package.json'), 'utf8'));
  const declared = Object.keys({ ...dependencies, ...optionalDependencies });
  const used = new Set<string>();
  for (const { name, text } of files) {
    for (const target of importsOf(text)) {
      if (target.startsWith('.') || target.startsWith('node:')) continue;
      const parts = target.split('/');
      const packageName = target.startsWith('@') ? parts.slice(0, 2).join('/') : parts[0]!;
      used.add(packageName);
      t.ok(declared.includes(packageName), `${name} imports ${packageName}`);
    }
  }
  t.strictSame(declared.filter((each) => !used.has(each)).sort(), [], 'no dependency is idle');
});
