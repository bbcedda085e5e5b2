import { once } from 'node:events';
import { existsSync, linkSync, mkdtempSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { type ClientRequest, createServer, type IncomingMessage, request } from 'node:http';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setImmediate, setTimeout } from 'node:timers/promises';
import t from 'tap';
import { createApp } from '../../lib/admin/app.js';
import { serveAdmin } from '../../lib/admin/serve.js';
import { WeirError } from '../../lib/base/errors.js';
import { RefusedConfig } from '../../lib/control/reloader.js';
import { backend, FakeWeir, importView } from '../support/fake-weir.js';

const HEALTH = { seconds: 61, reason: 'connection refused', last: 'connected' } as const;

/** The series of a scrape: name and labels to value. */
function series(text: string): Map<string, number> {
  const lines = text.split('\n').filter((line) => line !== '' && !line.startsWith('#'));
  return new Map(
    lines.map((line) => [line.slice(0, line.lastIndexOf(' ')), Number(line.slice(line.lastIndexOf(' ')))]),
  );
}

t.test('what each address answers', async (t) => {
  const weir = new FakeWeir();
  const app = createApp(weir, 'all');
  const json = async (path: string, method = 'GET'): Promise<unknown> => (await app.request(path, { method })).json();
  t.strictSame(await json('/healthz'), { status: 'ok' });
  t.strictSame(await json('/v1/status'), weir.statusView());
  t.strictSame(await json('/v1/services'), weir.serviceViews());
  t.strictSame(await json('/v1/ct/stats'), weir.conntrackView());
  t.match(await json('/v1/reload', 'POST'), { path: '/etc/weir.yaml', services: 1 });
  t.strictSame(await json('/v1/ct/flush?backend=web/b1', 'POST'), { flushed: 5 });
  t.match(await json('/v1/drain?service=web&backend=b1', 'POST'), { service: 'web', backend: 'b1', drained: true });
  t.match(await json('/v1/undrain?service=web&backend=b1', 'POST'), { drained: false });
  const list = await app.request('/v1/ct?service=web&client=10.0.0.0/8&format=cilium');
  t.match(list.headers.get('content-type'), /text\/plain/);
  t.equal(await list.text(), '[]\n');
  t.match((await app.request('/v1/ct')).headers.get('content-type'), 'application/json');
  const lines = await app.request('/v1/ct/export?backend=b1');
  t.match(lines.headers.get('content-type'), 'application/x-ndjson');
  t.equal(await lines.text(), '[]\n');
  const body = 'x'.repeat(200_000);
  t.strictSame(await (await app.request('/v1/ct/import', { method: 'POST', body })).json(), importView({}));
  t.strictSame(await json('/v1/ct/import', 'POST'), importView({}));
  const assumed = 'without=web/b1&without=web/b2&assumeDown=web/b3';
  t.strictSame(await json(`/v1/explain?proto=tcp&src=10.1.0.2:1&dst=10.96.0.10:80&${assumed}`), weir.explainAnswer);
  const file = await app.request('/v1/plan?name=new.yaml', { method: 'POST', body });
  t.strictSame(await file.json(), weir.planAnswer);
  t.strictSame(await json('/v1/plan', 'POST'), weir.planAnswer);
  t.strictSame(weir.asked, [
    'reload',
    'flush {"backend":"web/b1"}',
    'drain web/b1',
    'undrain web/b1',
    'list cilium {"service":"web","client":"10.0.0.0/8"}',
    'list json {}',
    'export {"backend":"b1"}',
    'import 200000 bytes',
    'import 0 bytes',
    'explain {"proto":"tcp","src":"10.1.0.2:1","dst":"10.96.0.10:80","without":["web/b1","web/b2"],"assumeDown":["web/b3"]}',
    'plan new.yaml, 200000 characters',
    'plan the file, 0 characters',
  ]);
});

