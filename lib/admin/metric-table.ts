import type { Histogram } from '../base/histogram.js';
import type { BackendView, CountsView, Overview } from '../control/view.js';

/** A value under its labels. */
export type Sample = readonly [labels: Readonly<Record<string, string>>, value: number];

interface Named {
  /** By Prometheus' rules: base units, `_total` for counters. */
  readonly name: string;
  readonly help: string;
}

interface Sampled extends Named {
  readonly type: 'gauge' | 'counter';
  readonly labels?: readonly string[];
  samples(figures: Figures): readonly Sample[];
}

interface Distributed extends Named {
  readonly type: 'histogram';
  histogram(figures: Figures): Histogram;
}

export type Metric = Sampled | Distributed;

/** All that a scrape shows, as it was at one moment. */
export interface Figures extends Overview {
  readonly backends: readonly BackendFigures[];
}

/**
 * A backend, or several of one name in one service, of which all but one have left the file: their figures are one, with what was counted
 * under that name before.
 */
interface BackendFigures extends CountsView, Pick<BackendView, 'flows' | 'snatPorts'> {
  readonly labels: { readonly service: string; readonly backend: string };
  readonly isSnat: boolean;
  /** The one that is in the file. */
  readonly configured: BackendView | null;
}

export function figuresOf(overview: Overview): Figures {
  const backends = new Map<string, BackendFigures>();
  for (const service of overview.services) {
    for (const backend of service.backends) {
      const key = `${service.name}/${backend.name}`;
      const labels = { service: service.name, backend: backend.name };
      const isHere = !service.removed && !backend.removed;
      const own = { ...backend, labels, isSnat: service.mode === 'snat', configured: isHere ? backend : null };
      const namesake = backends.get(key);
      const past = namesake === undefined ? overview.past(service.name, backend.name) : null;
      const counted = past === null ? own : { ...own, ...sum(own, past) };
      backends.set(key, namesake === undefined ? counted : together(namesake, own));
    }
  }
  return { ...overview, backends: [...backends.values()] };
}

function together(a: BackendFigures, b: BackendFigures): BackendFigures {
  return {
    labels: a.labels,
    isSnat: a.isSnat || b.isSnat,
    configured: a.configured ?? b.configured,
    flows: a.flows + b.flows,
    snatPorts: a.snatPorts + b.snatPorts,
    ...sum(a, b),
  };
}

function sum(a: CountsView, b: CountsView): CountsView {
  const both = (x: BackendView['packets'], y: BackendView['packets']) => ({
    original: x.original + y.original,
    reply: x.reply + y.reply,
  });
  return {
    connections: a.connections + b.connections,
    closed: a.closed + b.closed,
    packets: both(a.packets, b.packets),
    bytes: both(a.bytes, b.bytes),
    signals: {
      refused: a.signals.refused + b.signals.refused,
      unanswered: a.signals.unanswered + b.signals.unanswered,
    },
  };
}

const TABLES = ['tcp', 'any'] as const;

