import { EventEmitter, once } from 'node:events';
import t from 'tap';
import { ManualClock } from '../../../lib/base/clock.js';
import type { HealthConfig } from '../../../lib/config/config.js';
import type { Finding } from '../../../lib/control/health/attempt.js';
import type { Target } from '../../../lib/control/health/check-schedule.js';
import { HealthChecker } from '../../../lib/control/health/checker.js';
import type { ProbeRequest } from '../../../lib/control/health/probe.js';
import { Identities } from '../../../lib/control/identity.js';
import { EventLog } from '../../../lib/control/log.js';

const CHECK: HealthConfig = { type: 'tcp', port: null, intervalMs: 20, timeoutMs: 1000, rise: 2, fall: 3 };

const identities = new Identities();
const web = identities.service({ name: 'web', address: { word: 0x0a600001 }, port: 80, protocolNumber: 6 });

function targets(count: number, check = CHECK): Target[] {
  return Array.from({ length: count }, (_, i) => {
    const backend = { name: `b${i}`, address: { word: 0x0a020000 + i }, port: 8080 };
    return { service: web, backend: identities.backend(web, backend), check };
  });
}

interface Probe extends ProbeRequest {
  isCancelled: boolean;
  finish(finding: Finding): void;
}

/** A checker whose clock and probes are in the test's hands; only its wake-ups are real. */
class Practice extends EventEmitter {
  readonly clock = new ManualClock(5000);
  readonly lines: Record<string, unknown>[] = [];
  changes = 0;
  isProberClosed = false;
  /** Under way. */
  readonly probes: Probe[] = [];
  readonly checker: HealthChecker;

  constructor() {
    super();
    this.checker = new HealthChecker({
      clock: this.clock,
      random: () => 0,
      log: new EventLog({ write: (line) => void this.lines.push(JSON.parse(line)) }),
      onChange: () => {
        this.changes++;
      },
      prober: {
        start: (request, done) => {
          const probe: Probe = {
            ...request,
            isCancelled: false,
            finish: (finding) => {
              this.probes.splice(this.probes.indexOf(probe), 1);
              done(finding);
            },
          };
          this.probes.push(probe);
          this.emit('probe');
          return () => {
            probe.isCancelled = true;
          };
        },
        close: () => {
          this.isProberClosed = true;
        },
      },
    });
  }

  /** The next probe's result. */
  async find(outcome: Finding['outcome'], text: string): Promise<void> {
    while (this.probes.length === 0) await once(this, 'probe');
    this.probes[0]!.finish({ outcome, text });
    this.clock.advance(20);
  }
}

t.test('a change is told once, with its reason', async (t) => {
  const practice = new Practice();
  const { checker, lines } = practice;
  const [b0] = targets(1);
  t.ok(checker.isUp(b0!.backend), 'who is not checked is up');
  t.equal(checker.healthOf(b0!.backend), undefined);
  checker.configure([b0!]);
  t.ok(checker.isUp(b0!.backend));
  for (let i = 0; i < 2; i++) await practice.find('failure', 'connection refused');
  t.strictSame([checker.isUp(b0!.backend), practice.changes, lines], [true, 0, []]);
  for (let i = 0; i < 4; i++) await practice.find('failure', 'no answer within 1s');
  t.notOk(checker.isUp(b0!.backend));
  t.match(lines, [
    {
      level: 'warn',
      event: 'health-changed',
      service: 'web',
      backend: 'b0',
      address: '10.2.0.0:8080',
      state: 'down',
      reason: 'no answer within 1s',
      msg: 'web/b0 is down after 3 failed probes: no answer within 1s',
    },
  ]);
  t.match(checker.healthOf(b0!.backend), { isUp: false, reason: 'no answer within 1s' });
  const { forMs } = checker.healthOf(b0!.backend)!;
  practice.clock.advance(7);
  t.equal(checker.healthOf(b0!.backend)!.forMs, forMs + 7, 'for how long');
  await practice.find('success', 'connected');
  await practice.find('success', 'connected');
  t.match(lines.slice(1), [{ level: 'info', state: 'up', msg: 'web/b0 is up after 2 good probes: connected' }]);
  t.equal(practice.changes, 2);
  checker.close();
});

t.test('what cannot be probed is said once, and changes nothing', async (t) => {
  const practice = new Practice();
  practice.checker.configure(targets(2));
  for (let i = 0; i < 8; i++) await practice.find('unknown', 'the optional package raw-socket is not installed');
  t.equal(practice.changes, 0);
  t.match(practice.lines, [
    {
      level: 'warn',
      event: 'health-unknown',
      msg: 'web/b0 cannot be probed and stays up: the optional package raw-socket is not installed',
    },
  ]);
  t.equal(practice.lines.length, 1);
  practice.checker.close();
});

t.test('so many at once and no more; each end lets another begin', async (t) => {
  const practice = new Practice();
  const { checker, probes } = practice;
  const timers = process.getActiveResourcesInfo().filter((name) => name === 'Timeout').length;
  checker.configure(targets(3000));
  while (probes.length < 1024) await once(practice, 'probe');
  t.equal(probes.length, 1024, 'all that are due begin in one turn, up to the limit');
  const first = new Set(probes.map(({ address }) => address));
  for (let ended = 0; ended < 20; ended++) {
    const { address } = probes[0]!;
    probes[0]!.finish({ outcome: 'success', text: 'connected' });
    await once(practice, 'probe');
    t.equal(probes.length, 1024);
    t.notOk(first.has(probes.at(-1)!.address), `after ${address} one that has not had its turn`);
  }
  checker.close();
  t.ok(
    probes.every(({ isCancelled }) => isCancelled),
    'a stop ends them all',
  );
  t.ok(practice.isProberClosed);
  probes[0]!.finish({ outcome: 'failure', text: 'connection refused' });
  checker.configure(targets(3001));
  t.equal(process.getActiveResourcesInfo().filter((name) => name === 'Timeout').length, timers, 'and lets none begin');
});
