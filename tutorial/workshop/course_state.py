"""Digests of what a result depends on besides a learner's lines: the course, and what is installed.

Results that are kept (what known mistakes do, verdicts of checks) hold as long as these stay the same, and a server
that has imported packages serves as long as they do. Introduced in phase 1b. Invariant: a change of a file that a test
of an exercise can load changes one of the two.
"""

import hashlib
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path

from tutorial.workshop.exercises import ROOT

_FOLDERS = ("shared", "phases", "tests", "benchmarks", "tutorial")
_SUFFIXES = (".py", ".toml", ".jinja")
_VARIABLES = ("INFER_TEST_MODELS", "INFER_TEST_TOKENIZERS")  # of `conftest.py`


def state_of_the_course() -> str:
    """A digest of what decides what a test says of an exercise: the sources, and which models the tests run on."""
    what = (_state_of_the_sources(), *(os.environ.get(name, "") for name in _VARIABLES))
    return hashlib.sha256(repr(what).encode()).hexdigest()


@cache
def _state_of_the_sources() -> str:
    digest = hashlib.sha256()
    for file in _sources():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _sources() -> list[Path]:
    """The files of the course that tests load, in order."""
    files = [ROOT / "conftest.py", *(file for name in _FOLDERS for file in (ROOT / name).rglob("*"))]
    return sorted(file for file in files if file.suffix in _SUFFIXES and file.is_file())


@cache
def state_of_the_installation() -> str:
    """A digest of the interpreter, and of when a package was last added, removed or replaced."""
    packages = Path(sysconfig.get_path("purelib"))
    changed = packages.stat().st_mtime_ns if packages.is_dir() else 0
    return hashlib.sha256(repr((ROOT, sys.executable, sys.version, packages, changed)).encode()).hexdigest()
