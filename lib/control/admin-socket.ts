import { lstatSync } from 'node:fs';
import { connect } from 'node:net';

/**
 * Whether a process answers on a UNIX socket: `stale` is what a killed one leaves behind, a file that may be replaced.
 * `unknown`: there is something, and no telling what (no permission, or no socket at all).
 */
export type SocketState = 'absent' | 'stale' | 'alive' | 'unknown';

/** Connects and hangs up. A process too busy to answer within a second is alive. */
export function probeSocket(path: string): Promise<SocketState> {
  return new Promise((resolve) => {
    const socket = connect({ path });
    const settle = (state: SocketState): void => {
      socket.destroy();
      resolve(state);
    };
    socket.setTimeout(1000, () => settle('alive'));
    socket.on('connect', () => settle('alive'));
    socket.on('error', ({ code }: NodeJS.ErrnoException) => {
      if (code === 'ENOENT') settle('absent');
      // An ordinary file refuses too.
      else if (code === 'ECONNREFUSED')
        settle(lstatSync(path, { throwIfNoEntry: false })?.isSocket() ? 'stale' : 'unknown');
      else settle(code === 'EAGAIN' ? 'alive' : 'unknown');
    });
  });
}
