// A recording as moments: the state after each executed line, and where it stands. No part of the page is touched here.
"use strict";

/**
 * @typedef {{id: string, prompt: string, prompt_ids: number[], arrives: number, max_tokens: number, schema?: string}} Prompted
 * @typedef {{name: string, path: string, first: number, lines: string[], own?: boolean}} Code
 * @typedef {{name: string, step: number, line?: string, ask: string, answers?: string[], right?: number,
 *   panel?: string | string[], reveal: string}} Question
 * @typedef {{id: string, start: number, tokens: number, kind: string, drafts?: number, masks?: number,
 *   rows: number}} Entry
 * @typedef {{status: string, computed: number, scheduled: number, pending: number, known: number, cached?: number,
 *   outputs: Record<string, number>, text: string, reason?: string, row?: number, blocks?: number[], written?: number}} Served
 * @typedef {{parent: number, tokens: number[], blocks: number[], users: number}} TreeNode
 * @typedef {{granted: number, ids?: number[], forced?: number, accepted?: number, rejected?: number}} Drafts
 * @typedef {{state: number, open: string, allowed: number, examples: number[]}} Position
 * @typedef {{queues: Record<string, string[]>, requests: Record<string, Served>,
 *   pool: {unit: string, block_size: number, num_blocks: number, blocks: Record<string, [string[], number, number?]>},
 *   schedule?: {step: number, items: Entry[]}, batch?: Record<string, any>, tree?: Record<string, TreeNode>,
 *   in_flight?: {step: number, ids: string[]}[], drafts?: Record<string, Drafts>, sampled?: Record<string, number[]>,
 *   grammar?: Record<string, Position>, kept?: Record<string, {tokens: number, layers: number[][]}>,
 *   variables?: Record<string, Record<string, string>>}} State
 * @typedef {{phase: string, title: string, model: string, device: string, settings: Record<string, any>,
 *   texts: Record<string, string>, requests: Prompted[], functions: Code[], lines: [number, number, number, string][],
 *   steps: {first: number, ms: number, gpu?: Span[], ranks?: Span[][]}[], events: [number, number, any?][], state: State,
 *   error?: string, questions?: Question[]}} Recorded
 * @typedef {[string, number, number, number]} Span What ran, the events during which it began and ended, and its µs.
 * @typedef {{step?: string, line?: string, event?: string, follow?: string, ask?: string, beside?: string}} Address
 * @typedef {(string | number)[]} Path
 */

/** The state after a merge patch (RFC 7386); what the patch does not touch is shared with the state before.
 * @param {any} state @param {any} patch @returns {any} */
function patched(state, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const copy = state && typeof state === "object" && !Array.isArray(state) ? { ...state } : {};
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete copy[key];
    else copy[key] = patched(copy[key], value);
  }
  return copy;
}

/** @param {any} tree @param {Path} path @returns {any} */
const at = (tree, path) => path.reduce((part, key) => part?.[key], tree);

/** @param {any} one @param {any} other */
const isSame = (one, other) => one === other || JSON.stringify(one) === JSON.stringify(other);

class Recording {
  /** @param {Recorded} data */
  constructor(data) {
    this.data = data;
    this.length = data.events.length;
    this.states = /** @type {State[]} */ ([]);
    this.callers = /** @type {number[]} */ ([]); // the event of the line that called, or -1
    this.stepOf = /** @type {number[]} */ ([]);
    this.times = /** @type {number[]} */ ([]); // µs from the beginning of the run to the end of the line
    let [state, step, time] = [data.state, 0, 0];
    const stack = /** @type {number[]} */ ([]); // the last event at each depth
    data.events.forEach(([line, micros, patch], index) => {
      if (patch) state = patched(state, patch);
      this.states.push(state);
      this.times.push((time += micros));
      while (step + 1 < data.steps.length && data.steps[step + 1].first <= index) step += 1;
      this.stepOf.push(step);
      const [, , depth] = data.lines[line];
      stack.length = Math.min(stack.length, depth + 1);
      this.callers.push(depth ? (stack[depth - 1] ?? -1) : -1);
      stack[depth] = index;
    });
    const keeps = this.states.some(({ tree }) => tree) || data.requests.some(({ id }) => id.startsWith("segment "));
    this.unheld = keeps ? "cached" : "allocated"; // what a block in use is that no request holds
  }

