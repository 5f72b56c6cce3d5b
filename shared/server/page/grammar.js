// An answer with a grammar: the fields that ask for one, and for each token where the automaton stood when it was sampled.

import { field } from "./api.js";

/** The fields of a request: a text that begins with a brace is a JSON Schema, any other a regular expression.
 * @returns {Record<string, any>} */
export function grammarFields() {
  const text = field("grammar").value.trim();
  if (!text) return {};
  return { [text.startsWith("{") ? "guided_json" : "guided_regex"]: text, grammar_progress: true };
}

/** Remove the picture of the last answer. */
export function clearWalk() {
  byId("walk").hidden = true;
  byId("walk-tokens").replaceChildren();
  byId("walk-now").textContent = "";
}

/** Draw a token: a bar for how many were allowed (in powers of ten), a box for each open frame, its text.
 * @param {{state: number, stack: string, num_allowed: number}} position @param {string} text */
export function drawToken({ state, stack, num_allowed: allowed }, text) {
  byId("walk").hidden = false;
  const open = stack ? `${stack.length} open: ${stack}` : "nothing open";
  const told = `state ${state} · ${open} · ${some(allowed, "token")} allowed`;
  const strip = byId("walk-tokens");
  const column = make("span", "", strip, "walk-token");
  column.title = `${JSON.stringify(text)}: ${told}`;
  const bar = make("i", "", make("span", "", column, "walk-bar"), "walk-allowed");
  bar.style.height = `${Math.max(4, 16 * Math.log10(Math.max(1, allowed)))}%`; // 100 % is a million and more
  const frames = make("span", "", column, "walk-stack");
  for (const opened of stack) make("i", opened, frames, "walk-frame");
  make("span", text.replaceAll("\n", "⏎") || "·", column, "walk-text");
  strip.scrollLeft = strip.scrollWidth;
  byId("walk-now").textContent = told;
}
