import { examine } from '../control/doctor/doctor.js';
import type { Finding } from '../control/doctor/finding.js';
import { plural } from '../control/summary.js';
import { print, printJson } from './output.js';
import { Exit } from './report.js';

/** `weir doctor` */
export async function doctor({ config, output }: { config?: string; output: 'text' | 'json' }): Promise<void> {
  const findings = await examine(config ?? null);
  await (output === 'json' ? printJson(findings) : print(renderFindings(findings)));
  if (findings.some(({ status }) => status === 'fail')) throw new Exit(1);
}

/** A line for each; what is not in order also says why it matters, and how to mend it. */
export function renderFindings(findings: readonly Finding[]): string {
  const width = Math.max(...findings.map(({ name }) => name.length));
  const lines = findings.flatMap(({ name, status, found, why, mend }) => [
    `${status.padEnd(4)}  ${name.padEnd(width)}  ${found}`,
    ...(status === 'warn' || status === 'fail' ? [`      ${' '.repeat(width)}  ${why}`] : []),
    ...(mend === null ? [] : [`      ${' '.repeat(width)}  $ ${mend}`]),
  ]);
  const count = (wanted: Finding['status']): number => findings.filter(({ status }) => status === wanted).length;
  const [failures, warnings, skips] = [count('fail'), count('warn'), count('skip')];
  const seen = skips === 0 ? '' : `, ${skips} not seen`;
  lines.push('', `${plural(failures, 'failure')}, ${plural(warnings, 'warning')}${seen}`);
  return `${lines.join('\n')}\n`;
}
