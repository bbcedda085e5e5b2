import type { Clock } from '../base/clock.js';
import { CLOCK_BOOTTIME, clockGettime, MAP_PRIVATE_ANONYMOUS, mmap, viewMemory } from './syscalls.js';

const PAGE_BYTES = 4096;

/**
 * Milliseconds since the machine booted, suspend included: the same for every process and after every restart of weir, so
 * that expiry times in a conntrack state file keep their meaning. About 60 ns a call, through the vDSO.
 */
export function bootClock(): Clock {
  const address = mmap(PAGE_BYTES, MAP_PRIVATE_ANONYMOUS);
  const timespec = new Int32Array(viewMemory(address, PAGE_BYTES));
  return {
    nowMs() {
      clockGettime(CLOCK_BOOTTIME, address);
      // The low words of seconds and nanoseconds: 68 years of uptime fit.
      return timespec[0]! * 1000 + timespec[2]! / 1e6;
    },
  };
}
