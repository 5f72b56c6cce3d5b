"""Many submissions, each judged by the tests of its exercises in processes of its own, forks of one server.

All exercises of a submission run together first. One that did not pass runs once more, alone: all other exercises, in
its file and elsewhere, are the reference's then, so that a mistake, an endless loop or a crash in one costs no other
its result. Bug hunts that were handed in run one by one, by every test of their phase's exercises. Before all
submissions the reference runs under the same limits; if it does not pass, no row would mean anything.

A submission cannot pass by accident: the recorder's file lies in a folder that it is not told of, and what is missing
there has not passed. It can still forge its result on purpose, and read or delete what its user may, since its tests
run in the same process and account as its code: grade the work of strangers in a container or a virtual machine
without secrets. Invariant: every submission gets its row, and nothing that it started runs when the row is done.
"""

import csv
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shared.errors import ConfigError
from shared.kernels import NO_TRITON
from tutorial.workshop.check import CheckServer, can_be_checked
from tutorial.workshop.exercises import ROOT, Exercise, exercises, find_exercise, reference
from tutorial.workshop.hunts import Hunt, hunts
from tutorial.workshop.limits import GRACE, Limits, Watch, end_processes
from tutorial.workshop.overlay import FOLDER
from tutorial.workshop.skeleton import has_gap, with_gap
from tutorial.workshop.submission import Submission, read_submission
from tutorial.workshop.verdicts import Outcome, Verdict

_NO_RECORD = (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What reading the recorder's file can raise if a submission wrote into it: JSON that is none, too deep, or of other
types."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "INFER_TEST_MODELS": ""}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet would take for a formula at the beginning of a cell."""


@dataclass(frozen=True)
class Row:
    """A submission's judgement: a verdict for each exercise that was asked for."""

    name: str
    verdicts: tuple[Verdict, ...]

    @property
    def num_passed(self) -> int:
        return sum(verdict.outcome is Outcome.PASSED for verdict in self.verdicts)


def grade(
    paths: Sequence[Path],
    wanted: Sequence[Exercise] | None = None,
    hunted: Sequence[Hunt] = (),
    *,
    limits: Limits | None = None,
    jobs: int = 1,
    progress: Callable[[Row], None] | None = None,
) -> list[Row]:
    """A row for each submission, in the order given.

    Args:
        paths: folders and zip files.
        wanted: exercises to judge; by default those whose file is in at least one of the submissions, and the bug hunts
            that are in one; all exercises if there is nothing of either.
        hunted: bug hunts to judge, if exercises to judge are given, perhaps none.
        jobs: how many submissions run at the same time.
        progress: called with each row when it is done.

    Raises ConfigError if a path does not exist or the reference does not pass within the limits.
    """
    limits = limits or Limits()
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}; it must be at least 1.")
    if limits.seconds <= 0 or limits.memory <= 0:
        raise ConfigError(f"The limits are {limits.seconds:g} s and {limits.memory:g} GiB; both must be above 0.")
    for path in paths:
        if not path.exists():
            raise ConfigError(f"There is no submission {path}; name folders or zip files that exist.")
    everything = list(dict.fromkeys(exercise.path for exercise in wanted or exercises()))
    candidates = hunts() if wanted is None else hunted
    everything += [hunt.handed_in(path) for hunt in candidates for path in hunt.paths]
    names = names_of(paths)
    submissions = [read_submission(path, name, everything) for path, name in zip(paths, names, strict=True)]
    if wanted is None:
        found = {path for submission in submissions for path in (*submission.files, *submission.problems)}
        hunted = [hunt for hunt in candidates if not found.isdisjoint(map(hunt.handed_in, hunt.paths))]
        wanted = [exercise for exercise in exercises() if exercise.path in found]
        wanted = wanted if wanted or hunted else exercises()
    stop = threading.Event()
    with CheckServer(_ENVIRONMENT) as server, ThreadPoolExecutor(jobs) as pool:
        judge = partial(_judge, wanted=wanted, hunted=hunted, limits=limits, server=server, stop=stop)
        _check_reference(judge, wanted, hunted)
        futures: list[Future[Row]] = [pool.submit(judge, submission) for submission in submissions]
        try:
            for future in futures:
                row = future.result()
                if progress is not None:
                    progress(row)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """One line a submission: the outcome of each exercise, how many passed, and the reason of each that did not."""
    numbers = [verdict.exercise.number for verdict in rows[0].verdicts]
    try:
        with file.open("w", encoding="utf-8", newline="") as out:
            writer = csv.writer(out)
            writer.writerow(["submission", *numbers, "passed", "of", *(f"{number} reason" for number in numbers)])
            for row in rows:
                outcomes = [str(verdict.outcome) for verdict in row.verdicts]
                reasons = [_cell(verdict.reason) for verdict in row.verdicts]
                writer.writerow([_cell(row.name), *outcomes, row.num_passed, len(row.verdicts), *reasons])
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}); name another file with --csv.") from None


