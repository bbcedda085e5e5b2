import { mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import t, { type Test } from 'tap';
import { stringify } from 'yaml';
import { seededRandom } from '../../lib/base/random.js';
import { readLines, waitForLine } from '../../lib/lab/process.js';
import { Lab } from '../../lib/lab/topology.js';
import { type Expected, expectedServices, objectsOf, type Sample, sampleService } from '../support/manifests.js';
import { needsRoot } from '../support/skip.js';

/*
 *   manifests/*.yaml --- weir import kubernetes --watch ---> weir.yaml --- weir run
 *                                                                            |
 *   client: one connection to every service ------------------- gateway -----+--- b1: one server on seven addresses
 */

const SERVICES = 200;
const addresses = Array.from({ length: 7 }, (_, i) => `10.2.0.${101 + i}`);
const targets = Array.from({ length: 20 }, (_, i) => 8000 + i);

const SERVER = `
import json, select, socket, sys
addresses, ports = json.loads(sys.argv[1]), json.loads(sys.argv[2])
poll, sockets = select.epoll(), {}
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for address in addresses:
        for port in ports:
            s = socket.socket(socket.AF_INET, kind)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind((address, port))
            if kind == socket.SOCK_STREAM: s.listen(64)
            sockets[s.fileno()] = (s, kind, f'{address}:{port}'.encode())
            poll.register(s.fileno(), select.EPOLLIN)
print('ready', flush=True)
while True:
    for fd, _ in poll.poll():
        s, kind, name = sockets[fd]
        if kind == socket.SOCK_STREAM:
            c, _ = s.accept()
            c.send(name)
            c.close()
        else:
            _, peer = s.recvfrom(64)
            s.sendto(name, peer)
`;

const CLIENT = `
import json, socket, sys
answers = []
for i, (protocol, address, port) in enumerate(json.load(sys.stdin)):
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM if protocol == 'tcp' else socket.SOCK_DGRAM)
    s.settimeout(5)
    s.bind(('', int(sys.argv[1]) + i))
    try:
        s.connect((address, port))
        if protocol == 'udp': s.send(b'x')
        answers.append(s.recv(64).decode())
    except OSError as error: answers.append(str(error))
    s.close()
print(json.dumps(answers))
`;

const random = seededRandom(6);
const samples = Array.from({ length: SERVICES }, (_, i) => sampleService(random, i, { addresses, targets }));

const BASE = 'admin: { listen: off }\nconntrack: { tcpEntries: 4096, anyEntries: 4096 }\nservices: []\n';

/** Some to a file, in the forms that manifests have. */
function writeManifests(folder: string): void {
  mkdirSync(join(folder, 'more'), { recursive: true });
  for (let at = 0; at < SERVICES; at += 25) {
    const objects = samples.slice(at, at + 25).flatMap(objectsOf);
    const list = { apiVersion: 'v1', kind: 'List', items: objects };
    const where = join(folder, at % 50 === 0 ? '' : 'more', `part-${at}`);
    if (at % 75 === 0) writeFileSync(`${where}.json`, JSON.stringify(list, null, 2));
    else if (at % 100 === 0) writeFileSync(`${where}.yml`, stringify(list));
    else writeFileSync(`${where}.yaml`, objects.map((object) => stringify(object)).join('---\n'));
  }
}

let nextPort = 20_000;

async function askEach(t: Test, lab: Lab, services: ReadonlyMap<string, Expected>): Promise<void> {
  const jobs = [...services.values()].map(({ protocol, address, port }) => [protocol, address, port]);
  const args = ['-S', '-c', CLIENT, String(nextPort)];
  nextPort += jobs.length;
  const { stdout, stderr } = await lab.exec('client', 'python3', args, { input: JSON.stringify(jobs) });
  t.equal(stderr, '');
  const answers = JSON.parse(stdout) as string[];
  const wrong = [...services].filter(([, { backends }], i) => !backends.includes(answers[i]!));
  t.strictSame(
    wrong.map(([name]) => name),
    [],
    `${jobs.length} services answer, each by a backend that is ready`,
  );
}

async function until(what: string, test: () => boolean): Promise<void> {
  for (let tries = 0; !test(); tries++) {
    if (tries > 2000) throw new Error(`never: ${what}`);
    await sleep(15);
  }
}

t.setTimeout(900_000);

t.test('200 services out of manifests', needsRoot(t, 'ip', 'python3'), async (t) => {
  const lab = await Lab.create({ prefix: `weir-t${process.pid}`, backends: 1 });
  t.teardown(() => lab.destroy());
  const folder = join(lab.dir, 'manifests');
  const base = join(lab.dir, 'base.yaml');
  const out = join(lab.dir, 'weir.yaml');
  writeManifests(folder);
  writeFileSync(base, BASE);
  const commands = addresses.map((each) => `address add ${each}/24 dev eth0\n`).join('');
  await lab.exec('b1', 'ip', ['-batch', '-'], { input: commands });
  const server = lab.spawn('b1', 'server', 'python3', [
    '-S',
    '-c',
    SERVER,
    JSON.stringify(addresses),
    JSON.stringify(targets),
  ]);

  const weirCommand = fileURLToPath(new URL('../../bin/weir.js', import.meta.url));
  const command = (...args: string[]) => lab.exec('gw', process.execPath, [weirCommand, ...args]);
  const once = await command('import', 'kubernetes', folder, '--base', base, '-O', out, '--strict');
  t.strictSame([once.status, once.stdout], [0, ''], once.stderr);
  const expected = expectedServices(samples);
  t.ok(expected.size > SERVICES);
  const checked = await command('check', '-c', out);
  t.equal(checked.status, 0, checked.stderr);
  t.match(checked.stdout, `is valid: ${expected.size} services`);

  await waitForLine(server, 'the server', (line) => line === 'ready');
  const weir = await lab.startWeir(readFileSync(out, 'utf8'));
  t.equal(weir.configPath, out);
  await askEach(t, lab, expected);

  await t.test('and as they change', async (t) => {
    const args = [weirCommand, 'import', 'kubernetes', folder, '--base', base, '-O', out, '--watch'];
    const watch = lab.spawn('gw', 'import', process.execPath, args);
    const said = (): string[] => readLines(watch.logPath);
    await waitForLine(watch, 'the import', (line) => line.startsWith(`${out} is as it should be: `));
    const reloads = (): number => weir.events().filter(({ event }) => event === 'reload-applied').length;
    t.equal(reloads(), 0, 'what has not changed is not written');

    const late: Sample = { ...samples[0]!, name: 'late', address: '10.96.77.1', external: undefined };
    writeFileSync(
      join(folder, 'late.yaml'),
      objectsOf(late)
        .map((object) => stringify(object))
        .join('---\n'),
    );
    await until('a reload', () => reloads() === 1);
    const added = late.ports.length;
    t.match(said().join('\n'), `written: ${expected.size + added} services`);
    t.match(said().join('\n'), `(${added} added, 0 changed, 0 removed)`);
    await askEach(t, lab, expectedServices([late]));

    const text = readFileSync(out, 'utf8');
    writeFileSync(join(folder, 'bad.yaml'), 'kind: Service\napiVersion: v1\nmetadata: { name: Bad }\nspec: {}\n');
    await until('a refusal', () => said().includes(`${out} is left as it was`));
    t.match(said().join('\n'), `${folder}/bad.yaml:3:19 Service default/Bad: metadata.name must be a DNS label`);
    t.equal(readFileSync(out, 'utf8'), text);

    rmSync(join(folder, 'bad.yaml'));
    rmSync(join(folder, 'late.yaml'));
    await until('another reload', () => reloads() === 2);
    t.match(said().join('\n'), `(0 added, 0 changed, ${added} removed)`);
    await askEach(t, lab, expected);
    t.equal(await lab.end(watch), 0, 'SIGTERM ends it');
  });
  t.equal(await weir.stop(), 0);
});
