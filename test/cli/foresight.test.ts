import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import { serveAdmin } from '../../lib/admin/serve.js';
import { WeirError } from '../../lib/base/errors.js';
import { renderExplain } from '../../lib/cli/explain.js';
import { renderPlan } from '../../lib/cli/plan.js';
import type { Parts } from '../../lib/cli/program.js';
import type { ExplainView, OutcomeView } from '../../lib/control/explain/explain-view.js';
import type { PlanView } from '../../lib/control/plan/plan-view.js';
import { type Outcome, runCommand } from '../support/command-line.js';
import { FakeWeir } from '../support/fake-weir.js';

/** `weir plan` and `weir explain`: what they ask a running weir, what they do by files alone, and how they say it. */

const folder = mkdtempSync(join(tmpdir(), 'weir-foresight-'));
t.teardown(() => rmSync(folder, { recursive: true }));

function write(name: string, text: string): string {
  const path = join(folder, name);
  writeFileSync(path, text);
  return path;
}

const WEB = 'name: web, address: 10.96.0.10, port: 80, protocol: tcp';
const B1 = '{ name: b1, address: 10.2.0.11, port: 8080 }';
const B2 = '{ name: b2, address: 10.2.0.12, port: 8080 }';
const two = write('two.yaml', `network: { manage: false }\nservices: [{ ${WEB}, backends: [${B1}, ${B2}] }]\n`);
const one = write('one.yaml', `network: { manage: false }\nservices: [{ ${WEB}, backends: [${B1}] }]\n`);
const bad = write('bad.yaml', 'services: [{ name: web }]\n');

const parts: Parts = {
  version: '1.2.3',
  run: async () => 0,
  replay: async () => ({ packets: 0, emitted: 0, seconds: 0, verdicts: {} }),
  lab: async () => 0,
};

function weir(...args: string[]): Promise<Outcome> {
  return runCommand(parts, args);
}

const running = new FakeWeir();
const socket = join(folder, 'weir.sock');
const admin = await serveAdmin(running, { socket, listen: null, dashboard: false });
t.teardown(() => admin.close());

t.test('plan asks a running weir', async (t) => {
  running.asked.length = 0;
  const same = await weir('plan', '-c', two, '--socket', socket);
  t.strictSame(same, {
    code: 0,
    stdout: 'new.yaml compared with what is in use (/etc/weir.yaml, version 3)\n\nnothing changes\n',
    stderr: '',
  });
  t.strictSame(running.asked, [`plan ${two}, ${readFileSync(two).length} characters`]);
  t.strictSame(
    JSON.parse((await weir('plan', '-c', two, '--socket', socket, '-o', 'json')).stdout),
    running.planAnswer,
  );

  const before = running.planAnswer;
  running.planAnswer = { ...before, changes: true, drainsEnded: ['web/b1'] };
  t.match(await weir('plan', '-c', two, '--socket', socket), {
    code: 3,
    stdout: /\ndrains by command that end: web\/b1\n/,
  });
  const refusal = { code: 'NOT_SUPPORTED', message: 'role cannot change while weir runs', remedy: 'Restart weir.' };
  running.planAnswer = { ...before, changes: true, refusal };
  t.match(await weir('plan', '-c', two, '--socket', socket), {
    code: 1,
    stdout: /^new\.yaml compared/,
    stderr: 'weir: role cannot change while weir runs. Restart weir.\n',
  });
  running.planAnswer = before;

  running.asked.length = 0;
  const refused = await weir('plan', '-c', bad, '--socket', socket);
  t.strictSame([refused.code, refused.stdout, running.asked], [2, '', []], 'a file with mistakes is not sent');
  t.equal(refused.stderr, (await weir('check', '-c', bad)).stderr, 'they are what check says');
  t.match(await weir('plan', '-c', join(folder, 'none.yaml')), { code: 2, stderr: /it does not exist/ });
  t.match(await weir('plan', '-c', two, '--socket', join(folder, 'no.sock')), { code: 1, stderr: /no weir answers/ });
});

