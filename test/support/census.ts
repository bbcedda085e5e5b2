import { type Census, censusInSteps } from '../../lib/control/census.js';

/** A census without rests. */
export function takeCensus(...args: Parameters<typeof censusInSteps>): Census {
  const steps = censusInSteps(...args);
  for (;;) {
    const { done, value } = steps.next();
    if (done) return value;
  }
}
