import { FlowTable } from '../conntrack/flow-table.js';
import type { TableMemory } from '../conntrack/memory.js';
import {
  BACKEND,
  BACKEND_ID,
  CLIENT,
  COMMIT,
  ORIGINAL_PORTS,
  PROTOCOL,
  RECORD_BYTES,
  RECORD_WORDS,
  REPLY_PORTS,
  RETURN,
  SERVICE,
  TYPE,
  TYPE_SVC,
  VIP,
} from '../conntrack/record.js';
import * as S from '../datapath/snapshot.js';
import type { Tables } from '../datapath/tables.js';
import { formatEndpoint, formatIpv4 } from '../wire/address.js';
import type { Predecessor } from './compile.js';
import { type BackendIdentity, Identities, type ServiceIdentity } from './identity.js';
import { type NetworkNeeds, NO_NEEDS } from './network-plan.js';
import { mergeNeeds } from './retained-needs.js';

/**
 * The connections of an earlier run, found in its state file. Their records name service and backend by ids which that run gave
 * out; they are given new ones here, by what else the records say: VIP, port and protocol, address and port. What the file no longer
 * has is then drained by the same rules as after a reload, from now on.
 */
export interface Survivors {
  readonly identities: Identities;
  /** In place of the earlier run's last snapshot. */
  readonly previous: Predecessor;
  /** What the connections need of the kernel, whatever the file says. */
  readonly needs: NetworkNeeds;
}

/** `conntrack.drainTimeout` of a service that is not in the file, and so says nothing about it: the default. */
const DRAIN_MS = 300_000;

interface Owner {
  readonly service: ServiceIdentity;
  readonly backend: BackendIdentity;
  /** Its answers come with a client as destination. */
  isLedIn: boolean;
}

/** What the records of both tables tell. */
interface Findings {
  readonly identities: Identities;
  /** MODE_* by service id. */
  readonly modes: Map<number, number>;
  readonly owners: Map<BackendIdentity, Owner>;
  readonly snatAddresses: Set<number>;
}

/** Gives every record its new ids. Nobody else may be using the tables. */
export function adoptSurvivors({ tcp, any }: Tables): Survivors {
  const findings: Findings = {
    identities: new Identities(),
    modes: new Map(),
    owners: new Map(),
    snatAddresses: new Set(),
  };
  for (const memory of [tcp, any]) adoptTable(memory, findings);
  const { identities, modes } = findings;

  const services = new Int32Array(identities.serviceRows * S.SERVICE_WORDS);
  for (let id = 1; id < identities.serviceRows; id++) {
    const { vip, port, protocol } = identities.serviceById(id)!;
    const row = id * S.SERVICE_WORDS;
    services[row + S.SERVICE_VIP] = vip;
    services[row + S.SERVICE_PORT] = port;
    services[row + S.SERVICE_PROTOCOL] = protocol;
    services[row + S.SERVICE_MODE] = modes.get(id)!;
  }
  const backends = new Int32Array(identities.backendRows * S.BACKEND_WORDS);
  const drainMs = new Map<number, number>();
  for (let id = 1; id < identities.backendRows; id++) {
    const { service, address, port } = identities.backendById(id)!;
    const row = id * S.BACKEND_WORDS;
    backends[row + S.BACKEND_ADDRESS] = address;
    backends[row + S.BACKEND_PORT] = port;
    backends[row + S.BACKEND_SERVICE] = service;
    backends[row + S.BACKEND_NODE] = address;
    drainMs.set(id, DRAIN_MS);
  }
  const snapshot = {
    version: 0,
    services,
    backends,
    cutAt: new Float64Array(identities.backendRows).fill(Number.POSITIVE_INFINITY),
    counters: new Float64Array(0),
    vipIndex: new Int32Array(0),
    snatIndex: new Int32Array(0),
    ownSince: 0,
  };
  return { identities, previous: { snapshot, drainMs }, needs: needsOf(findings) };
}

function needsOf({ owners, snatAddresses }: Findings): NetworkNeeds {
  const all = [...owners.values()];
  const addresses = [...all.map(({ service }) => service.vip), ...snatAddresses].map(formatIpv4);
  const endpoints = all
    .filter(({ isLedIn }) => isLedIn)
    .map(({ service: { protocol }, backend: { address, port } }) => ({ address: formatIpv4(address), port, protocol }));
  return mergeNeeds({ addresses, endpoints }, NO_NEEDS);
}

function adoptTable(memory: TableMemory, { identities, modes, owners, snatAddresses }: Findings): void {
  const table = new FlowTable(memory);
  const { words, bytes } = table;
  /** By former backend id; only a hint, since whoever wrote the ids may have been killed in the middle of it. */
  const known = new Map<number, Owner>();
  for (let record = 0; record < table.highWater; record++) {
    const word = record * RECORD_WORDS;
    if (words[word + COMMIT] === 0) continue;
    const vip = words[word + VIP]! >>> 0;
    const port = words[word + ORIGINAL_PORTS]! & 0xffff;
    const address = words[word + BACKEND]! >>> 0;
    const backendPort = words[word + REPLY_PORTS]! >>> 16;
    const protocol = bytes[record * RECORD_BYTES + PROTOCOL]!;
    let owner = known.get(words[word + BACKEND_ID]!);
    if (
      owner === undefined ||
      owner.service.vip !== vip ||
      owner.service.port !== port ||
      owner.service.protocol !== protocol ||
      owner.backend.address !== address ||
      owner.backend.port !== backendPort
    ) {
      const name = formatEndpoint(vip, port);
      const service = identities.service({ name, address: { word: vip }, port, protocolNumber: protocol });
      const member = { name: formatEndpoint(address, backendPort), address: { word: address }, port: backendPort };
      const backend = identities.backend(service, member);
      owner = owners.get(backend) ?? { service, backend, isLedIn: false };
      owners.set(backend, owner);
      known.set(words[word + BACKEND_ID]!, owner);
    }
    words[word + SERVICE] = owner.service.id;
    words[word + BACKEND_ID] = owner.backend.id;
    const mode = modeOf(words, word, bytes[record * RECORD_BYTES + TYPE]!);
    if (mode === S.MODE_DNAT) owner.isLedIn = true;
    else if (mode === S.MODE_SNAT) snatAddresses.add(words[word + RETURN]!);
    // A flow of a dnat service can have another source port (a clash), one of an snat service its own.
    modes.set(owner.service.id, Math.min(mode, modes.get(owner.service.id) ?? mode));
  }
}

function modeOf(words: Int32Array, word: number, type: number): number {
  if (type === TYPE_SVC) return S.MODE_DSR;
  return words[word + RETURN] === words[word + CLIENT] ? S.MODE_DNAT : S.MODE_SNAT;
}
