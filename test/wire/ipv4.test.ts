import fc from 'fast-check';
import t from 'tap';
import { REASON_NAMES } from '../../lib/base/reasons.js';
import { formatEndpoint, formatIpv4, isOneHost, parseIpv4 } from '../../lib/wire/address.js';
import * as icmp from '../../lib/wire/icmp.js';
import * as ipv4 from '../../lib/wire/ipv4.js';
import { faultOf } from '../../lib/wire/ipv4-fault.js';
import * as tcp from '../../lib/wire/tcp.js';
import * as udp from '../../lib/wire/udp.js';
import * as vnet from '../../lib/wire/vnet.js';
import * as make from '../fixtures/packets.js';

const ENDS = { src: '10.1.0.2', dst: '10.96.0.10' } as const;
const PORTS = { ...ENDS, sport: 40000, dport: 80 } as const;

/** The packet with some bytes changed and its header checksum right again. */
function patched(packet: Uint8Array, ...changes: [at: number, byte: number][]): Uint8Array {
  const bytes = packet.slice();
  for (const [at, byte] of changes) bytes[at] = byte;
  if ((bytes[0]! & 15) >= 5 && make.headerLength(bytes) <= bytes.length) ipv4.storeChecksum(bytes, 0);
  return bytes;
}

const TCP = make.tcp({ ...PORTS, flags: 'S', payload: 4 });
const UDP = make.udp({ ...PORTS, payload: 16 });
const ECHO = make.echoRequest({ ...ENDS, id: 7, payload: 8 });

const BIG = make.udp({ ...PORTS, id: 9, payload: 4000 });

const rows: [what: string, packet: Uint8Array, reason: string][] = [
  ['TCP', TCP, 'none'],
  [
    'TCP with options everywhere',
    make.tcp({ ...PORTS, ipOptions: new Uint8Array(40).fill(1), options: new Uint8Array(40).fill(1) }),
    'none',
  ],
  ['UDP', UDP, 'none'],
  ['UDP without data', make.udp(PORTS), 'none'],
  ['UDP with its IP payload padded', patched(UDP, [25, 20]), 'none'],
  ['echo request', ECHO, 'none'],
  ['another protocol without payload', make.ip(ENDS, 132, new Uint8Array(0)), 'none'],
  ['bytes after the packet', Uint8Array.from([...UDP, 1, 2, 3]), 'none'],
  ['nothing', new Uint8Array(0), 'malformed'],
  ['IPv6', Uint8Array.from([0x60, ...new Uint8Array(39)]), 'unsupported-protocol'],
  ['IPv6 of one byte', Uint8Array.of(0x60), 'unsupported-protocol'],
  ['version 5', patched(TCP, [0, 0x55]), 'malformed'],
  ['19 bytes', TCP.subarray(0, 19), 'malformed'],
  ['header length 16', patched(TCP, [0, 0x44]), 'malformed'],
  ['header longer than the packet', patched(TCP.subarray(0, 40), [0, 0x4f]), 'malformed'],
  ['total length below the header', patched(TCP, [3, 19]), 'malformed'],
  ['total length 0', patched(TCP, [3, 0]), 'malformed'],
  ['cut', TCP.subarray(0, TCP.length - 1), 'malformed'],
  ['header checksum', TCP.map((byte, i) => (i === 8 ? byte - 1 : byte)), 'bad-checksum-header'],
  ['TCP header cut', make.ip(ENDS, 6, TCP.slice(20, 39)), 'malformed'],
  ['TCP data offset 16', patched(TCP, [32, 0x40]), 'malformed'],
  ['TCP data offset past the end', patched(TCP, [32, 0x70]), 'malformed'],
  ['TCP data offset at the end', patched(TCP, [32, 0x60]), 'none'],
  ['UDP header cut', make.ip(ENDS, 17, UDP.slice(20, 27)), 'malformed'],
  ['UDP length 7', patched(UDP, [25, 7]), 'malformed'],
  ['UDP length past the end', patched(UDP, [25, 25]), 'malformed'],
  ['ICMP header cut', make.ip(ENDS, 1, ECHO.slice(20, 27)), 'icmp-malformed'],
  ['first fragment: the UDP length exceeds it', make.fragmentOf(BIG, 0, 1480), 'none'],
  ['first fragment of 8 bytes of UDP', make.fragmentOf(BIG, 0, 8), 'none'],
  ['middle fragment', make.fragmentOf(BIG, 1480, 2960), 'none'],
  ['last fragment', make.fragmentOf(BIG, 2960, 4008), 'none'],
  ['last fragment of one byte', make.fragmentOf(make.udp({ ...PORTS, id: 9, payload: 9 }), 16, 17), 'none'],
  ['fragment, more to come, no multiple of 8', make.fragmentOf(BIG, 1480, 2957), 'malformed'],
  ['fragment without payload', make.fragmentOf(BIG, 1480, 1480), 'malformed'],
  [
    'TCP fragment over the flags (RFC 1858)',
    make.fragmentOf(make.tcp({ ...PORTS, id: 1, payload: 80 }), 8, 48),
    'malformed',
  ],
  ['TCP fragment after the header', make.fragmentOf(make.tcp({ ...PORTS, id: 1, payload: 80 }), 24, 48), 'none'],
  [
    'first TCP fragment with half a header',
    make.fragmentOf(make.tcp({ ...PORTS, id: 1, payload: 80 }), 0, 16),
    'malformed',
  ],
  ['fragment that ends past 65535', patched(make.fragmentOf(BIG, 2960, 4008), [6, 0x1f], [7, 0xff]), 'malformed'],
];

