import { setImmediate, setTimeout } from 'node:timers/promises';

/** Of work in one go, and of the rest after it. */
const WORK_MS = 4;
const REST_MS = 10;

/** From here on packets count as flowing: one a millisecond. */
const BUSY_PACKETS_PER_MS = 1;

/**
 * When to rest during long work, a list of a million flows say, so that the packets go on. Its low priority (control/priority.ts) does not do
 * that alone: processors share caches and units of arithmetic, and one that works slows its neighbour by a sixth. While no packets flow,
 * there is no rest.
 */
export class Pace {
  #beganMs: number;
  #packets: number;

  /** @param packets that the data path has read so far */
  constructor(nowMs: number, packets: number) {
    this.#beganMs = nowMs;
    this.#packets = packets;
  }

  /** How long to rest now. */
  restMs(nowMs: number, packets: number): number {
    const workedMs = nowMs - this.#beganMs;
    if (workedMs < WORK_MS) return 0;
    const isBusy = packets - this.#packets >= workedMs * BUSY_PACKETS_PER_MS;
    const restMs = isBusy ? REST_MS : 0;
    this.#beganMs = nowMs + restMs;
    this.#packets = packets;
    return restMs;
  }
}

/**
 * Does all steps of some long work, each as soon as everything else had its turn and the packets have theirs.
 *
 * @param packetsRead by the data path so far
 */
export async function inSteps<T>(steps: Generator<void, T>, packetsRead: () => number): Promise<T> {
  const pace = new Pace(performance.now(), packetsRead());
  for (;;) {
    const { done, value } = steps.next();
    if (done) return value;
    await pause(pace, packetsRead());
  }
}

/** The rest that is due now; at least until everything else had its turn. */
export async function pause(pace: Pace, packets: number): Promise<void> {
  const restMs = pace.restMs(performance.now(), packets);
  await (restMs > 0 ? setTimeout(restMs) : setImmediate());
}
