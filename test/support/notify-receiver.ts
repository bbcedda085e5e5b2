import { type ChildProcess, spawn } from 'node:child_process';
import { createInterface } from 'node:readline';

const RECEIVER = `
import json, socket, sys
at = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
at.bind(sys.argv[1].replace('@', chr(0), 1) if sys.argv[1].startswith('@') else sys.argv[1])
print(json.dumps('bound'), flush=True)
while True:
    print(json.dumps(at.recv(4096).decode()), flush=True)
`;

/** A service manager's end of NOTIFY_SOCKET, in Python, since Node has no UNIX datagram sockets. */
export class NotifyReceiver {
  /** Each datagram, as its lines. */
  readonly received: string[][] = [];
  readonly #child: ChildProcess;
  readonly #waiting = new Set<() => void>();
  #isBound = false;

  private constructor(address: string) {
    this.#child = spawn('python3', ['-c', RECEIVER, address], { stdio: ['ignore', 'pipe', 'inherit'] });
    createInterface({ input: this.#child.stdout! }).on('line', (line) => {
      if (this.#isBound) this.received.push((JSON.parse(line) as string).split('\n'));
      this.#isBound = true;
      for (const look of [...this.#waiting]) look();
    });
  }

  /** @param address a path, or `@name` */
  static async bind(address: string): Promise<NotifyReceiver> {
    const receiver = new NotifyReceiver(address);
    await receiver.#until(() => receiver.#isBound);
    return receiver;
  }

  /** Resolves with the first datagram from `from` on that has a line as wanted, and its place. */
  async datagram(isWanted: (line: string) => boolean, from = 0): Promise<{ lines: string[]; at: number }> {
    const find = (): number => this.received.findIndex((lines, i) => i >= from && lines.some(isWanted));
    await this.#until(() => find() >= 0);
    return { lines: this.received[find()]!, at: find() };
  }

  close(): void {
    this.#child.kill();
  }

  async #until(isSo: () => boolean): Promise<void> {
    while (!isSo()) {
      await new Promise<void>((resolve) => {
        const look = (): void => {
          this.#waiting.delete(look);
          resolve();
        };
        this.#waiting.add(look);
      });
    }
  }
}
