import t from 'tap';
import {
  CLASS_CLOSING,
  CLASS_ESTABLISHED,
  CLASS_HALF_OPEN,
  RECORD_BYTES,
  RECORD_DOUBLES,
  RECORD_WORDS,
  RX_BYTES,
  RX_END,
  RX_FLAGS_SEEN,
  RX_PACKETS,
  RX_SEEN,
  SERVICE,
  TX_ACKED,
  TX_BYTES,
  TX_END,
  TX_FLAGS_SEEN,
  TX_PACKETS,
  TX_SEEN,
  TYPE_OUT,
  TYPE_SVC,
} from '../../lib/conntrack/record.js';
import { isReusable } from '../../lib/conntrack/tcp-tracker.js';
import { Connection, insertFlow, makeTable } from './connection.js';

const SYN = 60_000;
const TCP = 8_000_000;
const FIN = 10_000;

const STATES = ['SYN_SENT', 'SYN_RECV', 'ESTABLISHED', 'CLOSING', 'CLOSED'] as const;
const TIMER = { SYN_SENT: SYN, SYN_RECV: SYN, ESTABLISHED: TCP, CLOSING: FIN, CLOSED: FIN } as const;

/** A connection in each state, by the shortest way there. */
function inState(state: (typeof STATES)[number]): Connection {
  const c = new Connection();
  if (state === 'SYN_SENT') return c.client({ flags: 'S' });
  if (state === 'SYN_RECV') return c.client({ flags: 'S' }).backend({ flags: 'SA' });
  c.handshake();
  if (state === 'CLOSING') c.client({ flags: 'FA' }).backend({ flags: 'FA' });
  if (state === 'CLOSED') c.backend({ flags: 'R' });
  return c;
}

function closingFlags(flags: string): string {
  return flags.replace('SeenNonSyn', '').trim();
}

type Outcome = (typeof STATES)[number] | '-' | 'RxClosing' | 'TxClosing' | 'n/a';

/**
 * The table at the top of tcp-tracker.ts, cell by cell: the state after the packet; '-': nothing changes, not even the
 * timer; a flag: ESTABLISHED or as before with that flag. 'n/a': the pipeline opens a new entry instead.
 */
// biome-ignore format: a table reads as rows
const CELLS: ReadonlyArray<
  readonly [name: string, act: (c: Connection) => unknown, ...outcomes: [Outcome, Outcome, Outcome, Outcome, Outcome]]
