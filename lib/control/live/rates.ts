import { REASON, REASON_MEANINGS, type ReasonName } from '../../base/reasons.js';
import type { BackendView, StatusView, TrafficView } from '../view.js';
import type { DeviceRatesView, LiveServiceView, RatesView, ReasonView } from './live-view.js';

/**
 * Rates from counters that were read twice. A counter that is smaller than before belongs to something else meanwhile, a backend that was
 * forgotten and came back: its rate is 0 that once.
 */

/** What of a view is counted. */
export type Counted = Pick<BackendView, 'packets' | 'bytes' | 'connections'>;

const NO_RATES: RatesView = {
  packets: { original: 0, reply: 0 },
  bits: { original: 0, reply: 0 },
  connections: 0,
};

/** @param before absent: there is nothing to compare with */
export function ratesOf(before: Counted | undefined, now: Counted, seconds: number): RatesView {
  if (before === undefined || seconds <= 0) return NO_RATES;
  return {
    packets: {
      original: rate(before.packets.original, now.packets.original, seconds),
      reply: rate(before.packets.reply, now.packets.reply, seconds),
    },
    bits: {
      original: rate(before.bytes.original * 8, now.bytes.original * 8, seconds),
      reply: rate(before.bytes.reply * 8, now.bytes.reply * 8, seconds),
    },
    connections: rate(before.connections, now.connections, seconds),
  };
}

export function addRates(all: readonly RatesView[]): RatesView {
  const sum = (part: (rates: RatesView) => number): number => round(all.reduce((total, each) => total + part(each), 0));
  return {
    packets: { original: sum(({ packets }) => packets.original), reply: sum(({ packets }) => packets.reply) },
    bits: { original: sum(({ bits }) => bits.original), reply: sum(({ bits }) => bits.reply) },
    connections: sum(({ connections }) => connections),
  };
}

export function deviceRates(
  before: TrafficView | undefined,
  now: TrafficView,
  seconds: number,
  services: readonly LiveServiceView[],
): DeviceRatesView {
  const of = (count: (traffic: TrafficView) => number): number =>
    before === undefined ? 0 : rate(count(before), count(now), seconds);
  return {
    packetsIn: of(({ rxPackets }) => rxPackets),
    packetsOut: of(({ txPackets }) => txPackets),
    bitsIn: of(({ rxBytes }) => rxBytes * 8),
    bitsOut: of(({ txBytes }) => txBytes * 8),
    connections: round(services.reduce((sum, { rates }) => sum + rates.connections, 0)),
    drops: of(({ drops }) => Object.values(drops).reduce((sum, packets) => sum + packets, 0)),
  };
}

/** Reasons that occurred, the most frequent first within their verdict. */
export function reasonRates(
  before: TrafficView | undefined,
  now: StatusView['traffic'],
  seconds: number,
): ReasonView[] {
  const view = (verdict: ReasonView['verdict'], counts: (traffic: TrafficView) => Readonly<Record<string, number>>) =>
    Object.entries(counts(now))
      .filter(([, packets]) => packets > 0)
      .map(([reason, packets]): ReasonView => {
        const earlier = before === undefined ? packets : (counts(before)[reason] ?? 0);
        const meaning = REASON_MEANINGS[REASON[reason as ReasonName]] ?? '';
        return { reason, verdict, meaning, packets, rate: rate(earlier, packets, seconds) };
      })
      .sort((a, b) => b.packets - a.packets);
  return [
    ...view('drop', ({ drops }) => drops),
    ...view('reply', ({ replies }) => replies),
    ...view('pass', ({ passes }) => passes),
  ];
}

function rate(before: number, now: number, seconds: number): number {
  return seconds <= 0 ? 0 : round(Math.max(0, now - before) / seconds);
}

/** To a tenth: more digits would be noise, and make every view longer. */
function round(value: number): number {
  return Math.round(value * 10) / 10;
}
