import t from 'tap';
import { STATE_NAMES } from '../../lib/conntrack/record.js';
import { tcp, udp } from '../fixtures/packets.js';
import { takeCensus } from '../support/census.js';
import { TestPipeline } from '../support/pipeline.js';

const CONFIG = `
snat: { addresses: [10.96.255.1] }
tunnel: { address: 192.0.2.1 }
services:
  - { name: web, address: 10.96.0.10, port: 80, backends: [{ name: b1, address: 10.2.0.11, port: 8080 }] }
  - { name: out, address: 10.96.0.10, port: 81, mode: snat, backends: [{ name: b2, address: 10.2.0.12, port: 8080 }] }
  - { name: dsr, address: 10.96.0.11, port: 82, mode: dsr, backends: [{ name: b3, address: 10.2.0.13, port: 8080 }] }
  - { name: dns, address: 10.96.0.10, port: 53, protocol: udp, mode: snat, backends: [{ name: b4, address: 10.2.0.12, port: 53 }] }
`;

t.test('live connections by table, state and backend, and those that take an snat port', async (t) => {
  const pipeline = new TestPipeline(CONFIG);
  const send = (dst: string, dport: number, count: number): void => {
    for (let i = 0; i < count; i++) pipeline.send(tcp({ src: '10.1.0.2', sport: 1024 + i, dst, dport, flags: 'S' }));
  };
  send('10.96.0.10', 80, 2);
  send('10.96.0.10', 81, 3);
  send('10.96.0.11', 82, 4);
  const datagram = { src: '10.1.0.2', dst: '10.96.0.10', dport: 53, payload: 20 };
  for (let i = 0; i < 5; i++) pipeline.send(udp({ ...datagram, sport: 1024 + i }));
  const id = (name: string): number => {
    let at = 1;
    while (pipeline.identities.backendName(at) !== name) at++;
    return at;
  };
  const rows = pipeline.identities.backendRows;
  const census = takeCensus([pipeline.readers.tcp, pipeline.readers.any], pipeline.nowMs, rows);
  t.strictSame(census.live, [9, 5]);
  t.equal(census.states[0]![STATE_NAMES.indexOf('SYN_SENT')], 9);
  t.equal(census.states[1]![STATE_NAMES.indexOf('UNREPLIED')], 5);
  const names = ['b1', 'b2', 'b3', 'b4'];
  t.strictSame(
    names.map((name) => census.backends[id(name)]),
    [2, 3, 4, 5],
  );
  t.strictSame(
    names.map((name) => census.snatPorts[id(name)]),
    [0, 3, 0, 5],
  );

  const fewer = takeCensus([pipeline.readers.tcp], pipeline.nowMs, id('b1') + 1);
  t.equal(fewer.backends[0], 9 - fewer.backends.subarray(1).reduce((a, b) => a + b, 0), 'ids beyond are under 0');
  const later = takeCensus([pipeline.readers.tcp, pipeline.readers.any], pipeline.nowMs + 1e8, rows);
  t.strictSame(
    [later.live, later.backends.some((count) => count > 0)],
    [[0, 0], false],
    'what has expired is not there',
  );
});
