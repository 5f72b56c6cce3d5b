// The tokens of a step: its decoding requests with their drafts, and of each prompt the chunk that the step computes. Loaded after timeline.js.

// The prompts of a step, in the order of the batch: the chunk, those before it, and a text.
function chunksOf(trace, step) {
  return trace.steps[step].prefilled.map(([id]) => {
    const request = trace.requests.find((one) => one.request_id === id && one.chunks.some(([at]) => at === step));
    const place = request.chunks.findIndex(([at]) => at === step);
    const [, first, count] = request.chunks[place];
    const begun = request.chunks.findLastIndex(([, start], index, all) => {
      return index <= place && (index === 0 || start !== all[index - 1][1] + all[index - 1][2]);
    });
    const outputs = request.tokens.filter(([at]) => at < step).length;
    const total = Math.max(request.num_prompt_tokens + outputs, first + count);
    const text = `tokens ${first} to ${first + count - 1} of ${total}`;
    const before = request.chunks.slice(begun, place);
    return { request, first, count, total, text, cached: request.chunks[begun][1], before, isChunk: count < total };
  });
}

// What became of the drafts of a request in a step, as a text; empty without drafts.
function draftsOf(record, id) {
  const [, accepted, rejected] = record.verified.find(([name]) => name === id) ?? [id, 0, 0];
  return accepted + rejected ? `${accepted} of ${some(accepted + rejected, "draft")} accepted` : "";
}

// Where a token of a request with a grammar was drawn: the automaton's state, what is open, how many tokens may follow.
function placeInGrammar([state, stack, allowed]) {
  return `in state ${state}, ${stack ? `${stack.length} open (${stack})` : "nothing open"}, from ${some(allowed, "allowed token")}`;
}

class StepTokens {
  constructor(trace, section) {
    this.trace = trace;
    this.element = make("div", "", section, "step-tokens");
    if (trace.steps.length) this.show(trace.focus.step);
  }

  show(step) {
    const record = this.trace.steps[step];
    const alone = record.decoded.filter((id) => !draftsOf(record, id));
    const drafted = record.verified.filter(([id]) => record.decoded.includes(id));
    this.element.replaceChildren();
    make("b", `Tokens of step ${step}`, this.element);
    if (alone.length || !drafted.length) {
      const track = this.row(alone.length ? `decode ${alone.join(", ")}: 1 token each` : "none decodes");
      for (const id of alone) make("i", "", track, "decode").title = id;
    }
    for (const [id, accepted, rejected] of drafted) {
      const track = this.row(`decode ${id}: ${draftsOf(record, id)}`);
      for (let place = 0; place <= accepted; place++) make("i", "", track, "decode");
      for (let place = 0; place < rejected; place++) make("i", "", track, "rejected");
    }
    for (const { request_id: id, tokens } of this.trace.requests) {
      for (const [, , text, position] of tokens.filter(([at, , , position]) => at === step && position)) {
        const stack = this.row(`grammar of ${id}: “${text}” ${placeInGrammar(position)}`);
        for (const opened of position[1]) make("i", opened, stack, "frame");
      }
    }
    for (const part of chunksOf(this.trace, step)) {
      const { request, first, count, total, text, cached, before, isChunk } = part;
      const bar = this.row(`prompt of ${request.request_id}: ${isChunk ? text : some(count, "token")}`);
      const left = total - first - count;
      if (cached) make("i", "", bar, "cached").style.flexGrow = cached;
      for (const [, , size] of before) make("i", "", bar, "before").style.flexGrow = size;
      make("i", "", bar, "now").style.flexGrow = count;
      if (left) make("i", "", bar, "left").style.flexGrow = left;
    }
  }

  row(text) {
    make("span", text, this.element);
    const track = make("div", "", this.element, "track");
    track.setAttribute("aria-hidden", "true");
    return track;
  }
}
