import fc from 'fast-check';
import t from 'tap';
import { linkHeaderLength, NOT_IP, UNKNOWN_LINK } from '../../lib/wire/link-layer.js';
import { openCapture, PcapWriter } from '../../lib/wire/pcap.js';
import { ethernet, PcapngBlocks, type PcapOptions, pcapFile, readPcap } from '../fixtures/captures.js';
import { pattern } from '../fixtures/packets.js';

interface Read {
  seconds: number;
  nanoseconds: number;
  linkType: number;
  timed: boolean;
  bytes: Uint8Array;
}

/** Delivers a file in pieces of at most `step` bytes. */
function reader(file: Uint8Array, step = Number.POSITIVE_INFINITY): (into: Uint8Array) => number {
  let at = 0;
  return (into) => {
    const count = Math.min(into.length, step, file.length - at);
    into.set(file.subarray(at, at + count));
    at += count;
    return count;
  };
}

function readAll(file: Uint8Array, step?: number): Read[] {
  const capture = openCapture(reader(file, step), 'in.pcap');
  const packets: Read[] = [];
  while (capture.next()) {
    const { bytes, offset, length, seconds, nanoseconds, linkType, timed } = capture.packet;
    packets.push({ seconds, nanoseconds, linkType, timed, bytes: bytes.slice(offset, offset + length) });
  }
  return packets;
}

t.test('pcap: both byte orders, micro- and nanoseconds', async (t) => {
  for (const bigEndian of [false, true]) {
    for (const nanosecond of [false, true]) {
      const options: PcapOptions = { bigEndian, nanosecond, linkType: 228 };
      const file = pcapFile(
        [
          { seconds: 1_700_000_000, fraction: 123_456, bytes: pattern(60) },
          { seconds: 4_294_967_295, fraction: nanosecond ? 999_999_999 : 999_999, bytes: pattern(0) },
          { seconds: 5, fraction: nanosecond ? 1_500_000_000 : 1_500_000, bytes: pattern(1) },
        ],
        options,
      );
      const [first, second, third, ...rest] = readAll(file);
      t.same(rest, []);
      t.same(first, {
        seconds: 1_700_000_000,
        nanoseconds: nanosecond ? 123_456 : 123_456_000,
        linkType: 228,
        timed: true,
        bytes: pattern(60),
      });
      t.equal(second!.seconds, 4_294_967_295);
      t.equal(second!.nanoseconds, nanosecond ? 999_999_999 : 999_999_000);
      t.equal(second!.bytes.length, 0);
      t.match(third, { seconds: 6, nanoseconds: 500_000_000 }, 'a fraction beyond a second is carried');
      t.equal(openCapture(reader(file)).nanosecond, nanosecond);
    }
  }
});

t.test('any file arrives whole in pieces of any size, and is written back as it was', async (t) => {
  const record = fc.record({
    seconds: fc.integer({ min: 0, max: 0xffffffff }),
    fraction: fc.integer({ min: 0, max: 999_999 }),
    bytes: fc.uint8Array({ maxLength: 3000 }),
  });
  fc.assert(
    fc.property(fc.array(record, { maxLength: 20 }), fc.integer({ min: 1, max: 5000 }), (records, step) => {
      const file = pcapFile(records);
      const pieces: Uint8Array[] = [];
      const writer = new PcapWriter((bytes) => pieces.push(bytes.slice()));
      for (const { bytes, seconds, nanoseconds } of readAll(file, step)) {
        writer.packet(bytes, 0, bytes.length, seconds, nanoseconds);
      }
      writer.flush();
      const written = Buffer.concat(pieces);
      t.match(readPcap(written), { magic: 0xa1b2c3d4, linkType: 101 });
      return Buffer.compare(written.subarray(24), file.subarray(24)) === 0;
    }),
    { numRuns: 200 },
  );
});

t.test('a file larger than the window, with records larger than it too', async (t) => {
  const records = Array.from({ length: 60 }, (_, i) => ({
    seconds: i,
    fraction: 0,
    bytes: pattern(i === 30 ? 700_000 : 20_000 + i),
  }));
  const read = readAll(pcapFile(records), 100_000);
  t.same(
    read.map(({ bytes }) => bytes.length),
    records.map(({ bytes }) => bytes.length),
  );
  t.ok(read.every(({ bytes }) => Buffer.compare(bytes, pattern(bytes.length)) === 0));
});

