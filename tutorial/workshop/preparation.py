"""Whether this machine is ready for a class that has no network: each thing looked at, one after the other.

The last proof is a check of exercises as a learner makes it, in a workspace where they are solved, in a process that
refuses connections. Invariant: nothing here needs the network, and nothing of the learner's is touched; fetching the
demo model is the caller's.
"""

import importlib.util
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

from shared.checkpoints.demo import DEMO_MODEL, list_models, verify_demo_model
from shared.errors import InferError
from shared.kernels import NO_TRITON
from tutorial.workshop.check import CheckServer, can_be_checked
from tutorial.workshop.exercises import ROOT, Exercise, exercises
from tutorial.workshop.fork_server import IS_SUPPORTED
from tutorial.workshop.overlay import workspace_folder
from tutorial.workshop.skeleton import filled
from tutorial.workshop.verdicts import Outcome
from tutorial.workshop.workspace import Workspace

_LEAST_BYTES = 1 << 30
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
    yield _machine()
    yield _environment()
    yield _demo_model()
    yield _workspace()
    yield _skeletons()
    yield _exercises()
    yield _offline_check(first_of_each_phase() if checked is None else checked)


def first_of_each_phase() -> list[Exercise]:
    """The first exercise of each phase that this machine can check."""
    firsts: dict[str, Exercise] = {}
    for exercise in filter(can_be_checked, exercises()):
        firsts.setdefault(exercise.phase, exercise)
    return list(firsts.values())


def _machine() -> Item:
    available = psutil.virtual_memory().available
    said = (
        f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} cores, {available / 2**30:.1f} GiB available"
    )
    is_enough = available >= _LEAST_BYTES
    return Item("machine", is_enough, said if is_enough else f"{said}; a check needs 1 GiB, so close other programs")


def _workspace() -> Item:
    root = workspace_folder()
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    try:
        num_passed = sum(entry.passed is not None for entry in Workspace(root).progress.values())
    except InferError as error:
        return Item("workspace", False, str(error))
    if not os.access(there, os.W_OK | os.X_OK):
        return Item("workspace", False, f"{there} is not writable; choose another folder with INFER_WORKSPACE=DIR")
    return Item("workspace", True, f"{root} is writable, {num_passed} exercises have passed in it")


def _exercises() -> Item:
    """Which exercises are skipped here, and why; that some are is no fault of the machine."""
    skipped = [exercise.number for exercise in exercises() if not can_be_checked(exercise)]
    num_checked = len(exercises()) - len(skipped)
    said = f"{num_checked} of {len(exercises())} can be checked here"
    if skipped:
        said += f"; {', '.join(skipped)} {NO_TRITON}"
    if not IS_SUPPORTED:
        said += f"; {sys.platform} has no forks of a server, so each check imports PyTorch again"
    return Item("exercises", True, said)


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
