import { type ChildProcess, execFile, spawn } from 'node:child_process';
import { once } from 'node:events';
import { chmodSync, chownSync, existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setImmediate } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import t from 'tap';
import { serveAdmin } from '../../lib/admin/serve.js';
import { WeirError } from '../../lib/base/errors.js';
import type { Parts, ReplayRequest, RunRequest } from '../../lib/cli/program.js';
import { RefusedConfig } from '../../lib/control/reloader.js';
import { type Outcome, runCommand } from '../support/command-line.js';
import { backend, FakeWeir, importView } from '../support/fake-weir.js';
import { needsRoot } from '../support/skip.js';

const folder = mkdtempSync(join(tmpdir(), 'weir-cli-'));
t.teardown(() => rmSync(folder, { recursive: true }));

function write(name: string, text: string): string {
  const path = join(folder, name);
  writeFileSync(path, text);
  return path;
}

const nothing = write('nothing', '');
const good = write(
  'good.yaml',
  `services:
  - name: web
    address: 10.96.0.10
    port: 80
    protocol: tcp
    backends:
      - { name: b1, address: 10.2.0.11, port: 8080 }
      - { name: b2, address: 10.2.0.12, port: 8080, weight: 3 }
      - { name: b3, address: 10.2.0.13, port: 8080, weight: 0 }
  - { name: lots, address: 10.96.0.11, port: 80, protocol: tcp, algorithm: random, backends: [] }
`,
);
const bad = write('bad.yaml', 'sed: x\nservices:\n  - { name: web, address: 10.96.0.010, port: 80, protocol: tcp }\n');

/** What the parts were asked for. */
const asked: unknown[] = [];

const parts: Parts = {
  version: '1.2.3',
  async run(request: RunRequest) {
    asked.push(['run', request]);
    return 0;
  },
  async replay(request: ReplayRequest) {
    asked.push(['replay', request]);
    return { packets: 3, emitted: 2, seconds: 1.5, verdicts: { forward: 2, drop: 1, hold: 0 } };
  },
  async lab(verb, request) {
    asked.push(['lab', verb, request]);
    return 1;
  },
};

function weir(...args: string[]): Promise<Outcome> {
  return runCommand(parts, args);
}

t.test('every command has help with an example', async (t) => {
  const commands = [
    ['run'],
    ['check'],
    ['net'],
    ['replay'],
    ['maglev'],
    ['status'],
    ['services'],
    ['drain'],
    ['undrain'],
    ['reload'],
    ['plan'],
    ['explain'],
    ['export'],
    ['import'],
    ['import', 'kubernetes'],
    ['import', 'ipvs'],
    ['ct'],
    ['ct', 'list'],
    ['ct', 'watch'],
    ['ct', 'stats'],
    ['ct', 'flush'],
    ['ct', 'export'],
    ['ct', 'import'],
    ['lab'],
    ['lab', 'up'],
    ['lab', 'demo'],
    ['lab', 'down'],
  ];
  const { stdout: all, code } = await weir('--help');
  t.equal(code, 0);
  for (const command of commands) {
    if (command.length === 1) t.match(all, new RegExp(`^  ${command[0]} `, 'm'));
    const { code, stdout, stderr } = await weir(...command, '--help');
    t.strictSame([code, stderr], [0, ''], command.join(' '));
    t.match(stdout, `Example:\n  weir ${command.join(' ')}`);
    t.strictSame(await weir('help', ...command), { code: 0, stdout, stderr: '' }, `help ${command.join(' ')}`);
    const [group, ...rest] = command;
    if (rest.length > 0) t.equal((await weir(group!, 'help', ...rest)).stdout, stdout, `${group} help ${rest}`);
  }
  t.equal((await weir('help')).stdout, all);
  t.equal((await weir('ct', 'help')).stdout, (await weir('ct', '--help')).stdout);
  for (const [command, options] of [
    ['run', ['-c, --config <file>']],
    ['plan', ['-c, --config <file>']],
    ['capture', ['-w, --write <file>']],
    ['replay', ['-c, --config <file>', '--in <pcap>', '--out <pcap>', '--json <jsonl>']],
    ['doctor', []],
    ['explain', []],
  ] as const) {
    const { stdout } = await weir(command, '--help');
    const required = [...stdout.matchAll(/^ {2}(-[^\n]*?>) {2,}[^\n]*(\n {6,}[^\n]*)*\(required\)$/gm)].map(
      ([, flags]) => flags,
    );
    t.strictSame(required, options, `${command}: what must be there`);
  }
  t.strictSame(await weir('--version'), { code: 0, stdout: '1.2.3\n', stderr: '' });
});

