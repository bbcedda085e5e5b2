import { below, type Random } from '../../lib/base/random.js';

/** One service as it is generated, and what an import must make of it. */
export interface Sample {
  readonly namespace: string;
  readonly name: string;
  readonly address: string;
  readonly external: string | undefined;
  readonly protocol: 'TCP' | 'UDP';
  readonly ports: readonly { readonly name: string; readonly port: number; readonly target: number }[];
  readonly endpoints: readonly SampleEndpoint[];
  readonly isSticky: boolean;
}

export interface SampleEndpoint {
  readonly address: string;
  readonly state: 'ready' | 'unready' | 'leaving';
}

export interface SampleSpace {
  readonly addresses: readonly string[];
  readonly targets: readonly number[];
}

/** The service of number `i`, each with another address; the first of its endpoints is ready. */
export function sampleService(random: Random, i: number, { addresses, targets }: SampleSpace): Sample {
  const pick = <Value>(values: readonly Value[]): Value => values[below(random, values.length)]!;
  const isNamed = below(random, 3) === 0;
  const first = below(random, addresses.length);
  return {
    namespace: pick(['default', 'shop', 'kube-system']),
    name: `svc-${i}`,
    address: `10.96.${1 + Math.floor(i / 250)}.${1 + (i % 250)}`,
    external: below(random, 5) === 0 ? `10.97.${1 + Math.floor(i / 250)}.${1 + (i % 250)}` : undefined,
    protocol: below(random, 4) === 0 ? 'UDP' : 'TCP',
    ports: isNamed
      ? [
          { name: 'a', port: 80, target: pick(targets) },
          { name: 'b', port: 443, target: pick(targets) },
        ]
      : [{ name: '', port: 1 + below(random, 60_000), target: pick(targets) }],
    endpoints: Array.from({ length: 1 + below(random, addresses.length) }, (_, j) => ({
      address: addresses[(first + j) % addresses.length]!,
      state: j === 0 ? 'ready' : pick(['ready', 'ready', 'unready', 'leaving'] as const),
    })),
    isSticky: below(random, 6) === 0,
  };
}

/** A Service and its EndpointSlice: the objects themselves. */
export function objectsOf(sample: Sample): object[] {
  const { namespace, name, address, external, protocol, ports, endpoints, isSticky } = sample;
  const ofPort = (name: string): object => (name === '' ? {} : { name });
  return [
    {
      apiVersion: 'v1',
      kind: 'Service',
      metadata: { name, namespace, labels: { app: name }, annotations: { note: 'generated' } },
      spec: {
        type: 'ClusterIP',
        clusterIP: address,
        clusterIPs: [address],
        ipFamilies: ['IPv4'],
        ...(external === undefined ? {} : { externalIPs: [external] }),
        selector: { app: name },
        sessionAffinity: isSticky ? 'ClientIP' : 'None',
        ...(isSticky ? { sessionAffinityConfig: { clientIP: { timeoutSeconds: 600 } } } : {}),
        ports: ports.map(({ name, port, target }) => ({ ...ofPort(name), port, protocol, targetPort: target })),
      },
    },
    {
      apiVersion: 'discovery.k8s.io/v1',
      kind: 'EndpointSlice',
      metadata: { name: `${name}-x7k2p`, namespace, labels: { 'kubernetes.io/service-name': name } },
      addressType: 'IPv4',
      ports: ports.map(({ name, target }) => ({ name, port: target, protocol })),
      endpoints: endpoints.map(({ address, state }, i) => ({
        addresses: [address],
        conditions: { ready: state === 'ready', serving: state !== 'unready', terminating: state === 'leaving' },
        nodeName: `node-${i % 3}`,
        targetRef: { kind: 'Pod', name: `${name}-${i}`, namespace },
      })),
    },
  ];
}

export interface Expected {
  readonly address: string;
  readonly port: number;
  readonly protocol: 'tcp' | 'udp';
  /** `address:port` of those that take connections. */
  readonly backends: readonly string[];
}

/** By the name that the import is to give. */
export function expectedServices(samples: readonly Sample[]): Map<string, Expected> {
  const expected = new Map<string, Expected>();
  for (const { namespace, name, address, external, protocol, ports, endpoints } of samples) {
    for (const port of ports) {
      const full = [namespace, name, ...(port.name === '' ? [] : [port.name])].join('.');
      const ready = endpoints
        .filter(({ state }) => state === 'ready')
        .map(({ address }) => `${address}:${port.target}`);
      const service = {
        address,
        port: port.port,
        protocol: protocol === 'UDP' ? 'udp' : 'tcp',
        backends: ready,
      } as const;
      expected.set(full, service);
      if (external !== undefined) expected.set(`${full}@${external}`, { ...service, address: external });
    }
  }
  return expected;
}
