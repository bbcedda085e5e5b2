import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import t, { type Test } from 'tap';
import { serveAdmin } from '../../lib/admin/serve.js';
import { type FrameOptions, renderFrame } from '../../lib/cli/top-frame.js';
import type { LiveView } from '../../lib/control/live/live-view.js';
import { runCommand } from '../support/command-line.js';
import { FakeWeir, liveView } from '../support/fake-weir.js';
import { needsTools } from '../support/skip.js';
import { TestTerminal } from '../support/terminal.js';

const WEIR = fileURLToPath(new URL('../../bin/weir.js', import.meta.url));

const ESC = '\x1b';

const PLAIN: FrameOptions = {
  columns: 120,
  rows: Number.POSITIVE_INFINITY,
  sort: 'file',
  service: '',
  skip: 0,
  hasColour: false,
  status: '',
};

const PARTS = { version: '1.2.3', run: fail, replay: fail, lab: fail };

function fail(): never {
  throw new Error('not asked for');
}

/** Like the others, with more rates of packets the later it stands. */
function services(...names: string[]): LiveView['services'] {
  const [service] = liveView().services;
  return names.map((name, i) => ({
    ...service!,
    name,
    rates: { ...service!.rates, packets: { original: i, reply: 0 } },
  }));
}

async function serve(
  t: Test,
  views: readonly LiveView[],
): Promise<{ weir: FakeWeir; socket: string; end: () => Promise<void> }> {
  const folder = mkdtempSync(join(tmpdir(), 'weir-top-'));
  const weir = new FakeWeir();
  weir.liveViews = [liveView({ intervalSeconds: 0 }), ...views];
  const socket = join(folder, 'weir.sock');
  const admin = await serveAdmin(weir, { socket, listen: null, dashboard: false });
  t.teardown(async () => {
    await admin.close();
    rmSync(folder, { recursive: true });
  });
  return { weir, socket, end: () => admin.close() };
}

t.test('a frame', async (t) => {
  const frame = renderFrame(liveView(), PLAIN);
  t.match(frame[0], 'weir 1.2.3, weir0, up 1 h 2 min');
  t.match(frame[1], 'packets 151/s in, 151/s out');
  t.match(frame[1], 'bits 4.01 Mb/s in, 4.01 Mb/s out; new 2/s; dropped 0.5/s');
  t.match(frame[2], 'conntrack tcp [#---------] 7 of 100 ESTABLISHED 7');
  t.match(frame[5], /^web 10\.96\.0\.10:80\/tcp +2 of 2 +151 +4\.01 M +2 +5$/);
  t.match(frame[6], /^ {2}b1 +active +50\.0% +151 +4\.01 M +2 +2$/);
  t.ok(frame.some((line) => /^malformed +0\.5\/s +2 {2}A header is short\.$/.test(line)));
  t.ok(frame.some((line) => /^10\.1\.0\.2 +3 +2\.20 kB$/.test(line)));
});

t.test('where columns are few, names are shortened and figures are not', async (t) => {
  const [service] = liveView().services;
  const busy = {
    packets: { original: 111_000, reply: 0 },
    bits: { original: 222_000_000, reply: 0 },
    connections: 333_000,
  };
  const [backend] = service!.backends;
  const long = 'a-service-whose-name-is-long-enough';
  const down = {
    ...backend!,
    state: 'down',
    takesNew: false,
    name: 'b-on-a-host-with-a-long-name',
    rates: busy,
  } as const;
  const views = [
    { ...service!, name: long, rates: busy, open: 444_000, maxConnections: null, backends: [down] },
    { ...service!, name: 'limited', rates: busy, open: 444_000, maxConnections: 500_000, backends: [] },
  ];
  const head = liveView();
  for (const columns of [60, 80, 100, 106, 107]) {
    for (const [services, open] of [
      [views.slice(0, 1), '444000'],
      [views, '444000/500000'],
    ] as const) {
      const frame = renderFrame({ ...head, services }, { ...PLAIN, columns });
      t.ok(frame.every((line) => [...line].length <= columns));
      const text = frame.join('\n');
      t.match(text, /PACKETS\/S +BITS\/S +NEW\/S +OPEN$/m, `${columns}: titles`);
      t.match(text, /^a-se.*111 k +222 M +333 k +444000$/m, `${columns}: of a service`);
      t.match(text, new RegExp(`111 k +222 M +333 k +${open}$`, 'm'), `${columns}: with a limit`);
      t.match(text, /^ {2}b-on.* 50\.0% +111 k +222 M +333 k +2$/m, `${columns}: of a backend`);
      for (const figure of ['151/s out', '4.01 Mb/s out', 'new 2/s', 'dropped 0.5/s', 'ESTABLISHED 7', 'UNREPLIED 2'])
        t.match(text, figure, `${columns}: ${figure}`);
    }
  }
  const at80 = renderFrame({ ...head, services: views.slice(0, 1) }, { ...PLAIN, columns: 80 });
  t.ok(
    at80.some((line) => line.startsWith('a-service-whose-name-is-lon… ')),
    'and say so',
  );
});

t.test('it fits, whatever the size, and what others have named is text', async (t) => {
  const hostile = services('web\x1b[2J\x07', ...Array.from({ length: 50 }, (_, i) => `s${i}`));
  for (const [columns, rows] of [
    [120, 30],
    [40, 10],
    [10, 3],
    [1, 1],
  ] as const) {
    const frame = renderFrame(liveView({ services: hostile }), { ...PLAIN, columns, rows, status: 'q quit' });
    t.ok(frame.length <= rows && frame.every((line) => line.length <= columns), `${columns} x ${rows}`);
    t.notMatch(frame.join(''), /\p{Cc}/u);
  }
  const down = renderFrame(liveView({ services: services('a', 'b') }), { ...PLAIN, hasColour: true });
  t.ok(down[5]!.startsWith(`${ESC}[1ma `) && down[5]!.endsWith(`${ESC}[0m`));
  t.match(renderFrame(liveView({ services: [] }), PLAIN).join('\n'), 'No services.');
  const quiet = liveView({ reasons: [], clients: { distinct: 0, error: 0, top: [] } });
  t.match(renderFrame(quiet, PLAIN).join('\n'), 'Nothing was dropped.');
});

