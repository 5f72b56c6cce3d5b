// Elements, counts in words, and the colours of the reader: what the pages of runs share. A classic script, the first
// of each page.
"use strict";

/** @param {string} tag @param {string} text @param {Element | null} parent @param {string} className @returns {HTMLElement} */
function make(tag, text = "", parent = null, className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  parent?.append(element);
  return element;
}

/** An element of a picture. @param {string} tag @param {Record<string, any>} attributes @param {Element | null} parent */
function draw(tag, attributes, parent = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  parent?.append(element);
  return element;
}

/** An element that the page has. @param {string} id */
const byId = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
/** @param {number} count */
const grouped = (count) => count.toLocaleString("en");
/** @param {number} count @param {string} word */
const some = (count, word) => `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;

/** Let the button change light to dark, and dark to light. */
function offerThemes() {
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const chosen = root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.dataset.theme = chosen === "dark" ? "light" : "dark";
  });
}