> = [
  ['c SYN repeated', (c) => c.client({ flags: 'S', at: 1000 }), 'SYN_SENT', 'SYN_RECV', 'ESTABLISHED', 'n/a', 'n/a'],
  ['c SYN with ECN bits', (c) => c.client({ flags: 'SEW', at: 1000 }), 'SYN_SENT', 'SYN_RECV', 'ESTABLISHED', 'n/a', 'n/a'],
  ['c SYN anew', (c) => c.client({ flags: 'S', at: 9_000_000 }), 'SYN_SENT', 'SYN_SENT', 'ESTABLISHED', 'n/a', 'n/a'],
  ['b SYN-ACK', (c) => c.backend({ flags: 'SA', at: 700_000 }), 'SYN_RECV', 'SYN_RECV', 'ESTABLISHED', 'CLOSING', 'CLOSED'],
  ['b SYN-ACK of another SYN', (c) => c.backend({ flags: 'SA', at: 5, ack: 77 }), '-', '-', 'ESTABLISHED', 'CLOSING', 'CLOSED'],
  ['c ACK', (c) => c.client({ flags: 'A' }), 'SYN_SENT', 'ESTABLISHED', 'ESTABLISHED', 'CLOSING', 'CLOSED'],
  ['c data', (c) => c.client({ flags: 'PA', payload: 100 }), 'SYN_SENT', 'ESTABLISHED', 'ESTABLISHED', 'CLOSING', 'CLOSED'],
  ['c ACK of nothing sent', (c) => c.client({ flags: 'A', ack: 1 }), 'SYN_SENT', 'SYN_RECV', 'ESTABLISHED', 'CLOSING', 'CLOSED'],
  ['c ACK of too little', (c) => c.client({ flags: 'A', ack: -1 }), 'SYN_SENT', 'SYN_RECV', 'ESTABLISHED', 'CLOSING', 'CLOSED'],
  ['c ACK out of the window', (c) => c.client({ flags: 'A', seq: 70_000 }), 'SYN_SENT', 'SYN_RECV', 'ESTABLISHED', 'CLOSING', 'CLOSED'],
  ['b ACK', (c) => c.backend({ flags: 'A' }), 'SYN_SENT', 'SYN_RECV', 'ESTABLISHED', 'CLOSING', 'CLOSED'],
  ['b data', (c) => c.backend({ flags: 'PA', payload: 9 }), 'SYN_SENT', 'SYN_RECV', 'ESTABLISHED', 'CLOSING', 'CLOSED'],
  ['c FIN', (c) => c.client({ flags: 'FA' }), 'SYN_SENT', 'TxClosing', 'TxClosing', 'CLOSING', 'CLOSED'],
  ['b FIN', (c) => c.backend({ flags: 'FA' }), 'SYN_SENT', 'RxClosing', 'RxClosing', 'CLOSING', 'CLOSED'],
  ['c FIN out of the window', (c) => c.client({ flags: 'FA', seq: 70_000 }), 'SYN_SENT', 'SYN_RECV', 'ESTABLISHED', 'CLOSING', 'CLOSED'],
  ['b FIN out of the window', (c) => c.backend({ flags: 'FA', seq: -70_000 }), 'SYN_SENT', 'SYN_RECV', 'ESTABLISHED', 'CLOSING', 'CLOSED'],
  ['c FIN acknowledging nothing sent', (c) => c.client({ flags: 'FA', ack: 9 }), 'SYN_SENT', 'SYN_RECV', 'ESTABLISHED', 'CLOSING', 'CLOSED'],
  ['c RST', (c) => c.client({ flags: 'R' }), 'CLOSED', 'CLOSED', 'CLOSED', 'CLOSED', 'CLOSED'],
  ['b RST-ACK', (c) => c.backend({ flags: 'RA' }), 'CLOSED', 'CLOSED', 'CLOSED', 'CLOSED', 'CLOSED'],
  ['c RST out of the window', (c) => c.client({ flags: 'R', seq: 70_000 }), '-', '-', '-', '-', '-'],
  ['c RST behind the window', (c) => c.client({ flags: 'R', seq: -1 }), '-', '-', '-', '-', '-'],
  ['b RST out of the window', (c) => c.backend({ flags: 'RA', at: 3, ack: 77 }), '-', '-', '-', '-', '-'],
  ['b RST behind the window', (c) => c.backend({ flags: 'R', at: 699_990 }), '-', '-', '-', '-', '-'],
  ['c SYN-ACK', (c) => c.client({ flags: 'SA' }), '-', '-', '-', '-', '-'],
  ['c SYN-FIN', (c) => c.client({ flags: 'SF' }), '-', '-', '-', '-', '-'],
  ['b SYN', (c) => c.backend({ flags: 'S' }), '-', '-', '-', '-', '-'],
];

t.test('every cell of the state table', async (t) => {
  for (const [name, act, ...outcomes] of CELLS) {
    for (const [i, before] of STATES.entries()) {
      const outcome = outcomes[i]!;
      if (outcome === 'n/a') continue;
      const c = inState(before);
      t.equal(c.state, before, `${before} is reached`);
      const flagsBefore = c.flags;
      c.wait(3000);
      const leftBefore = c.expiresInMs;
      act(c);
      const cell = `${name} in ${before}`;
      if (outcome === '-') {
        t.equal(c.state, before, `${cell} changes nothing`);
        t.equal(c.flags, flagsBefore, `${cell} sets no flag`);
        t.equal(c.expiresInMs, leftBefore, `${cell} does not move the timer`);
        continue;
      }
      const isFlag = outcome === 'RxClosing' || outcome === 'TxClosing';
      const after = isFlag ? (name === 'b FIN' ? before : 'ESTABLISHED') : outcome;
      t.equal(c.state, after, `${cell} -> ${after}`);
      if (isFlag) t.match(c.flags, outcome, `${cell} sets ${outcome}`);
      else t.equal(closingFlags(c.flags), closingFlags(flagsBefore), `${cell} sets no closing flag`);
      t.equal(c.expiresInMs, TIMER[after], `${cell} sets the timer of ${after}`);
      const isListed = { SYN_SENT: CLASS_HALF_OPEN, SYN_RECV: CLASS_HALF_OPEN, ESTABLISHED: CLASS_ESTABLISHED };
      t.equal(c.class, isListed[after as keyof typeof isListed] ?? CLASS_CLOSING, `${cell}: its class`);
    }
  }
});

