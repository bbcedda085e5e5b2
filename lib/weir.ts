import { readFileSync } from 'node:fs';
import { leaveWithReader } from './cli/output.js';
import { type Parts, type ReplayRequest, type RunRequest, runProgram } from './cli/program.js';

/**
 * The composition root: the one place that knows every part. Heavy ones are imported when they are asked for, so that
 * `weir check` answers at once.
 */
const parts: Omit<Parts, 'version'> = { run, replay, lab };

/** Runs a command line; the process ends with its exit code when nothing keeps it. */
export async function main(argv: readonly string[]): Promise<void> {
  leaveWithReader();
  process.exitCode = await runProgram(argv, { ...parts, version: readVersion() });
}

async function run({ config, socket, pretty }: RunRequest): Promise<number> {
  const [{ runWeir }, { openLog }, { serveAdmin }] = await Promise.all([
    import('./control/runtime.js'),
    import('./control/log.js'),
    import('./admin/serve.js'),
  ]);
  return runWeir({
    configPath: config,
    ...(socket === undefined ? {} : { socket }),
    version: readVersion(),
    log: openLog(pretty),
    openAdmin: serveAdmin,
  });
}

async function replay(request: ReplayRequest): ReturnType<Parts['replay']> {
  const { replay } = await import('./replay/replay.js');
  return replay(request);
}

async function lab(...[verb, request]: Parameters<Parts['lab']>): Promise<number> {
  const { labDemo, labDown, labUp } = await import('./lab/lab-commands.js');
  return { up: labUp, demo: labDemo, down: labDown }[verb](request);
}

function readVersion(): string {
  const file = new URL('../package.json', import.meta.url);
  return (JSON.parse(readFileSync(file, 'utf8')) as { version: string }).version;
}
