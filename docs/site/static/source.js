// Pages of source files: the theme that the reader chose, its switch, and an address for each line number.
const THEMES = ["auto", "light", "dark"];
document.body.dataset.theme = localStorage.getItem("theme") || "auto";

addEventListener("DOMContentLoaded", () => {
  const button = Object.assign(document.createElement("button"), { className: "theme-toggle", textContent: "◐" });
  button.setAttribute("aria-label", "Light, dark or automatic colours");
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.body.dataset.theme ?? "auto") + 1) % THEMES.length];
    document.body.dataset.theme = next;
    localStorage.setItem("theme", next);
  });
  document.querySelector("header")?.append(button);
  const code = /** @type {HTMLElement | null} */ (document.querySelector(".source pre"));
  code?.addEventListener("click", (event) => {
    const line = /** @type {Element} */ (event.target).closest("dd");
    if (line && event.clientX < line.getBoundingClientRect().left + parseFloat(getComputedStyle(line, "::after").width)) {
      location.hash = line.id;
    }
  });
});
