import { Counter, Gauge, Registry } from 'prom-client';
import type { Overview, RunningWeir } from '../control/view.js';

export interface Metrics {
  readonly contentType: string;
  /** All metrics in Prometheus' text format. */
  scrape(): Promise<string>;
}

/** A value under its labels. */
type Sample = readonly [labels: Record<string, string>, value: number];

interface Metric {
  readonly name: string;
  readonly help: string;
  readonly labels?: readonly string[];
  samples(overview: Overview): Iterable<Sample>;
}

/**
 * What the data path counts, under its public names. Nothing is counted here: every scrape reads the counters and sets all
 * series anew, so that those of what is gone go too.
 */
export function createMetrics(weir: RunningWeir): Metrics {
  const registers = [new Registry()];
  const gauges = GAUGES.map(({ name, help, labels = [], samples }) => {
    const gauge = new Gauge({ name, help, labelNames: [...labels], registers });
    return (overview: Overview): void => {
      gauge.reset();
      for (const [at, value] of samples(overview)) gauge.inc(at, value);
    };
  });
  const counters = COUNTERS.map(({ name, help, labels = [], samples }) => {
    const counter = new Counter({ name, help, labelNames: [...labels], registers });
    return (overview: Overview): void => {
      counter.reset();
      for (const [at, value] of samples(overview)) counter.inc(at, value);
    };
  });
  const registry = registers[0]!;
  return {
    contentType: registry.contentType,
    scrape() {
      const overview = weir.overview();
      for (const update of [...gauges, ...counters]) update(overview);
      return registry.metrics();
    },
  };
}

const TABLES = ['tcp', 'any'] as const;

const GAUGES: readonly Metric[] = [
  {
    name: 'weir_build_info',
    help: 'Always 1; what runs is in the labels.',
    labels: ['version', 'engine'],
    samples: ({ status: { version, device } }) => [[{ version, engine: device.engine }, 1]],
  },
  {
    name: 'weir_start_time_seconds',
    help: 'When weir was started, since the epoch.',
    samples: ({ status }) => [[{}, epochSeconds(status.startedAt)]],
  },
  {
    name: 'weir_resident_memory_bytes',
    help: 'Memory the process has in RAM.',
    samples: () => [[{}, process.memoryUsage.rss()]],
  },
  {
    name: 'weir_conntrack_entries',
    help: 'Connections that have not expired, by table.',
    labels: ['table'],
    samples: ({ conntrack: { tables } }) => TABLES.map((table) => [{ table }, tables[table].entries]),
  },
  {
    name: 'weir_conntrack_limit',
    help: 'Connections a table has room for.',
    labels: ['table'],
    samples: ({ conntrack: { tables } }) => TABLES.map((table) => [{ table }, tables[table].limit]),
  },
  {
    name: 'weir_conntrack_gc_interval_seconds',
    help: 'Time from one pass of the garbage collector to the next.',
    samples: ({ conntrack: { gc } }) => [[{}, gc.intervalSeconds]],
  },
  {
    name: 'weir_conntrack_gc_last_pass_seconds',
    help: 'Time the last full pass took, all slices together.',
    samples: ({ conntrack: { gc } }) => [[{}, gc.lastPassSeconds]],
  },
  {
    name: 'weir_conntrack_gc_longest_slice_seconds',
    help: 'The longest that packets have waited for the garbage collector.',
    samples: ({ conntrack: { gc } }) => [[{}, gc.longestSliceSeconds]],
  },
  {
    name: 'weir_connections_active',
    help: 'Connections that have not expired, by backend.',
    labels: ['service', 'backend'],
    samples: (overview) => eachBackend(overview, ({ flows }) => flows),
  },
  {
    name: 'weir_backend_up',
    help: 'Whether a backend is up by its health checks (1, also without checks) or down (0).',
    labels: ['service', 'backend'],
    samples: (overview) => eachBackend(configured(overview), ({ health }) => (health?.state === 'down' ? 0 : 1)),
  },
  {
    name: 'weir_backend_takes_new',
    help: 'Whether new connections go to a backend (1), or it is draining, or down while others are up (0).',
    labels: ['service', 'backend'],
    samples: (overview) => eachBackend(configured(overview), ({ takesNew }) => (takesNew ? 1 : 0)),
  },
  {
    name: 'weir_config_last_reload_success',
    help: 'Whether the configuration file was taken the last time it was read (1) or refused (0).',
    samples: ({ status: { config } }) => [[{}, config.lastReload.success ? 1 : 0]],
  },
  {
    name: 'weir_config_last_reload_timestamp_seconds',
    help: 'When the configuration file was last read, since the epoch.',
    samples: ({ status: { config } }) => [[{}, epochSeconds(config.lastReload.at)]],
  },
  {
    name: 'weir_config_applied_timestamp_seconds',
    help: 'Since when the configuration in use is in use, since the epoch.',
    samples: ({ status: { config } }) => [[{}, epochSeconds(config.appliedAt)]],
  },
];

