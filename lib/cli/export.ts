import { WeirError } from '../base/errors.js';
import { toIptables } from '../bridge/iptables.js';
import { kernelView } from '../bridge/kernel-view.js';
import { toNft } from '../bridge/nft.js';
import { formatProblem, placeFaults, readConfigText, requireConfig } from '../config/load.js';
import { print } from './output.js';

/** What rules can be written for. */
export type Rules = 'iptables' | 'nft';

/**
 * `weir export`: rules on standard output, what they lose on standard error.
 *
 * @throws WeirError EXPORT_REFUSED with a line for everything that rules cannot say
 */
export async function exportRules(rules: Rules, { config: path }: { config: string }): Promise<void> {
  const text = readConfigText(path);
  const { services, refusals, losses } = kernelView(requireConfig(path, text));
  if (refusals.length > 0) {
    const lines = placeFaults(text, refusals).map((problem) => formatProblem(path, problem));
    throw new WeirError('EXPORT_REFUSED', lines.join('\n'));
  }
  for (const loss of placeFaults(text, losses)) console.error(`warning: ${formatProblem(path, loss)}`);
  await print(rules === 'iptables' ? toIptables(services) : toNft(services));
}
