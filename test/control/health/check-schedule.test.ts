import fc from 'fast-check';
import t from 'tap';
import { ManualClock } from '../../../lib/base/clock.js';
import { type Random, seededRandom } from '../../../lib/base/random.js';
import type { HealthConfig } from '../../../lib/config/config.js';
import { CheckSchedule, type Target } from '../../../lib/control/health/check-schedule.js';
import { Identities } from '../../../lib/control/identity.js';

const CHECK = { type: 'tcp', port: null, intervalMs: 2000, timeoutMs: 1000, rise: 2, fall: 3 } as const;

const identities = new Identities();
const web = identities.service({ name: 'web', address: { word: 0x0a600001 }, port: 80, protocolNumber: 6 });

function target(number: number, check: HealthConfig = CHECK): Target {
  const backend = { name: `b${number}`, address: { word: 0x0a020000 + number }, port: 80 };
  return { service: web, backend: identities.backend(web, backend), check };
}

/** Draws that are all `share` of the whole. */
function always(share: number): Random {
  return () => share * 0x100000000;
}

const FINDINGS = {
  s: { outcome: 'success', text: 'connected' },
  f: { outcome: 'failure', text: 'connection refused' },
  u: { outcome: 'unknown', text: 'EMFILE' },
} as const;

type Letter = keyof typeof FINDINGS;

/** One target, and its clock. */
class Patient {
  readonly clock = new ManualClock(1000);
  readonly schedule: CheckSchedule;
  target: Target;

  constructor(check: HealthConfig = CHECK, random: Random = always(0)) {
    this.schedule = new CheckSchedule(random);
    this.target = target(1, check);
    this.schedule.configure([this.target], this.clock.nowMs());
  }

  get isUp(): boolean {
    return this.schedule.standing(this.target.backend)!.isUp;
  }

  /** The next probe, when it is due, with this result: what changed. */
  probe(letter: Letter): boolean | undefined {
    this.clock.set(this.schedule.nextDueMs());
    const [due] = this.schedule.takeDue(this.clock.nowMs(), 1);
    return this.schedule.report(due!, FINDINGS[letter], this.clock.nowMs())!.change;
  }

  /** The state after each result, `+` up, `-` down; a change is followed by `!`. */
  run(letters: string): string {
    return [...letters]
      .map((letter) => {
        const change = this.probe(letter as Letter);
        return `${this.isUp ? '+' : '-'}${change === undefined ? '' : '!'}`;
      })
      .join('');
  }
}

t.test('rise and fall', async (t) => {
  for (const [rise, fall, results, states] of [
    [2, 3, 'ssss', '++++'],
    [2, 3, 'ff', '++'],
    [2, 3, 'fff', '++-!'],
    [2, 3, 'ffsff', '+++++'],
    [2, 3, 'ffsfff', '+++++-!'],
    [2, 3, 'ffffff', '++-!---'],
    [2, 3, 'fffsfss', '++-!---+!'],
    [2, 3, 'fffssff', '++-!-+!++'],
    [2, 3, 'fffssfff', '++-!-+!++-!'],
    [1, 1, 'fsfs', '-!+!-!+!'],
    [1, 2, 'ffs', '+-!+!'],
    [3, 1, 'fssfsss', '-!-----+!'],
    [2, 3, 'fuffu', '+++-!-'],
    [2, 3, 'uuuu', '++++'],
    [2, 3, 'fffsus', '++-!--+!'],
  ] as const) {
    t.equal(new Patient({ ...CHECK, rise, fall }).run(results), states, `rise ${rise}, fall ${fall}: ${results}`);
  }
});

t.test('law: a change needs as many findings in a row against the state, and comes with the last of them', async () => {
  const letters = fc.array(fc.constantFrom<Letter>('s', 'f', 'u'), { maxLength: 60 });
  fc.assert(
    fc.property(letters, fc.integer({ min: 1, max: 4 }), fc.integer({ min: 1, max: 4 }), (results, rise, fall) => {
      const patient = new Patient({ ...CHECK, rise, fall });
      let known: Letter[] = [];
      for (const letter of results) {
        const wasUp = patient.isUp;
        const change = patient.probe(letter);
        if (letter !== 'u') known.push(letter);
        const wanted = wasUp ? fall : rise;
        const isRow = known.length >= wanted && known.slice(-wanted).every((each) => (each === 'f') === wasUp);
        if ((change !== undefined) !== (isRow && letter !== 'u')) return false;
        if (change !== undefined) {
          if (change === wasUp || patient.isUp !== change) return false;
          known = [];
        }
      }
      return true;
    }),
  );
});

