"""Digests of what a result depends on besides a learner's lines: the course, and what is installed.

Results that are kept (what known mistakes do, verdicts of checks) hold as long as these stay the same, and a server
that has imported packages serves as long as they do. Introduced in phase 1b. Invariant: a change of a file that a test
of an exercise can load changes one of the two.
"""

import hashlib
import sys
import sysconfig
from functools import cache
from pathlib import Path

from tutorial.workshop.exercises import ROOT

_FOLDERS = ("shared", "phases", "tests", "tutorial/mistakes", "tutorial/workshop")


@cache
def state_of_the_course() -> str:
    """A digest of the sources that decide what a test says of an exercise."""
    digest = hashlib.sha256()
    files = [ROOT / "conftest.py", *(file for name in _FOLDERS for file in (ROOT / name).rglob("*"))]
    for file in sorted(file for file in files if file.suffix in (".py", ".toml")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def state_of_the_installation() -> str:
    """A digest of the interpreter, and of when a package was last added, removed or replaced."""
    packages = Path(sysconfig.get_path("purelib"))
    changed = packages.stat().st_mtime_ns if packages.is_dir() else 0
    return hashlib.sha256(repr((ROOT, sys.executable, sys.version, packages, changed)).encode()).hexdigest()
