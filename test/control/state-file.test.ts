import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmdirSync,
  statSync,
  symlinkSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as wait } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import { seededRandom } from '../../lib/base/random.js';
import { parseConfig } from '../../lib/config/load.js';
import { FlowTable } from '../../lib/conntrack/flow-table.js';
import {
  BACKEND_ID,
  ESTABLISHED,
  RECORD_BYTES,
  RECORD_WORDS,
  SERVICE,
  STATE,
  TX_PACKETS,
  TYPE_OUT,
} from '../../lib/conntrack/record.js';
import { imageBytes } from '../../lib/conntrack/state-image.js';
import { Desired } from '../../lib/control/desired.js';
import type { EventLog } from '../../lib/control/log.js';
import { NO_NEEDS } from '../../lib/control/network-plan.js';
import { openStateFile, type StateFile } from '../../lib/control/state-file.js';
import { adoptSurvivors } from '../../lib/control/survivors.js';
import * as S from '../../lib/datapath/snapshot.js';
import { bootClock } from '../../lib/io/boot-clock.js';
import { needsRoot } from '../support/skip.js';

t.setTimeout(1_000_000);

const SIZES = { tcpEntries: 64, anyEntries: 32 };
const NOW = 1_000_000;

interface Opened extends StateFile {
  readonly events: string[];
  readonly messages: string;
}

function open(path: string, sizes = SIZES, nowMs = NOW): Opened {
  const events: string[] = [];
  const messages: string[] = [];
  const note = (event: string, message: string): void => {
    events.push(event);
    messages.push(message);
  };
  const file = openStateFile(path, sizes, nowMs, { info: note, warn: note, error: note } as unknown as EventLog);
  return { ...file, events: events.filter((event) => event !== 'state-file-on-disk'), messages: messages.join('\n') };
}

/** A flow from 10.1.0.2 to VIP 10.96.0.10:80, by way of 10.2.0.11:8080. */
function addFlow(
  table: FlowTable,
  protocol: number,
  port: number,
  { backend = 0x0a02000b, source = 0x0a010002 } = {},
): number {
  const record = table.insert(
    protocol,
    TYPE_OUT,
    0x0a010002,
    0x0a60000a,
    (port << 16) | 80,
    backend,
    source,
    (8080 << 16) | port,
    77,
    99,
    NOW,
  );
  table.bytes[record * RECORD_BYTES + STATE] = protocol === 6 ? ESTABLISHED : 6;
  table.setExpiry(record, NOW + 60_000);
  return record;
}

t.test('connections are found again', async (t) => {
  const path = join(t.testdir(), 'made', 'for', 'it', 'conntrack');
  const first = open(path);
  t.notOk(first.isResumed);
  t.same(first.events, ['state-file']);
  t.equal(statSync(path).mode & 0o777, 0o600, 'for its owner only');
  t.equal(statSync(path).size, imageBytes(SIZES));
  t.ok(statSync(path).blocks * 512 >= imageBytes(SIZES), 'its space is taken');
  addFlow(new FlowTable(first.tables.tcp), 6, 40_000);
  addFlow(new FlowTable(first.tables.any), 17, 40_001);
  t.throws(() => open(path), { code: 'STATE_FILE', message: /in use by another weir/, remedy: /./ });
  first.close();

  const second = open(path);
  t.ok(second.isResumed);
  t.match(second.messages, /2 connections go on/);
  const tcp = new FlowTable(second.tables.tcp);
  t.equal(tcp.count, 1);
  const hash = tcp.hash(0x0a02000b, 0x0a010002, (8080 << 16) | 40_000, 6);
  t.equal(tcp.find(0x0a02000b, 0x0a010002, (8080 << 16) | 40_000, 6, hash), 1, 'by the reply key too');
  t.equal(new FlowTable(second.tables.any).count, 1);
  second.close();

  const late = open(path, SIZES, NOW + 60_000);
  t.match(late.messages, /0 connections go on/, 'what has expired meanwhile does not go on');
  late.close();
});