t.test('one FIN keeps the long timer, two start the short one; flags say who', async (t) => {
  const c = new Connection().handshake();
  t.equal(c.flags, 'SeenNonSyn');
  c.client({ flags: 'FA' });
  t.equal(c.flags, 'TxClosing SeenNonSyn');
  t.equal(c.state, 'ESTABLISHED');
  for (let i = 0; i < 50; i++) c.wait(600_000).backend({ flags: 'A', payload: 1400 }).client({ flags: 'A' });
  t.equal(c.state, 'ESTABLISHED', 'a half-closed download goes on');
  t.equal(c.expiresInMs, TCP);
  c.client({ flags: 'FA', seq: -1 });
  t.equal(c.state, 'ESTABLISHED', 'a repeated FIN of one side is one FIN');
  c.backend({ flags: 'FA' });
  t.equal(c.flags, 'RxClosing TxClosing SeenNonSyn');
  t.equal(c.state, 'CLOSING');
  t.equal(c.wait(7000).client({ flags: 'A' }).expiresInMs, FIN, 'each packet sets tcpFin anew');
  t.ok(isReusable(c.table, c.record, c.nowMs), 'a SYN may replace it');
});

t.test('repeats and forgeries never establish', async (t) => {
  const c = new Connection().client({ flags: 'S' });
  for (let i = 0; i < 20; i++) {
    c.wait(1000).client({ flags: 'S', at: 1000 }).backend({ flags: 'SA', at: 700_000 });
    c.next.backend = 700_001;
    t.equal(c.state, 'SYN_RECV');
    t.equal(c.class, CLASS_HALF_OPEN);
    t.equal(c.flags, '');
  }
  for (let i = 1; i < 100; i++) c.client({ flags: 'A', ack: Math.imul(i, 0x1234567) | 1 });
  t.equal(c.state, 'SYN_RECV', 'guessed acknowledgements');
  const silent = new Connection().client({ flags: 'S' });
  for (let i = 0; i < 100; i++) silent.client({ flags: 'A', seq: i, ack: i, payload: i });
  t.equal(silent.state, 'SYN_SENT', 'ACKs without a reply');
  t.equal(silent.class, CLASS_HALF_OPEN);
  t.equal(silent.expiresInMs, SYN);
  t.equal(c.client({ flags: 'A' }).state, 'ESTABLISHED', 'the real one does');
});

t.test('a SYN on an established entry', async (t) => {
  const scaled = { window: 60_000, scale: 7 };
  t.test('the backend lives: challenge ACK, RST, SYN again', async (t) => {
    const c = new Connection().handshake().client({ flags: 'PA', payload: 500 });
    c.client({ flags: 'S', at: 0x40000000 });
    t.equal(c.state, 'ESTABLISHED');
    c.backend({ flags: 'A' });
    t.equal(c.state, 'ESTABLISHED', 'the challenge passes');
    c.client({ flags: 'R' });
    t.equal(c.state, 'CLOSED', 'the answer to it is exact');
    t.ok(isReusable(c.table, c.record, c.nowMs), 'and the repeated SYN starts afresh');
  });
  t.test('a forged one changes nothing', async (t) => {
    const c = new Connection().handshake().client({ flags: 'S', at: 0x40000000 });
    c.backend({ flags: 'A' }).client({ flags: 'PA', payload: 10 }).backend({ flags: 'A', payload: 10 });
    t.equal(c.state, 'ESTABLISHED');
    t.equal(c.backend({ flags: 'R' }).state, 'CLOSED', 'sequence numbers still hold');
  });
  t.test('the backend has begun anew: so does the entry', async (t) => {
    const c = new Connection().handshake().backend({ flags: 'FA' });
    c.client({ flags: 'S', at: 0x40000000, ...scaled });
    c.next.client = 0x40000001;
    c.next.backend = -0x60000000;
    c.backend({ flags: 'SA', ...scaled });
    t.equal(c.state, 'SYN_RECV');
    t.equal(c.flags, '');
    t.equal(c.class, CLASS_HALF_OPEN);
    t.equal(c.expiresInMs, SYN);
    c.client({ flags: 'A' });
    t.equal(c.state, 'ESTABLISHED');
    t.equal(c.client({ flags: 'R', seq: 59_000 }).state, 'CLOSED', 'within the new window');
  });
  t.test('the backend has begun anew with all, some or none of the data that came with it', async (t) => {
    for (const taken of [0, 300, 700]) {
      const c = new Connection().handshake().client({ flags: 'S', at: 0x40000000, payload: 700 });
      c.next.client = 0x40000001 + taken;
      c.next.backend = 0x60000000;
      t.equal(c.backend({ flags: 'SA' }).state, 'SYN_RECV', `${taken} bytes`);
      c.client({ flags: 'S', at: 0x40000000, payload: 700 });
      t.equal(c.state, 'SYN_RECV', 'a repeat is one');
      c.client({ flags: 'A', payload: 700 - taken })
        .client({ flags: 'FA' })
        .backend({ flags: 'FA' });
      t.equal(c.state, 'CLOSING');
    }
    const c = new Connection().handshake().client({ flags: 'S', at: 0x40000000, payload: 700 });
    for (const ack of [0x40000000, 0x40000001 + 705]) {
      c.next.client = ack;
      t.equal(c.backend({ flags: 'SA', at: 9 }).state, 'ESTABLISHED', 'of another SYN');
    }
  });
  t.test('its own, which took longer than what came after it, says nothing', async (t) => {
    const c = new Connection().handshake().client({ flags: 'FA' }).client({ flags: 'S', at: 1000 });
    c.backend({ flags: 'SA', at: 700_000, ack: -1 });
    t.equal(c.state, 'ESTABLISHED');
    t.equal(c.flags, 'TxClosing SeenNonSyn');
    t.equal(c.backend({ flags: 'FA' }).state, 'CLOSING');
  });
  t.test('the backend refuses it: there is no connection any more', async (t) => {
    for (const isPickedUp of [false, true]) {
      const refused: number[] = [];
      const c = new Connection();
      c.table.onRefused = (backend) => refused.push(backend);
      if (isPickedUp) c.client({ flags: 'A' }).backend({ flags: 'A' });
      else c.handshake();
      c.backend({ flags: 'RA', at: 0, ack: 0x12345678 });
      t.equal(c.state, 'ESTABLISHED', 'there was no SYN');
      c.client({ flags: 'S', at: 0x40000000 });
      c.next.client = 0x40000002;
      t.equal(c.backend({ flags: 'RA', at: 0 }).state, 'ESTABLISHED', 'it acknowledges something else');
      c.next.client = 0x40000001;
      t.equal(c.backend({ flags: 'R', at: 0 }).state, 'ESTABLISHED', 'it acknowledges nothing');
      t.equal(c.backend({ flags: 'RA', at: 0 }).state, 'CLOSED');
      t.equal(c.expiresInMs, FIN);
      t.equal(c.class, CLASS_CLOSING);
      t.strictSame(refused, [2]);
    }
  });
});

