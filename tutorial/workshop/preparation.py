"""Whether this machine is ready for a class that has no network: each thing looked at, one after the other.

The last proof is a check of exercises as a learner makes it, in a workspace where they are solved, in a process that
refuses connections. Invariant: nothing here needs the network, and nothing of the learner's is touched; fetching the
demo model is the caller's.
"""

import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from shared.checkpoints.demo import DEMO_MODEL, list_models, verify_demo_model
from shared.errors import InferError
from tutorial.workshop.check import CheckServer, can_be_checked
from tutorial.workshop.exercises import ROOT, Exercise, exercises
from tutorial.workshop.skeleton import filled
from tutorial.workshop.verdicts import Outcome
from tutorial.workshop.workspace import Workspace

_NEEDED = ("torch", "transformers", "pytest", "pytest_timeout", "pytest_benchmark", "hypothesis", "scipy", "matplotlib")
OFFLINE = {"HF_HUB_OFFLINE": "1", "PYTEST_PLUGINS": "tutorial.workshop.offline"}
"""Variables of a process that refuses connections."""


@dataclass(frozen=True)
class Item:
    """One thing that a class needs: whether it is there, and what is there or what to do."""

    name: str
    is_ready: bool
    detail: str


def look(checked: Sequence[Exercise] | None = None) -> Iterator[Item]:
    """Look at everything, an item as soon as it is known.

    Args:
        checked: exercises for the check without a network; by default the first of each phase.
    """
    yield _environment()
    yield _demo_model()
    yield _skeletons()
    yield _offline_check(first_of_each_phase() if checked is None else checked)


def first_of_each_phase() -> list[Exercise]:
    """The first exercise of each phase that this machine can check."""
    firsts: dict[str, Exercise] = {}
    for exercise in filter(can_be_checked, exercises()):
        firsts.setdefault(exercise.phase, exercise)
    return list(firsts.values())


def _environment() -> Item:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return Item("environment", False, f"{sys.prefix} lacks {', '.join(missing)}; run `make env` in a checkout")
    python = ".".join(map(str, sys.version_info[:3]))
    return Item("environment", True, f"Python {python}, PyTorch {version('torch')}, in {sys.prefix}")


def _demo_model() -> Item:
    try:
        verify_demo_model()
    except InferError as error:
        return Item("demo model", False, str(error))
    row = next(row for row in list_models() if row.name == DEMO_MODEL)
    return Item("demo model", True, f"{row.name}, {row.num_bytes / 1e6:.0f} MB, every checksum right, in {row.folder}")


def _skeletons() -> Item:
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            num_files = len(Workspace(Path(folder)).start(exercises()))
    except InferError as error:
        return Item("skeletons", False, str(error))
    phases = ", ".join(dict.fromkeys(exercise.phase for exercise in exercises()))
    took = time.perf_counter() - start
    return Item("skeletons", True, f"{len(exercises())} exercises of {phases} in {num_files} files, {took:.1f} s")


def _offline_check(checked: Sequence[Exercise]) -> Item:
    name = "check"
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            workspace = Path(folder).resolve()
            for file in Workspace(workspace).start(checked):
                source = (ROOT / file.relative_to(workspace)).read_text(encoding="utf-8")
                file.write_text(filled(file.read_text(encoding="utf-8"), source)[0], encoding="utf-8")
            with CheckServer(OFFLINE, forks=False) as server:
                verdicts = server.run(workspace, checked, gaps_raise=True).verdicts
    except InferError as error:
        return Item(name, False, str(error))
    took = time.perf_counter() - start
    for verdict in verdicts:
        if verdict.outcome is not Outcome.PASSED:
            said = f"{verdict.exercise.number}, solved, {verdict.outcome} without a network: {verdict.reason}"
            return Item(name, False, f"{said}; run `make test` to see what is wrong")
    numbers = ", ".join(exercise.number for exercise in checked)
    return Item(name, True, f"{numbers}, solved, pass their tests without a network, {took:.1f} s")
