import type { Config } from '../config/config.js';
import { addressFault } from '../config/text-forms.js';

/**
 * Services on their way into a configuration, in its written form, whoever described them; and what there is to say about what
 * described them.
 */
export interface DraftService {
  readonly name: string;
  readonly address: string;
  readonly port: number;
  readonly protocol: 'tcp' | 'udp';
  readonly algorithm?: 'random' | 'maglev';
  readonly mode?: 'dnat' | 'dsr';
  /** A duration. */
  readonly affinity?: string;
  readonly sourceRanges?: readonly string[];
  readonly backends: readonly DraftBackend[];
  /** The line above it. */
  readonly comment: string;
  readonly origin: Origin;
}

export interface DraftBackend {
  readonly name?: string;
  readonly address: string;
  readonly port: number;
  /** 1 when absent. */
  readonly weight?: number;
  readonly maxConnections?: number;
}

/** What is said of something that was read, and where that stands; lines and columns count from 1. */
export interface Remark {
  readonly file: string;
  readonly line: number;
  readonly column: number;
  /** `Service default/web`; empty for the file as a whole. */
  readonly subject: string;
  readonly message: string;
}

/** Where something was read, without what there is to say of it. */
export type Origin = Omit<Remark, 'message'>;

/** What an import makes of its input. With faults there is nothing else worth having. */
export interface Draft {
  readonly services: readonly DraftService[];
  readonly warnings: readonly Remark[];
  readonly faults: readonly Remark[];
}

/** `file:line:column subject: message`, as for a configuration's mistakes. */
export function formatRemark({ file, line, column, subject, message }: Remark): string {
  return `${file}:${line}:${column} ${subject === '' ? '' : `${subject}: `}${message}`;
}

/** By file, line and column. */
export function inOrder(remarks: readonly Remark[]): Remark[] {
  return [...remarks].sort((a, b) => compareText(a.file, b.file) || a.line - b.line || a.column - b.column);
}

/** By code units: the same everywhere. */
export function compareText(a: string, b: string): number {
  return a < b ? -1 : a > b ? 1 : 0;
}

/**
 * Leaves out what a configuration refuses, each with a warning, until nothing is left that it would: addresses that nothing can be
 * forwarded to, two roles of one address, two services of one identity. The services come out sorted by name.
 */
export function settle({ services, warnings, faults }: Draft, { snat, tunnel, maglev }: Config): Draft {
  const said = [...warnings];
  const warn = (service: DraftService, message: string): void => {
    said.push({ ...service.origin, message });
  };
  const own = new Map(snat.addresses.map(({ text }) => [text, 'an address of `snat.addresses`']));
  if (tunnel.address !== null) own.set(tunnel.address.text, '`tunnel.address`');
  const snatOnly = new Set(snat.addresses.map(({ text }) => text));

  const usable = services.map((service) => ({
    ...service,
    backends: service.backends.filter(({ address }) => {
      const fault = addressFault(address) ?? (snatOnly.has(address) ? 'is also an address of `snat.addresses`' : null);
      const isOwnTunnel = service.mode === 'dsr' && address === tunnel.address?.text;
      const why = fault ?? (isOwnTunnel ? 'is also `tunnel.address`' : null);
      if (why !== null) warn(service, `backend ${address} ${why}: left out`);
      return why === null;
    }),
  }));
  const backends = new Set(usable.flatMap(({ backends }) => backends.map(({ address }) => address)));
  const identities = new Map<string, string>();
  const kept = [...usable]
    .sort((a, b) => compareText(a.name, b.name))
    .filter((service) => {
      const { name, address, port, protocol } = service;
      const identity = `${address}:${port}/${protocol}`;
      const role = own.get(address);
      const fault = addressFault(address) ?? (role === undefined ? null : `is also ${role}`);
      if (fault !== null) warn(service, `address ${address} ${fault}: not served`);
      else if (backends.has(address)) warn(service, `address ${address} is also a backend’s: not served there`);
      else if (identities.has(identity)) warn(service, `${identity} is already served as ${identities.get(identity)}`);
      else {
        identities.set(identity, name);
        return true;
      }
      return false;
    });
  const fitting = kept.map((service): DraftService => {
    if (service.algorithm === 'random' || service.backends.length <= maglev.tableSize) return service;
    warn(service, `${service.backends.length} backends do not fit into \`maglev.tableSize\`: drawn by lot instead`);
    return { ...service, algorithm: 'random' };
  });
  return { services: fitting, warnings: inOrder(said), faults: inOrder(faults) };
}
