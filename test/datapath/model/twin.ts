import type { MemoryPacket } from '../../../lib/io/memory-device.js';
import type { Outcome, TestPipeline } from '../../support/pipeline.js';
import { compareOut, same } from './compare.js';

const BATCH = 16;

/**
 * A second pipeline that gets the same packets in batches, as they come from a device, where the first gets them one by one: what a
 * batch has looked up beforehand must not show, nor that no garbage is collected here.
 */
export class Twin {
  readonly pipeline: TestPipeline;
  #packets: MemoryPacket[] = [];
  #outcomes: Outcome[] = [];

  constructor(pipeline: TestPipeline) {
    this.pipeline = pipeline;
  }

  /** What came of a packet in the other one. */
  add(packet: MemoryPacket, outcome: Outcome): void {
    this.#packets.push(packet);
    this.#outcomes.push(outcome);
    if (this.#packets.length === BATCH) this.settle();
  }

  /** Handles what has gathered, before anything else happens. @throws Error when it does not come to the same */
  settle(): void {
    if (this.#packets.length === 0) return;
    const outcomes = this.pipeline.sendBatch(this.#packets);
    const accounts = (all: readonly Outcome[]) => all.map(({ out: _, ...account }) => account);
    same('a batch', accounts(outcomes), accounts(this.#outcomes));
    compareOut(
      outcomes[0]!.out,
      this.#outcomes.flatMap(({ out }) => out),
    );
    this.#packets = [];
    this.#outcomes = [];
  }
}
