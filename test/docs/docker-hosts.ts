import '../support/plain-children.js';
/*
 * The commands of examples/compose/README.md and docs/docker.md, line by line, with namespaces for containers; docker.test.ts runs this file in a
 * mount namespace of its own. Of docker's commands it knows those that the pages have, and how they are written there.
 */
import { execFileSync } from 'node:child_process';
import { copyFileSync, mkdirSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import t, { type Test } from 'tap';
import { type Compose, type ComposeNetwork, type ComposeService, mergeCompose } from '../support/compose.js';
import { Project } from '../support/containers.js';
import { buildImage, type Image, removeOldLayers } from '../support/image.js';

t.setTimeout(600_000);

const CHECKOUT = fileURLToPath(new URL('../..', import.meta.url));
const LAB = join(CHECKOUT, 'examples/compose');
const folder = mkdtempSync(join(tmpdir(), 'weir-containers-'));
const images = new Map<string, Image>();
let scratches = 0;
let running: Project | null = null;

t.teardown(async () => {
  await running?.down();
  const mounts = [...readFileSync('/proc/self/mounts', 'utf8').matchAll(/^\S+ (\S+)/gm)].map(([, at]) => at!);
  for (const at of mounts.reverse()) if (at.startsWith(folder)) execFileSync('umount', ['--lazy', at]);
  rmSync(folder, { recursive: true, force: true });
});

function scratch(): string {
  return join(folder, `scratch-${scratches++}`);
}

/** Its blocks of that language, as lines of words. */
function commandsOf(text: string, language: string): string[][] {
  const blocks = [...text.matchAll(/^```([^\n]*)\n(.*?)^```$/gms)].filter(([, words]) => words === language);
  const lines = blocks.flatMap(([, , script]) => script!.replaceAll('\\\n', ' ').trim().split('\n'));
  return lines.map((line) => [...line.matchAll(/'([^']*)'|(\S+)/g)].map(([, quoted, plain]) => quoted ?? plain!));
}

/** `## name` up to the next of its kind. */
function section(page: string, name: string): string {
  return page.split(/^## /m).find((part) => part.startsWith(`${name}\n`))!;
}

/** Signals process 1 of each, dependents first, and looks how it ends. */
async function stopAll(t: Test, project: Project): Promise<void> {
  for (const name of [...project.started].reverse()) {
    t.equal(await project.get(name).stop(), name === 'client' ? 143 : 0, `${name} ends as it should`);
  }
  await project.down();
  running = null;
}

/** A compose lab as its README leads through it. @returns what each command printed */
async function follow(t: Test, lines: readonly string[][]): Promise<string[]> {
  let files = ['compose.yaml'];
  const printed: string[] = [];
  for (const words of lines) {
    const [program, , command, ...rest] = words;
    if (program === 'export') files = words[1]!.replace('COMPOSE_FILE=', '').split(':');
    else if (command === 'up') {
      const compose = mergeCompose(files.map((file) => join(LAB, file))) as unknown as Compose;
      running = await Project.up(compose, LAB, images, scratch());
      await running.untilHealthy();
    } else if (command === 'exec') {
      const { code, stdout, stderr } = await running!.get(rest[0]!).exec(rest.slice(1));
      t.equal(code, 0, rest.join(' '));
      if (code !== 0) t.comment(stderr, running!.get('gateway').logs());
      printed.push(stdout);
    } else if (command === 'logs') printed.push(running!.get(rest[0]!).logs());
    else if (command === 'down') await stopAll(t, running!);
    else throw new Error(`what is ${words.join(' ')}?`);
  }
  return printed;
}

/** Of answers `b1 saw 10.1.0.2`: who answered, and what they saw. */
function answers(text: string): { count: number; names: string[]; seen: string[] } {
  const all = [...text.matchAll(/^(b\d) saw (\S+)$/gm)];
  const distinct = (i: number): string[] => [...new Set(all.map((match) => match[i]!))].sort();
  return { count: all.length, names: distinct(1), seen: distinct(2) };
}

const readme = readFileSync(join(LAB, 'README.md'), 'utf8');

t.test('the images', async (t) => {
  images.set('weir', buildImage(CHECKOUT, scratch()));
  images.set('weir-lab-host', buildImage(LAB, scratch()));
  removeOldLayers(Date.now());
  const { version } = JSON.parse(readFileSync(join(CHECKOUT, 'package.json'), 'utf8')) as { version: string };
  const { labels, stopSignal, healthcheck } = images.get('weir')!;
  t.equal(labels['org.opencontainers.image.version'], version);
  t.strictSame([stopSignal, healthcheck], ['SIGTERM', ['weir', 'status']]);
});

t.test('dnat', async (t) => {
  const printed = await follow(t, commandsOf(section(readme, 'dnat'), 'sh').slice(0, -1));
  const [first, services, connections, explained, , drained, log] = printed as [string, ...string[]];
  const { count, names, seen } = answers(first);
  t.strictSame([count, seen], [12, ['10.1.0.2']], 'backends see the client');
  t.ok(names.length > 1, `${names} answered`);
  t.match(services, /web .*10\.96\.0\.10:80/);
  t.match(connections, /tcp +OUT +10\.1\.0\.2:\d+ +10\.96\.0\.10:80/);
  t.match(explained, /forward/);
  t.strictSame([answers(drained!).count, answers(drained!).names.includes('b2')], [12, false], 'b2 gets no new ones');
  t.match(log, /engine readwrite: io_uring cannot be used: io_uring_setup: EPERM/);
  t.notMatch(log, /"level":"(warn|error)"/, 'there is nothing to complain of');

  const gateway = running!.get('gateway');
  const status = readFileSync(`/proc/${gateway.firstProcess()}/status`, 'utf8');
  const netAdminAndRaw = '0000000000003000';
  t.match(status, /^Uid:\t961\t961\t961\t961$/m, 'it is not root');
  for (const set of ['Inh', 'Prm', 'Eff', 'Bnd', 'Amb']) t.match(status, `Cap${set}:\t${netAdminAndRaw}`);
  t.match(status, /^NoNewPrivs:\t1$/m);
  const { stdout } = await gateway.exec([
    'sh',
    '-c',
    'command -v npm gcc make python3; ls /opt/weir/node_modules; true',
  ]);
  t.notMatch(stdout, /\/npm|gcc|make|python|typescript|^tap$/m, 'what builds it is not in it');
  await stopAll(t, running!);
});

t.test('snat', async (t) => {
  const [first, connections] = await follow(t, commandsOf(section(readme, 'snat'), 'sh'));
  const { count, names, seen } = answers(first!);
  t.strictSame([count, seen], [12, ['10.2.0.100']], "backends see weir's address");
  t.ok(names.length > 1, `${names} answered`);
  t.match(connections, /tcp +OUT +10\.1\.0\.2:\d+/);
});

t.test('dsr', async (t) => {
  const [first, atGateway, atNode] = await follow(t, commandsOf(section(readme, 'dsr'), 'sh'));
  const { count, names, seen } = answers(first!);
  t.strictSame([count, seen], [12, ['10.1.0.2']], 'backends see the client');
  t.ok(names.length > 1, `${names} answered`);
  const counts = [...atGateway!.matchAll(/^tcp +SVC .* (\d+)\/(\d+) +\d+\/\d+/gm)].map(([, , replies]) => replies);
  t.ok(counts.length >= 12 && counts.every((each) => each === '0'), 'answers go past the gateway');
  if (names.includes('b1')) t.match(atNode, /tcp +OUT +10\.1\.0\.2:\d+ +10\.96\.0\.10:80 +10\.2\.0\.11:8080/);
});

t.test('docs/docker.md', async (t) => {
  const page = readFileSync(join(CHECKOUT, 'docs/docker.md'), 'utf8');
  const here = scratch();
  mkdirSync(here);
  copyFileSync(join(LAB, 'dnat.yaml'), join(here, 'weir.yaml'));
  const networks: Record<string, ComposeNetwork> = {};
  const settings = commandsOf(page, 'sh host').flatMap((words) => words.slice(2).map((word) => word.split('=')));
  const ofTheHost = Object.fromEntries(settings.map(([key, value]) => [key!, Number(value)]));
  let started = 0;

  /** Both as `weir`: a reader has one of them. */
  const stop = async (): Promise<void> => {
    if (running !== null) await stopAll(t, running);
  };
  for (const words of commandsOf(page, 'sh docker')) {
    const [, command, ...rest] = words as [string, string, ...string[]];
    if (command === 'network') {
      networks[rest.at(-1)!] = {
        ipam: { config: [{ subnet: after(rest, '--subnet'), gateway: after(rest, '--gateway') }] },
      };
    } else if (command === 'run') {
      const isToEnd = rest.includes('--rm');
      const service = serviceOf(rest, ofTheHost);
      if (!isToEnd) await stop();
      const compose = { services: { weir: service }, networks };
      const project = await Project.up(compose, here, images, scratch());
      if (isToEnd) {
        t.equal(await project.get('weir').ended, 0, words.join(' '));
        t.match(project.get('weir').logs(), /^0\.|is valid: 1 service, 3 backends/);
        await project.down();
      } else {
        running = project;
        started++;
        await project.untilHealthy();
      }
    } else if (command === 'exec') t.equal((await running!.get('weir').exec(rest.slice(1))).code, 0, words.join(' '));
    else if (command === 'logs') t.match(running!.get('weir').logs(), /"event":"ready"/);
    else if (command === 'stop') await stop();
    else if (!['build', 'inspect', 'rm'].includes(command)) throw new Error(`what is docker ${command}?`);
  }
  t.equal(started, 2, 'in a network of its own, and in that of the host');
});

function after(words: readonly string[], flag: string): string {
  return words[words.indexOf(flag) + 1]!;
}

/** What `docker run` says, as compose would. */
function serviceOf(words: readonly string[], hostSettings: Readonly<Record<string, number>>): ComposeService {
  const values = new Map<string, string[]>();
  let at = 0;
  for (; words[at]!.startsWith('-'); at++) {
    const flag = words[at]!;
    if (flag === '-d' || flag === '--rm') continue;
    values.set(flag, [...(values.get(flag) ?? []), words[++at]!]);
  }
  const known = ['--name', '--restart', '--network', '--ip', '--device', '--cap-add', '--sysctl', '-v'];
  for (const flag of values.keys()) if (!known.includes(flag)) throw new Error(`what is ${flag}?`);
  const all = (flag: string): string[] => values.get(flag) ?? [];
  const network = all('--network')[0];
  const isOwn = network !== undefined && network !== 'host';
  const sysctls = all('--sysctl').map((each) => each.split('=') as [string, string]);
  return {
    image: words[at]!,
    ...(words.length > at + 1 ? { command: words.slice(at + 1) } : {}),
    cap_add: all('--cap-add'),
    devices: all('--device').map((path) => `${path}:${path}`),
    volumes: all('-v'),
    networks: isOwn ? { [network]: { ipv4_address: all('--ip')[0]! } } : {},
    sysctls:
      network === 'host' ? hostSettings : Object.fromEntries(sysctls.map(([key, value]) => [key, Number(value)])),
  };
}
