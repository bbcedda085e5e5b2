import t from 'tap';
import { CAUSE_NAMES, EVENT_CLOSED, EVENT_NAMES, EVENT_STATE, EventReader } from '../../lib/conntrack/events.js';
import { RX_BYTES, RX_PACKETS, STATE, STATE_NAMES, TX_BYTES, TX_PACKETS } from '../../lib/conntrack/record.js';
import { tcp, udp } from '../fixtures/packets.js';
import { TestPipeline } from '../support/pipeline.js';
import { client, establish, reply } from '../support/traffic.js';

const B1 = '{ name: b1, address: 10.2.0.11, port: 8080 }';
const B2 = '{ name: b2, address: 10.2.0.12, port: 8080 }';

function config(backends = B1, fields = '', protocol = 'tcp'): string {
  return `services:\n  - { name: web, address: 10.96.0.10, port: 80, protocol: ${protocol}, ${fields} backends: [${backends}] }\n`;
}

/** Watches a pipeline; each call returns what has happened since the last. */
function watch(pipeline: TestPipeline): () => string[] {
  const reader = new EventReader(pipeline.events);
  return () => {
    const lines: string[] = [];
    for (let lost = reader.read(); lost >= 0; lost = reader.read()) {
      if (lost > 0) throw new Error(`${lost} events lost`);
      if (reader.atMs !== pipeline.nowMs) throw new Error(`an event of ${reader.atMs} at ${pipeline.nowMs}`);
      const state = STATE_NAMES[reader.bytes[STATE]!];
      const { detail } = reader;
      const more =
        reader.kind === EVENT_STATE ? STATE_NAMES[detail] : reader.kind === EVENT_CLOSED ? CAUSE_NAMES[detail] : '';
      lines.push([EVENT_NAMES[reader.kind], more, state].filter(Boolean).join(' '));
    }
    return lines;
  };
}

const syn = tcp({ ...client, flags: 'S', seq: 1000 });

t.test('the life of a connection', async (t) => {
  const pipeline = new TestPipeline(config());
  const events = watch(pipeline);
  const first = pipeline.send(syn);
  pipeline.send(syn);
  t.strictSame(events(), ['created SYN_SENT'], 'a packet that changes no state is no event');
  const answer = first.out[0]!;
  pipeline.send(reply(answer, { flags: 'SA', seq: 5000, ack: 1001 }));
  t.strictSame(events(), ['state SYN_SENT SYN_RECV']);
  pipeline.send(tcp({ ...client, flags: 'A', seq: 1001, ack: 5001 }));
  pipeline.send(tcp({ ...client, flags: 'PA', seq: 1001, ack: 5001, payload: 100 }));
  pipeline.send(tcp({ ...client, flags: 'FA', seq: 1101, ack: 5001 }));
  t.strictSame(events(), ['state SYN_RECV ESTABLISHED']);
  pipeline.send(reply(answer, { flags: 'FA', seq: 5001, ack: 1102 }));
  t.strictSame(events(), ['state ESTABLISHED CLOSING']);

  pipeline.nowMs += 10_000;
  const reader = new EventReader(pipeline.events);
  t.equal(pipeline.tcp.reap(0, 100, pipeline.nowMs), 1);
  t.strictSame(events(), ['closed expired CLOSING']);
  t.equal(reader.read(), 0);
  const counters = [TX_PACKETS, RX_PACKETS, TX_BYTES, RX_BYTES].map((row) => reader.doubles[row]);
  t.strictSame(counters, [5, 2, 300, 80], 'with all it carried');
});

t.test('an RST shows in the state', async (t) => {
  const pipeline = new TestPipeline(config());
  establish(pipeline);
  const events = watch(pipeline);
  pipeline.send(tcp({ ...client, flags: 'R', seq: 9_000_000 }));
  t.strictSame(events(), [], 'an implausible one changes nothing');
  pipeline.send(tcp({ ...client, flags: 'R', seq: 1001 }));
  t.strictSame(events(), ['state ESTABLISHED CLOSED']);
});

t.test('UDP, and connections that were not seen to begin', async (t) => {
  const dns = new TestPipeline(config(B1, '', 'udp'));
  const ofDns = watch(dns);
  const datagram = udp({ ...client, payload: 20 });
  dns.send(datagram);
  const answer = udp({ src: '10.2.0.11', sport: 8080, dst: client.src, dport: client.sport, payload: 200 });
  dns.send(answer);
  dns.send(datagram);
  dns.send(answer);
  t.strictSame(ofDns(), ['created UNREPLIED', 'state UNREPLIED REPLIED']);

  const resumed = new TestPipeline(config());
  const ofResumed = watch(resumed);
  const first = resumed.send(tcp({ ...client, flags: 'A', seq: 500, ack: 1 }));
  resumed.send(reply(first.out[0]!, { flags: 'A', seq: 1, ack: 500, payload: 10 }));
  t.strictSame(ofResumed(), ['created SYN_SENT', 'state SYN_SENT ESTABLISHED']);

  const recovering = new TestPipeline(config(), { recovering: true });
  const ofRecovering = watch(recovering);
  recovering.send(reply(first.out[0]!, { flags: 'A', seq: 1, ack: 500, payload: 10 }));
  t.strictSame(ofRecovering(), ['created SYN_RECV'], 'picked up by a reply');
});

