import t from 'tap';
import { allocateTable } from '../../lib/conntrack/memory.js';
import * as record from '../../lib/conntrack/record.js';
import { TableReader } from '../../lib/conntrack/table-reader.js';
import { exportFlows } from '../../lib/control/flow-export.js';
import { FLOW_FORMATS, formatFlows } from '../../lib/control/flow-formats.js';
import {
  type FlowFilter,
  type FlowNames,
  filterMistake,
  flowJson,
  listFlows,
  matchRecords,
  type RecordSource,
  walkFlows,
} from '../../lib/control/flows.js';
import { sayTime } from '../../lib/control/summary.js';
import { parseIpv4 } from '../../lib/wire/address.js';

const NOW_MS = 1_000_000;

/** A table of which every record is written by hand. */
class Records implements RecordSource {
  readonly capacity: number;
  readonly words: Int32Array;
  readonly bytes: Uint8Array;
  readonly doubles: Float64Array;

  constructor(capacity: number) {
    this.capacity = capacity;
    const buffer = new ArrayBuffer(capacity * record.RECORD_BYTES);
    this.words = new Int32Array(buffer);
    this.bytes = new Uint8Array(buffer);
    this.doubles = new Float64Array(buffer);
  }

  read(number: number): number {
    return this.words[number * record.RECORD_WORDS + record.COMMIT] === 0 ? -1 : number;
  }

  put(number: number, fields: Partial<typeof WEB>): void {
    const f = { ...WEB, ...fields };
    const word = number * record.RECORD_WORDS;
    const byte = number * record.RECORD_BYTES;
    const double = number * record.RECORD_DOUBLES;
    this.words[word + record.CLIENT] = parseIpv4(f.client);
    this.words[word + record.VIP] = parseIpv4(f.vip);
    this.words[word + record.ORIGINAL_PORTS] = (f.clientPort << 16) | f.vipPort;
    this.words[word + record.BACKEND] = parseIpv4(f.backend);
    this.words[word + record.RETURN] = parseIpv4(f.source);
    this.words[word + record.REPLY_PORTS] = (f.backendPort << 16) | f.sourcePort;
    this.words[word + record.SERVICE] = f.service;
    this.words[word + record.BACKEND_ID] = f.backendId;
    this.words[word + record.COMMIT] = 1;
    this.words[word + record.TX_SEEN] = 998;
    this.words[word + record.RX_SEEN] = f.rxPackets > 0 ? 997 : 0;
    this.bytes[byte + record.PROTOCOL] = f.protocol;
    this.bytes[byte + record.TYPE] = f.type;
    this.bytes[byte + record.STATE] = f.state;
    this.bytes[byte + record.FLAGS] = f.flags;
    this.bytes[byte + record.TX_FLAGS_SEEN] = 0x1b;
    this.bytes[byte + record.RX_FLAGS_SEEN] = f.rxPackets > 0 ? 0x13 : 0;
    this.doubles[double + record.EXPIRES] = f.expires;
    this.doubles[double + record.TX_PACKETS] = f.txPackets;
    this.doubles[double + record.RX_PACKETS] = f.rxPackets;
    this.doubles[double + record.TX_BYTES] = f.txPackets * 60;
    this.doubles[double + record.RX_BYTES] = f.rxPackets * 1500;
  }
}

const WEB = {
  protocol: 6,
  type: record.TYPE_OUT,
  client: '10.1.0.2',
  clientPort: 54260,
  vip: '10.96.0.10',
  vipPort: 80,
  backend: '10.2.0.11',
  backendPort: 8080,
  source: '10.1.0.2',
  sourcePort: 54260,
  service: 1,
  backendId: 2,
  state: record.ESTABLISHED,
  flags: record.SEEN_NON_SYN,
  expires: NOW_MS + 7_999_500,
  txPackets: 3,
  rxPackets: 2,
};

const NAMES: FlowNames = {
  serviceName: (id) => ['', 'web', 'dns'][id],
  backendName: (id) => ['', 'b1', 'b2', '10.2.0.13:53'][id],
};

function makeRecords(): Records {
  const records = new Records(8);
  records.put(0, {});
  records.put(1, { clientPort: 54261, expires: NOW_MS });
  records.put(3, {
    clientPort: 54262,
    source: '10.96.255.1',
    sourcePort: 40000,
    state: record.CLOSING,
    flags: record.RX_CLOSING | record.TX_CLOSING | record.SEEN_NON_SYN,
    expires: NOW_MS + 9_999.6,
    backendId: 1,
    backend: '200.2.0.12',
  });
  records.put(4, {
    client: '192.168.7.9',
    clientPort: 1024,
    state: record.SYN_SENT,
    flags: 0,
    rxPackets: 0,
    txPackets: 1,
  });
  records.put(5, {
    protocol: 17,
    client: '200.0.0.1',
    clientPort: 60000,
    source: '200.0.0.1',
    sourcePort: 60000,
    vipPort: 53,
    backendPort: 53,
    backend: '10.2.0.13',
    service: 2,
    backendId: 3,
    state: record.UNREPLIED,
    flags: 0,
    rxPackets: 0,
    expires: NOW_MS + 59_000,
  });
  records.put(7, {
    type: record.TYPE_SVC,
    clientPort: 7,
    sourcePort: 7,
    rxPackets: 0,
    flags: record.DSR | record.SEEN_NON_SYN,
  });
  records.words[6 * record.RECORD_WORDS + record.CLIENT] = 1; // being written: COMMIT is 0
  return records;
}

