import t, { type Test } from 'tap';
import { allocateEvents, EVENT_CREATED, EventWriter } from '../../lib/conntrack/events.js';
import { RECORD_WORDS } from '../../lib/conntrack/record.js';
import { EventFeed } from '../../lib/control/event-feed.js';
import type { FlowEventView, LostView, Watch } from '../../lib/control/view.js';
import { tcp, udp } from '../fixtures/packets.js';
import { TestPipeline } from '../support/pipeline.js';
import { client, establish } from '../support/traffic.js';

const CONFIG = `services:
  - { name: web, address: 10.96.0.10, port: 80, protocol: tcp, backends: [{ name: b1, address: 10.2.0.11, port: 8080 }] }
  - { name: dns, address: 10.96.0.10, port: 53, protocol: udp, backends: [{ name: d1, address: 10.2.0.12, port: 53 }] }
`;

// The feed's own timer keeps no process alive.
const alive = setInterval(() => {}, 1000);
t.teardown(() => clearInterval(alive));

type Line = FlowEventView | LostView;

async function next(watch: Watch): Promise<Line[]> {
  const text = await watch.next();
  if (!text.endsWith('\n')) throw new Error('a line is cut');
  return text
    .slice(0, -1)
    .split('\n')
    .map((line) => JSON.parse(line) as Line);
}

/** A watch that has begun, and what its first call will give. */
function begin(t: Test, feed: EventFeed, filter = {}): { watch: Watch; first: Promise<Line[]> } {
  const watch = feed.watch(filter);
  t.teardown(() => watch.close());
  return { watch, first: next(watch) };
}

function feedOf(pipeline: TestPipeline): EventFeed {
  return new EventFeed(pipeline.events, pipeline.identities, { nowMs: () => pipeline.nowMs });
}

function brief(lines: readonly Line[]): string[] {
  return lines.map((line) =>
    line.event === 'lost' ? `lost ${line.count}` : `${line.event} ${line.client} ${line.state}`,
  );
}

t.test('events with names, as the list of connections has them', async (t) => {
  const pipeline = new TestPipeline(CONFIG);
  const { watch, first } = begin(t, feedOf(pipeline));
  const beganMs = Date.now();
  establish(pipeline);
  const lines = await first;
  const endedMs = Date.now();
  t.strictSame(brief(lines), [
    'created 10.1.0.2:40000 SYN_SENT',
    'state 10.1.0.2:40000 SYN_RECV',
    'state 10.1.0.2:40000 ESTABLISHED',
  ]);
  const last = lines[2] as FlowEventView;
  const { at, ...rest } = last;
  t.strictSame(rest, {
    event: 'state',
    previous: 'SYN_RECV',
    proto: 'tcp',
    type: 'OUT',
    client: '10.1.0.2:40000',
    vip: '10.96.0.10:80',
    backend: '10.2.0.11:8080',
    service: 'web',
    state: 'ESTABLISHED',
    flags: ['SeenNonSyn'],
    expiresIn: 8000,
    packets: { original: 2, reply: 1 },
    bytes: { original: 80, reply: 40 },
  });
  t.match(at, /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/);
  t.ok(Date.parse(at) >= beganMs && Date.parse(at) <= endedMs, 'the time of day');

  pipeline.nowMs += 8_000_000;
  pipeline.tcp.reap(0, 10, pipeline.nowMs);
  pipeline.configure(CONFIG.replace('name: web', 'name: shop'));
  t.match(await next(watch), [
    { event: 'closed', cause: 'expired', service: 'shop', state: 'ESTABLISHED', expiresIn: 0 },
  ]);
});

t.test('the wall clock may be set', async (t) => {
  const pipeline = new TestPipeline(CONFIG);
  const { watch, first } = begin(t, feedOf(pipeline));
  pipeline.send(tcp({ ...client, flags: 'S' }));
  const before = (await first)[0] as FlowEventView;
  const { now } = Date;
  Date.now = () => now() + 3_600_000;
  t.teardown(() => {
    Date.now = now;
  });
  pipeline.send(tcp({ ...client, sport: 7, flags: 'S' }));
  const after = (await next(watch))[0] as FlowEventView;
  t.ok(Date.parse(after.at) - Date.parse(before.at) >= 3_600_000);
});

