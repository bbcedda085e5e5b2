import { isIPv4, isIPv6 } from 'node:net';
import { formatDuration } from '../config/duration.js';
import { cidrFault } from '../config/text-forms.js';
import { formatIpv4, parseIpv4 } from '../wire/address.js';
import { compareText, type Draft, type DraftBackend, type DraftService, type Origin, type Remark } from './draft.js';
import { type EndpointSlice, type Manifest, readObjects, type Service } from './kubernetes-objects.js';

/**
 * Services and EndpointSlices as services of weir, by the rules of kube-proxy:
 *
 *     Service default/web  clusterIP 10.96.0.10, port http 80     ->  default.web.http              10.96.0.10:80
 *                          load balancer 203.0.113.5              ->  default.web.http@203.0.113.5  203.0.113.5:80
 *     EndpointSlice        label kubernetes.io/service-name: web, ports[name: http].port 8080, endpoints[] -> backends
 *
 *     endpoint                         weight
 *     ready (or not said)              1
 *     not ready                        0: those who are connected stay
 *     serving and terminating          1 where no endpoint of the port is ready, else 0
 *
 * The names of namespaces, Services and ports have no dots, so that no two of these are alike.
 */
export interface KubernetesOptions {
  /** Where a traffic policy is Local, only endpoints of this node are taken. */
  readonly node?: string;
}

const SERVICE_NAME = 'kubernetes.io/service-name';
const PROXY_NAME = 'service.kubernetes.io/service-proxy-name';
const DEFAULT_AFFINITY_SECONDS = 10_800;

export function draftOfManifests(manifests: readonly Manifest[], options: KubernetesOptions = {}): Draft {
  const { services, slices, warnings, faults } = readObjects(manifests);
  const drafter = new Drafter(slices, options, [...warnings]);
  const drafted = services.flatMap((service) => drafter.draft(service));
  drafter.warnOfStrays(services);
  return { services: drafted, warnings: drafter.warnings, faults };
}

type Port = NonNullable<Service['value']['spec']['ports']>[number];
type Endpoint = NonNullable<EndpointSlice['value']['endpoints']>[number];

/** An address that a Service is to be reached at. */
interface Frontend {
  readonly address: string;
  readonly isExternal: boolean;
  /** loadBalancerSourceRanges count. */
  readonly isBalancer: boolean;
  readonly at: readonly PropertyKey[];
}

interface Candidate {
  readonly name: string | undefined;
  readonly address: string;
  readonly port: number;
  readonly isReady: boolean;
  readonly isLeaving: boolean;
}

class Drafter {
  readonly warnings: Remark[];
  readonly #slices = new Map<string, EndpointSlice[]>();
  readonly #node: string | undefined;

  constructor(slices: readonly EndpointSlice[], { node }: KubernetesOptions, warnings: Remark[]) {
    this.warnings = warnings;
    this.#node = node;
    for (const slice of slices) {
      const owner = slice.value.metadata.labels?.[SERVICE_NAME];
      if (typeof owner !== 'string') {
        this.#warn(slice, ['metadata'], `has no label ${SERVICE_NAME}: nobody’s endpoints`);
        continue;
      }
      if (slice.value.addressType !== 'IPv4') {
        this.#warn(slice, ['addressType'], `${slice.value.addressType} endpoints are left out: weir balances IPv4`);
        continue;
      }
      const key = `${slice.namespace}/${owner}`;
      this.#slices.set(key, [...(this.#slices.get(key) ?? []), slice]);
    }
  }

