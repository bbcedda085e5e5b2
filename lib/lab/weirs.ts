import { demoConfig, gatewayConfig, type Mode, nodeConfig } from './demo-config.js';
import type { Lab, WeirProcess } from './topology.js';

/** What runs of weir in a lab. */
export interface Weirs {
  /** In the order of the lab's gateways, as the nodes in that of its backends. */
  readonly gateways: readonly WeirProcess[];
  /** None unless the mode is dsr. */
  readonly nodes: readonly WeirProcess[];
}

/**
 * Starts weir wherever a mode takes it, all at a time; resolves when all are ready.
 *
 * @param more of the configuration of a role: sections it does not have
 */
export async function startWeirs(
  lab: Lab,
  mode: Mode,
  more: (role: string) => string | undefined = () => undefined,
): Promise<Weirs> {
  const configure = (role: string, config: string): string =>
    [more(role), config].filter((part) => part !== undefined).join('\n');
  if (mode !== 'dsr') return { gateways: [await lab.startWeir(configure('gw', demoConfig(mode)))], nodes: [] };
  const { plan, gateways, backends } = lab;
  const start = (role: string, config: string): Promise<WeirProcess> =>
    lab.startWeir(configure(role, config), { role, name: `weir-${role}` });
  const all = await Promise.all([
    ...gateways.map((role) => start(role, gatewayConfig(plan, role))),
    ...backends.map((role) => start(role, nodeConfig(plan, role))),
  ]);
  return { gateways: all.slice(0, gateways.length), nodes: all.slice(gateways.length) };
}