const list = (filter?: FlowFilter) => [...listFlows([makeRecords()], NAMES, NOW_MS, filter)];
const text = (format: (typeof FLOW_FORMATS)[number], filter?: FlowFilter) =>
  [...formatFlows(list(filter), format)].join('');

t.test('JSON has its documented form to the letter; expired and unwritten records are left out', async (t) => {
  const flows = JSON.parse(text('json'));
  t.equal(flows.length, 5);
  t.equal(
    JSON.stringify(flows[0]),
    '{"proto":"tcp","type":"OUT","client":"10.1.0.2:54260","vip":"10.96.0.10:80","backend":"10.2.0.11:8080",' +
      '"service":"web","state":"ESTABLISHED","flags":["SeenNonSyn"],"expiresIn":7999.5,' +
      '"packets":{"original":3,"reply":2},"bytes":{"original":180,"reply":3000}}',
  );
  t.match(flows[1], {
    snat: '10.96.255.1:40000',
    flags: ['RxClosing', 'TxClosing', 'SeenNonSyn'],
    expiresIn: 10,
    backend: '200.2.0.12:8080',
  });
  t.match(flows[3], { proto: 'udp', client: '200.0.0.1:60000', state: 'UNREPLIED', service: 'dns' });
  t.match(flows[4], { type: 'SVC', flags: ['SeenNonSyn', 'DSR'] });
  t.equal(text('json', { service: 'none' }), '[]\n', 'an empty list is a list');
  t.equal(flowJson({ ...list()[0]!, serviceName: undefined }).service, '');
});

t.test('cilium prints both entries of a two-way flow, one of a one-way flow', async (t) => {
  t.equal(
    text('cilium', { client: '10.1.0.2:54262' }),
    'TCP OUT 10.1.0.2:54262 -> 200.2.0.12:8080 expires=1009 RxFlagsSeen=0x13 LastRxReport=997 TxFlagsSeen=0x1b ' +
      'LastTxReport=998 Flags=0x0013 [ RxClosing TxClosing SeenNonSyn ] RevNAT=1 BackendID=1\n' +
      'TCP SVC 10.1.0.2:54262 -> 10.96.0.10:80 expires=1009 RxFlagsSeen=0x00 LastRxReport=0 TxFlagsSeen=0x1b ' +
      'LastTxReport=998 Flags=0x0013 [ RxClosing TxClosing SeenNonSyn ] RevNAT=1 BackendID=1\n',
  );
  t.match(
    text('cilium', { client: '10.1.0.2:7' }),
    /^TCP SVC 10\.1\.0\.2:7 -> .*Flags=0x0090 \[ SeenNonSyn DSR \].*\n$/,
  );
  t.match(text('cilium', { state: 'SYN_SENT' }), / Flags=0x0000 \[ \] RevNAT=1 /);
  t.match(text('cilium', { service: 'dns' }), /^UDP OUT .*\nUDP SVC .*\n$/);
});

t.test('conntrack-tools style', async (t) => {
  t.equal(
    text('conntrack'),
    [
      'tcp      6 7999 ESTABLISHED src=10.1.0.2 dst=10.96.0.10 sport=54260 dport=80 packets=3 bytes=180 ' +
        'src=10.2.0.11 dst=10.1.0.2 sport=8080 dport=54260 packets=2 bytes=3000 [ASSURED] mark=0 use=1',
      'tcp      6 9 TIME_WAIT src=10.1.0.2 dst=10.96.0.10 sport=54262 dport=80 packets=3 bytes=180 ' +
        'src=200.2.0.12 dst=10.96.255.1 sport=8080 dport=40000 packets=2 bytes=3000 [ASSURED] mark=0 use=1',
      'tcp      6 7999 SYN_SENT src=192.168.7.9 dst=10.96.0.10 sport=1024 dport=80 packets=1 bytes=60 ' +
        '[UNREPLIED] src=10.2.0.11 dst=10.1.0.2 sport=8080 dport=54260 packets=0 bytes=0 mark=0 use=1',
      'udp      17 59 src=200.0.0.1 dst=10.96.0.10 sport=60000 dport=53 packets=3 bytes=180 ' +
        '[UNREPLIED] src=10.2.0.13 dst=200.0.0.1 sport=53 dport=60000 packets=0 bytes=0 mark=0 use=1',
      'tcp      6 7999 ESTABLISHED src=10.1.0.2 dst=10.96.0.10 sport=7 dport=80 packets=3 bytes=180 ' +
        '[UNREPLIED] src=10.2.0.11 dst=10.1.0.2 sport=8080 dport=7 packets=0 bytes=0 mark=0 use=1',
      '',
    ].join('\n'),
  );
});

