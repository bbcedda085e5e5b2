import type { LoadReport } from '../../lib/lab/load.js';
import { nodeCommand } from '../../lib/lab/process.js';
import type { Lab } from '../../lib/lab/topology.js';

/** lib/lab/load.ts, running in the client of a lab. */
export class Load {
  /** What it said last. */
  report: LoadReport | undefined;
  readonly ended: Promise<void>;
  #stop = (): void => {};

  /** @param target address:port @param args more of its command line */
  constructor(lab: Lab, target: string, ...args: string[]) {
    const [command, ...first] = nodeCommand('load');
    const running = lab.exec('client', command!, [...first, '--target', target, ...args], {
      timeoutMs: 3_600_000,
      started: (child) => {
        this.#stop = () => void child.kill('SIGTERM');
      },
      onOutput: (text) => {
        for (const line of text.split('\n')) if (line.endsWith('}')) this.report = JSON.parse(line);
      },
    });
    this.ended = running.then(() => {});
  }

  /** Lets it finish what it has begun. */
  stop(): void {
    this.#stop();
  }
}