const COUNTERS: readonly Metric[] = [
  {
    name: 'weir_packets_total',
    help: 'Packets of connections, by the backend and the direction: original is from the client.',
    labels: ['service', 'backend', 'direction'],
    samples: (overview) => eachDirection(overview, ({ packets }) => packets),
  },
  {
    name: 'weir_bytes_total',
    help: 'Bytes of those packets, IP headers included.',
    labels: ['service', 'backend', 'direction'],
    samples: (overview) => eachDirection(overview, ({ bytes }) => bytes),
  },
  {
    name: 'weir_connections_total',
    help: 'Connections begun, by backend.',
    labels: ['service', 'backend'],
    samples: (overview) => eachBackend(overview, ({ connections }) => connections),
  },
  {
    name: 'weir_backend_refused_syns_total',
    help: 'SYNs a backend answered with an RST.',
    labels: ['service', 'backend'],
    samples: (overview) => eachBackend(overview, ({ signals }) => signals.refused),
  },
  {
    name: 'weir_backend_unanswered_syns_total',
    help: 'Connections that ended before the backend had answered their SYN.',
    labels: ['service', 'backend'],
    samples: (overview) => eachBackend(overview, ({ signals }) => signals.unanswered),
  },
  {
    name: 'weir_drops_total',
    help: 'Packets dropped, by reason; docs/reasons.md says what each means.',
    labels: ['reason'],
    samples: ({ status: { traffic } }) => byReason(traffic.drops),
  },
  {
    name: 'weir_replies_total',
    help: 'Packets that weir answered itself, by reason.',
    labels: ['reason'],
    samples: ({ status: { traffic } }) => byReason(traffic.replies),
  },
  {
    name: 'weir_passes_total',
    help: 'Packets passed on unchanged, by reason.',
    labels: ['reason'],
    samples: ({ status: { traffic } }) => byReason(traffic.passes),
  },
  {
    name: 'weir_device_packets_total',
    help: 'Packets from the device (rx) and to it (tx); a super-packet is one.',
    labels: ['direction'],
    samples: ({ status: { traffic } }) => [
      [{ direction: 'rx' }, traffic.rxPackets],
      [{ direction: 'tx' }, traffic.txPackets],
    ],
  },
  {
    name: 'weir_device_bytes_total',
    help: 'Bytes from the device (rx) and to it (tx).',
    labels: ['direction'],
    samples: ({ status: { traffic } }) => [
      [{ direction: 'rx' }, traffic.rxBytes],
      [{ direction: 'tx' }, traffic.txBytes],
    ],
  },
  {
    name: 'weir_batches_total',
    help: 'Batches of packets handled.',
    samples: ({ status: { traffic } }) => [[{}, traffic.batches]],
  },
  {
    name: 'weir_stateless_packets_total',
    help: 'Packets forwarded without an entry, the table being full.',
    samples: ({ status: { traffic } }) => [[{}, traffic.stateless]],
  },
  {
    name: 'weir_picked_up_total',
    help: 'Connections taken up in the middle, after a restart or a move between gateways.',
    samples: ({ status: { traffic } }) => [[{}, traffic.pickedUp]],
  },
  {
    name: 'weir_cut_total',
    help: 'Connections ended because the drain time of their backend was over.',
    samples: ({ status: { traffic } }) => [[{}, traffic.cut]],
  },
  {
    name: 'weir_conntrack_inserted_total',
    help: 'Entries made, by table.',
    labels: ['table'],
    samples: ({ conntrack: { tables } }) => TABLES.map((table) => [{ table }, tables[table].inserted]),
  },
  {
    name: 'weir_conntrack_insert_failures_total',
    help: 'Entries refused: the table was full and nothing could be evicted.',
    labels: ['table'],
    samples: ({ conntrack: { tables } }) => TABLES.map((table) => [{ table }, tables[table].insertFailures]),
  },
  {
    name: 'weir_conntrack_evictions_total',
    help: 'Entries a full table gave up for new ones, by what they were.',
    labels: ['table', 'class'],
    samples: ({ conntrack: { tables } }) =>
      TABLES.flatMap((table): Sample[] => {
        const { expired, closing, halfOpen } = tables[table].evicted;
        return [
          [{ table, class: 'expired' }, expired],
          [{ table, class: 'closing' }, closing],
          [{ table, class: 'half-open' }, halfOpen],
        ];
      }),
  },
  {
    name: 'weir_conntrack_gc_runs_total',
    help: 'Full passes of the garbage collector.',
    samples: ({ conntrack: { gc } }) => [[{}, gc.runs]],
  },
  {
    name: 'weir_conntrack_gc_deleted_total',
    help: 'Expired entries the garbage collector took out.',
    labels: ['table'],
    samples: ({ conntrack: { tables } }) => TABLES.map((table) => [{ table }, tables[table].collected]),
  },
];

type Backend = Overview['services'][number]['backends'][number];

/** Without what left the file: two of one name would add up. */
function configured({ services, ...rest }: Overview): Overview {
  const kept = services.filter(({ removed }) => !removed);
  return {
    ...rest,
    services: kept.map((each) => ({ ...each, backends: each.backends.filter(({ removed }) => !removed) })),
  };
}

function eachBackend({ services }: Overview, value: (backend: Backend) => number): Sample[] {
  return services.flatMap((service) =>
    service.backends.map((backend): Sample => [{ service: service.name, backend: backend.name }, value(backend)]),
  );
}

function eachDirection({ services }: Overview, values: (backend: Backend) => Backend['packets']): Sample[] {
  return services.flatMap((service) =>
    service.backends.flatMap((backend): Sample[] => {
      const labels = { service: service.name, backend: backend.name };
      const { original, reply } = values(backend);
      return [
        [{ ...labels, direction: 'original' }, original],
        [{ ...labels, direction: 'reply' }, reply],
      ];
    }),
  );
}

function byReason(counts: Readonly<Record<string, number>>): Sample[] {
  return Object.entries(counts).map(([reason, count]) => [{ reason }, count]);
}

function epochSeconds(iso: string): number {
  return Date.parse(iso) / 1000;
}
