import {
  backendAddress,
  ECHO_PORT,
  GATEWAY_ADDRESS,
  HTTP_PORT,
  Lab,
  VIP,
  type WeirProcess,
} from '../../lib/lab/topology.js';

export const IPERF_PORT = 5201;

/** Direct server return in a lab: services web (80), echo (7, UDP) and iperf. `tunnel` is more of that section. */
export function gatewayConfig(lab: Lab, { tunnel = '', engine = 'auto', offload = true }: GatewayOptions = {}): string {
  return `
device: { engine: ${engine}, offload: ${offload} }
tunnel: { address: ${GATEWAY_ADDRESS}${tunnel} }
admin: { listen: off }
${services(lab)}`;
}

export interface GatewayOptions {
  readonly tunnel?: string;
  readonly engine?: string;
  readonly offload?: boolean;
}

export interface NodeOptions extends GatewayOptions {
  /** The gateway's services as well; without them the node learns. */
  readonly knows?: boolean;
}

export function nodeConfig(lab: Lab, number: number, options: NodeOptions): string {
  const { tunnel = '', engine = 'auto', offload = true, knows = false } = options;
  return `
role: node
device: { engine: ${engine}, offload: ${offload} }
tunnel: { address: ${backendAddress(number)}${tunnel} }
admin: { listen: off }
${knows ? services(lab) : ''}`;
}

function services(lab: Lab): string {
  const list = (port: number, count = lab.backends.length): string =>
    lab.backends
      .slice(0, count)
      .map((name, i) => `{ name: ${name}, address: ${backendAddress(i + 1)}, port: ${port} }`)
      .join(', ');
  return `
services:
  - { name: web, address: ${VIP}, port: 80, mode: dsr, backends: [${list(HTTP_PORT)}] }
  - { name: echo, address: ${VIP}, port: 7, protocol: udp, mode: dsr, backends: [${list(ECHO_PORT)}] }
  - { name: iperf, address: ${VIP}, port: ${IPERF_PORT}, mode: dsr, backends: [${list(IPERF_PORT, 1)}] }
`;
}

/** A lab in which answers go past the gateway, with its servers running, and a prefix no other test has. */
export async function createDsrLab(): Promise<Lab> {
  const lab = await Lab.create({ prefix: `weir-t${process.pid}`, shape: 'one-arm' });
  await lab.startServers();
  return lab;
}

/** A node beside the servers of each backend. */
export function startNodes(lab: Lab, options: NodeOptions = {}): Promise<WeirProcess[]> {
  return Promise.all(
    lab.backends.map((name, i) => lab.startWeir(nodeConfig(lab, i + 1, options), { role: name, name: `weir-${name}` })),
  );
}
