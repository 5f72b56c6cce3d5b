"""A page of Markdown as the checker sees it: its fences, with their lines and attributes.

Invariant: parsing never fails and never changes a byte; what cannot be understood is a `Problem` with its line. Lines
count from 1, as editors show them. A fence belongs to the page however deep in a list it is; inside a block quote
it would be shown to the reader and not be checked, so it is refused there.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_OPEN = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`]*)")
_QUOTED_FENCE = re.compile(r"[ \t]*>[ \t>]*(?:`{3,}|~{3,})")
PLAIN_LANGUAGES = ("text", "toml", "json", "bash")
_WITH_VALUE = frozenset({"source", "phases", "target", "file"})
KNOWN_FENCES = (
    "`python run [demo] [file=NAME.py]`, `output`, `python source=PATH#NAME [nodoc]`, "
    "`diff phases=A..B [target=CLASS.METHOD]`, `console [demo|norun]`, "
    f"{', '.join(f'`{language}`' for language in PLAIN_LANGUAGES)}"
)


@dataclass(frozen=True)
class _Form:
    """How a kind of fence is written: its language, the attribute that makes it this kind, and what may follow."""

    kind: str
    language: str
    mark: str | None = None
    more: frozenset[str] = frozenset()


_FORMS = (
    _Form("run", "python", "run", frozenset({"demo", "file"})),
    _Form("source", "python", "source", frozenset({"nodoc"})),
    _Form("diff", "diff", "phases", frozenset({"target"})),
    _Form("console", "console", None, frozenset({"demo", "norun"})),
    _Form("output", "output"),
    *(_Form("plain", language) for language in PLAIN_LANGUAGES),
)


@dataclass(frozen=True)
class Edit:
    """New lines in the place of the page's lines ``first`` to ``last``; ``last`` is ``first - 1`` to insert."""

    first: int
    last: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """What is wrong on a line, and the edit that puts it right where there is one."""

    line: int
    message: str
    edit: Edit | None = None


@dataclass(frozen=True)
class Fence:
    """A fenced block: ``line`` is where it opens, ``last`` where it closes; ``body`` lies between, without indent.

    ``kind`` is that of a form above, or ``wrong``; each wrong fence has its problem.
    """

    kind: str
    line: int
    last: int
    indent: str
    ticks: str
    attributes: Mapping[str, str]
    body: tuple[str, ...]

    @property
    def is_demo(self) -> bool:
        return "demo" in self.attributes

    def replaced(self, lines: list[str], first: int = 0, last: int | None = None) -> Edit:
        """An edit that puts ``lines`` in the place of the body's lines ``[first, last)``, counted from 0."""
        last = len(self.body) if last is None else last
        indented = tuple(f"{self.indent}{line}".rstrip() if line.strip() else "" for line in lines)
        return Edit(self.line + 1 + first, self.line + last, indented)

    def can_hold(self, lines: list[str]) -> bool:
        """Whether none of the lines would close the fence."""
        return not any(_closes(line, self.ticks) for line in lines)


@dataclass(frozen=True)
class Chapter:
    """A parsed page. ``outputs`` maps the line of a run fence to the output fence after it."""

    path: Path
    text: str
    fences: tuple[Fence, ...]
    outputs: Mapping[int, Fence]
    problems: tuple[Problem, ...]

    @property
    def lines(self) -> list[str]:
        return page_lines(self.text)

    @property
    def runs_kernels(self) -> bool:
        """Whether its run fences, which share a process, turn Triton's interpreter on."""
        return any("TRITON_INTERPRET" in line for fence in self.fences if fence.kind == "run" for line in fence.body)

    @property
    def prose(self) -> list[str]:
        """The page's lines, those of fences blank."""
        lines = self.lines
        for fence in self.fences:
            lines[fence.line - 1 : fence.last] = [""] * (fence.last - fence.line + 1)
        return lines


def read_chapter(path: Path) -> Chapter:
    """The page at ``path``, its line ends as they are."""
    return parse(path.read_bytes().decode(), path)


