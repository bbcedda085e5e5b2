import { z } from 'zod';
import { type Fault, faultsOf, UNWORDED } from '../config/faults.js';
import { formatPath } from '../config/load.js';
import { readDocuments, type YamlDocument } from '../config/yaml-source.js';
import type { Origin, Remark } from './draft.js';

/**
 * Objects out of Kubernetes manifests: Service (v1) and EndpointSlice (discovery.k8s.io/v1), one or many to a text, in lists or not.
 * Only the fields that are used are looked at, and are judged as the API server would judge them; all others may be anything.
 */

const LABEL = /^[a-z0-9]([-a-z0-9]*[a-z0-9])?$/;
const SUBDOMAIN = /^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$/;

const label = () =>
  z.string().max(63).regex(LABEL, 'must be a DNS label: small letters, digits and -, beginning and ending with no -');

const portName = () =>
  z
    .string()
    .max(63)
    .regex(/^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?$/, 'must be a DNS label');
const subdomain = () => z.string().max(253).regex(SUBDOMAIN, 'must be a DNS name: small letters, digits, - and .');
const port = () => z.int().min(1).max(65535);
const protocol = () => z.enum(['TCP', 'UDP', 'SCTP']).nullish();
const texts = () => z.array(z.string()).nullish();

function metadata<Name extends z.ZodType>(name: Name) {
  return z.looseObject({
    name,
    namespace: label().nullish(),
    labels: z.record(z.string(), z.unknown()).nullish(),
  });
}

const serviceSchema = z.looseObject({
  metadata: metadata(label()),
  spec: z.looseObject({
    type: z.enum(['ClusterIP', 'NodePort', 'LoadBalancer', 'ExternalName']).nullish(),
    clusterIP: z.string().nullish(),
    clusterIPs: texts(),
    externalIPs: texts(),
    ports: z
      .array(
        z.looseObject({
          name: portName().nullish(),
          port: port(),
          protocol: protocol(),
          nodePort: z.int().nullish(),
        }),
      )
      .nullish(),
    sessionAffinity: z.enum(['None', 'ClientIP']).nullish(),
    sessionAffinityConfig: z
      .looseObject({
        clientIP: z.looseObject({ timeoutSeconds: z.int().min(1).max(86400).nullish() }).nullish(),
      })
      .nullish(),
    loadBalancerSourceRanges: texts(),
    externalTrafficPolicy: z.enum(['Cluster', 'Local']).nullish(),
    internalTrafficPolicy: z.enum(['Cluster', 'Local']).nullish(),
  }),
  status: z
    .looseObject({
      loadBalancer: z
        .looseObject({
          ingress: z
            .array(
              z.looseObject({ ip: z.string().nullish(), hostname: z.string().nullish(), ipMode: z.string().nullish() }),
            )
            .nullish(),
        })
        .nullish(),
    })
    .nullish(),
});

const sliceSchema = z.looseObject({
  metadata: metadata(subdomain()),
  addressType: z.enum(['IPv4', 'IPv6', 'FQDN']),
  endpoints: z
    .array(
      z.looseObject({
        addresses: z.array(z.string()).min(1),
        conditions: z
          .looseObject({
            ready: z.boolean().nullish(),
            serving: z.boolean().nullish(),
            terminating: z.boolean().nullish(),
          })
          .nullish(),
        nodeName: z.string().nullish(),
        targetRef: z.looseObject({ kind: z.string().nullish(), name: z.string().nullish() }).nullish(),
      }),
    )
    .nullish(),
  ports: z.array(z.looseObject({ name: z.string().nullish(), port: port().nullish(), protocol: protocol() })).nullish(),
});

/** An object with the place it was read at. */
export interface Read<Value> {
  readonly value: Value;
  readonly namespace: string;
  readonly name: string;
  /** Of a value in it, as `['spec', 'ports', 0]`, or the nearest parent that exists. */
  readonly at: (path: readonly PropertyKey[]) => Origin;
}

export type Service = Read<z.output<typeof serviceSchema>>;
export type EndpointSlice = Read<z.output<typeof sliceSchema>>;

export interface Manifest {
  /** As it is to be called in remarks. */
  readonly file: string;
  readonly text: string;
}

export interface Objects {
  readonly services: readonly Service[];
  readonly slices: readonly EndpointSlice[];
  readonly warnings: readonly Remark[];
  readonly faults: readonly Remark[];
}

