// The source of the function that runs: its true lines with their numbers, those of exercises folded, the current line
// marked, and beside another phase the lines that differ. Loaded after words.js.
"use strict";

const TOKENS = /("""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|[rbf]{0,2}"(?:\\.|[^"\\\n])*"|[rbf]{0,2}'(?:\\.|[^'\\\n])*')|(#[^\n]*)|\b(and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield|None|True|False)\b|(@[\w.]+)|\b(\d[\d_.]*)\b/g;
const LOOKS = ["string", "comment", "keyword", "decorator", "number"];
const BEGIN = /^\s*# exercise (\d\S*x\d+):/;

/** Lines of Python as lists of [class, text]. @param {string[]} lines @returns {[string, string][][]} */
function coloured(lines) {
  /** @type {[string, string][][]} */
  const found = [[]];
  const add = (/** @type {string} */ look, /** @type {string} */ text) => text.split("\n").forEach((part, place) => {
    if (place) found.push([]);
    if (part) found[found.length - 1].push([look, part]);
  });
  const code = lines.join("\n");
  let done = 0;
  for (const match of code.matchAll(TOKENS)) {
    add("", code.slice(done, match.index));
    add(LOOKS[match.slice(1).findIndex((group) => group !== undefined)], match[0]);
    done = match.index + match[0].length;
  }
  add("", code.slice(done));
  return found;
}

/** For each line whether the other function lacks it: what a longest common subsequence leaves out.
 * @param {string[]} lines @param {string[]} others @returns {boolean[]} */
function onlyHere(lines, others) {
  const lengths = Array.from({ length: lines.length + 1 }, () => new Array(others.length + 1).fill(0));
  for (let i = lines.length - 1; i >= 0; i--) {
    for (let j = others.length - 1; j >= 0; j--) {
      lengths[i][j] = lines[i] === others[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  const only = lines.map(() => true);
  for (let i = 0, j = 0; i < lines.length && j < others.length; ) {
    if (lines[i] === others[j]) {
      only[i++] = false;
      j++;
    } else if (lengths[i + 1][j] >= lengths[i][j + 1]) i++;
    else j++;
  }
  return only;
}

class SourceView {
  /** @param {Recording} recording @param {HTMLElement} parent @param {Recording | null} other */
  constructor(recording, parent, other) {
    this.recording = recording;
    this.other = other;
    this.path = make("p", "", parent, "path");
    this.stack = make("ol", "", parent, "stack");
    this.stack.setAttribute("aria-label", "Calls");
    this.box = make("div", "", parent, "lines");
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "region");
    this.box.setAttribute("aria-label", "Source");
    /** @type {Map<Code, HTMLElement>} */
    this.made = new Map();
  }

  /** @param {number} index */
  show(index) {
    const { code, offset, depth, kind } = this.recording.spot(index);
    this.path.textContent = code.path;
    this.stack.replaceChildren(...this.recording.stack(index).map((name) => make("li", name)));
    this.stack.dataset.depth = String(depth);
    this.stack.scrollLeft = this.stack.scrollWidth;
    const block = this.made.get(code) ?? this.block(code);
    this.made.set(code, block);
    if (this.box.firstChild !== block) this.box.replaceChildren(block);
    for (const marked of this.box.querySelectorAll("[aria-current], .holds")) {
      marked.removeAttribute("aria-current");
      marked.classList.remove("holds", "launch", "wait", "raise");
    }
    const row = /** @type {HTMLElement} */ (block.querySelector(`[data-line="${code.first + offset}"]`));
    row.setAttribute("aria-current", "true");
    if (kind) row.classList.add(kind);
    row.closest("details")?.firstElementChild?.classList.add("holds");
    this.centre();
  }

  /** Scroll the marked line into the middle. */
  centre() {
    const row = /** @type {HTMLElement | null} */ (this.box.querySelector("[aria-current]"));
    const seen = row?.offsetParent ? row : /** @type {HTMLElement | null} */ (this.box.querySelector(".holds"));
    if (seen) this.box.scrollTop = seen.offsetTop - this.box.clientHeight / 2;
  }

  /** @param {Code} code */
  block(code) {
    const block = make("div", "", null, "function");
    const differs = this.differing(code);
    let parent = block;
    coloured(code.lines).forEach((parts, place) => {
      const text = code.lines[place];
      if (text.trim() === "# end exercise") parent = block;
      const row = make("div", "", parent, "line");
      row.dataset.line = String(code.first + place);
      make("span", String(code.first + place), row, "number").setAttribute("aria-hidden", "true");
      const indent = text.length - text.trimStart().length;
      make("span", ` ${text.slice(0, indent)}`, row, "sign");
      row.classList.toggle("differs", Boolean(differs?.[place]));
      const shown = make("span", "", row, "python");
      parts.forEach(([look, part], number) => make("span", number ? part : part.trimStart(), shown, look));
      const begins = BEGIN.exec(text);
      if (begins) parent = this.fold(begins[1], text, block, code.own === true);
    });
    return block;
  }

  /** @param {string} number @param {string} marker @param {HTMLElement} block @param {boolean} isOpen a learner's own lines are */
  fold(number, marker, block, isOpen) {
    const fold = make("details", "", block, "fold");
    fold.toggleAttribute("open", isOpen);
    const indent = " ".repeat(marker.length - marker.trimStart().length);
    make("summary", `${indent}…  # exercise ${number}`, fold);
    fold.addEventListener("toggle", () => this.centre());
    return fold;
  }

  /** @param {Code} code */
  differing(code) {
    if (!this.other) return null;
    const others = this.other.data.functions;
    const last = code.name.split(".").at(-1);
    const twin = others.find(({ name }) => name === code.name) ?? others.find(({ name }) => name.split(".").at(-1) === last);
    return twin ? onlyHere(code.lines, twin.lines) : null; // what the other recording does not show cannot be compared
  }
}
