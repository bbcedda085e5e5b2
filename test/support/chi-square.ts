/**
 * Pearson's chi-square: whether counts are what chances say, within what chance allows.
 *
 * The tail of the distribution is the regularised gamma function Q(df / 2, x / 2): by its series below df / 2 + 1, by its continued
 * fraction (modified Lentz) above.
 */

/** How unlikely counts as far from the expected as these are; 1 where there is one class, or counts are as expected. */
export function goodnessOfFit(counts: readonly number[], weights: readonly number[]): number {
  const total = sum(counts);
  const weight = sum(weights);
  const statistic = sum(counts.map((count, i) => distance(count, (total * weights[i]!) / weight)));
  return tail(statistic, counts.length - 1);
}

/** How unlikely rows are as different from one another, if all are drawn by the same chances. */
export function homogeneity(rows: readonly (readonly number[])[]): number {
  const columns = rows[0]!.map((_, j) => sum(rows.map((row) => row[j]!)));
  const total = sum(columns);
  const statistic = sum(
    rows.flatMap((row) => row.map((count, j) => distance(count, (sum(row) * columns[j]!) / total))),
  );
  return tail(statistic, (rows.length - 1) * (columns.length - 1));
}

function distance(count: number, expected: number): number {
  return (count - expected) ** 2 / expected;
}

function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}

/** The chance of a chi-square of `df` degrees of freedom beyond `x`. */
export function tail(x: number, df: number): number {
  if (df === 0 || x <= 0) return 1;
  const a = df / 2;
  const z = x / 2;
  const front = Math.exp(a * Math.log(z) - z - logGamma(a));
  if (z < a + 1) {
    let term = 1 / a;
    let series = term;
    for (let n = 1; n < 500; n++) {
      term *= z / (a + n);
      series += term;
    }
    return 1 - front * series;
  }
  let b = z + 1 - a;
  let c = 1e300;
  let d = 1 / b;
  let fraction = d;
  for (let n = 1; n < 500; n++) {
    const an = -n * (n - a);
    b += 2;
    d = 1 / (an * d + b);
    c = b + an / c;
    fraction *= d * c;
  }
  return front * fraction;
}

/** Of half a whole number: by recursion from 1/2 and 1. */
function logGamma(a: number): number {
  let log = a % 1 === 0 ? 0 : Math.log(Math.sqrt(Math.PI));
  for (let n = a % 1 === 0 ? 1 : 0.5; n < a; n++) log += Math.log(n);
  return log;
}