t.test('a file that cannot be gone on with is replaced, and says why', async (t) => {
  const dir = t.testdir();
  const path = join(dir, 'conntrack');
  const refused = (reason: RegExp, sizes = SIZES): void => {
    const file = open(path, sizes);
    t.notOk(file.isResumed, `${reason}`);
    t.same(file.events, ['state-file-refused']);
    t.match(file.messages, reason);
    t.equal(new FlowTable(file.tables.tcp).count, 0);
    addFlow(new FlowTable(file.tables.tcp), 6, 40_000);
    file.close();
    const again = open(path, sizes);
    t.ok(again.isResumed, 'the new one is good');
    again.close();
  };
  const edit = (change: (bytes: Buffer) => void): void => {
    const bytes = readFileSync(path);
    change(bytes);
    writeFileSync(path, bytes);
  };

  writeFileSync(path, 'root:x:0:0:root:/root:/bin/bash\n');
  refused(/is no conntrack state file: kept as .*conntrack\.refused/);
  t.match(readFileSync(`${path}.refused`, 'utf8'), /^root/, 'a foreign file is set aside');
  for (const [name, reason, change] of [
    ['version', /is of another version of weir/, (bytes: Buffer) => bytes.writeInt32LE(2, 4)],
    ['layout', /is of another version of weir/, (bytes: Buffer) => bytes.writeInt32LE(~bytes.readInt32LE(8), 8)],
    ['boot', /is from before the last boot/, (bytes: Buffer) => bytes.writeInt32LE(~bytes.readInt32LE(20), 20)],
    ['unfinished', /was never finished/, (bytes: Buffer) => bytes.writeInt32LE(0, 0)],
    ['zeros', /was never finished/, (bytes: Buffer) => bytes.fill(0)],
  ] as const) {
    edit(change);
    refused(reason);
    t.ok(name);
  }
  for (const bytes of [imageBytes(SIZES) - 1, 5000, 4096]) {
    truncateSync(path, bytes);
    refused(/is cut short/);
  }
  truncateSync(path, imageBytes(SIZES) + 4096);
  refused(/is too long/);
  truncateSync(path, 100);
  refused(/is of another version|is cut short|before the last boot|has room|never finished/);
  refused(/has room for 64 TCP and 32 other connections, not for 128 and 32/, { tcpEntries: 128, anyEntries: 32 });
});

t.test('garbage behind a good header is left out', async (t) => {
  const path = join(t.testdir(), 'conntrack');
  const random = seededRandom(7);
  for (let turn = 0; turn < 60; turn++) {
    const file = open(path);
    file.close();
    const bytes = readFileSync(path);
    const end = turn % 2 === 0 ? bytes.length : 4096 + 8192;
    for (let at = 4096 + (turn % 5 === 0 ? 0 : 24); at < end; at++) bytes[at] = random();
    if (turn % 3 > 0) bytes.writeInt32LE(turn % 3 === 1 ? -1 : 1000, 4096 + 12); // HIGH_WATER
    writeFileSync(path, bytes);
    const again = open(path);
    t.ok(again.isResumed);
    const table = new FlowTable(again.tables.tcp);
    for (let port = 1; port <= 200; port++) addFlow(table, 6, port);
    t.ok(table.count <= table.capacity);
    again.close();
    truncateSync(path, 0);
  }
});

t.test('what cannot be a state file at all', async (t) => {
  const dir = t.testdir({ file: '' });
  mkdirSync(join(dir, 'folder'));
  symlinkSync(join(dir, 'file'), join(dir, 'link'));
  for (const name of ['folder', 'link', 'file/below']) {
    t.throws(() => open(join(dir, name)), { code: 'STATE_FILE', remedy: /./ }, name);
  }
});

t.test('no space is one clear message', needsRoot(t, 'mount', 'umount'), async (t) => {
  const dir = mkdtempSync(join(tmpdir(), 'weir-test-'));
  execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=64k', 'weir-test', dir]);
  t.teardown(() => {
    execFileSync('umount', ['-l', dir]); // what is mapped stays mapped
    rmdirSync(dir);
  });
  const sizes = { tcpEntries: 4096, anyEntries: 32 };
  t.throws(() => open(join(dir, 'ct'), sizes), { code: 'STATE_FILE', message: /no space for 1 MiB/, remedy: /tmpfs/ });
  const small = open(join(dir, 'ct'), { tcpEntries: 64, anyEntries: 32 });
  t.same(small.events, ['state-file'], 'a table that fits is made');
  small.close();
});

