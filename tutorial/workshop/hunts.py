"""Bug hunts: a working phase with one fault in it, and what a user reported. Introduced in phase 3.

``tutorial/bugs/NN.toml`` lists the hunts of phase NN::

    [[bugs]]
    module = "shared/cache/pool/prefix.py"
    breaks = "At least one token of a request is computed."
    minutes = 20
    hints = ["…", "…"]
    tests = ["tests/unit/test_prefix_pool.py::test_blocks_of_one_token"]

``breaks`` names one of the module's faults in ``tests/mutants``. ``tutorial/bugs/report_08b1.py`` is the report: its
docstring is what the user wrote, its lines show the symptom and end with exit code 1 while the fault is there.

A hunt has a folder of its own, ``workspace/bugs/08b1``, with a copy of every module of the phase that the workshop can
replace, and of the phase that the faulty module comes from if that is an earlier one, so that the folder does not say
which of them has the fault. It is a workspace like the learner's own, and runs in the same way.
Invariant: the learner's exercises are neither read nor changed.
"""

import ast
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path

from shared.errors import ConfigError
from shared.kernels import NO_TRITON
from shared.lessons import find_lesson, lessons
from tutorial.workshop.check import INTERPRET, KERNEL_TESTS
from tutorial.workshop.exercises import ROOT, Exercise, enclosing_function, exercises, modules_of
from tutorial.workshop.faults import Fault, patch_of, read_faults
from tutorial.workshop.overlay import ENABLED, FOLDER, GAPS, SAID
from tutorial.workshop.submission import HUNTS

BUGS = Path(__file__).parents[1] / "bugs"
_STATE = ".hunt.json"
_ALREADY_IMPORTED = ("shared/engine/config.py", "shared/engine/config_rules.py", "shared/kernels/launch.py")
"""What the overlay and tests/kernels/conftest.py import before the workshop's modules are installed: no hunt can plant
it."""
_RUN = (
    "import runpy, sys; from tutorial.workshop.overlay import install; install(); "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)
SECONDS_OF_A_REPORT = 120
"""A report ends in seconds; one that does not, with a learner's change in it, is ended."""


@dataclass(frozen=True)
class Hunt:
    """One hunt: the fault that is planted, the tests that find it, and what a learner is told."""

    number: str  # the phase, a b and a count: 08b1
    phase: str
    module: str  # of the fault, by its path from the root
    breaks: str
    minutes: int
    hints: tuple[str, ...]
    tests: tuple[str, ...]  # pytest node ids of those that find the fault

    @property
    def report(self) -> Path:
        """The script that shows the symptom."""
        return BUGS / f"report_{self.number.replace('.', '_')}.py"

    @cached_property
    def said(self) -> str:
        """What the user wrote: a title, and below it the rest."""
        return ast.get_docstring(ast.parse(self.report.read_text(encoding="utf-8"))) or ""

    @property
    def title(self) -> str:
        return self.said.partition("\n")[0].removesuffix(".")

    @cached_property
    def fault(self) -> Fault:
        """The fault; ConfigError if the module has none that breaks this promise."""
        found = [fault for fault in read_faults(patch_of(self.module)).faults if fault.promise == self.breaks]
        if len(found) != 1:
            raise ConfigError(f"Bug {self.number}: {patch_of(self.module)} has no fault `# {self.breaks}`.")
        return found[0]

    @property
    def paths(self) -> tuple[str, ...]:
        """The modules that are planted: those that can be of the phase, and of the phase that brought the faulty one,
        among which it would stand out alone."""
        brought_by = next(lesson for lesson in lessons() if self.module in modules_of(lesson))
        found = dict.fromkeys((*modules_of(find_lesson(self.phase)), *modules_of(brought_by)))
        return tuple(path for path in found if path not in _ALREADY_IMPORTED)

    def planted(self, path: str) -> str:
        """The text of a planted module."""
        text = (ROOT / path).read_text(encoding="utf-8")
        return self.fault.applied(text) if path == self.module else text

    def judged(self, tests: tuple[str, ...]) -> Exercise:
        """The hunt as an exercise of these tests, which is how a check judges it: its function is the faulty one, and
        its tests have the most time that one of them has in an exercise."""
        source = (ROOT / self.module).read_text(encoding="utf-8")
        lines = zip(source.splitlines(), self.fault.applied(source).splitlines(), strict=False)
        line = next(number for number, (one, other) in enumerate(lines) if one != other)
        target = enclosing_function(source, line, self.module)
        limits = [each.processor_seconds for each in exercises() if not set(tests).isdisjoint(each.tests)]
        seconds = max(limits, default=Exercise.processor_seconds)
        return Exercise(
            self.number, self.phase, self.title, self.hints, self.minutes, tests, self.module, target, seconds
        )

    def handed_in(self, path: str) -> str:
        """Where a planted module lies in a workspace."""
        return f"{HUNTS}/{self.number}/{path}"

    @property
    def is_interpreted(self) -> bool:
        """Whether the fault is in a kernel, which the report runs through Triton's interpreter."""
        return any(test.startswith(KERNEL_TESTS) for test in self.tests)

    @property
    def tests_of_phase(self) -> tuple[str, ...]:
        """Every test of the phase's exercises that can run here, those first that find the fault."""
        own = [test for exercise in exercises() if exercise.phase == self.phase for test in exercise.tests]
        can_run = (test for test in own if not (NO_TRITON and test.startswith(KERNEL_TESTS)))
        return tuple(dict.fromkeys((*self.tests, *can_run)))


