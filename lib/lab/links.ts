import { must } from './process.js';
import { rolesOf } from './shapes.js';
import type { Lab } from './topology.js';

/** What has crossed a host's link since the lab was built. A super-packet counts as one packet with all its bytes. */
export interface LinkCount {
  readonly bytesTo: number;
  readonly bytesFrom: number;
  readonly packetsTo: number;
  readonly packetsFrom: number;
}

interface Statistics {
  readonly ifname: string;
  readonly stats64: Readonly<Record<'rx' | 'tx', { readonly bytes: number; readonly packets: number }>>;
}

/** The counters of every link, as the hub's end of it has them, by the role at the other end. */
export async function countLinks(lab: Lab): Promise<Readonly<Record<string, LinkCount>>> {
  const { hub } = lab.plan;
  const links = JSON.parse(await must('ip', ['-n', lab.namespace(hub), '-s', '-j', 'link'])) as Statistics[];
  const roles = new Set(rolesOf(lab.plan));
  return Object.fromEntries(
    links
      .filter(({ ifname }) => roles.has(ifname))
      .map(({ ifname, stats64: { rx, tx } }) => [
        ifname,
        { bytesTo: tx.bytes, bytesFrom: rx.bytes, packetsTo: tx.packets, packetsFrom: rx.packets },
      ]),
  );
}
