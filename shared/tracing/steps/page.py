"""Writes a recording of steps as a self-contained HTML file. Introduced in phase 4.

Style, scripts and the recording are inline; the page's policy (CSP) allows only these, by their hashes, and no network
request, so the page works from a file. Two recordings of one workload can be shown side by side. Invariant: what the
page shows is replayed from the recording; text from a model or a user is data, never markup.
"""

from html import escape
from pathlib import Path
from typing import Any

from shared.tracing.inline_page import filled, joined, packed

FOLDER = Path(__file__).parent / "page"
SCRIPTS = ("replay.js", "words.js", "source.js", "panels.js", "side.js", "stepper.js")


def write(recording: dict[str, Any], *, other: dict[str, Any] | None = None) -> str:
    """The HTML of a recording; with ``other``, from an earlier phase, a button shows both side by side."""
    shown = [recording] if other is None else [other, recording]
    return filled(
        FOLDER / "steps.html",
        style=joined([FOLDER / "steps.css"]),
        script=joined(FOLDER / name for name in SCRIPTS),
        title=escape(f"Phase {recording['phase']} {recording['title']}, line by line"),
        data=packed({"recordings": shown}),
    )