@cache
def hunts() -> tuple[Hunt, ...]:
    """Every hunt, in the order of the phases."""
    found = []
    for lesson in lessons():
        file = BUGS / f"{lesson.number}.toml"
        entries = tomllib.loads(file.read_text(encoding="utf-8"))["bugs"] if file.is_file() else []
        for count, entry in enumerate(entries, start=1):
            entry |= {name: tuple(entry[name]) for name in ("hints", "tests")}
            found.append(Hunt(f"{lesson.number}b{count}", lesson.number, **entry))
    return tuple(found)


def names_a_hunt(name: str) -> bool:
    """Whether this has the form of a hunt's number, such as 08b1 or 8b1."""
    return re.fullmatch(r"\d+(\.\d+)?b\d+", name.strip().lower()) is not None


def find_hunts(name: str | None) -> tuple[Hunt, ...]:
    """The hunt with a number, such as 08b1 or 8b1, or those of a phase; all without a name. ConfigError if none."""
    if name is None:
        return hunts()
    wanted = name.strip().lower()
    wanted = wanted if wanted[:2].isdigit() else f"0{wanted}"
    if found := tuple(hunt for hunt in hunts() if hunt.number == wanted):
        return found
    if names_a_hunt(wanted):
        raise ConfigError(f"There is no bug {name!r}; there are {', '.join(hunt.number for hunt in hunts())}.")
    lesson = find_lesson(name)
    if not (found := tuple(hunt for hunt in hunts() if hunt.phase == lesson.number)):
        phases = ", ".join(dict.fromkeys(hunt.phase for hunt in hunts()))
        raise ConfigError(f"Phase {lesson.number} has no bug hunts; phases that have are {phases}.")
    return found


@dataclass
class HuntState:
    """What a hunt's folder remembers."""

    hints: int = 0  # how many were shown
    is_solved: bool = False
    is_given_up: bool = False


class HuntFolder:
    """A hunt in a learner's workspace, which need not exist yet.

    A state that cannot be read is a new one, and ``problem`` says so; the modules in the folder stay as they are.
    """

    def __init__(self, workspace: Path, hunt: Hunt) -> None:
        self.root = workspace / HUNTS / hunt.number
        self.hunt = hunt
        self.state = HuntState()
        self.problem = ""
        try:
            self.state = HuntState(**json.loads((self.root / _STATE).read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, TypeError) as error:
            self.problem = (
                f"{self.root / _STATE} cannot be read ({error}); the hints shown and the result are forgotten, your "
                "copy stays."
            )

    @property
    def is_planted(self) -> bool:
        return (self.root / _STATE).exists()

    def plant(self) -> None:
        """Write the modules of the phase, one of them with the fault; what has been planted stays as it is."""
        if self.is_planted:
            return
        texts = {path: self.hunt.planted(path) for path in self.hunt.paths}
        for path, text in texts.items():
            self._write(self.root / path, text)
        self._save()

    def next_hint(self) -> int:
        """Count one more hint as shown; how many have been shown now, at most all."""
        self.state.hints = min(self.state.hints + 1, len(self.hunt.hints))
        self._save()
        return self.state.hints

    def note(self, *, solved: bool = False, given_up: bool = False) -> None:
        """Remember that the hunt was solved or given up; the first of them counts."""
        if not (self.state.is_solved or self.state.is_given_up):
            self.state.is_solved, self.state.is_given_up = solved, given_up
            self._save()

    def difference(self) -> list[str]:
        """From the faulty module to the right one, as lines of a unified diff."""
        wrong, right = self.hunt.planted(self.hunt.module), (ROOT / self.hunt.module).read_text(encoding="utf-8")
        labels = (f"{self.hunt.module} (as it was planted)", f"{self.hunt.module} (the reference)")
        return list(difflib.unified_diff(wrong.splitlines(), right.splitlines(), *labels, lineterm=""))

    def run_report(self) -> int:
        """Run the report on the code in the folder, in a process and an empty folder of its own; the exit code, 1 while
        it shows its symptom."""
        with tempfile.TemporaryDirectory(prefix="report-") as empty:
            command = [sys.executable, "-c", _RUN, str(self.hunt.report)]
            environment = {**os.environ, **report_variables(self.hunt, self.root)}
            try:
                return subprocess.run(command, cwd=empty, env=environment, timeout=SECONDS_OF_A_REPORT).returncode
            except subprocess.TimeoutExpired:
                print(f"The report was ended after {SECONDS_OF_A_REPORT} s.", file=sys.stderr)
                return 1

    def _save(self) -> None:
        self._write(self.root / _STATE, json.dumps(asdict(self.state)) + "\n")

    def _write(self, file: Path, text: str) -> None:
        unfinished = file.with_name(f"{file.name}.new")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(file)
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be written ({error.strerror}); choose another folder with INFER_WORKSPACE=DIR."
            ) from None


def report_variables(hunt: Hunt, root: Path) -> dict[str, str]:
    """The variables of a process that runs a hunt's report on the modules below ``root``."""
    return {
        ENABLED: "1",
        FOLDER: str(root),
        GAPS: "reference",
        SAID: "1",
        INTERPRET: str(int(hunt.is_interpreted)),
        "INFER_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
