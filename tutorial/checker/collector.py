"""The pages as tests: each page a file, each thing that is checked a test, named by kind and line.

``tutorial/phase_03.md::run:41`` is the run fence on line 41; asked for alone, it runs the run fences before it. With
``--fix`` a test whose page can be put right passes, and the page is written when its last test is done.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shared.checkpoints.demo import DEMO_MODEL, local_model_folder
from shared.kernels import NO_TRITON
from tutorial.checker.chapter import Chapter, Edit, Fence, Problem, apply, read_chapter
from tutorial.checker.citations import check_citations, cited_lines
from tutorial.checker.files import write_files
from tutorial.checker.quotes import check_diff, check_quote
from tutorial.checker.references import CHECKS, INFER, unknown_commands
from tutorial.checker.runs import PageRun
from tutorial.checker.sessions import check_session, misplaced
from tutorial.checker.surroundings import Surroundings

Check = Callable[[], list[Problem]]


class ChapterError(Exception):
    """What is wrong with a page; the tests show its message without a traceback."""


class ChapterFile(pytest.File):
    """A page. Its process, its folder and its edits live from its first test to its last."""

    edits: list[Edit]

    def collect(self) -> Iterator["ChapterItem"]:
        self.chapter = read_chapter(self.path)
        self.edits = []
        tests: list[tuple[str, int, Check, bool]]
        tests = [("syntax", problem.line, partial(list, [problem]), False) for problem in self.chapter.problems]
        for fence in self.chapter.fences:
            if (check := self._check_of(fence)) is not None:
                tests.append((fence.kind, fence.line, check, fence.is_demo))
        for line in cited_lines(self.chapter):
            tests.append(("report", line, partial(check_citations, self.chapter, line, self.root), False))
        for kind, line, check, is_demo in sorted(tests, key=lambda test: test[1]):
            yield self._item(kind, line, check, is_demo)
        for name, references in CHECKS.items():
            yield self._item(name, None, partial(_listed, references, self.chapter, self.root))
        yield self._item("commands", None, self._unknown_commands)

    @property
    def root(self) -> Path:
        """The repository: pytest's root folder."""
        return self.config.rootpath

    def setup(self) -> None:
        self.surroundings = Surroundings(self.root)
        write_files(self.path, self.surroundings.home)
        self.page_run = PageRun(self.chapter, self.surroundings)

    def teardown(self) -> None:
        self.page_run.close()
        self.surroundings.close()
        edits, self.edits = self.edits, []
        if not edits:
            return
        if self.path.read_bytes().decode() != self.chapter.text:
            pytest.fail(f"{self.nodeid} was edited while it was checked; nothing is written, run this again", False)
        self.path.write_bytes(apply(self.chapter.text, edits).encode())
        fixed = self.config.stash.setdefault(FIXED, [])
        fixed.append(f"{self.nodeid}: lines {', '.join(str(edit.first) for edit in sorted(edits, key=_first))}")

    def _check_of(self, fence: Fence) -> Check | None:
        """What tests a fence; None where nothing is to be tested."""
        if fence.kind == "console" and "norun" in fence.attributes:
            return lambda: misplaced(fence)
        checks: dict[str, Check] = {
            "run": lambda: self.page_run.check(fence),
            "source": lambda: check_quote(fence, self.root),
            "diff": lambda: check_diff(fence),
            "console": lambda: check_session(fence, self.surroundings),
        }
        return checks.get(fence.kind)

    def _unknown_commands(self) -> list[Problem]:
        return list(unknown_commands(self.chapter, self.root, self.config.stash[INFER]()))

    def _item(self, kind: str, line: int | None, check: Check, is_demo: bool = False) -> "ChapterItem":
        name = kind if line is None else f"{kind}:{line}"
        item = ChapterItem.from_parent(self, name=name)
        item.kind, item.line, item.check = kind, line, check
        if is_demo:
            item.add_marker("demo")
        return item


class ChapterItem(pytest.Item):
    """One thing that is checked on a page."""

    parent: ChapterFile
    kind: str
    check: Check
    line: int | None

    def setup(self) -> None:
        if self.get_closest_marker("demo") and local_model_folder(DEMO_MODEL) is None:
            pytest.skip(f"the demo model is not fetched; run `infer model pull {DEMO_MODEL}` once")
        if NO_TRITON and self.kind == "run" and self.parent.chapter.runs_kernels:
            pytest.skip(NO_TRITON)

    def runtest(self) -> None:
        problems = self.check()
        if self.config.getoption("fix"):
            self.parent.edits += [problem.edit for problem in problems if problem.edit is not None]
            problems = [problem for problem in problems if problem.edit is None]
        if not problems:
            return
        page = self.parent.nodeid
        told = [f"{page}:{problem.line}: {problem.message}" for problem in problems]
        if any(problem.edit for problem in problems):
            told.append(f"To write what was found into the page: pytest {page} --fix")
        raise ChapterError("\n".join(told))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, ChapterError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None if self.line is None else self.line - 1, self.name


FIXED = pytest.StashKey[list[str]]()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> ChapterFile | None:
    """A hook: every Markdown page is a chapter."""
    return ChapterFile.from_parent(parent, path=file_path) if file_path.suffix == ".md" else None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A hook: which pages ``--fix`` has written."""
    for line in config.stash.get(FIXED, []):
        terminalreporter.write_line(f"fixed {line}")


def _first(edit: Edit) -> int:
    return edit.first


def _listed(references: Callable[[Chapter, Path], Iterator[Problem]], chapter: Chapter, root: Path) -> list[Problem]:
    return list(references(chapter, root))
