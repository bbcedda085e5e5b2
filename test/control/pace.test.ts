import t from 'tap';
import { Pace } from '../../lib/control/pace.js';

t.test('long work rests while packets flow, and only then', async (t) => {
  const pace = new Pace(1000, 500);
  t.equal(pace.restMs(1001, 900), 0, 'not before it has worked for a while');
  t.equal(pace.restMs(1003.9, 900), 0);
  t.equal(pace.restMs(1004, 504), 10, 'a packet a millisecond');
  t.equal(pace.restMs(1015, 999), 0, 'the rest is no work');
  t.equal(pace.restMs(1018, 507), 0, 'less than that');
  t.equal(pace.restMs(1022, 510), 0, 'counted since the last time');
  t.equal(pace.restMs(1122, 610), 10, 'however long one piece took');
});
