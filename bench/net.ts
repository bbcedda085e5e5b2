import { writeFileSync } from 'node:fs';
import { cpus, release } from 'node:os';
import { parseArgs } from 'node:util';
import { Lab } from '../lib/lab/topology.js';
import { dsr } from './dsr.js';
import { isInstalled, startBackends } from './measures.js';
import { measureOperator, type OperatorRow, renderOperator } from './operator.js';
import { proxies } from './proxies.js';
import { type Row, renderSection, runSection, type Section } from './section.js';

/*
 * `npm run bench:net`: weir against its peers, on one machine in interleaved rounds. Only ratios mean anything.
 */

const { values: options } = parseArgs({
  options: {
    rounds: { type: 'string', default: '5' },
    seconds: { type: 'string', default: '3' },
    json: { type: 'string' },
    /** Names of contenders, with commas. */
    only: { type: 'string' },
    section: { type: 'string', default: 'proxies,dsr,operator' },
  },
});
const extent = { rounds: Number(options.rounds), seconds: Number(options.seconds) };
const wanted = options.section.split(',');
/** Of each row of the section operator. */
const OPERATOR_SECONDS = 5;

for (const tool of ['wrk', 'iperf3', 'nginx', 'python3']) {
  if (isInstalled(tool)) continue;
  throw new Error(`bench:net needs ${tool}: apt-get install wrk iperf3 nginx-light libnginx-mod-stream python3`);
}
const machine = `${cpus().length} x ${cpus()[0]?.model}, Linux ${release()}, Node.js ${process.version}`;
const results: Record<string, readonly Row[]> = {};
let operator: readonly OperatorRow[] = [];
const inline = await Lab.create({ prefix: `weir-n${process.pid}` });
const oneArm = await Lab.create({ prefix: `weir-m${process.pid}`, shape: 'one-arm', backends: 1 });
try {
  await Promise.all([inline, oneArm].map(startBackends));
  for (const [name, section] of Object.entries({ proxies: proxies(inline), dsr: dsr(oneArm, inline) })) {
    if (wanted.includes(name)) results[name] = await runSection(chosen(section), extent);
  }
  if (wanted.includes('operator')) operator = await measureOperator(inline, OPERATOR_SECONDS);
} finally {
  await Promise.all([inline, oneArm].map((lab) => lab.destroy()));
}
console.log(`${machine}; medians of ${extent.rounds} rounds of ${extent.seconds} s\n`);
for (const [name, rows] of Object.entries(results)) console.log(renderSection(name, rows));
if (operator.length > 0) console.log(renderOperator(operator));
if (options.json !== undefined) {
  writeFileSync(options.json, `${JSON.stringify({ machine, ...extent, results, operator }, null, 2)}\n`);
}

function chosen(section: Section): Section {
  const { only } = options;
  if (only === undefined) return section;
  return { ...section, contenders: section.contenders.filter(({ name }) => only.split(',').includes(name)) };
}
