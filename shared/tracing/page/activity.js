// What the host and the GPU do, as two lanes: the parts of each step, and when the device ran; and a lane for each other
// rank. Loaded after timeline.js.

// The place of a part in its lane: where it begins from above, and its height. They differ in shape and not in colour alone.
const PARTS = {
  schedule: [0.6, 0.4],
  batch: [0.3, 0.7],
  launch: [0, 1],
  sample: [0.15, 0.7],
  wait: [0.46, 0.08],
  commit: [0, 0.5],
  forward: [0, 1],
};
const ON_CPU = "On a CPU the forward is computed inside “launch”. With a GPU a second lane shows when it runs what was launched.";

const activityLanes = (trace) => {
  const ranks = [...new Set(trace.steps.flatMap((step) => Object.keys(step).filter((key) => key.startsWith("rank "))))];
  const lanes = [["host", "host"], ["gpu", "GPU"], ...ranks.map((name) => [name, name])];
  return lanes.filter(([key]) => trace.steps.some((step) => step[key]?.length));
};

// Where a time stands on the axis; a time after the step is looked for from there on.
function placeOf(trace, step, ns) {
  if (view.scale === "time") return ns;
  let at = step;
  while (at + 1 < trace.steps.length && ns >= trace.steps[at + 1].started_ns) at += 1;
  const { started_ns: began, ended_ns: ended } = trace.steps[at];
  return at + Math.min(1, (ns - began) / Math.max(1, ended - began));
}

function drawActivity({ trace, svg, pixels }, key, y) {
  for (const [part, [top, height]] of Object.entries(PARTS)) {
    const [from, to] = [y + top * LANE, y + (top + height) * LANE].map(round);
    const spans = trace.steps.flatMap((step, index) => (step[key] ?? []).filter(({ name }) => name === part).map((span) => [index, span]));
    const boxes = spans.map(([index, { started_ns: began, ended_ns: ended }]) => {
      const [left, right] = [began, ended].map((ns) => round(placeOf(trace, index, ns) * pixels));
      return `M${left} ${from}H${right}V${to}H${left}Z`;
    });
    if (boxes.length) draw("path", { class: `part ${part}`, "data-lane": key, "data-part": part, d: boxes.join("") }, svg);
  }
}