t.test('why connections are closed', async (t) => {
  t.test('expired: found by a packet of its own, by a clash, or by an insert that needs room', async (t) => {
    const pipeline = new TestPipeline(config(), { tcpEntries: 1 });
    pipeline.send(syn);
    pipeline.nowMs += 60_000;
    const events = watch(pipeline);
    pipeline.send(syn);
    t.strictSame(events(), ['closed expired SYN_SENT', 'created SYN_SENT']);
    pipeline.nowMs += 60_000;
    pipeline.send(tcp({ ...client, sport: 7, flags: 'S' }));
    t.strictSame(events(), ['closed expired SYN_SENT', 'created SYN_SENT']);

    const two = '  - { name: two, address: 10.96.0.11, port: 80, protocol: tcp, backends: [BACKENDS] }\n';
    const clashing = new TestPipeline(config() + two.replace('BACKENDS', B1));
    clashing.send(syn);
    clashing.nowMs += 60_000;
    const ofClashing = watch(clashing);
    clashing.send(tcp({ ...client, dst: '10.96.0.11', flags: 'S' }));
    t.strictSame(ofClashing(), ['closed expired SYN_SENT', 'created SYN_SENT']);
  });

  t.test('evicted: half-open or closing, from a full table', async (t) => {
    const pipeline = new TestPipeline(config(), { tcpEntries: 2 });
    const first = establish(pipeline);
    const events = watch(pipeline);
    pipeline.send(tcp({ ...client, sport: 7, flags: 'S' }));
    pipeline.send(tcp({ ...client, sport: 8, flags: 'S' }));
    t.strictSame(events(), ['created SYN_SENT', 'closed evicted SYN_SENT', 'created SYN_SENT']);
    pipeline.send(tcp({ ...client, flags: 'FA', seq: 1001, ack: 5001 }));
    pipeline.send(reply(first.out[0]!, { flags: 'FA', seq: 5001, ack: 1002 }));
    pipeline.send(tcp({ ...client, sport: 9, flags: 'S' }));
    t.strictSame(events(), ['state ESTABLISHED CLOSING', 'closed evicted CLOSING', 'created SYN_SENT']);

    const full = new TestPipeline(config(), { tcpEntries: 1 });
    establish(full);
    const ofFull = watch(full);
    t.equal(full.send(tcp({ ...client, sport: 7, flags: 'S' })).verdict, 'forward');
    t.strictSame(ofFull(), [], 'a flow without a record has no events');
  });

  t.test('replaced: by a SYN, by a connection that needs its tuple, by another backend', async (t) => {
    const reused = new TestPipeline(config());
    establish(reused);
    reused.send(tcp({ ...client, flags: 'R', seq: 1001 }));
    const ofReused = watch(reused);
    reused.send(tcp({ ...client, flags: 'S', seq: 77_000 }));
    t.strictSame(ofReused(), ['closed replaced CLOSED', 'created SYN_SENT']);

    const two = `  - { name: two, address: 10.96.0.11, port: 80, protocol: tcp, backends: [${B1}] }\n`;
    const clashing = new TestPipeline(config() + two);
    establish(clashing);
    clashing.send(tcp({ ...client, flags: 'R', seq: 1001 }));
    const ofClashing = watch(clashing);
    clashing.send(tcp({ ...client, dst: '10.96.0.11', flags: 'S', seq: 1 }));
    t.strictSame(ofClashing(), ['closed replaced CLOSED', 'created SYN_SENT']);

    for (const [protocol, packet, state] of [
      ['udp', udp({ ...client, payload: 20 }), 'UNREPLIED'],
      ['tcp', syn, 'SYN_SENT'],
    ] as const) {
      const moving = new TestPipeline(config(B1, '', protocol));
      moving.send(packet);
      moving.configure(config(B2, '', protocol));
      const ofMoving = watch(moving);
      t.equal(moving.send(packet).backend, 'b2');
      t.strictSame(ofMoving(), [`closed replaced ${state}`, `created ${state}`]);
    }
  });

  t.test(
    'cut: the drain time is over, found by the sweep or by a packet; or the backend’s address is a VIP',
    async (t) => {
      for (const [fields, waitMs] of [
        ['onRemove: reset,', 0],
        ['drainTimeout: 10s,', 10_000],
      ] as const) {
        for (const finder of ['sweep', 'packet']) {
          const pipeline = new TestPipeline(config(B1, fields));
          establish(pipeline);
          pipeline.configure(config(B2, fields));
          pipeline.nowMs += waitMs;
          const events = watch(pipeline);
          if (finder === 'sweep') pipeline.sendDue();
          else pipeline.send(tcp({ ...client, flags: 'A', seq: 1001, ack: 5001 }));
          t.strictSame(events(), ['closed cut ESTABLISHED'], `${fields} ${finder}`);
        }
      }
      const moved = '  - { name: nv, address: 10.2.0.11, port: 80, protocol: tcp, backends: [] }\n';
      const pipeline = new TestPipeline(config());
      establish(pipeline);
      pipeline.configure(config(B2) + moved);
      const events = watch(pipeline);
      pipeline.sendDue();
      t.strictSame(events(), ['closed cut ESTABLISHED']);
    },
  );
});

t.test('nothing is written while nobody watches', async (t) => {
  const pipeline = new TestPipeline(config(), { tcpEntries: 4 });
  const run = (): void => {
    establish(pipeline);
    for (let i = 0; i < 10; i++) pipeline.send(tcp({ ...client, sport: 50_000 + i, flags: 'S' }));
    pipeline.nowMs += 8_000_001;
    pipeline.tcp.reap(0, 4, pipeline.nowMs);
  };
  run();
  t.ok(new Uint8Array(pipeline.events).every((byte) => byte === 0));
  const reader = new EventReader(pipeline.events);
  reader.close();
  run();
  t.ok(
    new Uint8Array(pipeline.events).every((byte) => byte === 0),
    'nor when a watcher has left',
  );
});
