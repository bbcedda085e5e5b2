import { WeirError } from '../base/errors.js';
import { formatRemark } from '../bridge/draft.js';
import { importManifests, requireServices } from '../bridge/import.js';
import type { KubernetesOptions } from '../bridge/kubernetes.js';
import { findManifests } from '../bridge/manifest-files.js';
import type { ServiceConfig } from '../config/config.js';
import { ConfigWatch } from '../control/config-watch.js';
import { countParts, plural, sayCounts } from '../control/summary.js';
import { replaceFile } from './replace-file.js';
import { report } from './report.js';

/**
 * Keeps a file in step with manifests until SIGINT or SIGTERM, and says of each change on standard error what it was. What cannot be
 * imported leaves the file as it is; a warning is said once, until it was gone.
 */
export async function watchKubernetes(
  paths: readonly string[],
  base: string | undefined,
  options: KubernetesOptions,
  out: string,
  allowEmpty: boolean,
): Promise<void> {
  let before: readonly ServiceConfig[] | undefined;
  let said = new Set<string>();

  const update = async (): Promise<void> => {
    try {
      const imported = importManifests(paths, base, options);
      const { text, config, warnings } = imported;
      const lines = warnings.map(formatRemark);
      for (const line of lines) if (!said.has(line)) console.error(`warning: ${line}`);
      said = new Set(lines);
      if (!allowEmpty) requireServices(imported);
      const isNew = replaceFile(out, text);
      const counts = sayCounts(countParts(config));
      const change = before === undefined ? '' : sayChange(before, config.services);
      const losses = warnings.length === 0 ? '' : `, ${plural(warnings.length, 'warning')}`;
      if (isNew || before === undefined)
        console.error(`${out} ${isNew ? 'written' : 'is as it should be'}: ${counts}${change}${losses}`);
      before = config.services;
    } catch (error) {
      if (!(error instanceof WeirError)) throw error;
      report(error);
      console.error(`${out} is left as it was`);
    }
  };

  const watch = new ConfigWatch({
    path: () => {
      const { files, folders } = findManifests(paths);
      return { files: base === undefined ? files : [...files, base], folders };
    },
    onChange: update,
  });
  await new Promise<void>((resolve) => {
    for (const signal of ['SIGINT', 'SIGTERM'] as const) process.once(signal, resolve);
  });
  await watch.close();
}

/** By identity, as a running weir sees it. */
function sayChange(before: readonly ServiceConfig[], after: readonly ServiceConfig[]): string {
  const old = new Map(before.map((service) => [identityOf(service), JSON.stringify(service)]));
  let [added, changed] = [0, 0];
  for (const service of after) {
    const known = old.get(identityOf(service));
    old.delete(identityOf(service));
    if (known === undefined) added++;
    else if (known !== JSON.stringify(service)) changed++;
  }
  return ` (${added} added, ${changed} changed, ${old.size} removed)`;
}

function identityOf({ address, port, protocol }: ServiceConfig): string {
  return `${address.text}:${port}/${protocol}`;
}