t.test('RSTs are judged by the window of who receives them', async (t) => {
  const closed = (prepare: (c: Connection) => Connection, offset: number): boolean =>
    prepare(new Connection()).backend({ flags: 'R', seq: offset }).state === 'CLOSED';
  const plain = (c: Connection): Connection => c.handshake({ window: 1000 });
  t.ok(closed(plain, 0), 'exact');
  t.ok(closed(plain, 999), 'last byte of the window');
  t.notOk(closed(plain, 1000), 'first byte behind it');
  t.notOk(closed(plain, -1), 'last byte before it');

  const scaled = (c: Connection): Connection => c.handshake({ window: 1000, scale: 4 });
  t.ok(closed(scaled, 15_999), 'a scaled window');
  t.notOk(closed(scaled, 16_000));
  const oneSided = (c: Connection): Connection =>
    c
      .client({ flags: 'S', window: 1000, scale: 4 })
      .backend({ flags: 'SA', scale: -1 })
      .client({ flags: 'A', window: 1000 });
  t.ok(closed(oneSided, 999));
  t.notOk(closed(oneSided, 1000), 'scaling takes two');

  const shrunk = (c: Connection): Connection =>
    c.handshake().backend({ flags: 'A', payload: 5000 }).client({ flags: 'A', window: 10 });
  t.ok(closed(shrunk, 9));
  t.notOk(closed(shrunk, 10), 'the last window counts');
  const zero = (c: Connection): Connection => c.handshake().client({ flags: 'A', window: 0 });
  t.ok(closed(zero, 0), 'a window of nothing takes the exact one');
  t.notOk(closed(zero, 1));

  const inFlight = (c: Connection): Connection => c.handshake({ window: 1000 }).backend({ flags: 'A', payload: 1000 });
  t.ok(closed(inFlight, 0), 'behind all that is in flight');
  t.ok(closed(inFlight, -1000), 'what is acknowledged so far');
  t.notOk(closed(inFlight, -1001));

  const c = new Connection().handshake().backend({ flags: 'R', seq: 100_000 });
  t.equal(
    c.wait(5000).client({ flags: 'PA', payload: 5 }).state,
    'ESTABLISHED',
    'data goes on after an implausible one',
  );
  t.equal(c.expiresInMs, TCP);
});

