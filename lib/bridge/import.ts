import { WeirError } from '../base/errors.js';
import type { Config } from '../config/config.js';
import { parseConfig, readConfigText, requireConfig } from '../config/load.js';
import { configText } from './config-text.js';
import { type Draft, formatRemark, type Remark, settle } from './draft.js';
import { draftOfIpvs } from './ipvs.js';
import { draftOfManifests, type KubernetesOptions } from './kubernetes.js';
import { readInput, readManifests, STANDARD_INPUT } from './manifest-files.js';

/** What an import has made: a valid configuration, and what could not be kept. */
export interface Imported {
  readonly text: string;
  readonly config: Config;
  readonly warnings: readonly Remark[];
}

/**
 * @param paths files, folders, `-`
 * @param base a configuration's path; `undefined`: nothing but defaults
 * @throws WeirError CONFIG_INVALID and CONFIG_UNREADABLE of the base, IMPORT_INVALID with a line for each mistake
 */
export function importManifests(
  paths: readonly string[],
  base: string | undefined,
  options: KubernetesOptions,
): Imported {
  const manifests = readManifests(paths);
  return make('kubernetes', base, () => draftOfManifests(manifests, options));
}

/** @throws as importManifests */
export function importIpvs(path: string, base: string | undefined): Imported {
  const file = path === STANDARD_INPUT ? '(standard input)' : path;
  const text = readInput(path);
  return make('ipvs', base, ({ tunnel }) => draftOfIpvs(file, text, tunnel.address !== null));
}

/**
 * An input that has nothing comes from a command that failed (`kubectl ... | weir import`) more often than from somebody who wants to serve
 * nobody.
 *
 * @throws WeirError USAGE
 */
export function requireServices({ config, warnings }: Imported): void {
  if (config.services.length > 0) return;
  const why = warnings.length > 0 ? 'nothing that weir could serve' : 'no service';
  throw new WeirError(
    'USAGE',
    `the input has ${why}: nothing is written`,
    'Look at what was read; --allow-empty writes a configuration without services.',
  );
}

function make(source: string, base: string | undefined, draft: (base: Config) => Draft): Imported {
  const baseText = base === undefined ? '' : readConfigText(base);
  const baseConfig = base === undefined ? parseConfig('{}').config! : requireConfig(base, baseText);
  const { services, warnings, faults } = settle(draft(baseConfig), baseConfig);
  if (faults.length > 0) throw new WeirError('IMPORT_INVALID', faults.map(formatRemark).join('\n'));
  const text = configText(services, baseText, source);
  return { text, config: parseConfig(text).config!, warnings };
}
