// A browser does not let a page opened from a file read its neighbours: search then shows titles without excerpts.
if (location.protocol === "file:") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
}
