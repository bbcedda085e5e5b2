import t from 'tap';
import { requireConfig } from '../../../lib/config/load.js';
import { Shares } from '../../../lib/control/live/shares.js';
import { surveyInSteps } from '../../../lib/control/live/survey.js';
import { TopClients } from '../../../lib/control/live/top-clients.js';
import { takeCensus } from '../../support/census.js';
import { LiveGateway } from '../../support/live-gateway.js';
import { TestPipeline } from '../../support/pipeline.js';
import { client, establish } from '../../support/traffic.js';

const CONFIG = `services:
  - name: web
    address: 10.96.0.10
    port: 80
    protocol: tcp
    backends: [{ name: b1, address: 10.2.0.11, port: 8080 }, { name: b2, address: 10.2.0.12, port: 8080, weight: 3 }]
  - name: lots
    address: 10.96.0.10
    port: 81
    protocol: tcp
    algorithm: random
    backends: [{ name: b1, address: 10.2.0.11, port: 8080 }, { name: b2, address: 10.2.0.12, port: 8080, weight: 3 }, { name: b3, address: 10.2.0.13, port: 8080, weight: 0 }]
`;

t.test('a survey is a census, and the clients', async (t) => {
  const pipeline = new TestPipeline(CONFIG);
  for (const [src, sport] of [
    ['10.1.0.2', 40000],
    ['10.1.0.2', 40001],
    ['10.1.0.3', 40000],
  ] as const) {
    establish(pipeline, { ...client, src, sport });
  }
  const readers = [pipeline.readers.tcp, pipeline.readers.any];
  const rows = pipeline.identities.backendRows;
  const steps = surveyInSteps(readers, pipeline.nowMs, rows);
  let step = steps.next();
  while (!step.done) step = steps.next();
  const { census, clients } = step.value;
  t.strictSame(census, takeCensus(readers, pipeline.nowMs, rows));
  t.match(clients, { distinct: 2, error: 0 });
  t.strictSame(
    clients.top.map(({ address, connections }) => [address, connections]),
    [
      ['10.1.0.2', 2],
      ['10.1.0.3', 1],
    ],
  );
  t.ok(clients.top[0]!.bytes >= 2 * 120, 'three packets of each');
});

t.test('the clients with the most connections are found in any crowd', async (t) => {
  const clients = new TopClients();
  const HEAVY = [10, 11, 12];
  const CROWD = 30_000;
  for (let i = 0; i < CROWD; i++) {
    clients.add(0x0a000000 + i * 7, 1);
    for (const heavy of HEAVY) if (i % (heavy * 10) === 0) clients.add(heavy, 1);
  }
  const { distinct, error, top } = clients.view();
  t.equal(distinct, null);
  t.ok(error > 0 && error <= (CROWD + 900) / 4097, `${error} too low at most`);
  t.strictSame(
    top.slice(0, 3).map(({ address }) => address),
    ['0.0.0.10', '0.0.0.11', '0.0.0.12'],
  );
  for (const [i, heavy] of HEAVY.entries()) {
    const there = Math.ceil(CROWD / (heavy * 10));
    t.ok(top[i]!.connections <= there && top[i]!.connections >= there - error, `${top[i]!.connections} of ${there}`);
  }
  t.equal(top.length, 20);
});

t.test('shares of new connections: slots, or weights', async (t) => {
  const gateway = new LiveGateway(requireConfig('weir.yaml', CONFIG));
  const shares = new Shares();
  const of = (name: string): number[] => {
    const { id, backends } = gateway.desired.configured().find(({ service }) => service.name === name)!;
    return backends.map((backend) => shares.shareOf(gateway.desired.snapshot, id, backend.id));
  };
  t.strictSame(of('lots'), [0.25, 0.75, 0]);
  const [b1, b2] = of('web') as [number, number];
  t.equal(b1 + b2, 1);
  t.ok(Math.abs(b1 - 0.25) < 0.001, `${b1} of the slots`);
  gateway.setHealth('lots', 'b2', false);
  gateway.configure();
  t.strictSame(of('web').length, 2);
});
