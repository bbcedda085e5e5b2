import t from 'tap';
import { ManualClock } from '../../../lib/base/clock.js';
import { LIVE_WATCHES, LiveFeed, MISSED_VIEWS, type Sample } from '../../../lib/control/live/live-feed.js';
import type { LiveView, LiveWatch } from '../../../lib/control/live/live-view.js';
import type { Survey } from '../../../lib/control/live/survey.js';
import { backend, FakeWeir } from '../../support/fake-weir.js';

/** A feed whose time, counters and surveys are by hand. */
class Bench {
  readonly clock = new ManualClock(1000);
  readonly feed: LiveFeed;
  /** How often counters were read, and connections surveyed. */
  samples = 0;
  surveys = 0;
  /** What the backend has counted, in packets from the client; its bytes are ten times as many. */
  packets = 0;
  drops = 0;
  surveyMs = 4;
  #later: { run: () => void; atMs: number } | undefined;

  constructor() {
    this.feed = new LiveFeed({
      clock: this.clock,
      sample: () => this.#sample(),
      survey: async (worked) => {
        this.surveys++;
        worked(this.surveyMs);
        return SURVEY;
      },
      later: (run, ms) => {
        const entry = { run, atMs: this.clock.nowMs() + ms };
        this.#later = entry;
        return () => {
          if (this.#later === entry) this.#later = undefined;
        };
      },
      timeOfDay: () => '2026-01-02T03:04:05.000Z',
    });
  }

  get isWaiting(): boolean {
    return this.#later !== undefined;
  }

  /** Lets time pass until the next view, or some more than that. */
  async tick(lateMs = 0): Promise<void> {
    const { run, atMs } = this.#later!;
    this.clock.set(atMs + lateMs);
    run();
    await settled();
  }

  #sample(): Sample {
    this.samples++;
    const weir = new FakeWeir();
    weir.backends = [
      {
        ...backend('b1'),
        packets: { original: this.packets, reply: 0 },
        bytes: { original: 10 * this.packets, reply: 0 },
        connections: this.packets / 10,
      },
    ];
    const status = weir.statusView();
    return {
      status: { ...status, traffic: { ...status.traffic, rxPackets: this.packets, drops: { malformed: this.drops } } },
      services: weir.serviceViews().map((view) => ({ view, shares: [1] })),
      omittedServices: 0,
      conntrack: weir.conntrackView(),
    };
  }
}

const SURVEY: Survey = {
  census: {
    live: [0, 0],
    states: [],
    backends: new Float64Array(1),
    open: new Float64Array(1),
    snatPorts: new Float64Array(1),
  },
  clients: { distinct: 0, error: 0, top: [] },
};

function settled(): Promise<void> {
  return new Promise((resolve) => setImmediate(resolve));
}

async function next(watch: LiveWatch): Promise<LiveView> {
  return JSON.parse((await watch.next()) ?? 'null');
}

t.test('rates are what was counted between two views, by the time that passed', async (t) => {
  const bench = new Bench();
  const watch = bench.feed.watch();
  bench.packets = 100;
  const first = await next(watch);
  t.match(first, { intervalSeconds: 0, rates: { packetsIn: 0 }, count: { secondsAgo: 0, tookSeconds: 0.004 } });
  bench.packets = 300;
  bench.drops = 5;
  await bench.tick(1000);
  const second = await next(watch);
  t.match(second, { intervalSeconds: 2, rates: { packetsIn: 100, connections: 10, drops: 2.5 } });
  const rates = { packets: { original: 100, reply: 0 }, bits: { original: 8000, reply: 0 }, connections: 10 };
  t.match(second.services[0], { rates, backends: [{ share: 1, rates }] });
  t.match(second.reasons, [{ reason: 'malformed', verdict: 'drop', packets: 5, rate: 2.5, meaning: /./ }]);
  bench.packets = 7;
  await bench.tick();
  t.match(await next(watch), { rates: { packetsIn: 0 }, services: [{ rates: { connections: 0 } }] }, 'another one now');
  watch.close();
});

t.test('one producer for all, and none for nobody', async (t) => {
  const bench = new Bench();
  await settled();
  t.strictSame([bench.samples, bench.surveys, bench.isWaiting], [0, 0, false]);
  const [one, two] = [bench.feed.watch(), bench.feed.watch()];
  t.strictSame([bench.samples, bench.isWaiting], [0, false], 'not before it is asked for');
  const text = await one.next();
  t.equal(await two.next(), text, 'who comes later has the newest at once');
  const both = [one.next(), two.next()];
  await bench.tick();
  t.equal(await both[0], await both[1]);
  t.equal(bench.samples, 2);
  one.close();
  t.ok(bench.isWaiting);
  two.close();
  two.close();
  t.notOk(bench.isWaiting);
  const again = bench.feed.watch();
  t.equal((await next(again)).intervalSeconds, 0, 'it begins anew');
  t.equal(bench.surveys, 1, 'but does not survey again so soon');
  again.close();
});

t.test('surveys are rare, and rarer the more work they are', async (t) => {
  const bench = new Bench();
  const watch = bench.feed.watch();
  await watch.next();
  const tick = async (): Promise<void> => {
    await bench.tick();
    await watch.next();
  };
  for (let i = 0; i < 10; i++) await tick();
  t.equal(bench.surveys, 3, 'every five seconds');
  bench.surveyMs = 80;
  for (let i = 0; i < 5; i++) await tick();
  t.equal(bench.surveys, 4);
  for (let i = 0; i < 19; i++) await tick();
  t.equal(bench.surveys, 4, 'not within 250 times what it took');
  await tick();
  t.equal(bench.surveys, 5);
  watch.close();
});

t.test('a slow watch has the newest view only, and in the end none', async (t) => {
  const bench = new Bench();
  const slow = bench.feed.watch();
  await slow.next();
  for (let i = 1; i <= 3; i++) {
    bench.packets = i;
    await bench.tick();
  }
  t.equal((await next(slow)).status.traffic.rxPackets, 3);
  for (let i = 0; i <= MISSED_VIEWS; i++) await (bench.isWaiting ? bench.tick() : settled());
  t.equal(await slow.next(), null, 'it was given up');
  t.notOk(bench.isWaiting, 'and nothing goes on for it');
});

t.test('there are so many watches at most', async (t) => {
  const bench = new Bench();
  const watches = Array.from({ length: LIVE_WATCHES }, () => bench.feed.watch());
  const late = bench.feed.watch();
  for (const watch of watches) void watch.next();
  await settled();
  t.throws(() => bench.feed.watch(), { code: 'NOT_SUPPORTED' });
  t.equal(await late.next(), null, 'one that was let in before they began');
  watches[0]!.close();
  t.doesNotThrow(() => bench.feed.watch());
  for (const watch of watches) watch.close();
});