t.test('check: each way to be malformed', async (t) => {
  for (const [what, packet, reason] of rows) {
    const bytes = new Uint8Array(packet.length + 13).fill(0xee);
    bytes.set(packet, 5);
    t.equal(REASON_NAMES[ipv4.check(bytes, 5, packet.length)], reason, what);
    t.equal(faultOf(bytes, 5, packet.length) === undefined, reason === 'none', `${what}: said in words`);
  }
});

t.test('accessors and setters agree with an independent builder', async () => {
  const octet = fc.nat(255);
  const address = fc.tuple(octet, octet, octet, octet).map((parts) => parts.join('.'));
  const port = fc.nat(65535);
  const seq = fc.nat(0xffffffff);
  fc.assert(
    fc.property(
      address,
      address,
      port,
      port,
      seq,
      seq,
      octet,
      octet,
      port,
      (src, dst, sport, dport, s, a, ttl, tos, id) => {
        const bytes = make.tcp({
          src,
          dst,
          sport,
          dport,
          seq: s,
          ack: a,
          ttl,
          tos,
          id,
          flags: 'SAE',
          win: id,
          payload: 3,
        });
        const view = new DataView(bytes.buffer);
        return (
          ipv4.check(bytes, 0, bytes.length) === 0 &&
          ipv4.source(view, 0) === (parseIpv4(src) | 0) &&
          ipv4.destination(view, 0) === (parseIpv4(dst) | 0) &&
          formatIpv4(ipv4.source(view, 0)) === src &&
          formatEndpoint(ipv4.destination(view, 0), dport) === `${dst}:${dport}` &&
          ipv4.ttl(bytes, 0) === ttl &&
          ipv4.tos(bytes, 0) === tos &&
          ipv4.identification(bytes, 0) === id &&
          ipv4.totalLength(bytes, 0) === 43 &&
          tcp.ports(view, 20) === ((sport << 16) | dport) &&
          tcp.sequence(view, 20) === (s | 0) &&
          tcp.acknowledgement(view, 20) === (a | 0) &&
          tcp.window(bytes, 20) === id &&
          tcp.flags(bytes, 20) === (tcp.SYN | tcp.ACK | tcp.ECE)
        );
      },
    ),
  );
  fc.assert(
    fc.property(
      address,
      address,
      octet,
      fc.integer({ min: 20, max: 65535 }),
      octet,
      (src, dst, protocol, total, tos) => {
        const bytes = new Uint8Array(20).fill(0xff);
        const view = new DataView(bytes.buffer);
        ipv4.writeHeader(view, bytes, 0, total, protocol, parseIpv4(src), parseIpv4(dst), tos);
        const same = make.ip({ src, dst, tos }, protocol, new Uint8Array(total - 20)).subarray(0, 20);
        return Buffer.compare(bytes, same) === 0;
      },
    ),
  );
});

t.test('fragment fields', async (t) => {
  const [first, second, last] = make.fragment(BIG, 1480) as [Uint8Array, Uint8Array, Uint8Array];
  t.notOk(ipv4.isFragment(TCP, 0), 'DF alone is no fragment');
  t.same(
    [first, second, last].map((piece) => ipv4.isFragment(piece, 0)),
    [true, true, true],
  );
  t.same(
    [first, second, last].map((piece) => ipv4.fragmentOffset(piece, 0)),
    [0, 1480, 2960],
  );
  t.equal(udp.length(first, 20), 4008);
  t.equal(udp.checksum(first, 20), (first[26]! << 8) | first[27]!);
});