/** Reads all there is to be read. Objects of other kinds are passed over. */
export function readObjects(manifests: readonly Manifest[]): Objects {
  const reader = new ObjectReader();
  for (const { file, text } of manifests) {
    const { documents, syntaxErrors } = readDocuments(text);
    for (const mistake of syntaxErrors) reader.faults.push({ file, subject: '', ...mistake });
    for (const document of documents) reader.readDocument(file, document);
  }
  return reader;
}

type Path = readonly PropertyKey[];

class ObjectReader implements Objects {
  readonly services: Service[] = [];
  readonly slices: EndpointSlice[] = [];
  readonly warnings: Remark[] = [];
  readonly faults: Remark[] = [];
  readonly #seen = new Map<string, Origin>();

  readDocument(file: string, document: YamlDocument): void {
    const fault = ({ path, message, at }: Fault): void => {
      this.faults.push({ file, ...document.locate(path, at), subject: formatPath(path), message });
    };
    document.faults.forEach(fault);
    if (document.faults.length === 0) this.#read(file, document, document.value, [], '');
  }

  #read(file: string, document: YamlDocument, value: unknown, path: Path, listed: string): void {
    const { apiVersion, kind = listed, items } = entries(value);
    const fault = (at: Path, message: string): void => {
      this.faults.push({ file, ...document.locate([...path, ...at]), subject: formatPath(path), message });
    };
    if (typeof kind !== 'string' || kind === '') fault([], 'is no Kubernetes object: it has no `kind`');
    else if (kind.endsWith('List') && Array.isArray(items)) {
      // Members of a ServiceList may leave out what they are.
      items.forEach((item, i) => {
        this.#read(file, document, item, [...path, 'items', i], kind.slice(0, -'List'.length));
      });
    } else if (kind === 'Service' && isVersion(apiVersion, 'v1', listed)) {
      this.#keep(this.services, serviceSchema, kind, file, document, value, path);
    } else if (kind === 'EndpointSlice' && isVersion(apiVersion, 'discovery.k8s.io/v1', listed)) {
      this.#keep(this.slices, sliceSchema, kind, file, document, value, path);
    } else if (kind === 'EndpointSlice') {
      fault(['apiVersion'], `is ${String(apiVersion)}; EndpointSlice is read as discovery.k8s.io/v1`);
    } else if (kind === 'Endpoints' && isVersion(apiVersion, 'v1', listed)) {
      this.warnings.push({
        file,
        ...document.locate(path),
        subject: 'Endpoints',
        message: 'are not read: EndpointSlices are, which the cluster makes of them',
      });
    }
  }

  #keep<Value extends { readonly metadata: { readonly name: string; readonly namespace?: string | null | undefined } }>(
    list: Read<Value>[],
    schema: z.ZodType<Value>,
    kind: string,
    file: string,
    document: YamlDocument,
    value: unknown,
    path: Path,
  ): void {
    const { name: given, namespace: where } = entries(entries(value).metadata);
    const subject = `${kind} ${typeof where === 'string' ? where : 'default'}/${String(given)}`;
    const result = schema.safeParse(value, { error: () => UNWORDED });
    if (!result.success) {
      for (const { path: inner, message } of faultsOf(result.error, value)) {
        const at = document.locate([...path, ...inner]);
        this.faults.push({ file, ...at, subject, message: `${formatPath(inner)} ${message}` });
      }
      return;
    }
    const { name, namespace } = result.data.metadata;
    const at = (inner: Path): Origin => ({ file, ...document.locate([...path, ...inner]), subject });
    const origin = at(['metadata', 'name']);
    const earlier = this.#seen.get(subject);
    if (earlier !== undefined) {
      const place = `${earlier.file}:${earlier.line}`;
      this.faults.push({ ...origin, message: `is given already, in ${place}` });
      return;
    }
    this.#seen.set(subject, origin);
    list.push({ value: result.data, name, namespace: namespace ?? 'default', at });
  }
}

function isVersion(given: unknown, wanted: string, listed: string): boolean {
  return given === wanted || (given === undefined && listed !== '');
}

function entries(value: unknown): Readonly<Record<string, unknown>> {
  return typeof value === 'object' && value !== null ? (value as Record<string, unknown>) : {};
}