t.test('an RST for a SYN must acknowledge it', async (t) => {
  t.equal(new Connection().client({ flags: 'S' }).backend({ flags: 'RA', at: 0 }).state, 'CLOSED', 'port closed');
  t.equal(new Connection().client({ flags: 'S' }).backend({ flags: 'R' }).state, 'SYN_SENT', 'no ACK');
  t.equal(new Connection().client({ flags: 'S' }).backend({ flags: 'RA', at: 0, ack: 1 }).state, 'SYN_SENT');
  // A half-open backend: its ACK is no SYN-ACK, and the RST to that is not this connection's.
  const c = new Connection().client({ flags: 'S' }).backend({ flags: 'A', ack: 5_000_000 });
  t.equal(c.client({ flags: 'R', at: 5_001_001 }).state, 'SYN_SENT');
  t.equal(c.client({ flags: 'S', at: 1000 }).backend({ flags: 'SA' }).client({ flags: 'A' }).state, 'ESTABLISHED');
});

t.test('sequence numbers wrap around', async (t) => {
  for (const isn of [0xffffff00, 0x7fffff00, 0xffffffff, 0x7fffffff, 0xfffffffe, 0]) {
    const c = new Connection({ clientIsn: isn, backendIsn: isn + 77 }).handshake({ scale: 2 });
    t.equal(c.state, 'ESTABLISHED', `handshake at ${isn}`);
    for (let i = 0; i < 200_000; i += 997) {
      c.client({ flags: 'A', payload: 60_000 }).backend({ flags: 'A', payload: 65_000 });
    }
    t.equal(c.table.words[c.record * RECORD_WORDS + TX_END], c.next.client | 0);
    t.equal(c.backend({ flags: 'R', seq: 300_000 }).state, 'ESTABLISHED');
    c.client({ flags: 'FA' }).backend({ flags: 'FA' });
    t.equal(c.state, 'CLOSING', `both FINs after ${isn}`);
    t.equal(c.client({ flags: 'R' }).state, 'CLOSED');
  }
});

t.test('old retransmissions are harmless, losses before weir heal', async (t) => {
  const c = new Connection().handshake().client({ flags: 'A', payload: 1000 }).backend({ flags: 'A' });
  const word = c.record * RECORD_WORDS;
  const end = c.table.words[word + TX_END];
  const acked = c.table.words[word + TX_ACKED];
  c.client({ flags: 'A', seq: -1000, ack: 0, payload: 1000, window: 5 });
  c.backend({ flags: 'A', ack: -1000, window: 3 });
  t.equal(c.table.words[word + TX_END], end);
  t.equal(c.table.words[word + TX_ACKED], acked);
  t.equal(c.expiresInMs, TCP);

  // 3 of 4 segments were lost on their way to weir; the receiver acknowledges the hole once it is filled.
  c.client({ flags: 'A', payload: 1000, seq: 3000 });
  t.equal(c.table.words[word + TX_END], (c.next.client + 4000) | 0);
  for (let i = 0; i < 3; i++) c.client({ flags: 'A', payload: 1000 });
  c.next.client += 1000;
  c.backend({ flags: 'A' });
  t.equal(c.table.words[word + TX_ACKED], c.next.client | 0);

  // Bytes weir never counted (fragments) are believed once acknowledged.
  c.next.backend += 20_000;
  c.client({ flags: 'A' });
  t.equal(c.table.words[word + RX_END], c.next.backend | 0);
  c.backend({ flags: 'FA' }).client({ flags: 'FA' });
  t.equal(c.state, 'CLOSING');

  const keepAlive = new Connection().handshake().client({ flags: 'A', seq: -1 }).backend({ flags: 'A' });
  t.equal(keepAlive.state, 'ESTABLISHED');
});

t.test('who has filled the window sends its ACKs from where that ends', async (t) => {
  const window = 1000;
  const c = new Connection().handshake({ window }).client({ flags: 'PA', payload: 600, window });
  c.next.backend += 1000; // lost before weir
  c.backend({ flags: 'A' });
  t.equal(c.table.words[c.record * RECORD_WORDS + TX_ACKED], c.next.client);
  c.next.backend += 1;
  c.client({ flags: 'PA', ack: -1001, payload: 9, window }).backend({ flags: 'A' });
  t.equal(c.table.words[c.record * RECORD_WORDS + TX_ACKED], c.next.client - 9, 'nobody can be beyond it');
});

