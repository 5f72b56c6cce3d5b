// The page: one recording, or two beside each other, at a moment that slider, keys, play or the address choose. Loaded
// after side.js, at the end of the page.
"use strict";

/** @param {string} id @returns {any} */
const part = (id) => document.getElementById(id);
const ANSWERING = ["requests", "schedule", "batch"]; // panels that a question hides if it names none
const REST = 150; // ms without a move, after which the address is written

class Stepper {
  /** @param {Recorded[]} recordings of one phase, or of two, the earlier first */
  constructor(recordings) {
    const all = recordings.map((data) => new Recording(data));
    const [main] = all.slice(-1);
    /** @type {Side[]} */
    this.sides = all.map((recording, place) => new Side(recording, part("sides"), all.length > 1 ? all[1 - place] : null));
    this.main = this.sides.findIndex(({ recording }) => recording === main);
    /** @type {string | null} */
    this.followed = null;
    this.timer = 0;
    this.saving = 0;
    /** @type {Question | null} */
    this.question = null;
    part("moment").max = String(this.recording.length - 1);
    this.drawStrip();
    this.listen();
    this.drawFollow();
    this.drawQuestions();
    if (all.length > 1) part("beside").textContent = `beside phase ${all[0].data.phase}`;
    part("beside").hidden = all.length === 1;
    this.open();
  }

  get recording() {
    return this.sides[this.main].recording;
  }

  get index() {
    return this.sides[this.main].index;
  }

