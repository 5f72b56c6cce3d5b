"""The way through the site: from the README to chapters, design pages and reports. Introduced in phase 3.

The Markdown files hold no table of contents for Sphinx. It is added to them while they are read, made from the phases
that exist and the files that stand there, so a new phase or page appears by itself. Invariant: every document has
exactly one place.
"""

from collections.abc import Iterable
from typing import Any

from sphinx.application import Sphinx

from course_site import phase_sections, reports
from shared.lessons import Lesson, lessons

HOME, MEASURED = "README", "docs/PERFORMANCE"
REFERENCE = (
    "docs/USING",
    "docs/INSTALL",
    "adapters/README",
    "docs/API",
    "docs/DEPLOY",
    "docs/FROM_VLLM",
    "docs/GLOSSARY",
    "docs/EXPERIMENTS",
    MEASURED,
)
BEGINNING, LAST, TEACHING = "tutorial/start", "tutorial/beyond_one_machine", "tutorial/teachers"
CODE_ENDS = "\n## Run it\n"


def chapter(lesson: Lesson) -> str:
    return f"tutorial/{lesson.folder.name}"


def from_empty(lesson: Lesson) -> str:
    return f"{chapter(lesson)}_from_empty"


def design_page(lesson: Lesson) -> str:
    return f"docs/PHASE_{lesson.number.upper().replace('.', '_')}"


def phase_page(lesson: Lesson, documents: Iterable[str]) -> str | None:
    """The document that teaches a phase: its chapter, or its design page where no chapter is written yet."""
    return next((name for name in (chapter(lesson), design_page(lesson)) if name in documents), None)


def sections(documents: set[str]) -> dict[str, list[str]]:
    """The documents by section, each in order, so that "Next" follows the main line."""
    main, side = ([lesson for lesson in lessons() if lesson.is_side_track == is_side] for is_side in (False, True))
    course = [BEGINNING, *(page for lesson in main if (page := phase_page(lesson, documents))), LAST]
    tracks = [page for lesson in side if (page := phase_page(lesson, documents))]
    empty = [from_empty(lesson) for lesson in main]
    known = (*course, *tracks, *empty)
    others = sorted(name for name in documents if name.startswith("tutorial/") and name not in (*known, TEACHING))
    design = sorted(name for name in documents if name.startswith("docs/") and name not in (*known, *REFERENCE))
    found = {"The course": course, "Side tracks": tracks, "From an empty file": empty}
    found |= {"Teaching": [TEACHING, *others], "The design": design, "Reference": list(REFERENCE)}
    return {title: [name for name in names if name in documents] for title, names in found.items()}


def extend(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add to a document's text what the site shows on its page."""
    documents = set(app.env.found_docs)
    if docname == HOME:
        source[0] += "".join(_toctree(names, title) for title, names in sections(documents).items() if names)
    if docname == MEASURED:
        source[0] += _toctree(sorted(name for name in documents if name.startswith(reports.FOLDER)))
    if docname.startswith(reports.FOLDER):
        source[0] = reports.page(docname, source[0])
    for lesson in lessons():
        if docname == phase_page(lesson, documents):
            # The difference stands where the text has explained it: before the engine is run.
            before, heading, after = source[0].partition(CODE_ENDS)
            source[0] = (
                f"{before}\n\n{phase_sections.changes(lesson)}{heading}{after}\n\n{phase_sections.measured(lesson)}"
            )


def _toctree(names: list[str], title: str = "") -> str:
    caption = f":caption: {title}\n" if title else ""
    return "\n\n```{toctree}\n:hidden:\n" + caption + "".join(map(_entry, names)) + "```\n"


def _entry(name: str) -> str:
    """A line of a table of contents; chapters are called by number and title of their phase."""
    for lesson in lessons():
        if name == chapter(lesson):
            return f"{lesson.number} {lesson.title} </{name}>\n"
        if name == from_empty(lesson):
            return f"{lesson.number} From an empty file </{name}>\n"
    return f"/{name}\n"


class SharedTree:
    """One navigation tree for all pages of source files at one depth; none of them stands in it."""

    def __init__(self) -> None:
        self._trees: dict[int, str] = {}

    def share(self, app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object) -> None:
        """Making the tree for each of hundreds of pages would be most of the time of a build."""
        make, depth = context["toctree"], pagename.count("/")

        def toctree(**options: Any) -> str:
            if depth not in self._trees:
                self._trees[depth] = make(**options)
            return self._trees[depth]

        if pagename.startswith("source/"):
            context["toctree"] = toctree


def register(app: Sphinx) -> None:
    app.connect("source-read", extend)
    app.connect("html-page-context", SharedTree().share, priority=400)  # before the theme asks for the tree
