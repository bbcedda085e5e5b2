import t from 'tap';
import { MemoryDevice, type MemoryPacket } from '../../lib/io/memory-device.js';
import { untunnel } from '../fixtures/geneve.js';
import { describe } from '../fixtures/packet-text.js';
import { tcp, udp, verifyChecksums } from '../fixtures/packets.js';
import * as dsr from '../support/dsr.js';
import { TestPipeline } from '../support/pipeline.js';
import { B1, B2, client, establish, half, quad, reply } from '../support/traffic.js';

const TCP_FLOWS = 10_000;
const UDP_FLOWS = 1000;

/** web and dns with the same backends, and a third service that nothing happens to. */
function file(fields: string, backends: string): string {
  return `services:
  - { name: web, address: 10.96.0.10, port: 80, protocol: tcp, ${fields} backends: [${backends}] }
  - { name: dns, address: 10.96.0.10, port: 53, protocol: udp, ${fields} backends: [${backends}] }
  - { name: other, address: 10.96.0.11, port: 80, protocol: tcp, backends: [${B1}] }
`;
}

/** "source > destination flags seq ack" of an RST, the ends of an ICMP error's quote. */
function say({ bytes }: MemoryPacket): string {
  const view = new DataView(bytes.buffer, bytes.byteOffset);
  const ends = (at: number): string =>
    `${quad(bytes, at + 12)}:${half(bytes, at + 20)} > ${quad(bytes, at + 16)}:${half(bytes, at + 22)}`;
  if (bytes[9] === 1) return `icmp ${bytes[20]}/${bytes[21]} to ${quad(bytes, 16)} about ${ends(28)}`;
  const ack = (bytes[33]! & 16) === 0 ? '' : ` ack=${view.getUint32(28)}`;
  return `${ends(0)} ${(bytes[33]! & 4) === 0 ? 'no RST' : 'RST'} seq=${view.getUint32(24)}${ack}`;
}

