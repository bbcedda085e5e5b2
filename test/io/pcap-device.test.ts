import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import { HEADROOM_BYTES } from '../../lib/base/limits.js';
import { CaptureFile, OutputFile } from '../../lib/io/capture-file.js';
import { PcapDevice } from '../../lib/io/pcap-device.js';
import { ethernet, PcapngBlocks, pcapFile, readPcap } from '../fixtures/captures.js';
import { packet } from '../fixtures/packet-text.js';
import { pattern } from '../fixtures/packets.js';

const folder = mkdtempSync(join(tmpdir(), 'weir-pcap-'));
t.teardown(() => rmSync(folder, { recursive: true }));

function open(file: Uint8Array): CaptureFile {
  const path = join(folder, 'in.pcap');
  writeFileSync(path, file);
  const capture = new CaptureFile(path);
  t.teardown(() => capture.close());
  return capture;
}

const HELLO = packet('udp 10.1.0.2:5000 > 10.96.0.10:53 data=hello');

t.test('packets come in without their link layer, and go out with the time of what caused them', async (t) => {
  const input = open(
    pcapFile(
      [
        { seconds: 10, fraction: 5, bytes: ethernet(0x0800, HELLO, [0x8100]) },
        { seconds: 11, fraction: 6, bytes: ethernet(0x0806, pattern(28)) },
        { seconds: 12, fraction: 7, bytes: ethernet(0x0800, HELLO) },
      ],
      { linkType: 1 },
    ),
  );
  const path = join(folder, 'out.pcap');
  const output = new OutputFile(path);
  const seen: string[] = [];
  const device = new PcapDevice({
    input: input.reader,
    write: (bytes) => output.write(bytes),
    onTransmit: (bytes, offset, length) => seen.push(Buffer.from(bytes.slice(offset, offset + length)).toString('hex')),
  });
  const { rx, memory } = device;

  t.equal(device.receive(), 1);
  t.equal(rx.length[0], HELLO.length);
  t.equal(rx.offset[0], rx.slot[0]! * memory.slotBytes + HEADROOM_BYTES);
  t.same(memory.bytes.slice(rx.offset[0]!, rx.offset[0]! + HELLO.length), HELLO);
  t.same(memory.bytes.slice(rx.offset[0]! - 10, rx.offset[0]!), new Uint8Array(10), 'an empty vnet header');
  t.equal(device.isIp[0], 1);
  device.transmit(rx.slot[0]!, rx.offset[0]!, rx.length[0]!);

  t.equal(device.receive(), 1);
  t.equal(device.isIp[0], 0, 'ARP');
  t.equal(rx.length[0], 0);
  device.release(rx.slot[0]!);

  t.equal(device.receive(), 1);
  const own = device.take();
  memory.bytes.set(HELLO.subarray(0, 20), own * memory.slotBytes + HEADROOM_BYTES);
  device.transmit(own, own * memory.slotBytes + HEADROOM_BYTES, 20);
  device.transmit(rx.slot[0]!, rx.offset[0]!, rx.length[0]!);
  t.equal(device.slotsHeld, 0);
  t.throws(() => device.release(own), /given back twice/);

  t.equal(device.receive(), -1);
  device.close();
  device.close();
  output.close();
  const { magic, linkType, records } = readPcap(readFileSync(path));
  t.equal(magic, 0xa1b2c3d4);
  t.equal(linkType, 101);
  t.same(records, [
    { seconds: 10, fraction: 5, bytes: HELLO },
    { seconds: 12, fraction: 7, bytes: HELLO.slice(0, 20) },
    { seconds: 12, fraction: 7, bytes: HELLO },
  ]);
  t.equal(seen.length, 3);
});

t.test('batches, and slots that run out', async (t) => {
  const records = Array.from({ length: 10 }, (_, i) => ({ seconds: i, fraction: 0, bytes: HELLO.subarray(0, 20 + i) }));
  const device = new PcapDevice({ input: open(pcapFile(records)).reader, batch: 4 });
  const sizes: number[] = [];
  for (let count = device.receive(); count > 0; count = device.receive()) {
    sizes.push(count);
    for (let i = 0; i < count; i++) device.release(device.rx.slot[i]!);
  }
  t.same(sizes, [4, 4, 2]);
  let taken = 0;
  while (device.take() >= 0) taken++;
  t.equal(taken, device.memory.slots);
  t.equal(device.receive(), -1);
  device.close();
});

t.test('nanoseconds are kept when the capture has them, and an empty capture makes an empty capture', async (t) => {
  const blocks = new PcapngBlocks();
  const files: Array<[file: Uint8Array, magic: number, fractions: number[]]> = [
    [pcapFile([{ seconds: 1, fraction: 123_456_789, bytes: HELLO }], { nanosecond: true }), 0xa1b23c4d, [123_456_789]],
    [
      Buffer.concat([
        blocks.section(),
        blocks.interface(101, { tsresol: 9 }),
        blocks.enhanced(0, 1_123_456_789n, HELLO),
        blocks.simple(HELLO),
      ]),
      0xa1b23c4d,
      [123_456_789, 123_456_789],
    ],
    [
      Buffer.concat([blocks.section(), blocks.interface(101), blocks.enhanced(0, 1_500_001n, HELLO)]),
      0xa1b2c3d4,
      [500_001],
    ],
    [pcapFile([]), 0xa1b2c3d4, []],
  ];
  for (const [file, magic, fractions] of files) {
    const pieces: Uint8Array[] = [];
    const device = new PcapDevice({ input: open(file).reader, write: (bytes) => pieces.push(bytes.slice()) });
    while (device.receive() > 0) device.transmit(device.rx.slot[0]!, device.rx.offset[0]!, device.rx.length[0]!);
    device.close();
    const written = readPcap(Buffer.concat(pieces));
    t.equal(written.magic, magic);
    t.same(
      written.records.map(({ fraction }) => fraction),
      fractions,
    );
  }
});

t.test('files that cannot be read or written, and link types that cannot', async (t) => {
  t.throws(() => new CaptureFile(join(folder, 'none.pcap')), {
    code: 'CAPTURE_INVALID',
    message: /cannot read .*none.pcap: it does not exist/,
  });
  t.throws(() => new CaptureFile(folder), { code: 'CAPTURE_INVALID', message: /cannot read .*: it is a directory/ });
  t.throws(() => new OutputFile(join(folder, 'no', 'out.pcap')), {
    code: 'OUTPUT_FAILED',
    message: /cannot write .*: its folder does not exist/,
  });
  const device = new PcapDevice({
    input: open(pcapFile([{ seconds: 1, fraction: 0, bytes: HELLO }], { linkType: 113 })).reader,
  });
  t.throws(() => device.receive(), { code: 'CAPTURE_INVALID', message: /link type 113/ });
});
