"""Run the tests of exercises on a workspace, in processes of their own, and judge each exercise.

A `CheckServer` is the one way to do so, for a learner's check, a class's submissions and the proofs of the exercises.
Tests of kernels are a run of their own: they go through Triton's interpreter, also where there is a GPU, since a
compiler takes a kernel with a gap for a mistake in the language. The variable has to be set before Triton is imported.
Invariant: when a run is over, so are its processes.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from shared.kernels import NO_TRITON
from tutorial.workshop.exercises import ROOT, Exercise
from tutorial.workshop.fork_server import IS_SUPPORTED, ForkedProcess, ForkServer
from tutorial.workshop.overlay import ENABLED, FOLDER, GAPS, SAID
from tutorial.workshop.time_outs import time_out
from tutorial.workshop.verdicts import RECORD, Case, Verdict, judge

KERNEL_TESTS = "tests/kernels/"
INTERPRET = "TRITON_INTERPRET"
SECONDS_PER_TEST = 60.0
"""Of wall time. Processor time, which does not depend on the machine's other work, ends an endless loop sooner."""
IMPORTS_FACTOR = 5.0
"""How much more time a test has in a process that imports what it needs in the middle of it."""
SECONDS_TO_START = 120
"""For importing PyTorch, transformers and the tests from a slow disk."""
SECONDS_PER_LOOK = 0.1
# What tests of exercises import: most of them, pytest for each run, some.
_ALL_TESTS = ("torch", "psutil", "typer", "filelock", "hypothesis.stateful", "triton")
_PLUGINS = ("pytest", "_hypothesis_pytestplugin", "pytest_benchmark.plugin", "pytest_timeout", "xdist.plugin")
_SOME_TESTS = (
    *("transformers", "transformers.modeling_utils", "scipy.stats"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "gemma3")),
)
_TESTS_OF_KERNELS = ("torch._dynamo", "triton.experimental.gluon")
_OPTIONS = (
    *("--workshop", "-p", "tutorial.workshop.recorder", "-p", "no:cacheprovider", "--benchmark-disable"),
    *("-q", "--no-header", "-o", "timeout=0"),  # the limits are a `TimeLimit`'s, or of who grades
)
MOST_OUTPUT = 1 << 20
"""Bytes of what a run printed that are kept, its last ones."""


class RunEndedError(Exception):
    """What a watch raises to end the run that it looks at; the text is the reason."""


@dataclass(frozen=True)
class Run:
    """One run of pytest: a verdict for each exercise, every case that came to its end, and what was printed."""

    verdicts: tuple[Verdict, ...]
    cases: tuple[Case, ...]
    output: str

    @property
    def errors(self) -> dict[str, str]:
        """By test, the error of each that failed."""
        return {case.test: case.error for case in self.cases if case.outcome == "failed"}


def can_be_checked(exercise: Exercise) -> bool:
    """Whether all of its tests can run here; tests of kernels need Triton."""
    return not (NO_TRITON and any(test.startswith(KERNEL_TESTS) for test in exercise.tests))


def most_seconds(wanted: Sequence[Exercise]) -> float:
    """How long a run of exercises may take altogether: more than ten times what right code takes."""
    return SECONDS_TO_START + SECONDS_PER_TEST * sum(len(exercise.tests) for exercise in wanted)


