import { WeirError } from '../base/errors.js';
import { formatRemark } from '../bridge/draft.js';
import { type Imported, importIpvs, importManifests, requireServices } from '../bridge/import.js';
import { STANDARD_INPUT } from '../bridge/manifest-files.js';
import { countParts, sayCounts } from '../control/summary.js';
import { watchKubernetes } from './import-watch.js';
import { print } from './output.js';
import { replaceFile } from './replace-file.js';
import { Exit } from './report.js';

export interface ImportOptions {
  /** A configuration whose other sections are kept. */
  readonly base?: string;
  /** Standard output when absent. */
  readonly out?: string;
  /** Warnings are failures. */
  readonly strict?: boolean;
  /** An input without services is no mistake. */
  readonly allowEmpty?: boolean;
}

/** `weir import ipvs` */
export function ipvs(path: string, options: ImportOptions): Promise<void> {
  return deliver(importIpvs(path, options.base), options);
}

/** `weir import kubernetes` */
export async function kubernetes(
  paths: readonly string[],
  options: ImportOptions & { readonly node?: string; readonly watch?: boolean },
): Promise<void> {
  const { base, out, node, strict, watch } = options;
  const ofNode = node === undefined ? {} : { node };
  if (!watch) return deliver(importManifests(paths, base, ofNode), options);
  if (out === undefined)
    throw new WeirError('USAGE', '--watch has nothing to keep in step', 'Name a file with -O FILE.');
  if (paths.includes(STANDARD_INPUT))
    throw new WeirError('USAGE', 'standard input cannot be watched', 'Name files or folders.');
  if (strict) throw new WeirError('USAGE', '--watch does not end for a warning', 'Leave out --strict.');
  await watchKubernetes(paths, base, ofNode, out, options.allowEmpty ?? false);
}

/** @throws WeirError USAGE, Exit with 1 for warnings that are failures; nothing is written then */
async function deliver(imported: Imported, { out, strict, allowEmpty }: ImportOptions): Promise<void> {
  const { text, config, warnings } = imported;
  for (const warning of warnings) console.error(`warning: ${formatRemark(warning)}`);
  if (!allowEmpty) requireServices(imported);
  if (strict && warnings.length > 0) throw new Exit(1);
  if (out === undefined) await print(text);
  else {
    const isNew = replaceFile(out, text);
    console.error(`${out}: ${sayCounts(countParts(config))}${isNew ? '' : ', as before'}`);
  }
}
