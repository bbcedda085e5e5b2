import { requireConfig } from '../config/load.js';
import { cleanNetwork, describeNetwork } from '../control/network.js';
import { formatPlan } from '../control/network-plan.js';
import { print, printJson } from './output.js';

/** `weir net` */
export async function net({
  config: file,
  clean,
  output,
}: {
  config: string;
  clean?: boolean;
  output: 'text' | 'json';
}): Promise<void> {
  const config = requireConfig(file);
  if (!clean) {
    const plan = await describeNetwork(config);
    await (output === 'json' ? printJson(plan) : print(formatPlan(plan)));
    return;
  }
  const { commands } = await cleanNetwork(config.device.name);
  if (output === 'json') await printJson({ commands });
  else await print(commands.length === 0 ? 'nothing of weir’s was left\n' : `${commands.join('\n')}\n`);
}