t.test('survivors get the ids of this run, and what has left the file drains', async (t) => {
  const file = open(join(t.testdir(), 'conntrack'));
  const tcp = new FlowTable(file.tables.tcp);
  const kept = addFlow(tcp, 6, 1);
  const removed = addFlow(tcp, 6, 2, { backend: 0x0a02000c });
  const unknown = addFlow(new FlowTable(file.tables.any), 17, 3, { source: 0x0a60ff01 });
  // Half of the ids rewritten by a run that was killed meanwhile.
  tcp.words[removed * RECORD_WORDS + BACKEND_ID] = 1;
  tcp.words[removed * RECORD_WORDS + SERVICE] = 1;

  const { config } = parseConfig(`services:
  - { name: other, address: 10.96.0.9, port: 80, protocol: tcp, backends: [{ name: x, address: 10.2.0.11, port: 8080 }] }
  - { name: web, address: 10.96.0.10, port: 80, protocol: tcp, drainTimeout: 9s, backends: [{ name: b1, address: 10.2.0.11, port: 8080 }] }`);
  const desired = new Desired(config!, NOW, { survivors: adoptSurvivors(file.tables) });
  const { identities, snapshot } = desired;
  const ownerOf = (table: FlowTable, record: number): (string | undefined)[] => [
    identities.serviceName(table.words[record * RECORD_WORDS + SERVICE]!),
    identities.backendName(table.words[record * RECORD_WORDS + BACKEND_ID]!),
  ];
  t.same(ownerOf(tcp, kept), ['web', 'b1']);
  t.same(ownerOf(tcp, removed), ['web', '10.2.0.12:8080']);
  const any = new FlowTable(file.tables.any);
  t.same(ownerOf(any, unknown), ['10.96.0.10:80', '10.2.0.11:8080']);
  const cutAt = (table: FlowTable, record: number): number =>
    snapshot.cutAt[table.words[record * RECORD_WORDS + BACKEND_ID]!]!;
  t.equal(cutAt(tcp, kept), Number.POSITIVE_INFINITY);
  t.equal(cutAt(tcp, removed), NOW + 9000, 'by its service');
  t.equal(cutAt(any, unknown), NOW + 300_000, 'or the default');
  const service = any.words[unknown * RECORD_WORDS + SERVICE]! * S.SERVICE_WORDS;
  t.equal(snapshot.services[service + S.SERVICE_MODE], S.MODE_SNAT);
  t.ok(snapshot.services[service + S.SERVICE_FLAGS]! & S.SERVICE_REMOVED);
  t.same(desired.retainedNeeds(), {
    addresses: ['10.96.255.1'],
    endpoints: [{ address: '10.2.0.12', port: 8080, protocol: 6 }],
  });
  const flows = new Float64Array(identities.backendRows);
  t.same(desired.forget(flows, NO_NEEDS), { forgotten: 3, kept: 0 }, 'without flows they are forgotten');
  file.close();
});

const WRITER = fileURLToPath(new URL('./crash-writer.mjs', import.meta.url));
const isBuilt = existsSync(fileURLToPath(new URL('../../dist/weir.js', import.meta.url)));
/** 200 by hand (WEIR_KILLS=200); in between, as many as the time a test may take allows. */
const KILLS = Number(process.env.WEIR_KILLS ?? 60);

t.test(`killed ${KILLS} times under load`, { skip: isBuilt ? false : 'not built', timeout: 900_000 }, async (t) => {
  const clock = bootClock();
  const random = seededRandom(Date.now() & 0xffff);
  const lanes = [1, 2].map(async (lane) => {
    const path = join(process.env.XDG_RUNTIME_DIR ?? '/dev/shm', `weir-test-${process.pid}-${lane}`);
    t.teardown(() => execFileSync('rm', ['-f', path]));
    const figures = { damaged: 0, steady: 0, live: 0 };
    for (let kill = 0; kill < KILLS / 2; kill++) {
      const child = spawn(process.execPath, [WRITER, path, String(random() & 0xffff)], {
        stdio: ['ignore', 'pipe', 'inherit'],
      });
      // One in four in the middle of its start, which makes the table whole.
      if (kill % 4 === 3) await wait(100 + (random() & 0x7f));
      else {
        await ready(child);
        await wait((random() & 0xff) / 16);
      }
      const exit = once(child, 'exit');
      child.kill('SIGKILL');
      await exit;
      const file = open(path, { tcpEntries: 300, anyEntries: 150 }, clock.nowMs());
      if (file.events.includes('state-file-damaged')) figures.damaged++;
      const tcp = new FlowTable(file.tables.tcp);
      for (let flow = 0; flow < 50; flow++) {
        const hash = tcp.hash(0x0a010002, 0x0a60000a, (flow << 16) | 80, 6);
        const record = tcp.find(0x0a010002, 0x0a60000a, (flow << 16) | 80, 6, hash) >> 1;
        const isWhole = record >= 0 && tcp.bytes[record * RECORD_BYTES + STATE] === ESTABLISHED;
        if (isWhole && tcp.doubles[record * 16 + TX_PACKETS]! > 50) figures.steady++;
      }
      figures.live += tcp.count;
      file.close();
    }
    return figures;
  });
  for (const { damaged, steady, live } of await Promise.all(lanes)) {
    t.equal(damaged, 0, 'no record is damaged');
    t.equal(steady, (50 * KILLS) / 2, 'every established connection is there, each time');
    t.ok(live > steady, `with ${live - steady} that came and went`);
  }
});

async function ready(child: ChildProcess): Promise<void> {
  const [first] = await Promise.race([once(child.stdout!, 'data'), once(child, 'exit')]);
  if (String(first) !== 'ready\n') throw new Error(`the writer ended: ${first}`);
}
