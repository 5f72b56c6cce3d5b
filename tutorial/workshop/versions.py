"""Versions of an exercise's function, each tested in a fork of one run of pytest, which has collected the tests once.

Starting pytest, importing the course and collecting the tests take longer than most tests of an exercise. A run that is
to try many versions therefore forks after collecting, once for each version. The fork puts the version's code in the
place of the reference's, keeps the tests of that exercise and goes on as any run does, with a record of its own.
Loaded with ``-p tutorial.workshop.versions``; ``INFER_WORKSHOP_VERSIONS`` names a file of JSON with the fields of each
`Version`.
Invariants: the run that forks executes no test, and a version differs from the reference inside one function alone.
"""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest

VERSIONS = "INFER_WORKSHOP_VERSIONS"
AT_ONCE = 2


@dataclass(frozen=True)
class Version:
    """One version: the file of its module, where its results are recorded, its function, the tests of its exercise."""

    file: str
    record: str
    module: str
    target: str
    tests: Sequence[str]


def code_of(text: str, target: str, file: str = "") -> CodeType | None:
    """The code of a function or method, by its dotted name, in a module's text; None if it is not there."""
    code = compile(text, file, "exec", dont_inherit=True)
    parts = target.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        inner = [each for each in code.co_consts if isinstance(each, CodeType) and each.co_qualname == name]
        if len(inner) != 1:
            return None
        code = inner[0]
    return code


def can_replace(text: str, reference: str, target: str) -> bool:
    """Whether a function of the reference can be given the code that it has in ``text``."""
    code, other = code_of(text, target), code_of(reference, target)
    return code is not None and other is not None and code.co_freevars == other.co_freevars


class Versions:
    """Forks for each version when the tests have been collected."""

    def __init__(self, versions: Sequence[Version]) -> None:
        self.versions = versions

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """True, which ends the loop, in the run itself; None, with which the tests run, in a fork and after an error of
        the collection."""
        if session.testsfailed:
            return None
        running: set[int] = set()
        for version in self.versions:
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                _become(version, session)
                return None
            running.add(pid)
            while len(running) >= AT_ONCE:
                running.discard(os.wait()[0])
        while running:
            running.discard(os.wait()[0])
        return True


def _become(version: Version, session: pytest.Session) -> None:
    """Let this fork of the run test one version."""
    from tutorial.workshop.recorder import Recorder

    module = importlib.import_module(version.module)
    found = inspect.getattr_static(module, version.target.partition(".")[0])
    for name in version.target.split(".")[1:]:
        found = inspect.getattr_static(found, name)
    function = getattr(found, "fget", None) or getattr(found, "__func__", found)
    while hasattr(function, "fn"):  # a kernel; Triton reads its text when it first runs, where its code says it stands
        function = function.fn
    code = code_of(Path(version.file).read_text(encoding="utf-8"), version.target, version.file)
    assert isinstance(function, FunctionType)
    assert code is not None
    function.__code__ = code
    for plugin in session.config.pluginmanager.get_plugins():
        if isinstance(plugin, Recorder):
            plugin.path, plugin.process = Path(version.record), os.getpid()
    named = tuple(f"{test}{sign}" for test in version.tests for sign in ("[", "::"))
    session.items[:] = [i for i in session.items if i.nodeid in version.tests or i.nodeid.startswith(named)]
    session.testscollected = len(session.items)


def pytest_configure(config: pytest.Config) -> None:
    if VERSIONS in os.environ:
        versions = json.loads(Path(os.environ.pop(VERSIONS)).read_text(encoding="utf-8"))
        config.pluginmanager.register(Versions([Version(**version) for version in versions]))
