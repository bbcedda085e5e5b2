import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import fc from 'fast-check';
import t from 'tap';
import {
  FRAGMENT_ENTRIES,
  FRAGMENT_LIFETIME_MS,
  HELD_FRAGMENT_MS,
  HELD_FRAGMENTS,
  HELD_FRAGMENTS_PER_DATAGRAM,
} from '../../lib/base/limits.js';
import { REASON } from '../../lib/base/reasons.js';
import { FragmentTracker, restoreFragment } from '../../lib/conntrack/fragments.js';
import { IdentificationTable } from '../../lib/conntrack/identifications.js';
import { formatIpv4, parseIpv4 } from '../../lib/wire/address.js';
import * as ipv4 from '../../lib/wire/ipv4.js';
import * as make from '../fixtures/packets.js';

const VIP = '10.96.0.10';
const LIMIT = REASON['fragment-limit'];

type Key = readonly [source: number, destination: number, protocol: number, id: number];
const keyOf = (src: string, id: number, protocol = 17, dst = VIP): Key => [
  parseIpv4(src) | 0,
  parseIpv4(dst) | 0,
  protocol,
  id,
];

/** A later fragment in a slot, with headroom. */
function held(tracker: FragmentTracker<string>, piece: Uint8Array, nowMs: number): number {
  const slot = new Uint8Array(128 + piece.length + 7).fill(0xcc);
  slot.fill(0, 118, 128);
  slot.set(piece, 128);
  const refusal = tracker.hold(new DataView(slot.buffer), slot, 128, piece.length, nowMs);
  slot.fill(0xdd); // the slot goes back to the device
  return refusal;
}

function pieceOf(src: string, id: number, from = 8): Uint8Array {
  return make.fragmentOf(make.udp({ src, dst: VIP, sport: 1, dport: 2, id, payload: 3000 }), from, from + 8);
}

t.test('a decision holds for 30 s from the first fragment, and for its own key only', async (t) => {
  const tracker = new FragmentTracker<string>();
  const key = keyOf('10.1.0.2', 7);
  t.equal(tracker.lookup(...key, 0), undefined);
  tracker.remember(...key, 'b1', 1000);
  for (const other of [
    keyOf('10.1.0.3', 7),
    keyOf('10.1.0.2', 8),
    keyOf('10.1.0.2', 7, 6),
    keyOf('10.1.0.2', 7, 17, '10.96.0.11'),
  ]) {
    t.equal(tracker.lookup(...other, 1000), undefined);
  }
  t.equal(tracker.lookup(...key, 1000), 'b1');
  t.equal(tracker.lookup(...key, 1000 + FRAGMENT_LIFETIME_MS - 1), 'b1', 'other fragments do not prolong it');
  t.equal(tracker.lookup(...key, 1000 + FRAGMENT_LIFETIME_MS), undefined);

  tracker.remember(...key, 'b1', 50_000);
  tracker.remember(...key, 'b2', 60_000);
  t.equal(
    tracker.lookup(...key, 50_000 + FRAGMENT_LIFETIME_MS),
    'b2',
    'the identification is used again: the newer first leads',
  );
});

t.test('keys are exact: no two tuples share one', async () => {
  const word = fc.oneof(
    fc.integer({ min: -0x80000000, max: 0x7fffffff }),
    fc.constantFrom(0, -1, 0xd800 << 16, 0xdc00),
  );
  const key = fc.tuple(word, word, fc.nat(255), fc.nat(65535));
  fc.assert(
    fc.property(fc.uniqueArray(key, { selector: String, maxLength: 50 }), (keys) => {
      const tracker = new FragmentTracker<number>();
      keys.forEach((each, i) => {
        tracker.remember(...each, i, 0);
      });
      return keys.every((each, i) => tracker.lookup(...each, 1) === i);
    }),
  );
});

