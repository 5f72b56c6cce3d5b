// Draws the traces of #data: lanes and one row a request, by step or by time, all on one scale; a cursor tells a cell.
"use strict";

/** @typedef {[what: any, first: number, after: number]} Run What there was, from a step to the step after its last. */
/** @typedef {{name: string, started_ns: number, ended_ns: number}} SpanData */
/** @typedef {{told: string, started_ns: number, ended_ns: number, num_waiting: number, preempted: string[], [lane: string]: any}} StepData */
/** @typedef {{request_id: string, num_prompt_tokens: number, num_cached_tokens: number, arrival_step: number, arrived_ns: number,
 *   prompt: string | null, tokens: [step: number, id: number, text: string][], outcome: string, error: string | null, runs: Run[],
 *   chunks: [step: number, first: number, count: number][], preemptions: number[], told: Record<number, string>}} RequestData */
/** @typedef {{name: string, capacity: number | null, top: number, values: number[]}} LaneData */
/** @typedef {{caption: string, unit: string, block_tokens: number, num_blocks: number, num_shown: number, cached: Run[],
 *   holdings: {blocks: Run[], written: number[]}[]}} HistoryData */
/** @typedef {{title: string, settings: Record<string, string>, focus: {step: number, text: string}, lanes: LaneData[],
 *   steps: StepData[], requests: RequestData[], memory: HistoryData | null}} TraceData */

const [ROW, AXIS, LANE, LANE_GAP] = [20, 20, 30, 8];
const WAITS = ["queue", "stall", "pending", "preempted"]; // drawn as lines
const END = 16; // room for the mark after the last cell
const traces = /** @type {TraceData[]} */ (JSON.parse(byId("data").textContent ?? "").traces);
const details = byId("details");
const view = { scale: "step", zoom: 1 };
const timelines = /** @type {Timeline[]} */ ([]); // filled by controls.js

const round = (/** @type {number} */ value) => Math.round(value * 100) / 100;
const isWithin = (/** @type {Run} */ [, first, after], /** @type {number} */ step) => first <= step && step < after;
const runAt = (/** @type {RequestData} */ { runs }, /** @type {number} */ step) => runs.find((run) => isWithin(run, step));

/** Where a step begins on the axis, in steps or in nanoseconds. @param {TraceData} trace @param {number} step */
const from = (trace, step) => (view.scale === "step" ? step : (trace.steps[step]?.started_ns ?? extent(trace)));
const to = (/** @type {TraceData} */ trace, /** @type {number} */ step) => (view.scale === "step" ? step + 1 : trace.steps[step].ended_ns);
/** @param {TraceData} trace @returns {number} */
const extent = (trace) => (trace.steps.length ? to(trace, trace.steps.length - 1) : 1);

class Timeline {
  pixels = 1; // of a step or of a nanosecond
  svg = draw("svg", {});
  cursor = draw("g", {});
  step = /** @type {number | undefined} */ (undefined); // the chosen one
  row = /** @type {number | undefined} */ (undefined); // its request; none where the step alone is chosen

