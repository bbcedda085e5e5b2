import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import { createApp, ROUTES } from '../lib/admin/app.js';
import { METRICS } from '../lib/admin/metric-table.js';
import { ERROR_MEANINGS } from '../lib/base/errors.js';
import { REASON_KINDS, REASON_NAMES } from '../lib/base/reasons.js';
import { LOG_EVENTS } from '../lib/control/log.js';
import { FakeWeir } from './support/fake-weir.js';

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

/** The rows of all tables, by the cells of each; without heads. */
function rows(text: string): string[][] {
  const lines = text.split('\n').filter((line, i, all) => line.startsWith('|') && !/^\|-/.test(all[i + 1] ?? ''));
  return lines
    .filter((line) => !line.startsWith('|-'))
    .map((line) =>
      line
        .slice(1, -1)
        .split('|')
        .map((cell) => cell.trim()),
    );
}

t.test('every metric is documented, with type, labels, meaning and an example that names it', async (t) => {
  const documented = new Map(rows(read('docs/metrics.md')).map(([name, ...rest]) => [name!.replaceAll('`', ''), rest]));
  t.strictSame([...documented.keys()].sort(), METRICS.map(({ name }) => name).sort());
  for (const metric of METRICS) {
    const [type, labels, meaning, example] = documented.get(metric.name) ?? [];
    const wanted = metric.type === 'histogram' ? [] : (metric.labels ?? []);
    t.strictSame([type, labels], [metric.type, wanted.map((label) => `\`${label}\``).join(', ')], metric.name);
    t.ok(meaning!.length > 10, `${metric.name} is explained`);
    t.match(example, new RegExp(`\\b${metric.name}(_bucket)?\\b`));
  }
});

t.test('every event of the log is documented, and written with the levels it says', async (t) => {
  const documented = new Map(rows(read('docs/logs.md')).map(([name, ...rest]) => [name!.replaceAll('`', ''), rest]));
  t.strictSame([...documented.keys()].sort(), [...LOG_EVENTS].sort());
  const sources = readdirSync(pathOf('lib'), { recursive: true, encoding: 'utf8' })
    .filter((name) => name.endsWith('.ts'))
    .map((name) => read(`lib/${name}`))
    .join('\n');
  for (const [name, [levels, when]] of documented) {
    t.ok(when!.length > 10, `${name} is explained`);
    const used = new Set(
      [...sources.matchAll(/\blog\.(\w+)\(\s*'([\w-]+)'/g)].filter((m) => m[2] === name).map((m) => m[1]!),
    );
    if (name !== 'suppressed') t.strictSame([...used].sort(), levels!.split(', ').sort(), name);
  }
});

t.test('every route of the admin API is documented: where it is served, its parameters, its answer', async (t) => {
  const text = read('docs/api.md');
  const documented = text
    .split(/^##+ /m)
    .filter((section) => section.startsWith('`'))
    .map((section) => ({
      route: /^`(.*)`$/m.exec(section)![1]!,
      parameters: [...section.matchAll(/^\| (`[^|]*`) \|/gm)].flatMap(([, names]) =>
        names!.replaceAll('`', '').split(', '),
      ),
      example: /^```json\n(.*?)^```$/ms.exec(section)?.[1],
    }));
  t.strictSame(
    documented.map(({ route }) => route).sort(),
    ROUTES.map(({ method, path }) => `${method} ${path}`).sort(),
  );
  const isPublic = sections(text)
    .filter(({ under }) => under === 'Public')
    .map(({ name }) => name);
  t.strictSame(
    isPublic,
    ROUTES.filter((route) => route.isPublic === true).map(({ method, path }) => `${method} ${path}`),
  );
  const app = createApp(new FakeWeir(), 'all');
  for (const { route, parameters, example } of documented) {
    const [method, path] = route.split(' ') as [string, string];
    const { parameters: known } = ROUTES.find((each) => each.method === method && each.path === path)!;
    t.strictSame(parameters, known, route);
    if (example === undefined) continue;
    const answer = await app.request(path.endsWith('drain') ? `${path}?service=web&backend=b1` : path, { method });
    t.strictSame(shapeOf(JSON.parse(example)), shapeOf(await answer.json()), `the answer of ${route}`);
  }
  const views = ['view', 'plan/plan-view', 'explain/explain-view', 'live/live-view']
    .map((name) => read(`lib/control/${name}.ts`))
    .join('');
  for (const [, name] of text.matchAll(/\b([A-Z]\w+View)\b/g)) t.match(views, `export interface ${name} `, name);
});

/** The fields of an answer, all the way down; of a list, those of its first member. */
function shapeOf(value: unknown): unknown {
  if (Array.isArray(value)) return value.slice(0, 1).map(shapeOf);
  if (value === null || typeof value !== 'object') return typeof value;
  return Object.fromEntries(Object.entries(value).map(([key, field]) => [key, shapeOf(field)]));
}

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