class CheckServer:
    """Runs tests on workspaces, each run in a fork of a server that has imported PyTorch and the like once.

    A context manager, which starts servers when they are needed and ends them. Several threads may call `run`.

    Args:
        environment: further variables of all runs. Those that a package reads when it is imported must be here.
        forks: otherwise each run is a process that imports what it needs: where forks are not supported, or where a
            single run follows, for which the imports of a server would be too many.
        idle_seconds: how long the servers stay after the last run, for any process of this user; 0: they end with this.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        forks: bool = IS_SUPPORTED,
        idle_seconds: float = 0.0,
    ) -> None:
        self.environment = {"PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}
        self.forks = forks
        self.idle_seconds = idle_seconds
        self._servers: dict[bool, ForkServer] = {}  # by whether kernels are interpreted
        self._lock = threading.Lock()

    def __enter__(self) -> "CheckServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the servers; another run would start them again."""
        while self._servers:
            self._servers.popitem()[1].close()

    def run(
        self,
        workspace: Path,
        wanted: Sequence[Exercise],
        *,
        gaps_raise: bool = False,
        seconds: float | None = None,
        tracebacks: bool = False,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
        watch: Callable[[int, Path], None] | None = None,
        time_factor: float | None = 1.0,
    ) -> Run:
        """Run the tests mapped to ``wanted`` on the code in ``workspace``.

        Args:
            gaps_raise: gaps that are left raise; otherwise the reference runs there.
            seconds: after so long the processes are ended, and what had not finished counts as not passed; by default
                `most_seconds`.
            tracebacks: each failed case has its own; pytest may need longer for those than for the tests.
            environment: further variables of this run.
            before: called in the new process before it runs anything (to set limits); must be picklable.
            watch: called again and again with the process's id and the recorder's file; ends the run by
                `RunEndedError`.
            time_factor: how much of what one test may take it has; the first that takes more ends the run. None: the
                caller has limits of its own.
        """
        tests = list(dict.fromkeys(test for exercise in wanted for test in exercise.tests))
        if not (ROOT / "tests").is_dir():
            raise ConfigError(
                f"The tests of the exercises are not in {ROOT}; run this in a checkout of the repository."
            )
        seconds = most_seconds(wanted) if seconds is None else seconds
        if time_factor is not None and not self.forks:
            time_factor *= IMPORTS_FACTOR
        last = time.monotonic() + seconds
        entries: list[dict] = []
        printed: list[str] = []
        ended: dict[str, str] = {}
        variables = variables_of(workspace, gaps_raise) | dict(environment or {})
        with tempfile.TemporaryDirectory(prefix="workshop-") as folder:
            for is_interpreted in (False, True):
                part = [test for test in tests if test.startswith(KERNEL_TESTS) == is_interpreted]
                if is_interpreted and NO_TRITON:
                    ended |= dict.fromkeys(part, NO_TRITON)
                    continue
                if not part:
                    continue
                record = Path(folder) / f"record-{is_interpreted}.jsonl"
                try:
                    code, output = self.run_pytest(
                        ["--tb=short" if tracebacks else "--tb=no", *part],
                        variables | recording(record, wanted, time_factor),
                        is_interpreted,
                        last - time.monotonic(),
                        before,
                        look_at(record, watch),
                    )
                    printed.append(output)
                    ended |= dict.fromkeys(part, how_it_ended(code, seconds))
                except RunEndedError as reason:
                    ended |= {test: str(reason) for test in tests if test not in ended}
                entries += entries_of(record, workspace, gaps_raise=gaps_raise)
                if late := next((entry["test"] for entry in entries if entry.get("is_time_out")), None):
                    ended = dict.fromkeys(tests, f"the check stopped at {late}, which ran out of time")
                if len(ended) == len(tests):
                    break
        return judged(wanted, entries, workspace, ended, "\n".join(printed))

    def run_pytest(
        self,
        arguments: Sequence[str],
        variables: dict[str, str],
        is_interpreted: bool,
        seconds: float,
        before: Callable[[], None] | None,
        watch: Callable[[int], None] | None,
    ) -> tuple[int | None, str]:
        """Run pytest in a process group of its own: exit code (None: ended by time), output.

        The output goes through a file, so that neither a flood nor a process that was left behind can hold this one up.
        """
        with tempfile.TemporaryFile() as printed:
            process = self._start([*_OPTIONS, *arguments], variables, is_interpreted, printed.fileno(), before)
            try:
                code = _wait(process, seconds, watch)
            finally:
                process.end()
            printed.seek(max(0, printed.seek(0, os.SEEK_END) - MOST_OUTPUT))
            return code, printed.read(MOST_OUTPUT).decode(errors="replace")

    def _start(
        self,
        arguments: Sequence[str],
        variables: dict[str, str],
        is_interpreted: bool,
        output: int,
        before: Callable[[], None] | None,
    ) -> "_FreshProcess | ForkedProcess":
        common = {**os.environ, **self.environment, INTERPRET: str(int(is_interpreted))}
        if not self.forks:
            return _FreshProcess(arguments, common | variables, output, before)
        with self._lock:
            if is_interpreted not in self._servers:
                later = _TESTS_OF_KERNELS if is_interpreted else _SOME_TESTS
                packages = (*_ALL_TESTS, *_PLUGINS)
                self._servers[is_interpreted] = ForkServer(packages, common, self.idle_seconds, later)
            server = self._servers[is_interpreted]
        return server.start(arguments, common | variables, output, before)