t.test('plan compares two files', async (t) => {
  t.match(await weir('plan', '-c', two, '--from', two), { code: 0, stdout: /nothing changes\n$/ });
  const { code, stdout } = await weir('plan', '-c', one, '--from', two);
  t.equal(code, 3);
  t.match(
    stdout,
    /^~ web 10\.96\.0\.10:80\/tcp\n {2}- b2 10\.2\.0\.12:8080\n {4}slots: \d+ of 16381 change owner \(\d[\d.]* %\)\n/m,
  );
  t.match(await weir('plan', '-c', bad, '--from', two), { code: 2, stderr: /^.*bad\.yaml:1:/ });
  t.match(await weir('plan', '-c', one, '--from', bad), { code: 2, stderr: /^.*bad\.yaml:1:/ });
});

t.test('how a plan reads', async (t) => {
  const place = { address: '10.96.0.10', port: 80, protocol: 'tcp' };
  const none = { fields: [], backends: [], slots: null, flows: null, affinityLost: null };
  const member = { name: 'b9', address: '10.2.0.19', port: 8080, fields: [] };
  const many = Array.from({ length: 9 }, (_, i) => `10.${i}.0.0/16`);
  const view: PlanView = {
    path: 'new.yaml',
    against: { path: 'old.yaml', version: null },
    changes: true,
    refusal: null,
    settings: [
      { key: 'device.mtu', before: '1500', after: '1400', restart: true },
      { key: 'snat.addresses', before: '1', after: '1', added: ['10.0.0.2'], removed: ['10.0.0.1'], restart: false },
    ],
    services: [
      {
        ...place,
        name: 'web',
        change: 'changed',
        fields: [{ key: 'sourceRanges', before: 'none', after: '9', added: many, removed: [] }],
        backends: [
          { ...member, change: 'added' },
          { ...member, name: 'b1', change: 'changed', fields: [{ key: 'weight', before: '1', after: '5' }] },
        ],
        slots: { size: 1000, changed: 250, share: 0.25 },
        flows: { live: 10, kept: 4, moved: 3, cutLater: 2, cut: 1 },
        affinityLost: 1,
      },
      { ...place, ...none, name: 'new', change: 'added', backends: [{ ...member, change: 'added' }] },
      { ...place, ...none, name: 'old', change: 'removed', backends: [{ ...member, change: 'removed' }] },
    ],
    drainsEnded: [],
    flows: { live: 10, kept: 4, moved: 3, cutLater: 2, cut: 1 },
    network: {
      commands: ['ip rule add x'],
      later: ['ip rule del y'],
      notes: ['there is no route to backend 10.2.0.19'],
    },
  };
  const fates =
    '10 live: 4 kept, 3 moved (they pick a backend again), 2 kept until the drain time is over, 1 cut at once';
  t.equal(
    renderPlan(view),
    `new.yaml compared with old.yaml

~ device.mtu 1500 -> 1400 (takes a restart)
~ snat.addresses +10.0.0.2 -10.0.0.1

~ web 10.96.0.10:80/tcp
    sourceRanges +9 -0: +10.0.0.0/16 +10.1.0.0/16 +10.2.0.0/16 +10.3.0.0/16 +10.4.0.0/16 +10.5.0.0/16 ...
  + b9 10.2.0.19:8080
  ~ b1 10.2.0.19:8080: weight 1 -> 5
    slots: 250 of 1000 change owner (25 %)
    connections: ${fates}
    affinity: 1 client will be led to another backend

+ new 10.96.0.10:80/tcp
    with 1 backend

- old 10.96.0.10:80/tcp

connections: ${fates}

the kernel:
  ip rule add x

the kernel, when no connection needs it any more:
  ip rule del y

note: there is no route to backend 10.2.0.19
`,
  );
});

