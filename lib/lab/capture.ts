import { accessSync, constants, mkdirSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { WeirError } from '../base/errors.js';
import { writeFault } from '../base/file-faults.js';
import { isInUserNamespace } from './privilege.js';
import { readLines, run, type ServiceProcess, waitForLine } from './process.js';
import { rolesOf } from './shapes.js';
import type { Lab } from './topology.js';

/*
 *   client ---[client-router.pcap]--- router ---[router-gw.pcap]--- gw        a tcpdump per link, at the hub's end of it
 *                                            ---[router-b1.pcap]--- b1
 *
 * The hub is where all links end, so a packet from one host to another is in two files. What crosses a link of the lab may be a
 * super-packet of 64 KiB: the file has its beginning, which holds all the headers, and its length.
 */

const SNAP_BYTES = 256;
/** For each link, between the kernel and tcpdump. */
const BUFFER_KIB = 8192;
/** The kernel hands over what it has collected once a second. */
const DELIVERY_MS = 1100;

export interface Recording {
  readonly files: readonly string[];
  /** Ends it when all that has been sent is in the files. @returns packets, and how many tcpdump was too slow for */
  readonly stop: () => Promise<{ packets: number; missed: number; bytes: number }>;
}

/** @throws WeirError MISSING_TOOL without tcpdump */
export async function checkCapture(): Promise<void> {
  await run('tcpdump', ['--version']);
}

/**
 * Records every link of a lab; resolves when the recording runs. The files are whole when it was stopped, and when the lab was
 * taken down.
 *
 * @param directory made when it is not there
 * @throws WeirError OUTPUT_FAILED when it cannot be written to, LAB_FAILED
 */
export async function record(lab: Lab, directory: string): Promise<Recording> {
  try {
    mkdirSync(directory, { recursive: true });
    accessSync(directory, constants.W_OK);
  } catch (error) {
    const { why, remedy } = writeFault(directory, error);
    throw new WeirError('OUTPUT_FAILED', `captures cannot be put into ${directory}: ${why}`, remedy, error);
  }
  const { hub } = lab.plan;
  const links = rolesOf(lab.plan).filter((role) => role !== hub);
  const files = links.map((role) => join(directory, `${role === 'client' ? `client-${hub}` : `${hub}-${role}`}.pcap`));
  const watchers = links.map((role, i) => watch(lab, role, files[i]!));
  const started = watchers.map((watcher) => waitForLine(watcher, 'tcpdump', (line) => line.includes('listening on')));
  await Promise.all(started).catch((error: Error) => {
    if (!isInUserNamespace()) throw error;
    throw new WeirError('NO_PERMISSION', `--pcap needs root here: ${error.message}`, 'Run it with sudo.');
  });
  const stop = async (): ReturnType<Recording['stop']> => {
    await sleep(DELIVERY_MS);
    await Promise.all(watchers.map((watcher) => lab.end(watcher)));
    const said = watchers.flatMap(({ logPath }) => readLines(logPath));
    const sum = (what: RegExp): number => said.reduce((total, line) => total + Number(what.exec(line)?.[1] ?? 0), 0);
    const bytes = files.reduce((total, file) => total + statSync(file).size, 0);
    return { packets: sum(/^(\d+) packets? captured/), missed: sum(/^(\d+) packets? dropped by kernel/), bytes };
  };
  return { files, stop };
}

/**
 * Its output is a file that is opened here: tcpdump itself may be confined. Most builds become a user of their own when root runs
 * them, unless told not to; in a user namespace, where there is no other, they refuse either way, and those that do not change
 * users run.
 */
function watch(lab: Lab, role: string, file: string): ServiceProcess {
  const limits = ['-s', String(SNAP_BYTES), '-B', String(BUFFER_KIB)];
  const user = isInUserNamespace() ? [] : ['-Z', 'root'];
  const args = ['-i', role, '-n', ...limits, '-U', ...user, '-w', '-'];
  return lab.spawn(lab.plan.hub, `tcpdump-${role}`, 'tcpdump', args, file);
}