t.test('a FIN may be overtaken by as many ACKs as a window has room for', async (t) => {
  const late = (ack: number, scale: number): string =>
    new Connection()
      .handshake({ scale })
      .backend({ flags: 'A', payload: 60_000 })
      .client({ flags: 'A' })
      .backend({ flags: 'A', payload: 60_000 })
      .client({ flags: 'A' })
      .client({ flags: 'FA', ack }).flags;
  t.match(late(-66_000, 0), 'TxClosing', 'one super-packet at least');
  t.notMatch(late(-66_001, 0), 'TxClosing');
  t.match(late(-120_000, 3), 'TxClosing');
});

t.test('TCP Fast Open: data in the SYN', async (t) => {
  for (const taken of [0, 300, 700]) {
    const c = new Connection().client({ flags: 'S', payload: 700 });
    c.backend({ flags: 'SA', ack: taken - 700, payload: 0 }).backend({ flags: 'A', ack: taken - 700, payload: 2000 });
    t.equal(c.state, 'SYN_RECV', `${taken} bytes of it acknowledged`);
    c.client({ flags: 'A', seq: taken - 700, payload: 700 - taken });
    t.equal(c.state, 'ESTABLISHED');
  }
  t.equal(new Connection().client({ flags: 'S', payload: 700 }).backend({ flags: 'SA', ack: 1 }).state, 'SYN_SENT');
});

t.test('a SYN or SYN-ACK that comes again after its data was acknowledged is a repeat', async (t) => {
  const c = new Connection().client({ flags: 'S', payload: 300 });
  c.backend({ flags: 'SA', ack: -300 }).backend({ flags: 'A', payload: 1000 });
  t.equal(c.client({ flags: 'S', at: 1000, payload: 300 }).state, 'SYN_RECV');
  // So is a SYN-ACK: an ACK that is too old to establish anything may have acknowledged what followed it.
  c.client({ flags: 'A', seq: -400 }).backend({ flags: 'SA', at: 700_000, ack: -300 });
  t.equal(c.client({ flags: 'A' }).state, 'ESTABLISHED');
});

t.test('another SYN forgets what the backend said to the first', async (t) => {
  const c = new Connection().client({ flags: 'S' }).backend({ flags: 'SA' }).client({ flags: 'S', at: 9_000_000 });
  t.equal(c.client({ flags: 'R', at: 9_000_002 }).state, 'SYN_SENT', 'no window is known');
  t.equal(c.client({ flags: 'R', at: 9_000_001 }).state, 'CLOSED');
});

t.test('a second SYN-ACK may refuse the scaling that the first took', async (t) => {
  const c = new Connection().client({ flags: 'S', window: 6400, scale: 4 }).backend({ flags: 'SA', scale: 7 });
  c.next.backend = 5_000_000;
  c.backend({ flags: 'SA' });
  t.equal(c.backend({ flags: 'R', seq: 6400 }).state, 'SYN_RECV');
  t.equal(c.backend({ flags: 'R', seq: 6399 }).state, 'CLOSED');
});

t.test('a SYN repeated with fewer options counts by its last', async (t) => {
  const c = new Connection()
    .client({ flags: 'S', window: 1000, scale: 5 })
    .client({ flags: 'S', at: 1000, window: 1000 });
  c.backend({ flags: 'SA', scale: 5 }).client({ flags: 'A', window: 1000 });
  t.equal(c.backend({ flags: 'R', seq: 1000 }).state, 'ESTABLISHED');
  t.equal(c.backend({ flags: 'R', seq: 999 }).state, 'CLOSED');
});