t.test('the table lines up', async (t) => {
  const lines = text('table').trimEnd().split('\n');
  t.equal(lines.length, 6);
  t.match(lines[0], /^PROTO TYPE CLIENT .* FLAGS$/);
  const column = lines[0]!.indexOf('STATE');
  t.match(lines[1]!.slice(column), /^ESTABLISHED 2h13m +3\/2 +180\/3000 +SeenNonSyn$/);
  t.match(lines[2]!.slice(column), /^CLOSING/);
});

t.test('filters', async (t) => {
  const ports = (filter: FlowFilter) => list(filter).map((flow) => flow.client.port);
  t.same(ports({}), [54260, 54262, 1024, 60000, 7]);
  t.same(ports({ service: 'dns' }), [60000]);
  t.same(ports({ backend: 'b1' }), [54262]);
  t.same(ports({ backend: 'web/b2' }), [54260, 1024, 7]);
  t.same(ports({ backend: 'dns/b2' }), []);
  t.same(ports({ backend: '10.2.0.13:53' }), [60000]);
  t.same(ports({ backend: '200.2.0.12' }), [54262]);
  t.same(ports({ backend: '200.2.0.12:8080' }), [54262]);
  t.same(ports({ backend: '200.2.0.12:8081' }), []);
  t.same(ports({ client: '200.0.0.1' }), [60000]);
  t.same(ports({ client: '10.1.0.2:54262' }), [54262]);
  t.same(ports({ client: '10.0.0.0/8' }), [54260, 54262, 7]);
  t.same(ports({ client: '0.0.0.0/0' }).length, 5);
  t.same(ports({ state: 'established' }), [54260, 7]);
  t.same(ports({ state: 'ESTABLISHED', service: 'web', backend: 'b2', client: '10.1.0.2:7' }), [7]);
  t.same([...matchRecords(makeRecords(), NAMES, NOW_MS, { service: 'web' })], [0, 3, 4, 7]);
  t.equal(filterMistake({ client: '10.0.0.0/8', state: 'closing' }), undefined);
  t.match(filterMistake({ client: '10.1' }), /no address/);
  t.match(filterMistake({ client: '10.1.0.0/33' }), /no address/);
  t.match(filterMistake({ state: 'OPEN' }), /no state is called "OPEN"; there are SYN_SENT, /);
  t.match(filterMistake({ state: '' }), /no state/);
});

t.test('a walk that finds nothing rests all the same', async (t) => {
  const empty = { ...new Records(1), capacity: 100_000, read: () => -1 };
  const rests = Array.from({ length: 12 }, () => null);
  t.strictSame([...matchRecords(empty, NAMES, NOW_MS, {})], rests);
  t.strictSame([...walkFlows([empty], NAMES, NOW_MS)], rests);
  const reader = new TableReader(allocateTable(20_000));
  Object.defineProperty(reader, 'highWater', { value: 20_000 });
  const pieces = [...exportFlows([reader], NAMES, { nowMs: () => NOW_MS }, {}, '1')];
  t.strictSame(pieces.slice(0, -1), ['', '']);
  t.match(pieces.at(-1), /^\{"weir"[^\n]*\n\{"end":true\}\n$/);
});

t.test('a million flows stream with flat memory', async (t) => {
  const records = new Records(1);
  records.put(0, {});
  const source = { ...records, capacity: 0, read: () => 0 };
  const gc = (globalThis as { gc?: () => void }).gc;
  for (const format of FLOW_FORMATS) {
    const flows = format === 'json' ? 1_000_000 : 100_000;
    source.capacity = flows;
    let chars = 0;
    let largest = 0;
    let peak = 0;
    let chunks = 0;
    gc?.();
    const before = process.memoryUsage().heapUsed;
    for (const chunk of formatFlows(listFlows([source], NAMES, NOW_MS), format)) {
      chars += chunk.length;
      largest = Math.max(largest, chunk.length);
      if (++chunks % 500 === 0) peak = Math.max(peak, process.memoryUsage().heapUsed - before);
    }
    t.ok(chars > flows * 100, `${format}: ${chars} characters`);
    t.ok(largest < 40_000, `chunks of at most ${largest}`);
    t.ok(peak < 64 << 20, `${(peak / (1 << 20)).toFixed(1)} MiB of heap at most`);
  }
});

t.test('times for people', async (t) => {
  for (const [ms, text] of [
    [0, '0s'],
    [1, '0.1s'],
    [9499.5, '9.5s'],
    [9900.1, '10s'],
    [20_000, '20s'],
    [59_001, '1m'],
    [60_000, '1m'],
    [800_000, '13m20s'],
    [3_599_999, '1h'],
    [8_000_000, '2h13m'],
    [8_001_000, '2h13m'],
    [100 * 3_600_000, '100h'],
  ] as const) {
    t.equal(sayTime(ms), text, String(ms));
  }
});
