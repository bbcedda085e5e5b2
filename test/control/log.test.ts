import { execFileSync } from 'node:child_process';
import t from 'tap';
import { EventLog, LINES_PER_WINDOW, WINDOW_MS } from '../../lib/control/log.js';
import { HISTORY_LINES } from '../../lib/control/log-history.js';
import type { LogLineView } from '../../lib/control/view.js';

class Log {
  readonly lines: LogLineView[] = [];
  nowMs = 0;
  readonly log = new EventLog({ write: (line) => void this.lines.push(JSON.parse(line)) }, () => this.nowMs);
}

t.test('one object a line, with a level, a time and a name', async (t) => {
  const { log, lines } = new Log();
  log.warn('network-note', 'something', { field: 1 });
  t.match(lines, [{ level: 'warn', time: /^\d{4}-.*Z$/, event: 'network-note', msg: 'something', field: 1 }]);
});

t.test('a message is one line', async (t) => {
  const { log, lines } = new Log();
  log.error('reload-refused', 'the former configuration stays: a:1:2 x: y\n  a:3:4 z\n');
  t.equal(lines[0]!.msg, 'the former configuration stays: a:1:2 x: y; a:3:4 z');
  const program = `const { openLog } = await import('${new URL('../../lib/control/log.ts', import.meta.url).href}');
    const log = openLog(process.argv[1] === 'pretty');
    log.error('reload-refused', 'first\\nsecond', { problems: [{ line: 1 }, { line: 2 }] });`;
  const run = (form: string): string =>
    execFileSync(process.execPath, ['--import=tsx', '--input-type=module', '-e', program, form], { encoding: 'utf8' });
  t.match(run('pretty'), /^\[[\d:.]+\] ERROR: reload-refused: first; second\n$/, 'for people');
  t.match(run('json'), /^\{.*"problems":\[.*"msg":"first; second"\}\n$/, 'for programs');
});

t.test('of one event only so many lines are written at a time, and the rest is told', async (t) => {
  const it = new Log();
  for (let i = 0; i < LINES_PER_WINDOW + 7; i++) it.log.info('health-changed', String(i));
  t.equal(it.lines.length, LINES_PER_WINDOW);
  it.log.error('step-failed', 'another');
  t.equal(it.lines.at(-1)!.event, 'step-failed', 'others are not held back');
  it.nowMs = WINDOW_MS - 1;
  it.log.tellSuppressed();
  it.log.info('health-changed', 'still too many');
  t.equal(it.lines.length, LINES_PER_WINDOW + 1);
  it.nowMs = WINDOW_MS;
  it.log.info('health-changed', 'again');
  t.match(it.lines.slice(-2), [
    { event: 'suppressed', level: 'warn', of: 'health-changed', count: 8 },
    { event: 'health-changed', msg: 'again' },
  ]);
  it.nowMs = 3 * WINDOW_MS;
  it.log.tellSuppressed();
  t.equal(it.lines.length, LINES_PER_WINDOW + 3, 'nothing is told where nothing was left out');
});

t.test('the last lines are kept', async (t) => {
  const { log } = new Log();
  const { history } = log;
  const last = (count: number): string[] => history.last(count).map((line) => (JSON.parse(line) as LogLineView).msg);
  t.strictSame(last(10), []);
  history.add('{"msg":"a"}\n');
  history.add('{"msg":"b"}\n');
  t.strictSame(last(10), ['a', 'b']);
  t.strictSame(last(1), ['b']);
  t.strictSame(last(0), []);
  for (let i = 0; i < HISTORY_LINES + 3; i++) history.add(`{"msg":"${i}"}\n`);
  t.equal(last(5000).length, HISTORY_LINES);
  t.strictSame([last(5000)[0], last(1)[0]], ['3', String(HISTORY_LINES + 2)]);
});

t.test('whoever follows gets the last lines, then each as it comes, and may leave', async (t) => {
  const { log } = new Log();
  const { history } = log;
  history.add('1\n');
  history.add('2\n');
  const watch = history.follow(1);
  history.add('3\n');
  t.equal(await watch.next(), '3\n', 'it begins when it is first asked');
  const next = watch.next();
  log.info('ready', 'now');
  t.match(JSON.parse(await next), { event: 'ready' });
  history.add('4\n');
  history.add('5\n');
  t.equal(await watch.next(), '4\n5\n', 'nothing is lost meanwhile');
  const never = watch.next();
  watch.close();
  history.add('6\n');
  t.equal(await Promise.race([never, Promise.resolve('nothing')]), 'nothing');

  const slow = history.follow(0);
  const first = slow.next();
  history.add('begin\n');
  await first;
  const line = `${'x'.repeat(1_000_000)}\n`;
  for (let i = 0; i < 7; i++) history.add(line);
  const text = await slow.next();
  t.ok(text === `${line.repeat(5)}{"event":"lost","count":2}\n`, 'what is not taken is bounded');
  history.add('on\n');
  t.equal(await slow.next(), 'on\n');
});