t.test(`${TCP_FLOWS} connections and ${UDP_FLOWS} of datagrams end, in slices, and everybody is told`, async (t) => {
  for (const [fields, waitMs] of [
    ['onRemove: reset,', 0],
    ['drainTimeout: 30s,', 30_000],
  ] as const) {
    const device = new MemoryDevice(16);
    const pipeline = new TestPipeline(file(fields, B1), { tcpEntries: 16_384, anyEntries: 2048, device });
    const expected = new Set<string>();
    const ends = (n: number) => ({ ...client, src: `10.1.${n >> 8}.${n & 255}`, sport: 1024 + (n % 60_000) });
    for (let n = 0; n < TCP_FLOWS; n++) {
      const from = ends(n);
      const seq = (n * 429_497) >>> 0;
      const theirs = (seq + 0x8000_0000) >>> 0;
      const [toClient, toBackend] = [
        `10.96.0.10:80 > ${from.src}:${from.sport}`,
        `${from.src}:${from.sport} > 10.2.0.11:8080`,
      ];
      const [next, ack] = [(seq + 1) >>> 0, (theirs + 1) >>> 0];
      const { out } = pipeline.send(tcp({ ...from, flags: 'S', seq }));
      if (n % 4 === 0) {
        expected.add(`${toClient} RST seq=0 ack=${next}`).add(`${toBackend} RST seq=${next}`);
        continue;
      }
      pipeline.send(reply(out[0]!, { flags: 'SA', seq: theirs, ack: next }));
      let [sent, got] = [next, ack];
      if (n % 4 > 1) {
        pipeline.send(tcp({ ...from, flags: 'PA', seq: next, ack, payload: 100 }));
        pipeline.send(reply(out[0]!, { flags: n % 4 === 2 ? 'PA' : 'FPA', seq: ack, ack: next + 100, payload: 300 }));
        sent = (next + 100) >>> 0;
        got = (ack + 300 + (n % 4 === 2 ? 0 : 1)) >>> 0;
      }
      expected.add(`${toClient} RST seq=${got} ack=${sent}`).add(`${toBackend} RST seq=${sent} ack=${got}`);
    }
    for (let n = 0; n < UDP_FLOWS; n++) {
      const from = { ...ends(n), dport: 53 };
      pipeline.send(udp({ ...from, payload: 9 }));
      const answer = { src: '10.2.0.11', sport: 8080, dst: from.src, dport: from.sport, payload: 9 };
      pipeline.send(udp(answer));
      expected.add(`icmp 3/3 to ${from.src} about ${from.src}:${from.sport} > 10.96.0.10:53`);
    }
    establish(pipeline, { ...client, dst: '10.96.0.11', sport: 1 });
    t.equal(pipeline.tcp.count + pipeline.any.count, TCP_FLOWS + UDP_FLOWS + 1);

    pipeline.configure(file(fields, B2));
    pipeline.nowMs += waitMs;
    let calls = 0;
    let early = 0;
    for (let dueMs = pipeline.nowMs; dueMs <= pipeline.nowMs; calls++) {
      device.sent = [];
      const before = pipeline.tcp.count + pipeline.any.count;
      dueMs = pipeline.flushDue();
      const ended = before - pipeline.tcp.count - pipeline.any.count;
      if (ended > 256) t.fail(`${ended} at once`);
      const sent = [...device.sent];
      // A packet of a flow that the sweep has not come to yet.
      if (calls % 16 === 0 && dueMs <= pipeline.nowMs) {
        const n = TCP_FLOWS - 2 - 4 * early++;
        const data = { ...ends(n), flags: 'A', seq: ((n * 429_497) >>> 0) + 101, ack: 1 };
        const outcome = pipeline.send(tcp(data));
        t.match(outcome, { verdict: 'reply', reason: 'rst-mid-stream', backend: 'b1' });
        sent.push(...outcome.out);
      }
      for (const packet of sent) {
        if (verifyChecksums(packet.bytes).length > 0) t.fail(`checksums of ${describe(packet.bytes)}`);
        if (!expected.delete(say(packet))) t.fail(`nobody expects ${say(packet)}`);
      }
    }
    t.ok(early > 1 && calls > 40, `${calls} slices`);
    t.strictSame([...expected].slice(0, 5), [], 'everybody has heard');
    t.strictSame([pipeline.tcp.count, pipeline.any.count, device.slotsHeld], [1, 0, 0]);
    const limits = { tcp: pipeline.tcp.open.backends, any: pipeline.any.open.backends };
    t.strictSame([limits.tcp.reduce((a, b) => a + b), limits.any.reduce((a, b) => a + b)], [1, 0]);
  }
});