t.test('TCP options: the window scale wherever it stands, and no trust in lengths', async (t) => {
  const scale = (...options: number[]) =>
    tcp.windowScale(make.tcp({ ...PORTS, flags: 'S', options: Uint8Array.from(options) }), 20);
  t.equal(scale(3, 3, 7), 7);
  t.equal(scale(2, 4, 5, 180, 1, 3, 3, 9), 9);
  t.equal(scale(8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 4, 2, 1, 3, 3, 14), 14);
  t.equal(scale(3, 3, 15), 14, 'RFC 7323 2.3: more than 14 is 14');
  t.equal(scale(3, 3, 255), 14);
  t.equal(scale(), -1);
  t.equal(scale(0, 3, 3, 7), -1, 'nothing follows the end of the list');
  t.equal(scale(1, 1, 1, 3), -1, 'a kind without a length');
  t.equal(scale(1, 1, 3, 3), -1, 'a value past the end');
  t.equal(scale(5, 0, 3, 3, 7, 0, 0, 0), -1, 'length 0');
  t.equal(scale(5, 1, 3, 3, 7, 0, 0, 0), -1, 'length 1');
  t.equal(scale(5, 200, 3, 3, 7, 0, 0, 0), -1, 'an option past the end');
  t.equal(scale(3, 4, 7, 7), -1, 'a scale of the wrong length is none');
  t.equal(scale(...new Array<number>(37).fill(1), 3, 3, 2), 2);
});

t.test('an opening SYN is one whatever its ECN bits', async (t) => {
  t.ok(tcp.isOpeningSyn(tcp.SYN));
  t.ok(tcp.isOpeningSyn(tcp.SYN | tcp.ECE | tcp.CWR | tcp.PSH | tcp.URG));
  for (const other of [tcp.ACK, tcp.RST, tcp.FIN]) t.notOk(tcp.isOpeningSyn(tcp.SYN | other));
  t.notOk(tcp.isOpeningSyn(0));
});

t.test('who is one host (RFC 1122 3.2.2)', async (t) => {
  for (const text of ['1.0.0.0', '10.0.0.1', '126.255.255.255', '128.0.0.1', '223.255.255.255']) {
    t.ok(isOneHost(parseIpv4(text)), text);
    t.ok(isOneHost(parseIpv4(text) | 0), `${text}, signed`);
  }
  for (const text of [
    '0.0.0.0',
    '0.1.2.3',
    '127.0.0.1',
    '224.0.0.1',
    '239.255.255.255',
    '240.0.0.1',
    '255.255.255.255',
  ]) {
    t.notOk(isOneHost(parseIpv4(text)), text);
  }
});

t.test('ICMP errors are those that quote', async (t) => {
  const errors = Array.from({ length: 256 }, (_, type) => type).filter(icmp.isError);
  t.same(errors, [3, 4, 5, 11, 12]);
  t.same([icmp.type(ECHO, 20), icmp.code(ECHO, 20)], [8, 0]);
});

t.test('the vnet header: whose checksum is partial, and moving along', async (t) => {
  const { bytes: packet, vnet: header } = make.partial(TCP, 1448);
  const bytes = new Uint8Array(128 + packet.length);
  bytes.set(header!, 60);
  bytes.set(packet, 70);
  t.ok(vnet.isPartial(bytes, 70, 90));
  t.equal(vnet.gsoType(bytes, 70), vnet.GSO_TCPV4);
  t.equal(vnet.gsoSize(bytes, 70), 1448);
  bytes[61] = vnet.GSO_TCPV4 | vnet.GSO_ECN;
  t.equal(vnet.gsoType(bytes, 70), vnet.GSO_TCPV4);
  bytes[61] = vnet.GSO_TCPV4;
  t.notOk(vnet.isPartial(bytes, 70, 94), 'csum_start names another header');
  vnet.move(bytes, 70, 44);
  t.same(bytes.slice(34, 44), header);
  vnet.clear(bytes, 44);
  t.same(bytes.slice(34, 44), new Uint8Array(10));
  t.notOk(vnet.isPartial(bytes, 44, 64));
});