t.test('picked up in the middle', async (t) => {
  const c = new Connection().client({ flags: 'PA', payload: 10 });
  t.equal(c.state, 'SYN_SENT');
  t.equal(c.flags, 'SeenNonSyn');
  t.equal(c.expiresInMs, SYN);
  t.equal(c.class, CLASS_HALF_OPEN);
  for (let i = 0; i < 10; i++) c.client({ flags: 'A' });
  t.equal(c.state, 'SYN_SENT', 'the client alone establishes nothing');
  c.backend({ flags: 'A' });
  t.equal(c.state, 'ESTABLISHED');
  t.equal(c.expiresInMs, TCP);
  t.equal(c.class, CLASS_ESTABLISHED);

  c.wait(1000).backend({ flags: 'R', seq: 123_456 });
  t.equal(c.state, 'ESTABLISHED', 'an RST that cannot be judged closes nothing');
  t.equal(c.expiresInMs, FIN, 'but shortens the timer');
  t.equal(c.class, CLASS_ESTABLISHED);
  t.equal(c.wait(4000).backend({ flags: 'R' }).expiresInMs, FIN - 4000, 'once');
  t.equal(c.client({ flags: 'A' }).expiresInMs, TCP, 'the next other packet restores it');
  t.notOk(isReusable(c.table, c.record, c.nowMs));
  c.client({ flags: 'FA' }).backend({ flags: 'FA' });
  t.equal(c.state, 'CLOSING');

  const fin = new Connection().client({ flags: 'FA' });
  t.equal(fin.state, 'SYN_SENT');
  t.equal(fin.flags, 'TxClosing SeenNonSyn');
  t.equal(fin.expiresInMs, FIN, 'a FIN creates nothing that lasts');
  t.equal(fin.backend({ flags: 'A' }).expiresInMs, FIN, 'not even if somebody answers');
  t.equal(fin.backend({ flags: 'A', payload: 100 }).state, 'ESTABLISHED', 'data does: a half-closed connection');
  t.equal(fin.expiresInMs, TCP);
  t.equal(fin.backend({ flags: 'FA' }).state, 'CLOSING');

  const reset = new Connection().client({ flags: 'R' });
  t.equal(reset.expiresInMs, FIN, 'nor does an RST');
  t.equal(new Connection().client({ flags: 'SA' }).expiresInMs, SYN, 'a SYN-ACK is mid-stream like any other');

  const synced = new Connection().client({ flags: 'A' }).client({ flags: 'S', at: 5 });
  synced.next.client = 6;
  t.equal(synced.flags, '', 'a SYN makes a handshake of it');
  t.equal(synced.backend({ flags: 'SA' }).client({ flags: 'A' }).state, 'ESTABLISHED');
  t.equal(synced.client({ flags: 'R' }).state, 'CLOSED');
});

t.test('picked up by a reply', async (t) => {
  const c = new Connection().backend({ flags: 'A', payload: 1000 });
  t.equal(c.state, 'SYN_RECV');
  t.equal(c.expiresInMs, SYN);
  t.equal(c.class, CLASS_HALF_OPEN);
  t.equal(c.backend({ flags: 'A', payload: 1000 }).state, 'SYN_RECV');
  t.equal(new Connection().backend({ flags: 'SA' }).expiresInMs, SYN, 'a SYN-ACK opens a handshake');
  const next = new Connection({ table: c.table }).backend({ flags: 'RA' });
  t.equal(next.expiresInMs, FIN);
  const c2 = new Connection().backend({ flags: 'A' });
  // The tracker has not seen the client: its first packet is a further one.
  c2.backend({ flags: 'A' }).client({ flags: 'A' });
  t.equal(c2.state, 'ESTABLISHED');
  t.equal(c2.expiresInMs, TCP);
});

t.test('one-way entries', async (t) => {
  const c = new Connection({ type: TYPE_SVC }).client({ flags: 'S' });
  t.equal(c.state, 'SYN_SENT');
  t.equal(c.expiresInMs, SYN);
  t.equal(c.wait(9000).client({ flags: 'S', seq: -1 }).expiresInMs, SYN);
  c.client({ flags: 'A' });
  t.equal(c.state, 'ESTABLISHED');
  t.equal(c.flags, 'SeenNonSyn');
  t.equal(c.expiresInMs, TCP);
  t.equal(c.class, CLASS_ESTABLISHED, 'the third packet');
  t.equal(c.wait(1000).client({ flags: 'R' }).expiresInMs, FIN);
  t.equal(c.state, 'ESTABLISHED');
  t.equal(c.client({ flags: 'A' }).expiresInMs, TCP);
  c.client({ flags: 'FA' });
  t.equal(c.state, 'CLOSING');
  t.equal(c.flags, 'RxClosing TxClosing SeenNonSyn');
  t.equal(c.expiresInMs, 60_000, 'serviceTcpGrace');
  t.equal(c.class, CLASS_CLOSING);
  t.equal(c.wait(50_000).client({ flags: 'A' }).expiresInMs, 60_000, 'refreshed');
  t.equal(c.state, 'CLOSING');

  const again = new Connection({ type: TYPE_SVC, clientIsn: 0xb0000000, backendIsn: 0xe0000000 });
  again.client({ flags: 'S' }).client({ flags: 'PA', payload: 100 }).client({ flags: 'R' });
  again.next.client = 0x50000000;
  again.next.backend = 0x60000000;
  again.client({ flags: 'S' }).client({ flags: 'A', payload: 10 }).client({ flags: 'A', seq: -10 });
  const ends = [TX_END, RX_END].map((end) => again.table.words[again.record * RECORD_WORDS + end]);
  t.same(ends, [0x5000000b, 0x60000000], 'a client that begins anew has other numbers');

  const two = new Connection({ type: TYPE_SVC }).client({ flags: 'S' }).client({ flags: 'A' });
  t.equal(two.class, CLASS_HALF_OPEN, 'evictable until the third packet');
  const syns = new Connection({ type: TYPE_SVC });
  for (let i = 0; i < 9; i++) syns.client({ flags: 'S', at: 1000 });
  t.equal(syns.class, CLASS_HALF_OPEN, 'SYNs alone never are more');
  const picked = new Connection({ type: TYPE_SVC }).client({ flags: 'A' });
  t.equal(picked.state, 'ESTABLISHED');
  t.equal(picked.expiresInMs, TCP);
  const fin = new Connection({ type: TYPE_SVC }).client({ flags: 'FA' });
  t.equal(fin.state, 'CLOSING');
  t.equal(fin.expiresInMs, 60_000);
});

