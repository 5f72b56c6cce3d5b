// One timeline for each trace, on one scale: what a column is, how near, in whose colours. Follows timeline.js in the page.

const MOST_PIXELS = 200000; // of width
for (const trace of traces) timelines.push(new Timeline(trace, document.getElementById("timelines")));

function render() {
  const longest = Math.max(...traces.map(extent));
  const room = Math.min(...timelines.map(({ scroller }) => scroller.clientWidth)) - END;
  const fit = Math.max(room, 40) / longest;
  const least = view.scale === "step" ? 3 : 0;
  const pixels = Math.min(Math.max(fit, least) * view.zoom, MOST_PIXELS / longest);
  for (const timeline of timelines) timeline.render(pixels);
}

document.getElementById("scale").addEventListener("change", (event) => {
  view.scale = event.target.value;
  render();
});
for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => {
    const factor = { in: 1.5, out: 1 / 1.5 }[button.dataset.zoom];
    view.zoom = factor ? Math.max(1, view.zoom * factor) : 1;
    render();
  });
}
offerThemes();
let drawnAt = 0;
new ResizeObserver(() => {
  if (drawnAt === innerWidth) return; // its own drawing changes heights
  drawnAt = innerWidth;
  render();
}).observe(document.body);
render();