t.test('each watcher has its filter', async (t) => {
  const pipeline = new TestPipeline(CONFIG);
  const feed = feedOf(pipeline);
  const filters = [{ service: 'web' }, { backend: 'dns/d1' }, { client: '10.1.0.3' }, { state: 'established' }];
  const watches = filters.map((filter) => begin(t, feed, filter).first);
  establish(pipeline);
  pipeline.send(tcp({ ...client, src: '10.1.0.3', sport: 1, flags: 'S' }));
  pipeline.send(udp({ ...client, dport: 53, payload: 10 }));
  const seen = await Promise.all(watches);
  t.strictSame(seen.map(brief), [
    [
      'created 10.1.0.2:40000 SYN_SENT',
      'state 10.1.0.2:40000 SYN_RECV',
      'state 10.1.0.2:40000 ESTABLISHED',
      'created 10.1.0.3:1 SYN_SENT',
    ],
    ['created 10.1.0.2:40000 UNREPLIED'],
    ['created 10.1.0.3:1 SYN_SENT'],
    ['state 10.1.0.2:40000 ESTABLISHED'],
  ]);
});

t.test('the ring is written from the first watcher’s coming to the last one’s leaving', async (t) => {
  const pipeline = new TestPipeline(CONFIG);
  const feed = feedOf(pipeline);
  const writer = new EventWriter(pipeline.events);
  const unread = feed.watch({});
  t.notOk(writer.isWatched, 'a watch begins when it is read');
  unread.close();
  const one = begin(t, feed);
  const two = begin(t, feed);
  t.ok(writer.isWatched);
  one.watch.close();
  one.watch.close();
  t.ok(writer.isWatched);
  pipeline.send(tcp({ ...client, flags: 'S' }));
  t.equal((await two.first).length, 1);
  two.watch.close();
  t.notOk(writer.isWatched);
  pipeline.send(tcp({ ...client, sport: 7, flags: 'S' }));
  const three = begin(t, feed);
  pipeline.send(tcp({ ...client, sport: 8, flags: 'S' }));
  t.strictSame(brief(await three.first), ['created 10.1.0.2:8 SYN_SENT'], 'and what came between is nobody’s');
});

t.test('what the ring could not hold is counted, whatever the filter', async (t) => {
  const pipeline = new TestPipeline(CONFIG);
  const feed = feedOf(pipeline);
  const all = begin(t, feed);
  const few = begin(t, feed, { client: '10.1.0.2:999' });
  for (let i = 0; i < 999; i++) pipeline.send(tcp({ ...client, sport: i + 1, flags: 'S' }));
  const lines = await all.first;
  t.same(lines[0], { event: 'lost', count: 999 - (lines.length - 1) });
  t.match(lines.at(-1), { client: '10.1.0.2:999' });
  t.match(await few.first, [lines[0], lines.at(-1)]);
});

t.test('a watcher that takes nothing costs bounded memory, and is told what it missed', async (t) => {
  const memory = allocateEvents(16_384);
  const writer = new EventWriter(memory);
  const names = { serviceName: () => 'web', backendName: () => 'b1' };
  const feed = new EventFeed(memory, names, { nowMs: () => 0 });
  const quick = begin(t, feed);
  const slow = begin(t, feed);
  const record = new Int32Array(RECORD_WORDS);
  const total = 2 * 16_384;
  let taken = 0;
  let lines = quick.first;
  for (let written = 0; written < total; ) {
    for (; written < taken + 16_384; written++) writer.write(EVENT_CREATED, 0, record, 0, 0);
    for (; taken < written; lines = next(quick.watch)) taken += (await lines).length;
  }
  t.equal(taken, total, 'one that takes them gets all');

  const first = (await slow.first).length;
  const text = await slow.watch.next();
  t.ok(text.length < 4.2 * 1024 * 1024, `${text.length} characters waited`);
  const waited = text.trimEnd().split('\n');
  const { event, count } = JSON.parse(waited.at(-1)!) as LostView;
  t.equal(event, 'lost');
  t.equal(first + waited.length - 1 + count, total, 'all are accounted for');
  writer.write(EVENT_CREATED, 0, record, 0, 0);
  t.match(await next(slow.watch), [{ event: 'created' }], 'and it goes on');
});
