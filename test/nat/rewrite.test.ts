import fc from 'fast-check';
import t from 'tap';
import { rewrite, rewriteAddresses } from '../../lib/nat/rewrite.js';
import { parseIpv4 } from '../../lib/wire/address.js';
import * as ipv4 from '../../lib/wire/ipv4.js';
import { isPartial } from '../../lib/wire/vnet.js';
import * as make from '../fixtures/packets.js';
import { isIntactOutside, packetIn, slotOf, vnetIn } from './slot.js';

const octet = fc.oneof(fc.nat(255), fc.constantFrom(0, 255));
const address = fc.tuple(octet, octet, octet, octet).map((parts) => parts.join('.'));
const port = fc.oneof(fc.nat(65535), fc.constantFrom(0, 65535));
const ends = fc.record({ src: address, dst: address, sport: port, dport: port });
const ipOptions = fc.constantFrom(0, 4, 40).map((length) => new Uint8Array(length).fill(1));

function rewriteSlot(slot: ReturnType<typeof slotOf>, to: { src: string; dst: string; sport: number; dport: number }) {
  const { memory, at } = slot;
  const l4 = at + ipv4.headerLength(memory.bytes, at);
  rewrite(
    memory.view,
    memory.bytes,
    at,
    l4,
    ipv4.protocol(memory.bytes, at),
    parseIpv4(to.src) | 0,
    parseIpv4(to.dst) | 0,
    (to.sport << 16) | to.dport,
    isPartial(memory.bytes, at, l4),
  );
}

t.test('a rewritten packet is, bit for bit, the one its sender would have sent from there', async (t) => {
  fc.assert(
    fc.property(
      ends,
      ends,
      ipOptions,
      fc.nat(40),
      fc.boolean(),
      fc.boolean(),
      (from, to, options, payload, isTcp, offload) => {
        const build = isTcp ? make.tcp : make.udp;
        const whole = (fields: typeof from) => build({ ...fields, ipOptions: options, payload });
        const packet = offload ? make.partial(whole(from), 8) : { bytes: whole(from), vnet: new Uint8Array(10) };
        const expected = offload ? make.partial(whole(to), 8).bytes : whole(to);
        const slot = slotOf(packet);
        rewriteSlot(slot, to);
        return (
          Buffer.compare(packetIn(slot), expected) === 0 &&
          Buffer.compare(vnetIn(slot), packet.vnet!) === 0 &&
          make.verifyChecksums(packetIn(slot), vnetIn(slot)).length === 0 &&
          isIntactOutside(slot)
        );
      },
    ),
    { numRuns: 3000 },
  );
  t.pass();
});

t.test('words that stay the same may be signed or not', async (t) => {
  const packet = make.tcp({ src: '200.1.0.2', dst: '240.0.0.1', sport: 65535, dport: 80, payload: 9 });
  const slot = slotOf(packet);
  const { memory, at } = slot;
  const ports = ((65535 << 16) | 80) >>> 0;
  rewrite(memory.view, memory.bytes, at, at + 20, 6, parseIpv4('200.1.0.2'), parseIpv4('240.0.0.1'), ports, false);
  t.same(packetIn(slot), packet);
});

t.test('UDP: no checksum stays none, a computed 0 is sent as ffff', async (t) => {
  const from = { src: '10.1.0.2', dst: '10.96.0.10', sport: 5000, dport: 53 };
  const to = { ...from, dst: '10.2.0.11', dport: 5353 };
  const without = slotOf(make.udp({ ...from, payload: 5, checksum: 0 }));
  rewriteSlot(without, to);
  t.same(packetIn(without), make.udp({ ...to, payload: 5, checksum: 0 }));

  // Of the 65,536 source ports, one or two make the checksum 0: find them by building, then rewrite to and from them.
  let found = 0;
  for (let sport = 0; sport < 65536; sport++) {
    const target = make.udp({ ...to, sport, payload: 5 });
    if (target[26] !== 0xff || target[27] !== 0xff) continue;
    found++;
    const slot = slotOf(make.udp({ ...from, payload: 5 }));
    rewriteSlot(slot, { ...to, sport });
    t.same(packetIn(slot), target, `source port ${sport}: ffff`);
    rewriteSlot(slot, from);
    t.same(packetIn(slot), make.udp({ ...from, payload: 5 }), 'and back');
  }
  t.ok(found > 0);
});

t.test('a wrong checksum stays wrong by as much', async (t) => {
  const from = { src: '10.1.0.2', dst: '10.96.0.10', sport: 5000, dport: 80 };
  const to = { ...from, dst: '10.2.0.11', dport: 8080 };
  const right = make.tcp({ ...from, payload: 'abc' });
  const slot = slotOf(right.map((byte, i) => (i === 40 ? byte ^ 1 : byte)));
  rewriteSlot(slot, to);
  t.same(
    packetIn(slot),
    make.tcp({ ...to, payload: 'abc' }).map((byte, i) => (i === 40 ? byte ^ 1 : byte)),
  );
  t.same(make.verifyChecksums(packetIn(slot)), ['TCP checksum']);
});

t.test(
  'fragments: the first like a whole packet, the others by their addresses; put together they are right',
  async (t) => {
    const from = { src: '10.1.0.2', dst: '10.96.0.10', sport: 5000, dport: 53 };
    const to = { src: '10.96.255.1', dst: '10.2.0.11', sport: 40000, dport: 5353 };
    for (const build of [make.udp, make.tcp]) {
      const pieces = make.fragment(build({ ...from, id: 77, payload: 4000 }), 1480).map((piece) => slotOf(piece));
      for (const [i, slot] of pieces.entries()) {
        if (i === 0) rewriteSlot(slot, to);
        else
          rewriteAddresses(slot.memory.view, slot.memory.bytes, slot.at, parseIpv4(to.src) | 0, parseIpv4(to.dst) | 0);
        t.ok(isIntactOutside(slot));
      }
      t.same(pieces.map(packetIn), make.fragment(build({ ...to, id: 77, payload: 4000 }), 1480));
    }
  },
);

t.test('protocols without ports: the addresses and nothing else', async (t) => {
  const payload = make.pattern(30);
  const slot = slotOf(make.ip({ src: '10.1.0.2', dst: '10.96.0.10' }, 132, payload));
  rewriteSlot(slot, { src: '10.1.0.3', dst: '10.2.0.11', sport: 1, dport: 2 });
  t.same(packetIn(slot), make.ip({ src: '10.1.0.3', dst: '10.2.0.11' }, 132, payload));
  const echo = slotOf(make.echoRequest({ src: '10.1.0.2', dst: '10.96.0.10', id: 7, payload: 9 }));
  rewriteSlot(echo, { src: '10.1.0.3', dst: '10.2.0.11', sport: 1, dport: 2 });
  t.same(packetIn(echo), make.echoRequest({ src: '10.1.0.3', dst: '10.2.0.11', id: 7, payload: 9 }));
});

t.test('rewriting there and back again gives the packet back', async (t) => {
  fc.assert(
    fc.property(ends, ends, fc.nat(30), fc.boolean(), (from, to, payload, isTcp) => {
      const packet = (isTcp ? make.tcp : make.udp)({ ...from, payload });
      const slot = slotOf(packet);
      rewriteSlot(slot, to);
      rewriteSlot(slot, from);
      return Buffer.compare(packetIn(slot), packet) === 0;
    }),
  );
  t.pass();
});
