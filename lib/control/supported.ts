import { WeirError } from '../base/errors.js';
import type { Config } from '../config/config.js';

/** What a valid configuration may ask for and this build, or this moment, cannot do. */

/** @throws WeirError NOT_SUPPORTED */
export function requireSupported({ role, services, conntrack }: Config): void {
  if (role === 'node') {
    throw new WeirError('NOT_SUPPORTED', 'this build has no role node', 'Run it as a gateway.');
  }
  const dsr = services.find(({ mode }) => mode === 'dsr');
  if (dsr !== undefined) {
    throw new WeirError(
      'NOT_SUPPORTED',
      `service ${dsr.name} asks for mode dsr, which this build does not have`,
      'Use mode dnat or snat.',
    );
  }
  if (conntrack.stateFile !== null) {
    throw new WeirError(
      'NOT_SUPPORTED',
      'this build cannot keep its connections in conntrack.stateFile',
      'Remove the key; Maglev leads connections on after a restart without it.',
    );
  }
}

/** The settings that are read at the start only. */
const FIXED: ReadonlyArray<readonly [key: string, value: (config: Config) => unknown]> = [
  ['role', ({ role }) => role],
  ['device', ({ device }) => device],
  ['admin', ({ admin }) => admin],
  ['network.manage', ({ network }) => network.manage],
  ['network.table', ({ network }) => network.table],
  ['conntrack.tcpEntries', ({ conntrack }) => conntrack.tcpEntries],
  ['conntrack.anyEntries', ({ conntrack }) => conntrack.anyEntries],
  ['conntrack.gc', ({ conntrack }) => conntrack.gcIntervalMs],
  ['conntrack.stateFile', ({ conntrack }) => conntrack.stateFile],
];

/**
 * Refuses a reload that cannot be done whole.
 *
 * @throws WeirError NOT_SUPPORTED
 */
export function requireReloadable(before: Config, after: Config): void {
  requireSupported(after);
  const changed = FIXED.filter(([, value]) => JSON.stringify(value(before)) !== JSON.stringify(value(after)));
  if (changed.length === 0) return;
  throw new WeirError(
    'NOT_SUPPORTED',
    `${changed.map(([key]) => key).join(', ')} cannot change while weir runs`,
    'Restart weir, or put the former value back; nothing of the file was applied.',
  );
}