class _FreshProcess(subprocess.Popen[bytes]):
    """A run of pytest that begins with nothing imported."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        before: Callable[[], None] | None,
    ) -> None:
        super().__init__(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=before,
        )

    def end(self) -> None:
        """End it and all of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def look_at(record: Path, watch: Callable[[int, Path], None] | None) -> Callable[[int], None] | None:
    """The watch of a run with this record, to be called with the process's id."""
    return None if watch is None else lambda pid: watch(pid, record)


def how_it_ended(code: int | None, seconds: float) -> str:
    """What is to be said of a test that did not come to its end."""
    if code is None:
        return f"the run was ended after {seconds:g} s"
    if code < 0:
        return f"the run was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"the run ended before this, with exit code {code}"


def recording(record: Path, wanted: Sequence[Exercise], time_factor: float | None = 1.0) -> dict[str, str]:
    """The variables by which a run has a record, and limits on its tests."""
    settings: dict[str, object] = {
        "file": str(record),
        "functions": {exercise.number: (exercise.module, exercise.target) for exercise in wanted},
    }
    if time_factor is not None:
        own = ((test, exercise.processor_seconds) for exercise in wanted for test in exercise.tests)
        processor: dict[str, float] = {}
        for test, seconds in own:
            processor[test] = max(processor.get(test, 0.0), seconds * time_factor)
        settings["limits"] = {"processor": processor, "wall": SECONDS_PER_TEST * time_factor}
    return {RECORD: json.dumps(settings)}


def entries_of(record: Path, workspace: Path, *, gaps_raise: bool) -> list[dict]:
    """What the recorder wrote (of a line that was cut nothing), and the test that ran out of time, if one did."""
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    late = time_out(record, entries, workspace, gaps_raise=gaps_raise)
    return entries if late is None else [*entries, late]


def variables_of(workspace: Path, gaps_raise: bool) -> dict[str, str]:
    """The variables of a run on a workspace."""
    return {ENABLED: "1", FOLDER: str(workspace), GAPS: "raise" if gaps_raise else "reference", SAID: "1"}


def judged(
    wanted: Sequence[Exercise], entries: Sequence[dict], workspace: Path, ended: Mapping[str, str], output: str
) -> Run:
    """The run that the recorder's entries tell of."""
    results = tuple(_case(entry) for entry in entries if "test" in entry)
    files: dict[str, str | None] = {}
    for entry in entries:
        files |= entry.get("files", {})
    verdicts = tuple(judge(exercise, results, files, workspace, ended) for exercise in wanted)
    return Run(verdicts, results, output)


def _case(entry: dict) -> Case:
    return Case(**entry | {"details": tuple(entry.get("details", ()))})


def _wait(process: "_FreshProcess | ForkedProcess", seconds: float, watch: Callable[[int], None] | None) -> int | None:
    """The exit code, or None if the process still runs after so long."""
    last = time.monotonic() + seconds
    while (left := last - time.monotonic()) > 0:
        try:
            return process.wait(left if watch is None else min(left, SECONDS_PER_LOOK))
        except subprocess.TimeoutExpired:
            if watch is not None:
                watch(process.pid)
    return None