t.test('nanoseconds are kept on writing when asked for', async (t) => {
  const pieces: Uint8Array[] = [];
  const writer = new PcapWriter((bytes) => pieces.push(bytes.slice()), true);
  writer.packet(pattern(30), 5, 20, 7, 123_456_789);
  writer.flush();
  const { magic, records } = readPcap(Buffer.concat(pieces));
  t.equal(magic, 0xa1b23c4d);
  t.same(records, [{ seconds: 7, fraction: 123_456_789, bytes: pattern(30).slice(5, 25) }]);
});

t.test('pcapng: sections, interfaces, every kind of packet block, and what is none', async (t) => {
  const little = new PcapngBlocks();
  const big = new PcapngBlocks(true);
  const file = Buffer.concat([
    little.section(),
    little.interface(101),
    little.interface(1, { tsresol: 9, tsoffset: 1000n }),
    little.interface(228, { tsresol: 0x80 | 10, snapLength: 8 }),
    little.block(0x0bad, pattern(5)),
    little.enhanced(0, 1_700_000_000_000_001n, pattern(41)),
    little.enhanced(1, 5_000_000_007n, pattern(3)),
    little.enhanced(2, 1536n, pattern(0)),
    little.obsolete(0, 2_500_000n, pattern(10)),
    little.block(5, pattern(12)),
    big.section(),
    big.interface(229, { snapLength: 6 }),
    big.simple(pattern(6), 1500),
    big.enhanced(0, 9_000_000n, pattern(20), 12),
  ]);
  for (const step of [1, 7, 1000, 100_000]) {
    t.same(readAll(file, step), [
      { seconds: 1_700_000_000, nanoseconds: 1000, linkType: 101, timed: true, bytes: pattern(41) },
      { seconds: 1005, nanoseconds: 7, linkType: 1, timed: true, bytes: pattern(3) },
      { seconds: 1, nanoseconds: 500_000_000, linkType: 228, timed: true, bytes: pattern(0) },
      { seconds: 2, nanoseconds: 500_000_000, linkType: 101, timed: true, bytes: pattern(10) },
      { seconds: 0, nanoseconds: 0, linkType: 229, timed: false, bytes: pattern(6) },
      { seconds: 9, nanoseconds: 0, linkType: 229, timed: true, bytes: pattern(12) },
    ]);
  }
});

