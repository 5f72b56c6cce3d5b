"""Fenced code whose first line says more than a language: run, quoted, compared, printed. Introduced in phase 3.

    python run, python source=PATH#NAME, diff phases=02..03 target=Engine.forward, output, console

The checker of the chapters keeps their content true; here they get a caption that says where code stands, and a class
for the style sheet. A fence without such words is left to Sphinx. Where the checker is told to skip something printed,
a line or a word ``...``, the reader sees that something is left out.
"""

import re
from collections.abc import Iterable
from typing import ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from course_site.code_lines import in_columns
from course_site.coloured_diff import FRAGMENT, coloured_lines, split_files
from course_site.folds import Line, joined, with_hidden
from course_site.links import source_uri
from course_site.repository import line_of
from shared.lessons import find_lesson

_LEFT_OUT = re.compile(r"(?<!\S)\.\.\.(?!\S)")


class Fence(SphinxDirective):
    """Code of one language."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True
    language: ClassVar[str]

    def run(self) -> list[nodes.Node]:
        words = self.arguments[0].split() if self.arguments else []
        values = dict(word.split("=", 1) for word in words if "=" in word)
        flags = [word for word in words if "=" not in word]
        code = self.code()
        code.source, code.line = self.get_source_info()
        caption = self.caption(values)
        if not caption and not flags and self.language != "output":
            return [code]
        kinds = [self.language, *flags, *values]
        classes = ["literal-block-wrapper", *(f"fence-{kind}" for kind in kinds)]
        block = nodes.container("", literal_block=True, classes=classes)
        if caption:
            block += nodes.caption("", "", *caption)
        block += code
        return [block]

    def code(self) -> nodes.Element:
        text = "\n".join(self.content)
        return nodes.literal_block(text, text, language=self.language, force=True)

    def caption(self, values: dict[str, str]) -> list[nodes.Node]:
        return []


class PythonFence(Fence):
    language = "python"

    def code(self) -> nodes.Element:
        lines = with_hidden(self.content)
        if not any(exercise for _, exercise in lines):
            return super().code()
        coloured = coloured_lines("\n".join(text for text, _ in lines), FRAGMENT)
        body = joined(Line(html, exercise) for html, (_, exercise) in zip(coloured, lines, strict=False))
        html = f'<div class="highlight-python notranslate"><div class="highlight"><pre>{body}</pre></div></div>'
        return nodes.raw("", html, format="html")

    def caption(self, values: dict[str, str]) -> list[nodes.Node]:
        if "file" in values:
            return [nodes.literal(values["file"], values["file"])]
        if "source" not in values:
            return []
        path, _, name = values["source"].partition("#")
        return quoted(self.env, path, name)


class DiffFence(Fence):
    language = "diff"

    def code(self) -> nodes.Element:
        return nodes.raw("", "".join(part.html() for part in split_files(self.content)), format="html")

    def caption(self, values: dict[str, str]) -> list[nodes.Node]:
        older, _, newer = values.get("phases", "").partition("..")
        if not newer:
            return []
        older, newer = find_lesson(older).number, find_lesson(newer).number
        path = f"phases/{find_lesson(newer).folder.name}/engine.py"
        text = nodes.inline("", f"phase {older} → phase {newer}: ")
        return [text, *quoted(self.env, path, values.get("target", ""), with_path="target" not in values)]


class PrintedFence(Fence):
    """What a terminal showed; on a narrow screen its columns stay side by side."""

    lexer: ClassVar[str]

    def code(self) -> nodes.Element:
        text = "\n".join("⋮" if line.strip() == "..." else _LEFT_OUT.sub("…", line) for line in self.content)
        classes = ["drawn"] if sum(map(in_columns, self.content)) > 1 else []
        return nodes.literal_block(text, text, language=self.lexer, force=True, classes=classes)


class OutputFence(PrintedFence):
    language, lexer = "output", "text"


class ConsoleFence(PrintedFence):
    language = lexer = "console"


def quoted(env: BuildEnvironment, path: str, name: str, *, with_path: bool = True) -> list[nodes.Node]:
    """The caption of code that stands elsewhere: a link to the line on which ``name`` begins."""
    uri = source_uri(env, path, line_of(path, name) if name else None)
    texts: Iterable[nodes.Node] = [nodes.literal(text, text) for text in (path if with_path else "", name) if text]
    link = nodes.reference("", "", refuri=uri or "", internal=True)
    for index, text in enumerate(texts):
        link += [nodes.Text(" · "), text] if index else [text]
    return [link]


def register(app: Sphinx) -> None:
    for fence in (PythonFence, DiffFence, OutputFence, ConsoleFence):
        app.add_directive(fence.language, fence)
