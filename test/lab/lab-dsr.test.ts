import { execFileSync, spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, rmSync, symlinkSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { delimiter, join } from 'node:path';
import { PassThrough } from 'node:stream';
import t, { type Test } from 'tap';
import { labDemo, labDown, labUp } from '../../lib/lab/lab-commands.js';
import {
  backendAddress,
  CLIENT_ADDRESS,
  gatewayAddress,
  HTTP_PORT,
  Lab,
  SERVICE_NET,
  takeDown,
  VIP,
} from '../../lib/lab/topology.js';
import { needsRoot } from '../support/skip.js';

/*
 *   client -- router ==+== gw, gw2        a lab of shape one-arm: answers do not come past the gateways
 *                      +== b1, b2, b3
 */

const PREFIX = `weir-d${process.pid}`;
/** In the failover; 100 by default in `weir lab demo --failover`. */
const DOWNLOADS = Number(process.env.WEIR_FAILOVER_DOWNLOADS ?? 24);

function namespaces(): string[] {
  const names = execFileSync('ip', ['netns', 'list'], { encoding: 'utf8' }).split('\n');
  return names.map((line) => line.split(' ')[0]!).filter((name) => name.startsWith(`${PREFIX}-`));
}

/** A screen of plain text, and what is on it. */
function openScreen(): { out: PassThrough; text: () => string } {
  const out = new PassThrough();
  let text = '';
  out.setEncoding('utf8').on('data', (part: string) => (text += part));
  return { out, text: () => text };
}

function temporaryFolder(t: Test): string {
  const folder = mkdtempSync(join(tmpdir(), 'weir-lab-'));
  t.teardown(() => rmSync(folder, { recursive: true, force: true }));
  return folder;
}

/** The packets of a capture that a filter lets pass, a line each. */
function readCapture(t: Test, file: string, filter = ''): string[] {
  const { status, stdout, stderr } = spawnSync('tcpdump', ['-n', '-r', file, filter], {
    encoding: 'utf8',
    maxBuffer: 1 << 28,
  });
  t.equal(status, 0, `${file} is whole: ${stderr}`);
  return stdout.split('\n').filter(Boolean);
}

t.teardown(() => takeDown(PREFIX));

t.test('a lab with one arm', needsRoot(t, 'ip', 'curl'), async (t) => {
  const lab = await Lab.create({ prefix: PREFIX, shape: 'one-arm', gateways: 2, backends: 1 });
  t.teardown(() => lab.destroy());
  t.same(lab.gateways, ['gw', 'gw2']);
  t.same(namespaces().sort(), ['b1', 'client', 'gw', 'gw2', 'router'].map((role) => `${PREFIX}-${role}`).sort());
  await lab.startServers();
  const { stdout } = await lab.exec('client', 'curl', ['-s', `http://${backendAddress(1)}:${HTTP_PORT}/`]);
  t.match(stdout, `{"backend":"b1","client":"${CLIENT_ADDRESS}","port":`, 'the client reaches backends past gateways');

  const nextHops = async (): Promise<string[]> => {
    const ports = Array.from({ length: 64 }, (_, i) => 40_000 + i);
    const way = `${VIP} from ${CLIENT_ADDRESS} iif client ipproto tcp dport 80`;
    const ask = ports.map((port) => `ip route get ${way} sport ${port}`).join('; ');
    const { stdout } = await lab.exec('router', 'sh', ['-c', ask]);
    return [...new Set([...stdout.matchAll(/ via (\S+)/g)].map(([, address]) => address!))].sort();
  };
  t.same(await nextHops(), [gatewayAddress(1), gatewayAddress(2)], 'ports decide on the gateway');
  await lab.routeToGateways(['gw2']);
  t.same(await nextHops(), [gatewayAddress(2)]);
  t.match((await lab.exec('router', 'ip', ['route'])).stdout, `${SERVICE_NET} via ${gatewayAddress(2)}`);

  await lab.destroy();
  t.same(namespaces(), []);
  t.notOk(existsSync(lab.dir));
});

t.test('a shape has room for so many', async (t) => {
  await t.rejects(Lab.create({ prefix: PREFIX, gateways: 2 }), {
    code: 'USAGE',
    message: /inline has 1 to 1 gateways/,
  });
  await t.rejects(Lab.create({ prefix: PREFIX, shape: 'one-arm', gateways: 10 }), { code: 'USAGE' });
  await t.rejects(Lab.create({ prefix: PREFIX, backends: 201 }), { code: 'USAGE' });
});

t.test(
  'the demo of dsr, with every link recorded',
  { ...needsRoot(t, 'ip', 'tcpdump'), timeout: 120_000 },
  async (t) => {
    const pcap = join(temporaryFolder(t), 'links');
    const { out, text } = openScreen();
    t.equal(await labDemo({ out, prefix: PREFIX, mode: 'dsr', pcap }), 0, text());
    t.match(text(), `${PREFIX}-router`);
    t.match(
      text(),
      /download {10,}\d\.\d MB {10,}\d\.\d MB {10,}\d\.\d MB {2}█{8} {2}13\d\.\d MB\n/,
      'three links of four idle',
    );
    t.match(text(), /✓ the gateway’s conntrack: [\d,]+ packets from clients, 0 of answers/);
    t.notMatch(text(), '✗');
    t.same(namespaces(), []);

    const links = ['client-router', 'router-b1', 'router-b2', 'router-b3', 'router-gw'];
    t.same(
      readdirSync(pcap).sort(),
      links.map((link) => `${link}.pcap`),
    );
    const read = (link: string, filter?: string): string[] => readCapture(t, join(pcap, `${link}.pcap`), filter);
    t.ok(read('client-router', `tcp and src host ${VIP}`).length > 1000);
    t.same(read('client-router', `(tcp or udp) and not host ${VIP}`), [], 'the client knows the VIP only');
    t.ok(read('router-gw', `dst host ${VIP}`).length > 1000);
    t.ok(read('router-gw', `src host ${gatewayAddress(1)} and udp dst port 6081`).length > 1000);
    t.same(read('router-gw', `src host ${VIP}`), [], 'no answer comes by the gateway');
    for (const [i, link] of ['router-b1', 'router-b2', 'router-b3'].entries()) {
      t.ok(read(link, `src host ${VIP}`).length > 1000, `${link}: answers have the VIP as source`);
      t.same(read(link, `tcp and src host ${backendAddress(i + 1)}`), [], 'and never the backend’s address');
    }
  },
);

t.test('the failover demo', { ...needsRoot(t, 'ip'), timeout: 120_000 }, async (t) => {
  const { out, text } = openScreen();
  t.equal(await labDemo({ out, prefix: PREFIX, failover: true, downloads: DOWNLOADS }), 0, text());
  t.match(text(), `✓ 0 of ${DOWNLOADS} broken: ${DOWNLOADS} are whole`);
  t.match(text(), /gw2 █{8} +\d+\/s/, 'in the end all goes by gw2');
  t.notMatch(text(), '✗ \\d');
  t.same(namespaces(), []);
});

t.test('up in mode dsr', { ...needsRoot(t, 'ip', 'curl', 'tcpdump'), timeout: 60_000 }, async (t) => {
  const pcap = temporaryFolder(t);
  const { out, text } = openScreen();
  t.equal(await labUp({ out, prefix: PREFIX, mode: 'dsr', pcap }), 0);
  t.match(text(), `weir ct list --socket /run/${PREFIX}-lab/weir-b1.sock`);
  const curl = ['netns', 'exec', `${PREFIX}-client`, 'curl', '-s', '-m', '5', `http://${VIP}/`];
  t.match(execFileSync('ip', curl, { encoding: 'utf8' }), `"client":"${CLIENT_ADDRESS}"`);
  await labDown({ out, prefix: PREFIX });
  t.same(namespaces(), []);
  t.same(readdirSync(pcap).length, 5);
  for (const file of readdirSync(pcap)) readCapture(t, join(pcap, file));
});

t.test('what a command line cannot mean', async (t) => {
  const { out } = openScreen();
  const refused = { code: 'USAGE', message: /^--failover is for --mode dsr, not snat/ };
  await t.rejects(labDemo({ out, prefix: PREFIX, failover: true, mode: 'snat' }), refused);
  await t.rejects(labDemo({ out, prefix: PREFIX, downloads: 5 }), { code: 'USAGE' });
});

t.test('captures that cannot be made', needsRoot(t, 'ip'), async (t) => {
  const { out } = openScreen();
  const unwritable = { code: 'OUTPUT_FAILED', message: /^captures cannot be put into \/dev\/null\/links: / };
  await t.rejects(labUp({ out, prefix: PREFIX, pcap: '/dev/null/links' }), unwritable);
  t.same(namespaces(), [], 'the lab that was begun is gone');

  const { PATH: path } = process.env;
  const ip = path!
    .split(delimiter)
    .map((folder) => join(folder, 'ip'))
    .find(existsSync);
  const folder = temporaryFolder(t);
  symlinkSync(ip!, join(folder, 'ip'));
  process.env.PATH = folder;
  t.teardown(() => {
    process.env.PATH = path;
  });
  const missing = { code: 'MISSING_TOOL', message: 'tcpdump is not installed', remedy: /apt install tcpdump/ };
  await t.rejects(labDemo({ out, prefix: PREFIX, pcap: folder }), missing);
});