t.test('what is refused, and how', async (t) => {
  const weir = new FakeWeir();
  const app = createApp(weir, 'all');
  for (const [method, path, status, message] of [
    ['GET', '/v1/nothing', 404, /there is no \/v1\/nothing/],
    ['POST', '/v1/status', 405, /does not take POST/],
    ['GET', '/v1/reload', 405, /does not take GET/],
    ['DELETE', '/v1/ct', 405, /does not take DELETE/],
    ['GET', '/v1/ct?servce=web', 400, /no parameter "servce"/],
    ['GET', '/v1/ct/export?format=json', 400, /no parameter "format"/],
    ['POST', '/v1/ct/import?service=web', 400, /no parameter "service"/],
    ['GET', '/v1/ct/import', 405, /does not take GET/],
    ['POST', '/v1/ct/flush?format=json', 400, /no parameter "format"/],
    ['GET', '/v1/drain?service=web&backend=b1', 405, /does not take GET/],
    ['POST', '/v1/drain?service=web', 400, /a parameter is missing/],
    ['POST', '/v1/undrain?backend=b1', 400, /a parameter is missing/],
    ['POST', '/v1/drain?service=web&backend=b1&weight=0', 400, /no parameter "weight"/],
    ['GET', '/v1/ct?format=xml', 400, /no format "xml"/],
    ['GET', '/v1/ct?state=NOPE', 400, /no state/],
    ['GET', '/v1/ct/watch?format=table', 400, /no format "table"/],
    ['GET', '/v1/ct/watch?count=1', 400, /no parameter "count"/],
    ['GET', '/v1/ct/watch?state=NOPE', 400, /no state/],
    ['POST', '/v1/ct/watch', 405, /does not take POST/],
    ['GET', '/v1/explain?protocol=tcp', 400, /no parameter "protocol"/],
    ['POST', '/v1/explain', 405, /does not take POST/],
    ['GET', '/v1/plan', 405, /does not take GET/],
    ['POST', '/v1/plan?path=x', 400, /no parameter "path"/],
    ['GET', '/v1/events?count=-1', 400, /count "-1" is no number/],
    ['GET', '/v1/capture?count=0', 400, /count "0" is no number from 1 on/],
    ['GET', '/v1/capture?snaplen=20', 400, /snaplen "20" is no number from 24 on/],
    ['GET', '/v1/capture?state=SYN_SENT', 400, /no parameter "state"/],
    ['GET', '/v1/events?follow=yes', 400, /follow is "yes"/],
    ['GET', '/v1/events?level=info', 400, /no parameter "level"/],
  ] as const) {
    const answer = await app.request(path, { method });
    t.equal(answer.status, status, `${method} ${path}`);
    t.match(await answer.json(), { code: 'USAGE', message, remedy: /./ });
  }
  t.equal((await app.request('/v1/reload')).headers.get('allow'), 'POST');
  t.strictSame(weir.asked, ['list json {"state":"NOPE"}', 'watch {"state":"NOPE"}'], 'nothing was flushed or reloaded');
  const huge = await app.request('/v1/reload', {
    method: 'POST',
    body: 'x'.repeat(70_000),
    headers: { 'content-length': '70000' },
  });
  t.equal(huge.status, 413);
  const declared = { 'content-length': String(65 * 1024 * 1024) };
  const file = await app.request('/v1/plan', { method: 'POST', body: 'x', headers: declared });
  t.equal(file.status, 413, 'no configuration is as large');
});

t.test('a refused file is answered with its mistakes', async (t) => {
  const weir = new FakeWeir();
  const app = createApp(weir, 'all');
  const problems = [{ line: 3, column: 5, path: 'services', message: 'is missing' }];
  weir.refusal = new RefusedConfig('/etc/weir.yaml', problems);
  const answer = await app.request('/v1/reload', { method: 'POST' });
  t.equal(answer.status, 422);
  t.match(await answer.json(), {
    code: 'CONFIG_INVALID',
    message: '/etc/weir.yaml:3:5 services: is missing',
    problems,
  });
  weir.refusal = new WeirError('NOT_RUNNING', 'weir is stopping');
  t.equal((await app.request('/v1/reload', { method: 'POST' })).status, 503);
});

