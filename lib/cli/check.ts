import { formatProblem, loadConfig } from '../config/load.js';
import { countParts, sayCounts } from '../control/summary.js';
import { print, printJson } from './output.js';
import { Exit } from './report.js';

/** `weir check` */
export async function check({ config: file, output }: { config: string; output: 'text' | 'json' }): Promise<void> {
  const { config, problems } = loadConfig(file);
  if (output === 'json') {
    const counts = config === null ? {} : countParts(config);
    await printJson({ file, valid: config !== null, ...counts, problems });
  } else {
    for (const problem of problems) console.error(formatProblem(file, problem));
    if (config !== null) await print(`${file} is valid: ${sayCounts(countParts(config))}\n`);
  }
  if (config === null) throw new Exit(2);
}
