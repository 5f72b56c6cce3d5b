// The roofline: rows, bits of a weight and a machine move a point, at which the least time of a step is read off.

{
  const ROWS = 1024;
  const TICKS = [1, 4, 16, 64, 256, 1024];
  const { duration, number, quantity } = Instrument;

  /** The shortest and the longest step on all machines: the ends of an axis that stays. @param {Data} data @param {number} context */
  const timesOf = ({ work, machines }, context) => {
    const times = Object.values(machines).flatMap((/** @type {any} */ machine) => machine.bits.flatMap((/** @type {number} */ bits) => (
      [1, ROWS].map((rows) => Formulas.floor(work, machine, { bits, context }, rows).seconds)
    )));
    return /** @type {[number, number]} */ ([Math.min(...times) / 1.5, Math.max(...times) * 1.5]);
  };

  /** @param {[number, number]} ends */
  const powersOfTen = ([least, most]) => {
    const first = Math.ceil(Math.log10(least));
    return Array.from({ length: Math.floor(Math.log10(most)) - first + 1 }, (_, n) => 10 ** (first + n));
  };

  /** @param {HTMLElement} figure @param {Data} data @param {Values} values */
  const show = (figure, data, values) => {
    const { work } = data;
    const machine = data.machines[values.machine];
    const choice = /** @type {HTMLSelectElement} */ (figure.querySelector("[name=bits]"));
    for (const option of choice.options) option.disabled = !machine.bits.includes(Number(option.value));
    if (choice.selectedOptions[0].disabled) choice.value = String(machine.bits[0]);
    const setting = { bits: Number(choice.value), context: Number(values.context) };
    const at = (/** @type {number} */ rows, more = {}) => Formulas.floor(work, machine, { ...setting, ...more }, rows);
    const [step, turning] = [at(values.rows), Formulas.turningRows(work, machine, setting)];
    const isReading = step.reading >= step.multiplying;

    const times = timesOf(data, setting.context);
    const chart = Instrument.chart(
      figure,
      { x: [1, ROWS], y: times, xName: "rows of a step", yName: "least time of a step" },
      TICKS.map((rows) => [rows, number(rows)]),
      powersOfTen(times).map((seconds) => [seconds, duration(seconds)]),
    );
    const samples = Array.from({ length: 81 }, (_, n) => ROWS ** (n / 80));
    /** @type {(part: (floor: Floor) => number, more?: {}) => [number, number][]} */
    const curve = (part, more) => samples.map((rows) => [rows, part(at(rows, more))]);
    const inside = (/** @type {[number, number][]} */ points) => points.filter(([, seconds]) => seconds >= times[0]);
    for (const bits of machine.bits) {
      chart.line(curve((floor) => floor.reading, { bits }), bits === setting.bits ? "reading" : "other");
    }
    chart.line(inside(curve((floor) => floor.multiplying)), "multiplying");
    chart.line(curve((floor) => floor.seconds), "roof");
    chart.line([[values.rows, times[0]], [values.rows, step.seconds], [1, step.seconds]], "guide");
    chart.dot([values.rows, step.seconds], "point");
    chart.text([values.rows, step.seconds], duration(step.seconds), "read", 10, -12);

    Instrument.tell(
      figure,
      `A step with ${some(values.rows, "row")} takes at least *${duration(step.seconds)}*, or *${duration(step.seconds / values.rows)}* a row. ` +
        `It waits for *${isReading ? "memory" : "arithmetic"}*: reading ${quantity(step.bytes, "B")} takes ` +
        `${duration(step.reading)}, and ${quantity(step.operations, "FLOP")} take ${duration(step.multiplying)}. ` +
        (turning === null
          ? "No number of rows is large enough to wait for arithmetic."
          : `From ${grouped(turning)} rows on, a step waits for arithmetic.`),
    );
    Instrument.table(
      figure,
      ["rows", "reading", "multiplying", "a step", "a row"],
      Array.from({ length: 11 }, (_, n) => 2 ** n).map((rows) => {
        const { reading, multiplying, seconds } = at(rows);
        return [number(rows), ...[reading, multiplying, seconds, seconds / rows].map(duration)];
      }),
    );
  };

  /** A pointer on the picture moves the rows. @param {HTMLElement} figure @param {HTMLFormElement} form */
  const begin = (figure, form) => {
    const slider = /** @type {HTMLInputElement} */ (form.querySelector("[name=rows]"));
    const svg = /** @type {SVGSVGElement} */ (figure.querySelector("[role=img]"));
    const steps = JSON.parse(slider.dataset.values ?? "[]");
    const move = (/** @type {PointerEvent} */ event) => {
      if (!(event.buttons & 1)) return;
      const share = (event.clientX - svg.getBoundingClientRect().left - 58) / (svg.clientWidth - 80);
      const near = (/** @type {number} */ rows) => Math.abs(Math.log(rows) - share * Math.log(ROWS));
      Instrument.turn(slider, steps.indexOf([...steps].sort((a, b) => near(a) - near(b))[0]));
    };
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointermove", move);
  };

  Instrument.start("roofline", show, begin);
}
