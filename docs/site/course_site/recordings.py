"""Recordings of steps as pages, and still pictures that open them. Introduced in phase 4.

A chapter links to a moment of a recording, ``[words](recordings/phase_07.json#step=7&line=schedule)``. On the site the
link leads to the page that replays the recording, ``steps/phase_07.html``; a link that is a paragraph of its own
becomes a picture of the moment, with its words as the caption. ``phase_07_by_06_1.json`` is the same workload in the
phase before: a link to it leads to the same page, with both phases side by side. Invariant: a recording of sources
that have changed since, and a link to a moment that does not exist, is a warning, which ends `make docs`.
"""

import json
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

from course_site.repository import ROOT, relative
from course_site.step_picture import picture
from shared.lessons import Lesson
from shared.tracing.steps.moments import named
from shared.tracing.steps.page import write
from shared.tracing.steps.shown import current_sources

FOLDER = ROOT / "tutorial/recordings"
PAGES = "steps"
_LINK = re.compile(r"\]\((?:[^()\s]*/)?recordings/(phase_\w+)\.json(#[^()\s]*)?\)")
_TARGET = re.compile(rf"/{PAGES}/(\w+)\.html(?:#(.*))?")
_LOGGER = logging.getLogger(__name__)


@cache
def recording(name: str) -> dict[str, Any]:
    """A recording by its file's name without suffix, with the line numbers of today."""
    stored = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    current = current_sources(stored)
    if current is None:
        _LOGGER.warning("tutorial/recordings/%s.json shows functions that have changed: make recordings", name)
    return stored if current is None else current


def names() -> list[str]:
    """The recordings that there are."""
    return sorted(path.stem for path in FOLDER.glob("phase_*.json"))


def pair_of(name: str) -> str | None:
    """The recording that a page has beside that of its phase."""
    return next((each for each in names() if each.startswith(f"{name}_by_")), None)


def links(lesson: Lesson) -> str:
    """A sentence that leads to the pages of a phase, if it has any."""
    name = lesson.folder.name
    found = [f"[Step through a run of this phase](/{PAGES}/{name}.html)"] if name in names() else []
    if found and pair_of(name):
        found.append(f"[through this phase and phase {lesson.previous} side by side](/{PAGES}/{pair_of(name)}.html)")
    return f"{', or '.join(found)}, line by line.\n" if found else ""


class Moments(SphinxTransform):
    """Links to moments: to their page, or a picture of them."""

    default_priority = 395  # before links to files

    def apply(self, **kwargs: object) -> None:
        for node in list(self.document.findall(addnodes.pending_xref)):
            if match := _TARGET.fullmatch(node.get("reftarget", "")):
                self._lead(node, match[1], match[2] or "")

    def _lead(self, node: nodes.Element, name: str, address: str) -> None:
        if name not in names():
            _LOGGER.warning("there is no recording tutorial/recordings/%s.json", name, location=node)
            return
        name, _, other = name.partition("_by_")
        shown = recording(name)
        event = named(shown, address)
        if event is None:
            _LOGGER.warning("no moment %r in tutorial/recordings/%s.json", address, name, location=node)
            return
        uri = relative(self.env.current_document.docname, f"{PAGES}/{name}")
        values = [quote(address, safe="=&"), f"beside={other.replace('_', '.')}" if other else ""]
        uri += f"#{'&'.join(filter(None, values))}".rstrip("#")
        parent = node.parent
        if isinstance(parent, nodes.paragraph) and len(parent) == 1 and not isinstance(parent.parent, nodes.list_item):
            text = escape(node.astext())
            link = f'<a href="{escape(uri)}">{picture(shown, event)}</a>'
            words = f'{text} <a href="{escape(uri)}">Step through this run.</a>'
            html = f'<figure class="steps">{link}<figcaption>{words}</figcaption></figure>'
            parent.replace_self(nodes.raw("", html, format="html"))
        else:
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


def lead(app: Sphinx, docname: str, source: list[str]) -> None:
    """Name the pages in place of the recordings."""
    source[0] = _LINK.sub(lambda match: f"](/{PAGES}/{match[1]}.html{match[2] or ''})", source[0])


def write_pages(app: Sphinx, exception: Exception | None) -> None:
    if exception is None:
        folder = Path(app.outdir, PAGES)
        folder.mkdir(exist_ok=True)
        for name in names():
            if "_by_" not in name:
                pair = pair_of(name)
                html = write(recording(name), other=recording(pair) if pair else None)
                (folder / f"{name}.html").write_text(html, encoding="utf-8")


def register(app: Sphinx) -> None:
    app.connect("source-read", lead)
    app.add_transform(Moments)
    app.connect("build-finished", write_pages)
