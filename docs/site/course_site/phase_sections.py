"""What a phase's text is given: its difference from the phase before, and what was measured. Introduced in phase 3.

The difference is that of ``infer diff``, made by the same code; the charts are those of the reports that measured this
phase. Invariant: both are made while the site is built, from the phase folders and the reports that stand there.
"""

from html import escape

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from course_site import recordings
from course_site.coloured_diff import FileDiff, split_files
from course_site.links import source_uri
from course_site.reports import reports
from course_site.repository import ROOT, page_name, source_files, summary
from shared.lesson_source import added_modules, diff_lines, first_line
from shared.lessons import Lesson, find_lesson


def changes(lesson: Lesson) -> str:
    """The section on what the phase changed."""
    heading = f"What changed since phase {lesson.previous}" if lesson.previous else "The code of this phase"
    return f"## {heading}\n\n{recordings.links(lesson)}\n```{{phase-changes}} {lesson.number}\n```\n"


def measured(lesson: Lesson) -> str:
    """The charts of the reports that the phase's chapter or design page cites, then the reports without one."""
    number = lesson.number.upper().replace(".", "_")
    pages = [ROOT / f"tutorial/{lesson.folder.name}.md", ROOT / f"docs/PHASE_{number}.md"]
    cited = "".join(page.read_text(encoding="utf-8") for page in pages if page.exists())
    found = [report for report in reports() if f"{report.docname.rpartition('/')[2]}." in cited]
    charts = [f"{report.image()}\n\n{report.link()}\n" for report in found if report.chart]
    others = "".join(f"- {report.link()}\n" for report in found if not report.chart)
    if charts and others:
        others = f"In figures alone:\n\n{others}"
    return "## Measured\n\n" + "\n".join([*charts, others]) if found else ""


class PhaseChanges(SphinxDirective):
    """The coloured difference of a phase from the one before, and the modules that it adds."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        lesson = find_lesson(self.arguments[0])
        if lesson.previous is None:
            return [*self._files(lesson), *self._modules(lesson, list(lesson.adds))]
        older = find_lesson(lesson.previous)
        differences = [
            nodes.raw("", _file_html(self.env, difference, is_first=index == 0), format="html")
            for index, difference in enumerate(split_files(diff_lines(older, lesson)))
        ]
        command = f"infer diff {older.number} {lesson.number}"
        told = nodes.paragraph("", "", nodes.literal("", command), nodes.Text(" shows the same in a terminal."))
        return [told, *differences, *self._modules(lesson, added_modules(older, lesson))]

    def _files(self, lesson: Lesson) -> list[nodes.Node]:
        folder = f"phases/{lesson.folder.name}"
        items = nodes.bullet_list()
        for path in source_files():
            if str(path.parent) == folder:
                items += _item(str(path), summary(path))
        return [nodes.paragraph("", "The folder of the phase:"), items]

    def _modules(self, lesson: Lesson, modules: list[str]) -> list[nodes.Node]:
        if not modules:
            return [nodes.paragraph("", f"Phase {lesson.number} adds no shared module.")]
        items = nodes.bullet_list()
        for module in modules:
            items += _item(module, first_line(module))
        count = "The shared module" if len(modules) == 1 else f"The {len(modules)} shared modules"
        return [nodes.paragraph("", f"{count} that phase {lesson.number} adds:"), items]


def _item(name: str, told: str) -> nodes.list_item:
    """A name, which becomes a link, and what its docstring says of it."""
    text = told.replace("``", "")
    words = nodes.Text(f": {text}" if text else "")
    return nodes.list_item("", nodes.paragraph("", "", nodes.literal("", name), words))


def _file_html(env: BuildEnvironment, difference: FileDiff, *, is_first: bool) -> str:
    names = dict.fromkeys(path.rpartition("/")[2] for path in (difference.older, difference.newer))
    name = escape(" → ".join(names))  # two where a part replaces another
    uri = source_uri(env, difference.newer) if page_name(difference.newer) else None
    link = f'<a class="whole-file" href="{escape(uri)}">the whole file</a>' if uri else ""
    counts = f"<ins>+{difference.num_added}</ins> <del>−{difference.num_removed}</del>"
    head = f'<summary><code>{name}</code> <span class="counts">{counts}</span></summary>'
    return f'<details class="file-diff"{" open" if is_first else ""}>{head}{link}{difference.html()}</details>'


def register(app: Sphinx) -> None:
    app.add_directive("phase-changes", PhaseChanges)