t.test('the public part only reads', async (t) => {
  const weir = new FakeWeir();
  const app = createApp(weir, 'public');
  for (const path of ['/healthz', '/metrics', '/v1/status']) t.equal((await app.request(path)).status, 200, path);
  for (const [method, path] of [
    ['POST', '/v1/reload'],
    ['POST', '/v1/ct/flush'],
    ['POST', '/v1/ct/import'],
    ['GET', '/v1/ct/export'],
    ['POST', '/v1/drain?service=web&backend=b1'],
    ['GET', '/v1/ct'],
    ['GET', '/v1/ct/watch'],
    ['GET', '/v1/services'],
    ['GET', '/v1/explain?proto=tcp&src=10.1.0.2:1&dst=10.96.0.10:80'],
    ['POST', '/v1/plan'],
  ] as const) {
    t.equal((await app.request(path, { method })).status, 404, path);
  }
  t.strictSame(weir.asked, []);
});

t.test('metrics', async (t) => {
  const weir = new FakeWeir();
  const app = createApp(weir, 'public');
  const scrape = async (): Promise<Map<string, number>> => series(await (await app.request('/metrics')).text());
  t.match((await app.request('/metrics')).headers.get('content-type'), /text\/plain; version=0.0.4/);
  const first = await scrape();
  for (const [name, value] of [
    ['weir_build_info{version="1.2.3",engine="io_uring"}', 1],
    ['weir_conntrack_entries{table="tcp"}', 7],
    ['weir_conntrack_entries{table="any"}', 2],
    ['weir_conntrack_limit{table="tcp"}', 100],
    ['weir_conntrack_evictions_total{table="tcp",class="half-open"}', 3],
    ['weir_conntrack_gc_runs_total', 2],
    ['weir_packets_total{service="web",backend="b1",direction="original"}', 10],
    ['weir_bytes_total{service="web",backend="b2",direction="reply"}', 1200],
    ['weir_connections_total{service="web",backend="b1"}', 4],
    ['weir_connections_active{service="web",backend="b1"}', 3],
    ['weir_connections_closed_total{service="web",backend="b1"}', 1],
    ['weir_snat_ports_used{service="web",backend="b1"}', undefined],
    ['weir_snat_ports_limit', 32768],
    ['weir_config_reloads_total{result="refused"}', 1],
    ['weir_config_last_reload_duration_seconds', 0.012],
    ['weir_conntrack_gc_duration_seconds_total', 0.007],
    ['weir_batch_packets_bucket{le="1"}', 2],
    ['weir_batch_packets_bucket{le="2"}', 3],
    ['weir_batch_packets_bucket{le="+Inf"}', 4],
    ['weir_batch_packets_count', 4],
    ['weir_batch_duration_seconds_sum', 9.5],
    ['weir_batch_longest_seconds', 0.25],
    [
      'weir_device_info{device="weir0",engine="io_uring",vnet_header="true",csum="true",tso4="true",tso6="true",uso="false"}',
      1,
    ],
    ['weir_drops_total{reason="malformed"}', 2],
    ['weir_drops_total{reason="table-full"}', 0],
    ['weir_replies_total{reason="echo"}', 1],
    ['weir_device_packets_total{direction="rx"}', 11],
    ['weir_config_last_reload_success', 1],
    ['weir_config_last_reload_timestamp_seconds', Date.UTC(2026, 0, 2, 3, 4, 5) / 1000],
  ] as const) {
    t.equal(first.get(name), value, name);
  }
  t.ok(first.get('weir_resident_memory_bytes')! > 1e6);

  t.strictSame([...(await scrape()).keys()], [...first.keys()], 'a second scrape counts nothing twice');
  t.equal((await scrape()).get('weir_drops_total{reason="malformed"}'), 2);
  weir.backends = [backend('b1')];
  weir.refusal = new WeirError('CONFIG_INVALID', 'no');
  const later = await scrape();
  t.equal(later.get('weir_config_last_reload_success'), 0);
  t.notOk(
    [...later.keys()].some((name) => name.includes('"b2"')),
    'series of a removed backend go',
  );
  weir.backends = [
    { ...backend('b1'), health: { ...HEALTH, state: 'down' }, signals: { refused: 3, unanswered: 2 } },
    { ...backend('b2'), health: { ...HEALTH, state: 'up' }, takesNew: false },
    { ...backend('b3'), removed: true, takesNew: false },
  ];
  const sick = await scrape();
  for (const [name, value] of [
    ['weir_backend_up{service="web",backend="b1"}', 0],
    ['weir_backend_up{service="web",backend="b2"}', 1],
    ['weir_backend_up{service="web",backend="b3"}', undefined],
    ['weir_backend_takes_new{service="web",backend="b1"}', 1],
    ['weir_backend_takes_new{service="web",backend="b2"}', 0],
    ['weir_backend_refused_syns_total{service="web",backend="b1"}', 3],
    ['weir_backend_unanswered_syns_total{service="web",backend="b1"}', 2],
    ['weir_backend_unanswered_syns_total{service="web",backend="b3"}', 0],
  ] as const) {
    t.equal(sick.get(name), value, name);
  }
  weir.backends = [{ ...backend('b1'), snatPorts: 5 }];
  t.equal((await scrape()).get('weir_snat_ports_used{service="web",backend="b1"}'), 5);
  weir.backends = Array.from({ length: 2500 }, (_, i) => backend(`many-${i}`));
  const [text, again] = await Promise.all([0, 0].map(async () => (await app.request('/metrics')).text()));
  t.equal(text!.replace(/^weir_resident.*$/m, ''), again!.replace(/^weir_resident.*$/m, ''), 'two scrapes at once');
  t.equal([...series(text!).keys()].filter((name) => name.startsWith('weir_packets_total')).length, 5000);
  t.equal(text!.match(/^# TYPE weir_packets_total counter$/gm)!.length, 1, 'what is written in pieces has one head');
  weir.backends = [backend('b1'), backend('b1')];
  t.equal(
    (await scrape()).get('weir_connections_total{service="web",backend="b1"}'),
    8,
    'two of one name, one of them draining, are one series',
  );
});

t.test('sockets', async (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'weir-admin-'));
  t.teardown(() => rmSync(folder, { recursive: true }));
  const weir = new FakeWeir();

  t.test('made for the owner alone, with its folder, and removed', async (t) => {
    const socket = join(folder, 'run/weir.sock');
    const mask = process.umask();
    const admin = await serveAdmin(weir, { socket, listen: null, dashboard: false });
    t.equal(statSync(socket).mode & 0o777, 0o600);
    t.equal(process.umask(), mask);
    t.match(await get(socket, '/healthz'), '{"status":"ok"}');
    await admin.close();
    t.notOk(existsSync(socket));
  });

  t.test('a second one is refused, and harms nothing', async (t) => {
    const socket = join(folder, 'second.sock');
    const admin = await serveAdmin(weir, { socket, listen: null, dashboard: false });
    await t.rejects(serveAdmin(weir, { socket, listen: null, dashboard: false }), { code: 'ALREADY_RUNNING' });
    t.match(await get(socket, '/healthz'), 'ok');
    await admin.close();
  });

  t.test('what a killed one left is replaced; an ordinary file is not', async (t) => {
    const socket = join(folder, 'stale.sock');
    await leaveSocket(socket);
    t.ok(existsSync(socket));
    const admin = await serveAdmin(weir, { socket, listen: null, dashboard: false });
    t.match(await get(socket, '/healthz'), 'ok');
    await admin.close();
    writeFileSync(socket, 'precious');
    await t.rejects(serveAdmin(weir, { socket, listen: null, dashboard: false }), { code: 'ALREADY_RUNNING' });
    t.ok(existsSync(socket));
  });

  t.test('places that cannot be', async (t) => {
    const long = join(folder, 'x'.repeat(120));
    await t.rejects(serveAdmin(weir, { socket: long, listen: null, dashboard: false }), {
      code: 'ADDRESS_IN_USE',
      message: /longer/,
    });
    writeFileSync(join(folder, 'file'), '');
    const under = join(folder, 'file/weir.sock');
    await t.rejects(serveAdmin(weir, { socket: under, listen: null, dashboard: false }), { code: 'ADDRESS_IN_USE' });
  });

  t.test('a taken port is named, and the socket goes again', async (t) => {
    const taken = createServer();
    await new Promise<void>((resolve) => taken.listen(0, '127.0.0.1', resolve));
    const { port } = taken.address() as { port: number };
    const socket = join(folder, 'port.sock');
    const listen = { host: '127.0.0.1', port };
    await t.rejects(serveAdmin(weir, { socket, listen, dashboard: false }), {
      code: 'ADDRESS_IN_USE',
      message: `127.0.0.1:${port} is taken`,
    });
    t.notOk(existsSync(socket));
    await new Promise((resolve) => taken.close(resolve));
    const admin = await serveAdmin(weir, { socket, listen, dashboard: false });
    t.equal((await fetch(`http://127.0.0.1:${port}/healthz`)).status, 200);
    t.equal((await fetch(`http://127.0.0.1:${port}/v1/reload`, { method: 'POST' })).status, 404);
    await admin.close();
  });

  t.test('clients that are slow, silent or many are cut, and others served meanwhile', async (t) => {
    const socket = join(folder, 'limits.sock');
    const port = await freePort();
    const limits = { connections: 20, requestMs: 50, keepAliveMs: 50, silenceMs: 200, lookMs: 10 };
    const admin = await serveAdmin(weir, { socket, listen: { host: '127.0.0.1', port }, dashboard: false }, limits);
    const began = [
      ['nothing at all', ''],
      ['half a head', 'GET /healthz HTTP/1.1\r\nhost: x\r\n'],
      ['a head without its body', 'POST /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n'],
      [
        'a body that never ends',
        'POST /healthz HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n',
      ],
      ['an answer, and nothing more', 'GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n'],
      ['no HTTP', '\x16\x03\x01\x02\x00'],
    ] as const;
    for (const [place, where] of [
      ['tcp', { port, host: '127.0.0.1' }],
      ['socket', { path: socket }],
    ] as const) {
      for (const [what, text] of began) {
        // Whoever may open the socket may take its time with a body.
        if (place === 'socket' && /body/.test(what)) continue;
        const client = connect(where);
        client
          .on('error', () => {})
          .resume()
          .write(text);
        await once(client, 'close');
        t.pass(`${place}: ${what}`);
      }
    }
    const many = Array.from({ length: 60 }, () =>
      connect({ port, host: '127.0.0.1' })
        .on('error', () => {})
        .resume(),
    );
    const closed = many.map((each) => once(each, 'close'));
    await Promise.race(closed);
    t.match(await get(socket, '/healthz'), 'ok', 'the port is full, the socket is not');
    await Promise.all(closed);
    t.equal((await fetch(`http://127.0.0.1:${port}/healthz`)).status, 200, 'and then there is room again');
    await admin.close();
  });

  t.test('probes of HTTP/1.0, which name no host, are answered', async (t) => {
    const socket = join(folder, 'old.sock');
    const admin = await serveAdmin(weir, { socket, listen: null, dashboard: false });
    const client = connect(socket);
    let answer = '';
    client.on('data', (data) => (answer += data)).write('GET /healthz HTTP/1.0\r\n\r\n');
    await once(client, 'close');
    t.match(answer, /^HTTP\/1\.1 200 OK[\s\S]*"ok"/);
    await admin.close();
  });

  t.test('closing waits for nobody', async (t) => {
    const socket = join(folder, 'busy.sock');
    weir.chunks = function* () {
      for (;;) yield 'x'.repeat(32_768);
    };
    const admin = await serveAdmin(weir, { socket, listen: null, dashboard: false });
    const idle = Array.from({ length: 50 }, () => connect(socket));
    const cut = Promise.all(
      idle.map((each) => new Promise((resolve) => each.on('close', resolve).on('error', () => {}))),
    );
    const endless = get(socket, '/v1/ct');
    endless.catch(() => {});
    await setTimeout(50);
    await admin.close();
    await cut;
    await t.rejects(endless);
  });

  t.test('a list goes as fast as its reader, and others are served meanwhile', async (t) => {
    const socket = join(folder, 'slow.sock');
    let made = 0;
    let isReturned = false;
    weir.chunks = function* () {
      try {
        for (;;) {
          made++;
          yield 'x'.repeat(32_768);
        }
      } finally {
        isReturned = true;
      }
    };
    const admin = await serveAdmin(weir, { socket, listen: null, dashboard: false });
    const reader = connect(socket);
    await new Promise<void>((resolve) => reader.on('connect', resolve));
    reader.pause();
    reader.write('GET /v1/ct HTTP/1.1\r\nhost: x\r\n\r\n');
    let before = -1;
    while (made !== before || made === 0) {
      before = made;
      await setTimeout(50);
    }
    t.ok(made < 100, `${made} chunks were made for a reader that reads nothing`);
    t.match(await get(socket, '/healthz'), 'ok');
    reader.destroy();
    while (!isReturned) await setImmediate();
    t.pass('and the list ends with its reader');
    await admin.close();
  });

  t.test('a watch: each event at once, until its reader goes', async (t) => {
    const socket = join(folder, 'watch.sock');
    weir.events = ['{"event":"created"}\n', '{"event":"lost","count":2}\n{"event":"closed"}\n'];
    const admin = await serveAdmin(weir, { socket, listen: null, dashboard: false });
    const reader = request({ socketPath: socket, path: '/v1/ct/watch?format=json&service=web', agent: false });
    const response = await new Promise<IncomingMessage>((resolve) => reader.on('response', resolve).end());
    t.equal(response.headers['content-type'], 'application/x-ndjson');
    let text = '';
    response.setEncoding('utf8').on('data', (chunk) => (text += chunk));
    while (text.length < weir.events.join('').length) await setImmediate();
    t.equal(text, weir.events.join(''));
    t.equal(weir.asked.at(-1), 'watch {"service":"web"}');
    const [watch] = weir.watches;
    t.strictSame([watch!.asked, watch!.isClosed], [3, false], 'it waits for the next');
    response.on('error', () => {});
    reader.destroy();
    while (!watch!.isClosed) await setImmediate();
    t.pass('and ends with its reader, though nothing happens');

    const lines = await createApp(weir, 'all').request('/v1/events?count=1');
    t.equal(lines.headers.get('content-type'), 'application/x-ndjson');
    t.equal(await lines.text(), weir.events.at(-1));
    const file = await createApp(weir, 'all').request('/v1/capture?service=web&count=5&seconds=2&snaplen=64');
    t.equal(file.headers.get('content-type'), 'application/x-pcapng');
    t.equal(await file.text(), weir.events.join(''));
    t.equal(weir.asked.at(-1), 'capture {"service":"web","count":5,"seconds":2,"snapBytes":64}');
    await (await createApp(weir, 'all').request('/v1/capture')).body!.cancel();
    t.equal(weir.asked.at(-1), 'capture closed');
    const following = await createApp(weir, 'all').request('/v1/events?follow=true');
    const first = following.body!.getReader();
    t.equal(new TextDecoder().decode((await first.read()).value), weir.events[0]);
    await first.cancel();
    t.strictSame([weir.asked.at(-1), weir.watches.at(-1)!.isClosed], ['follow 1000', true]);

    t.equal((await createApp(weir, 'all').request('/v1/ct/watch', { method: 'HEAD' })).status, 200);
    t.equal(weir.watches.at(-1)!.asked, 0, 'a HEAD watches nothing');

    weir.events = [];
    const idle = get(socket, '/v1/ct/watch');
    idle.catch(() => {});
    while (weir.watches.at(-1)!.asked === 0) await setImmediate();
    await admin.close();
    await t.rejects(idle, 'closing waits for no watcher');
    while (!weir.watches.at(-1)!.isClosed) await setImmediate();
  });
});

