import { backendAddress, ECHO_PORT, HTTP_PORT, VIP } from './topology.js';

/*
 *   10.96.0.10   :80    tcp  web    maglev   -> b1 b2 b3 :8080
 *                :8000  tcp  dice   random   -> b1 b2 b3 :8080
 *                :9000  udp  echo   maglev   -> b1 b2 b3 :9000
 *                :5201  both iperf           -> b1 :5201
 */

export const WEB_PORT = 80;
export const DICE_PORT = 8000;
export const IPERF_PORT = 5201;

/** Weights of web's backends by number; a backend that is not named is not in the file. */
export type Weights = Readonly<Record<number, number>>;

export const ALL_BACKENDS: Weights = { 1: 1, 2: 1, 3: 1 };

/** The configuration of the demo's weir. Only web's backends change. */
export function demoConfig(web: Weights = ALL_BACKENDS): string {
  const all = listBackends(ALL_BACKENDS, HTTP_PORT);
  return `admin: { listen: off }
services:
  - name: web
    address: ${VIP}
    port: ${WEB_PORT}
    protocol: tcp
    algorithm: maglev
    backends:
${listBackends(web, HTTP_PORT)}
  - name: dice
    address: ${VIP}
    port: ${DICE_PORT}
    protocol: tcp
    algorithm: random
    backends:
${all}
  - name: echo
    address: ${VIP}
    port: ${ECHO_PORT}
    protocol: udp
    backends:
${listBackends(ALL_BACKENDS, ECHO_PORT)}
  - name: iperf
    address: ${VIP}
    port: ${IPERF_PORT}
    protocol: tcp
    backends:
${listBackends({ 1: 1 }, IPERF_PORT)}
  - name: iperf-udp
    address: ${VIP}
    port: ${IPERF_PORT}
    protocol: udp
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
