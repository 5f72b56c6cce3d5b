// What heads keep of compressed requests after a chosen step: a grid of layers and KV heads for each (phase 9.2).

class KeptTokens {
  static CELL = 14;

  constructor(trace, section) {
    this.trace = trace;
    this.element = make("div", "", section, "kept");
    this.show(trace.focus.step);
  }

  // The last compression of each running request, up to a step.
  last(step) {
    const found = new Map();
    for (const record of this.trace.steps.slice(0, step + 1)) {
      for (const id of [...record.preempted, ...record.finished, ...record.failed]) if (record !== this.trace.steps[step]) found.delete(id);
      for (const [id, ...about] of record.compressed) found.set(id, about);
    }
    return found;
  }

  show(step) {
    this.element.replaceChildren();
    make("b", `Kept tokens after step ${step}, by layer (across) and KV head (down)`, this.element);
    const found = this.last(step);
    if (!found.size) make("p", "no request is compressed", this.element);
    for (const [id, [tokens, counts]] of found) {
      const [least, most] = [Math.min(...counts.flat()), Math.max(...counts.flat())];
      const figure = make("figure", "", this.element);
      const range = least === most ? some(least, "token") : `${least} (pale) to ${most} (dark) tokens`;
      make("figcaption", `request ${id}: of ${tokens}, heads keep ${range}`, figure);
      this.grid(counts, most, figure).setAttribute("aria-label", `request ${id}: ${counts.map((heads) => heads.join(" ")).join(", ")}`);
    }
  }

  grid(counts, most, parent) {
    const size = KeptTokens.CELL;
    const [width, height] = [counts.length * size, counts[0].length * size];
    const picture = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" }, make("div", "", parent, "wide"));
    counts.forEach((heads, layer) =>
      heads.forEach((count, head) => {
        const at = { x: layer * size + 0.5, y: head * size + 0.5, width: size - 1, height: size - 1 };
        const cell = draw("rect", { ...at, "data-kept": count, "fill-opacity": round(count / most) }, picture);
        draw("title", {}, cell).textContent = `layer ${layer}, KV head ${head}: ${some(count, "token")}`;
      }),
    );
    return picture;
  }
}
