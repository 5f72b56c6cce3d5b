// Draws the traces of #data: lanes and one row a request, by step or by time, all on one scale; a cursor tells a cell.
"use strict";

const [ROW, AXIS, LANE, LANE_GAP] = [20, 20, 30, 8];
const WAITS = ["queue", "stall", "pending", "preempted"]; // drawn as lines
const END = 16; // room for the mark behind the last cell
const { traces } = JSON.parse(document.getElementById("data").textContent);
const details = document.getElementById("details");
const view = { scale: "step", zoom: 1 };
const timelines = []; // filled by controls.js

const round = (value) => Math.round(value * 100) / 100;

// Where things stand on the axis, in steps or in nanoseconds.
const from = (trace, step) => (view.scale === "step" ? step : (trace.steps[step]?.started_ns ?? extent(trace)));
const to = (trace, step) => (view.scale === "step" ? step + 1 : trace.steps[step].ended_ns);
const extent = (trace) => (trace.steps.length ? to(trace, trace.steps.length - 1) : 1);

function interval(least) {
  const size = 10 ** Math.floor(Math.log10(least));
  const wanted = [1, 2, 5, 10].find((factor) => factor * size >= least) * size;
  return view.scale === "step" ? Math.max(1, wanted) : wanted;
}

class Timeline {
  constructor(trace, parent) {
    this.trace = trace;
    this.activity = activityLanes(trace);
    this.top = AXIS + (trace.lanes.length + this.activity.length) * (LANE + LANE_GAP);
    const section = make("section", "", parent);
    make("h2", trace.title, section);
    make("p", Object.entries(trace.settings).map(([key, value]) => `${key} ${value}`).join(" · "), section);
    make("p", `Where to look: ${trace.focus.text}`, section, "caption");
    const plot = make("div", "", section, "timeline");
    this.names = make("div", "", plot, "names");
    this.scroller = make("div", "", plot, "scroller");
    this.scroller.tabIndex = 0;
    this.scroller.setAttribute("role", "application");
    this.scroller.setAttribute(
      "aria-label",
      `${trace.title}: timeline of ${some(trace.requests.length, "request")} in ${some(trace.steps.length, "step")}; ` +
        "arrow keys move, Home and End go to the first and the last step; tables with the same figures follow below",
    );
    this.scroller.setAttribute("aria-describedby", "details");
    this.nameRows();
    this.scroller.addEventListener("pointermove", (event) => this.point(event));
    this.scroller.addEventListener("pointerdown", (event) => this.point(event));
    this.scroller.addEventListener("keydown", (event) => this.move(event));
    if (this.activity.length === 1) make("p", ON_CPU, section);
    this.memory = trace.memory && new MemoryHistory(this, section);
  }

  nameRows() {
    const row = (text, more, height) => {
      const name = make("div", text, this.names);
      make("span", more, name, "more");
      name.style.height = name.style.lineHeight = `${height}px`;
      return name;
    };
    row("request", " · prompt + answer", AXIS);
    for (const lane of this.trace.lanes) {
      const peak = Math.max(0, ...lane.values);
      row(lane.name, ` · peak ${peak}${lane.capacity ? ` of ${lane.capacity}` : ""}`, LANE + LANE_GAP);
    }
    for (const [, name] of this.activity) row(name, "", LANE + LANE_GAP);
    this.rows = this.trace.requests.map((request) =>
      row(request.request_id, ` · ${request.num_cached_tokens ? `${request.num_cached_tokens} cached of ` : ""}${request.num_prompt_tokens} + ${request.tokens.length}`, ROW),
    );
  }

