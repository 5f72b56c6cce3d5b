"""What a failure of a file from empty looks like: known mistakes in the file of its page, run through the same tests.

``tutorial/mistakes/from_empty.toml`` holds them, by page; each change replaces a text that stands once in the page's
file, or in one of an earlier page if it is not in that. When tests of a learner's file have failed, each mistake of the
page runs in a fork of the same run of pytest, and one that fails in the same cases with the same first errors is named,
as `infer workshop check` does of an exercise. Introduced in phase 3. Invariant: what the tests say of the learner's
file is not changed by it.
"""

import json
import os
import signal
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from shared.errors import ConfigError
from tutorial.checker.files import page_files, write_files
from tutorial.workshop.exercises import ROOT
from tutorial.workshop.fork_server import IS_SUPPORTED
from tutorial.workshop.from_empty import load_engine
from tutorial.workshop.mistakes import FOLDER, MOST_ALIKE, are_alike
from tutorial.workshop.verdicts import Case

FILE = FOLDER / "from_empty.toml"
MOST_SECONDS = 60
"""Of processor time, that a mistake may take."""


@dataclass(frozen=True)
class PageMistake:
    """One mistake: its page, by phase, the sentence that says what it is, and how it differs from the page's files."""

    page: str
    says: str
    changes: tuple[tuple[str, str], ...]

    def write(self, folder: Path) -> Path:
        """Write the files of the page and of those before it, with the mistake in them; the page's own."""
        page = page_of(self.page)
        write_files(page, folder)
        (name,) = page_files(page)
        own = folder / name
        files = [own, *(file for file in sorted(folder.glob("*.py")) if file != own)]
        for old, new in self.changes:
            counts = {file: file.read_text(encoding="utf-8").count(old) for file in files}
            file = next((file for file in files if counts[file]), own)
            if counts[file] != 1:
                raise ConfigError(
                    f"Mistake {self.says!r} of {page.name}: {old!r} stands {counts[file]} times in {file.name}."
                )
            file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        return own


def page_of(phase: str) -> Path:
    """The page of a phase, 01a, on which a file is built from empty."""
    return ROOT / "tutorial" / f"phase_{phase}_from_empty.md"


def page_mistakes(phase: str) -> tuple[PageMistake, ...]:
    """The known mistakes of a page, in the order of the file."""
    entries = tomllib.loads(FILE.read_text(encoding="utf-8"))["mistakes"]
    found = (PageMistake(e["page"], e["says"], tuple((old, new) for old, new in e["changes"])) for e in entries)
    return tuple(mistake for mistake in found if mistake.page == phase)


class Diagnosis:
    """A plugin of pytest: notes what became of each test, and says at the end what the failures look like."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}
        self.found: list[str] = []

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        error = call.excinfo and call.excinfo.value
        if isinstance(error, pytest.skip.Exception):
            self.cases[item.nodeid] = Case(item.nodeid, "skipped")
        elif error is not None:
            first = next(iter(str(error).splitlines()), "")
            self.cases[item.nodeid] = Case(item.nodeid, "failed", f"{type(error).__name__}: {first}")
        elif call.when == "call":
            self.cases[item.nodeid] = Case(item.nodeid, "passed")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Any:
        yield
        items = [item for item in session.items if item.get_closest_marker("demo") is None]  # it takes too long
        own = [self.cases[item.nodeid] for item in items if item.nodeid in self.cases]
        if not any(case.outcome == "failed" for case in own):
            return
        known = page_mistakes(items[0].path.parent.name.removeprefix("phase_"))
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\nComparing with {len(known)} known mistakes…")
        found = [each for each in known if are_alike(own, self.cases_with(each, items, own))]
        said = list(dict.fromkeys(each.says for each in found))
        self.found = said if len(said) <= MOST_ALIKE else []

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for begin, says in zip(["This looks like:", *["or:"] * len(self.found)], self.found, strict=False):
            terminalreporter.write_line(f"{begin} {says}.", yellow=True, bold=True)

    def cases_with(
        self, mistake: PageMistake, items: Sequence[pytest.Item], own: Sequence[Case] | None = None
    ) -> list[Case]:
        """What the tests say of a mistake, in a fork; up to the first that says another thing than in ``own``."""
        receiving, sending = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(receiving)
                self._run(mistake, items, own)
                with os.fdopen(sending, "w") as out:
                    json.dump([asdict(case) for case in self.cases.values()], out)
            finally:
                os._exit(0)
        os.close(sending)
        with os.fdopen(receiving) as answer:
            text = answer.read()
        os.waitpid(pid, 0)
        return [Case(**case | {"details": ()}) for case in json.loads(text or "[]")]

    def _run(self, mistake: PageMistake, items: Sequence[pytest.Item], own: Sequence[Case] | None) -> None:
        import resource

        import torch

        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)  # a fork lacks the threads of its parent's pool, and would wait for them
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.cases = {}
        with tempfile.TemporaryDirectory() as folder:
            file = mistake.write(Path(folder))
            for name in [each.stem for each in Path(folder).iterdir()]:
                sys.modules.pop(name, None)  # of the learner's own
            engine = load_engine(file)
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.module.Engine = engine  # type: ignore[attr-defined]
                runtestprotocol(item, log=False, nextitem=following)
                if own is not None and not are_alike(own[: len(self.cases)], list(self.cases.values())):
                    return


def diagnose(config: pytest.Config) -> None:
    """Let this run say what failures look like, where a process can fork."""
    if IS_SUPPORTED:
        config.pluginmanager.register(Diagnosis())