  /** @param {TraceData} trace @param {HTMLElement} parent */
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
    const what = `${trace.title}: timeline of ${some(trace.requests.length, "request")} in ${some(trace.steps.length, "step")}`;
    const keys = "arrow keys move, Home and End go to the first and the last step; tables with the same figures follow below";
    this.scroller.setAttribute("aria-label", `${what}; ${keys}`);
    this.scroller.setAttribute("aria-describedby", "details");
    this.rows = this.nameRows();
    for (const kind of /** @type {const} */ (["pointermove", "pointerdown"])) this.scroller.addEventListener(kind, (event) => this.point(event));
    this.scroller.addEventListener("keydown", (event) => this.move(event));
    if (this.activity.length === 1) make("p", ON_CPU, section);
    this.memory = trace.memory && new MemoryHistory(this, trace.memory, section);
  }

  /** The names of the requests' rows, after those of the axis and the lanes. */
  nameRows() {
    const row = (/** @type {string} */ text, /** @type {string} */ more, /** @type {number} */ height) => {
      const name = make("div", text, this.names);
      make("span", more, name, "more");
      name.style.height = name.style.lineHeight = `${height}px`;
      return name;
    };
    row("request", " · prompt + answer", AXIS);
    for (const { name, values, capacity } of this.trace.lanes) {
      row(name, ` · peak ${Math.max(0, ...values)}${capacity ? ` of ${capacity}` : ""}`, LANE + LANE_GAP);
    }
    for (const [, name] of this.activity) row(name, "", LANE + LANE_GAP);
    return this.trace.requests.map(({ request_id: id, num_cached_tokens: cached, num_prompt_tokens: prompt, tokens }) => {
      return row(id, ` · ${cached ? `${cached} cached of ` : ""}${prompt} + ${tokens.length}`, ROW);
    });
  }

  /** @param {number} pixels Those of one step or one nanosecond. */
  render(pixels) {
    this.pixels = pixels;
    const { trace, top } = this;
    const height = top + trace.requests.length * ROW + 4;
    const width = extent(trace) * pixels + END;
    this.svg = draw("svg", { width, height, "aria-hidden": true });
    this.drawAxis(height);
    trace.lanes.forEach((lane, index) => this.drawLane(lane, AXIS + index * (LANE + LANE_GAP)));
    this.activity.forEach(([key], index) => drawActivity(this, key, AXIS + (trace.lanes.length + index) * (LANE + LANE_GAP)));
    trace.requests.forEach((request, row) => this.drawRequest(request, top + row * ROW));
    if (trace.steps.length * 5 < width) {
      const boundaries = trace.steps.map((_, step) => `M${round(from(trace, step) * pixels)} ${AXIS}V${height}`);
      draw("path", { class: "boundaries", d: boundaries.join("") }, this.svg);
    }
    trace.requests.forEach((request, row) => this.drawEvents(request, top + row * ROW));
    this.cursor = draw("g", {}, this.svg);
    this.scroller.replaceChildren(this.svg);
    if (this.step !== undefined) this.show(this.step);
  }

  drawAxis(/** @type {number} */ height) {
    const least = 64 / this.pixels;
    const size = 10 ** Math.floor(Math.log10(least));
    const wanted = size * ([1, 2, 5].find((factor) => factor * size >= least) ?? 10);
    const gap = view.scale === "step" ? Math.max(1, wanted) : wanted;
    for (let at = 0; at <= extent(this.trace); at += gap) {
      const x = round(at * this.pixels);
      draw("path", { class: "ticks", d: `M${x} 14V${height}` }, this.svg);
      const time = gap < 1e8 ? `${round(at / 1e6)} ms` : `${round(at / 1e9)} s`;
      draw("text", { x: x + 3, y: 12 }, this.svg).textContent = view.scale === "step" ? `step ${at}` : time;
    }
  }

  /** @param {LaneData} lane @param {number} y */
  drawLane(lane, y) {
    const base = y + LANE;
    const bars = lane.values.map((value, step) => {
      const [left, right] = [from(this.trace, step), to(this.trace, step)].map((at) => round(at * this.pixels));
      return `M${left} ${base}V${round(base - (value / lane.top) * LANE)}H${right}V${base}Z`;
    });
    draw("path", { class: "lane", "data-lane": lane.name, d: bars.join("") }, this.svg);
    if (lane.capacity === lane.top) draw("path", { class: "limit", d: `M0 ${y}H${extent(this.trace) * this.pixels}` }, this.svg);
  }

  /** @param {RequestData} request @param {number} y */
  drawRequest(request, y) {
    const { trace, pixels } = this;
    const middle = y + ROW / 2;
    for (const [kind, first, after] of request.runs) {
      const isArrival = kind === "queue" && view.scale === "time";
      const x = round((isArrival ? request.arrived_ns : from(trace, first)) * pixels);
      const width = Math.max(1, round(to(trace, after - 1) * pixels - x));
      const data = { class: kind, "data-request": request.request_id, "data-first": first, "data-after": after };
      if (WAITS.includes(kind)) {
        draw("line", { ...data, x1: x, x2: x + width, y1: middle, y2: middle }, this.svg);
        continue;
      }
      const inset = kind === "decode" ? 5 : 2;
      draw("rect", { ...data, x, width, y: y + inset, height: ROW - 2 * inset }, this.svg);
      for (const [step] of request.chunks.filter(([step]) => first < step && step < after)) {
        draw("path", { class: "chunk", d: `M${round(from(trace, step) * pixels)} ${y + 2}v${ROW - 4}` }, this.svg);
      }
      if (kind === "recompute") draw("path", { class: "again", d: `M${x} ${middle}h${width}` }, this.svg);
    }
  }

  /** Above the boundaries of the steps: a bar where the request was preempted, a mark after its last cell.
   * @param {RequestData} request @param {number} y */
  drawEvents(request, y) {
    for (const step of request.preemptions) {
      const x = round(from(this.trace, step) * this.pixels);
      draw("path", { class: "preemption", "data-preempted": request.request_id, d: `M${x} ${y + 2}v${ROW - 4}m-3 -4l3 4l3 -4` }, this.svg);
    }
    const last = request.runs.at(-1);
    const end = last ? to(this.trace, last[2] - 1) : from(this.trace, request.arrival_step);
    const [x, middle] = [round(end * this.pixels + 7), y + ROW / 2];
    const shape = {
      finished: `M${x - 4} ${middle}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0`,
      failed: `M${x - 4} ${middle - 4}l8 8m0 -8l-8 8`,
      aborted: `M${x - 4} ${middle - 4}h8v8h-8z`,
    }[request.outcome];
    if (shape) draw("path", { class: request.outcome, "data-end": request.request_id, d: shape }, this.svg);
  }

  point(/** @type {PointerEvent} */ event) {
    const { left, top } = this.svg.getBoundingClientRect();
    const step = this.trace.steps.findIndex((_, index) => (event.clientX - left) / this.pixels < to(this.trace, index));
    const row = Math.floor((event.clientY - top - this.top) / ROW);
    this.select(step, row >= 0 ? row : undefined);
  }

  move(/** @type {KeyboardEvent} */ event) {
    const { steps: { length }, requests } = this.trace;
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-length, 0], End: [length, 0] };
    const way = /** @type {Record<string, number[]>} */ (ways)[event.key];
    if (!way || !length) return;
    event.preventDefault();
    const step = this.step === undefined ? 0 : Math.min(Math.max(this.step + way[0], 0), length - 1);
    const row = this.step === undefined ? 0 : Math.min((this.row ?? -1) + way[1], requests.length - 1);
    this.select(step, row >= 0 ? row : undefined); // above the first row the step alone is chosen
    const [left, right] = [from(this.trace, step) * this.pixels, to(this.trace, step) * this.pixels];
    const { scrollLeft, clientWidth } = this.scroller;
    if (left < scrollLeft || right > scrollLeft + clientWidth) this.scroller.scrollLeft = left - clientWidth / 2;
  }

  /** @param {number} step @param {number | undefined} row */
  select(step, row) {
    if (step < 0 || (row ?? -1) >= this.trace.requests.length || (step === this.step && row === this.row)) return;
    for (const other of timelines) if (other !== this) other.leave();
    [this.step, this.row] = [step, row];
    this.show(step);
  }

  leave() {
    this.step = this.row = undefined;
    this.cursor.replaceChildren();
    this.rows.forEach((name) => name.classList.remove("current"));
  }

  show(/** @type {number} */ step) {
    const { trace, row } = this;
    const x = from(trace, step) * this.pixels;
    const width = Math.max(2, to(trace, step) * this.pixels - x);
    this.cursor.replaceChildren();
    draw("rect", { class: "cursor", x, y: AXIS, width, height: this.top + trace.requests.length * ROW - AXIS }, this.cursor);
    if (row !== undefined) draw("rect", { class: "cursor", x, y: this.top + row * ROW, width, height: ROW }, this.cursor);
    this.rows.forEach((name, index) => name.classList.toggle("current", index === row));
    details.replaceChildren();
    if (row !== undefined) this.tellRequest(trace.requests[row], step);
    const line = make("div", "", details);
    make("b", traces.length > 1 ? `${trace.title}, step ${step}` : `Step ${step}`, line);
    line.append(` · ${trace.steps[step].told}`);
    this.memory?.show(step);
  }

  /** @param {RequestData} request @param {number} step */
  tellRequest(request, step) {
    const line = make("div", "", details);
    make("b", `Request ${request.request_id}`, line);
    const [kind = "", first = 0] = runAt(request, step) ?? [];
    const waits = {
      queue: `queue, step ${step - first + 1} of its wait`,
      preempted: `preempted, step ${step - first + 1} without its KV cache`,
      stall: "stall: running, but not in this step",
      failed: request.error,
    };
    const absent = step < request.arrival_step ? "not yet arrived" : `${request.outcome} before this step`;
    line.append(` · ${request.told[step] ?? /** @type {Record<string, string>} */ (waits)[kind] ?? absent}`);
    const { prompt } = request;
    if (prompt !== null) line.append(` · prompt “${prompt.slice(0, 60)}${prompt.length > 60 ? "…" : ""}”`);
  }
}
