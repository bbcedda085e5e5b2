import { setTimeout as sleep } from 'node:timers/promises';
import { WEB_PORT } from './demo-config.js';
import { type Flow, listFlows, runningBy } from './demo-dsr.js';
import { describeErrors, describeStart, showStop, startAll } from './demo-stages.js';
import { countLinks, type LinkCount } from './links.js';
import type { Screen } from './screen.js';
import type { Lab, WeirProcess } from './topology.js';
import { transfers } from './traffic.js';
import type { TransferReport } from './transfers.js';
import { startWeirs, type Weirs } from './weirs.js';

/*
 *   client ---- router ---+--- gw     kill -9 in the middle of it
 *                         +--- gw2    has no entry for what comes over, and picks the same backends
 *                         +--- b1 b2 b3 have all entries, and answer past either gateway
 *
 * gw takes with it what it had in hand, and what the router goes on sending to it. A router learns of a dead neighbour from
 * its silence: by BFD after three missed messages, one every 100 ms. This one is told by the demo, as long after the kill.
 */

const RATE = 512 * 1024;
const SECONDS = 8;
const KILL_AFTER_ROWS = 3;
const DETECTION_MS = 300;
const MORE_ROWS = 60;
const LIMIT_MS = 120_000;
const BAR_COLUMNS = 8;

export interface FailoverOptions {
  /** At a time. */
  readonly downloads: number;
}

/** Everything between the building of a one-arm lab with two gateways and its removal. */
export async function showFailover(
  lab: Lab,
  { downloads }: FailoverOptions,
  screen: Screen,
  startedMs: number,
): Promise<void> {
  const weirs = await startAll(lab, screen, startedMs, () => startWeirs(lab, 'dsr'));
  describeStart(weirs, screen);
  screen.line(
    `  both gateways have one seed and one list of backends; the router spreads connections over them (ECMP)`,
  );
  checkMove(await showKill(lab, weirs, downloads, screen), downloads, screen);
  const { gw: _, ...left } = runningBy(lab, weirs);
  await showStop(lab, left, screen);
}

interface Outcome {
  readonly report: TransferReport;
  /** The longest that a download waited for its next bytes, once gw was dead. */
  readonly pauseMs: number;
  /** Of each gateway, as gw was about to be killed. */
  readonly before: readonly [Flow[], Flow[]];
  /** Of gw2, when all have ended: their entries stay for a while. Before, some clients may have had nothing to acknowledge yet. */
  readonly after: readonly Flow[];
}

async function showKill(lab: Lab, { gateways }: Weirs, downloads: number, screen: Screen): Promise<Outcome> {
  const [gw, gw2] = gateways as readonly [WeirProcess, WeirProcess];
  const size = `${(RATE * SECONDS) / 1024 / 1024} MiB, ${RATE / 1024} KiB/s each`;
  screen.heading(`Live: ${downloads} downloads of ${size}; gw is killed in the middle`);
  const watch = await startDownloads(lab, downloads, screen);
  await watch.rows(KILL_AFTER_ROWS - 1);
  const listing = Promise.all([listFlows(gw), listFlows(gw2)]);
  await watch.rows(1);
  const before = await listing;
  watch.forgetPauses();
  await gw.stop('SIGKILL');
  screen.line(`         ${screen.paint('✗ gw is killed (kill -9)', '31')}; the router does not know yet`);
  await sleep(DETECTION_MS);
  await lab.routeToGateways(['gw2']);
  screen.line(
    `         the router has not heard gw for ${DETECTION_MS} ms (BFD, 3 x 100 ms) and sends everything to gw2`,
  );
  await watch.rows(MORE_ROWS);
  const report = await screen.during('letting the last ones finish', watch.ended);
  return { report, pauseMs: watch.pauseMs(), before, after: await listFlows(gw2) };
}

interface Watch {
  /** Shows so many, one a second, or fewer when the downloads end before. */
  readonly rows: (count: number) => Promise<void>;
  readonly ended: Promise<TransferReport>;
  /** The longest pause of any download since the start, or since they were forgotten. */
  readonly pauseMs: () => number;
  readonly forgetPauses: () => void;
}

