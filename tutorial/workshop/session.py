"""One learner's checks: run what is written, look again at what failed by itself, and say what the failure looks like.

What cannot be compiled does not run, and what has not changed since an earlier check is answered from its record. All
other exercises that are written run together first. Where several are and one fails, it runs once more with the
reference's lines instead of all others, so that a mistake in one costs no other its result. The first test that
runs out of time ends the check.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tutorial.workshop.check import CheckServer
from tutorial.workshop.exercises import Exercise, exercises, reference
from tutorial.workshop.kept_verdicts import KeptVerdicts, Keys
from tutorial.workshop.limits import limit_memory
from tutorial.workshop.skeleton import corresponding_line, with_gap
from tutorial.workshop.standing import case_name
from tutorial.workshop.times import Times
from tutorial.workshop.verdicts import Outcome, Verdict
from tutorial.workshop.workspace import State, Workspace

if TYPE_CHECKING:  # they import pytest, which a check that runs nothing need not wait for
    from tutorial.workshop.mistakes import Mistake

Watch = Callable[[int, Path], None]
KEPT = ".mistakes"
"""The folder of the workspace that keeps what the known mistakes do."""


class Session:
    """Checks of one workspace, by one server."""

    def __init__(self, workspace: Workspace, server: CheckServer) -> None:
        self.workspace = workspace
        self.server = server
        self.kept = KeptVerdicts(workspace.root)

    def check(
        self, wanted: Sequence[Exercise], *, tracebacks: bool = False, watch: Watch | None = None
    ) -> list[Verdict]:
        """A verdict on each exercise, in order; the workspace remembers which passed.

        ``watch`` is called as in `CheckServer.run`; an error of another class ends the check, and nothing is noted.
        """
        written = [exercise for exercise in wanted if self.workspace.state(exercise) is State.WRITTEN]
        digests = {exercise: self.workspace.digest(exercise) for exercise in written}
        keys = self.kept.keys(written)
        verdicts = {exercise: self._before(exercise, None if tracebacks else keys.get(exercise)) for exercise in wanted}
        left = [exercise for exercise in wanted if verdicts[exercise] is None]
        is_late = False  # a test ran out of time
        judged_alone = set()
        if left:
            run = self.server.run(self.workspace.root, left, tracebacks=tracebacks, before=limit_memory, watch=watch)
            verdicts |= {verdict.exercise: verdict for verdict in run.verdicts}
            num_written = sum(state is State.WRITTEN for state in self.workspace.states().values())
            is_late = any(case.is_time_out for case in run.cases)
            for failed in (each for each in run.verdicts if each.outcome is not Outcome.PASSED):
                if num_written == 1 or is_late:
                    break
                alone = self._alone(failed.exercise, tracebacks, watch)
                if alone is None:
                    continue
                is_late = any(case.is_time_out for case in alone.cases)
                judged_alone.add(failed.exercise)
                verdicts[failed.exercise] = alone
        for exercise, now in self.kept.keys(written).items():
            verdict = verdicts[exercise]
            if verdict is None or now != keys[exercise]:  # saved meanwhile: either text may have run
                continue
            self.workspace.note_check(
                exercise,
                passed=verdict.outcome is Outcome.PASSED,
                digest=digests[exercise],
                case=case_name(verdict.test),
                is_new=not verdict.is_kept,
            )
            if exercise in left and not (is_late and verdict.outcome is Outcome.FAILED):  # perhaps by other lines
                self.kept.keep(verdict, now, is_alone=exercise in judged_alone)
        found = [verdict for verdict in verdicts.values() if verdict is not None]
        passed = [verdict.exercise.number for verdict in found if verdict.outcome is Outcome.PASSED]
        worked_on = [each.exercise.number for each in found if each.exercise in written and not each.is_kept]
        Times(self.workspace.root).mark(worked_on, passed)
        return found

    def look(self, verdict: Verdict, watch: Watch | None = None) -> "tuple[Mistake, ...]":
        """The known mistakes that fail in the same way. They run now, unless what they do is kept."""
        from tutorial.workshop.mistakes import Mistake, fails_by_returning_nothing, recognise

        exercise = verdict.exercise
        if verdict.outcome is not Outcome.FAILED:
            return ()
        text = self.workspace.file(exercise).read_text(encoding="utf-8-sig", errors="replace")
        if fails_by_returning_nothing(verdict, text):
            return (Mistake(exercise.number, "nothing is returned: `return` is missing", ()),)
        return recognise(verdict, self.known(exercise, watch))

    def known(self, exercise: Exercise, watch: Watch | None = None) -> "dict[Mistake, Verdict]":
        """What the known mistakes of an exercise do; ``watch`` as in `CheckServer.run`."""
        from tutorial.workshop.mistakes import run_mistakes

        return run_mistakes(self.server, [exercise], self.workspace.root / KEPT, watch)[exercise]

    def _before(self, exercise: Exercise, keys: Keys | None) -> Verdict | None:
        """The verdict on an exercise whose tests need not run; None if they must. ``keys``: of a kept verdict, if one
        will do."""
        outcomes = {State.NEW: Outcome.NEW, State.GAP: Outcome.GAP}
        outcome = outcomes.get(self.workspace.state(exercise))
        if outcome is not None:
            return Verdict(exercise, outcome)
        anew = f"start anew with `infer workshop reset {exercise.phase}`, which keeps a backup"
        if (broken := not_compiled(exercise, self.workspace.file(exercise), anew)) is not None:
            return broken
        return None if keys is None else self.kept.find(exercise, keys)

    def _alone(self, exercise: Exercise, tracebacks: bool, watch: Watch | None) -> Verdict | None:
        """The verdict with the reference in all other exercises; None if the markers are no longer there."""
        own = self.workspace.file(exercise)
        text = whole = own.read_text(encoding="utf-8-sig", errors="replace")
        for other in exercises():
            if other.path == exercise.path and other != exercise:
                changed = with_gap(text, reference(other)[1])
                if changed is None:
                    return None
                text = changed
        with TemporaryDirectory(prefix="check-") as folder:
            file = Path(folder).resolve() / exercise.path
            file.parent.mkdir(parents=True)
            file.write_text(text, encoding="utf-8")
            run = self.server.run(
                Path(folder).resolve(), [exercise], tracebacks=tracebacks, before=limit_memory, watch=watch
            )
        (verdict,) = run.verdicts
        where = verdict.where
        if where is not None:
            path, _, number = where.rpartition(":")
            line = corresponding_line(text, whole, int(number)) if path == str(file) else None
            where = f"{own}:{line}" if line else None
        return replace(verdict, where=where, file=None if verdict.file is None else str(own))


def not_compiled(exercise: Exercise, file: Path, anew: str) -> Verdict | None:
    """The verdict on an exercise whose file cannot be compiled: the error, where it is, and a caret for below the line
    there; None if it can. ``anew`` says how the learner gets a new copy of the file."""
    content = file.read_bytes()
    try:
        content.decode()
        compile(content, str(file), "exec", dont_inherit=True)
    except UnicodeDecodeError as error:
        byte = f"byte {content[error.start]:#04x} at offset {error.start}"
        said = f"{file} is no UTF-8 text: {byte}; save it as UTF-8, or {anew}"
        line = content.count(b"\n", 0, error.start) + 1
        return Verdict(exercise, Outcome.NOT_RUN, reason=said, where=f"{file}:{line}")
    except SyntaxError as error:
        text = (error.text or "").rstrip()
        begin = len(text) - len(text.lstrip())
        caret = " " * max(0, (error.offset or 1) - 1 - begin) + "^"
        reason = [f"{type(error).__name__}: {error.msg}", *([caret] if text else ())]
        where = f"{file}:{error.lineno}" if error.lineno else None  # none for a null byte
        return Verdict(exercise, Outcome.NOT_RUN, reason="\n".join(reason), where=where)
    except ValueError as error:  # a null byte, before Python 3.12
        return Verdict(exercise, Outcome.NOT_RUN, reason=f"{file} cannot be compiled: {error}")
    return None
