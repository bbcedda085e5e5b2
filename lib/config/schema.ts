import { z } from 'zod';
import { MAGLEV_TABLE_SIZES } from '../base/limits.js';
import { GENEVE_PORT } from '../wire/geneve.js';
import { parseDuration } from './duration.js';
import {
  absolutePathFault,
  addressFault,
  addressOrCidrFault,
  cidrFault,
  clip,
  deviceNameFault,
  listenFault,
  nameFault,
  portRangeFault,
} from './text-forms.js';

/**
 * The configuration as it is written: every key, its default, its limits, and the sentence docs/configuration.md says about
 * it. Only what one value can be judged by stands here; rules between values are rules.ts. Values stay as written: turning
 * them into numbers is derive.ts.
 *
 * A custom check's message is a fragment that reads after the value's path; faults.ts words everything zod itself finds.
 */

const HOUR_MS = 3_600_000;
/** What a timer can hold: setTimeout takes 2^31 - 1 ms. */
const MAX_INTERVAL_MS = 24 * HOUR_MS;
const MAX_DURATION_MS = 8760 * HOUR_MS;
const A_DURATION = 'a duration: whole numbers with the units h, m, s, ms, in this order, such as 90s or 2h13m20s';
/** 2 GiB of records. */
/** As many as a flow table can number (conntrack/memory.ts). */
export const MAX_ENTRIES = 0x7fffff;
const MAX_PER_SECOND = 1_000_000;
const MAX_BODY_TEXT = 1024;
/** A Maglev entry is the number of a backend in 16 bits. */
const MAX_BACKENDS = 65535;

/**
 * @param form How the documentation calls such a text.
 * @param otherwise What to say to a value that is no text; it is not asked about missing and empty ones.
 */
function text(form: string, fault: (text: string) => string | null, otherwise = quoteAdvice): z.ZodString {
  const error = ({ input }: { input: unknown }): string | undefined =>
    // faults.ts knows how to say that a key is missing or empty.
    input === undefined || input === null ? undefined : otherwise(input);
  const check = (context: z.core.ParsePayload<string>): void => {
    const message = fault(context.value);
    if (message !== null) context.issues.push({ code: 'custom', message, input: context.value });
  };
  return z.string({ error }).check(check).meta({ form });
}

function quoteAdvice(input: unknown): string {
  return typeof input === 'object' ? 'must be text' : `must be text; put it in quotes: "${String(input)}"`;
}

/** Text of which a bare number is a likely mistake. */
function timing(form: string, fault: (text: string) => string | null): z.ZodString {
  return text(form, fault, (input) =>
    typeof input === 'number' && input >= 0 ? `must have a unit: ${unitExamples(input)}` : `must be ${A_DURATION}`,
  );
}

function duration(minMs: 0 | 1 = 1, maxMs = MAX_DURATION_MS): z.ZodString {
  return timing('duration', (value) => durationFault(value, minMs, maxMs));
}

/** @param minMs 0 where "at once" or "never" makes sense, else 1. */
function durationFault(value: string, minMs: 0 | 1, maxMs: number): string | null {
  const ms = parseDuration(value);
  if (ms === null) return /^\d+$/.test(value) ? `must have a unit: ${unitExamples(value)}` : `must be ${A_DURATION}`;
  if (ms < minMs) return 'must be longer than 0';
  return ms > maxMs ? `must be at most ${maxMs / HOUR_MS}h` : null;
}

function unitExamples(value: string | number): string {
  return `${value}s, ${value}ms, ${value}m or ${value}h`;
}

function integer(min: number, max: number): z.ZodInt {
  const error = ({ input }: { input?: unknown }): string | undefined => {
    if (input === undefined || input === null) return undefined;
    const got =
      typeof input === 'string' ? `the text "${clip(input)}"` : typeof input === 'object' ? 'no number' : String(input);
    return `must be a whole number from ${min} to ${max} (got ${got})`;
  };
  return z.int({ error }).min(min, { error }).max(max, { error });
}

const address = () => text('IPv4 address', addressFault, () => 'must be an IPv4 address such as 10.0.0.1');
const port = () => integer(1, 65535);