t.test('files that are no captures, or are cut, are refused with what is wrong and where', async (t) => {
  const blocks = new PcapngBlocks();
  const one = pcapFile([{ seconds: 1, fraction: 0, bytes: pattern(40) }]);
  const withByte = (file: Uint8Array, at: number, byte: number): Uint8Array => {
    const copy = Uint8Array.from(file);
    copy[at] = byte;
    return copy;
  };
  const ng = (...parts: Uint8Array[]): Uint8Array => Buffer.concat([blocks.section(), ...parts]);
  const section = blocks.section().length;
  const cases: Array<[name: string, file: Uint8Array, message: RegExp]> = [
    ['empty', new Uint8Array(0), /^in.pcap: at offset 0: the file is empty/],
    ['three bytes', Uint8Array.of(0xd4, 0xc3, 0xb2), /offset 0: the file has less than 4 bytes/],
    ['text', Buffer.from('#!/bin/sh\n'), /offset 0: .*neither pcap nor pcapng: it begins with 0x23212f62/],
    ['gzip', Uint8Array.of(0x1f, 0x8b, 8, 0), /gzip/],
    ['modified pcap', Uint8Array.of(0x34, 0xcd, 0xb2, 0xa1), /Kuznetzov/],
    ['half a file header', one.subarray(0, 20), /offset 0: the file header is cut short/],
    ['version 3', withByte(one, 4, 3), /offset 4: pcap version 3 is not 2/],
    ['half a record header', one.subarray(0, 30), /offset 24: the last record is cut short: 6 of its 16 header bytes/],
    ['half a packet', one.subarray(0, 50), /offset 24: the last record is cut short: 10 of its 40 bytes are there/],
    ['an absurd length', withByte(one, 35, 0xff), /offset 32: a record of \d+ bytes is not credible/],
    ['pcapng without order', withByte(blocks.section(), 8, 0), /offset 8: a section header without a byte-order magic/],
    ['pcapng version 2', withByte(blocks.section(), 12, 2), /offset 12: pcapng version 2 is not 1/],
    [
      'half a block',
      ng(blocks.interface(1).subarray(0, 9)),
      new RegExp(`offset ${section}: the last block is cut short`),
    ],
    ['a cut block', ng(blocks.interface(1).subarray(0, 16)), /the last block is cut short: 16 of its \d+ bytes/],
    ['odd block length', withByte(ng(blocks.interface(1)), section + 4, 13), /a block of 13 bytes is not credible/],
    ['two lengths', withByte(ng(blocks.interface(1)), ng(blocks.interface(1)).length - 4, 99), /ends with length 99/],
    ['no interface', ng(blocks.enhanced(0, 0n, pattern(4))), /interface 0, which the section does not describe/],
    [
      'a short packet block',
      ng(blocks.interface(1), blocks.block(6, pattern(8))),
      /a block of type 6 has only 20 bytes/,
    ],
    [
      'more captured than the block holds',
      ng(blocks.interface(1), blocks.enhanced(0, 0n, pattern(4), 4000)),
      /a packet of 4000 bytes in a block with room for/,
    ],
    [
      'an option beyond its block',
      ng(blocks.block(1, Buffer.concat([blocks.words16(1, 0), blocks.words32(0), blocks.words16(9, 100)]))),
      /option 9 of an interface block exceeds the block/,
    ],
  ];
  for (const [name, file, message] of cases) {
    t.throws(() => readAll(file), { code: 'CAPTURE_INVALID', message }, name);
  }
});

t.test('no bytes make the reader do anything but read or refuse', async () => {
  const blocks = new PcapngBlocks();
  const seeds = [
    pcapFile([
      { seconds: 1, fraction: 2, bytes: pattern(60) },
      { seconds: 3, fraction: 4, bytes: pattern(5) },
    ]),
    Buffer.concat([
      blocks.section(),
      blocks.interface(1, { tsresol: 9 }),
      blocks.enhanced(0, 5n, pattern(30)),
      blocks.simple(pattern(9)),
    ]),
  ];
  fc.assert(
    fc.property(
      fc.constantFrom(...seeds),
      fc.array(fc.tuple(fc.nat(), fc.nat(255)), { maxLength: 4 }),
      fc.nat(),
      (seed, edits, cut) => {
        const file = Uint8Array.from(seed);
        for (const [at, byte] of edits) file[at % file.length] = byte;
        try {
          readAll(file.subarray(0, cut % 3 === 0 ? cut % file.length : file.length), 50);
          return true;
        } catch (error) {
          return (error as { code?: string }).code === 'CAPTURE_INVALID';
        }
      },
    ),
    { numRuns: 2000 },
  );
});

t.test('link layers', async (t) => {
  const length = (linkType: number, bytes: Uint8Array) => linkHeaderLength(linkType, bytes, 0, bytes.length);
  const ip = pattern(20);
  for (const raw of [101, 228, 229]) t.equal(length(raw, ip), 0);
  t.equal(length(1, ethernet(0x0800, ip)), 14);
  t.equal(length(1, ethernet(0x86dd, ip)), 14);
  t.equal(length(1, ethernet(0x0800, ip, [0x8100])), 18);
  t.equal(length(1, ethernet(0x0800, ip, [0x88a8, 0x8100])), 22);
  t.equal(length(1, ethernet(0x0806, ip)), NOT_IP, 'ARP');
  t.equal(length(1, ethernet(60, ip)), NOT_IP, '802.3 with a length');
  t.equal(length(1, ethernet(0x0800, ip).subarray(0, 13)), 13, 'cut within the header');
  t.equal(length(1, ethernet(0x0800, new Uint8Array(0), [0x8100]).subarray(0, 16)), 16, 'cut within a tag');
  t.equal(length(113, ip), UNKNOWN_LINK);
});
