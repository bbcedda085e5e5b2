import * as S from '../../datapath/snapshot.js';
import { formatEndpoint } from '../../wire/address.js';
import { nameAndAddress } from '../summary.js';
import { type KnownCase, step } from './case.js';
import type { StepView } from './explain-view.js';

/** More than this many that may be chosen are counted instead of named, for people. */
const SHOWN_TAKERS = 16;

interface Member {
  readonly backend: string;
  readonly address: string;
  /** In the file; null: it has left that. */
  readonly weight: number | null;
  readonly takesNew: boolean;
  /** Why it takes no new connections, or takes them in spite of something; null: it simply does. */
  readonly why: string | null;
}

/**
 * The backends of the packet's service, and what keeps those from it that take no new connections.
 *
 * @param full ids of those that have as many connections as they may
 */
export function describeBackends(known: KnownCase, full: readonly number[]): StepView {
  const members = membersOf(known, full);
  const takers = members.filter(({ takesNew }) => takesNew);
  const names = takers.slice(0, SHOWN_TAKERS).map(({ backend }) => backend);
  if (takers.length > names.length) names.push(`${takers.length - names.length} more`);
  const text =
    takers.length === 0
      ? 'no backend takes new connections'
      : `${takers.length} of ${members.length} take new connections: ${names.join(', ')}`;
  const notes = members
    .filter(({ why }) => why !== null)
    .map(
      ({ backend, address, takesNew, why }) => `${takesNew ? '' : 'not '}${nameAndAddress(backend, address)}: ${why}`,
    );
  return step('backends', takers.length === 0 ? 'none' : 'some', text, { backends: members }, notes);
}

function membersOf({ scene, snapshot, service, configured }: KnownCase, full: readonly number[]): Member[] {
  const { desired, assumed } = scene;
  const { identities } = desired;
  const identity = identities.serviceById(service)!;
  const takesNew = (id: number): boolean =>
    (snapshot.backends[id * S.BACKEND_WORDS + S.BACKEND_FLAGS]! & S.TAKES_NEW) !== 0;
  const whyNot = (id: number, weight: number): string => {
    if (full.includes(id)) return 'it has as many connections as it may';
    if (weight === 0) return 'its weight is 0';
    if (desired.isDrained(identities.backendById(id)!)) return 'it is drained by command';
    if (assumed.down.has(id)) return 'it is assumed to be down';
    return `it is down: ${scene.downReason(id) ?? 'its check fails'}`;
  };
  const present = (configured?.backends ?? []).map((backend): Member => {
    const { id, address, port } = identities.backend(identity, backend);
    const { name, weight } = backend;
    const isTaker = takesNew(id) && !full.includes(id);
    const isDown = assumed.down.has(id) || scene.downReason(id) !== undefined;
    const why = !isTaker ? whyNot(id, weight) : isDown ? `${whyNot(id, weight)}; it is used, since all are` : null;
    return { backend: name, address: formatEndpoint(address, port), weight, takesNew: isTaker, why };
  });
  const gone = desired
    .removedBackends()
    .filter((each) => each.service === service)
    .map(({ id, name, address, port }): Member => {
      const why = assumed.without.has(id) ? 'it is assumed to have left the file' : 'it has left the file';
      return { backend: name, address: formatEndpoint(address, port), weight: null, takesNew: false, why };
    });
  return [...present, ...gone];
}
