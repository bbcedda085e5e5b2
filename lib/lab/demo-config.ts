import { backendAddress, ECHO_PORT, HTTP_PORT, VIP } from './addresses.js';
import type { Plan } from './shapes.js';

/*
 *   10.96.0.10   :80    tcp  web    maglev   -> b1 b2 b3 :8080
 *                :8000  tcp  dice   random   -> b1 b2 b3 :8080
 *                :9000  udp  echo   maglev   -> b1 b2 b3 :9000
 *                :5201  both iperf           -> b1 :5201
 */

export const WEB_PORT = 80;
export const DICE_PORT = 8000;
export const IPERF_PORT = 5201;
const SNAT_ADDRESS = '10.96.255.1';

export type Mode = 'dnat' | 'snat' | 'dsr';

/** Weights of web's backends by number; a backend that is not named is not in the file. */
export type Weights = Readonly<Record<number, number>>;

export const ALL_BACKENDS: Weights = { 1: 1, 2: 1, 3: 1 };

/** The configuration of a demo's gateway in mode dnat or snat. Only web's backends change. */
export function demoConfig(mode: Mode, web: Weights = ALL_BACKENDS): string {
  const snat = mode === 'snat' ? `snat: { addresses: [${SNAT_ADDRESS}] }\n` : '';
  return `admin: { listen: off }\n${snat}${services(mode, web)}`;
}

/** The same for one of a one-arm lab's gateways, mode dsr. */
export function gatewayConfig({ lan }: Plan, role: string): string {
  return `tunnel: { address: ${lan[role]} }\nadmin: { listen: off }\n${services('dsr', ALL_BACKENDS)}`;
}

/** Of the node on a backend. It need not know the services, but so its lists have names. */
export function nodeConfig({ lan, gateways }: Plan, role: string): string {
  const peers = gateways.map((each) => lan[each]).join(', ');
  return `role: node
tunnel: { address: ${lan[role]}, peers: [${peers}] }
admin: { listen: off }
${services('dsr', ALL_BACKENDS)}`;
}

function services(mode: Mode, web: Weights): string {
  const all = listBackends(ALL_BACKENDS, HTTP_PORT);
  return `services:
  - name: web
    address: ${VIP}
    port: ${WEB_PORT}
    protocol: tcp
    algorithm: maglev
    mode: ${mode}
    backends:
${listBackends(web, HTTP_PORT)}
  - name: dice
    address: ${VIP}
    port: ${DICE_PORT}
    protocol: tcp
    algorithm: random
    mode: ${mode}
    backends:
${all}
  - name: echo
    address: ${VIP}
    port: ${ECHO_PORT}
    protocol: udp
    mode: ${mode}
    backends:
${listBackends(ALL_BACKENDS, ECHO_PORT)}
  - name: iperf
    address: ${VIP}
    port: ${IPERF_PORT}
    protocol: tcp
    mode: ${mode}
    backends:
${listBackends({ 1: 1 }, IPERF_PORT)}
  - name: iperf-udp
    address: ${VIP}
    port: ${IPERF_PORT}
    protocol: udp
    mode: ${mode}
    backends:
${listBackends({ 1: 1 }, IPERF_PORT)}
`;
}

function listBackends(weights: Weights, port: number): string {
  return Object.entries(weights)
    .map(([number, weight]) => {
      const address = backendAddress(Number(number));
      return `      - { name: b${number}, address: ${address}, port: ${port}, weight: ${weight} }`;
    })
    .join('\n');
}
