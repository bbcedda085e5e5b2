import { readdirSync } from 'node:fs';
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

/**
 * The same for the threads that run beside the calling one, before the data path is one of them: they collect control's garbage,
 * four at a time.
 */
export function stepHelpersBack(): void {
  for (const name of readdirSync('/proc/self/task')) {
    const thread = Number(name);
    if (thread !== process.pid) setPriority(thread, Math.max(getPriority(thread), CONTROL_NICENESS));
  }
}
