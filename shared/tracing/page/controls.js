// One timeline for each trace, on one scale: what a column is, how near, in whose colours. Loaded last.
"use strict";

const MOST_PIXELS = 200000; // of width
for (const trace of traces) timelines.push(new Timeline(trace, byId("timelines")));

function render() {
  const longest = Math.max(...traces.map(extent));
  const room = Math.min(...timelines.map(({ scroller }) => scroller.clientWidth)) - END;
  const fit = Math.max(Math.max(room, 40) / longest, view.scale === "step" ? 3 : 0);
  for (const timeline of timelines) timeline.render(Math.min(fit * view.zoom, MOST_PIXELS / longest));
}

byId("scale").addEventListener("change", ({ target }) => {
  view.scale = /** @type {HTMLInputElement} */ (target).value;
  render();
});
for (const button of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-zoom]"))) {
  button.addEventListener("click", () => {
    const factor = { in: 1.5, out: 1 / 1.5 }[button.dataset.zoom ?? ""];
    view.zoom = factor ? Math.max(1, view.zoom * factor) : 1;
    render();
  });
}
offerThemes();
let drawnAt = 0;
new ResizeObserver(() => {
  if (drawnAt !== innerWidth) render(); // its own drawing changes heights
  drawnAt = innerWidth;
}).observe(document.body);
render();