  warnOfStrays(services: readonly Service[]): void {
    const known = new Set(services.map(keyOf));
    for (const [key, slices] of this.#slices)
      if (!known.has(key))
        for (const slice of slices) this.#warn(slice, ['metadata'], `its Service ${key} is not there`);
  }

  draft(service: Service): DraftService[] {
    const { spec, metadata } = service.value;
    const skip = (at: readonly PropertyKey[], why: string): DraftService[] => {
      this.#warn(service, at, `left out: ${why}`);
      return [];
    };
    if (metadata.labels?.[PROXY_NAME] !== undefined) return skip(['metadata', 'labels'], `${PROXY_NAME} gives it away`);
    if (spec.type === 'ExternalName') return skip(['spec', 'type'], 'ExternalName is a name of the DNS');
    if (spec.clusterIP === 'None') return skip(['spec', 'clusterIP'], 'headless: clients talk to its endpoints');
    const ports = (spec.ports ?? []).flatMap((port, i) => this.#usablePort(service, port, i));
    const frontends = this.#frontends(service);
    if (frontends.length === 0)
      return skip(['spec'], 'no IPv4 address; `kubectl get -o yaml` has what the cluster gave');
    if ((spec.ports ?? []).length === 0) return skip(['spec', 'ports'], 'no port');
    this.#warnOfNodePorts(service);
    const ranges = this.#sourceRanges(service, frontends);
    if (!this.#slices.has(keyOf(service))) this.#warn(service, [], 'no EndpointSlice of it: it has no backends');
    this.#warnOfPolicies(service, frontends);
    return ports.flatMap((port) =>
      frontends
        .filter(({ isBalancer }) => !(isBalancer && ranges === null))
        .map((frontend) => this.#draft(service, port, frontend, frontend.isBalancer ? (ranges ?? []) : [])),
    );
  }

  #draft(service: Service, port: Port, frontend: Frontend, sourceRanges: readonly string[]): DraftService {
    const { spec } = service.value;
    const { address, isExternal, at } = frontend;
    const policy = isExternal ? spec.externalTrafficPolicy : spec.internalTrafficPolicy;
    const parts = [service.namespace, service.name, ...(port.name ? [port.name] : [])];
    const seconds = spec.sessionAffinityConfig?.clientIP?.timeoutSeconds ?? DEFAULT_AFFINITY_SECONDS;
    const title = `Service ${keyOf(service)}${port.name ? `, port ${port.name}` : ''}`;
    return {
      name: `${parts.join('.')}${isExternal ? `@${address}` : ''}`,
      address,
      port: port.port,
      protocol: port.protocol === 'UDP' ? 'udp' : 'tcp',
      ...(spec.sessionAffinity === 'ClientIP' ? { affinity: formatDuration(seconds * 1000) } : {}),
      sourceRanges,
      backends: this.#backends(service, port, policy === 'Local' ? this.#node : undefined),
      comment: isExternal ? `${title}, ${String(at[1] === 'externalIPs' ? 'external IP' : 'load balancer')}` : title,
      origin: service.at(at),
    };
  }

  #usablePort(service: Service, port: Port, i: number): Port[] {
    if (port.protocol !== 'SCTP') return [port];
    this.#warn(service, ['spec', 'ports', i], `port ${port.port} is left out: SCTP is not balanced`);
    return [];
  }

  /** Each IPv4 address once: as what it is first. */
  #frontends(service: Service): Frontend[] {
    const { spec, status } = service.value;
    const found: Frontend[] = [];
    const add = (address: string, at: readonly PropertyKey[], isExternal: boolean, isBalancer: boolean): void => {
      if (isIPv6(address)) this.#warn(service, at, `${address} is left out: weir balances IPv4`);
      else if (!isIPv4(address)) this.#warn(service, at, `"${address}" is no address`);
      else if (!found.some((each) => each.address === address)) found.push({ address, isExternal, isBalancer, at });
    };
    const { clusterIP } = spec;
    const clusterIps = spec.clusterIPs?.length ? spec.clusterIPs : clusterIP ? [clusterIP] : [];
    const key = spec.clusterIPs?.length ? 'clusterIPs' : 'clusterIP';
    clusterIps.forEach((ip, i) => {
      add(ip, key === 'clusterIPs' ? ['spec', key, i] : ['spec', key], false, false);
    });
    spec.externalIPs?.forEach((ip, i) => {
      add(ip, ['spec', 'externalIPs', i], true, false);
    });
    if (spec.type !== 'LoadBalancer') return found;
    status?.loadBalancer?.ingress?.forEach(({ ip, hostname, ipMode }, i) => {
      const at = ['status', 'loadBalancer', 'ingress', i];
      if (ip && ipMode === 'Proxy') this.#warn(service, at, `${ip} is left out: ipMode Proxy, the balancer’s own`);
      else if (ip) add(ip, at, true, true);
      else if (hostname) this.#warn(service, at, `${hostname} is left out: a name, and no address`);
    });
    return found;
  }

  /** @returns `null`: nobody may connect. Like kube-proxy, for addresses of load balancers only. */
  #sourceRanges(service: Service, frontends: readonly Frontend[]): string[] | null {
    const given = service.value.spec.loadBalancerSourceRanges ?? [];
    if (given.length === 0) return [];
    const at = ['spec', 'loadBalancerSourceRanges'];
    if (!frontends.some(({ isBalancer }) => isBalancer)) {
      this.#warn(service, at, 'has no effect: the Service has no address of a load balancer');
      return [];
    }
    const ranges = given.flatMap((text, i) => {
      const range = networkOf(text.trim());
      if (range === null) this.#warn(service, [...at, i], `"${text}" is left out: no IPv4 range`);
      return range ?? [];
    });
    if (ranges.length > 0) return [...new Set(ranges)];
    this.#warn(service, at, 'no IPv4 range is left: not served at the address of the load balancer');
    return null;
  }

