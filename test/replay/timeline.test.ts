import t from 'tap';
import { REASON } from '../../lib/base/reasons.js';
import { SYN_SENT } from '../../lib/conntrack/record.js';
import { DIRECTION_ORIGINAL, DROP, FORWARD } from '../../lib/datapath/verdict.js';
import { formatSeconds, Journal } from '../../lib/replay/journal.js';
import { clockMs, loadTimeline, parseTimeline } from '../../lib/replay/timeline.js';

t.test('events come in time order, those of one moment as the file has them', async (t) => {
  const events = parseTimeline(
    [
      '{"at":9,"end":true}',
      '',
      '{"at":3.5,"config":"v2.yaml"}',
      '{"at":4,"backend":"web/b1","health":"down"}\r',
      '  {"at":4,"health":"up","backend":"web/b2"}',
      '{"at":0,"config":"/etc/weir/v1.yaml"}',
    ].join('\n'),
    '/tmp/lab/t.jsonl',
  );
  t.same(events, [
    { atMs: 0, line: 6, kind: 'config', path: '/etc/weir/v1.yaml' },
    { atMs: 3500, line: 3, kind: 'config', path: '/tmp/lab/v2.yaml' },
    { atMs: 4000, line: 4, kind: 'health', backend: 'web/b1', isUp: false },
    { atMs: 4000, line: 5, kind: 'health', backend: 'web/b2', isUp: true },
    { atMs: 9000, line: 1, kind: 'end' },
  ]);
  t.same(parseTimeline('', 't.jsonl'), []);
});

t.test('every mistake of a timeline is reported with its line', async (t) => {
  const cases: Array<[line: string, message: string]> = [
    ['{"at":1,', 'not JSON'],
    ['[1]', 'not a JSON object'],
    ['null', 'not a JSON object'],
    ['{"config":"a"}', '`at` must be a number of seconds'],
    ['{"at":-1,"end":true}', '`at` must be a number of seconds'],
    ['{"at":"1","end":true}', '`at` must be a number of seconds'],
    ['{"at":1}', 'nothing happens'],
    ['{"at":1,"config":7}', '`config` must be a path'],
    ['{"at":1,"backend":"web/b1"}', 'no event has the keys: backend'],
    ['{"at":1,"backend":"web","health":"up"}', '`backend` must be SERVICE/BACKEND'],
    ['{"at":1,"backend":"web/b1","health":"sick"}', '`health` must be "up" or "down"'],
    ['{"at":1,"end":1}', '`end` must be true'],
    ['{"at":1,"end":true,"config":"a"}', 'no event has the keys: config end'],
  ];
  try {
    parseTimeline(cases.map(([line]) => line).join('\n'), 'dir/t.jsonl');
    t.fail('was accepted');
  } catch (error) {
    const { code, message, remedy } = error as { code: string; message: string; remedy: string };
    t.equal(code, 'TIMELINE_INVALID');
    const lines = message.split('\n');
    t.equal(lines.length, cases.length);
    for (const [i, [, text]] of cases.entries()) t.ok(lines[i]!.startsWith(`dir/t.jsonl:${i + 1}: ${text}`), lines[i]);
    t.match(remedy, /"end":true/);
  }
  t.throws(() => loadTimeline('/nonexistent/t.jsonl'), {
    code: 'TIMELINE_INVALID',
    message: /cannot read .nonexistent/,
  });
});

t.test('an event and a packet of the same moment have the same time', async (t) => {
  for (const at of [0.1, 0.3, 1.1, 4.35, 8.2, 1.005, 86399.999999, 59.000001]) {
    const nanoseconds = Math.round(at * 1e9);
    const [event] = parseTimeline(`{"at":${at},"end":true}`, 't');
    t.equal(event!.atMs, clockMs(Math.floor(nanoseconds / 1e9), nanoseconds % 1e9), `${at}`);
  }
});

t.test('seconds are exact', async (t) => {
  t.equal(formatSeconds(0, 0), '0.0');
  t.equal(formatSeconds(3, 1000), '3.000001');
  t.equal(formatSeconds(3, 500_000_000), '3.5');
  t.equal(formatSeconds(1_700_000_000, 1), '1700000000.000000001');
  t.equal(formatSeconds(-1, 600_000_000), '-0.4');
  t.equal(formatSeconds(-2, 0), '-2.0');
  t.equal(formatSeconds(-3, 999_999_999), '-2.000000001');
});

t.test('a line has its keys in order, and no key for what is unknown', async (t) => {
  let text = '';
  const journal = new Journal((bytes) => {
    text += Buffer.from(bytes).toString();
  });
  journal.emitted(Uint8Array.of(9, 0x45, 0x00, 9), 1, 2);
  journal.emitted(Uint8Array.of(0xff), 0, 1);
  const known = { service: 'web "1"', backend: 'b1', state: SYN_SENT };
  journal.line(0, 0, { verdict: FORWARD, reason: 0, direction: DIRECTION_ORIGINAL, ...known });
  journal.line(1, 5e8, {
    verdict: DROP,
    reason: REASON.malformed,
    direction: 0,
    state: 0,
    service: undefined,
    backend: undefined,
  });
  t.equal(journal.lines, 2);
  journal.flush();
  t.equal(
    text,
    '{"n":1,"t":0.0,"verdict":"forward","direction":"original","service":"web \\"1\\"","backend":"b1","state":"SYN_SENT","out":["4500","ff"]}\n' +
      '{"n":2,"t":1.5,"verdict":"drop","reason":"malformed","direction":"none","out":[]}\n',
  );
});