def _check_reference(judge: Callable[[Submission], Row], wanted: Sequence[Exercise], hunted: Sequence[Hunt]) -> None:
    files = {exercise.path: (ROOT / exercise.path).read_bytes() for exercise in wanted}
    files |= {hunt.handed_in(path): (ROOT / path).read_bytes() for hunt in hunted for path in hunt.paths}
    for verdict in judge(Submission("the reference", files)).verdicts:
        if verdict.outcome is not Outcome.PASSED and can_be_checked(verdict.exercise):
            raise ConfigError(
                f"The reference itself does not pass {verdict.exercise.number} here ({verdict.reason}), so no "
                "submission was graded; give more with --seconds and --memory, or run `make test` to see what is wrong."
            )


def _judge(
    submission: Submission,
    *,
    wanted: Sequence[Exercise],
    hunted: Sequence[Hunt],
    limits: Limits,
    server: CheckServer,
    stop: threading.Event,
) -> Row:
    verdicts = {exercise: _before(submission, exercise) for exercise in wanted}
    written = [exercise for exercise, verdict in verdicts.items() if verdict is None]
    if len(written) > 1:
        verdicts |= _run(submission, written, limits, server, stop)
    for exercise in written:
        verdict = verdicts[exercise]
        if verdict is None or verdict.outcome is not Outcome.PASSED:
            verdicts |= _run(submission, [exercise], limits, server, stop)
    judged = [verdict for verdict in verdicts.values() if verdict is not None]
    return Row(submission.name, (*judged, *(_judge_hunt(submission, hunt, limits, server, stop) for hunt in hunted)))


def _judge_hunt(
    submission: Submission, hunt: Hunt, limits: Limits, server: CheckServer, stop: threading.Event
) -> Verdict:
    """The verdict on a bug hunt, whose modules run together; those that were not handed in are the reference's."""
    as_exercise, texts = hunt.judged(hunt.tests_of_phase), dict[str, str]()
    if not can_be_checked(as_exercise):
        return Verdict(as_exercise, Outcome.NOT_RUN, reason=f"{NO_TRITON}")
    for path in hunt.paths:
        problem = submission.refused or submission.problems.get(hunt.handed_in(path))
        try:
            content = submission.files.get(hunt.handed_in(path))
            texts |= {} if content is None else {path: content.decode()}
        except UnicodeDecodeError as error:
            problem = f"is no UTF-8 text ({error.reason} at offset {error.start})"
        if problem:
            return Verdict(as_exercise, Outcome.NOT_RUN, reason=problem if submission.refused else f"{path} {problem}")
    if hunt.module not in texts:
        return Verdict(as_exercise, Outcome.NEW, reason=f"{hunt.handed_in(hunt.module)} is not in it")
    return _run_texts(texts, [as_exercise], limits, server, stop)[as_exercise]