  /** @param {number} index @returns {State} */
  before(index) {
    return index ? this.states[index - 1] : this.data.state;
  }

  /** Where an event stands: its function, the offset of its line there, how deep the call is, and its kind.
   * @param {number} index @returns {{code: Code, offset: number, depth: number, kind: string}} */
  spot(index) {
    const [number, offset, depth, kind] = this.data.lines[this.data.events[index][0]];
    return { code: this.data.functions[number], offset, depth, kind };
  }

  /** @param {number} index */
  text(index) {
    const { code, offset } = this.spot(index);
    return code.lines[offset];
  }

  /** The events of a step: the first, and the one after the last. @param {number} step @returns {[number, number]} */
  span(step) {
    const { steps } = this.data;
    return [steps[step].first, steps[step + 1]?.first ?? this.length];
  }

  /** The event that an address names. @param {Address} address @returns {number} */
  find({ step, line, event }) {
    const last = this.data.steps.length - 1;
    const [first, after] = this.span(Math.min(Math.max(Number(step) || 0, 0), last));
    const events = Array.from({ length: after - first }, (_, place) => first + place);
    if (event !== undefined) return events[Math.min(Number(event) || 0, events.length - 1)] ?? first;
    if (!line) return first;
    const called = events.find((index) => this.spot(index).code.name.split(".").at(-1) === line);
    return called ?? events.find((index) => this.text(index).includes(line)) ?? first;
  }

  /** The event of another recording that runs the same line in the same step, as often as here; -1 if none does.
   * @param {Recording} other @param {number} index */
  twin(other, index) {
    const step = this.stepOf[index];
    if (step >= other.data.steps.length) return -1;
    const text = this.text(index);
    const [first] = this.span(step);
    let count = 0;
    for (let each = first; each <= index; each++) count += Number(this.text(each) === text);
    const [start, end] = other.span(step);
    for (let each = start; each < end; each++) {
      count -= Number(other.text(each) === text);
      if (!count) return each;
    }
    return -1;
  }

  /** The next event in a direction that changes the state, or the last one. @param {number} index @param {number} way */
  nextChange(index, way) {
    for (let next = index + way; next >= 0 && next < this.length; next += way) {
      if (this.data.events[next][2]) return next;
    }
    return way > 0 ? this.length - 1 : 0;
  }

  /** What ran beside the host: the GPU and the other ranks, with what each ran of which step. @returns {[string, {step: number, span: Span}[]][]} */
  lanes() {
    const { steps } = this.data;
    const ranks = Math.max(0, ...steps.map((step) => step.ranks?.length ?? 0));
    const of = (/** @type {(step: Recorded["steps"][0]) => Span[] | undefined} */ spans) => {
      return steps.flatMap((each, step) => (spans(each) ?? []).map((span) => ({ step, span })));
    };
    const lanes = /** @type {[string, {step: number, span: Span}[]][]} */ ([["GPU", of(({ gpu }) => gpu)]]);
    for (let rank = 0; rank < ranks; rank++) lanes.push([`rank ${rank + 1}`, of((step) => step.ranks?.[rank])]);
    return lanes.filter(([, spans]) => spans.length);
  }

  /** The names of the functions from the step to the one that runs. @param {number} index @returns {string[]} */
  stack(index) {
    const names = [];
    for (let each = index; each >= 0; each = this.callers[each]) names.unshift(this.spot(each).code.name);
    return names;
  }

  /** The ids of a request's known tokens. @param {State} state @param {string} id @returns {number[]} */
  tokens(state, id) {
    const { prompt_ids: prompt = [] } = this.data.requests.find((request) => request.id === id) ?? {};
    return [...prompt, ...Object.values(state.requests[id]?.outputs ?? {})];
  }

  /** The text of tokens, on one line. @param {number[]} ids */
  words(ids) {
    return ids.map((id) => this.data.texts[id] ?? `#${id}`).join("").replaceAll("\n", "⏎");
  }

  /** The number of a request's colour. @param {string} id */
  colour(id) {
    const number = this.data.requests.findIndex((request) => request.id === id);
    return number < 0 ? 7 : number % 7;
  }

  /** The greatest value over all moments. @param {(state: State) => number} measure */
  most(measure) {
    return Math.max(0, ...new Set([this.data.state, ...this.states].map(measure)));
  }
}
