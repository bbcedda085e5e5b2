import t from 'tap';
import * as S from '../../lib/datapath/snapshot.js';
import { tcp } from '../fixtures/packets.js';
import { TestPipeline } from '../support/pipeline.js';

/** What the connections of a backend tell of it without being asked: SYNs it refused, and SYNs it did not answer. */

const BACKEND = '10.2.0.11';
const CONFIG = `
conntrack: { timeouts: { tcpSyn: 60s } }
services:
  - { name: web, address: 10.96.0.10, port: 80, backends: [{ name: b1, address: ${BACKEND}, port: 8080 }] }
  - { name: lot, address: 10.96.0.10, port: 81, algorithm: random, backends: [{ name: b2, address: ${BACKEND}, port: 8080 }] }
`;

class Line {
  readonly pipeline: TestPipeline;

  constructor(tcpEntries = 1024) {
    this.pipeline = new TestPipeline(CONFIG, { tcpEntries });
  }

  send(flags: string, sport = 40000, fields: object = {}): void {
    this.pipeline.send(tcp({ src: '10.1.0.2', sport, dst: '10.96.0.10', dport: 80, flags, seq: 100, ...fields }));
  }

  answer(flags: string, dport = 40000, fields: object = {}): void {
    const address = { src: BACKEND, sport: 8080, dst: '10.1.0.2', dport };
    this.pipeline.send(tcp({ ...address, flags, seq: 0, ack: 101, ...fields }));
  }

  /** Time goes by, and the garbage collector. */
  pass(ms: number): void {
    this.pipeline.nowMs += ms;
    this.pipeline.tcp.reap(0, this.pipeline.tcp.highWater, this.pipeline.nowMs);
  }

  /** `[refused, unanswered]` of b1. */
  get signals(): number[] {
    const { counters } = this.pipeline.compiled!.snapshot;
    let id = 1;
    while (this.pipeline.identities.backendName(id) !== 'b1') id++;
    return [S.COUNTER_REFUSED, S.COUNTER_UNANSWERED].map((row) => counters[id * S.COUNTER_ROWS + row]!);
  }
}

t.test('what counts as refused, as unanswered, as neither', async (t) => {
  const table: readonly (readonly [string, (line: Line) => void, number[]])[] = [
    ['a SYN that nobody answers', (line) => line.send('S'), [0, 1]],
    [
      'one that is repeated is one',
      (line) => {
        for (let i = 0; i < 4; i++) line.send('S');
      },
      [0, 1],
    ],
    [
      'an RST to it',
      (line) => {
        line.send('S');
        line.answer('RA');
        line.answer('RA');
      },
      [1, 0],
    ],
    [
      'a SYN again on the refused connection',
      (line) => {
        for (let i = 0; i < 2; i++) {
          line.send('S', 40000, { seq: 100 * (i + 1) });
          line.answer('RA', 40000, { ack: 100 * (i + 1) + 1 });
        }
      },
      [2, 0],
    ],
    [
      'an RST that acknowledges something else',
      (line) => {
        line.send('S');
        line.answer('RA', 40000, { ack: 999 });
      },
      [0, 1],
    ],
    [
      'an answer',
      (line) => {
        line.send('S');
        line.answer('SA', 40000, { seq: 500 });
      },
      [0, 0],
    ],
    [
      'an RST after the answer',
      (line) => {
        line.send('S');
        line.answer('SA', 40000, { seq: 500 });
        line.answer('R', 40000, { seq: 501 });
      },
      [0, 0],
    ],
    [
      'a client that takes its SYN back',
      (line) => {
        line.send('S');
        line.send('R', 40000, { seq: 101 });
      },
      [0, 0],
    ],
    ['a connection picked up in its middle', (line) => line.send('A', 40000, { ack: 5 }), [0, 0]],
  ];
  for (const [name, play, signals] of table) {
    const line = new Line();
    play(line);
    line.pass(600_000);
    t.strictSame(line.signals, signals, name);
    t.equal(line.pipeline.tcp.count, 0);
  }
});

t.test('whoever comes upon the end of an unanswered SYN', async (t) => {
  const next = new Line();
  next.send('S');
  t.strictSame(next.signals, [0, 0]);
  next.pipeline.nowMs += 60_000;
  next.send('S');
  t.strictSame(next.signals, [0, 1], 'the next SYN of the same client');

  const crowded = new Line(16);
  for (let i = 0; i < 20; i++) crowded.send('S', 40000 + i);
  t.strictSame(crowded.signals, [0, 4], 'a full table that evicts');

  const moved = new Line();
  moved.send('S');
  moved.pipeline.configure(CONFIG.replace('name: b1,', 'name: b1, weight: 0,'));
  moved.send('S');
  t.strictSame(moved.signals, [0, 1], 'a repeat that goes elsewhere, since the backend takes no new ones');
});
