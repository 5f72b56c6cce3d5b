// What /metrics says, and what can be made of two readings of it.

/** @typedef {Record<string, {labels: Record<string, string>, value: number}[]>} Samples By the names of metrics. */
/** @typedef {{time: number, samples: Samples}} Read What /metrics said at a time in seconds. */

/** The samples of Prometheus' text format. @param {string} text */
export function parse(text) {
  const samples = /** @type {Samples} */ ({});
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match || line.startsWith("#")) continue;
    const labels = /** @type {Record<string, string>} */ ({});
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    (samples[match[1]] ??= []).push({ labels, value: Number(match[3].replace("+Inf", "Infinity")) });
  }
  return samples;
}

/** The sum of a metric's samples. @param {Samples} samples @param {string} name */
export function total(samples, name) {
  return (samples[name] ?? []).reduce((sum, sample) => sum + sample.value, 0);
}

/** Growth a second of a counter between two readings; null if they are the same reading.
 * @param {Read} before @param {Read} after @param {string} name */
export function rate(before, after, name) {
  const seconds = after.time - before.time;
  return seconds > 0 ? Math.max(0, (total(after.samples, name) - total(before.samples, name)) / seconds) : null;
}

/**
 * A quantile of what a histogram took in between two readings, linear inside its bucket as Prometheus' own
 * histogram_quantile; null where nothing came in.
 * @param {Read} before @param {Read} after @param {string} name @param {number} share
 */
export function quantile(before, after, name, share) {
  const cumulative = (/** @type {Read} */ { samples }) =>
    new Map((samples[`${name}_bucket`] ?? []).map(({ labels, value }) => [labels.le, value]));
  const old = cumulative(before);
  const buckets = [...cumulative(after)]
    .map(([le, value]) => /** @type {const} */ ([le === "+Inf" ? Infinity : Number(le), value - (old.get(le) ?? 0)]))
    .sort((a, b) => a[0] - b[0]);
  const count = buckets.at(-1)?.[1] ?? 0;
  if (count <= 0) return null;
  let [lower, below] = [0, 0];
  for (const [upper, until] of buckets) {
    if (until >= share * count) {
      if (upper === Infinity) return lower;
      return lower + ((upper - lower) * (share * count - below)) / (until - below);
    }
    [lower, below] = [upper, until];
  }
  return lower;
}
