import * as S from '../../datapath/snapshot.js';
import { isByLot, rememberedBackend, weightOf } from './arrival.js';
import { type KnownCase, serviceWord } from './case.js';
import { outcomeOf } from './departure.js';
import type { DryRun, Rehearsal } from './dry-run.js';
import type { OutcomeView } from './explain-view.js';

/**
 * All ways in which a packet may end, with their chances. One, unless a lot decides about the backend: then each backend's is drawn in
 * turn. A lot that falls on a backend with as many connections as it may have is followed by another among those with room.
 */

/** Backends whose lot is drawn, at most. */
const MAX_LOTS = 32;

/** A backend that a lot may fall on. */
interface Choice {
  readonly id: number;
  readonly weight: number;
}

/** How it ends when the lot is a choice's. */
interface Ending {
  readonly run: DryRun;
  chance: number;
}

/** @param first a run by any lots */
export function outcomesOf(
  known: KnownCase,
  rehearsal: Rehearsal,
  first: DryRun,
): { readonly outcomes: readonly OutcomeView[]; readonly untried: number } {
  const remembered = rememberedBackend(known);
  const isLedAway = remembered !== 0 && first.full.includes(remembered);
  if (first.draws === 0 || !isByLot(known) || (remembered !== 0 && !isLedAway)) {
    return { outcomes: [outcomeOf(known, first, 1, first.draws > 0)], untried: 0 };
  }
  const choices = choicesOf(known);
  const endings = isLedAway ? endingsAmong(withRoom(choices, first), rehearsal) : endingsOfAll(choices, rehearsal);
  const outcomes = endings.map(({ run, chance }) => outcomeOf(known, run, chance, run.draws > 1));
  return { outcomes: mergeSame(outcomes), untried: Math.max(0, choices.length - MAX_LOTS) };
}

/** One lot among these decides. */
function endingsAmong(choices: readonly Choice[], rehearsal: Rehearsal): Ending[] {
  const total = weightOfAll(choices);
  let before = 0;
  return choices.slice(0, MAX_LOTS).map(({ weight }) => {
    const run = rehearsal.run(drawFor(before, total));
    before += weight;
    return { run, chance: weight / total };
  });
}

/** A lot among all decides, or the one after it. */
function endingsOfAll(choices: readonly Choice[], rehearsal: Rehearsal): Ending[] {
  const direct = endingsAmong(choices, rehearsal);
  const chances = direct.map(() => 0);
  for (const [i, { run, chance }] of direct.entries()) {
    const others = run.full.includes(choices[i]!.id) ? withRoom(choices, run) : [];
    if (others.length === 0) chances[i]! += chance;
    const total = weightOfAll(others);
    for (const [place, { id, weight }] of choices.slice(0, others.length === 0 ? 0 : MAX_LOTS).entries()) {
      if (!run.full.includes(id)) chances[place]! += (chance * weight) / total;
    }
  }
  return direct.map(({ run }, i) => ({ run, chance: chances[i]! })).filter(({ chance }) => chance > 0);
}

function choicesOf(known: KnownCase): Choice[] {
  const { choices } = known.snapshot;
  const at = serviceWord(known, S.CHOICES_AT);
  return Array.from({ length: serviceWord(known, S.CHOICES_COUNT) }, (_, i) => ({
    id: choices[(at + i) * 2]!,
    weight: weightOf(choices, at, i),
  }));
}

function withRoom(choices: readonly Choice[], { full }: DryRun): Choice[] {
  return choices.filter(({ id }) => !full.includes(id));
}

function weightOfAll(choices: readonly Choice[]): number {
  return choices.reduce((sum, { weight }) => sum + weight, 0);
}

/** The least draw that falls on the choice which has this much weight before it (balance/pick.ts). */
function drawFor(before: number, total: number): number {
  return Number(((BigInt(before) << 32n) + BigInt(total) - 1n) / BigInt(total));
}

/** Ends that do not differ, as those of a client who is refused in any case, are one. */
function mergeSame(outcomes: readonly OutcomeView[]): OutcomeView[] {
  const merged = new Map<string, OutcomeView>();
  for (const outcome of outcomes) {
    const { verdict, reason, backend, out } = outcome;
    const key = JSON.stringify([verdict, reason, backend, out.map(({ bytes }) => bytes)]);
    const same = merged.get(key);
    const probability = outcome.probability + (same?.probability ?? 0);
    merged.set(key, { ...(same ?? outcome), probability });
  }
  return [...merged.values()];
}
