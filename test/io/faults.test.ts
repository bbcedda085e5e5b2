import t from 'tap';
import { ReadFaults } from '../../lib/io/faults.js';
import { EBADFD, EINVAL, ENODEV } from '../../lib/io/syscalls.js';

t.test('a failing read is tried again after growing pauses, a bounded number of times', async (t) => {
  const faults = new ReadFaults();
  t.equal(faults.pauseMs(), 0);
  let totalMs = 0;
  let tries = 0;
  const next = () => {
    tries++;
    faults.record(-EINVAL);
    const pauseMs = faults.pauseMs();
    t.ok(pauseMs <= 1000, `pause ${tries}`);
    totalMs += pauseMs;
  };
  t.throws(
    () => {
      for (;;) next();
    },
    { code: 'DEVICE_FAILED', message: /keeps failing \(EINVAL\)/ },
  );
  t.equal(tries, 16);
  t.ok(totalMs > 3000 && totalMs < 10_000, `it is given ${Math.round(totalMs)} ms`);
});

t.test('a packet ends the row', async (t) => {
  const faults = new ReadFaults();
  for (let i = 0; i < 100; i++) {
    faults.record(-EINVAL);
    faults.clear();
    t.equal(faults.pauseMs(), 0);
  }
});

t.test('a device that is gone is not tried again', async (t) => {
  for (const errno of [EBADFD, ENODEV]) {
    const faults = new ReadFaults();
    faults.record(-errno);
    t.throws(() => faults.pauseMs(), { code: 'DEVICE_FAILED', message: /is gone/ });
    t.throws(() => faults.pauseMs(), { code: 'DEVICE_FAILED' });
  }
});
