import { WeirError } from '../base/errors.js';
import type { Desired } from './desired.js';
import type { FlowFilter } from './flows.js';
import type { BackendIdentity, Identities } from './identity.js';

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

/**
 * A name in a filter that means nothing is a slip more often than a question. It is a question where somebody had it lately: whether the
 * connections of what was removed are over. And so is an address, which a node may have learned.
 *
 * @throws WeirError USAGE
 */
export function requireNames(identities: Identities, { service, backend }: FlowFilter): void {
  const services = identities.listServices().map(({ name }) => name);
  const slash = backend?.lastIndexOf('/') ?? -1;
  const owner = slash < 0 ? undefined : backend!.slice(0, slash);
  const isKnown = (name: string): boolean => services.includes(name) || identities.wasService(name);
  const unknown = [service, owner].find((name) => name !== undefined && !isKnown(name));
  if (unknown !== undefined) throw noSuchService(unknown, services);
  if (backend === undefined) return;
  const wanted = backend.slice(slash + 1);
  if (ENDPOINT.test(wanted) || identities.wasBackend(wanted, owner)) return;
  const names: string[] = [];
  for (const { service, name } of identities.listBackends()) {
    const itsOwner = identities.serviceName(service)!;
    if (owner !== undefined && itsOwner !== owner) continue;
    if (name === wanted) return;
    names.push(owner === undefined ? `${itsOwner}/${name}` : name);
  }
  throw owner === undefined
    ? new WeirError('USAGE', `no backend is called "${wanted}"`, `There are: ${listed(names)}.`)
    : new WeirError('USAGE', `${owner} has no backend "${wanted}"`, `It has ${listed(names)}.`);
}

const ENDPOINT = /^\d+\.\d+\.\d+\.\d+(:\d+)?$/;

/** What there is helps to find what was meant. */
export function noSuchService(wanted: string, names: readonly string[]): WeirError {
  return new WeirError('USAGE', `no service is called "${wanted}"`, `There are: ${listed(names)}.`);
}

/** At most these are named. */
const NAMES = 20;

function listed(names: readonly string[]): string {
  if (names.length === 0) return 'none';
  return names.length <= NAMES
    ? names.join(', ')
    : `${names.slice(0, NAMES).join(', ')} and ${names.length - NAMES} more`;
}