/** Resolves when the downloads have begun. */
async function startDownloads(lab: Lab, downloads: number, screen: Screen): Promise<Watch> {
  const options = ['--downloads', String(downloads), '--bytes', String(RATE * SECONDS), '--rate', String(RATE)];
  let now: TransferReport | undefined;
  let pauseMs = 0;
  let ended: Promise<TransferReport> | undefined;
  await new Promise<void>((resolve, reject) => {
    ended = transfers(lab, WEB_PORT, options, {
      onReport: (report) => {
        now = report;
        pauseMs = Math.max(pauseMs, report.longestPauseMs);
        resolve();
      },
      timeoutMs: LIMIT_MS,
    });
    ended.then(() => resolve(), reject);
  });
  let isOver = false;
  const end = (): void => {
    isOver = true;
  };
  const over = ended!.then(end, end);
  const sample = async (): Promise<Sample> => {
    const links = await countLinks(lab);
    return { report: now!, links, atMs: performance.now() };
  };
  let shown = await sample();
  const rows = async (count: number): Promise<void> => {
    for (let i = 0; i < count; i++) {
      await Promise.race([sleep(shown.atMs + 1000 - performance.now()), over]);
      if (isOver) return;
      const next = await sample();
      screen.line(row(shown, next, downloads, screen));
      shown = next;
    }
  };
  const forgetPauses = (): void => {
    pauseMs = 0;
  };
  return { rows, ended: ended!, pauseMs: () => pauseMs, forgetPauses };
}

interface Sample {
  readonly report: TransferReport;
  readonly links: Readonly<Record<string, LinkCount>>;
  readonly atMs: number;
}

function row(from: Sample, to: Sample, downloads: number, screen: Screen): string {
  const { report } = to;
  const seconds = (to.atMs - from.atMs) / 1000;
  const rate = (report.bytes - from.report.bytes) / seconds;
  const rates = ['gw', 'gw2'].map((role) => (to.links[role]!.packetsFrom - from.links[role]!.packetsFrom) / seconds);
  const bars = ['gw', 'gw2'].map((role, i) => {
    const bar = screen.bar(rates[i]!, rates[0]! + rates[1]!, BAR_COLUMNS, i);
    return `${role} ${bar} ${String(Math.round(rates[i]!)).padStart(5)}/s`;
  });
  const arrived = `${screen.bar(rate, downloads * RATE, BAR_COLUMNS, 2)} ${(rate / 1e6).toFixed(1).padStart(5)} MB/s`;
  const elapsed = screen.dim(`${(report.elapsedMs / 1000).toFixed(1).padStart(4)} s`);
  const state = `${report.running} run, ${report.whole} whole, ${report.broken} broken`;
  return `  ${elapsed}  ${arrived}   ${bars.join('   ')}   ${state}`;
}

function checkMove({ report, pauseMs, before, after }: Outcome, downloads: number, screen: Screen): void {
  const [onGw, onGw2] = before;
  screen.check(
    onGw.length > 0 && onGw2.length > 0 && onGw.length + onGw2.length === downloads,
    `gw had ${onGw.length} of the ${downloads} connections when it was killed, gw2 the other ${onGw2.length}`,
  );
  const backendOf = new Map(after.map(({ client, backend }) => [client, backend]));
  const same = onGw.filter(({ client, backend }) => backendOf.get(client) === backend);
  screen.check(
    same.length === onGw.length,
    `gw2, which had no entry for these ${onGw.length}, sent ${same.length} of them to the backend they had`,
  );
  const { broken, whole, errors } = report;
  screen.check(
    broken === 0 && whole === downloads,
    `${broken} of ${downloads} broken${describeErrors({ failed: broken, errors })}: ${whole} are whole, by length and SHA-256`,
  );
  screen.line(screen.dim(`    after that none waited longer than ${pauseMs} ms for its next bytes`));
}