def parse(text: str, path: Path = Path("page.md")) -> Chapter:
    """Find the fences of a page."""
    fences: list[Fence] = []
    problems: list[Problem] = []
    lines = page_lines(text)
    index = 0
    while index < len(lines):
        opening = _OPEN.fullmatch(lines[index])
        if opening is None:
            if _QUOTED_FENCE.match(lines[index]):
                problems.append(Problem(index + 1, "a fence inside a block quote is not checked; take it out of there"))
            index += 1
            continue
        indent, ticks, info = opening.groups()
        end = next((i for i in range(index + 1, len(lines)) if _closes(lines[i], ticks)), len(lines))
        kind, attributes = "wrong", dict[str, str]()
        try:
            kind, attributes = _classify(info.split())
        except ValueError as error:
            problems.append(Problem(index + 1, f"{error}; known are {KNOWN_FENCES}"))
        if end == len(lines):
            kind = "wrong"
            problems.append(Problem(index + 1, f"this fence is never closed; end it with a line {ticks}"))
        body = tuple(_without(indent, line) for line in lines[index + 1 : end])
        fences.append(Fence(kind, index + 1, min(end + 1, len(lines)), indent, ticks, attributes, body))
        index = end + 1
    outputs = _pair_outputs(fences, lines, problems)
    return Chapter(path, text, tuple(fences), outputs, tuple(sorted(problems, key=lambda problem: problem.line)))


def apply(text: str, edits: list[Edit]) -> str:
    """The page with the edits made; they may not overlap. What no edit names stays the same to the byte."""
    lines = text.split("\n")
    carriage = "\r" if "\r\n" in text else ""
    for edit in sorted(edits, key=lambda edit: edit.first, reverse=True):
        lines[edit.first - 1 : edit.last] = [line + carriage for line in edit.lines]
    return "\n".join(lines)


def page_lines(text: str) -> list[str]:
    """The lines of a page without their ends; a form feed or another Unicode separator ends no line."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def _closes(line: str, ticks: str) -> bool:
    stripped = line.strip(" \t")
    return len(stripped) >= len(ticks) and set(stripped) == {ticks[0]}


def _without(indent: str, line: str) -> str:
    """The line without the fence's indentation, or as much of it as the line has."""
    blank = len(line) - len(line.lstrip(" \t"))
    return line[min(blank, len(indent)) :]


def _classify(words: list[str]) -> tuple[str, dict[str, str]]:
    """Kind and attributes of a fence with this info string; ValueError says what is wrong with it."""
    if not words:
        raise ValueError("a fence needs a language")
    language, *rest = words
    attributes = {name: value for name, _, value in (word.partition("=") for word in rest)}
    forms = [form for form in _FORMS if form.language == language]
    if not forms:
        raise ValueError(f"there is no fence `{language}`")
    if len(attributes) != len(rest):
        raise ValueError(f"an attribute of `{' '.join(words)}` stands twice")
    fitting = [form for form in forms if form.mark is None or form.mark in attributes]
    if len(fitting) != 1:
        marks = " or ".join(f"`{form.mark}`" for form in forms)
        raise ValueError(f"a `{language}` fence needs {marks}, and only one of them, so that it cannot go stale")
    for name, value in attributes.items():
        if name != fitting[0].mark and name not in fitting[0].more:
            raise ValueError(f"`{words[0]}` has no attribute `{name}` here")
        if bool(value) != (name in _WITH_VALUE):
            raise ValueError(f"the attribute `{name}` {'needs a' if name in _WITH_VALUE else 'takes no'} value")
    if {"demo", "norun"} <= attributes.keys():
        raise ValueError("a console that is not run needs no demo model; leave out `demo` or `norun`")
    return fitting[0].kind, attributes


def _pair_outputs(fences: list[Fence], lines: list[str], problems: list[Problem]) -> dict[int, Fence]:
    outputs: dict[int, Fence] = {}
    for before, fence in zip([None, *fences], fences, strict=False):
        if fence.kind != "output":
            continue
        between = lines[before.last : fence.line - 1] if before else []
        if before is not None and before.kind == "run" and not any(line.strip() for line in between):
            outputs[before.line] = fence
        else:
            problems.append(Problem(fence.line, "an output fence must stand directly after a `python run` fence"))
    return outputs
