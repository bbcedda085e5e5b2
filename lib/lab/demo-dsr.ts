import { WEB_PORT } from './demo-config.js';
import { describeErrors, describeStart, showExcerpt, showSelection, showStop, startAll } from './demo-stages.js';
import { countLinks, type LinkCount } from './links.js';
import type { LoadReport } from './load.js';
import type { Screen } from './screen.js';
import type { Lab, WeirProcess } from './topology.js';
import { iperf, load, startIperf, transfers } from './traffic.js';
import type { TransferReport } from './transfers.js';
import { startWeirs, type Weirs } from './weirs.js';

/*
 *   client          router          gw               b1 b2 b3: node, servers
 *     |  1 which backend?           Maglev              |
 *     |---------------->|---------->|====== Geneve ====>|   bars
 *     |  2 a download, an upload: the links' counters   |   what passes gw, and what does not
 *     |<----------------|<------------------------------|
 *     |                             3 weir ct list  ... weir ct list      one way here, both there
 *     |  4 as fast as it goes                           |   Gb/s
 *     |                             5 SIGTERM           |   nothing is left
 */

const HALF_BYTES = 128 * 1024 * 1024;
const BAR_COLUMNS = 8;
/** Of a transfer, what its acknowledgements come to at most. */
const ACKNOWLEDGED = 0.1;

/** Connections that are looked at while they are open, after some requests over each. */
const SHOWN = 6;
const SHOWN_REQUESTS = 30;

/** A row of `weir ct list -o json`, as far as it is looked at here. */
export interface Flow {
  readonly type: string;
  readonly client: string;
  readonly backend: string;
  readonly state: string;
  readonly flags: readonly string[];
  readonly packets: { readonly original: number; readonly reply: number };
}

/** Everything between a one-arm lab's building and its removal. Failed checks are counted by the screen. */
export async function showDsrDemo(lab: Lab, screen: Screen, startedMs: number): Promise<void> {
  const weirs = await startAll(lab, screen, startedMs, () => startWeirs(lab, 'dsr'));
  describeStart(weirs, screen);
  await showSelection(lab, screen, [{ name: 'Maglev', port: WEB_PORT, isSticky: true }]);
  await showHalves(lab, weirs, screen);
  await showConntrack(lab, weirs, screen);
  await showSpeed(lab, screen);
  await showStop(lab, runningBy(lab, weirs), screen);
}

export function runningBy(lab: Lab, { gateways, nodes }: Weirs): Record<string, WeirProcess> {
  const roles = [...lab.gateways, ...lab.backends];
  return Object.fromEntries([...gateways, ...nodes].map((weir, i) => [roles[i]!, weir]));
}

/** The connections of one weir. */
export async function listFlows(weir: WeirProcess): Promise<Flow[]> {
  const { stdout } = await weir.command(['ct', 'list', '-o', 'json']);
  return JSON.parse(stdout) as Flow[];
}

interface Halves {
  readonly report: TransferReport;
  /** From the client to the router, from it to the gateway, from there into tunnels, and to the client. */
  readonly bytes: readonly [asked: number, toGateway: number, fromGateway: number, answered: number];
}

async function showHalves(lab: Lab, { gateways }: Weirs, screen: Screen): Promise<void> {
  const mebibytes = HALF_BYTES / 1024 / 1024;
  screen.heading(`Half of it: ${mebibytes} MiB down, ${mebibytes} MiB up, and what the links have counted`);
  const columns = ['client → router', 'router → gw', 'gw ═▶ nodes', 'router → client'];
  screen.line(screen.dim(`              ${columns.map((text) => text.padEnd(20)).join('')}`.trimEnd()));
  const shown: Record<string, Halves> = {};
  for (const what of ['download', 'upload'] as const) {
    const halves = await screen.during(what, transferAndCount(lab, what));
    const max = Math.max(...halves.bytes);
    const cells = halves.bytes.map((count, i) => {
      const megabytes = `${(count / 1e6).toFixed(1)} MB`.padStart(9);
      return `${screen.bar(count, max, BAR_COLUMNS, i === 3 ? 1 : 0)} ${megabytes}  `;
    });
    screen.line(`  ${what.padEnd(12)}${cells.join('')}`.trimEnd());
    shown[what] = halves;
  }
  const { download, upload } = shown as { download: Halves; upload: Halves };
  const share = (halves: Halves): number => Math.max(halves.bytes[1], halves.bytes[2]) / HALF_BYTES;
  const isWhole = ({ report }: Halves): boolean => report.whole === 1 && report.broken === 0;
  screen.check(
    isWhole(download) && share(download) < ACKNOWLEDGED && download.bytes[3] >= HALF_BYTES,
    `the download is whole (SHA-256) and went past the gateway, which forwarded ${percent(share(download))} of that in acknowledgements${sayTrouble(download)}`,
  );
  screen.check(
    isWhole(upload) && upload.bytes[1] >= HALF_BYTES && upload.bytes[2] >= HALF_BYTES,
    `the upload is whole, and went through the gateway${sayTrouble(upload)}`,
  );
  const flows = await listFlows(gateways[0]!);
  const [requests, answers] = [
    flows.reduce((sum, { packets }) => sum + packets.original, 0),
    flows.reduce((sum, { packets }) => sum + packets.reply, 0),
  ];
  screen.check(
    requests > 0 && answers === 0,
    `the gateway’s conntrack: ${requests.toLocaleString('en')} packets from clients, ${answers} of answers`,
  );
}