  #backends(service: Service, port: Port, node: string | undefined): DraftBackend[] {
    const candidates = new Map<string, Candidate>();
    for (const slice of this.#slices.get(keyOf(service)) ?? []) {
      const { endpoints, ports } = slice.value;
      const match = (ports ?? []).find(
        (each) => (each.name ?? '') === (port.name ?? '') && (each.protocol ?? 'TCP') === (port.protocol ?? 'TCP'),
      );
      if (match?.port == null) continue;
      for (const endpoint of endpoints ?? []) {
        if (node !== undefined && endpoint.nodeName !== node) continue;
        const candidate = candidateOf(endpoint, match.port);
        const key = `${candidate.address}:${candidate.port}`;
        // It may move from slice to slice, and be in two of them meanwhile.
        if (!candidates.get(key)?.isReady) candidates.set(key, candidate);
      }
    }
    return weigh([...candidates.values()]);
  }

  #warnOfNodePorts(service: Service): void {
    const { ports, type } = service.value.spec;
    const nodePorts = (ports ?? []).flatMap(({ nodePort }) => nodePort || []);
    if (nodePorts.length === 0 || (type !== 'NodePort' && type !== 'LoadBalancer')) return;
    const which = nodePorts.length === 1 ? `nodePort ${nodePorts[0]} is` : `nodePorts ${nodePorts.join(', ')} are`;
    this.#warn(service, ['spec', 'ports'], `${which} not kept: weir serves addresses of its own, not those of hosts`);
  }

  #warnOfPolicies(service: Service, frontends: readonly Frontend[]): void {
    if (this.#node !== undefined) return;
    const { externalTrafficPolicy, internalTrafficPolicy } = service.value.spec;
    const message = 'Local: endpoints of all nodes are taken; --node NAME takes those of one';
    if (externalTrafficPolicy === 'Local' && frontends.some(({ isExternal }) => isExternal))
      this.#warn(service, ['spec', 'externalTrafficPolicy'], `externalTrafficPolicy ${message}`);
    if (internalTrafficPolicy === 'Local' && frontends.some(({ isExternal }) => !isExternal))
      this.#warn(service, ['spec', 'internalTrafficPolicy'], `internalTrafficPolicy ${message}`);
  }

  #warn(object: { readonly at: Service['at'] }, path: readonly PropertyKey[], message: string): void {
    const origin: Origin = object.at(path);
    this.warnings.push({ ...origin, message });
  }
}

function keyOf({ namespace, name }: Service): string {
  return `${namespace}/${name}`;
}

/** kube-proxy takes the first address only. What is not said counts as ready, and what is ready serves. */
function candidateOf({ addresses, conditions, targetRef }: Endpoint, port: number): Candidate {
  const isReady = conditions?.ready ?? true;
  const isServing = conditions?.serving ?? isReady;
  return {
    name: targetRef?.kind === 'Pod' && targetRef.name ? targetRef.name : undefined,
    address: addresses[0]!,
    port,
    isReady,
    isLeaving: isServing && conditions?.terminating === true,
  };
}

function weigh(candidates: readonly Candidate[]): DraftBackend[] {
  const isAnyReady = candidates.some(({ isReady }) => isReady);
  const names = new Set<string>();
  return [...candidates]
    .sort((a, b) => compareAddress(a.address, b.address) || a.port - b.port)
    .map(({ name, address, port, isReady, isLeaving }) => {
      const isNamed = name !== undefined && /^[a-z0-9][-a-z0-9.]*$/.test(name) && !names.has(name);
      if (isNamed) names.add(name);
      const weight = isReady || (!isAnyReady && isLeaving) ? 1 : 0;
      return { ...(isNamed ? { name } : {}), address, port, weight };
    });
}

function compareAddress(a: string, b: string): number {
  return isIPv4(a) && isIPv4(b) ? parseIpv4(a) - parseIpv4(b) : compareText(a, b);
}

/** A range without the bits beyond its prefix, which Kubernetes lets stand; `null`: no IPv4 range. */
function networkOf(text: string): string | null {
  const parts = /^([^/]+)\/(\d{1,2})$/.exec(text);
  if (parts === null || !isIPv4(parts[1]!) || Number(parts[2]) > 32) return null;
  const length = Number(parts[2]);
  const mask = length === 0 ? 0 : -1 << (32 - length);
  const range = `${formatIpv4((parseIpv4(parts[1]!) & mask) >>> 0)}/${length}`;
  return cidrFault(range) === null ? range : null;
}