/** Flows of each kind, and what is said when their time is over; '' for those that are gone without a word. */
const KINDS: Record<string, { open(pipeline: TestPipeline): void; told: string[]; isDsr?: true }> = {
  'a SYN without an answer': {
    open: (pipeline) => void pipeline.send(tcp({ ...client, flags: 'S', seq: 1000 })),
    told: ['10.96.0.10:80 > 10.1.0.2:40000 RST seq=0 ack=1001', '10.1.0.2:40000 > 10.2.0.11:8080 RST seq=1001'],
  },
  'a SYN with its answer': {
    open: (pipeline) => {
      const { out } = pipeline.send(tcp({ ...client, flags: 'S', seq: 1000 }));
      pipeline.send(reply(out[0]!, { flags: 'SA', seq: 5000, ack: 1001 }));
    },
    told: [
      '10.96.0.10:80 > 10.1.0.2:40000 RST seq=5001 ack=1001',
      '10.1.0.2:40000 > 10.2.0.11:8080 RST seq=1001 ack=5001',
    ],
  },
  'picked up from the client': {
    open: (pipeline) => void pipeline.send(tcp({ ...client, flags: 'A', seq: 7, ack: 8, payload: 9 })),
    told: [],
  },
  'picked up, with an answer': {
    open: (pipeline) => {
      const { out } = pipeline.send(tcp({ ...client, flags: 'A', seq: 7, ack: 8, payload: 9 }));
      pipeline.send(reply(out[0]!, { flags: 'A', seq: 8, ack: 16, payload: 3 }));
    },
    told: [],
  },
  'datagrams one way': {
    open: (pipeline) => void pipeline.send(udp({ ...client, dport: 53, payload: 9 })),
    told: [],
  },
  'datagrams both ways': {
    open: (pipeline) => {
      pipeline.send(udp({ ...client, dport: 53, payload: 9 }));
      pipeline.send(udp({ src: '10.2.0.11', sport: 8080, dst: client.src, dport: client.sport, payload: 9 }));
    },
    told: ['icmp 3/3 to 10.1.0.2 about 10.1.0.2:40000 > 10.96.0.10:53'],
  },
  'dsr, a SYN': {
    open: (pipeline) => void pipeline.send(tcp({ ...client, flags: 'S', seq: 1000 })),
    told: ['10.96.0.10:80 > 10.1.0.2:40000 RST seq=0 ack=1001', '10.1.0.2:40000 > 10.2.0.11:8080 RST seq=1001'],
    isDsr: true,
  },
  'dsr, data': {
    open: (pipeline) => {
      pipeline.send(tcp({ ...client, flags: 'S', seq: 1000 }));
      pipeline.send(tcp({ ...client, flags: 'A', seq: 1001, ack: 5001, payload: 20 }));
    },
    told: [
      '10.96.0.10:80 > 10.1.0.2:40000 RST seq=5001 ack=1021',
      '10.1.0.2:40000 > 10.2.0.11:8080 RST seq=1021 ack=5001',
    ],
    isDsr: true,
  },
  'dsr, a second SYN on a live entry': {
    open: (pipeline) => {
      pipeline.send(tcp({ ...client, flags: 'S', seq: 1000 }));
      pipeline.send(tcp({ ...client, flags: 'A', seq: 1001, ack: 5001 }));
      pipeline.send(tcp({ ...client, flags: 'S', seq: 90_000 }));
    },
    told: ['10.96.0.10:80 > 10.1.0.2:40000 RST seq=5001 ack=90001', '10.1.0.2:40000 > 10.2.0.11:8080 RST seq=90001'],
    isDsr: true,
  },
  'dsr, after the client’s FIN': {
    open: (pipeline) => {
      pipeline.send(tcp({ ...client, flags: 'S', seq: 1000 }));
      pipeline.send(tcp({ ...client, flags: 'FA', seq: 1001, ack: 5001 }));
    },
    told: [],
    isDsr: true,
  },
  'dsr, datagrams': {
    open: (pipeline) => void pipeline.send(udp({ ...client, dport: 53, payload: 9 })),
    told: [],
    isDsr: true,
  },
};

t.test('what the end of the drain time means to each kind of flow', async (t) => {
  for (const [name, { open, told, isDsr }] of Object.entries(KINDS)) {
    const fields = 'drainTimeout: 30s,';
    const config = (isThere: boolean): string =>
      isDsr
        ? dsr.config({ web: fields, dns: fields, backends: isThere ? `${dsr.B1}` : `${dsr.B2}` })
        : file(fields, isThere ? B1 : B2);
    const opened = (): TestPipeline => {
      const pipeline = new TestPipeline(config(true));
      open(pipeline);
      pipeline.nowMs += 5000;
      pipeline.configure(config(false));
      pipeline.nowMs += 29_000;
      t.strictSame(pipeline.sendDue(), [], `${name}: a second before`);
      t.equal(pipeline.tcp.count + pipeline.any.count, 1, name);
      return pipeline;
    };
    const gone = opened();
    gone.nowMs += 2000;
    const sent = gone.sendDue().map((packet) => {
      t.same(verifyChecksums(packet.bytes), []);
      return say(packet.bytes[9] === 17 ? { bytes: untunnel(packet.bytes).inner } : packet);
    });
    t.strictSame(sent, told, name);
    t.strictSame([gone.tcp.count + gone.any.count, gone.device.slotsHeld], [0, 0], name);
    gone.configure(config(true));
    t.strictSame(gone.sendDue(), [], `${name}: once`);

    const stays = opened();
    stays.configure(config(true));
    stays.nowMs += 2000;
    t.strictSame(stays.sendDue(), [], `${name}: added again in time`);
    t.equal(stays.tcp.count + stays.any.count, 1, name);
    stays.configure(config(false));
    stays.nowMs += 1000;
    t.strictSame(stays.sendDue(), [], `${name}: and removed again, its time begins anew`);
    t.equal(stays.tcp.count + stays.any.count, 1, name);
  }
});