const timeouts = z.strictObject({
  tcp: duration().default('8000s').describe('Established two-way TCP connections, also after one side’s FIN.'),
  tcpSyn: duration().default('60s').describe('TCP connections that are not established yet.'),
  tcpFin: duration().default('10s').describe('TCP connections both sides of which are closing, or after a valid RST.'),
  any: duration().default('60s').describe('Two-way flows of UDP and the rest.'),
  serviceTcp: duration().default('8000s').describe('One-way (dsr) TCP connections.'),
  serviceAny: duration().default('60s').describe('One-way (dsr) flows of UDP and the rest.'),
  serviceTcpGrace: duration().default('60s').describe('One-way (dsr) TCP connections after the client’s FIN.'),
});

const healthTiming = {
  interval: duration(1, MAX_INTERVAL_MS)
    .default('2s')
    .describe('From the start of one probe to the start of the next, up to a tenth less.'),
  timeout: duration(1, MAX_INTERVAL_MS).default('1s').describe('A probe without an answer after this long has failed.'),
  rise: integer(1, 1000).default(2).describe('Successes in a row that make a backend up.'),
  fall: integer(1, 1000).default(3).describe('Failures in a row that make a backend down.'),
};

const healthPort = port().optional().describe('Port of the probe; the backend’s own when absent. Not with type icmp.');

const health = z.discriminatedUnion('type', [
  z.strictObject({ type: z.literal('tcp').describe('Connect to the port.'), port: healthPort, ...healthTiming }),
  z.strictObject({
    type: z.literal('http').describe('A GET request.'),
    port: healthPort,
    path: text('URL path', (value) =>
      /^\/[\x21-\x7e]*$/.test(value) ? null : 'must be a URL path that starts with / and has no spaces',
    )
      .default('/')
      .describe('Path of the request, with its query if any. With type http only.'),
    host: text('host or `host:port`', (value) =>
      /^[\x21-\x2e\x30-\x7e]{1,255}$/.test(value) ? null : 'must be a host name, without spaces and slashes',
    )
      .optional()
      .describe('The Host header; address and port of the probe when absent. With type http only.'),
    status: integer(100, 599).default(200).describe('The status of a success. With type http only.'),
    body: text('text', (value) =>
      value === '' || value.length > MAX_BODY_TEXT ? `must have 1 to ${MAX_BODY_TEXT} characters` : null,
    )
      .optional()
      .describe('What the answer’s body must contain, in its first 64 KiB. With type http only.'),
    ...healthTiming,
  }),
  z.strictObject({
    type: z.literal('icmp').describe('An echo request; needs the optional package raw-socket and CAP_NET_RAW.'),
    ...healthTiming,
  }),
]);

const backend = z.strictObject({
  name: text('name', nameFault).optional().describe('Unique within the service; `address:port` when absent.'),
  address: address().describe('Where the backend is.'),
  port: port().describe('Where the backend listens.'),
  weight: integer(0, 65535).default(1).describe('Its share of new flows, relative to the others; 0: no new flows.'),
  maxConnections: integer(1, MAX_ENTRIES)
    .optional()
    .describe('New connections go to other backends while it has this many open; any number when absent.'),
  node: address()
    .optional()
    .describe(
      'Where the tunnel to this backend ends: its host, which runs weir with `role: node`. Mode dsr only; the backend’s address when absent.',
    ),
});