  // `pixels` are those of one step or one nanosecond.
  render(pixels) {
    this.pixels = pixels;
    const { trace, top } = this;
    const height = top + trace.requests.length * ROW + 4;
    const width = extent(trace) * pixels + END;
    this.svg = draw("svg", { width, height, "aria-hidden": true });
    this.drawAxis(height);
    trace.lanes.forEach((lane, place) => this.drawLane(lane, AXIS + place * (LANE + LANE_GAP)));
    this.activity.forEach(([key], place) => drawActivity(this, key, AXIS + (trace.lanes.length + place) * (LANE + LANE_GAP)));
    trace.requests.forEach((request, place) => this.drawRequest(request, top + place * ROW));
    if (trace.steps.length * 5 < width) {
      const cuts = trace.steps.map((_, step) => `M${round(from(trace, step) * pixels)} ${AXIS}V${height}`);
      draw("path", { class: "boundaries", d: cuts.join("") }, this.svg);
    }
    trace.requests.forEach((request, place) => this.drawPreemptions(request, top + place * ROW));
    trace.requests.forEach((request, place) => this.drawEnd(request, top + place * ROW + ROW / 2));
    this.cursor = draw("g", {}, this.svg);
    this.scroller.replaceChildren(this.svg);
    if (this.step !== undefined) this.show();
  }

  drawAxis(height) {
    const gap = interval(64 / this.pixels);
    for (let at = 0; at <= extent(this.trace); at += gap) {
      const x = round(at * this.pixels);
      draw("path", { class: "ticks", d: `M${x} 14V${height}` }, this.svg);
      const text = draw("text", { x: x + 3, y: 12 }, this.svg);
      text.textContent = view.scale === "step" ? `step ${at}` : gap < 1e8 ? `${round(at / 1e6)} ms` : `${round(at / 1e9)} s`;
    }
  }

  drawLane(lane, y) {
    const base = y + LANE;
    const bars = lane.values.map((value, step) => {
      const [left, right] = [from(this.trace, step), to(this.trace, step)].map((at) => round(at * this.pixels));
      return `M${left} ${base}V${round(base - (value / lane.top) * LANE)}H${right}V${base}Z`;
    });
    draw("path", { class: "lane", "data-lane": lane.name, d: bars.join("") }, this.svg);
    if (lane.capacity === lane.top) draw("path", { class: "limit", d: `M0 ${y}H${extent(this.trace) * this.pixels}` }, this.svg);
  }

  // A bar across the row where the request was preempted.
  drawPreemptions(request, y) {
    for (const step of request.preemptions) {
      const x = round(from(this.trace, step) * this.pixels);
      draw("path", { class: "preemption", "data-preempted": request.request_id, d: `M${x} ${y + 2}v${ROW - 4}m-3 -4l3 4l3 -4` }, this.svg);
    }
  }

  drawRequest(request, y) {
    const { trace, pixels } = this;
    for (const [kind, first, after] of request.runs) {
      const came = kind === "queue" && view.scale === "time";
      const x = round((came ? request.arrived_ns : from(trace, first)) * pixels);
      const width = Math.max(1, round(to(trace, after - 1) * pixels - x));
      const data = { class: kind, "data-request": request.request_id, "data-first": first, "data-after": after };
      const middle = y + ROW / 2;
      if (WAITS.includes(kind)) {
        draw("line", { ...data, x1: x, x2: x + width, y1: middle, y2: middle }, this.svg);
      } else {
        const inset = kind === "decode" ? 5 : 2;
        draw("rect", { ...data, x, width, y: y + inset, height: ROW - 2 * inset }, this.svg);
        for (const [step] of request.chunks.filter(([step]) => first < step && step < after)) {
          draw("path", { class: "chunk", d: `M${round(from(trace, step) * pixels)} ${y + 2}v${ROW - 4}` }, this.svg);
        }
        if (kind === "recompute") draw("path", { class: "again", d: `M${x} ${middle}h${width}` }, this.svg);
      }
    }
  }

