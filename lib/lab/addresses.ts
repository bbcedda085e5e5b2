/*
 *   10.1.0.0/24    client's net    .1 whoever routes     .2 client
 *   10.2.0.0/24    LAN             .1 gw  .2 gw2 ...     .11 b1  .12 b2 ...     .254 router
 *   10.96.0.0/16   VIPs and snat addresses
 */

export const VIP = '10.96.0.10';
/** Where VIPs and snat addresses are taken from. */
export const SERVICE_NET = '10.96.0.0/16';
export const CLIENT_ADDRESS = '10.1.0.2';
/** Of whoever routes for the client. */
export const CLIENT_ROUTER_ADDRESS = '10.1.0.1';
/** Of the router on the LAN, where there is one. */
export const ROUTER_ADDRESS = '10.2.0.254';
export const GATEWAY_ADDRESS = gatewayAddress(1);
/** Ports of the servers in each backend. */
export const HTTP_PORT = 8080;
export const ECHO_PORT = 9000;

export const MAX_GATEWAYS = 9;
export const MAX_BACKENDS = 200;

/** The address on the LAN of gateway 1, 2, ... */
export function gatewayAddress(number: number): string {
  return `10.2.0.${number}`;
}

/** The address of backend 1, 2, ... */
export function backendAddress(number: number): string {
  return `10.2.0.${10 + number}`;
}