t.test('each timer, one second before and after', async (t) => {
  const cases: ReadonlyArray<readonly [name: string, timerMs: number, make: () => Connection]> = [
    ['tcpSyn', SYN, () => inState('SYN_SENT')],
    ['tcpSyn after a SYN-ACK', SYN, () => inState('SYN_RECV')],
    ['tcp', TCP, () => inState('ESTABLISHED')],
    ['tcp after one FIN', TCP, () => inState('ESTABLISHED').backend({ flags: 'FA' })],
    ['tcpFin after both', FIN, () => inState('CLOSING')],
    ['tcpFin after an RST', FIN, () => inState('CLOSED')],
    ['serviceTcp', TCP, () => new Connection({ type: TYPE_SVC }).client({ flags: 'A' })],
    ['serviceTcpGrace', 60_000, () => new Connection({ type: TYPE_SVC }).client({ flags: 'FA' })],
  ];
  for (const [name, timerMs, make] of cases) {
    const c = make();
    t.notOk(c.table.isExpired(c.record, c.nowMs + timerMs - 1000), `${name} - 1 s`);
    t.ok(c.table.isExpired(c.record, c.nowMs + timerMs), `${name}`);
    t.ok(c.table.isExpired(c.record, c.nowMs + timerMs + 1000), `${name} + 1 s`);
    t.equal(c.table.reap(0, 64, c.nowMs + timerMs - 1000), 0);
    t.equal(c.table.reap(0, 64, c.nowMs + timerMs + 1000), 1);
  }
});

t.test('packets, bytes, flags and times are counted by direction', async (t) => {
  const late = 2 ** 31 + 12_345_678.9;
  const c = new Connection({ nowMs: late }).handshake().wait(2500).backend({ flags: 'PA', payload: 65_000 });
  const double = c.record * RECORD_DOUBLES;
  const at = c.record * RECORD_BYTES;
  const word = c.record * RECORD_WORDS;
  t.equal(c.table.doubles[double + TX_PACKETS], 2);
  t.equal(c.table.doubles[double + RX_PACKETS], 2);
  t.equal(c.table.doubles[double + TX_BYTES], 80);
  t.equal(c.table.doubles[double + RX_BYTES], 65_080);
  t.equal(c.table.bytes[at + TX_FLAGS_SEEN], 0x12);
  t.equal(c.table.bytes[at + RX_FLAGS_SEEN], 0x1a);
  t.equal(c.table.words[word + TX_SEEN], Math.floor(late / 1000));
  t.equal(c.table.words[word + RX_SEEN], Math.floor((late + 2500) / 1000));
  t.equal(c.table.words[word + SERVICE], 1);
  t.equal(c.expiresInMs, TCP, 'timers are right past 2^31 ms');
  t.notOk(c.table.isExpired(c.record, c.nowMs + TCP - 1));
});

t.test('connections of one table do not touch each other', async (t) => {
  const table = makeTable(8);
  const before = insertFlow(table, 900, 17, 0);
  table.setExpiry(before, 5);
  const c = new Connection({ table, type: TYPE_OUT });
  const after = insertFlow(table, 901, 17, 0);
  table.setExpiry(after, 6);
  const copy = table.bytes.slice();
  c.handshake().client({ flags: 'FA' }).backend({ flags: 'FA' });
  const differs = new Set<number>();
  for (const [i, byte] of copy.entries()) if (table.bytes[i] !== byte) differs.add(Math.floor(i / RECORD_BYTES));
  // The neighbours' list links may change, nothing else.
  for (const record of [before, after]) {
    t.same(
      table.words.slice(record * RECORD_WORDS, record * RECORD_WORDS + 12),
      new Int32Array(copy.buffer).slice(record * RECORD_WORDS, record * RECORD_WORDS + 12),
    );
  }
  t.ok(differs.has(c.record));
});
