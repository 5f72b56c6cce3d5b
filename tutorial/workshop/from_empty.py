"""A learner's own file in the place of a phase's engine: ``pytest phases/phase_01a --from-empty my_layer.py``.

The pages ``tutorial/phase_*_from_empty.md`` build such files. A file defines a class ``Engine``; the tests marked
``from_empty`` then run on that class, and all others are left out. Introduced in phase 3. Invariant: the phase itself
passes these tests.
"""

import importlib.util
import sys
import traceback
from pathlib import Path

import pytest

MARKER = "from_empty"


def load_engine(path: Path) -> type:
    """The class ``Engine`` of a file, which may import the files beside it; `pytest.UsageError` if there is none."""
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise pytest.UsageError(f"--from-empty names {path}, which is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the learner's code raises
        raise pytest.UsageError(f"{path.name} cannot be imported: {_described(error, path)}") from error
    engine = getattr(module, "Engine", None)
    if not isinstance(engine, type):
        raise pytest.UsageError(f"{path.name} defines no class Engine, which is what the tests run.")
    return engine


def select(items: list[pytest.Item], engine: type) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests for files of a learner, now running ``engine``, and those that are left out."""
    chosen = [item for item in items if _is_meant(item)]
    for item in chosen:
        item.module.Engine = engine  # type: ignore[attr-defined]
    return chosen, [item for item in items if item not in chosen]


def _is_meant(item: pytest.Item) -> bool:
    """Whether a test is marked, and for its parameters if the marker names some."""
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return False
    return not marker.args or item.callspec.id in marker.args  # type: ignore[attr-defined]


def _described(error: Exception, path: Path) -> str:
    """The error in one line, with the line of the file on which it happened."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")
