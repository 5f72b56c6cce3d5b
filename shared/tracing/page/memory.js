// The KV cache of a trace after a chosen step: a slider and the picture of the blocks. Loaded after pool.js and timeline.js.
"use strict";

class MemoryHistory {
  /** @param {Timeline} timeline @param {HistoryData} data @param {HTMLElement} section */
  constructor(timeline, data, section) {
    this.trace = timeline.trace;
    this.data = data;
    make("p", data.caption, section, "caption");
    const label = make("label", "KV cache after step ", section, "slider");
    this.number = make("b", "0", label);
    this.slider = /** @type {HTMLInputElement} */ (make("input", "", label));
    Object.assign(this.slider, { type: "range", min: 0, max: Math.max(0, this.trace.steps.length - 1), value: 0 });
    this.slider.addEventListener("input", () => timeline.select(Number(this.slider.value), timeline.row)); // of the same request
    this.picture = new PoolPicture(make("div", "", section), {
      height: () => Math.min(300, innerHeight / 3),
      label: `${this.trace.title}: KV cache`,
    });
    const cast = new PoolCast((id) => id);
    this.casts = this.trace.steps.map((_, step) => new Map(cast.meet(this.held(step).map(({ request_id: id }) => id))));
    if (this.trace.steps.length) this.show(this.trace.focus.step);
  }

  /** The blocks of each request after a step, in order of arrival; requests without blocks last. @param {number} step */
  held(step) {
    return this.data.holdings.flatMap(({ blocks, written }, index) => {
      const request = this.trace.requests[index];
      const kind = runAt(request, step)?.[0] ?? "";
      const mine = blocks.filter((run) => isWithin(run, step)).map(([block]) => block);
      const states = /** @type {Record<string, string>} */ ({ stall: "decode", pending: "decode", queue: "prefill" });
      const holding = {
        request_id: request.request_id,
        state: states[kind] ?? kind,
        num_tokens: request.num_prompt_tokens + request.tokens.filter(([at]) => at <= step).length,
        num_written: mine.length ? written[step - request.arrival_step] : 0,
        num_cached_tokens: request.num_cached_tokens,
        blocks: mine,
      };
      return mine.length || kind === "preempted" ? [holding] : [];
    }).sort((a, b) => Number(a.state === "preempted") - Number(b.state === "preempted"));
  }

  show(/** @type {number} */ step) {
    this.slider.value = this.number.textContent = String(step);
    this.slider.setAttribute("aria-valuetext", `step ${step}`);
    const preemptions = this.trace.steps.slice(0, step + 1).reduce((sum, { preempted }) => sum + preempted.length, 0);
    const cached = this.data.cached.filter((run) => isWithin(run, step)).map(([block]) => block);
    const { num_waiting } = this.trace.steps[step];
    this.picture.show({ ...this.data, num_waiting, num_preemptions: preemptions, holdings: this.held(step), cached }, this.casts[step]);
  }
}
