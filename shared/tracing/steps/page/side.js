// One recording on the page: its source, its panels and the texts of its requests, at one moment. Loaded after panels.js.
"use strict";

class Side {
  /** @param {Recording} recording @param {HTMLElement} parent @param {Recording | null} other */
  constructor(recording, parent, other) {
    this.recording = recording;
    this.index = 0;
    /** @type {string[]} panels that wait for a prediction */
    this.hidden = [];
    this.element = make("section", "", parent, "side");
    this.element.setAttribute("aria-label", `Phase ${recording.data.phase}`);
    make("h2", `Phase ${recording.data.phase} · ${recording.data.title}`, this.element);
    const stations = make("nav", "", this.element, "stations");
    stations.setAttribute("aria-label", "Stations");
    const code = this.station("code", "Code", stations, this.element);
    this.source = new SourceView(recording, code, other);
    this.panels = make("div", "", this.element, "panels");
    /** @type {Map<string, {panel: Panel, body: HTMLElement, section: HTMLElement, drawn: string}>} */
    this.made = new Map();
    for (const [name, panel] of panelsOf(recording)) {
      const section = this.station(name, panel.title, stations, name === "variables" ? this.element : this.panels);
      section.classList.toggle("whole", typeof panel.isWide === "function" ? panel.isWide(recording) : panel.isWide === true);
      make("h3", panel.title, section);
      const body = make("div", "", section, "body");
      body.style.setProperty("--rows", String(panel.rows(recording)));
      this.made.set(name, { panel, body, section, drawn: "" });
    }
    this.texts = this.station("texts", "Texts", stations, this.element);
    this.drawTexts();
    this.choose(this.made.has("requests") ? "requests" : "code");
  }

  /** A part of the page that a small screen shows alone. @param {string} name @param {string} title @param {HTMLElement} nav @param {HTMLElement} parent */
  station(name, title, nav, parent) {
    const section = make("section", "", parent, `station ${name}`);
    section.dataset.station = name;
    section.setAttribute("aria-label", title);
    const button = make("button", title.split(",")[0].replace(/ of the.*/, ""), nav);
    button.setAttribute("type", "button");
    button.dataset.station = name;
    button.addEventListener("click", () => {
      this.choose(name);
      section.scrollIntoView({ block: "nearest" });
    });
    return section;
  }

  /** @param {string} name */
  choose(name) {
    this.element.dataset.station = name;
    for (const part of /** @type {NodeListOf<HTMLElement>} */ (this.element.querySelectorAll("[data-station]"))) {
      const isChosen = part.dataset.station === name;
      if (part instanceof HTMLButtonElement) part.setAttribute("aria-pressed", String(isChosen));
      else part.classList.toggle("chosen", isChosen);
    }
    this.source.centre();
  }

  drawTexts() {
    /** @type {Map<string, [HTMLElement, HTMLElement]>} */
    this.written = new Map();
    for (const { id, prompt } of this.recording.data.requests) {
      const box = make("div", "", this.texts, "passage");
      const chip = make("span", id, box, `chip colour-${this.recording.colour(id)}`);
      chip.dataset.request = id;
      const page = make("p", "", make("div", "", box, "page"));
      make("span", prompt, page, "prompt");
      this.written.set(id, [box, make("span", "", page, "answer")]);
    }
  }

  /** @param {number} index @param {string | null} followed */
  show(index, followed) {
    this.index = index;
    this.source.show(index);
    const view = new View(this.recording, index, followed);
    for (const [name, made] of this.made) this.showPanel(name, made, view);
    for (const [id, [box, answer]] of this.written ?? []) {
      const [old, text] = [view.old, view.state].map((state) => state.requests[id]?.text ?? "");
      const kept = text.startsWith(old) ? old.length : 0;
      answer.textContent = text.slice(0, kept);
      if (text.length > kept) make("mark", text.slice(kept), answer);
      box.classList.toggle("followed", id === followed);
      box.dataset.request = id;
    }
    this.element.dataset.following = followed === null ? "no" : "yes";
  }

  /** @param {string} name @param {{panel: Panel, body: HTMLElement, section: HTMLElement}} made @param {View} view */
  showPanel(name, { panel, body, section }, view) {
    const isHidden = this.hidden.includes(name);
    body.replaceChildren();
    section.classList.toggle("predict", isHidden);
    const title = /** @type {HTMLElement} */ (section.firstElementChild);
    title.textContent = panel.title + (isHidden ? "" : (panel.of?.(view.state) ?? ""));
    if (isHidden) make("p", "Predict it first: then open the answer above.", body, "soft");
    else panel.draw(view, body);
    const isChanged = !isHidden && body.querySelector(".changed") !== null;
    section.classList.toggle("touched", isChanged);
    this.element.querySelector(`nav [data-station="${name}"]`)?.classList.toggle("touched", isChanged);
  }
}
