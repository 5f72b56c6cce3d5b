// Live charts of /metrics, drawn as SVG: one line a series, its last value in words above; shaded while requests are refused.

import { parse, quantile, rate, total } from "./metrics.js";

const SPANS = [20, 60, 120]; // seconds that the time axis can show; the shortest that has all readings is taken
const SECONDS = SPANS[SPANS.length - 1];
const RATE_WINDOW = 5; // seconds over which rates are taken
const QUANTILE_WINDOW = 30; // and quantiles
const TOPS = [1, 2, 4, 6, 10]; // of the value axis, times a power of ten: half of each is a round number too
const HEIGHT = 120; // pixels, as page.css has it
const [LEFT, RIGHT, ABOVE, BELOW] = [50, 12, 8, 22]; // pixels around the lines, for the labels of the axes

/** @typedef {import("./metrics.js").Samples} Samples */
/** @typedef {{time: number, isReady: boolean, samples: Samples | null, values: Map<Chart, Record<string, number | null>>}} Reading
 *   No samples if the server did not answer. */
/** @typedef {import("./metrics.js").Read} Read A reading that has samples. */
/** @typedef {{title: string, show: (value: number) => string, least: number, most?: number,
 *   series: Record<string, (now: Read) => number | null>}} Chart */
/** @typedef {{figure: HTMLElement, svg: Element, legends: HTMLElement[]}} Drawing */

/** @typedef {(value: number) => string} Show */
/** @type {Show} */
const number = (value) => String(Number(value.toPrecision(3)));
/** @type {Show} */
const count = (value) => String(Math.round(value));
/** @type {Show} */
const perSec = (value) => `${number(value)}/s`;
/** @type {Show} */
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
/** @type {Show} */
const time = (value) => (value < 1 ? `${number(1000 * value)} ms` : `${number(value)} s`);

const gauge = (/** @type {string} */ name) => (/** @type {Read} */ now) => total(now.samples, name);
const perSecond = (/** @type {string} */ name) => (/** @type {Read} */ now) => rate(since(now, RATE_WINDOW), now, name);
const within = (/** @type {string} */ name, /** @type {number} */ share) => (/** @type {Read} */ now) => quantile(since(now, QUANTILE_WINDOW), now, name, share);

/** @type {Chart[]} */
const CHARTS = [
  {
    title: "Requests",
    show: count,
    least: 4,
    series: { running: gauge("infer:num_requests_running"), waiting: gauge("infer:num_requests_waiting") },
  },
  {
    title: "Tokens per second",
    show: perSec,
    least: 10,
    series: { generated: perSecond("infer:generation_tokens_total"), prompt: perSecond("infer:prompt_tokens_total") },
  },
  { title: "KV cache usage", show: percent, least: 1, most: 1, series: { used: gauge("infer:kv_cache_usage_perc") } },
  {
    title: "Time to first token",
    show: time,
    least: 0.001,
    series: {
      median: within("infer:time_to_first_token_seconds", 0.5),
      P95: within("infer:time_to_first_token_seconds", 0.95),
    },
  },
  {
    title: "Time between tokens",
    show: time,
    least: 0.001,
    series: {
      median: within("infer:inter_token_latency_seconds", 0.5),
      P95: within("infer:inter_token_latency_seconds", 0.95),
    },
  },
  {
    title: "Time in the queue",
    show: time,
    least: 0.001,
    series: {
      median: within("infer:request_queue_time_seconds", 0.5),
      P95: within("infer:request_queue_time_seconds", 0.95),
    },
  },
];

const readings = /** @type {Reading[]} */ ([]);
const drawings = /** @type {Map<Chart, Drawing>} */ (new Map());

/** The oldest reading of the last so many seconds that has samples. @param {Read} now @param {number} seconds */
function since(now, seconds) {
  const hasSamples = (/** @type {Reading} */ { samples, time }) => samples !== null && time >= now.time - seconds;
  return /** @type {Read | undefined} */ (readings.find(hasSamples)) ?? now;
}

/** The empty charts, inside the element; they are drawn again whenever their width changes. @param {HTMLElement} parent */
export function build(parent) {
  for (const chart of CHARTS) {
    const figure = make("figure", "", parent);
    const caption = make("figcaption", "", figure);
    make("b", chart.title, caption);
    const legends = Object.keys(chart.series).map((name, index) => make("span", `${name} –`, caption, `legend series-${index}`));
    const svg = draw("svg", { role: "img", "aria-label": chart.title }, figure);
    const drawing = { figure, svg, legends };
    drawings.set(chart, drawing);
    new ResizeObserver(() => redraw(chart, drawing)).observe(svg);
  }
}

/** The smallest round number at or above the value. @param {number} value */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * (TOPS.find((top) => top * power >= value * 0.999) ?? 10);
}