t.test('explain asks a running weir', async (t) => {
  running.asked.length = 0;
  const ends = ['tcp', '10.1.0.2:40000', '10.96.0.10:80'];
  const options = ['--flags', 'ack', '--without', 'web/b1', '--without', 'web/b2', '--assume-down', 'web/b3'];
  const { code, stdout } = await weir('explain', ...ends, ...options, '--socket', socket);
  t.equal(code, 0);
  t.match(
    stdout,
    /^packet +tcp 10\.1\.0\.2:40000 > .*\nby +\/etc\/weir\.yaml, in use as version 3\nparse +all is well\n +really\n/,
  );
  await weir('explain', '--packet', '45 00\n', '--socket', socket, '-o', 'json');
  t.strictSame(running.asked, [
    'explain {"proto":"tcp","src":"10.1.0.2:40000","dst":"10.96.0.10:80","flags":"ack","without":["web/b1","web/b2"],"assumeDown":["web/b3"]}',
    'explain {"packet":"4500","without":[],"assumeDown":[]}',
  ]);
  running.refusal = new WeirError('USAGE', 'no protocol is called "sctp"', 'There are tcp, udp, icmp.');
  t.match(await weir('explain', 'sctp', ...ends.slice(1), '--socket', socket), {
    code: 2,
    stderr: /no protocol is called/,
  });
  running.refusal = undefined;
  t.match(await weir('explain', 'tcp', '--socket', socket), { code: 2, stderr: /nothing says which packet/ });
});

t.test('explain by a file', async (t) => {
  const ends = ['tcp', '10.1.0.2:40000', '10.96.0.10:80'];
  const { code, stdout, stderr } = await weir('explain', '-c', two, ...ends);
  t.strictSame([code, stderr], [0, '']);
  t.match(stdout, /^by +.*two\.yaml, with an empty table\n/m);
  t.match(stdout, /^selection +hash 0x[0-9a-f]{8} of the client’s address and port, slot \d+ of 16381 .*: b[12]\n/m);
  t.match(stdout, /^verdict +forward web\/b[12]\n/m);
  const [, chosen] = /forward web\/(b[12])/.exec(stdout)!;
  const { outcomes } = JSON.parse(
    (await weir('explain', '-c', two, ...ends, '--without', `web/${chosen}`, '-o', 'json')).stdout,
  );
  t.match(outcomes, [{ verdict: 'forward', backend: chosen === 'b1' ? 'b2' : 'b1' }]);
  t.match(await weir('explain', '-c', bad, ...ends), { code: 2, stderr: /bad\.yaml:1:/ });
  t.match(await weir('explain', '-c', two, ...ends, '--assume-down', 'web/b7'), {
    code: 2,
    stderr: /web has no backend "b7"/,
  });
});

t.test('how ends read', async (t) => {
  const view: ExplainView = { ...running.explainAnswer, steps: [], assumed: ['web/b9 is not in the file'] };
  const forward: OutcomeView = {
    probability: 0.25,
    portDrawn: true,
    steps: [],
    verdict: 'forward',
    reason: null,
    meaning: null,
    direction: 'original',
    service: 'web',
    backend: 'b1',
    state: 'SYN_SENT',
    entry: null,
    out: [{ text: 'tcp a > b, 40 bytes', bytes: '45', route: 'b dev br0' }],
  };
  const drop: OutcomeView = {
    ...forward,
    probability: 0.75,
    verdict: 'drop',
    reason: 'hairpin-refused',
    meaning: 'The client is itself.',
    backend: null,
    out: [],
  };
  const head = `packet         ${view.packet.text}\nby             /etc/weir.yaml, in use as version 3\nassumed        web/b9 is not in the file\n`;
  t.equal(
    renderExplain({ ...view, outcomes: [forward] }),
    `${head}verdict        forward web/b1
               the source port is one that was drawn: another packet gets another
out            tcp a > b, 40 bytes
route          b dev br0
`,
  );
  t.equal(
    renderExplain({ ...view, outcomes: [forward, drop], untried: 2 }),
    `${head}
CHANCE  BACKEND  VERDICT  REASON           OUT                  ROUTE
25 %    b1       forward  -                tcp a > b, 40 bytes  b dev br0
75 %    -        drop     hairpin-refused  -                    -
and 2 more backends
source ports are drawn, too: another packet gets another

no backend:
verdict        drop hairpin-refused web
               The client is itself.
               the source port is one that was drawn: another packet gets another
`,
  );
});
