// What the host and the GPU do, as two lanes: the parts of each step, and when the device ran; and a lane for each other
// rank. Loaded before timeline.js.
"use strict";

/** A part's top and height in its lane. They differ in shape and not in colour alone. @type {Record<string, [number, number]>} */
const PARTS = {
  schedule: [0.6, 0.4], batch: [0.3, 0.7], launch: [0, 1], sample: [0.15, 0.7], wait: [0.46, 0.08], commit: [0, 0.5], forward: [0, 1],
};
const ON_CPU = "On a CPU the forward is computed inside “launch”. With a GPU a second lane shows when it runs what was launched.";

/** The keys and names of the lanes that have anything. @param {TraceData} trace */
function activityLanes({ steps }) {
  const ranks = new Set(steps.flatMap((step) => Object.keys(step).filter((key) => key.startsWith("rank "))));
  const lanes = [["host", "host"], ["gpu", "GPU"], ...[...ranks].map((name) => [name, name])];
  return lanes.filter(([key]) => steps.some((step) => step[key]?.length));
}

/** Where a time is on the axis; a time after the step is looked for from there on.
 * @param {TraceData} trace @param {number} step @param {number} ns */
function positionOf({ steps }, step, ns) {
  if (view.scale === "time") return ns;
  let at = step;
  while (at + 1 < steps.length && ns >= steps[at + 1].started_ns) at += 1;
  const { started_ns: began, ended_ns: ended } = steps[at];
  return at + Math.min(1, (ns - began) / Math.max(1, ended - began));
}

/** @param {Timeline} timeline @param {string} key @param {number} y */
function drawActivity({ trace, svg, pixels }, key, y) {
  for (const [part, [top, height]] of Object.entries(PARTS)) {
    const [from, to] = [y + top * LANE, y + (top + height) * LANE].map(round);
    const boxes = trace.steps.flatMap((step, index) => /** @type {SpanData[]} */ (step[key] ?? []).filter(({ name }) => name === part).map((span) => {
      const [left, right] = [span.started_ns, span.ended_ns].map((ns) => round(positionOf(trace, index, ns) * pixels));
      return `M${left} ${from}H${right}V${to}H${left}Z`;
    }));
    if (boxes.length) draw("path", { class: `part ${part}`, "data-lane": key, "data-part": part, d: boxes.join("") }, svg);
  }
}
