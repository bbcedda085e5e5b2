import { backendAddress, ECHO_PORT, HTTP_PORT, Lab, VIP } from '../../lib/lab/topology.js';

export interface GatewayOptions {
  readonly engine?: 'auto' | 'io_uring' | 'readwrite';
  readonly offload?: boolean;
  readonly algorithm?: 'random' | 'maglev';
}

/** Ports of the VIP: HTTP and UDP echo by dnat and by snat, and iperf3 on the first backend. */
export const PORTS = { dnat: 80, snat: 81, echoDnat: 7, echoSnat: 8, iperf: 5201 } as const;

/** The configuration of the gateway in a test lab. */
export function gatewayConfig(
  lab: Lab,
  { engine = 'auto', offload = true, algorithm = 'maglev' }: GatewayOptions = {},
): string {
  const list = (port: number, count = lab.backends.length): string =>
    lab.backends
      .slice(0, count)
      .map((name, i) => `{ name: ${name}, address: ${backendAddress(i + 1)}, port: ${port} }`)
      .join(', ');
  const service = (name: string, port: number, protocol: string, mode: string, backends: string): string =>
    `  - { name: ${name}, address: ${VIP}, port: ${port}, protocol: ${protocol}, algorithm: ${algorithm}, mode: ${mode}, backends: [${backends}] }`;
  return [
    `device: { engine: ${engine}, offload: ${offload} }`,
    'snat: { addresses: [10.96.255.1] }',
    'admin: { listen: off }',
    'services:',
    service('web', PORTS.dnat, 'tcp', 'dnat', list(HTTP_PORT)),
    service('web-snat', PORTS.snat, 'tcp', 'snat', list(HTTP_PORT)),
    service('echo', PORTS.echoDnat, 'udp', 'dnat', list(ECHO_PORT)),
    service('echo-snat', PORTS.echoSnat, 'udp', 'snat', list(ECHO_PORT)),
    service('iperf', PORTS.iperf, 'tcp', 'dnat', list(5201, 1)),
    '',
  ].join('\n');
}

/** A lab with its servers running, and a prefix no other test has. */
export async function createGatewayLab(): Promise<Lab> {
  const weir = process.env.WEIR_COMMAND?.split(' ');
  const lab = await Lab.create({ prefix: `weir-t${process.pid}`, ...(weir ? { weir } : {}) });
  await lab.startServers();
  return lab;
}