  // Behind the last cell, and above the boundaries of the steps.
  drawEnd(request, middle) {
    const last = request.runs.at(-1);
    const end = last ? to(this.trace, last[2] - 1) : from(this.trace, request.arrival_step);
    const x = round(end * this.pixels + 7);
    const shape = {
      finished: `M${x - 4} ${middle}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0`,
      failed: `M${x - 4} ${middle - 4}l8 8m0 -8l-8 8`,
      aborted: `M${x - 4} ${middle - 4}h8v8h-8z`,
    }[request.outcome];
    if (shape) draw("path", { class: request.outcome, "data-end": request.request_id, d: shape }, this.svg);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / this.pixels;
    const step = this.trace.steps.findIndex((_, index) => at < to(this.trace, index));
    const row = Math.floor((event.clientY - box.top - this.top) / ROW);
    this.select(step, row >= 0 ? row : undefined);
  }

  move(event) {
    const { steps, requests } = this.trace;
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const way = ways[event.key] ?? { Home: [-steps.length, 0], End: [steps.length, 0] }[event.key];
    if (!way || !steps.length) return;
    event.preventDefault();
    const row = this.row ?? -1; // -1: no request, only the step
    const isNew = this.step === undefined;
    const step = isNew ? 0 : Math.min(Math.max(this.step + way[0], 0), steps.length - 1);
    const next = Math.min(Math.max(isNew ? 0 : row + way[1], -1), requests.length - 1);
    this.select(step, next >= 0 ? next : undefined);
    const [left, right] = [from(this.trace, step) * this.pixels, to(this.trace, step) * this.pixels];
    const { scrollLeft, clientWidth } = this.scroller;
    if (left < scrollLeft || right > scrollLeft + clientWidth) this.scroller.scrollLeft = left - clientWidth / 2;
  }

  // By the slider: the request that was chosen stays.
  turnTo(step) {
    this.select(step, this.row);
  }

  select(step, row) {
    if (step < 0 || row >= this.trace.requests.length || (step === this.step && row === this.row)) return;
    for (const other of timelines) if (other !== this) other.leave();
    [this.step, this.row] = [step, row];
    this.show();
  }

  leave() {
    this.step = this.row = undefined;
    this.cursor?.replaceChildren();
    this.rows.forEach((name) => name.classList.remove("current"));
  }

  show() {
    const { trace, step, row } = this;
    const x = from(trace, step) * this.pixels;
    const width = Math.max(2, to(trace, step) * this.pixels - x);
    const height = this.top + trace.requests.length * ROW - AXIS;
    const column = draw("rect", { class: "cursor", x, y: AXIS, width, height });
    this.cursor.replaceChildren(column);
    if (row !== undefined) draw("rect", { class: "cursor", x, y: this.top + row * ROW, width, height: ROW }, this.cursor);
    this.rows.forEach((name, place) => name.classList.toggle("current", place === row));
    details.replaceChildren();
    if (row !== undefined) this.tellRequest(trace.requests[row], step);
    this.tellStep(trace.steps[step], step);
    this.memory?.show(step);
  }

  tellStep({ told }, step) {
    const line = make("div", "", details);
    make("b", traces.length > 1 ? `${this.trace.title}, step ${step}` : `Step ${step}`, line);
    line.append(` · ${told}`);
  }

  tellRequest(request, step) {
    const line = make("div", "", details);
    make("b", `Request ${request.request_id}`, line);
    line.append(` · ${this.state(request, step)}`);
    if (request.prompt !== null) line.append(` · prompt “${request.prompt.slice(0, 60)}${request.prompt.length > 60 ? "…" : ""}”`);
  }

  state(request, step) {
    if (request.told[step]) return request.told[step];
    const [kind, first] = request.runs.find(([, first, after]) => first <= step && step < after) ?? [];
    const waits = {
      queue: `queue, step ${step - first + 1} of its wait`,
      preempted: `preempted, step ${step - first + 1} without its KV cache`,
      stall: "stall: running, but not in this step",
      failed: request.error,
    };
    return waits[kind] ?? (step < request.arrival_step ? "not yet arrived" : `${request.outcome} before this step`);
  }
}
