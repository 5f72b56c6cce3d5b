// Guesses: how fast a text appears with drafts and without, and where drafts become a loss.

{
  const MOST_REQUESTS = 512;
  const MOST_DRAFTS = 10;
  const GOLDEN = (Math.sqrt(5) - 1) / 2;
  const TICKS = [1, 4, 16, 64, 256];
  const { number } = Instrument;

  /** @typedef {{texts: string[], drafts: number, end: number}} Step Its tokens, all but the last accepted drafts. */

  /** The steps that write a text. The lots of successive steps are spread evenly, as in benchmarks/speculation.py.
   * @param {string[]} text @param {Guesses} guesses @returns {Step[]} */
  const stepsOf = (text, guesses) => {
    const [time, steps] = [Formulas.stepTime(guesses), /** @type {Step[]} */ ([])];
    for (let first = 0, lot = 0.5; first < text.length; ) {
      lot = (lot + GOLDEN) % 1;
      const count = 1 + Formulas.numAccepted(lot, guesses.acceptance, guesses.drafts);
      steps.push({ texts: text.slice(first, first + count), drafts: guesses.drafts, end: time * (steps.length + 1) });
      first += count;
    }
    return steps;
  };

  /** @param {Element} lane @param {Step[]} steps @param {number} time Show the steps that have ended. */
  const show = (lane, steps, time) => {
    const done = steps.filter((step) => step.end <= time + 1e-9);
    const line = /** @type {Element} */ (lane.querySelector("p"));
    line.replaceChildren();
    steps.forEach(({ texts }, index) => {
      make("span", "[", line, index < done.length ? "" : "later").append(make("mark", texts.slice(0, -1).join("")), `${texts.at(-1)}]`);
    });
    const numTokens = done.reduce((sum, step) => sum + step.texts.length, 0);
    const count = /** @type {Element} */ (lane.querySelector(".count"));
    count.textContent = `${some(numTokens, "token")}, ${some(done.length, "step")}`;
  };

  /** @param {HTMLElement} figure @param {Data} data @param {Values} values */
  const showAll = (figure, data, values) => {
    const { drafts, cost, requests } = values;
    const guesses = { work: data.work, machine: data.machine, acceptance: values.acceptance / 100, drafts, cost, requests };
    const [plainLane, lane] = figure.querySelectorAll(".lane");
    show(plainLane, stepsOf(data.text, { ...guesses, drafts: 0 }), values.time);
    show(lane, stepsOf(data.text, guesses), values.time);

    const gain = Formulas.gain(guesses);
    const chart = Instrument.chart(
      figure,
      { x: [1, MOST_REQUESTS], y: [0.08, 14], xName: "requests", yName: "speed-up" },
      TICKS.map((count) => [count, number(count)]),
      [0.1, 0.25, 0.5, 1, 2, 4, 10].map((value) => [value, number(value)]),
    );
    const samples = Array.from({ length: 61 }, (_, n) => MOST_REQUESTS ** (n / 60));
    chart.line([[1, 1], [MOST_REQUESTS, 1]], "guide");
    chart.text([1, 1], "below this line: a loss", "soft", 6, 16);
    chart.line(samples.map((count) => [count, Formulas.gain({ ...guesses, requests: count })]), "roof");
    chart.dot([requests, gain], gain < 1 ? "point loss" : "point");
    chart.text([requests, gain], number(gain), "read", 10, -12);

    const [tokens, time] = [Formulas.expectedTokens(guesses.acceptance, drafts), Formulas.stepTime(guesses)];
    const [best, from] = [Formulas.bestLength(guesses, MOST_DRAFTS), Formulas.losesFrom(guesses, MOST_REQUESTS)];
    const even = Formulas.breaksEvenAt(guesses);
    const verdict = gain < 1 ? "a loss" : gain > 1 ? "a gain" : "neither a gain nor a loss";
    Instrument.tell(
      figure,
      `A step yields ${number(tokens)} tokens on average and takes ${number(time)} plain steps: ` +
        `*${number(gain)} times* as fast, *${verdict}*. ` +
        `The best number of drafts here is ${best}. With ${drafts}, drafts lose ` +
        (from === null ? `with no number of requests up to ${MOST_REQUESTS}` : `from ${some(from, "request")} on`) +
        (even === null ? ", and here with any acceptance." : even === 0 ? ", and here with no acceptance." : `, and here below ${even}\u00a0% accepted.`),
    );
    Instrument.table(
      figure,
      ["drafts", "tokens a step", "time of a step", "speed-up"],
      Array.from({ length: MOST_DRAFTS + 1 }, (_, drafts) => {
        const these = { ...guesses, drafts };
        const found = [Formulas.expectedTokens(these.acceptance, drafts), Formulas.stepTime(these), Formulas.gain(these)];
        return [String(drafts), ...found.map(number)];
      }),
    );
  };

  /** The button plays the time, from the start again once it has ended. @param {HTMLElement} _ @param {HTMLFormElement} form */
  const begin = (_, form) => {
    const slider = /** @type {HTMLInputElement} */ (form.querySelector("[name=time]"));
    const button = /** @type {HTMLButtonElement} */ (form.querySelector("button"));
    let timer = 0;
    const stop = () => {
      clearInterval(timer);
      timer = 0;
      button.textContent = "Play";
    };
    button.addEventListener("click", () => {
      if (timer) return stop();
      if (matchMedia("(prefers-reduced-motion: reduce)").matches) return Instrument.turn(slider, Number(slider.max));
      if (slider.value === slider.max) Instrument.turn(slider, 0);
      button.textContent = "Pause";
      timer = setInterval(() => {
        Instrument.turn(slider, Number(slider.value) + 1);
        if (slider.value === slider.max) stop();
      }, 150);
    });
  };

  Instrument.start("guesses", showAll, begin);
}