/** Every metric, in the order of docs/metrics.md, which explains each. */
export const METRICS: readonly Metric[] = [
  {
    name: 'weir_build_info',
    type: 'gauge',
    help: 'Always 1; what runs is in the labels.',
    labels: ['version', 'engine'],
    samples: ({ status: { version, device } }) => [[{ version, engine: device.engine }, 1]],
  },
  {
    name: 'weir_device_info',
    type: 'gauge',
    help: 'Always 1; what the device can do is in the labels.',
    labels: ['device', 'engine', 'vnet_header', 'csum', 'tso4', 'tso6', 'uso'],
    samples: ({ status: { device } }) => {
      const { csum, tso4, tso6, uso } = device.offloads;
      const can = { vnet_header: device.vnetHeader, csum, tso4, tso6, uso };
      const words = Object.entries(can).map(([name, value]) => [name, String(value)]);
      return [[{ device: device.name, engine: device.engine, ...Object.fromEntries(words) }, 1]];
    },
  },
  {
    name: 'weir_start_time_seconds',
    type: 'gauge',
    help: 'When weir was started, since the epoch.',
    samples: ({ status }) => [[{}, epochSeconds(status.startedAt)]],
  },
  {
    name: 'weir_resident_memory_bytes',
    type: 'gauge',
    help: 'Memory the process has in RAM.',
    samples: () => [[{}, process.memoryUsage.rss()]],
  },
  {
    name: 'weir_conntrack_entries',
    type: 'gauge',
    help: 'Connections that have not expired, by table.',
    labels: ['table'],
    samples: ({ conntrack: { tables } }) => TABLES.map((table) => [{ table }, tables[table].entries]),
  },
  {
    name: 'weir_conntrack_limit',
    type: 'gauge',
    help: 'Connections a table has room for.',
    labels: ['table'],
    samples: ({ conntrack: { tables } }) => TABLES.map((table) => [{ table }, tables[table].limit]),
  },
  {
    name: 'weir_conntrack_gc_interval_seconds',
    type: 'gauge',
    help: 'Time from one pass of the garbage collector to the next.',
    samples: ({ conntrack: { gc } }) => [[{}, gc.intervalSeconds]],
  },
  {
    name: 'weir_conntrack_gc_last_pass_seconds',
    type: 'gauge',
    help: 'Time the last full pass took, all slices together.',
    samples: ({ conntrack: { gc } }) => [[{}, gc.lastPassSeconds]],
  },
  {
    name: 'weir_conntrack_gc_longest_slice_seconds',
    type: 'gauge',
    help: 'The longest that packets have waited for the garbage collector.',
    samples: ({ conntrack: { gc } }) => [[{}, gc.longestSliceSeconds]],
  },
  {
    name: 'weir_connections_active',
    type: 'gauge',
    help: 'Connections that have not expired, by backend.',
    labels: ['service', 'backend'],
    samples: eachBackend(({ flows }) => flows),
  },
  {
    name: 'weir_snat_ports_used',
    type: 'gauge',
    help: 'Ports of the snat pool that connections to a backend take; of backends of snat services, and where there are any.',
    labels: ['service', 'backend'],
    samples: ({ backends }) =>
      backends
        .filter(({ isSnat, snatPorts }) => isSnat || snatPorts > 0)
        .map(({ labels, snatPorts }) => [labels, snatPorts]),
  },
  {
    name: 'weir_snat_ports_limit',
    type: 'gauge',
    help: 'Ports of the snat pool there are towards each backend: addresses times ports.',
    samples: ({ snatPortsPerBackend }) => [[{}, snatPortsPerBackend]],
  },
  {
    name: 'weir_backend_up',
    type: 'gauge',
    help: 'Whether a backend is up by its health checks (1, also without checks) or down (0).',
    labels: ['service', 'backend'],
    samples: eachConfigured(({ health }) => (health?.state === 'down' ? 0 : 1)),
  },
  {
    name: 'weir_backend_takes_new',
    type: 'gauge',
    help: 'Whether new connections go to a backend (1), or it is draining, or down while others are up (0).',
    labels: ['service', 'backend'],
    samples: eachConfigured(({ takesNew }) => (takesNew ? 1 : 0)),
  },
  {
    name: 'weir_config_last_reload_success',
    type: 'gauge',
    help: 'Whether the configuration file was taken the last time it was read (1) or refused (0).',
    samples: ({ status: { config } }) => [[{}, config.lastReload.success ? 1 : 0]],
  },
  {
    name: 'weir_config_last_reload_timestamp_seconds',
    type: 'gauge',
    help: 'When the configuration file was last read, since the epoch.',
    samples: ({ status: { config } }) => [[{}, epochSeconds(config.lastReload.at)]],
  },
  {
    name: 'weir_config_last_reload_duration_seconds',
    type: 'gauge',
    help: 'Time it took to read and judge the configuration file the last time, and to apply it where it was taken.',
    samples: ({ status: { config } }) => [[{}, config.lastReload.seconds]],
  },
  {
    name: 'weir_config_applied_timestamp_seconds',
    type: 'gauge',
    help: 'Since when the configuration in use is in use, since the epoch.',
    samples: ({ status: { config } }) => [[{}, epochSeconds(config.appliedAt)]],
  },
  {
    name: 'weir_config_reloads_total',
    type: 'counter',
    help: 'Times the configuration file was read since the start, by what became of it.',
    labels: ['result'],
    samples: ({ status: { config } }) => [
      [{ result: 'applied' }, config.reloads.applied],
      [{ result: 'refused' }, config.reloads.refused],
    ],
  },
  {
    name: 'weir_packets_total',
    type: 'counter',
    help: 'Packets of connections, by the backend and the direction: original is from the client.',
    labels: ['service', 'backend', 'direction'],
    samples: eachDirection(({ packets }) => packets),
  },
  {
    name: 'weir_bytes_total',
    type: 'counter',
    help: 'Bytes of those packets, IP headers included.',
    labels: ['service', 'backend', 'direction'],
    samples: eachDirection(({ bytes }) => bytes),
  },
  {
    name: 'weir_connections_total',
    type: 'counter',
    help: 'Connections begun, by backend.',
    labels: ['service', 'backend'],
    samples: eachBackend(({ connections }) => connections),
  },
  {
    name: 'weir_connections_closed_total',
    type: 'counter',
    help: 'Connections that left the table, by backend: ended, timed out or replaced.',
    labels: ['service', 'backend'],
    samples: eachBackend(({ closed }) => closed),
  },
  {
    name: 'weir_backend_refused_syns_total',
    type: 'counter',
    help: 'SYNs a backend answered with an RST.',
    labels: ['service', 'backend'],
    samples: eachBackend(({ signals }) => signals.refused),
  },
  {
    name: 'weir_backend_unanswered_syns_total',
    type: 'counter',
    help: 'Connections that ended before the backend had answered their SYN.',
    labels: ['service', 'backend'],
    samples: eachBackend(({ signals }) => signals.unanswered),
  },
  {
    name: 'weir_drops_total',
    type: 'counter',
    help: 'Packets dropped, by reason; docs/reasons.md says what each means.',
    labels: ['reason'],
    samples: ({ status: { traffic } }) => byReason(traffic.drops),
  },
  {
    name: 'weir_replies_total',
    type: 'counter',
    help: 'Packets that weir answered itself, by reason.',
    labels: ['reason'],
    samples: ({ status: { traffic } }) => byReason(traffic.replies),
  },
  {
    name: 'weir_passes_total',
    type: 'counter',
    help: 'Packets passed on unchanged, by reason.',
    labels: ['reason'],
    samples: ({ status: { traffic } }) => byReason(traffic.passes),
  },
  {
    name: 'weir_device_packets_total',
    type: 'counter',
    help: 'Packets from the device (rx) and to it (tx); a super-packet is one.',
    labels: ['direction'],
    samples: ({ status: { traffic } }) => [
      [{ direction: 'rx' }, traffic.rxPackets],
      [{ direction: 'tx' }, traffic.txPackets],
    ],
  },
  {
    name: 'weir_device_bytes_total',
    type: 'counter',
    help: 'Bytes from the device (rx) and to it (tx).',
    labels: ['direction'],
    samples: ({ status: { traffic } }) => [
      [{ direction: 'rx' }, traffic.rxBytes],
      [{ direction: 'tx' }, traffic.txBytes],
    ],
  },
  {
    name: 'weir_batches_total',
    type: 'counter',
    help: 'Batches of packets handled.',
    samples: ({ status: { traffic } }) => [[{}, traffic.batches]],
  },
  {
    name: 'weir_batch_packets',
    type: 'histogram',
    help: 'Packets in a batch.',
    histogram: ({ loop }) => loop.batchPackets,
  },
  {
    name: 'weir_batch_duration_seconds',
    type: 'histogram',
    help: 'Time from the arrival of a batch until its last packet was decided and queued.',
    histogram: ({ loop }) => loop.batchSeconds,
  },
  {
    name: 'weir_batch_longest_seconds',
    type: 'gauge',
    help: 'The longest a batch has taken since the start.',
    samples: ({ loop }) => [[{}, loop.longestBatchSeconds]],
  },
  {
    name: 'weir_idle_wakeups_total',
    type: 'counter',
    help: 'Times the data path woke without a packet: timers and news from the main thread.',
    samples: ({ loop }) => [[{}, loop.idleWakeups]],
  },
  {
    name: 'weir_stateless_packets_total',
    type: 'counter',
    help: 'Packets forwarded without an entry, the table being full.',
    samples: ({ status: { traffic } }) => [[{}, traffic.stateless]],
  },
  {
    name: 'weir_picked_up_total',
    type: 'counter',
    help: 'Connections taken up in the middle, after a restart or a move between gateways.',
    samples: ({ status: { traffic } }) => [[{}, traffic.pickedUp]],
  },
  {
    name: 'weir_cut_total',
    type: 'counter',
    help: 'Connections ended because the drain time of their backend was over.',
    samples: ({ status: { traffic } }) => [[{}, traffic.cut]],
  },
  {
    name: 'weir_conntrack_inserted_total',
    type: 'counter',
    help: 'Entries made, by table.',
    labels: ['table'],
    samples: ({ conntrack: { tables } }) => TABLES.map((table) => [{ table }, tables[table].inserted]),
  },
  {
    name: 'weir_conntrack_insert_failures_total',
    type: 'counter',
    help: 'Entries refused: the table was full and nothing could be evicted.',
    labels: ['table'],
    samples: ({ conntrack: { tables } }) => TABLES.map((table) => [{ table }, tables[table].insertFailures]),
  },
  {
    name: 'weir_conntrack_evictions_total',
    type: 'counter',
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
    type: 'counter',
    help: 'Full passes of the garbage collector.',
    samples: ({ conntrack: { gc } }) => [[{}, gc.runs]],
  },
  {
    name: 'weir_conntrack_gc_duration_seconds_total',
    type: 'counter',
    help: 'Time the garbage collector has taken.',
    samples: ({ conntrack: { gc } }) => [[{}, gc.totalSeconds]],
  },
  {
    name: 'weir_conntrack_gc_deleted_total',
    type: 'counter',
    help: 'Expired entries the garbage collector took out.',
    labels: ['table'],
    samples: ({ conntrack: { tables } }) => TABLES.map((table) => [{ table }, tables[table].collected]),
  },
];

function eachBackend(value: (backend: BackendFigures) => number): Sampled['samples'] {
  return ({ backends }) => backends.map((backend) => [backend.labels, value(backend)]);
}

function eachConfigured(value: (backend: BackendView) => number): Sampled['samples'] {
  return ({ backends }) =>
    backends.flatMap(({ labels, configured }): Sample[] => (configured === null ? [] : [[labels, value(configured)]]));
}

function eachDirection(values: (backend: BackendFigures) => BackendView['packets']): Sampled['samples'] {
  return ({ backends }) =>
    backends.flatMap((backend): Sample[] => {
      const { original, reply } = values(backend);
      return [
        [{ ...backend.labels, direction: 'original' }, original],
        [{ ...backend.labels, direction: 'reply' }, reply],
      ];
    });
}

function byReason(counts: Readonly<Record<string, number>>): Sample[] {
  return Object.entries(counts).map(([reason, count]) => [{ reason }, count]);
}

function epochSeconds(iso: string): number {
  return Date.parse(iso) / 1000;
}
