import type { Test } from 'tap';
import { MemoryDevice } from '../../lib/io/memory-device.js';
import { datagramsOf, type Tunnelled, untunnel } from '../fixtures/geneve.js';
import { describe } from '../fixtures/packet-text.js';
import { verifyChecksums } from '../fixtures/packets.js';
import type { Outcome } from './pipeline.js';

/**
 * Direct server return, the gateway's half: 10.1.0.2 -> 10.96.0.10 -> tunnel from 192.0.2.1 to 192.0.2.11 or .12 -> 10.2.0.11
 * or .12.
 */

export const B1 = '{ name: b1, address: 10.2.0.11, port: 8080, node: 192.0.2.11 }';
export const B2 = '{ name: b2, address: 10.2.0.12, port: 8080, node: 192.0.2.12 }';

export function config({ tunnel = '', top = '', web = '', dns = '', backends = B1 } = {}): string {
  return `${top}
tunnel: { address: 192.0.2.1, ${tunnel} }
services:
  - { name: web, address: 10.96.0.10, port: 80, protocol: tcp, mode: dsr, ${web} backends: [${backends}] }
  - { name: dns, address: 10.96.0.10, port: 53, protocol: udp, mode: dsr, ${dns} backends: [${backends}] }
`;
}

export const client = { src: '10.1.0.2', sport: 40000, dst: '10.96.0.10', dport: 80 };
export const inner = { ...client, dst: '10.2.0.11', dport: 8080 };
export const query = { ...client, sport: 5000, dport: 53 };
export const innerQuery = { ...inner, sport: 5000 };

export class OneByOne extends MemoryDevice {
  override readonly features = { engine: 'memory', vnetHeader: true, udpSegmentation: false };
}

/** What was forwarded, datagram by datagram; each is judged on the way. */
export function inside(t: Test, { verdict, reason, out }: Outcome): Tunnelled[] {
  t.equal(verdict, 'forward', reason);
  return out.flatMap(datagramsOf).map((datagram) => {
    const found = untunnel(datagram);
    t.match(found, { src: '192.0.2.1', dport: 6081, ttl: 64, df: true });
    t.same(verifyChecksums(found.inner), [], describe(found.inner));
    return found;
  });
}

export function only(t: Test, outcome: Outcome): Tunnelled {
  const all = inside(t, outcome);
  t.equal(all.length, 1);
  return all[0]!;
}
