import { readFileSync } from 'node:fs';
import { backendAddress, GATEWAY_ADDRESS, type Lab, VIP, type WeirProcess } from '../lib/lab/topology.js';
import { IPERF, type Measure, SINK } from './measures.js';
import type { Contender, Section } from './section.js';

/*
 * Direct server return, against the kernel that routes between client and backend without anybody in between, and against weir's own dnat.
 *
 *     routing:  client --- router --- b1
 *     dsr:      client --- router --- gw: weir --- b1: weir, role node       and back by the router
 *     dnat:     client --- gw: weir --- b1                                   and back
 */

const DOES: readonly Measure[] = ['bulk', 'download', 'udp'];

/** @param oneArm a lab of shape one-arm @param inline one of shape inline */
export function dsr(oneArm: Lab, inline: Lab): Section {
  const contenders: Contender[] = [
    { name: 'routing', lab: oneArm, target: backendAddress(1), does: DOES, start: async () => async () => {} },
    {
      name: 'dsr',
      lab: oneArm,
      target: VIP,
      does: DOES,
      async start() {
        const gateway = await oneArm.startWeir(`tunnel: { address: ${GATEWAY_ADDRESS} }\n${services('dsr')}`);
        const node = await oneArm.startWeir(
          `role: node\ntunnel: { address: ${backendAddress(1)} }\n${services('dsr')}`,
          {
            role: 'b1',
            name: 'weir-b1',
          },
        );
        const before = [gateway, node].map(residentMiB);
        return async () => {
          const [first, second] = [gateway, node].map((weir, i) => `${before[i]} -> ${residentMiB(weir)} MiB`);
          console.error(`memory: gateway ${first}, node ${second}`);
          await Promise.all([gateway.stop(), node.stop()]);
        };
      },
    },
    {
      name: 'dnat',
      lab: inline,
      target: VIP,
      does: DOES,
      async start() {
        const weir = await inline.startWeir(services('dnat'));
        return async () => void (await weir.stop());
      },
    },
  ];
  return {
    contenders,
    ratios: [
      ['dsr', 'routing'],
      ['dsr', 'dnat'],
    ],
  };
}

function services(mode: 'dsr' | 'dnat'): string {
  const service = (name: string, port: number, protocol: string): string =>
    `  - { name: ${name}, address: ${VIP}, port: ${port}, protocol: ${protocol}, mode: ${mode}, backends: [{ address: ${backendAddress(1)}, port: ${port} }] }\n`;
  return `admin: { listen: off }\nservices:\n${service('bulk', IPERF, 'tcp')}${service('sink', SINK, 'udp')}`;
}

function residentMiB({ pid }: WeirProcess): number {
  const pages = Number(readFileSync(`/proc/${pid}/statm`, 'utf8').split(' ')[1]);
  return Math.round((pages * 4096) / (1 << 20));
}