/** @param {Chart} chart @param {Drawing} drawing */
function redraw(chart, { figure, svg, legends }) {
  const { show } = chart;
  const names = Object.keys(chart.series);
  const valuesOf = (/** @type {Reading} */ { values }) => values.get(chart) ?? {};
  const values = readings.flatMap((reading) => Object.values(valuesOf(reading))).filter((value) => value !== null);
  const top = chart.most ?? roundUp(Math.max(chart.least, ...values));
  const now = readings.at(-1)?.time ?? 0;
  const span = SPANS.find((seconds) => readings.every(({ time: at }) => now - at <= seconds)) ?? SECONDS;
  const width = Math.max(1, svg.clientWidth - LEFT - RIGHT);
  const height = HEIGHT - ABOVE - BELOW;
  const x = (/** @type {number} */ at) => LEFT + width * (1 - (now - at) / span);
  const y = (/** @type {number} */ value) => ABOVE + height * (1 - value / top);

  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width + LEFT + RIGHT} ${HEIGHT}`);
  for (const [index, { time: from, isReady }] of readings.entries()) {
    const until = readings[index + 1]?.time ?? now + RIGHT * (span / width);
    if (!isReady) draw("rect", { class: "outage", x: x(from), y: ABOVE, width: x(until) - x(from), height }, svg);
  }
  for (const value of [0, top / 2, top]) {
    draw("line", { x1: LEFT, x2: LEFT + width + RIGHT, y1: y(value), y2: y(value), class: "rule" }, svg);
    draw("text", { x: LEFT - 6, y: y(value) + 4, class: "scale end" }, svg).textContent = value ? show(value) : "0";
  }
  for (const [side, ago] of Object.entries({ start: span, middle: span / 2, end: 0 })) {
    draw("line", { x1: x(now - ago), x2: x(now - ago), y1: y(0), y2: y(0) + 4, class: "rule" }, svg);
    const label = draw("text", { x: ago ? x(now - ago) : x(now) + RIGHT, y: HEIGHT - 4, class: `scale ${side}` }, svg);
    label.textContent = ago ? `${ago} s ago` : "now";
  }
  for (const [index, name] of names.entries()) {
    let [path, isDrawing, last] = ["", false, /** @type {number | null} */ (null)];
    for (const reading of readings) {
      const at = reading.time;
      last = valuesOf(reading)[name] ?? null;
      if (last !== null) path += `${isDrawing ? "L" : "M"}${x(at).toFixed(1)} ${y(last).toFixed(1)}`;
      isDrawing = last !== null;
    }
    draw("path", { class: `line series-${index}`, d: path }, svg);
    if (last !== null) draw("circle", { class: `dot series-${index}`, cx: x(now), cy: y(last), r: 3 }, svg);
    legends[index].textContent = `${name} ${last === null ? "–" : show(last)}`;
    figure.dataset[name] = String(last ?? "");
  }
  const said = legends.map((legend) => legend.textContent).join(", ");
  svg.setAttribute("aria-label", `${chart.title}, the last ${span} seconds; now: ${said}`);
}

/** @param {HTMLElement} list @param {Samples} samples */
function showTotals(list, samples) {
  /** @type {Record<string, number>} */
  const ended = Object.fromEntries((samples["infer:request_success_total"] ?? []).map((s) => [s.labels.finished_reason, s.value]));
  const rows = {
    "prompt tokens": total(samples, "infer:prompt_tokens_total"),
    "generated tokens": total(samples, "infer:generation_tokens_total"),
    "ended: stop": ended.stop ?? 0,
    "ended: length": ended.length ?? 0,
    "ended: abort": ended.abort ?? 0,
    "ended: error": ended.error ?? 0,
    preemptions: total(samples, "infer:num_preemptions_total"),
  };
  list.replaceChildren();
  for (const [name, value] of Object.entries(rows)) {
    const row = make("div", "", list);
    make("dt", name, row);
    make("dd", grouped(value), row);
  }
}

/** Draw a new reading: the text of /metrics, or null if the server did not answer, and whether it takes requests.
 * @param {string | null} text @param {boolean} isReady @param {HTMLElement} totals */
export function update(text, isReady, totals) {
  const [time, samples] = [performance.now() / 1000, text === null ? null : parse(text)];
  const now = /** @type {Reading} */ ({ time, isReady, samples, values: new Map() });
  readings.push(now);
  while (readings[0].time < time - SECONDS) readings.shift();
  for (const [chart, drawing] of drawings) {
    const series = Object.entries(chart.series);
    now.values.set(chart, Object.fromEntries(series.map(([name, read]) => [name, samples && read({ time, samples })])));
    redraw(chart, drawing);
  }
  if (samples) showTotals(totals, samples);
}
