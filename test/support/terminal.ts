import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';

/** Holds the other end of a pseudo-terminal: what the program writes goes to standard output, and a line of standard input is an order. */
const HOLDER = `
import fcntl, os, pty, select, signal, struct, sys, termios
def resize(fd, rows, columns):
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack('HHHH', rows, columns, 0, 0))
master, slave = pty.openpty()
resize(slave, 24, 100)
before = termios.tcgetattr(slave)
pid = os.fork()
if pid == 0:
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for fd in (0, 1, 2): os.dup2(slave, fd)
    os.execvp(sys.argv[1], sys.argv[1:])
orders = b''
ended = None
while ended is None:
    ready, _, _ = select.select([master, 0], [], [], 0.05)
    if master in ready:
        os.write(1, os.read(master, 65536))
        continue
    if 0 in ready:
        orders += os.read(0, 4096)
        *lines, orders = orders.split(b'\\n')
        for line in lines:
            verb, _, rest = line.decode().partition(' ')
            if verb == 'keys': os.write(master, bytes.fromhex(rest))
            if verb == 'size': resize(master, *map(int, rest.split()))
            if verb == 'kill': os.kill(pid, signal.Signals[rest])
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        while select.select([master], [], [], 0)[0]: os.write(1, os.read(master, 65536))
        ended = os.waitstatus_to_exitcode(status)
same = termios.tcgetattr(slave) == before
sys.stderr.write('%d %s' % (ended, 'restored' if same else 'changed'))
`;

/** A program in a pseudo-terminal of 24 rows and 100 columns. */
export class TestTerminal {
  /** All it has written. */
  output = '';
  readonly #holder: ChildProcess;
  readonly #waiting = new Set<() => void>();
  #said = '';

  constructor(command: readonly string[], env: NodeJS.ProcessEnv = {}) {
    this.#holder = spawn('python3', ['-c', HOLDER, ...command], { env: { ...process.env, TERM: 'xterm', ...env } });
    this.#holder.stdout!.setEncoding('utf8').on('data', (text: string) => {
      this.output += text;
      for (const each of this.#waiting) each();
    });
    this.#holder.stderr!.on('data', (text) => {
      this.#said += text;
    });
  }

  /** Resolves when this is in what came since the last `clear`. */
  see(text: string): Promise<void> {
    return new Promise((resolve) => {
      const look = (): void => {
        if (!this.output.includes(text)) return;
        this.#waiting.delete(look);
        resolve();
      };
      this.#waiting.add(look);
      look();
    });
  }

  clear(): void {
    this.output = '';
  }

  type(keys: string): void {
    this.#order(`keys ${Buffer.from(keys).toString('hex')}`);
  }

  resize(rows: number, columns: number): void {
    this.#order(`size ${rows} ${columns}`);
  }

  signal(name: NodeJS.Signals): void {
    this.#order(`kill ${name}`);
  }

  /** How it ended: its status (negative: a signal), and whether the terminal's settings are what they were. */
  async ended(): Promise<string> {
    if (this.#holder.exitCode === null) await once(this.#holder, 'close');
    return this.#said;
  }

  #order(order: string): void {
    this.#holder.stdin!.write(`${order}\n`);
  }
}