t.test('an import', async (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'weir-admin-'));
  const socket = join(folder, 'weir.sock');
  const weir = new FakeWeir();
  const admin = await serveAdmin(weir, { socket, listen: null, dashboard: false });
  t.teardown(async () => {
    await admin.close();
    rmSync(folder, { recursive: true });
  });
  const open = (): { message: ClientRequest; answer: Promise<IncomingMessage> } => {
    const message = request({ socketPath: socket, path: '/v1/ct/import', method: 'POST', agent: false });
    return { message, answer: once(message, 'response').then(([response]) => response as IncomingMessage) };
  };
  const statusOf = async (answer: Promise<IncomingMessage>): Promise<number | undefined> => {
    const response = await answer;
    response.resume();
    return response.statusCode;
  };

  t.test('takes its body as it comes, and others are served meanwhile', async (t) => {
    const taken: string[] = [];
    let hear = (): void => {};
    weir.takeBody = async (body) => {
      for await (const chunk of body) {
        taken.push(Buffer.from(chunk).toString());
        hear();
      }
      return importView({});
    };
    const { message, answer } = open();
    for (const piece of ['one', 'two', 'three']) {
      const heard = new Promise<void>((resolve) => {
        hear = resolve;
      });
      message.write(piece);
      await heard;
      t.equal(taken.at(-1), piece, 'before the next is sent');
      t.match(await get(socket, '/healthz'), 'ok');
    }
    message.end();
    t.equal(await statusOf(answer), 200);
  });

  t.test('a sender that goes away ends it', async (t) => {
    const { promise, resolve } = withResolvers<string>();
    weir.takeBody = async (body) => {
      try {
        for await (const _ of body);
        resolve('ended');
      } catch (error) {
        resolve('failed');
        throw error;
      }
      return importView({});
    };
    const { message, answer } = open();
    answer.catch(() => {});
    message.write('x'.repeat(100_000), () => message.destroy());
    t.equal(await promise, 'failed', 'what was cut off is no end');
    t.match(await get(socket, '/healthz'), 'ok');
  });

  t.test('a refusal reaches a sender that is not done', async (t) => {
    weir.takeBody = async (body) => {
      for await (const _ of body) throw new WeirError('FLOWS_INVALID', 'line 1: no', 'Mend it.');
      return importView({});
    };
    const { message, answer } = open();
    message.on('error', () => {});
    for (let i = 0; i < 50; i++) message.write('x'.repeat(100_000));
    const response = await answer;
    t.equal(response.statusCode, 422);
    t.match(JSON.parse((await response.toArray()).join('')), { code: 'FLOWS_INVALID', message: 'line 1: no' });
    message.destroy();
  });

  t.test('goes as fast as it is taken', async (t) => {
    let taken = 0;
    const { promise: go, resolve: release } = withResolvers<string>();
    weir.takeBody = async (body) => {
      for await (const chunk of body) {
        if (taken === 0) await go;
        taken += chunk.length;
      }
      return importView({});
    };
    const { message, answer } = open();
    const pieces = 300;
    let sent = 0;
    const pump = (): void => {
      while (sent < pieces) {
        sent++;
        if (!message.write(Buffer.alloc(65_536))) return;
      }
      message.end();
    };
    message.on('drain', pump);
    pump();
    let before = -1;
    while (sent !== before) {
      before = sent;
      await setTimeout(50);
    }
    t.ok(sent > 0 && sent < 100, `${sent} pieces were taken of a sender nobody reads`);
    release('');
    t.equal(await statusOf(answer), 200);
    t.equal(taken, pieces * 65_536);
  });
});

function withResolvers<T>(): { promise: Promise<T>; resolve: (value: T) => void } {
  let resolve!: (value: T) => void;
  const promise = new Promise<T>((settle) => {
    resolve = settle;
  });
  return { promise, resolve };
}

function get(socketPath: string, path: string): Promise<string> {
  return new Promise((resolve, reject) => {
    const message = request({ socketPath, path, agent: false }, (response) => {
      let body = '';
      response.setEncoding('utf8').on('data', (chunk) => (body = (body + chunk).slice(-1000)));
      response.on('end', () => resolve(body)).on('error', reject);
    });
    message.on('error', reject).end();
  });
}

/** A socket nobody listens on any more: its file, linked away before its owner's end removes it. */
async function leaveSocket(path: string): Promise<void> {
  const server = createServer();
  await new Promise<void>((resolve) => server.listen(`${path}.live`, resolve));
  linkSync(`${path}.live`, path);
  await new Promise((resolve) => server.close(resolve));
}

async function freePort(): Promise<number> {
  const server = createServer();
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const { port } = server.address() as { port: number };
  await new Promise((resolve) => server.close(resolve));
  return port;
}
