import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import { EventLog } from '../../lib/control/log.js';
import { ServiceManager } from '../../lib/control/service-manager.js';
import { NotifyReceiver } from '../support/notify-receiver.js';
import { needsTools } from '../support/skip.js';

const folder = mkdtempSync(join(tmpdir(), 'weir-notify-'));
t.teardown(() => rmSync(folder, { recursive: true }));

function managerOf(env: Record<string, string>): { manager: ServiceManager; events: string[] } {
  const events: string[] = [];
  const log = new EventLog({ write: (line) => void events.push(JSON.parse(line).event) });
  return { manager: new ServiceManager(env, log), events };
}

t.test('what a service manager is told', needsTools(t, 'python3'), async (t) => {
  for (const address of [join(folder, 'notify'), `@weir-notify-${process.pid}`]) {
    const receiver = await NotifyReceiver.bind(address);
    t.teardown(() => receiver.close());
    const { manager, events } = managerOf({ NOTIFY_SOCKET: address });
    const before = process.hrtime.bigint() / 1000n;
    manager.status('starting');
    manager.reloading();
    manager.ready('1 service');
    manager.stopping('SIGTERM');
    manager.reloading();
    manager.ready('too late');
    manager.close();
    await receiver.datagram((line) => line === 'STOPPING=1');
    const after = process.hrtime.bigint() / 1000n;
    const [status, reloading, ready, stopping, ...more] = receiver.received;
    t.strictSame(status, ['STATUS=starting'], address);
    t.strictSame([reloading![0], reloading![2]], ['RELOADING=1', 'STATUS=reloading']);
    const usec = BigInt(/^MONOTONIC_USEC=(\d+)$/.exec(reloading![1]!)![1]!);
    t.ok(usec >= before && usec <= after, 'the clock is the monotonic one');
    t.strictSame(ready, ['READY=1', 'STATUS=1 service']);
    t.strictSame(stopping, ['STOPPING=1', 'STATUS=stopping: SIGTERM']);
    t.strictSame(more, [], 'whoever stops is not ready again');
    t.strictSame(events, []);
  }
});

t.test('signs of life: only while the data path answers', needsTools(t, 'python3'), async (t) => {
  const address = join(folder, 'alive');
  const receiver = await NotifyReceiver.bind(address);
  t.teardown(() => receiver.close());
  const { manager } = managerOf({ NOTIFY_SOCKET: address, WATCHDOG_USEC: '20000', WATCHDOG_PID: String(process.pid) });
  const questions: (() => void)[] = [];
  manager.watch(() => new Promise((resolve) => questions.push(resolve)));
  t.equal(questions.length, 1);
  manager.status('unanswered');
  let { at } = await receiver.datagram((line) => line === 'STATUS=unanswered');
  t.equal(at, 0, 'no sign of life without an answer');
  for (let i = 0; i < 3; i++) {
    questions[i]!();
    ({ at } = await receiver.datagram((line) => line === 'WATCHDOG=1', at + 1));
    while (questions.length < i + 2) await new Promise((resolve) => setTimeout(resolve, 1));
  }
  t.equal(receiver.received.length, 4);
  manager.close();
  questions[3]!();
  await new Promise((resolve) => setImmediate(resolve));
  t.equal(receiver.received.length, 4, 'nor after the end');
});

t.test('a watchdog that means another process, or nothing', async (t) => {
  for (const env of [
    { NOTIFY_SOCKET: '/nowhere', WATCHDOG_USEC: '20000', WATCHDOG_PID: '1' },
    { NOTIFY_SOCKET: '/nowhere', WATCHDOG_USEC: 'soon' },
    { NOTIFY_SOCKET: '/nowhere' },
    { WATCHDOG_USEC: '20000' },
  ] as Record<string, string>[]) {
    const { manager } = managerOf(env);
    manager.watch(async () => void t.fail('is not asked'));
    manager.close();
  }
});

t.test('nobody there', async (t) => {
  const { manager, events } = managerOf({ NOTIFY_SOCKET: join(folder, 'nobody') });
  manager.ready('');
  manager.status('');
  t.strictSame(events, ['manager-unreachable'], 'is said once');
  manager.close();
  const quiet = managerOf({ NOTIFY_SOCKET: '' });
  quiet.manager.ready('');
  quiet.manager.close();
  t.strictSame(quiet.events, []);
});
