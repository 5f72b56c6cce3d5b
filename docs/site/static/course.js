// A browser does not let a page opened from a file read its neighbours: search then shows titles without excerpts.
if (location.protocol === "file:") {
  // @ts-expect-error Sphinx has defined it
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
}

// A tap opens a picture alone, where it can be enlarged.
addEventListener("DOMContentLoaded", () => {
  for (const image of /** @type {NodeListOf<HTMLImageElement>} */ (document.querySelectorAll("article .picture img"))) {
    const link = Object.assign(document.createElement("a"), { href: image.src });
    image.replaceWith(link);
    link.append(image);
  }
});
