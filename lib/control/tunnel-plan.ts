import type { Config } from '../config/config.js';
import type { Surroundings } from './network-plan.js';

/**
 * What tunnels ask of the host besides. At a gateway the kernel routes outer packets, whose source is `tunnel.address` and so,
 * most often, one of the host's own. It takes those from the device under two conditions: `accept_local`, and no reverse path filter
 * on the device. Where `conf.all` sets one for all of them the device cannot be without, but loose is enough if it has an
 * address: any will do, and the tunnel's is the host's already.
 */

/** Whether packets leave this gateway through tunnels. */
export function usesTunnel({ role, services }: Config): boolean {
  return role === 'gateway' && services.some(({ mode }) => mode === 'dsr');
}

/** The address the device needs, or null. @param allPathFilter `rp_filter` of `conf.all` */
export function deviceAddress(config: Config, allPathFilter: number): string | null {
  const needed = allPathFilter !== 0 && (usesTunnel(config) || config.role === 'node');
  return needed ? (config.tunnel.address?.text ?? null) : null;
}

/** The addresses whose way out `tunnelNotes` judges by. */
export function tunnelAddresses(config: Config): string[] {
  if (!usesTunnel(config) || config.tunnel.address === null) return [];
  return [config.tunnel.address.text, ...nodesOf(config)];
}

/** What an operator should know of the way to the nodes. */
export function tunnelNotes(config: Config, { hops, links }: Surroundings): string[] {
  const { device, tunnel } = config;
  if (!usesTunnel(config) || tunnel.address === null) return [];
  const notes = new Set<string>();
  if (hops.get(tunnel.address.text)?.local !== true) {
    notes.add(
      `tunnel.address ${tunnel.address.text} is no address of this host: what routers say about the path to nodes does not come here`,
    );
  }
  for (const node of nodesOf(config)) {
    const hop = hops.get(node);
    if (hop === undefined) notes.add(`there is no route to node ${node}`);
    else if (hop.dev === device.name) notes.add(`the route to node ${node} leads back into ${device.name}`);
    else if (!hop.local) {
      const mtu = links.get(hop.dev)?.mtu ?? device.mtu;
      if (mtu < device.mtu) notes.add(narrowLink(hop.dev, mtu, config));
    }
  }
  return [...notes];
}

/** The note about an interface that takes less than the device gives. */
function narrowLink(name: string, mtu: number, { device }: Config): string {
  return `${name} has an MTU of ${mtu}, ${device.name} of ${device.mtu}: set device.mtu to ${mtu}`;
}

function nodesOf({ services }: Config): Set<string> {
  const dsr = services.filter(({ mode }) => mode === 'dsr');
  return new Set(dsr.flatMap(({ backends }) => backends.map(({ node }) => node.text)));
}