t.test('what is known: since when, why, and the last finding', async (t) => {
  const patient = new Patient();
  const standing = () => patient.schedule.standing(patient.target.backend);
  t.match(standing(), { isUp: true, sinceMs: 1000, reason: 'not probed yet', last: 'not probed yet' });
  patient.probe('u');
  t.match(standing(), { reason: 'not probed yet', last: 'EMFILE' });
  patient.probe('s');
  t.match(standing(), { isUp: true, sinceMs: 1000, reason: 'connected', last: 'connected' });
  patient.run('fff');
  const downMs = patient.clock.nowMs();
  t.match(standing(), { isUp: false, sinceMs: downMs, reason: 'connection refused', last: 'connection refused' });
  patient.probe('s');
  t.match(standing(), { isUp: false, sinceMs: downMs, reason: 'connection refused', last: 'connected' });
  t.equal(patient.schedule.standing(target(2).backend), undefined);
});

t.test('when probes are due', async (t) => {
  for (const [share, first, next] of [
    [0, 1000, 2000],
    [0.5, 2000, 1900],
    [0.999_999, 2999.998, 1800],
  ] as const) {
    const { schedule, clock, target } = new Patient(CHECK, always(share));
    t.ok(Math.abs(schedule.nextDueMs() - first) < 0.01, `the first within an interval: ${schedule.nextDueMs()}`);
    t.strictSame(schedule.takeDue(first - 0.1, 9), []);
    clock.set(first + 0.1);
    t.strictSame(schedule.takeDue(clock.nowMs(), 9), [target]);
    t.equal(schedule.nextDueMs(), Number.POSITIVE_INFINITY, 'one at a time');
    t.strictSame(schedule.takeDue(1e9, 9), []);
    const startedMs = clock.nowMs();
    clock.advance(700);
    const { dueMs } = schedule.report(target, FINDINGS.s, clock.nowMs())!;
    t.ok(Math.abs(dueMs - startedMs - next) < 0.01, `from start to start, up to a tenth less: ${dueMs - startedMs}`);
    t.equal(schedule.nextDueMs(), dueMs);
  }
  const slow = new Patient({ ...CHECK, intervalMs: 500 });
  slow.schedule.takeDue(1000, 1);
  const { dueMs } = slow.schedule.report(slow.target, FINDINGS.f, 2000)!;
  t.equal(dueMs, 2000, 'at once after one that took longer than the interval');
});

t.test('many: spread over the interval, and those that have waited longest go first', async (t) => {
  const schedule = new CheckSchedule(seededRandom(1));
  const targets = Array.from({ length: 1000 }, (_, i) => target(i));
  schedule.configure(targets, 0);
  const perStep: number[] = [];
  for (let ms = 100; ms <= 2000; ms += 100) perStep.push(schedule.takeDue(ms, 9999).length);
  t.equal(
    perStep.reduce((sum, count) => sum + count),
    1000,
    'each once in the first interval',
  );
  t.ok(Math.max(...perStep) < 100, `${Math.max(...perStep)} in the busiest tenth of a second`);

  const strained = new CheckSchedule(seededRandom(2));
  strained.configure(targets, 0);
  const order: Target[] = [];
  for (let i = 0; i < 100; i++) order.push(...strained.takeDue(5000, 10));
  t.equal(new Set(order).size, 1000, 'a limit starves nobody');
});

t.test('another configuration', async (t) => {
  const patient = new Patient();
  patient.run('fff');
  const { schedule, clock } = patient;
  const { backend } = patient.target;
  clock.set(schedule.nextDueMs());
  const [underWay] = schedule.takeDue(clock.nowMs(), 1);

  schedule.configure([target(1), target(2)], clock.nowMs());
  t.equal(schedule.standing(backend)!.isUp, false, 'the same check goes on');
  t.not(schedule.report(underWay!, FINDINGS.s, clock.nowMs()), undefined, 'and the probe under way counts');

  clock.advance(5000);
  const [again] = schedule.takeDue(clock.nowMs(), 9).filter((each) => each.backend === backend);
  const stricter = target(1, { ...CHECK, rise: 1 });
  schedule.configure([stricter], clock.nowMs());
  t.equal(schedule.standing(backend)!.isUp, false, 'another check keeps the state');
  t.equal(schedule.standing(target(2).backend), undefined, 'what is not checked any more is forgotten');
  t.equal(schedule.report(again!, FINDINGS.s, clock.nowMs()), undefined, 'the old probe says nothing of the new check');
  t.equal(schedule.standing(backend)!.isUp, false);
  clock.set(schedule.nextDueMs());
  t.strictSame(schedule.takeDue(clock.nowMs(), 9), [stricter]);
  t.equal(schedule.report(stricter, FINDINGS.s, clock.nowMs())!.change, true);

  identities.forgetBackend(backend.id);
  const heir = target(1);
  t.equal(heir.backend.id, backend.id);
  patient.run('fff');
  schedule.configure([heir], clock.nowMs());
  t.equal(schedule.standing(heir.backend)!.isUp, true, 'whoever gets the id of another begins anew');
});