t.test('order, filter and scrolling', async (t) => {
  const names = (options: Partial<FrameOptions>): string[] =>
    renderFrame(liveView({ services: services('a', 'b', 'c') }), { ...PLAIN, ...options })
      .filter((line) => line.includes('10.96.0.10:80'))
      .map((line) => line[0]!);
  t.strictSame(names({}), ['a', 'b', 'c']);
  t.strictSame(names({ sort: 'packets' }), ['c', 'b', 'a']);
  t.strictSame(names({ service: 'b' }), ['b']);
  t.strictSame(names({ service: 'x' }), []);
  t.strictSame(names({ rows: 19, skip: 3 }), ['b', 'c']);
  t.strictSame(names({ rows: 19, skip: 99 }), names({ rows: 19, skip: 5 }), 'not past the end');
});

t.test('without a terminal', async (t) => {
  const { weir, socket } = await serve(t, [liveView(), liveView({ intervalSeconds: 1.001 })]);
  const frame = await runCommand(PARTS, ['top', '--socket', socket]);
  t.strictSame([frame.code, frame.stderr], [0, '']);
  t.match(frame.stdout, /^weir 1\.2\.3.*\n/);
  t.notMatch(frame.stdout, '\x1b');
  const json = await runCommand(PARTS, ['top', '--socket', socket, '--once', '-o', 'json', '--service', 'we']);
  t.strictSame(JSON.parse(json.stdout), liveView(), 'one line, of the first view with rates');
  const none = await runCommand(PARTS, ['top', '--socket', socket, '--once', '-o', 'json', '--service', 'x']);
  t.strictSame(JSON.parse(none.stdout).services, []);
  t.ok(weir.asked.includes('live closed'));
  const absent = await runCommand(PARTS, ['top', '--socket', '/nonexistent/weir.sock']);
  t.strictSame([absent.code, absent.stdout], [1, '']);
  t.match(absent.stderr, 'no weir answers');
});

t.test('on a terminal', needsTools(t, 'python3'), async (t) => {
  const views = [liveView({ services: services('web', 'dns') })];
  const { socket, end } = await serve(t, views);
  const start = (env: NodeJS.ProcessEnv = {}): TestTerminal =>
    new TestTerminal([process.execPath, WEIR, 'top', '--socket', socket], { NO_COLOR: undefined, ...env });
  const isRestored = (t: Test, terminal: TestTerminal): void => {
    t.ok(
      terminal.output.lastIndexOf(`${ESC}[?1049l`) > terminal.output.lastIndexOf(`${ESC}[?1049h`),
      'the other screen is left',
    );
    t.ok(terminal.output.lastIndexOf(`${ESC}[?25h`) > terminal.output.lastIndexOf(`${ESC}[?25l`), 'the cursor is back');
  };

  await t.test('keys', async (t) => {
    const terminal = start();
    await terminal.see(`${ESC}[?1049h${ESC}[?25l`);
    await terminal.see('dns 10.96');
    await terminal.see('sorted by file');
    t.ok(terminal.output.includes(`${ESC}[1mweir`), 'in colour');
    terminal.clear();
    terminal.type('s');
    await terminal.see('sorted by packets');
    t.ok(terminal.output.indexOf('dns 10') < terminal.output.indexOf('web 10'), 'the busiest first');
    terminal.clear();
    terminal.type('?');
    await terminal.see('Ctrl-C   quit');
    terminal.type('?');
    terminal.clear();
    terminal.type('/dn');
    await terminal.see('Service: dn_');
    terminal.clear();
    terminal.type('\r');
    await terminal.see('service dn');
    t.notMatch(terminal.output, 'web 10.96');
    terminal.clear();
    terminal.type('p');
    await terminal.see('PAUSED');
    terminal.type('q');
    t.equal(await terminal.ended(), '0 restored');
    isRestored(t, terminal);
  });

  await t.test('another size', async (t) => {
    const terminal = start({ NO_COLOR: '1' });
    await terminal.see(`? help${ESC}[K${ESC}[J`);
    t.notMatch(terminal.output, `${ESC}[1m`, 'no colour');
    terminal.clear();
    terminal.resize(8, 30);
    await terminal.see(`${ESC}[K${ESC}[J`);
    const frame = terminal.output.slice(terminal.output.lastIndexOf('\x1b[H') + 3).split('\x1b[K');
    t.equal(frame.length - 1, 8);
    t.ok(frame.every((line) => line.replace(/[\r\n]/g, '').replace(`${ESC}[J`, '').length <= 30));
    terminal.type('\x03');
    t.equal(await terminal.ended(), '0 restored');
    isRestored(t, terminal);
  });

  for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) {
    await t.test(signal, async (t) => {
      const terminal = start();
      await terminal.see('sorted by file');
      terminal.signal(signal);
      t.equal(await terminal.ended(), '0 restored');
      isRestored(t, terminal);
    });
  }

  await t.test('weir ends', async (t) => {
    const terminal = start();
    await terminal.see('sorted by file');
    await end();
    t.equal(await terminal.ended(), '1 restored');
    isRestored(t, terminal);
    const [, after] = terminal.output.split(`${ESC}[?1049l`);
    t.match(after, 'weir: weir ended', 'the message is on the screen that stays');
  });
});
