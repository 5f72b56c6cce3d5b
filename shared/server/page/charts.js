// Live charts of /metrics, drawn as SVG: one line a series, its last value in words beside it.

import { parse, quantile, rate, total } from "./metrics.js";

const SECONDS = 120;
const RATE_WINDOW = 5; // seconds over which rates are taken
const QUANTILE_WINDOW = 30; // and quantiles
const [WIDTH, HEIGHT] = [300, 90];
const SVG = "http://www.w3.org/2000/svg";

const number = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
const count = (value) => String(Math.round(value));
const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
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
    show: number,
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

const readings = [];

/** The oldest reading of the last so many seconds. */
function since(now, seconds) {
  return readings.find((reading) => reading.time >= now.time - seconds) ?? now;
}

function draw(parent, name, attributes = {}, text = "") {
  const element = parent.appendChild(document.createElementNS(SVG, name));
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

/** The empty charts, inside the element. */
export function build(parent) {
  for (const chart of CHARTS) {
    const figure = parent.appendChild(document.createElement("figure"));
    const caption = figure.appendChild(document.createElement("figcaption"));
    caption.appendChild(document.createElement("b")).textContent = chart.title;
    const svg = draw(figure, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.title });
    for (const share of [0, 0.5, 1]) {
      const y = 1 + share * (HEIGHT - 2);
      draw(svg, "line", { x1: 0, x2: WIDTH, y1: y, y2: y, class: "rule" });
    }
    chart.top = draw(svg, "text", { x: 2, y: 13, class: "scale" });
    chart.points = Object.fromEntries(Object.keys(chart.series).map((name) => [name, []]));
    chart.parts = Object.keys(chart.series).map((name, index) => {
      const legend = caption.appendChild(document.createElement("span"));
      legend.className = `legend series-${index}`;
      return { name, legend, line: draw(svg, "path", { class: `line series-${index}` }) };
    });
    chart.figure = figure;
  }
}

function redraw(chart, now) {
  const values = Object.values(chart.points).flat().map((point) => point.value).filter((value) => value !== null);
  const top = chart.most ?? Math.max(chart.least, ...values) * 1.1;
  chart.top.textContent = chart.show(chart.most ?? top / 1.1);
  for (const { name, legend, line } of chart.parts) {
    const points = chart.points[name];
    let path = "";
    let isDrawing = false;
    for (const { at, value } of points) {
      if (value === null) {
        isDrawing = false;
        continue;
      }
      const x = WIDTH * (1 - (now - at) / SECONDS);
      const y = 1 + (HEIGHT - 2) * (1 - value / top);
      path += `${isDrawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      isDrawing = true;
    }
    line.setAttribute("d", path);
    const last = points.at(-1)?.value ?? null;
    legend.textContent = `${name} ${last === null ? "–" : chart.show(last)}`;
    chart.figure.dataset[name] = last ?? "";
  }
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

/** Read /metrics once and draw what is new. */
export async function update(totals) {
  const response = await fetch("/metrics");
  const now = { time: performance.now() / 1000, samples: parse(await response.text()) };
  readings.push(now);
  while (readings[0].time < now.time - SECONDS) readings.shift();
  for (const chart of CHARTS) {
    for (const [name, read] of Object.entries(chart.series)) {
      const points = chart.points[name];
      points.push({ at: now.time, value: read(now) });
      while (points[0].at < now.time - SECONDS) points.shift();
    }
    redraw(chart, now.time);
  }
  showTotals(totals, now);
}
