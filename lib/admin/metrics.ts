import { Counter, Gauge, type Metric as PromMetric, Registry } from 'prom-client';
import type { Histogram } from '../base/histogram.js';
import type { RunningWeir } from '../control/view.js';
import { figuresOf, METRICS, type Metric } from './metric-table.js';

export interface Metrics {
  readonly contentType: string;
  /** All metrics in Prometheus' text format, piece by piece. An empty piece: a rest would be welcome. */
  scrape(): AsyncGenerator<string>;
}

/** Series that are made at a time: some 2 ms. */
const SERIES_AT_ONCE = 1000;

/** One metric of prom-client's, set anew from one moment's figures: so that the series of what is gone go too. */
type Instrument = (figures: ReturnType<typeof figuresOf>) => Iterable<void>;

/**
 * What the data path counts, under its public names. Nothing is counted here: every scrape reads the counters, at one moment but for
 * the connections, then writes them in pieces. A metric with many series is written in several, each with a part of them.
 */
export function createMetrics(weir: RunningWeir): Metrics {
  const registry = new Registry();
  const instruments = METRICS.map((metric) => ({ metric, fill: makeInstrument(metric, registry) }));
  return {
    contentType: registry.contentType,
    async *scrape() {
      const overview = weir.overview();
      let step = overview.next();
      for (; !step.done; step = overview.next()) yield '';
      const figures = figuresOf(step.value);
      yield '';
      for (const { metric, fill } of instruments) {
        let isFirst = true;
        for (const _ of fill(figures)) {
          const text = await registry.getSingleMetricAsString(metric.name);
          yield `${isFirst ? text : withoutHead(text)}\n`;
          isFirst = false;
        }
      }
    },
  };
}

function makeInstrument(metric: Metric, registry: Registry): Instrument {
  const { name, help } = metric;
  if (metric.type === 'histogram') {
    let shown: Histogram = { buckets: [], count: 0, sum: 0 };
    // prom-client's own histogram has to see each value; these were counted elsewhere.
    const reading = { name, help, get: async () => ({ name, help, type: 'histogram', values: linesOf(name, shown) }) };
    registry.registerMetric(reading as unknown as PromMetric);
    return function* (figures) {
      shown = metric.histogram(figures);
      yield;
    };
  }
  const { labels = [], samples } = metric;
  const options = { name, help, labelNames: [...labels], registers: [registry] };
  const instrument = metric.type === 'gauge' ? new Gauge(options) : new Counter(options);
  return function* (figures) {
    const all = samples(figures);
    for (let first = 0; first === 0 || first < all.length; first += SERIES_AT_ONCE) {
      instrument.reset();
      for (const [at, value] of all.slice(first, first + SERIES_AT_ONCE)) instrument.inc(at, value);
      yield;
    }
  };
}

function linesOf(name: string, { buckets, count, sum }: Histogram): object[] {
  return [
    ...buckets.map(({ bound, count }) => ({ metricName: `${name}_bucket`, labels: { le: bound }, value: count })),
    { metricName: `${name}_bucket`, labels: { le: '+Inf' }, value: count },
    { metricName: `${name}_sum`, value: sum },
    { metricName: `${name}_count`, value: count },
  ];
}

/** Without the lines that say what a metric means and is. */
function withoutHead(text: string): string {
  return text.slice(text.indexOf('\n', text.indexOf('\n') + 1) + 1);
}
