// Live charts of /metrics, drawn as SVG: one line a series, its last value in words above; shaded while requests are refused.

import { parse, quantile, rate, total } from "./metrics.js";

const SPANS = [20, 60, 120]; // seconds that the time axis can show; the shortest that has all readings is taken
const SECONDS = SPANS.at(-1);
const RATE_WINDOW = 5; // seconds over which rates are taken
const QUANTILE_WINDOW = 30; // and quantiles
const TOPS = [1, 2, 4, 6, 10]; // of the value axis, times a power of ten: half of each is a round number too
const HEIGHT = 120; // pixels, as page.css has it
const [LEFT, RIGHT, ABOVE, BELOW] = [50, 12, 8, 22]; // pixels around the lines, for the labels of the axes
const SVG = "http://www.w3.org/2000/svg";

const number = (value) => String(Number(value.toPrecision(3)));
const count = (value) => String(Math.round(value));
const perSec = (value) => `${number(value)}/s`;
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
const time = (value) => (value < 1 ? `${number(1000 * value)} ms` : `${number(value)} s`);

const gauge = (name) => (now) => total(now.samples, name);
const perSecond = (name) => (now) => rate(since(now, RATE_WINDOW), now, name);
const within = (name, share) => (now) => quantile(since(now, QUANTILE_WINDOW), now, name, share);

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

const readings = []; // {time, samples, isReady, values}; no samples if the server did not answer

/** The oldest reading of the last so many seconds that has samples. */
function since(now, seconds) {
  return readings.find((reading) => reading.samples && reading.time >= now.time - seconds) ?? now;
}

function draw(parent, name, attributes = {}, text = "") {
  const element = parent.appendChild(document.createElementNS(SVG, name));
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

/** The empty charts, inside the element; they are drawn again whenever their width changes. */
export function build(parent) {
  for (const chart of CHARTS) {
    const figure = parent.appendChild(document.createElement("figure"));
    const caption = figure.appendChild(document.createElement("figcaption"));
    caption.appendChild(document.createElement("b")).textContent = chart.title;
    chart.figure = figure;
    chart.legends = Object.keys(chart.series).map((name, index) => {
      const legend = caption.appendChild(document.createElement("span"));
      legend.className = `legend series-${index}`;
      legend.textContent = `${name} –`;
      return legend;
    });
    chart.svg = draw(figure, "svg", { role: "img", "aria-label": chart.title });
    new ResizeObserver(() => redraw(chart)).observe(chart.svg);
  }
}

/** The smallest round number at or above the value. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * TOPS.find((top) => top * power >= value * 0.999);
}

function redraw(chart) {
  const { svg, show } = chart;
  const names = Object.keys(chart.series);
  const values = readings.flatMap((reading) => Object.values(reading.values.get(chart))).filter((value) => value !== null);
  const top = chart.most ?? roundUp(Math.max(chart.least, ...values));
  const now = readings.at(-1)?.time ?? 0;
  const span = SPANS.find((seconds) => readings.every(({ time: at }) => now - at <= seconds)) ?? SECONDS;
  const width = Math.max(1, svg.clientWidth - LEFT - RIGHT);
  const height = HEIGHT - ABOVE - BELOW;
  const x = (at) => LEFT + width * (1 - (now - at) / span);
  const y = (value) => ABOVE + height * (1 - value / top);

  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width + LEFT + RIGHT} ${HEIGHT}`);
  for (const [index, { time: from, isReady }] of readings.entries()) {
    const until = readings[index + 1]?.time ?? now + RIGHT * (span / width);
    if (!isReady) draw(svg, "rect", { class: "outage", x: x(from), y: ABOVE, width: x(until) - x(from), height });
  }
  for (const value of [0, top / 2, top]) {
    draw(svg, "line", { x1: LEFT, x2: LEFT + width + RIGHT, y1: y(value), y2: y(value), class: "rule" });
    draw(svg, "text", { x: LEFT - 6, y: y(value) + 4, class: "scale end" }, value ? show(value) : "0");
  }
  for (const [ago, side] of [[span, "start"], [span / 2, "middle"], [0, "end"]]) {
    draw(svg, "line", { x1: x(now - ago), x2: x(now - ago), y1: y(0), y2: y(0) + 4, class: "rule" });
    draw(svg, "text", { x: ago ? x(now - ago) : x(now) + RIGHT, y: HEIGHT - 4, class: `scale ${side}` }, ago ? `${ago} s ago` : "now");
  }
  for (const [index, name] of names.entries()) {
    let [path, isDrawing, last] = ["", false, null];
    for (const { time: at, values: all } of readings) {
      last = all.get(chart)[name];
      if (last !== null) path += `${isDrawing ? "L" : "M"}${x(at).toFixed(1)} ${y(last).toFixed(1)}`;
      isDrawing = last !== null;
    }
    draw(svg, "path", { class: `line series-${index}`, d: path });
    if (last !== null) draw(svg, "circle", { class: `dot series-${index}`, cx: x(now), cy: y(last), r: 3 });
    chart.legends[index].textContent = `${name} ${last === null ? "–" : show(last)}`;
    chart.figure.dataset[name] = last ?? "";
  }
  const said = chart.legends.map((legend) => legend.textContent).join(", ");
  svg.setAttribute("aria-label", `${chart.title}, the last ${span} seconds; now: ${said}`);
}

function showTotals(list, { samples }) {
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
  list.replaceChildren(
    ...Object.entries(rows).map(([name, value]) => {
      const row = document.createElement("div");
      row.appendChild(document.createElement("dt")).textContent = name;
      row.appendChild(document.createElement("dd")).textContent = value.toLocaleString("en");
      return row;
    }),
  );
}

/** Draw a new reading: the text of /metrics, or null if the server did not answer, and whether it takes requests. */
export function update(text, isReady, totals) {
  const now = { time: performance.now() / 1000, isReady, samples: text === null ? null : parse(text), values: new Map() };
  readings.push(now);
  while (readings[0].time < now.time - SECONDS) readings.shift();
  for (const chart of CHARTS) {
    const series = Object.entries(chart.series);
    now.values.set(chart, Object.fromEntries(series.map(([name, read]) => [name, now.samples && read(now)])));
    redraw(chart);
  }
  if (now.samples) showTotals(totals, now);
}
