import { WeirError } from '../../base/errors.js';
import type { Config } from '../../config/config.js';
import { parseConfig, requireConfig } from '../../config/load.js';
import { Check, type Finding } from './finding.js';
import { checkHost } from './host-checks.js';
import { type HostFacts, readHostFacts } from './host-facts.js';
import {
  canMend,
  checkAddresses,
  checkDevice,
  checkListen,
  checkPathFilters,
  checkRoutes,
  checkSettings,
  checkTunnel,
  checkWidths,
} from './network-checks.js';
import { type NetworkFacts, readNetworkFacts } from './network-facts.js';
import { checkRules } from './rule-checks.js';

/**
 * `weir doctor`: why a weir would not start here, or its packets not pass.
 *
 *     host-facts, network-facts   what is true, read in one go; nothing is interpreted and nothing changed
 *     host-checks, network-checks, rule-checks   what that means for a configuration: pure, one finding per check
 *
 * What `weir run` sets up by itself (routes, rules, sysctls it may write) is no complaint. What could not be seen, for want of permission
 * or of a tool, is a finding of its own (`skip`), never a silent "ok".
 */

/**
 * @param configPath null: a gateway without services, on which nothing depends
 * @throws WeirError CONFIG_INVALID, CONFIG_UNREADABLE
 */
export async function examine(configPath: string | null): Promise<Finding[]> {
  const config = configPath === null ? parseConfig('services: []').config! : requireConfig(configPath);
  const host = readHostFacts();
  const tool = new Check('iproute2', 'weir sets up routes and rules through ip');
  let network: NetworkFacts;
  try {
    network = await readNetworkFacts(config);
  } catch (error) {
    if (!(error instanceof WeirError)) throw error;
    return [...checkHost(config, host, false), tool.fail(error.message, 'apt-get install -y iproute2')];
  }
  return judge(config, host, network, tool);
}

function judge(config: Config, host: HostFacts, network: NetworkFacts, tool: Check): Finding[] {
  const isRunning = network.kernel.links.get(config.device.name)?.carrier === true;
  return [
    ...checkHost(config, host, isRunning),
    tool.ok('ip is iproute2’s'),
    checkDevice(config, network),
    ...checkListen(config, network),
    ...checkSettings(config, network, canMend(config, host.canSetSysctls)),
    checkPathFilters(config, network),
    ...checkAddresses(config, network),
    ...checkRoutes(config, network),
    ...checkWidths(config, network),
    ...checkTunnel(config, network),
    ...checkRules(config, network),
  ];
}