  /** Read the moment from the address. */
  open() {
    const address = /** @type {Address} */ (Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
    const asked = this.recording.data.questions?.find(({ name }) => name === address.ask) ?? null;
    if (this.recording.data.requests.some(({ id }) => id === address.follow)) this.followed = address.follow ?? null;
    this.setBeside(address.beside !== undefined);
    this.ask(asked);
    const moment = address.step === undefined && asked ? { step: String(asked.step), line: asked.line, ...address } : address;
    const side = this.sides[this.main];
    const raised = location.hash ? -1 : this.recording.data.events.findIndex((_, index) => this.recording.spot(index).kind === "raise");
    side.show(raised < 0 ? side.recording.find(moment) : raised, this.followed); // a learner's error is what one looks for
    for (const other of this.sides) if (other !== side) this.goAlong(other, true);
    this.showFollowed();
    this.tell();
  }

  /** Show both phases, or one. @param {boolean} isBeside */
  setBeside(isBeside) {
    this.sides.forEach((side, place) => (side.element.hidden = place !== this.main && !isBeside));
    this.isBeside = isBeside && this.sides.length > 1;
    document.body.dataset.sides = this.isBeside ? "2" : "1";
    part("beside").setAttribute("aria-pressed", String(this.isBeside));
    for (const side of this.sides) side.source.centre();
  }

  /** Show on the other side the line that runs here, or the one that called; if it has neither, the step.
   * @param {Side} other @param {boolean} isNew whether the step is another one than before */
  goAlong(other, isNew) {
    for (let each = this.index; each >= 0; each = this.recording.callers[each]) {
      const twin = this.recording.twin(other.recording, each);
      if (twin >= 0) return other.show(twin, this.followed);
    }
    if (isNew) other.show(other.recording.find({ step: String(this.recording.stepOf[this.index]) }), this.followed);
  }

  /** Keep the moment in the address, once the reader rests. */
  save() {
    clearTimeout(this.saving);
    this.saving = setTimeout(() => {
      const step = this.recording.stepOf[this.index];
      const address = new URLSearchParams({ step: String(step), event: String(this.index - this.recording.span(step)[0]) });
      if (this.followed !== null) address.set("follow", this.followed);
      if (this.isBeside) address.set("beside", this.sides[0].recording.data.phase);
      if (this.question) address.set("ask", this.question.name);
      history.replaceState(null, "", `#${address}`);
    }, REST);
  }

  /** @param {number} index of an event; the other side goes along, to the same line if it has it */
  go(index) {
    const side = this.sides[this.main];
    const old = this.recording.stepOf[side.index];
    side.show(Math.min(Math.max(index, 0), this.recording.length - 1), this.followed);
    const step = this.recording.stepOf[side.index];
    for (const other of this.sides) if (other !== side) this.goAlong(other, step !== old);
    this.tell();
    this.save();
  }

  /** @param {number} way */
  goStep(way) {
    const { recording, index } = this;
    const step = recording.stepOf[index];
    const back = way < 0 && index > recording.span(step)[0] ? step : step + way;
    this.go(recording.span(Math.min(Math.max(back, 0), recording.data.steps.length - 1))[way > 0 && back >= recording.data.steps.length ? 1 : 0]);
  }

  /** What is the same wherever the reader looks: which moment this is, and what the line changed. */
  tell() {
    const { recording, index } = this;
    const { code, offset, kind } = recording.spot(index);
    const line = code.first + offset;
    const step = recording.stepOf[index];
    const [first, after] = recording.span(step);
    part("step").textContent = `step ${step} of ${recording.data.steps.length - 1}`;
    part("line").textContent = `line ${index - first + 1} of ${after - first}`;
    part("time").textContent = `took ${(recording.data.events[index][1] / 1000).toFixed(2)} ms`;
    const launch = recording.data.device === "cpu" ? "launches work (CPU)" : "launches work";
    const kinds = { launch, wait: "waits for the device", raise: "raises the error that ends the run" };
    Object.assign(part("kind"), { className: kind, textContent: kinds[/** @type {keyof typeof kinds} */ (kind)] ?? "" });
    part("now").textContent = `${line}  ${recording.text(index).trim()}`;
    this.tellLanes();
    part("told").textContent = told(recording, index, this.sides[this.main].hidden);
    const moment = part("moment");
    moment.value = String(index);
    moment.setAttribute("aria-valuetext", `step ${step}, line ${line} of ${code.name}`);
    part("cursor").setAttribute("x", String(index));
    if (part("table").open) this.drawTable();
  }

  /** Steps by turns light and dark; where work is launched, and where the host waits; below, what ran beside the host. */
  drawStrip() {
    const { data: { events, lines, steps }, length } = this.recording;
    const add = (/** @type {Element} */ box, /** @type {string} */ look, /** @type {number} */ x, /** @type {number} */ end) => {
      draw("rect", { class: look, x, width: Math.max(end - x, length / 500), y: 0, height: 10 }, box);
    };
    const strip = part("strip");
    strip.setAttribute("viewBox", `0 0 ${length} 10`);
    steps.forEach((_, step) => step % 2 && add(strip, "step", ...this.recording.span(step)));
    events.forEach(([line], index) => lines[line][3] && add(strip, lines[line][3], index, index + 1));
    strip.append(part("cursor"));
    for (const [lane, spans] of this.recording.lanes()) {
      const box = draw("svg", { viewBox: `0 0 ${length} 10`, preserveAspectRatio: "none", "data-lane": lane }, part("lanes"));
      for (const { span: [name, first, last] } of spans) add(box, name, first, last + 1);
      make("p", "", part("lanes"));
    }
  }

  /** What runs beside the host at this moment. */
  tellLanes() {
    const texts = part("lanes").querySelectorAll("p");
    this.recording.lanes().forEach(([lane, spans], place) => {
      const running = spans.filter(({ span: [, first, last] }) => first <= this.index && this.index <= last);
      const told = running.map(({ step, span: [name, , , micros] }) => `${name} of step ${step}, ${(micros / 1000).toFixed(2)} ms`);
      texts[place].textContent = `${lane}: ${told.join("; ") || "idle"}`;
    });
  }

  drawFollow() {
    for (const { id } of this.recording.data.requests) {
      const button = make("button", id, part("follow"), `chip colour-${this.recording.colour(id)}`);
      button.setAttribute("type", "button");
      button.dataset.follow = id;
      button.addEventListener("click", () => this.follow(id));
    }
    this.showFollowed();
  }

  /** @param {string} id */
  follow(id) {
    this.followed = this.followed === id ? null : id;
    this.sides.forEach((side) => side.show(side.index, this.followed));
    this.showFollowed();
    this.save();
  }

  showFollowed() {
    for (const button of part("follow").querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(button.dataset.follow === this.followed));
    }
  }

  drawQuestions() {
    const questions = this.recording.data.questions ?? [];
    part("questions").hidden = !questions.length;
    questions.forEach((question, place) => {
      const button = make("button", String(place + 1), part("questions"));
      button.setAttribute("type", "button");
      button.setAttribute("aria-label", `question ${place + 1}: ${question.ask}`);
      button.addEventListener("click", () => {
        this.ask(question);
        this.go(this.recording.find({ step: String(question.step), line: question.line }));
      });
    });
  }

  /** @param {Question | null} question */
  ask(question) {
    this.question = question;
    this.stop();
    const box = part("question");
    box.hidden = !question;
    const hidden = question ? ["variables", ...[question.panel ?? ANSWERING].flat()] : [];
    for (const side of this.sides) side.hidden = hidden;
    if (!question) return;
    box.replaceChildren();
    make("p", question.ask, box);
    const answers = make("div", "", box, "answers");
    for (const [place, answer] of (question.answers ?? []).entries()) {
      const button = make("button", answer, answers);
      button.setAttribute("type", "button");
      button.addEventListener("click", () => this.reveal(question, place));
    }
    const open = make("button", "Open the answer", answers, "open");
    open.setAttribute("type", "button");
    open.addEventListener("click", () => this.reveal(question));
  }

