import { type Parts, runProgram } from '../../lib/cli/program.js';

export interface Outcome {
  readonly code: number;
  readonly stdout: string;
  readonly stderr: string;
}

/** Runs a command line in this process and collects what it writes. */
export async function runCommand(parts: Parts, args: readonly string[]): Promise<Outcome> {
  const written = { stdout: '', stderr: '' };
  const restore = (['stdout', 'stderr'] as const).map((name) => {
    const stream = process[name];
    const write = stream.write;
    stream.write = ((chunk: string) => {
      written[name] += chunk;
      return true;
    }) as typeof stream.write;
    return () => {
      stream.write = write;
    };
  });
  try {
    const code = await runProgram(['node', 'weir', ...args], parts);
    return { code, ...written };
  } finally {
    for (const each of restore) each();
  }
}
