import { spawn } from 'node:child_process';
import { accessSync, constants, readFileSync } from 'node:fs';
import { WeirError } from '../base/errors.js';
import { run } from './process.js';

/*
 *   weir lab demo (an ordinary user)
 *    +-- unshare: user, mount and network namespace; /run is a tmpfs there
 *         +-- weir lab demo (root of that namespace)
 */

const MARK = 'WEIR_LAB_IN_USER_NAMESPACE';
const CAP_NET_ADMIN = 12n;
const CAP_SYS_ADMIN = 21n;

/** Whether this process lives in a user namespace made here, and all it builds goes with it. */
export function isInUserNamespace(): boolean {
  return process.env[MARK] === '1';
}

/**
 * Sees to it that namespaces can be made: as root there is nothing to do, an ordinary user's command line is run again as
 * the root of a user namespace of its own.
 *
 * @returns null: go on; a number: it has been done elsewhere and ended with this status
 * @throws WeirError NO_PERMISSION when the kernel allows neither, NO_TUN, MISSING_TOOL
 */
export async function becomeAble(): Promise<number | null> {
  const { stdout } = await run('ip', ['-V']);
  if (!stdout.includes('iproute2')) {
    throw new WeirError(
      'MISSING_TOOL',
      'the ip command found is not iproute2’s',
      'Install it (apt install iproute2, apk add iproute2).',
    );
  }
  if (isInUserNamespace()) return null;
  if (hasCapabilities()) {
    checkTun();
    return null;
  }
  const { status, stderr } = await run('unshare', [...UNSHARE, 'true']);
  if (status !== 0) {
    throw new WeirError(
      'NO_PERMISSION',
      `the lab needs root, and this kernel lets an ordinary user make no namespaces (${stderr.trim()})`,
      'Run it with sudo, or allow them: sysctl -w kernel.unprivileged_userns_clone=1 (Debian), ' +
        'sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu).',
    );
  }
  checkTun();
  return rerun();
}

const UNSHARE = [
  '--user',
  '--map-root-user',
  '--net',
  '--mount',
  '--',
  'sh',
  '-c',
  'mount -t tmpfs tmpfs /run && exec "$@"',
  'sh',
];

function rerun(): Promise<number> {
  const command = [process.execPath, ...process.execArgv, ...process.argv.slice(1)];
  const env = { ...process.env, [MARK]: '1' };
  const child = spawn('unshare', [...UNSHARE, ...command], { stdio: 'inherit', env });
  // Ctrl-C reaches both, a kill only this process. The child cleans up; being told twice does no harm.
  const pass = (signal: NodeJS.Signals): void => {
    child.kill(signal);
  };
  process.on('SIGINT', pass).on('SIGTERM', pass).on('SIGHUP', pass);
  return new Promise((resolve, reject) => {
    child.once('error', reject);
    child.once('exit', (status) => {
      process.off('SIGINT', pass).off('SIGTERM', pass).off('SIGHUP', pass);
      resolve(status ?? 1);
    });
  });
}

function hasCapabilities(): boolean {
  const hex = /^CapEff:\s*([0-9a-f]+)$/m.exec(readFileSync('/proc/self/status', 'utf8'))?.[1] ?? '0';
  const effective = BigInt(`0x${hex}`);
  return [CAP_NET_ADMIN, CAP_SYS_ADMIN].every((capability) => (effective >> capability) & 1n);
}

function checkTun(): void {
  try {
    accessSync('/dev/net/tun', constants.R_OK | constants.W_OK);
  } catch (error) {
    const isMissing = (error as NodeJS.ErrnoException).code === 'ENOENT';
    if (isMissing) {
      throw new WeirError(
        'NO_TUN',
        '/dev/net/tun is missing',
        'Load it (modprobe tun); in a container, pass it in (--device /dev/net/tun).',
      );
    }
    throw new WeirError(
      'NO_PERMISSION',
      '/dev/net/tun may not be opened',
      'Run it with sudo, or chmod 666 /dev/net/tun, as most systems have it.',
    );
  }
}
