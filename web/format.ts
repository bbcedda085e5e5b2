/** Numbers for people: three digits that mean something, and a unit. */

const PREFIXES = ['', 'k', 'M', 'G', 'T', 'P'] as const;

/** `0`, `7.5`, `123`, `1.23 k`, `40.1 M` */
export function si(value: number): string {
  let scaled = value;
  let step = 0;
  while (scaled >= 999.5 && step < PREFIXES.length - 1) {
    scaled /= 1000;
    step++;
  }
  return step === 0 ? plain(scaled) : `${digits(scaled)} ${PREFIXES[step]}`;
}

/** `4.01 Mb/s` */
export function bits(value: number): string {
  return withUnit(value, 'b/s');
}

/** `1.2 MB` */
export function bytes(value: number): string {
  return withUnit(value, 'B');
}

function withUnit(value: number, unit: string): string {
  const text = si(value);
  return text.includes(' ') ? `${text}${unit}` : `${text} ${unit}`;
}

export function percent(part: number): string {
  const value = part * 100;
  if (value === 0 || value === 100) return `${value} %`;
  return value < 0.1 ? '< 0.1 %' : `${value.toFixed(1)} %`;
}

/** Whole numbers in full: `1 234 567`, with spaces that do not break. */
export function whole(value: number): string {
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, '\u202f');
}

export function duration(seconds: number): string {
  const all = Math.floor(seconds);
  if (all < 60) return `${all} s`;
  if (all < 3600) return `${Math.floor(all / 60)} min ${all % 60} s`;
  if (all < 86_400) return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
  return `${Math.floor(all / 86_400)} d ${Math.floor((all % 86_400) / 3600)} h`;
}

function plain(value: number): string {
  return value < 100 && !Number.isInteger(value) ? value.toFixed(1) : String(Math.round(value));
}

function digits(value: number): string {
  return value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0);
}