  /** @param {Question} question @param {number} [chosen] */
  reveal(question, chosen) {
    for (const side of this.sides) side.hidden = [];
    const box = part("question");
    box.replaceChildren();
    const { answers = [], right } = question;
    const said = chosen === undefined ? "" : `You said “${answers[chosen]}”${right === undefined ? "" : chosen === right ? ", and so it is" : `; it is “${answers[right]}”`}. `;
    make("p", `${said}${question.reveal}`, box).tabIndex = -1;
    const close = make("button", "Close", box);
    close.setAttribute("type", "button");
    close.addEventListener("click", () => {
      this.ask(null);
      this.save();
      part("moment").focus();
    });
    close.focus();
    this.sides.forEach((side) => side.show(side.index, this.followed));
    this.tell();
  }

  play() {
    if (this.timer) return this.stop();
    if (this.index === this.recording.length - 1) this.go(0);
    const next = () => {
      this.timer = setTimeout(next, 1000 / Number(part("speed").value));
      this.go(this.index + 1);
      if (this.index === this.recording.length - 1) this.stop();
    };
    this.timer = setTimeout(next, 0);
    part("play").classList.add("playing");
    part("play").setAttribute("aria-label", "pause");
    part("told").setAttribute("aria-live", "off"); // a screen reader cannot follow; it is told where play ends
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = 0;
    part("play").classList.remove("playing");
    part("play").setAttribute("aria-label", "play");
    part("told").setAttribute("aria-live", "polite");
  }

  /** The lines of this step as a table, for readers who do not use pictures. */
  drawTable() {
    const { recording, index } = this;
    const [first, after] = recording.span(recording.stepOf[index]);
    const rows = part("rows");
    rows.replaceChildren();
    for (let each = first; each < after; each++) {
      const row = make("tr", "", rows);
      if (each === index) row.setAttribute("aria-current", "true");
      const { code, offset } = recording.spot(each);
      make("td", code.name, row);
      make("td", String(code.first + offset), row);
      make("td", recording.text(each).trim(), row, "code");
      make("td", told(recording, each, this.sides[this.main].hidden), row);
    }
  }

  listen() {
    /** @type {Record<string, () => void>} */
    const doings = {
      back: () => this.go(this.index - 1),
      on: () => this.go(this.index + 1),
      "step-back": () => this.goStep(-1),
      "step-on": () => this.goStep(1),
      change: () => this.go(this.recording.nextChange(this.index, 1)),
    };
    for (const [id, go] of Object.entries(doings)) {
      part(id).addEventListener("click", () => {
        this.stop();
        go();
      });
    }
    part("play").addEventListener("click", () => this.play());
    part("beside").addEventListener("click", () => {
      this.setBeside(!this.isBeside);
      this.save();
    });
    part("moment").addEventListener("input", () => {
      this.stop();
      this.go(Number(part("moment").value));
    });
    part("table").addEventListener("toggle", () => part("table").open && this.drawTable());
    offerThemes();
    part("sides").addEventListener("click", (/** @type {MouseEvent} */ { target }) => {
      const owned = target instanceof Element ? target.closest(".chip[data-request], .square[data-request]") : null;
      if (owned instanceof HTMLElement && owned.dataset.request) this.follow(owned.dataset.request.split(" ")[0]);
    });
    addEventListener("hashchange", () => this.open());
    addEventListener("keydown", (event) => this.key(event));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || target.matches("select")) return;
    const scrolls = target.closest(".wide, .lines");
    if (scrolls && scrolls.scrollWidth > scrolls.clientWidth && !event.shiftKey) return;
    const doings = {
      ArrowLeft: () => (event.shiftKey ? this.goStep(-1) : this.go(this.index - 1)),
      ArrowRight: () => (event.shiftKey ? this.goStep(1) : this.go(this.index + 1)),
      Home: () => this.go(0),
      End: () => this.go(this.recording.length - 1),
      c: () => this.go(this.recording.nextChange(this.index, 1)),
      C: () => this.go(this.recording.nextChange(this.index, -1)),
      " ": () => this.play(),
      Escape: () => this.followed !== null && this.follow(this.followed),
    };
    const go = doings[/** @type {keyof typeof doings} */ (event.key)];
    if (!go || (event.key === " " && target.matches("button, summary"))) return;
    event.preventDefault();
    if (event.key !== " ") this.stop();
    go();
  }
}

/** The recordings of the page, which are compressed. @returns {Promise<{recordings: Recorded[]}>} */
function unpacked() {
  const bytes = Uint8Array.from(atob(part("data").textContent), (sign) => sign.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

unpacked().then(({ recordings }) => new Stepper(recordings));