t.test('early fragments are copied, and released in the order they came', async (t) => {
  const tracker = new FragmentTracker<string>();
  const packet = make.udp({ src: '10.1.0.2', dst: VIP, sport: 1, dport: 2, id: 7, payload: 6000 });
  const [, ...later] = make.fragment(packet, 1480);
  const order = [3, 0, 2, 1].map((i) => later[i]!);
  for (const [i, piece] of order.entries()) t.equal(held(tracker, piece, i), 0);
  t.equal(held(tracker, pieceOf('10.1.0.3', 7), 3), 0, 'another client, the same identification');
  t.equal(tracker.heldCount, 5);

  t.same(tracker.release(...keyOf('10.1.0.2', 8)), []);
  const released = tracker.release(...keyOf('10.1.0.2', 7));
  t.equal(tracker.heldCount, 1);
  t.same(tracker.release(...keyOf('10.1.0.2', 7)), [], 'once');
  const slot = new Uint8Array(2048).fill(0xee);
  t.same(
    released.map((fragment) => {
      restoreFragment(fragment, slot, 128);
      return slot.slice(128, 128 + fragment.length);
    }),
    order,
  );
  t.same(slot.slice(118, 128), new Uint8Array(10), 'with the vnet header');
  t.equal(slot[117], 0xee);
});

t.test('held fragments expire one second after they came, each by itself', async (t) => {
  const tracker = new FragmentTracker<string>();
  t.equal(tracker.nextDueMs, Number.POSITIVE_INFINITY);
  held(tracker, pieceOf('10.1.0.2', 1, 8), 100);
  held(tracker, pieceOf('10.1.0.3', 1, 8), 200);
  held(tracker, pieceOf('10.1.0.2', 1, 16), 300);
  t.equal(tracker.nextDueMs, 100 + HELD_FRAGMENT_MS);
  t.equal(tracker.expire(1099.9), 0);
  t.equal(tracker.expire(1100), 1);
  t.equal(tracker.nextDueMs, 1200);
  t.equal(tracker.release(...keyOf('10.1.0.2', 1)).length, 1, 'the younger one is still there');
  t.equal(tracker.nextDueMs, 1200);
  t.equal(tracker.expire(5e12), 1);
  t.equal(tracker.heldCount, 0);
  t.equal(tracker.nextDueMs, Number.POSITIVE_INFINITY);
  t.same(tracker.release(...keyOf('10.1.0.3', 1)), []);
});

t.test('limits: 64 of a datagram, 1024 in all, 8192 decisions', async (t) => {
  const tracker = new FragmentTracker<string>();
  for (let i = 0; i < HELD_FRAGMENTS_PER_DATAGRAM; i++) t.equal(held(tracker, pieceOf('10.1.0.2', 1, 8 + i * 8), 0), 0);
  t.equal(held(tracker, pieceOf('10.1.0.2', 1, 800), 0), LIMIT);
  for (let i = HELD_FRAGMENTS_PER_DATAGRAM; i < HELD_FRAGMENTS; i++) held(tracker, pieceOf('10.1.0.3', i), 1);
  t.equal(tracker.heldCount, HELD_FRAGMENTS);
  t.equal(held(tracker, pieceOf('10.1.0.4', 1), 1), LIMIT);
  t.equal(tracker.release(...keyOf('10.1.0.2', 1)).length, HELD_FRAGMENTS_PER_DATAGRAM);
  t.equal(held(tracker, pieceOf('10.1.0.4', 1), 2), 0, 'there is room again');
  t.equal(tracker.expire(1001), HELD_FRAGMENTS - HELD_FRAGMENTS_PER_DATAGRAM);
  t.equal(tracker.heldCount, 1);

  const survivor = keyOf('10.1.0.9', 1);
  tracker.remember(...survivor, 'in use', 0);
  for (let i = 0; i < FRAGMENT_ENTRIES * 2; i++) {
    tracker.remember(...keyOf(formatIpv4(0x0b000000 + i), 1), 'flood', 0);
    if (i % 1000 === 0) tracker.lookup(...survivor, 1);
  }
  t.equal(tracker.lookup(...survivor, 1), 'in use', 'the least recently used goes first');
  t.equal(tracker.lookup(...keyOf('11.0.0.0', 1), 1), undefined);
  t.equal(tracker.heldCount, 1, 'a flood of first fragments costs no held one');
});

