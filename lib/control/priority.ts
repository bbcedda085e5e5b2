import { getPriority, setPriority } from 'node:os';

/**
 * How far control steps back: with all processors busy, a third of what a thread of ordinary priority gets. At 10 it was a tenth, and
 * reloads took seconds.
 */
const CONTROL_NICENESS = 5;

/**
 * Lowers the priority of the calling thread, and of those it will start: to list a million connections, to scrape or to
 * reload must not take the processor from the packets. Those that run already, the data path's, keep theirs (Linux has it per
 * thread).
 */
export function stepBack(): void {
  setPriority(Math.max(getPriority(), CONTROL_NICENESS));
}
