import t from 'tap';
import { ManualClock } from '../../lib/base/clock.js';
import { parseConfig } from '../../lib/config/load.js';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import { allocateTable } from '../../lib/conntrack/memory.js';
import { TYPE_OUT } from '../../lib/conntrack/record.js';
import { TableReader } from '../../lib/conntrack/table-reader.js';
import { Desired } from '../../lib/control/desired.js';
import { LearnedEndpoints } from '../../lib/control/learned.js';
import { EventLog } from '../../lib/control/log.js';
import type { ReturnEndpoint } from '../../lib/control/network-plan.js';
import { parseIpv4 } from '../../lib/wire/address.js';

const CONFIG = `
role: node
tunnel: { address: 10.2.0.11 }
services:
  - { name: web, address: 10.96.0.10, port: 80, mode: dsr, backends: [{ address: 10.2.0.11, port: 8080 }] }
`;
const HOME = parseIpv4('10.2.0.11');

function setUp(learnedBefore: readonly ReturnEndpoint[] = []) {
  const { config } = parseConfig(CONFIG);
  const clock = new ManualClock(1000);
  const memory = allocateTable(64);
  const table = new FlowTable(memory);
  const desired = new Desired(config!, clock.nowMs(), { learned: learnedBefore });
  const events: string[] = [];
  const log = new EventLog({ write: (line: string) => void events.push(JSON.parse(line).event) });
  const calls: string[] = [];
  let refusal: Error | undefined;
  /** A flow that comes while an endpoint is being forgotten. */
  let meanwhile = (): void => {};
  const reloader = {
    async refresh() {
      calls.push('refresh');
      if (refusal) throw refusal;
    },
    async forget(endpoints: readonly ReturnEndpoint[], stillUsed: () => readonly ReturnEndpoint[]) {
      desired.learned = desired.learned.filter((each) => !endpoints.includes(each));
      meanwhile();
      const before = desired.learned;
      desired.learned = [...before, ...endpoints];
      const used = stillUsed();
      desired.learned = [...before, ...endpoints.filter((each) => used.includes(each))];
      calls.push(`forget ${endpoints.map(({ port }) => port).join()}`);
    },
  };
  const learned = new LearnedEndpoints();
  const readers = { tcp: new TableReader(memory), any: new TableReader(allocateTable(64)) };
  return {
    clock,
    desired,
    learned,
    events,
    calls,
    begin: () => learned.begin({ desired, reloader, readers, clock, log }),
    refuse: (error: Error | undefined) => {
      refusal = error;
    },
    during: (step: () => void) => {
      meanwhile = step;
    },
    /** Until when a flow to a port of this host lives. */
    flow(port: number, untilMs: number) {
      const client = parseIpv4('10.1.0.2');
      const ports = (port << 16) | 40000;
      const record = table.insert(6, TYPE_OUT, client, port, 80, HOME, client, ports, 0, 0, clock.nowMs());
      table.setExpiry(record, untilMs);
    },
    ports: () => desired.learned.map(({ port }) => port),
  };
}

t.test('what traffic teaches is led in, once', async (t) => {
  const lab = setUp();
  lab.learned.learn(HOME, 9001, 6);
  t.same(lab.ports(), [], 'before the network is there it is noted down');
  await lab.begin();
  t.same(lab.ports(), [9001]);
  lab.learned.learn(HOME, 9001, 6);
  lab.learned.learn(HOME, 8080, 6);
  t.same(lab.ports(), [9001], 'those of the file are there already');
  lab.learned.learn(HOME | 0, 53, 17);
  t.same(lab.desired.learned.at(-1), { address: '10.2.0.11', port: 53, protocol: 17 });
  t.same(lab.calls, ['refresh', 'refresh', 'refresh']);
  t.same(lab.events, ['endpoint-learned', 'endpoint-learned']);

  lab.refuse(new Error('no room'));
  lab.learned.learn(HOME, 9002, 6);
  await new Promise((resolve) => setImmediate(resolve));
  t.same(lab.ports(), [9001, 53], 'one the kernel refuses is not kept');
  t.equal(lab.events.at(-1), 'step-failed');
  lab.learned.close();
  lab.learned.learn(HOME, 9003, 6);
  t.same(lab.ports(), [9001, 53]);
});

t.test('no more than 64, and one complaint', async (t) => {
  const lab = setUp();
  await lab.begin();
  for (let port = 10_000; port < 10_070; port++) lab.learned.learn(HOME, port, 6);
  t.equal(lab.ports().length, 64);
  t.equal(lab.events.filter((event) => event === 'endpoint-refused').length, 1);
  lab.learned.close();
});

t.test('endpoints without flows are forgotten after five minutes', async (t) => {
  const lab = setUp([{ address: '10.2.0.11', port: 9000, protocol: 6 }]);
  await lab.begin();
  lab.learned.learn(HOME, 9001, 6);
  lab.learned.learn(HOME, 9002, 6);
  lab.flow(9001, 200_000);
  lab.clock.advance(150_000);
  await lab.learned.sweep();
  lab.clock.advance(150_000);
  await lab.learned.sweep();
  t.same(lab.ports(), [9001], 'what an earlier weir left, too; not what was used since');
  t.same(lab.calls.at(-1), 'forget 9000,9002');
  t.equal(lab.events.at(-1), 'endpoints-forgotten');

  lab.during(() => lab.flow(9001, 2_000_000));
  lab.clock.advance(150_000);
  await lab.learned.sweep();
  t.same(lab.calls.at(-1), 'forget 9001');
  t.same(lab.ports(), [9001], 'a flow that came at the last moment keeps it');
  lab.during(() => {});
  lab.clock.advance(600_000);
  await lab.learned.sweep();
  t.same(lab.ports(), [9001]);
  lab.clock.advance(1_200_000);
  await lab.learned.sweep();
  t.same(lab.ports(), []);
  lab.learned.close();
});