t.test('an identification is one datagram’s alone between two addresses, for 30 s', async (t) => {
  const table = new IdentificationTable();
  const claim = (src: string, id: number, nowMs: number, protocol = 17): number =>
    table.claim(parseIpv4(src) | 0, 1, protocol, id, 2, 3, nowMs);
  t.equal(claim('10.1.0.2', 7, 0), 7, 'its own, when nobody has it');
  const second = claim('10.1.0.3', 7, 0);
  t.not(second, 7);
  t.equal(claim('10.1.0.4', 7, 0, 6), 7, 'of another protocol');
  t.equal(table.claim(parseIpv4('10.1.0.3') | 0, 1, 17, 7, 2, 4, 0), 7, 'between other addresses');
  t.equal(claim('10.1.0.2', 7, 29_999), 7, 'a repeat keeps it, and for longer');
  t.equal(claim('10.1.0.3', 7, 29_999), second);
  t.equal(claim('10.1.0.5', 7, 59_999), 7);

  const many = new IdentificationTable();
  const ids = Array.from({ length: 16 }, (_, i) => many.claim(i, 1, 17, 7, 2, 3, 0));
  t.equal(new Set(ids).size, 16);
  t.equal(many.claim(99, 1, 17, 7, 2, 3, 0), 7, 'a bounded search, and then it is as it was');
});

t.test('orphans leave nothing behind', async (t) => {
  setFlagsFromString('--expose-gc');
  const collect = runInNewContext('gc') as () => void;
  const tracker = new FragmentTracker<string>();
  const view = new DataView(pieceOf('10.1.0.2', 1).buffer);
  const bytes = new Uint8Array(200);
  bytes.set(new Uint8Array(view.buffer), 128);
  const slot = new DataView(bytes.buffer);
  const flood = (round: number) => {
    for (let i = 0; i < 100_000; i++) {
      ipv4.setSource(slot, 128, (round << 20) + i);
      tracker.hold(slot, bytes, 128, view.byteLength, i);
      tracker.expire(i + HELD_FRAGMENT_MS);
    }
    collect();
    return process.memoryUsage().heapUsed;
  };
  const before = flood(1);
  const grown = flood(2) - before;
  t.equal(tracker.heldCount, 0);
  t.ok(grown < 2e6, `the heap grew by ${grown} bytes over 100,000 of them`);
});

t.test('any order of everything agrees with a naive model', async (t) => {
  const step = fc.oneof(
    { weight: 6, arbitrary: fc.record({ kind: fc.constant('later' as const), client: fc.nat(3), id: fc.nat(2) }) },
    { weight: 3, arbitrary: fc.record({ kind: fc.constant('first' as const), client: fc.nat(3), id: fc.nat(2) }) },
    {
      weight: 2,
      arbitrary: fc.record({
        kind: fc.constant('wait' as const),
        ms: fc.constantFrom(1, 300, 999, 1000, 29_000, 30_000),
      }),
    },
  );
  fc.assert(
    fc.property(fc.array(step, { maxLength: 120 }), (steps) => {
      const tracker = new FragmentTracker<string>();
      const decisions = new Map<string, { decision: string; atMs: number }>();
      let waiting: { name: string; serial: number; atMs: number }[] = [];
      let nowMs = 0;
      for (const [serial, each] of steps.entries()) {
        if (each.kind === 'wait') {
          nowMs += each.ms;
          const kept = waiting.filter(({ atMs }) => nowMs < atMs + 1000);
          if (tracker.expire(nowMs) !== waiting.length - kept.length) return false;
          waiting = kept;
          continue;
        }
        const src = `10.1.0.${each.client}`;
        const key = keyOf(src, each.id);
        const name = key.join();
        if (each.kind === 'first') {
          tracker.remember(...key, `d${serial}`, nowMs);
          decisions.set(name, { decision: `d${serial}`, atMs: nowMs });
          const due = waiting.filter((fragment) => fragment.name === name);
          waiting = waiting.filter((fragment) => fragment.name !== name);
          const offsets = tracker.release(...key).map(({ bytes }) => ipv4.fragmentOffset(bytes, 10));
          if (offsets.join() !== due.map((fragment) => 8 + fragment.serial * 8).join()) return false;
        } else {
          const known = decisions.get(name);
          const expected = known && nowMs < known.atMs + 30_000 ? known.decision : undefined;
          if (tracker.lookup(...key, nowMs) !== expected) return false;
          if (expected === undefined) {
            if (held(tracker, pieceOf(src, each.id, 8 + serial * 8), nowMs) !== 0) return false;
            waiting.push({ name, serial, atMs: nowMs });
          }
        }
        if (tracker.heldCount !== waiting.length) return false;
        if (tracker.nextDueMs !== (waiting[0] ? waiting[0].atMs + 1000 : Number.POSITIVE_INFINITY)) return false;
      }
      return true;
    }),
    { numRuns: 500 },
  );
  t.pass();
});