const service = z.strictObject({
  name: text('name', nameFault).describe('Unique; how commands, logs and metrics call the service.'),
  address: address().describe('The virtual IP (VIP). Several services may share one.'),
  port: port().describe('The port clients connect to.'),
  protocol: z
    .enum(['tcp', 'udp'])
    .default('tcp')
    .describe('Address, port and protocol together are the service’s identity.'),
  algorithm: z
    .enum(['random', 'maglev'])
    .default('maglev')
    .describe(
      '`random`: drawn once per flow, in proportion to the weights. `maglev`: consistent hashing, the same choice on every gateway and after a restart.',
    ),
  mode: z
    .enum(['dnat', 'snat', 'dsr'])
    .default('dnat')
    .describe(
      '`dnat`: backends see the client’s address and answer through weir. `snat`: backends see an address of `snat.addresses`. `dsr`: packets are tunnelled to the backend’s node, which answers the client directly.',
    ),
  affinity: z
    .strictObject({
      clientIp: duration().describe(
        'All flows of one client address go to one backend until none started for this long.',
      ),
    })
    .optional()
    .describe('Client affinity; none when absent.'),
  sourceRanges: z
    .array(text('IPv4 range', cidrFault, () => 'must be a range such as 10.0.0.0/8'))
    .default([])
    .describe('Client addresses that may connect, as CIDR blocks; others are dropped. Empty: every client.'),
  maxConnections: integer(1, MAX_ENTRIES)
    .optional()
    .describe(
      'New connections are refused, see `noBackend`, while the service has this many open; any number when absent.',
    ),
  newConnectionsPerSecond: integer(1, MAX_PER_SECOND)
    .optional()
    .describe(
      'What one client address may open a second, and at once after a pause; more are dropped. Any number when absent.',
    ),
  noBackend: z
    .enum(['reject', 'drop'])
    .default('reject')
    .describe(
      'What a client gets while no backend takes new flows, or `maxConnections` are open: an RST or ICMP unreachable, or silence.',
    ),
  onRemove: z
    .enum(['keep', 'reset'])
    .default('keep')
    .describe('Flows of a backend that leaves the file: kept for `drainTimeout`, or reset at once.'),
  drainTimeout: duration(0)
    .default('5m')
    .describe('How long the flows of a removed backend are kept at most. Traffic does not extend it.'),
  icmpEcho: z
    .boolean()
    .default(true)
    .describe('Answer echo requests to the VIP. One service with `true` is enough for a VIP that several share.'),
  health: health.optional().describe('Active health checks; without them every backend counts as up.'),
  allDown: z
    .enum(['reject', 'use-all'])
    .optional()
    .describe(
      'While no backend is up: `use-all`, all with a weight take flows, since it is more likely the checks that fail; `reject`: none does, see `noBackend`. When absent, `use-all` for a service with `health`.',
    ),
  backends: z.array(backend).max(MAX_BACKENDS).describe('May be empty, as `[]`.'),
});

