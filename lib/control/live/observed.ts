import type { Clock } from '../../base/clock.js';
import type { TableReader } from '../../conntrack/table-reader.js';
import type { Census } from '../census.js';
import { inSteps } from '../pace.js';
import { listServices, type ServiceSources, viewService } from '../service-views.js';
import type { ConntrackView, StatusView } from '../view.js';
import { LiveFeed, type Sample, type SampledService } from './live-feed.js';
import { Shares } from './shares.js';
import { type Survey, surveyInSteps } from './survey.js';

/** Backends in a view: as many as fit, in whole services, but one service at least. */
const SHOWN_BACKENDS = 1000;

export interface Observed extends ServiceSources {
  readonly clock: Clock;
  readonly readers: { readonly tcp: TableReader; readonly any: TableReader };
  packetsRead(): number;
  status(census: Census): StatusView;
  conntrack(census: Census): ConntrackView;
}

/** The live feed of a running weir. */
export function openLiveFeed(observed: Observed): LiveFeed {
  const { clock, readers, desired } = observed;
  const shares = new Shares();
  return new LiveFeed({
    clock,
    timeOfDay: () => new Date().toISOString(),
    later: (run, ms) => {
      const timer = setTimeout(run, ms).unref();
      return () => clearTimeout(timer);
    },
    survey: (worked) => {
      const steps = surveyInSteps([readers.tcp, readers.any], clock.nowMs(), desired.identities.backendRows);
      return inSteps(timed(steps, worked), observed.packetsRead);
    },
    sample: ({ census }) => sample(observed, census, shares),
  });
}

function sample(observed: Observed, census: Census, shares: Shares): Sample {
  const { desired } = observed;
  const services: SampledService[] = [];
  let backends = 0;
  let omittedServices = 0;
  for (const listed of listServices(desired)) {
    backends += listed.members.length;
    if (services.length > 0 && backends > SHOWN_BACKENDS) {
      omittedServices++;
      continue;
    }
    services.push({
      view: viewService(listed, observed, census),
      shares: listed.members.map(({ identity }) => shares.shareOf(desired.snapshot, listed.id, identity.id)),
    });
  }
  return { status: observed.status(census), services, omittedServices, conntrack: observed.conntrack(census) };
}

function* timed(steps: Generator<void, Survey>, worked: (ms: number) => void): Generator<void, Survey> {
  for (;;) {
    const beganMs = performance.now();
    const { done, value } = steps.next();
    worked(performance.now() - beganMs);
    if (done) return value;
    yield;
  }
}