t.test('a wrong command line: 2, one line, and where help is', async (t) => {
  for (const [args, message] of [
    [['chek', '-c', good], /unknown command 'chek' \(Did you mean check\?\)\. See `weir --help`\./],
    [['check'], /required option '-c, --config <file>' not specified\. See `weir check --help`\./],
    [['check', '-c', good, '--fast'], /unknown option '--fast'/],
    [['ct', 'list', '-o', 'xml'], /Allowed choices are table, json, cilium, conntrack\. See `weir ct list --help`/],
    [['ct', 'lst'], /unknown command 'lst'/],
    [['help', 'chek'], /unknown command 'chek' \(Did you mean check\?\)\. See `weir --help`\./],
    [['help', 'ct', 'lst'], /unknown command 'lst' \(Did you mean list\?\)\. See `weir ct --help`\./],
    [['help', 'check', 'list'], /unknown command 'list'\. See `weir check --help`\./],
    [['ct', 'watch', '-o', 'cilium'], /Allowed choices are table, json\. See `weir ct watch --help`/],
    [['ct', 'watch', '--count', '0'], /It is no number from 1 on\./],
    [['ct', 'import'], /missing required argument 'file'/],
    [['ct', 'export', '-o', 'json'], /unknown option '-o'/],
    [['lab', 'up', '--mode', 'nat'], /Allowed choices are dnat, snat, dsr\. See `weir lab up --help`/],
    [['lab', 'up', '--failover'], /unknown option '--failover'/],
    [['drain', 'web'], /missing required argument 'backend'/],
    [['maglev', '-c', good], /missing required argument 'service'/],
    [['replay', '-c', good, '--in', 'a', '--out', 'b', '--json', 'c', '--seed', 'x'], /It is no integer/],
    [['export', 'ipvs', '-c', good], /Allowed choices are iptables, nft\. See `weir export --help`/],
    [['import', 'kubernetes'], /missing required argument 'files'/],
    [['import', 'kubernetes', 'm', '--watch'], /--watch has nothing to keep in step\. Name a file with -O FILE\./],
    [['import', 'kubernetes', '-', '--watch', '-O', 'x'], /standard input cannot be watched\. Name files or folders\./],
    [['import', 'kubernetes', 'm', '--watch', '-O', 'x', '--strict'], /--watch does not end for a warning/],
    [['import', 'kubernetes', nothing], /the input has no service: nothing is written\. Look at what was read/],
    [['import', 'ipvs', nothing], /the input has no service: nothing is written/],
    [['import', 'ipvs', 'none'], /cannot read none: it does not exist\./],
    [['ct', 'flush'], /nothing says which connections to forget\. Give a filter, or --all\./],
  ] as const) {
    const { code, stdout, stderr } = await weir(...args);
    t.equal(code, 2, args.join(' '));
    t.equal(stdout, '');
    t.match(stderr, message);
    t.match(stderr, /^weir: .*\n$/, 'one line');
  }
  t.equal((await weir()).code, 2, 'no command at all');
});

t.test('options reach the parts', async (t) => {
  asked.length = 0;
  t.equal((await weir('run', '-c', good, '--socket', '/tmp/s', '--pretty')).code, 0);
  const files = ['--in', 'in.pcap', '--out', 'out.pcap', '--json', 'out.jsonl'];
  const more = ['--conntrack', 'ct.json', '--timeline', 't.jsonl', '--seed', '-7', '--recovering'];
  const { code, stderr } = await weir('replay', '-c', good, ...files, ...more);
  t.strictSame([code, stderr], [0, '3 packets in 1.500 s, 2 out: forward 2, drop 1\n']);
  await weir('replay', '-c', good, ...files);
  t.equal((await weir('lab', 'demo', '--prefix', 'mine')).code, 1, 'the exit code is the part’s');
  await weir('lab', 'demo', '--failover', '--downloads', '7', '--mode', 'dsr', '--pcap', 'links');
  await weir('lab', 'up', '--mode', 'snat');
  const names = { in: 'in.pcap', out: 'out.pcap', json: 'out.jsonl' };
  t.strictSame(asked, [
    ['run', { config: good, socket: '/tmp/s', pretty: true }],
    ['replay', { config: good, ...names, conntrack: 'ct.json', timeline: 't.jsonl', seed: -7, recovering: true }],
    ['replay', { config: good, ...names, seed: 1 }],
    ['lab', 'demo', { prefix: 'mine' }],
    ['lab', 'demo', { prefix: 'weir', failover: true, downloads: 7, mode: 'dsr', pcap: 'links' }],
    ['lab', 'up', { prefix: 'weir', mode: 'snat' }],
  ]);
});

t.test('check', async (t) => {
  t.strictSame(await weir('check', '-c', good), {
    code: 0,
    stdout: `${good} is valid: 2 services, 3 backends\n`,
    stderr: '',
  });
  const refused = await weir('check', '-c', bad);
  t.strictSame([refused.code, refused.stdout], [2, '']);
  const lines = refused.stderr.trimEnd().split('\n');
  t.ok(lines.length >= 2, 'all mistakes at once');
  for (const line of lines) t.ok(/^.*bad\.yaml:\d+:\d+ [\w.[\]]+: .+$/.test(line), line);
  t.match(lines[0], 'bad.yaml:1:1 sed: ');
  t.match(lines[1], ':3:');

  const json = await weir('check', '-c', bad, '-o', 'json');
  t.strictSame([json.code, json.stderr], [2, '']);
  t.match(JSON.parse(json.stdout), { valid: false, problems: [{ line: 1, column: 1, path: 'sed' }, { line: 3 }] });
  t.match(JSON.parse((await weir('check', '-c', good, '-o', 'json')).stdout), {
    valid: true,
    services: 2,
    backends: 3,
  });

  const missing = await weir('check', '-c', join(folder, 'none.yaml'));
  t.equal(missing.code, 2);
  t.match(
    missing.stderr,
    /^weir: cannot read .*none\.yaml: it does not exist\. Name an existing file with -c FILE\.\n$/,
  );
});