async function transferAndCount(lab: Lab, what: 'download' | 'upload'): Promise<Halves> {
  const before = await countLinks(lab);
  const report = await transfers(lab, WEB_PORT, ['--bytes', String(HALF_BYTES), `--${what}s`, '1']);
  const after = await countLinks(lab);
  const since = (role: string, counter: keyof LinkCount): number => after[role]![counter] - before[role]![counter];
  return {
    report,
    bytes: [since('client', 'bytesFrom'), since('gw', 'bytesTo'), since('gw', 'bytesFrom'), since('client', 'bytesTo')],
  };
}

function percent(share: number): string {
  return `${(share * 100).toFixed(1)} %`;
}

function sayTrouble({ report: { broken, errors } }: Halves): string {
  return describeErrors({ failed: broken, errors });
}

async function showConntrack(lab: Lab, { gateways, nodes }: Weirs, screen: Screen): Promise<void> {
  screen.heading(`In conntrack, while ${SHOWN} connections are open: weir ct list`);
  const { stop, ended } = await openSome(lab);
  const open = ['ct', 'list', '--state', 'ESTABLISHED'];
  const all = [...gateways, ...nodes];
  const tables = await Promise.all(all.map(async (weir) => (await weir.command(open)).stdout.trimEnd().split('\n')));
  const lists = await Promise.all(all.map(listFlows));
  stop();
  const [[head = '', ...here] = [], ...there] = tables;
  screen.line(screen.dim('  on the gateway'));
  showExcerpt([head, ...here], [{ of: () => true, limit: SHOWN }], screen);
  screen.line(screen.dim(`  on the nodes, ${lab.backends.join(', ')}`));
  showExcerpt([head, ...there.flatMap(([, ...rows]) => rows)], [{ of: () => true, limit: SHOWN }], screen);
  const end = await screen.during('closing them', ended);
  const [services = [], ...owned] = lists.map((flows) => flows.filter(({ state }) => state === 'ESTABLISHED'));
  screen.check(
    services.length === SHOWN && services.every(({ type, packets }) => type === 'SVC' && packets.reply === 0),
    `the gateway has ${services.length} entries, all of one direction (SVC)`,
  );
  const owners = services.map(({ client }) => owned.flat().filter((flow) => flow.client === client));
  const isOwner = ({ type, flags, packets }: Flow): boolean =>
    type === 'OUT' && flags.includes('DSR') && packets.original > 0 && packets.reply > 0;
  screen.check(
    owners.every((flows) => flows.length === 1 && isOwner(flows[0]!)),
    'each is on one node, in both directions, with the VIP that its answers come from (OUT, DSR)',
  );
  screen.check(end.failed === 0, `${end.kept.requests} requests over them, ${end.failed} failed${describeErrors(end)}`);
}

async function openSome(lab: Lab): Promise<{ stop: () => void; ended: Promise<LoadReport> }> {
  let stop = (): void => {};
  let ended: Promise<LoadReport> | undefined;
  await new Promise<void>((resolve, reject) => {
    ended = load(lab, WEB_PORT, ['--parallel', '0', '--kept', String(SHOWN)], {
      started: (child) => {
        stop = () => child.kill('SIGTERM');
      },
      onReport: ({ kept }) => {
        if (kept.open === SHOWN && kept.requests >= SHOWN_REQUESTS) resolve();
      },
    });
    ended.then(() => resolve(), reject);
  });
  return { stop, ended: ended! };
}

async function showSpeed(lab: Lab, screen: Screen): Promise<void> {
  screen.heading('Speed: five hosts, one machine');
  if (!(await startIperf(lab))) {
    screen.line('  no iperf3 here, so no bulk transfer is measured (apt install iperf3)');
    return;
  }
  for (const [what, options] of [
    ['download', ['-R']],
    ['upload', []],
  ] as const) {
    const { sum, error } = await screen.during(`TCP, one stream, ${what}`, iperf(lab, options));
    const gigabits = (sum?.bits_per_second ?? 0) / 1e9;
    screen.check(gigabits > 0, `TCP, one stream, ${what}: ${gigabits.toFixed(2)} Gb/s${error}`);
  }
}
