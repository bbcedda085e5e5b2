import { WeirError } from '../base/errors.js';
import type { Config } from '../config/config.js';

/** The settings that are read at the start only. */
const FIXED: ReadonlyArray<readonly [key: string, value: (config: Config) => unknown]> = [
  ['role', ({ role }) => role],
  ['device', ({ device }) => device],
  // A gateway may change its end of the tunnel at any time; a node's is a socket.
  ['tunnel.address', ({ role, tunnel }) => (role === 'node' ? tunnel.address : null)],
  ['tunnel.port', ({ role, tunnel }) => (role === 'node' ? tunnel.port : null)],
  ['admin', ({ admin }) => admin],
  ['network.manage', ({ network }) => network.manage],
  ['network.table', ({ network }) => network.table],
  ['conntrack.tcpEntries', ({ conntrack }) => conntrack.tcpEntries],
  ['conntrack.anyEntries', ({ conntrack }) => conntrack.anyEntries],
  ['conntrack.gc', ({ conntrack }) => conntrack.gcIntervalMs],
  ['conntrack.stateFile', ({ conntrack }) => conntrack.stateFile],
];

/** The settings of a file that differ from those in use, and that a reload cannot change. */
export function fixedChanges(before: Config, after: Config): string[] {
  return FIXED.filter(([, value]) => JSON.stringify(value(before)) !== JSON.stringify(value(after))).map(
    ([key]) => key,
  );
}

/**
 * Refuses a reload that cannot be done whole.
 *
 * @throws WeirError NOT_SUPPORTED
 */
export function requireReloadable(before: Config, after: Config): void {
  const changed = fixedChanges(before, after);
  if (changed.length === 0) return;
  throw new WeirError(
    'NOT_SUPPORTED',
    `${changed.join(', ')} cannot change while weir runs`,
    'Restart weir, or put the former value back; nothing of the file was applied.',
  );
}
