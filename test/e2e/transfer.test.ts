import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import t, { type Test } from 'tap';
import type { FlowJson } from '../../lib/control/flows.js';
import { type Lab, VIP, type WeirProcess } from '../../lib/lab/topology.js';
import { createGatewayLab, gatewayConfig, PORTS } from '../support/gateway-lab.js';
import { needsRoot } from '../support/skip.js';

/*
 * Connections of random services, by dnat and by snat, under way while they move from one weir to another. Without the
 * move each of them would end with an RST: a weir that does not know a connection of a random service says so.
 */

t.setTimeout(900_000);
const root = needsRoot(t, 'ip', 'curl', 'bash');

const BYTES = 60_000_000;
const RATE = '12M';
const SNAT_ADDRESS = '10.96.255.1';

/** A download and an upload of some five seconds in each mode. Resolves to what each of them says when it is done. */
async function transfers(lab: Lab): Promise<string[]> {
  const curl = ['-sS', '--fail', '--limit-rate', RATE, '--max-time', '100'];
  const jobs = (['dnat', 'snat'] as const).flatMap((mode) => {
    const base = `http://${VIP}:${PORTS[mode]}`;
    const down = `curl ${curl.join(' ')} -o /dev/null -w '%{size_download}' ${base}/bytes/${BYTES}`;
    const up = `head -c ${BYTES} /dev/zero | curl ${curl.join(' ')} -T - ${base}/upload`;
    return [down, up].map((script) => lab.exec('client', 'bash', ['-c', script], { timeoutMs: 120_000 }));
  });
  return (await Promise.all(jobs)).map(({ stdout, stderr }) => stdout + stderr);
}

function checkWhole(t: Test, said: readonly string[]): void {
  for (const [i, text] of said.entries()) {
    const isUpload = i % 2 === 1;
    t.match(text, isUpload ? `"bytes":${BYTES}` : String(BYTES), `${isUpload ? 'upload' : 'download'} ends whole`);
  }
}

async function flows(weir: WeirProcess): Promise<FlowJson[]> {
  return JSON.parse((await weir.command(['ct', 'list', '-o', 'json'])).stdout) as FlowJson[];
}

async function must(lab: Lab, ...commands: string[]): Promise<string> {
  const { stdout, stderr, status } = await lab.exec('gw', 'bash', ['-ec', commands.join('\n')]);
  if (status !== 0) throw new Error(`${commands.join('; ')}: ${stderr}`);
  return stdout;
}

/** Resolves when the transfers have sent something, each of them. */
async function areUnderWay(weir: WeirProcess): Promise<FlowJson[]> {
  for (;;) {
    const busy = (await flows(weir)).filter(({ bytes }) => bytes.original + bytes.reply > BYTES / 10);
    if (busy.length === 4) return busy;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

/** What the closing of a connection leaves behind where its sequence numbers were followed. */
async function checkEnds(t: Test, weir: WeirProcess, moved: readonly FlowJson[]): Promise<void> {
  // The first to end may be gone by now; the last ones may still be saying goodbye.
  const isMoved = ({ client }: FlowJson): boolean => moved.some((each) => each.client === client);
  let after = await flows(weir);
  for (let left = 50; left > 0 && after.some((each) => isMoved(each) && !/^CLOS/.test(each.state)); left--) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    after = await flows(weir);
  }
  const known = moved.filter(({ client }) => after.some((each) => each.client === client));
  t.not(known.length, 0);
  for (const { client, snat, backend } of known) {
    const flow = after.find((each) => each.client === client)!;
    t.match(flow, { backend, ...(snat === undefined ? {} : { snat }) });
    t.match(flow.state, /^CLOS/, `the end of ${client} was noticed`);
  }
}

t.test('a restart: export, start anew with an empty table, import', root, async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  const config = gatewayConfig(lab, { algorithm: 'random' });
  const old = await lab.startWeir(config);
  const work = transfers(lab);
  const moved = await areUnderWay(old);

  await must(lab, ...['client', 'br0'].map((iif) => `ip rule add pref 500 iif ${iif} blackhole`));
  const { stdout } = await old.command(['ct', 'export']);
  t.equal(await old.stop(), 0);
  const file = join(lab.dir, 'flows.jsonl');
  writeFileSync(file, stdout);
  const next = await lab.startWeir(config);
  t.same(await flows(next), []);
  const { status, stdout: said, stderr } = await next.command(['ct', 'import', file]);
  t.strictSame([status, said, stderr], [0, '4 connections imported\n', '']);
  await must(lab, ...['client', 'br0'].map((iif) => `ip rule del pref 500 iif ${iif}`));

  checkWhole(t, await work);
  await checkEnds(t, next, moved);
  t.ok(next.events().some(({ event, imported }) => event === 'imported' && imported === 4));
  t.equal(await next.stop(), 0);
});

/**
 * As between two hosts, but both in one namespace: the second weir has a device of its own, and what leads packets to the first
 * is turned to it when it knows the connections.
 */
t.test('from one running weir to another, through a pipe', root, async (t) => {
  const lab = await createGatewayLab();
  t.teardown(() => lab.destroy());
  const config = gatewayConfig(lab, { algorithm: 'random' });
  const old = await lab.startWeir(config);
  const other = config.replace('device: {', 'device: { name: weir1,').concat('network: { manage: false }\n');
  const next = await lab.startWeir(other, { socket: join(lab.dir, 'next.sock'), name: 'next' });
  await must(
    lab,
    'ip link set weir1 up',
    'sysctl -qw net.ipv4.conf.weir1.rp_filter=0 net.ipv4.conf.weir1.accept_local=1',
    'ip rule add pref 1000 iif weir1 lookup main',
  );
  const work = transfers(lab);
  const moved = await areUnderWay(old);

  const bin = fileURLToPath(new URL('../../bin/weir.js', import.meta.url));
  const program = process.env.WEIR_COMMAND ?? `${process.execPath} ${bin}`;
  await must(lab, `ip rule add pref 900 to ${VIP} blackhole`);
  const pipe = `set -o pipefail; ${program} ct export --socket ${old.socket} | ${program} ct import - --socket ${next.socket}`;
  t.equal(await must(lab, pipe), '4 connections imported\n');
  await must(
    lab,
    `ip route replace ${VIP} dev weir1`,
    `ip route replace ${SNAT_ADDRESS} dev weir1`,
    'ip route replace default dev weir1 table 10096',
    `ip rule del pref 900 to ${VIP}`,
  );
  checkWhole(t, await work);
  await checkEnds(t, next, moved);
  const carried = (await flows(next)).reduce((sum, { bytes }) => sum + bytes.original + bytes.reply, 0);
  t.ok(carried > 0, 'through the second');
  t.equal(await old.stop(), 0);
  t.equal(await next.stop(), 0);
});
