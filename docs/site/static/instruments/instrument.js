// What the instruments share: reading their controls, numbers as text, and a chart with logarithmic axes. Loaded after
// the elements of the pages of runs (shared/tracing/page/elements.js).

/** @typedef {Record<string, any>} Data What a page gives an instrument. */
/** @typedef {Record<string, any>} Values What its controls say: sliders numbers, menus text. */
/** @typedef {[number, number]} Point In the units of the axes. */
/** @typedef {{line: (points: Point[], kind: string) => void, dot: (point: Point, kind: string) => void,
 *   text: (point: Point, text: string, kind: string, dx?: number, dy?: number) => void}} Chart */

const Instrument = {
  /** Start all instruments of a kind on the page; `show` is called whenever a control or the width has changed.
   * @param {string} kind @param {(figure: HTMLElement, data: Data, values: Values) => void} show
   * @param {(figure: HTMLElement, form: HTMLFormElement) => void} begin */
  start(kind, show, begin) {
    for (const figure of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(`[data-instrument=${kind}]`))) {
      const form = /** @type {HTMLFormElement} */ (figure.querySelector("form"));
      const data = JSON.parse(/** @type {HTMLElement} */ (figure.querySelector("script")).textContent ?? "");
      const update = () => show(figure, data, Instrument.values(form));
      form.addEventListener("input", update);
      form.addEventListener("submit", (event) => event.preventDefault());
      begin(figure, form);
      new ResizeObserver(update).observe(/** @type {Element} */ (figure.querySelector("[role=img]")));
      update();
    }
  },

  /** Move a slider, as a hand does. @param {HTMLInputElement} slider @param {number} place */
  turn(slider, place) {
    slider.value = String(place);
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  },

  /** @param {HTMLFormElement} form The values of the controls; each slider also says its own. */
  values(form) {
    /** @type {Values} */
    const values = {};
    for (const control of /** @type {NodeListOf<HTMLInputElement>} */ (form.querySelectorAll("input, select"))) {
      const steps = control.dataset.values;
      values[control.name] = steps ? JSON.parse(steps)[Number(control.value)] : control.value;
      if (steps) {
        const text = `${Instrument.number(values[control.name])}${control.dataset.unit}`;
        control.setAttribute("aria-valuetext", text);
        /** @type {HTMLElement} */ (control.nextElementSibling).textContent = text;
      }
    }
    return values;
  },

  /** @param {number} value A whole number as it is, another with three digits; with commas between thousands. */
  number(value) {
    return (Number.isInteger(value) ? value : Number(value.toPrecision(3))).toLocaleString("en", { maximumFractionDigits: 6 });
  },

  /** @param {number} seconds */
  duration(seconds) {
    const [unit, name] = seconds >= 0.9995 ? [1, "s"] : seconds >= 0.0009995 ? [1e3, "ms"] : [1e6, "µs"];
    return `${Instrument.number(seconds * Number(unit))} ${name}`;
  },

  /** @param {number} value @param {string} unit */
  quantity(value, unit) {
    const power = Math.min(4, Math.max(0, Math.floor(Math.log10(value) / 3)));
    return `${Instrument.number(value / 1000 ** power)} ${["", "k", "M", "G", "T"][power]}${unit}`;
  },

  /** The verdict, in which `*words*` are strong. @param {HTMLElement} figure @param {string} text */
  tell(figure, text) {
    const parts = text.split("*").map((part, index) => (index % 2 ? make("strong", part) : part));
    figure.querySelector("[role=status]")?.replaceChildren(...parts);
  },

  /** @param {HTMLElement} figure @param {string[]} head @param {string[][]} rows */
  table(figure, head, rows) {
    const table = make("table");
    for (const texts of [head, ...rows]) {
      const line = make("tr", "", table);
      texts.forEach((text, column) => {
        const scope = texts === head ? "col" : column === 0 ? "row" : "";
        const cell = make(scope ? "th" : "td", text, line);
        if (scope) cell.setAttribute("scope", scope);
      });
    }
    figure.querySelector("details > div")?.replaceChildren(table);
  },

  /** Draw the axes into the emptied picture, and return what draws in their units. @param {HTMLElement} figure
   * @param {{x: [number, number], y: [number, number], xName: string, yName: string}} ends
   * @param {[number, string][]} xTicks @param {[number, string][]} yTicks @returns {Chart} */
  chart(figure, ends, xTicks, yTicks) {
    const svg = /** @type {SVGSVGElement} */ (figure.querySelector("[role=img]"));
    const [width, height] = [svg.clientWidth, svg.clientHeight];
    const box = { left: 58, right: width - 22, top: 26, bottom: height - 42 };
    const along = (/** @type {number} */ value, /** @type {Point} */ [least, most]) => Math.log(value / least) / Math.log(most / least);
    const x = (/** @type {number} */ value) => box.left + along(value, ends.x) * (box.right - box.left);
    const y = (/** @type {number} */ value) => box.bottom - along(value, ends.y) * (box.bottom - box.top);
    const add = (/** @type {string} */ tag, /** @type {Record<string, any>} */ attributes, text = "") => {
      draw(tag, attributes, svg).textContent = text;
    };
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    for (const [value, text] of xTicks) {
      add("path", { class: "grid", d: `M${x(value)} ${box.top}V${box.bottom}` });
      add("text", { x: x(value), y: box.bottom + 18, "text-anchor": "middle" }, text);
    }
    for (const [value, text] of yTicks) {
      add("path", { class: "grid", d: `M${box.left} ${y(value)}H${box.right}` });
      add("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, text);
    }
    add("text", { x: box.right, y: height - 6, "text-anchor": "end" }, ends.xName);
    add("text", { x: 4, y: 14 }, ends.yName);
    return {
      line: (points, kind) => {
        add("path", { class: kind, d: `M${points.map(([a, b]) => `${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("L")}` });
      },
      text: ([a, b], text, kind, dx = 0, dy = 0) => {
        const anchor = x(a) > (box.left + box.right) / 2 ? "end" : "start";
        add("text", { x: x(a) + (anchor === "end" ? -dx : dx), y: y(b) + dy, class: kind, "text-anchor": anchor }, text);
      },
      dot: ([a, b], kind) => add("circle", { cx: x(a), cy: y(b), r: 6, class: kind }),
    };
  },
};
