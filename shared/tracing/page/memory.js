// The KV cache of a trace after a chosen step: a slider and the picture of the blocks. Loaded after pool.js and timeline.js.

class MemoryHistory {
  constructor(timeline, section) {
    this.timeline = timeline;
    this.trace = timeline.trace;
    const last = Math.max(0, this.trace.steps.length - 1);
    make("p", this.trace.memory.caption, section, "caption");
    const label = make("label", "KV cache after step ", section, "slider");
    this.number = make("b", "0", label);
    this.slider = make("input", "", label);
    Object.assign(this.slider, { type: "range", min: 0, max: last, value: 0 });
    this.slider.addEventListener("input", () => timeline.turnTo(Number(this.slider.value)));
    this.element = make("div", "", section);
    this.picture = new PoolPicture(this.element, {
      height: () => Math.min(300, innerHeight / 3),
      label: `${this.trace.title}: KV cache`,
    });
    this.cast = new PoolCast((id) => id);
    this.colours = this.trace.steps.map((_, step) => new Map(this.cast.meet(this.held(step).map(({ request_id: id }) => id))));
    if (this.trace.steps.length) this.show(this.trace.focus.step);
  }

  // The blocks of each request after a step, in order of arrival; requests without blocks last.
  held(step) {
    const found = [];
    for (const [place, { blocks, written }] of this.trace.memory.holdings.entries()) {
      const request = this.trace.requests[place];
      const [kind] = request.runs.find(([, first, after]) => first <= step && step < after) ?? [];
      const mine = blocks.filter(([, first, after]) => first <= step && step < after).map(([block]) => block);
      if (!mine.length && kind !== "preempted") continue;
      found.push({
        request_id: request.request_id,
        state: { stall: "decode", pending: "decode", queue: "prefill" }[kind] ?? kind,
        num_prompt_tokens: request.num_prompt_tokens,
        num_tokens: request.num_prompt_tokens + request.tokens.filter(([at]) => at <= step).length,
        num_written: mine.length ? written[step - request.arrival_step] : 0,
        num_cached_tokens: request.num_cached_tokens,
        blocks: mine,
      });
    }
    return found.sort((a, b) => (a.state === "preempted") - (b.state === "preempted"));
  }

  show(step) {
    this.slider.value = step;
    this.slider.setAttribute("aria-valuetext", `step ${step}`);
    this.number.textContent = step;
    const record = this.trace.steps[step];
    const { unit, block_tokens, num_blocks, num_shown } = this.trace.memory;
    const before = this.trace.steps.slice(0, step + 1).reduce((sum, { preempted }) => sum + preempted.length, 0);
    const holdings = this.held(step);
    const cached = this.trace.memory.cached.filter(([, first, after]) => first <= step && step < after).map(([block]) => block);
    const memory = { unit, block_tokens, num_blocks, num_shown, num_waiting: record.num_waiting, num_preemptions: before, holdings, cached };
    this.picture.show(memory, this.colours[step]);
  }
}
