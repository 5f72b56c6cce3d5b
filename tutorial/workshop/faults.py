"""Faults written down as small patches: one change of a module, and the promise that it breaks. Introduced in phase 3.

``tests/mutants/shared/grammar/tokens/masks.patch`` holds the faults of ``shared/grammar/tokens/masks.py``: first a
line with the tests that are to find them, then each fault: a line that begins with ``#`` and says which promise it
breaks, and hunks of lines as in a unified diff, without line numbers. The lines of a hunk that begin with a space or
``-`` must stand in the module exactly once; an empty line ends a hunk.

`tests.mutants.run` proves that tests find them, and `tutorial.workshop.hunts` plants some for learners. Invariant: this
module imports none of the course, so a process that has loaded it can still fork for any fault.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "tests" / "mutants"


@dataclass(frozen=True)
class Fault:
    """One fault of one module, whose path is relative to the root."""

    module: Path
    promise: str
    hunks: tuple[tuple[str, str], ...]  # what stands in the module, and what stands there instead

    def applied(self, text: str) -> str:
        """The module's text with this fault.

        Raises:
            ValueError: a hunk does not stand in the module exactly once.
        """
        for before, after in self.hunks:
            if (count := text.count(before)) != 1:
                raise ValueError(f"{self}: this stands there {count} times, not once:\n{before}")
            text = text.replace(before, after)
        return text

    def __str__(self) -> str:
        return f"{self.module}: {self.promise}"


@dataclass(frozen=True)
class Faults:
    """The faults of one module, and the tests that are to find them."""

    module: Path
    tests: tuple[str, ...]
    faults: tuple[Fault, ...]


def patch_of(module: str) -> Path:
    """The file that holds the faults of a module, given by its path from the root."""
    return (PATCHES / module).with_suffix(".patch")


def read_faults(patch: Path) -> Faults:
    """What one file holds.

    Raises:
        ValueError: there is no such module or test, or a line that is none of a patch's.
    """
    module = patch.relative_to(PATCHES).with_suffix(".py")
    first, _, rest = patch.read_text(encoding="utf-8").partition("\n")
    tests = tuple(first.split())
    for path in (str(module), *(test.partition("::")[0] for test in tests)):
        if not (ROOT / path).exists():
            raise ValueError(f"{patch.relative_to(ROOT)}: there is no {path}")
    faults = []
    for entry in re.split(r"^# ", rest, flags=re.MULTILINE)[1:]:
        promise, _, body = entry.partition("\n")
        hunks = [hunk.splitlines() for hunk in re.split(r"\n{2,}", body.strip("\n"))]
        if wrong := [line for hunk in hunks for line in hunk if line[0] not in " -+"]:
            raise ValueError(f"{patch.relative_to(ROOT)}: no line of a patch: {wrong[0]!r}")
        faults.append(Fault(module, promise, tuple((_lines(hunk, " -"), _lines(hunk, " +")) for hunk in hunks)))
    if not tests or not faults:
        raise ValueError(f"{patch.relative_to(ROOT)}: a first line with tests and at least one fault are wanted")
    return Faults(module, tests, tuple(faults))


def _lines(hunk: list[str], signs: str) -> str:
    return "".join(f"{line[1:]}\n" for line in hunk if line[0] in signs)
