import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import { describe, packet } from '../fixtures/packet-text.js';
import { needsTools } from '../support/skip.js';
import { runReplay } from './fixture.js';

/** The tunnel as others see it: packets written by hand from RFC 8926 go in, and Wireshark reads what comes out. */

/** From 192.0.2.1 to 192.0.2.11, DF, TTL 64, no UDP checksum; a SYN of 198.51.100.7 in an Ethernet frame. */
const SYN_IN_A_FRAME = `
  45 00 00 6e  00 00 40 00  40 11 b6 72  c0 00 02 01  c0 00 02 0b
  80 e8 17 c1  00 5a 00 00
  03                        version 0, 3 words of options
  40                        O = 0, C = 1
  65 58                     transparent Ethernet bridging
  00 00 02 00               VNI 2
  01 4b 81 02               class, type with the critical bit, 2 words
  0a 60 00 0a  00 50 00 00  10.96.0.10:80
  02 00 00 00 00 02  02 00 00 00 00 01  08 00
  45 00 00 30  12 34 40 00  40 06 f4 4c  c6 33 64 07  0a 02 00 0b
  9c 40 1f 90  00 00 03 e8  00 00 00 00  70 02 fa f0  95 27 00 00  02 04 05 b4  01 03 03 07
`;

/** The ACK after it in an IP packet, between options of others: one of a word, and one of none. */
const ACK_AMONG_OPTIONS = `
  45 00 00 64  00 00 40 00  40 11 b6 7c  c0 00 02 01  c0 00 02 0b
  80 e8 17 c1  00 50 00 00
  06                        version 0, 6 words of options
  40                        O = 0, C = 1
  08 00                     IPv4
  00 00 02 00               VNI 2
  01 00 01 01  de ad be ef  a class and type unknown here, not critical
  01 4b 81 02  0a 60 00 0a  00 50 00 00
  ff ff 7f 00               an experimental one without data
  45 00 00 28  12 35 40 00  40 06 f4 53  c6 33 64 07  0a 02 00 0b
  9c 40 1f 90  00 00 03 e9  00 00 13 89  50 10 fa f0  ad 59 00 00
`;

/** The bytes of lines of hexadecimal pairs; what follows them in a line is a remark. */
function bytesOf(text: string): Uint8Array {
  const pairs = text
    .split('\n')
    .flatMap((line) => /^\s*((?:[0-9a-f]{2}\s+)*[0-9a-f]{2})(?=\s|$)/.exec(line)?.[1]?.split(/\s+/) ?? []);
  return Uint8Array.from(pairs, (pair) => Number.parseInt(pair, 16));
}

t.test('a node takes what was written by hand', async (t) => {
  const packets = [SYN_IN_A_FRAME, ACK_AMONG_OPTIONS].map((text, at) => ({ at, bytes: bytesOf(text) }));
  packets.splice(1, 0, {
    at: 0.5,
    bytes: packet('tcp 10.2.0.11:8080 > 198.51.100.7:40000 SA seq=5000 ack=1001 mss=1460'),
  });
  const { lines, sent, conntrack } = await runReplay({
    config: { role: 'node', tunnel: { address: '192.0.2.11' } },
    packets,
  });
  t.match(lines, [
    { verdict: 'forward', direction: 'original', state: 'SYN_SENT' },
    { verdict: 'forward', direction: 'reply', state: 'SYN_RECV' },
    { verdict: 'forward', direction: 'original', state: 'ESTABLISHED' },
  ]);
  t.same(sent[0], Buffer.from(packets[0]!.bytes.subarray(-48)), 'the inner packet as it was');
  t.match(describe(sent[1]!), /^tcp 10\.96\.0\.10:80 > 198\.51\.100\.7:40000 SA /);
  t.same(sent[2], Buffer.from(packets[2]!.bytes.subarray(-40)));
  t.match(conntrack, [
    { client: '198.51.100.7:40000', vip: '10.96.0.10:80', backend: '10.2.0.11:8080', flags: ['SeenNonSyn', 'DSR'] },
  ]);
});

const backends = [{ name: 'b1', address: '10.2.0.11', port: 8080, node: '192.0.2.11' }];

for (const inner of ['ethernet', 'ip'] as const) {
  for (const option of ['always', 'syn'] as const) {
    t.test(`Wireshark reads it: ${inner}, option ${option}`, needsTools(t, 'tshark'), async (t) => {
      const folder = mkdtempSync(join(tmpdir(), 'weir-tshark-'));
      t.teardown(() => rmSync(folder, { recursive: true }));
      const flow = '10.1.0.2:40000 > 10.96.0.10:80';
      const packets = [
        `tcp ${flow} S seq=100 mss=1460 ws=7`,
        `tcp ${flow} A seq=101 ack=501`,
        `tcp ${flow} PA seq=101 ack=501 len=300`,
        `udp 10.1.0.2:5000 > 10.96.0.10:53 len=40`,
        `tcp ${flow} FA seq=401 ack=501`,
      ].map((text, at) => ({ at, bytes: packet(text) }));
      const services = (
        [
          ['web', 80, 'tcp'],
          ['dns', 53, 'udp'],
        ] as const
      ).map(([name, port, protocol]) => ({
        name,
        address: '10.96.0.10',
        port,
        protocol,
        mode: 'dsr',
        backends,
      }));
      const { files } = await runReplay({
        config: { tunnel: { address: '192.0.2.1', inner, option }, services },
        packets,
      });
      const capture = join(folder, 'out.pcap');
      writeFileSync(capture, files.pcap);
      const tshark = (...args: string[]): string => {
        const { status, stdout, stderr } = spawnSync(
          'tshark',
          [
            '-n',
            '-r',
            capture,
            '-o',
            'ip.check_checksum:TRUE',
            '-o',
            'tcp.check_checksum:TRUE',
            '-o',
            'udp.check_checksum:TRUE',
            ...args,
          ],
          { encoding: 'utf8' },
        );
        t.equal(status, 0, stderr);
        return stdout.trim();
      };
      const fields = [
        'geneve.version',
        'geneve.vni',
        'geneve.flags.critical',
        'geneve.proto_type',
        'geneve.option.class',
        'geneve.option.type',
        'geneve.option.unknown.data',
        'ip.dst',
        'tcp.dstport',
      ];
      const rows = tshark('-T', 'fields', ...fields.flatMap((field) => ['-e', field]))
        .split('\n')
        .map((row) => row.split('\t'));
      t.equal(rows.length, packets.length);
      rows.forEach(([version, vni, critical, proto, optionClass, type, data, destinations, port], i) => {
        const carries = option === 'always' || i === 0 || i === 3;
        t.equal(version, '0');
        t.equal(Number(vni), 2);
        t.match(critical, carries ? /^(1|True)$/ : /^(0|False)$/);
        t.equal(Number(proto), inner === 'ethernet' ? 0x6558 : 0x0800);
        t.equal(optionClass === '' ? null : Number(optionClass), carries ? 0x014b : null);
        t.equal(type === '' ? null : Number(type), carries ? 0x81 : null);
        t.equal(data!.replaceAll(':', ''), carries ? `0a60000a${i === 3 ? '0035' : '0050'}0000` : '');
        t.equal(destinations, '192.0.2.11,10.2.0.11');
        t.equal(port, i === 3 ? '' : '8080');
      });
      t.equal(
        tshark('-Y', '_ws.expert.severity >= warning || _ws.malformed', '-T', 'fields', '-e', '_ws.expert.message'),
        '',
      );
    });
  }
}