t.test('maglev', async (t) => {
  const { code, stdout } = await weir('maglev', '-c', good, 'web', '-o', 'json');
  t.equal(code, 0);
  const { size, backends } = JSON.parse(stdout);
  t.equal(size, 16381);
  t.strictSame(
    backends.map(({ backend }: { backend: string }) => backend),
    ['b1', 'b2'],
    'weight 0 has no slots',
  );
  t.equal(backends[0].slots + backends[1].slots, size);
  t.ok(Math.abs(backends[1].share - 0.75) < 0.01);
  t.equal(backends[0].disturbed, 0, 'the only other keeps what it has');
  t.match((await weir('maglev', '-c', good, 'web')).stdout, /b2 +3 +\d+ +7\d\.\d\d % +#{29,31} /);
  const none = await weir('maglev', '-c', good, 'nope');
  t.strictSame([none.code, none.stderr], [2, `weir: ${good} has no service "nope". It has web, lots.\n`]);
  t.match((await weir('maglev', '-c', good, 'lots')).stderr, 'lots is random');
});

t.test('net prints a script', async (t) => {
  const { code, stdout } = await weir('net', '-c', good);
  t.equal(code, 0);
  t.match(stdout, /^ip route replace 10\.96\.0\.10 dev weir0( mtu \d+)? proto 196$/m);
  t.match(JSON.parse((await weir('net', '-c', good, '-o', 'json')).stdout).sections[0], { title: /device/ });
  const node = join(folder, 'node.yaml');
  writeFileSync(node, 'role: node\ntunnel: { address: 192.0.2.1 }\n');
  t.match((await weir('net', '-c', node)).stdout, /\n# note: endpoints that the file does not have are learned/);
  t.match(await weir('check', '-c', node), { code: 0, stdout: /valid: 0 services/, stderr: '' });
});

t.test('commands that talk to a running weir', async (t) => {
  const running = new FakeWeir();
  const socket = join(folder, 'weir.sock');
  const admin = await serveAdmin(running, { socket, listen: null, dashboard: false });
  t.teardown(() => admin.close());
  const ask = (...args: string[]): Promise<Outcome> => weir(...args, '--socket', socket);

  const status = await ask('status');
  t.equal(status.code, 0);
  t.match(status.stdout, /weir +1\.2\.3, pid 42, up 1 h 2 min/);
  t.match(status.stdout, /device +weir0, mtu 1500, io_uring/);
  t.match(status.stdout, /connections +tcp 7 of 100, other 2 of 50/);
  t.match(status.stdout, /web +10\.96\.0\.10:80\/tcp +maglev dnat +b1 +10\.2\.0\.11:8080 +1 +active +3 +4 +1000 +1200/);
  t.strictSame(JSON.parse((await ask('status', '-o', 'json')).stdout), running.statusView());
  t.notMatch(status.stdout, 'tunnels');
  const endpoint = { address: '10.2.0.11', port: 8080, protocol: 'tcp', learned: false };
  const learned = { ...endpoint, port: 53, protocol: 'udp', learned: true };
  running.node = { address: '10.2.0.11', port: 6081, endpoints: [endpoint, learned] };
  t.match(
    (await ask('status')).stdout,
    /node +tunnels end at 10\.2\.0\.11:6081\n +answers for 10\.2\.0\.11:8080\/tcp\n +answers for 10\.2\.0\.11:53\/udp, learned\n/,
  );
  t.strictSame(JSON.parse((await ask('services', '-o', 'json')).stdout), running.serviceViews());
  t.notMatch((await ask('services')).stdout, 'LIMIT');
  running.backends = [{ ...backend('b1'), maxConnections: 50 }, backend('b2')];
  running.limits = { maxConnections: 100, newConnectionsPerSecond: 20 };
  t.match((await ask('services')).stdout, /\n\nSERVICE .*\nweb +\(all\) +5 +100 +20\/s\nweb +b1 +2 +50\n$/);
  running.backends = [];
  running.limits = { maxConnections: null, newConnectionsPerSecond: 3 };
  t.match((await ask('services')).stdout, /web .*\(none\).*\n\nSERVICE .*\nweb +\(all\) +5 +3\/s\n$/);

  t.strictSame(JSON.parse((await ask('ct', 'stats', '-o', 'json')).stdout), running.conntrackView());
  t.match((await ask('ct', 'stats')).stdout, /tcp +7 +100 +20 +1 +6 +6 +ESTABLISHED 7\n/);

  running.asked.length = 0;
  t.equal((await ask('ct', 'list', '-o', 'json', '--service', 'web', '--state', 'established')).stdout, '[]\n');
  t.match(
    (await ask('ct', 'list', '--state', 'NOPE')).stderr,
    /^weir: no state is called "NOPE"\. Correct the filter\.\n$/,
  );
  t.equal((await ask('ct', 'flush', '--client', '10.0.0.0/8')).stdout, '5 connections forgotten\n');
  t.equal((await ask('ct', 'flush', '--all')).code, 0);
  t.equal((await ask('reload')).stdout, 'applied /etc/weir.yaml: 1 service, 2 backends\n');
  t.strictSame(running.asked, [
    'list json {"service":"web","state":"established"}',
    'list table {"state":"NOPE"}',
    'flush {"client":"10.0.0.0/8"}',
    'flush {}',
    'reload',
  ]);

  running.refusal = new RefusedConfig('/etc/weir.yaml', [
    { line: 1, column: 2, path: 'x', message: 'is wrong' },
    { line: 3, column: 4, path: '', message: 'and so is this' },
  ]);
  t.strictSame(await ask('reload'), {
    code: 2,
    stdout: '',
    stderr: '/etc/weir.yaml:1:2 x: is wrong\n/etc/weir.yaml:3:4 and so is this\n',
  });

  process.env.WEIR_SOCKET = join(folder, 'other.sock');
  t.teardown(() => delete process.env.WEIR_SOCKET);
  const nobody = await weir('ct', 'list');
  t.equal(nobody.code, 1);
  t.match(nobody.stderr, /^weir: no weir answers on .*other\.sock\. Start it with/);
});

t.test('ct watch', async (t) => {
  const running = new FakeWeir();
  const socket = join(folder, 'watch.sock');
  let admin = await serveAdmin(running, { socket, listen: null, dashboard: false });
  const watch = (...args: string[]): Promise<Outcome> => weir('ct', 'watch', ...args, '--socket', socket);
  const flow = {
    proto: 'tcp',
    type: 'OUT',
    client: '10.1.0.2:40000',
    vip: '10.96.0.10:80',
    backend: '10.2.0.11:8080',
    service: 'web',
    flags: ['SeenNonSyn'],
    expiresIn: 8000,
    packets: { original: 3, reply: 2 },
    bytes: { original: 300, reply: 200 },
  };
  const at = '2026-01-02T03:04:05.678Z';
  const lines = [
    { at, event: 'created', ...flow, state: 'SYN_SENT' },
    { at, event: 'state', previous: 'SYN_RECV', ...flow, state: 'ESTABLISHED' },
    { event: 'lost', count: 12 },
    { at, event: 'closed', cause: 'expired', ...flow, state: 'CLOSING' },
  ].map((event) => `${JSON.stringify(event)}\n`);
  // Where the stream is cut has no meaning.
  const text = lines.join('');
  running.events = [text.slice(0, 100), text.slice(100, 101), text.slice(101)];

  t.test('as lines for people, losses apart', async (t) => {
    const { code, stdout, stderr } = await watch('--count', '3');
    t.equal(code, 0);
    const [head, ...rows] = stdout.trimEnd().split('\n');
    t.match(head, /^TIME \(UTC\) +EVENT +PROTO +CLIENT +VIP +BACKEND +SERVICE +STATE +PACKETS +BYTES +FLAGS$/);
    const common = 'tcp 10.1.0.2:40000 10.96.0.10:80 10.2.0.11:8080 web';
    t.strictSame(
      rows.map((row) => row.replace(/ +/g, ' ')),
      [
        `03:04:05.678 created ${common} SYN_SENT 3/2 300/200 SeenNonSyn`,
        `03:04:05.678 state ${common} SYN_RECV > ESTABLISHED 3/2 300/200 SeenNonSyn`,
        `03:04:05.678 closed expired ${common} CLOSING 3/2 300/200 SeenNonSyn`,
      ],
    );
    for (const title of ['PROTO', 'CLIENT', 'STATE', 'FLAGS']) {
      for (const row of rows) t.equal(row[head!.indexOf(title) - 1], ' ', `${title} is above its column`);
    }
    t.equal(stderr, 'weir: 12 events lost, having come faster than they were taken.\n');
  });

  t.test('as JSON, losses among the events', async (t) => {
    t.strictSame(await watch('-o', 'json', '--count', '3'), { code: 0, stdout: text, stderr: '' });
    t.strictSame(await watch('-o', 'json', '--count', '1'), { code: 0, stdout: lines[0], stderr: '' });
  });

  t.test('filters reach weir, and what it refuses is said', async (t) => {
    running.asked.length = 0;
    await watch('--count', '1', '--service', 'web', '--backend', 'b1', '--client', '10.0.0.0/8', '--state', 'closed');
    t.strictSame(running.asked, ['watch {"service":"web","backend":"b1","client":"10.0.0.0/8","state":"closed"}']);
    t.strictSame(await watch('--state', 'NOPE'), {
      code: 2,
      stdout: '',
      stderr: 'weir: no state is called "NOPE". Correct the filter.\n',
    });
  });

  t.test('until a signal, or the end of weir', async (t) => {
    running.events = [];
    const begin = async (): Promise<{ outcome: Promise<Outcome> }> => {
      const count = running.watches.length;
      const outcome = watch('-o', 'json');
      while ((running.watches[count]?.asked ?? 0) === 0) await setImmediate();
      return { outcome };
    };
    for (const signal of ['SIGINT', 'SIGTERM'] as const) {
      const listeners = process.listenerCount(signal);
      const { outcome } = await begin();
      process.emit(signal);
      t.strictSame(await outcome, { code: 0, stdout: '', stderr: '' }, signal);
      t.equal(process.listenerCount(signal), listeners);
    }
    const { outcome } = await begin();
    await admin.close();
    t.match(await outcome, { code: 1, stderr: /^weir: weir ended in the middle of its answer\. See its log\.\n$/ });
    t.match(await watch(), { code: 1, stdout: '', stderr: /^weir: no weir answers on / });
    const brief = createServer((_request, response) => response.end());
    await new Promise<void>((resolve) => brief.listen(socket, resolve));
    t.match(await watch(), { code: 1, stdout: /^TIME/, stderr: /^weir: weir has ended\. See its log\.\n$/ });
    await new Promise((resolve) => brief.close(resolve));
    admin = await serveAdmin(running, { socket, listen: null, dashboard: false });
  });
  t.teardown(() => admin.close());
});

t.test('ct export and ct import', async (t) => {
  const running = new FakeWeir();
  const socket = join(folder, 'transfer.sock');
  const admin = await serveAdmin(running, { socket, listen: null, dashboard: false });
  t.teardown(() => admin.close());
  const ask = (...args: string[]): Promise<Outcome> => weir('ct', ...args, '--socket', socket);

  running.chunks = () => ['line 1\n', 'line 2\n'];
  t.strictSame(await ask('export', '--service', 'web'), { code: 0, stdout: 'line 1\nline 2\n', stderr: '' });
  const flows = write('flows.jsonl', 'x'.repeat(1_000_000));
  t.strictSame(await ask('import', flows), { code: 0, stdout: '3 connections imported\n', stderr: '' });
  t.strictSame(running.asked, ['export {"service":"web"}', 'import 1000000 bytes']);

  const answers = async (view: ReturnType<typeof importView>, ...args: string[]): Promise<Outcome> => {
    running.takeBody = async (body) => {
      for await (const _ of body);
      return view;
    };
    return ask('import', flows, ...args);
  };
  t.strictSame(await answers(importView({ imported: 1, updated: 2 }, { exists: 12 })), {
    code: 0,
    stdout: '1 connection imported, 2 brought up to date, 12 there already\n',
    stderr: '',
  });
  const refused = [
    { line: 3, reason: 'malformed', message: 'it is no JSON: x' },
    { line: 9, reason: 'table-full', message: 'the table is full of established connections' },
  ] as const;
  t.strictSame(await answers(importView({ refused }, { malformed: 1, 'table-full': 4 })), {
    code: 1,
    stdout: '3 connections imported\n',
    stderr:
      'weir: 5 refused: malformed 1, table-full 4.\n  line 3: malformed: it is no JSON: x\n' +
      '  line 9: table-full: the table is full of established connections\n  ...\n',
  });
  t.strictSame(await answers(importView({ complete: false })), {
    code: 1,
    stdout: '3 connections imported\n',
    stderr: 'weir: the end of the export is missing: it was cut short. Export again.\n',
  });
  const json = await answers(importView({ refused: [refused[0]] }, { malformed: 1 }), '-o', 'json');
  t.strictSame([json.code, json.stderr], [1, '']);
  t.strictSame(JSON.parse(json.stdout), importView({ refused: [refused[0]] }, { malformed: 1 }));

  running.takeBody = async (body) => {
    for await (const _ of body) throw new WeirError('FLOWS_INVALID', 'line 1: no header', 'Mend it.');
    return importView({});
  };
  t.strictSame(await ask('import', write('large.jsonl', 'x'.repeat(10_000_000))), {
    code: 1,
    stdout: '',
    stderr: 'weir: line 1: no header. Mend it.\n',
  });
  for (const [file, message] of [
    [
      join(folder, 'none.jsonl'),
      /^weir: cannot read .*none\.jsonl: it does not exist\. Name what `weir ct export` wrote/,
    ],
    [folder, /^weir: cannot read .*: it is a directory\./],
  ] as const) {
    const { code, stderr } = await ask('import', file);
    t.equal(code, 1);
    t.match(stderr, message);
  }
  const nobody = await weir('ct', 'import', flows, '--socket', join(folder, 'nobody.sock'));
  t.equal(nobody.code, 1);
  t.match(nobody.stderr, /^weir: no weir answers on/);

  let cut: () => void = () => {};
  running.takeBody = async (body) => {
    cut();
    for await (const _ of body);
    return importView({});
  };
  const ended = new Promise<void>((resolve) => {
    cut = () => resolve(admin.close());
  });
  t.match(await ask('import', write('larger.jsonl', 'x'.repeat(20_000_000))), { code: 1, stderr: /^weir: weir ended/ });
  await ended;
});

t.test('a long import says how far it is, on a terminal', async (t) => {
  const running = new FakeWeir();
  const socket = join(folder, 'long.sock');
  const admin = await serveAdmin(running, { socket, listen: null, dashboard: false });
  t.teardown(() => admin.close());
  const flows = write('long.jsonl', 'line\n'.repeat(200_000));
  const { isTTY } = process.stderr;
  const { now } = performance;
  let looks = 0;
  let outcome: Outcome;
  try {
    process.stderr.isTTY = true;
    performance.now = () => 500 * looks++; // half a second from look to look
    outcome = await weir('ct', 'import', flows, '--socket', socket);
  } finally {
    process.stderr.isTTY = isTTY;
    performance.now = now;
  }
  const { code, stderr } = outcome;
  t.equal(code, 0);
  t.match(stderr, /^\rsent \d+ lines, \d+ %/);
  t.ok(stderr.endsWith('\r\u001b[K'), 'and wipes that in the end');
});

t.test('backends that are down, drained or refuse', async (t) => {
  const running = new FakeWeir();
  const socket = join(folder, 'health.sock');
  const admin = await serveAdmin(running, { socket, listen: null, dashboard: false });
  t.teardown(() => admin.close());
  const ask = (...args: string[]): Promise<Outcome> => weir(...args, '--socket', socket);

  const seconds = 3660;
  const down = { state: 'down', seconds, reason: 'no answer within 1s', last: 'no answer within 1s' } as const;
  running.backends = [
    { ...backend('up'), health: { state: 'up', seconds, reason: 'connected', last: 'connection refused' } },
    { ...backend('gone'), state: 'down', takesNew: false, health: down },
    { ...backend('used'), state: 'down', health: { ...down, last: 'connected' } },
    { ...backend('told'), state: 'draining', drainedBy: 'command', takesNew: false },
    { ...backend('zero'), state: 'draining', drainedBy: 'weight', weight: 0, takesNew: false },
    { ...backend('left'), state: 'draining', drainedBy: 'removal', removed: true, takesNew: false },
    { ...backend('shy'), signals: { refused: 7, unanswered: 5 } },
  ];
  for (const command of ['services', 'status']) {
    const { stdout } = await ask(command);
    for (const [name, state] of [
      ['up', 'active'],
      ['gone', 'down'],
      ['used', 'down \\(used: all are\\)'],
      ['told', 'draining \\(by command\\)'],
      ['zero', 'draining'],
      ['left', 'removed'],
    ]) {
      t.match(stdout, new RegExp(` ${name} +10\\.2\\.0\\.11:8080 +[01] +${state}  +3 `), `${command}: ${name}`);
    }
    t.match(stdout, /^web +up +up +1 h 1 min +0 +0 +connection refused$/m);
    t.match(stdout, /^web +gone +down +1 h 1 min +0 +0 +no answer within 1s$/m);
    t.match(stdout, /^web +used +down +1 h 1 min +0 +0 +connected \(down for: no answer within 1s\)$/m);
    t.match(stdout, /^web +shy +- +5 +7$/m);
    t.notMatch(stdout, /^web +zero/m, 'of others there is nothing to say');
  }

  running.backends = [{ ...backend('10.2.0.11:8080'), weight: 1 }];
  t.match(
    (await ask('services')).stdout,
    / - +10\.2\.0\.11:8080 +1 +active +3 /,
    'an address that is the name is there once',
  );

  for (const [verb, answer, said] of [
    ['drain', {}, 'web/b1 takes no new connections; it has 3 connections\n'],
    ['drain', { changed: false, flows: 1 }, 'web/b1 takes no new connections, as before; it has 1 connection\n'],
    [
      'drain',
      { flows: 0, takers: 0 },
      'web/b1 takes no new connections; it has 0 connections\nno backend of web takes new connections now\n',
    ],
    ['undrain', {}, 'web/b1 takes new connections again\n'],
    [
      'undrain',
      { changed: false },
      'web/b1 was not drained by command, nothing is changed: it takes new connections\n',
    ],
    [
      'undrain',
      { takesNew: false },
      'web/b1 is no longer drained, but it takes no new connections, since it is down\n',
    ],
    [
      'undrain',
      { takesNew: false, weight: 0, changed: false },
      'web/b1 was not drained by command, nothing is changed: it takes no new connections, since its weight in the file is 0\n',
    ],
  ] as const) {
    running.drainAnswer = answer;
    t.strictSame(await ask(verb, 'web', 'b1'), { code: 0, stdout: said, stderr: '' });
  }
  t.match(JSON.parse((await ask('drain', 'web', 'b1', '-o', 'json')).stdout), { service: 'web', drained: true });
  running.refusal = new WeirError('USAGE', 'web has no backend "b9"', 'It has b1.');
  t.strictSame(await ask('drain', 'web', 'b9'), {
    code: 2,
    stdout: '',
    stderr: 'weir: web has no backend "b9". It has b1.\n',
  });
});

const program = fileURLToPath(new URL('../../bin/weir.js', import.meta.url));
const built = existsSync(fileURLToPath(new URL('../../dist/weir.js', import.meta.url)));

t.test('as a program', built ? {} : { skip: 'needs npm run build' }, async (t) => {
  t.test('check is quick: it loads nothing that only run needs', async (t) => {
    const main = new URL('../../dist/weir.js', import.meta.url).href;
    const script = `import('${main}').then(async ({ main }) => {
      await main(['node', 'weir', 'check', '-c', '${good}']);
      console.error(Object.keys(require.cache).join('\\n'));
    })`;
    const { code, stderr } = await exec(process.execPath, ['-e', script]);
    t.equal(code, 0);
    t.match(stderr, '/node_modules/yaml/', 'this way shows what is loaded');
    for (const heavy of ['koffi', 'pino', 'pino-pretty', 'prom-client']) {
      t.notMatch(stderr, `/node_modules/${heavy}/`, heavy);
    }
    const floorMs = await cpuMs(['-e', '0']);
    const tookMs = Math.min(await cpuMs([program, 'check', '-c', good]), await cpuMs([program, 'check', '-c', good]));
    t.ok(tookMs < 3 * floorMs + 500, `${tookMs} ms of CPU; node alone takes ${floorMs}`);
  });

  t.test('a reader that goes away ends it quietly', async (t) => {
    const running = new FakeWeir();
    running.chunks = function* () {
      for (;;) yield 'line\n'.repeat(5000);
    };
    const socket = join(folder, 'pipe.sock');
    const admin = await serveAdmin(running, { socket, listen: null, dashboard: false });
    t.teardown(() => admin.close());
    running.events = Array.from({ length: 10_000 }, () => '{"event":"lost","count":1}\n');
    for (const [command, line] of [
      ['ct list', 'line\n'],
      ['ct watch -o json', running.events[0]!],
    ] as const) {
      const script = `"$0" "$1" ${command} --socket "$2" | head -n 2`;
      const { code, stdout, stderr } = await exec('sh', ['-c', script, process.execPath, program, socket]);
      t.strictSame([code, stdout, stderr], [0, line + line, ''], command);
    }
  });

  t.test('export and import in a pipe', async (t) => {
    const running = new FakeWeir();
    running.chunks = function* () {
      for (let i = 0; i < 100; i++) yield 'line\n'.repeat(5000);
    };
    const socket = join(folder, 'both.sock');
    const admin = await serveAdmin(running, { socket, listen: null, dashboard: false });
    t.teardown(() => admin.close());
    const pipe = (script: string): Promise<Outcome> => exec('bash', ['-c', script, process.execPath, program, socket]);
    const both = await pipe('"$0" "$1" ct export --socket "$2" | "$0" "$1" ct import - --socket "$2"');
    t.strictSame(both, { code: 0, stdout: '3 connections imported\n', stderr: '' });
    t.strictSame(running.asked, ['export {}', 'import 2500000 bytes']);

    running.takeBody = async (body) => {
      for await (const _ of body) throw new WeirError('FLOWS_INVALID', 'line 1: no', 'Mend it.');
      return importView({});
    };
    const endless = await pipe('yes | "$0" "$1" ct import - --socket "$2"; echo "$?"');
    t.strictSame(endless, { code: 0, stdout: '1\n', stderr: 'weir: line 1: no. Mend it.\n' });
    const silent = spawn(process.execPath, [program, 'ct', 'import', '-', '--socket', socket], { stdio: 'pipe' });
    silent.stdin.write('\n');
    t.strictSame(await once(silent, 'close'), [1, null], 'it does not wait for a sender that is silent');
  });

  t.test('no stack traces, unless asked for', async (t) => {
    const args = [program, 'check', '-c', folder];
    const plain = await exec(process.execPath, args);
    t.equal(plain.code, 2);
    t.match(plain.stderr, /^weir: cannot read .*\n$/);
    const debug = await exec(process.execPath, args, { ...process.env, WEIR_DEBUG: '1' });
    t.match(debug.stderr, /\n +at /);
  });

  t.test('run without permission says so', needsRoot(t, 'setpriv'), async (t) => {
    const without = ['--bounding-set', '-net_admin', '--inh-caps', '-net_admin'];
    const config = write('alone.yaml', `services: []\nadmin: { socket: ${folder}/alone.sock, listen: off }\n`);
    const args = [...without, process.execPath, program, 'run', '-c', config];
    const { code, stdout, stderr } = await exec('setpriv', args);
    t.strictSame([code, stdout], [1, ''], 'no log, since nothing has begun');
    t.match(stderr, /^weir: device weir0: EPERM\. Run as root, or give the process CAP_NET_ADMIN/);
  });
});

function exec(command: string, args: string[], env = process.env): Promise<Outcome> {
  return new Promise((resolve) => {
    const child: ChildProcess = execFile(command, args, { env, timeout: 30_000 }, (_error, stdout, stderr) =>
      resolve({ code: child.exitCode ?? -1, stdout, stderr }),
    );
  });
}

/** CPU time of a node process: what it takes when nobody else is busy. */
function cpuMs(args: string[]): Promise<number> {
  return new Promise((resolve) => {
    const child = spawn('sh', ['-c', '"$@" >/dev/null; times', 'sh', process.execPath, ...args]);
    let text = '';
    child.stdout.setEncoding('utf8').on('data', (chunk) => (text += chunk));
    child.on('close', () => {
      const children = text.trim().split('\n').at(-1)!;
      let ms = 0;
      for (const [, minutes, seconds] of children.matchAll(/(\d+)m([\d.]+)s/g)) {
        ms += Number(minutes) * 60_000 + Number(seconds) * 1000;
      }
      resolve(Math.round(ms));
    });
  });
}

t.test('export: rules on one side, what they lose on the other', async (t) => {
  const { code, stdout, stderr } = await weir('export', 'iptables', '-c', good);
  t.equal(code, 0);
  t.match(stdout, /\*nat\n(.*\n)*COMMIT\n\*filter\n(.*\n)*COMMIT\n$/);
  t.match(stderr, `warning: ${good}:2:5 services[0].algorithm: maglev: rules draw by lot`);
  t.match((await weir('export', 'nft', '-c', good)).stdout, /^table ip weir \{\n(.*\n)*\}\n$/m);
  const direct = write(
    'dsr.yaml',
    'tunnel: { address: 192.0.2.1 }\nservices:\n  - { name: a, address: 10.96.0.1, port: 1, mode: dsr, backends: [] }\n',
  );
  const refused = await weir('export', 'nft', '-c', direct);
  t.strictSame([refused.code, refused.stdout], [2, '']);
  t.match(refused.stderr, `${direct}:3:51 services[0].mode: dsr: rules cannot tunnel`);
  t.equal((await weir('export', 'nft', '-c', bad)).code, 2);
});

t.test(
  'files that cannot be read or written: why, what to do, and 2 only where the input is the mistake',
  async (t) => {
    const rules = write('ipvs', '-A -t 10.96.0.10:80 -s wrr\n-a -t 10.96.0.10:80 -r 10.2.0.11:8080 -m -w 3\n');
    const importTo = (path: string): string[] => ['import', 'ipvs', rules, '-O', path];
    const none = join(folder, 'none', 'file');
    const underFile = join(good, 'file');
    const rows: [args: string[], code: number, message: RegExp][] = [
      [['check', '-c', none], 2, /cannot read .*: it does not exist\. Name an existing file with -c FILE\.\n$/],
      [['check', '-c', folder], 2, /cannot read .*: it is a directory\. Name an existing file with -c FILE\.\n$/],
      [['check', '-c', underFile], 2, /cannot read .*: a part of its path is no directory\. Name an existing file/],
      [['import', 'ipvs', folder], 2, /cannot read .*: it is a directory\. Name what is to be imported/],
      [importTo(none), 1, /cannot write .*: its folder does not exist\. Make it \(mkdir -p .*none\), or name another/],
      [importTo(folder), 1, /cannot write .*: it is a directory\. Name a file in it\.\n$/],
      [importTo(underFile), 1, /cannot write .*: a part of its path is no directory\. Name another file\.\n$/],
    ];
    for (const [args, code, message] of rows) {
      const outcome = await weir(...args);
      t.equal(outcome.code, code, args.join(' '));
      t.match(outcome.stderr, message);
    }
  },
);

t.test('files of others: permission, and who may', needsRoot(t, 'setpriv'), async (t) => {
  const theirs = mkdtempSync(join(tmpdir(), 'weir-theirs-'));
  t.teardown(() => rmSync(theirs, { recursive: true }));
  const secret = join(theirs, 'secret.yaml');
  writeFileSync(secret, 'services: []\n', { mode: 0o600 });
  const rules = write('public', '-A -t 10.96.0.10:80 -s wrr\n-a -t 10.96.0.10:80 -r 10.2.0.11:8080 -m -w 3\n');
  for (const path of [secret, theirs]) chownSync(path, NOBODY, NOBODY);
  chmodSync(theirs, 0o755);
  const source = new URL('../../lib/cli/program.ts', import.meta.url).href;
  const script = `const { runProgram } = await import(${JSON.stringify(source)});
    process.exit(await runProgram(['node', 'weir', ...process.argv.slice(1)], { version: '1' }));`;
  const capabilities = '-dac_override,-dac_read_search';
  const node = [process.execPath, '--import', 'tsx', '--input-type=module', '-e', script];
  const bounded = (...args: string[]): Promise<Outcome> =>
    exec('setpriv', ['--bounding-set', capabilities, '--inh-caps', capabilities, ...node, ...args]);
  const read = await bounded('check', '-c', secret);
  t.equal(read.code, 2);
  t.match(read.stderr, /^weir: cannot read .*: permission denied\. Run this as a user who may read it: `namei -l /);
  const written = await bounded('import', 'ipvs', rules, '-O', join(theirs, 'made'));
  t.equal(written.code, 1);
  t.match(
    written.stderr,
    /cannot write .*: permission denied\. Run this as a user who may write there, or name another/,
  );
});

const NOBODY = 65534;

t.test('import: a configuration, warnings, --strict', async (t) => {
  const rules = write('rules', '-A -t 10.96.0.10:80 -s wrr\n-a -t 10.96.0.10:80 -r 10.2.0.11:8080 -m -w 3\n');
  const out = join(folder, 'made.yaml');
  const printed = await weir('import', 'ipvs', rules);
  t.equal(printed.code, 0);
  t.equal(
    printed.stderr,
    `warning: ${rules}:1:1 -t 10.96.0.10:80: wrr becomes random: drawn by lot, with the same shares\n`,
  );
  const into = ['import', 'ipvs', rules, '--base', write('base.yaml', 'seed: abc\n'), '-O', out];
  t.strictSame([(await weir(...into, '--strict')).code, existsSync(out)], [1, false], 'nothing is written');
  const written = await weir(...into);
  t.strictSame([written.code, written.stdout], [0, '']);
  t.match(written.stderr, `${out}: 1 service, 1 backend\n`);
  t.equal((await weir('check', '-c', out)).code, 0);
  t.match((await weir('import', 'ipvs', rules, '--base', out, '-O', out)).stderr, ', as before\n');
  const manifest = write(
    'm.yaml',
    'kind: Service\napiVersion: v1\nmetadata: { name: web }\nspec: { clusterIP: 10.96.0.10, ports: [{ port: 80 }] }\n',
  );
  const services = await weir('import', 'kubernetes', manifest);
  t.equal(services.code, 0);
  t.match(services.stdout, '  - name: default.web\n');
  const wrong = await weir('import', 'kubernetes', write('wrong.yaml', 'kind: Service\napiVersion: v1\n'));
  t.strictSame([wrong.code, wrong.stdout], [2, '']);
  t.match(wrong.stderr, /wrong\.yaml:1:1 Service default\/undefined: metadata is missing\n/);
});
