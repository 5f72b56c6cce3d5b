// An answer with a grammar: the fields that ask for one, and for each token where the automaton stood when it was drawn.

const byId = (id) => document.getElementById(id);
const grouped = (number) => number.toLocaleString("en");

/** The fields of a request: a text that begins with a brace is a JSON Schema, any other a regular expression. */
export function grammarFields() {
  const text = byId("grammar").value.trim();
  if (!text) return {};
  return { [text.startsWith("{") ? "guided_json" : "guided_regex"]: text, grammar_progress: true };
}

/** Remove the picture of the last answer. */
export function clearWalk() {
  byId("walk").hidden = true;
  byId("walk-tokens").replaceChildren();
  byId("walk-now").textContent = "";
}

function make(name, className, parent, text = "") {
  const element = parent.appendChild(document.createElement(name));
  element.className = className;
  element.textContent = text;
  return element;
}

/** Draw a token: a bar for how many were allowed (in powers of ten), a box for each open frame, its text. */
export function drawToken({ state, stack, num_allowed: allowed }, text) {
  byId("walk").hidden = false;
  const open = stack ? `${stack.length} open: ${stack}` : "nothing open";
  const told = `state ${state} · ${open} · ${grouped(allowed)} ${allowed === 1 ? "token" : "tokens"} allowed`;
  const strip = byId("walk-tokens");
  const column = make("span", "walk-token", strip);
  column.title = `${JSON.stringify(text)}: ${told}`;
  const bar = make("i", "walk-allowed", make("span", "walk-bar", column));
  bar.style.height = `${Math.max(4, 16 * Math.log10(Math.max(1, allowed)))}%`; // 100 % is a million and more
  const frames = make("span", "walk-stack", column);
  for (const opened of stack) make("i", "walk-frame", frames, opened);
  make("span", "walk-text", column, text.replaceAll("\n", "⏎") || "·");
  strip.scrollLeft = strip.scrollWidth;
  byId("walk-now").textContent = told;
}
