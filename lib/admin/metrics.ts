import { Counter, Gauge, Registry } from 'prom-client';
import { REASON_COUNT, REASON_KINDS, REASON_NAMES } from '../base/reasons.js';
import type { Runtime } from '../control/runtime.js';
import {
  STAT_FORWARDED,
  STAT_REASONS,
  STAT_RX_BYTES,
  STAT_RX_PACKETS,
  STAT_STATELESS,
  STAT_TX_BYTES,
  STAT_TX_PACKETS,
} from '../datapath/stats.js';

/** Metrics in Prometheus' text format, read from shared memory when they are scraped; nothing is counted twice. */
export function createMetrics(runtime: Runtime): Registry {
  const registry = new Registry();
  const registers = [registry];
  const gauge = (name: string, help: string, labelNames: string[], collect: (this: Gauge) => void): Gauge =>
    new Gauge({ name, help, labelNames, registers, collect });
  const counter = (name: string, help: string, labelNames: string[], collect: (this: Counter) => void): Counter =>
    new Counter({ name, help, labelNames, registers, collect });

  gauge('weir_conntrack_entries', 'Connections that live, by table.', ['table'], function () {
    for (const { name, live } of runtime.tables()) this.set({ table: name }, live);
  });
  gauge('weir_conntrack_limit', 'Connections a table has room for.', ['table'], function () {
    for (const { name, figures } of runtime.tables()) this.set({ table: name }, figures.capacity);
  });
  counter(
    'weir_conntrack_evictions_total',
    'Entries a full table gave up, by what they were.',
    ['table', 'class'],
    function () {
      this.reset();
      for (const { name, figures } of runtime.tables()) {
        this.inc({ table: name, class: 'expired' }, figures.evictedExpired);
        this.inc({ table: name, class: 'closing' }, figures.evictedClosing);
        this.inc({ table: name, class: 'half-open' }, figures.evictedHalfOpen);
      }
    },
  );
  counter('weir_conntrack_insert_failures_total', 'Entries a full table refused.', ['table'], function () {
    this.reset();
    for (const { name, figures } of runtime.tables()) this.inc({ table: name }, figures.insertFailures);
  });
  counter('weir_gc_runs_total', 'Full passes of the garbage collector.', [], function () {
    this.reset();
    this.inc(runtime.collection().runs);
  });
  gauge('weir_gc_interval_seconds', 'Time between two passes of the garbage collector.', [], function () {
    this.set(runtime.collection().intervalMs / 1000);
  });
  counter('weir_device_packets_total', 'Packets read from and written to the device.', ['direction'], function () {
    this.reset();
    this.inc({ direction: 'received' }, runtime.stats[STAT_RX_PACKETS]!);
    this.inc({ direction: 'sent' }, runtime.stats[STAT_TX_PACKETS]!);
  });
  counter('weir_device_bytes_total', 'Bytes read from and written to the device.', ['direction'], function () {
    this.reset();
    this.inc({ direction: 'received' }, runtime.stats[STAT_RX_BYTES]!);
    this.inc({ direction: 'sent' }, runtime.stats[STAT_TX_BYTES]!);
  });
  counter('weir_forwarded_packets_total', 'Packets of connections, translated and sent on.', [], function () {
    this.reset();
    this.inc(runtime.stats[STAT_FORWARDED]!);
  });
  counter('weir_stateless_packets_total', 'Packets forwarded without an entry, the table being full.', [], function () {
    this.reset();
    this.inc(runtime.stats[STAT_STATELESS]!);
  });
  for (const [kind, name, help] of [
    ['drop', 'weir_drops_total', 'Packets dropped, by reason.'],
    ['reply', 'weir_replies_total', 'Packets weir answered itself, by reason.'],
    ['pass', 'weir_passed_total', 'Packets passed on unchanged, by reason.'],
  ] as const) {
    counter(name, help, ['reason'], function () {
      this.reset();
      for (let reason = 0; reason < REASON_COUNT; reason++) {
        if (REASON_KINDS[reason] === kind)
          this.inc({ reason: REASON_NAMES[reason]! }, runtime.stats[STAT_REASONS + reason]!);
      }
    });
  }
  perBackend(runtime, counter);
  gauge(
    'weir_config_last_reload_success',
    'Whether the last attempt to load the configuration succeeded.',
    [],
    function () {
      this.set(runtime.lastReload.success ? 1 : 0);
    },
  );
  gauge('weir_config_applied_timestamp_seconds', 'When the running configuration came into force.', [], function () {
    this.set(runtime.appliedAtMs / 1000);
  });
  return registry;
}

type MakeCounter = (name: string, help: string, labelNames: string[], collect: (this: Counter) => void) => Counter;

function perBackend(runtime: Runtime, counter: MakeCounter): void {
  counter('weir_connections_total', 'Connections opened.', ['service', 'backend'], function () {
    this.reset();
    for (const service of runtime.services()) {
      for (const backend of service.backends)
        this.inc({ service: service.name, backend: backend.name }, backend.connections);
    }
  });
  for (const unit of ['packets', 'bytes'] as const) {
    const help = `${unit === 'packets' ? 'Packets' : 'Bytes'} of connections.`;
    counter(`weir_${unit}_total`, help, ['service', 'backend', 'direction'], function () {
      this.reset();
      for (const service of runtime.services()) {
        for (const backend of service.backends) {
          for (const direction of ['original', 'reply'] as const) {
            this.inc({ service: service.name, backend: backend.name, direction }, backend[unit][direction]);
          }
        }
      }
    });
  }
}
