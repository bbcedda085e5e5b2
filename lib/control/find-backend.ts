import { WeirError } from '../base/errors.js';
import type { Desired } from './desired.js';
import type { BackendIdentity } from './identity.js';

/** A configured backend, as a command names it. */
export interface NamedMember {
  readonly identity: BackendIdentity;
  readonly name: string;
  readonly weight: number;
}

/**
 * The backend of a service by its name, address or `address:port`.
 *
 * @throws WeirError USAGE when there is none, or more than one
 */
export function findBackend(desired: Desired, service: string, wanted: string): NamedMember {
  const configured = desired.configured();
  const found = configured.find((each) => each.service.name === service);
  if (found === undefined) {
    throw noSuchService(
      service,
      configured.map((each) => each.service.name),
    );
  }
  const members = found.backends.map(({ backend, id }) => ({ backend, identity: desired.identities.backendById(id)! }));
  const isWanted = ({ backend: { name, address, port } }: (typeof members)[number]): boolean =>
    [name, address.text, `${address.text}:${port}`].includes(wanted);
  const [match, ...others] = members.filter(isWanted);
  if (match === undefined) {
    const removed = desired.removedBackends().some((each) => each.service === found.id && each.name === wanted);
    throw new WeirError(
      'USAGE',
      removed
        ? `${service}/${wanted} has left the file, and is drained by that`
        : `${service} has no backend "${wanted}"`,
      `It has ${listed(members.map(({ backend }) => backend.name))}.`,
    );
  }
  if (others.length > 0) {
    const names = [match, ...others].map(({ backend }) => backend.name);
    throw new WeirError('USAGE', `"${wanted}" is more than one backend of ${service}`, `Name one: ${listed(names)}.`);
  }
  return { identity: match.identity, name: match.backend.name, weight: match.backend.weight };
}

/** A name that means nothing is a slip: what there is helps to find it. */
export function noSuchService(wanted: string, names: readonly string[]): WeirError {
  return new WeirError('USAGE', `no service is called "${wanted}"`, `There are: ${listed(names)}.`);
}

function listed(names: readonly string[]): string {
  if (names.length === 0) return 'none';
  return names.length <= 10 ? names.join(', ') : `${names.slice(0, 10).join(', ')} and ${names.length - 10} more`;
}
