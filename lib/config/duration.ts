/**
 * Durations as the configuration writes them: whole numbers with a unit, largest unit first, each at most once: `500ms`, `60s`,
 * `2h13m20s`. A bare number is refused, since nobody can tell whether it means seconds or milliseconds.
 */

const FORM = /^(?=\d)(?:(\d{1,9})h)?(?:(\d{1,9})m(?!s))?(?:(\d{1,9})s)?(?:(\d{1,12})ms)?$/;

/** The milliseconds of a duration, or `null` when the text is none. */
export function parseDuration(text: string): number | null {
  const parts = FORM.exec(text);
  if (parts === null) return null;
  const [, hours = 0, minutes = 0, seconds = 0, ms = 0] = parts;
  return Number(hours) * 3_600_000 + Number(minutes) * 60_000 + Number(seconds) * 1000 + Number(ms);
}

/** The shortest text that parses to `ms`, a whole number of milliseconds that is not negative. */
export function formatDuration(ms: number): string {
  const hours = Math.floor(ms / 3_600_000);
  const minutes = Math.floor(ms / 60_000) % 60;
  const seconds = Math.floor(ms / 1000) % 60;
  const rest = ms % 1000;
  let text = '';
  if (hours > 0) text += `${hours}h`;
  if (minutes > 0) text += `${minutes}m`;
  if (seconds > 0) text += `${seconds}s`;
  if (rest > 0) text += `${rest}ms`;
  return text === '' ? '0s' : text;
}