/** A whole file. */
export const configSchema = z.strictObject({
  role: z
    .enum(['gateway', 'node'])
    .default('gateway')
    .describe('`gateway` balances; `node` runs on the host of dsr backends and ends the tunnel.'),
  device: z
    .strictObject({
      name: text('device name', deviceNameFault).default('weir0').describe('Name of the TUN device.'),
      mtu: integer(576, 65535)
        .default(1500)
        .describe('Its MTU, in bytes: that of the network towards clients and backends.'),
      engine: z
        .enum(['auto', 'io_uring', 'readwrite'])
        .default('auto')
        .describe('How packets are read and written; `auto` takes io_uring where the kernel has it.'),
      offload: z.boolean().default(true).describe('Take TCP super-packets of up to 64 KiB from the kernel.'),
    })
    .prefault({})
    .describe('The TUN device.'),
  network: z
    .strictObject({
      manage: z
        .boolean()
        .default(true)
        .describe('Routes, policy rules and sysctls are set and removed by weir; `false`: `weir net` prints them.'),
      untracked: z
        .enum(['pass', 'drop'])
        .default('pass')
        .describe('A packet from a backend that belongs to no connection: passed on unchanged, or dropped.'),
      table: integer(1, 0xffffffff)
        .refine((table) => table < 253 || table > 255, 'must not be 253, 254 or 255, the kernel’s own tables')
        .default(10096)
        .describe('Number of the routing table of the return path.'),
      returnPath: z
        .enum(['auto', 'interface'])
        .default('auto')
        .describe(
          'Policy rules that lead replies to weir: one per endpoint for up to 64 of them (`auto`), or one per backend-side interface.',
        ),
    })
    .prefault({})
    .describe('What weir sets up in the kernel.'),
  seed: text('text', (value) => (value === '' || value.length > 256 ? 'must have 1 to 256 characters' : null))
    .default('JLfvgnHc2kaSUFaI')
    .describe('Seed of Maglev and of the selection hash; the same on every gateway.'),
  maglev: z
    .strictObject({
      tableSize: z
        .literal([...MAGLEV_TABLE_SIZES])
        .default(16381)
        .describe('Entries of a Maglev table; about 100 times the backends of the largest service.'),
    })
    .prefault({})
    .describe('Consistent hashing.'),
  conntrack: z
    .strictObject({
      tcpEntries: integer(1, MAX_ENTRIES).default(524288).describe('Capacity for TCP connections, 160 bytes each.'),
      anyEntries: integer(1, MAX_ENTRIES).default(262144).describe('Capacity for the flows of UDP and the rest.'),
      timeouts: timeouts.prefault({}).describe('How long an entry lives after its last packet.'),
      gc: z
        .strictObject({
          interval: timing('`auto` or duration', (value) =>
            value === 'auto' ? null : durationFault(value, 1, MAX_INTERVAL_MS),
          )
            .default('auto')
            .describe('Between two full passes; `auto` adapts it to what they find, from 10s to 12h.'),
        })
        .prefault({})
        .describe('Removal of expired entries.'),
      recovery: duration(0)
        .default('60s')
        .describe(
          'After a start without a table: how long replies of maglev services are recognised by the hash; `0s`: never.',
        ),
      stateFile: text('absolute path', absolutePathFault)
        .optional()
        .describe('The table lives in this file and survives a restart or crash; meant for a tmpfs such as /run.'),
    })
    .prefault({})
    .describe('Connection tracking.'),
  snat: z
    .strictObject({
      addresses: z
        .array(address())
        .default([])
        .describe('Source addresses of flows to backends of services in mode snat.'),
      ports: text('port range', portRangeFault, () => 'must be a range of ports such as 32768-65535')
        .default('32768-65535')
        .describe('Source ports of the pool, both ends included.'),
    })
    .prefault({})
    .describe('The pool of mode snat.'),
  tunnel: z
    .strictObject({
      address: address()
        .optional()
        .describe('This host’s end of the tunnel. Required for mode dsr and for `role: node`.'),
      port: port().default(GENEVE_PORT).describe('UDP port of Geneve.'),
      vni: integer(0, 0xffffff).default(2).describe('Geneve network identifier.'),
      inner: z
        .enum(['ethernet', 'ip'])
        .default('ethernet')
        .describe('What the tunnel carries: Ethernet frames (62 bytes of overhead), or IP packets (48).'),
      option: z
        .enum(['always', 'syn'])
        .default('always')
        .describe('Which packets carry the VIP: all, or only those that start a flow.'),
      clampMss: z.boolean().default(true).describe('The node lowers the MSS it tells clients to what fits the tunnel.'),
      peers: z
        .array(
          text('IPv4 address or range', addressOrCidrFault, () => 'must be an address or range such as 10.0.0.0/8'),
        )
        .default([])
        .describe(
          'From whom a node accepts tunnelled packets: addresses and CIDR blocks of gateways. Empty: everyone.',
        ),
    })
    .prefault({})
    .describe('Geneve, for mode dsr.'),
  admin: z
    .strictObject({
      socket: text('absolute path', absolutePathFault)
        .default('/run/weir/weir.sock')
        .describe('UNIX socket of the commands.'),
      listen: text('`address:port` or `off`', listenFault)
        .default('127.0.0.1:9650')
        .describe('Read-only HTTP listener: metrics, health, status, dashboard. `off`: none.'),
      dashboard: z
        .boolean()
        .default(true)
        .describe(
          'The dashboard on `listen`, with what it shows: connections and their clients. `false`: the rest only.',
        ),
    })
    .prefault({})
    .describe('How weir is watched and commanded.'),
  services: z.array(service).default([]).describe('The services to balance.'),
});

/** A file that passed the schema, defaults filled in. */
export type WrittenConfig = z.output<typeof configSchema>;
export type WrittenService = WrittenConfig['services'][number];
