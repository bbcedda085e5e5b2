/*
 * npm test [FILES]: builds, runs tap, and says what came of it; the last line is `N passed, N failed`.
 *
 * tap's closing line (`# { total: 14, pass: 5, fail: 3, todo: 2, skip: 4 }`) counts assertions, and is not the whole truth: a
 * file that crashes after its first assertion is not in `fail`, and after a time-out tap may leave files out altogether. So
 * failures are counted from the lines too, and every file must have had its say.
 */
import { spawn, spawnSync } from 'node:child_process';
import { createWriteStream, mkdirSync, readdirSync } from 'node:fs';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('..', import.meta.url));
const only = process.argv.slice(2);
const saved = '.tap/results.tap';

const build = spawnSync('npx', ['tsc', '-p', 'tsconfig.build.json'], { cwd: root, stdio: 'inherit' });
if (build.status !== 0) finish({ pass: 0, skip: 0, todo: 0 }, 1, 'the build failed');

// Its plugins are compiled into tap; on a fresh checkout it would do so only after having begun with others.
const plugins = spawnSync('npx', ['tap', 'build'], { cwd: root, stdio: 'inherit' });
if (plugins.status !== 0) finish({ pass: 0, skip: 0, todo: 0 }, 1, 'tap cannot be built');

mkdirSync(`${root}/.tap`, { recursive: true });
const tap = spawn('npx', ['tap', '--reporter=tap', ...only], { cwd: root, stdio: ['ignore', 'pipe', 'inherit'] });
const copy = createWriteStream(`${root}/${saved}`);

/** By file: whether it ended well, and its failed assertions. */
const files = new Map();
/** Reasons, with what was skipped for them. */
const skipped = new Map();
let totals;
let file;
/** Indentation of the failure whose diagnosis is being shown. */
let shown = -1;

for await (const line of createInterface({ input: tap.stdout })) {
  copy.write(`${line}\n`);
  note(line);
}
const status = await new Promise((resolve) => {
  if (tap.exitCode !== null || tap.signalCode !== null) resolve(tap.exitCode);
  else tap.on('exit', resolve);
});

const missing = only.length > 0 ? [] : testFiles().filter((name) => !files.has(name));
let failed = missing.length;
for (const { ok, failures } of files.values()) failed += ok === true ? 0 : Math.max(1, failures);
failed = Math.max(failed, totals?.fail ?? 0, status === 0 ? 0 : 1);

console.log('');
for (const [reason, names] of skipped) console.log(`skipped, ${reason}: ${names.length}\n  ${names.join('\n  ')}`);
for (const name of missing) console.log(`FAIL ${name} did not run`);
for (const [name, { ok }] of files) if (ok !== true) console.log(`FAIL ${name}`);
finish(totals ?? { pass: 0, skip: 0, todo: 0 }, failed, totals === undefined ? 'tap ended without a result' : '');

/** Takes one line of TAP in: progress per file as it comes, failures with their diagnosis, and the counts. */
function note(line) {
  const indent = line.length - line.trimStart().length;
  if (shown >= 0) {
    if (indent > shown || line === '') {
      if (line !== '') console.log(line);
      return;
    }
    shown = -1;
  }
  const begun = /^# Subtest: (.*)/.exec(line);
  if (begun) {
    file = begun[1];
    files.set(file, { ok: undefined, failures: 0 });
    return;
  }
  const closing = /^# \{ total: .* \}$/.exec(line);
  if (closing) {
    totals = { pass: 0, fail: 0, skip: 0, todo: 0 };
    for (const [, key, count] of line.matchAll(/(\w+): (\d+)/g)) totals[key] = Number(count);
    return;
  }
  const point = /^( *)(not )?ok \d+ - (.*?)(?: # (SKIP|TODO|time=)(.*))?( \{)?$/.exec(line);
  if (point) notePoint(line, indent, point[2] === undefined, point[3], point[4], point[5]?.trim() ?? '');
}

function notePoint(line, indent, ok, name, directive, text) {
  if (directive === 'SKIP') {
    const where = indent === 0 ? name : `${file}: ${name}`;
    skipped.set(text, [...(skipped.get(text) ?? []), where]);
  }
  if (indent === 0 && files.has(name)) {
    const result = files.get(name);
    result.ok = ok && text !== 'no tests found';
    const took = directive === 'time=' ? ` (${Math.round(Number.parseFloat(text))} ms)` : '';
    console.log(`${result.ok ? 'ok  ' : 'FAIL'} ${name}${took}`);
    // How the process ended explains what no assertion does.
    if (!ok && result.failures === 0) shown = 0;
    return;
  }
  if (ok || directive === 'TODO' || directive === 'SKIP') return;
  // A test that fails because of what is in it has a time; its assertions have none.
  if (directive === 'time=') return;
  if (indent > 0) files.get(file).failures++;
  console.log(indent > 0 ? `${file}\n${line}` : line);
  shown = indent;
}

function testFiles() {
  return readdirSync(`${root}/test`, { recursive: true })
    .filter((name) => name.endsWith('.test.ts'))
    .map((name) => `test/${name}`);
}

function finish({ pass, skip, todo }, failed, trouble) {
  if (trouble !== '') console.log(trouble);
  if (skip + todo > 0) console.log(`${skip} skipped, ${todo} to do; all lines are in ${saved}`);
  console.log(`${pass} passed, ${failed} failed`);
  process.exit(failed === 0 ? 0 : 1);
}
