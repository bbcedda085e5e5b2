import { backendAddress, ECHO_PORT, HTTP_PORT, Lab, VIP } from '../../lib/lab/topology.js';

export interface GatewayOptions {
  readonly engine?: 'auto' | 'io_uring' | 'readwrite';
  readonly offload?: boolean;
  readonly algorithm?: 'random' | 'maglev';
  /** The section of this name, as YAML. */
  readonly conntrack?: string;
  /** Addresses; those of the lab's backends. */
  readonly backends?: readonly string[];
}

/** Ports of the VIP, by dnat and by snat: HTTP, UDP echo, and whatever listens on port IPERF_PORT of the first backend. */
export const PORTS = { dnat: 80, snat: 81, echoDnat: 7, echoSnat: 8, iperf: 5201, iperfSnat: 5202 } as const;

export const IPERF_PORT = 5201;

/** The configuration of the gateway in a test lab. */
export function gatewayConfig(lab: Lab, options: GatewayOptions = {}): string {
  const { engine = 'auto', offload = true, algorithm = 'maglev', conntrack = '{}' } = options;
  const { backends = lab.backends.map((_, i) => backendAddress(i + 1)) } = options;
  const list = (port: number, count = backends.length): string =>
    backends
      .slice(0, count)
      .map((address, i) => `{ name: b${i + 1}, address: ${address}, port: ${port} }`)
      .join(', ');
  const service = (name: string, port: number, protocol: string, mode: string, backends: string): string =>
    `  - { name: ${name}, address: ${VIP}, port: ${port}, protocol: ${protocol}, algorithm: ${algorithm}, mode: ${mode}, backends: [${backends}] }`;
  return [
    `device: { engine: ${engine}, offload: ${offload} }`,
    'snat: { addresses: [10.96.255.1] }',
    `conntrack: ${conntrack}`,
    'admin: { listen: off }',
    'services:',
    service('web', PORTS.dnat, 'tcp', 'dnat', list(HTTP_PORT)),
    service('web-snat', PORTS.snat, 'tcp', 'snat', list(HTTP_PORT)),
    service('echo', PORTS.echoDnat, 'udp', 'dnat', list(ECHO_PORT)),
    service('echo-snat', PORTS.echoSnat, 'udp', 'snat', list(ECHO_PORT)),
    service('iperf', PORTS.iperf, 'tcp', 'dnat', list(IPERF_PORT, 1)),
    service('iperf-snat', PORTS.iperfSnat, 'tcp', 'snat', list(IPERF_PORT, 1)),
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
