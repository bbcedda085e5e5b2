import t from 'tap';
import { createApp } from '../../lib/admin/app.js';
import { WeirError } from '../../lib/base/errors.js';
import { FakeWeir, liveView } from '../support/fake-weir.js';

const HERE = { host: '127.0.0.1:9650' };

t.test('a stream of views', async (t) => {
  const weir = new FakeWeir();
  weir.liveViews = [liveView(), liveView({ intervalSeconds: 2 })];
  const answer = await createApp(weir, 'all').request('/v1/live');
  t.match(answer.headers.get('content-type'), 'text/event-stream');
  t.equal(answer.headers.get('cache-control'), 'no-store');
  const reader = answer.body!.getReader();
  const read = async (): Promise<string> => new TextDecoder().decode((await reader.read()).value);
  t.equal(await read(), 'retry: 1000\n\n');
  for (const view of weir.liveViews) t.equal(await read(), `data: ${JSON.stringify(view)}\n\n`);
  await reader.cancel();
  t.strictSame(weir.asked, ['live', 'live closed']);
  weir.refusal = new WeirError('NOT_SUPPORTED', '32 are watching already', 'Close one of them.');
  t.equal((await createApp(weir, 'all').request('/v1/live')).status, 422);
});

/** Does as the server does for a reader that goes. */
async function discard(answer: Response): Promise<Response> {
  await answer.body?.cancel();
  return answer;
}

t.test('the page of nobody else reads what the dashboard shows', async (t) => {
  const app = createApp(new FakeWeir(), 'dashboard');
  const statusOf = async (path: string, headers: Record<string, string>): Promise<number> =>
    (await discard(await app.request(path, { headers }))).status;
  for (const path of ['/', '/v1/ct', '/v1/live', '/v1/explain?proto=tcp&src=10.1.0.2:1&dst=10.96.0.10:80']) {
    for (const host of ['127.0.0.1:9650', '192.0.2.1', '[::1]:9650', 'localhost:9650', 'weir.localhost']) {
      t.equal(await statusOf(path, { host }), 200, `${path} at ${host}`);
    }
    for (const host of ['evil.example:9650', '127.0.0.1.evil.example', 'localhost.evil.example', '']) {
      t.equal(await statusOf(path, { host }), 403, `${path} at "${host}"`);
    }
  }
  t.equal(await statusOf('/v1/ct', { ...HERE, 'sec-fetch-site': 'cross-site' }), 403);
  const refused = await app.request('/v1/ct', { headers: { host: 'gateway.example:9650' } });
  t.match(await refused.json(), {
    message: '/v1/ct answers only to an address or localhost as host, not to "gateway.example:9650"',
    remedy: /^Open http:\/\/ADDRESS:PORT .*\/v1\/status answer whoever asks, and the UNIX socket/,
  });
  const elsewhere = await app.request('/v1/services', { headers: HERE });
  t.match(await elsewhere.json(), {
    message: '/v1/services is not served on admin.listen',
    remedy: /^Ask the UNIX socket .* here are \/healthz, \/metrics, /,
  });
  t.equal(await statusOf('/', { ...HERE, 'sec-fetch-site': 'cross-site' }), 200, 'a link may lead here');
  t.equal(await statusOf('/v1/status', { host: 'gateway.example:9650' }), 200, 'what was public is');
  t.equal(await statusOf('/v1/services', HERE), 404);
  t.equal((await app.request('/v1/reload', { method: 'POST', headers: HERE })).status, 404);
  const without = createApp(new FakeWeir(), 'public');
  for (const path of ['/', '/v1/ct', '/v1/live', '/v1/explain']) {
    t.equal((await without.request(path, { headers: HERE })).status, 404, `${path} with dashboard: false`);
  }
});

t.test('a list has an end, there', async (t) => {
  const weir = new FakeWeir();
  const app = createApp(weir, 'dashboard');
  for (const query of ['', '?limit=101&service=web', '?limit=1000000']) {
    await (await app.request(`/v1/ct${query}`, { headers: HERE })).text();
  }
  await (await createApp(weir, 'all').request('/v1/ct?limit=1000000')).text();
  t.strictSame(weir.asked, [
    'list json {}, 500 at most',
    'list json {"service":"web"}, 101 at most',
    'list json {}, 500 at most',
    'list json {}, 1000000 at most',
  ]);
  t.equal((await app.request('/v1/ct?limit=0', { headers: HERE })).status, 400);
});

t.test('four at a time, and who has gone makes room', async (t) => {
  const weir = new FakeWeir();
  const app = createApp(weir, 'dashboard');
  const ask = (method = 'GET'): Response | Promise<Response> => app.request('/v1/ct', { headers: HERE, method });
  for (let i = 0; i < 5; i++) await ask('HEAD');
  const [first, second, ...others] = await Promise.all([ask(), ask(), ask(), ask()]);
  const fifth = await ask();
  t.strictSame([fifth.status, fifth.headers.get('retry-after')], [503, '1']);
  t.match(await fifth.json(), { code: 'USAGE', message: /4 requests/ });
  await first!.text();
  const sixth = await ask();
  t.equal(sixth.status, 200, 'one is read');
  await second!.body!.cancel();
  t.equal((await ask()).status, 200, 'one has gone');
  t.equal((await ask()).status, 503);
  for (const each of [sixth, ...others]) await each.text();
  weir.refusal = new WeirError('USAGE', 'no', '');
  for (let i = 0; i < 5; i++) {
    const refused = await app.request('/v1/explain', { headers: HERE });
    t.match(await refused.json(), { message: 'no' }, 'a refusal makes room as well');
  }
});