def _before(submission: Submission, exercise: Exercise) -> Verdict | None:
    """The verdict on an exercise whose tests need not run, or cannot; None if they must."""
    if not can_be_checked(exercise):
        return Verdict(exercise, Outcome.NOT_RUN, reason=f"{NO_TRITON}")
    problem = submission.refused or submission.problems.get(exercise.path)
    if problem:
        about = "" if submission.refused else f"{exercise.path} "
        return Verdict(exercise, Outcome.NOT_RUN, reason=about + problem)
    content = submission.files.get(exercise.path)
    if content is None:
        return Verdict(exercise, Outcome.NEW, reason=f"{exercise.path} is not in it")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        problem = f"is no UTF-8 text ({error.reason} at offset {error.start})"
        return Verdict(exercise, Outcome.NOT_RUN, reason=f"{exercise.path} {problem}")
    return Verdict(exercise, Outcome.GAP) if has_gap(text, reference(exercise)[1]) else None


def _run(
    submission: Submission, wanted: Sequence[Exercise], limits: Limits, server: CheckServer, stop: threading.Event
) -> Mapping[Exercise, Verdict]:
    """The verdicts on exercises that run together; all others are the reference's."""
    texts = {}
    for path in {exercise.path for exercise in wanted}:
        others = {exercise.number for exercise in exercises() if exercise.path == path} - {e.number for e in wanted}
        texts[path] = _without(others, submission.files[path].decode())
    return _run_texts(texts, wanted, limits, server, stop)


def _run_texts(
    texts: Mapping[str, str], wanted: Sequence[Exercise], limits: Limits, server: CheckServer, stop: threading.Event
) -> Mapping[Exercise, Verdict]:
    """The verdicts on exercises that run together in a workspace of these modules."""
    is_alone = len(wanted) == 1
    with tempfile.TemporaryDirectory(prefix="grading-", ignore_cleanup_errors=True) as folder:
        workspace, scratch = Path(folder).resolve() / "workspace", Path(folder).resolve() / "scratch"
        scratch.mkdir()
        for path, text in texts.items():
            (workspace / path).parent.mkdir(parents=True, exist_ok=True)
            (workspace / path).write_text(text, encoding="utf-8", newline="")
        environment = {
            "TMPDIR": str(scratch),
            # Alone, the first test that fails decides, and pytest can say where it was. Together, a test that ends
            # late must not have many others do the same: the watch ends the run, and each exercise runs alone.
            "PYTEST_ADDOPTS": "--exitfirst" if is_alone else "",
            "PYTEST_TIMEOUT": f"{limits.seconds:g}" if is_alone else "0",
        }
        try:
            run = server.run(
                workspace,
                wanted,
                seconds=limits.total_seconds(len(wanted)),
                environment=environment,
                before=partial(limits.apply, len(wanted)),
                watch=Watch(limits, stop, GRACE if is_alone else 0.0),
                time_factor=None,
            )
            verdicts = run.verdicts
        except _NO_RECORD as error:
            verdicts = tuple(Verdict(e, Outcome.NOT_RUN, reason=f"its record cannot be read ({error})") for e in wanted)
        finally:
            end_processes(FOLDER, str(workspace))
        return {v.exercise: _without_folder(v, f"{workspace}{os.sep}") for v in verdicts}


def _without(numbers: Collection[str], text: str) -> str:
    """The text with gaps, in which the reference runs, for these exercises; where the markers are gone it stays."""
    for number in numbers:
        gone = with_gap(text, reference(find_exercise(number))[1])
        text = text if gone is None else gone
    return text


def _without_folder(verdict: Verdict, folder: str) -> Verdict:
    """The verdict with paths as they are in the submission, which the copy's folder means nothing to."""
    where = (verdict.where or "").replace(folder, "") or None
    reason = verdict.reason.replace(folder, "")
    return Verdict(
        verdict.exercise, verdict.outcome, verdict.num_passed, verdict.num_tests, reason, verdict.test, where
    )


def names_of(paths: Sequence[Path]) -> list[str]:
    """What a submission is called: its folder or file; where that is not unique, its path."""
    short = [path.resolve().stem if path.is_file() else path.resolve().name for path in paths]
    count = Counter(short)
    return [name if count[name] == 1 else str(path) for path, name in zip(paths, short, strict=True)]


def _cell(text: str) -> str:
    """A text that a spreadsheet shows and does not compute."""
    return f"'{text}" if text.startswith(_FORMULA) else text
