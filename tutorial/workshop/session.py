"""One learner's checks: run what is written, look again at what failed by itself, and say what the failure looks like.

All exercises that are written run together first. Where several are and one fails, it runs once more with the
reference's lines in the place of all others, so that a mistake in one costs no other its result.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tutorial.workshop.check import CheckServer
from tutorial.workshop.exercises import Exercise, exercises, reference
from tutorial.workshop.mistakes import Mistake, recognise, returns_nothing, run_mistakes
from tutorial.workshop.skeleton import corresponding_line, with_gap
from tutorial.workshop.verdicts import Outcome, Verdict
from tutorial.workshop.workspace import State, Workspace

KEPT = ".mistakes"
"""The folder of the workspace that keeps what the known mistakes do."""


class Session:
    """Checks of one workspace, by one server."""

    def __init__(self, workspace: Workspace, server: CheckServer) -> None:
        self.workspace = workspace
        self.server = server

    def check(self, wanted: Sequence[Exercise], *, tracebacks: bool = False) -> list[Verdict]:
        """A verdict on each exercise, in order; the workspace remembers which passed."""
        verdicts = {exercise: self._before(exercise) for exercise in wanted}
        written = [exercise for exercise, verdict in verdicts.items() if verdict is None]
        if written:
            run = self.server.run(self.workspace.root, written, tracebacks=tracebacks)
            verdicts |= {verdict.exercise: verdict for verdict in run.verdicts}
        beside = [e for e, state in self.workspace.states().items() if state is State.WRITTEN]
        for exercise in written:
            verdict = verdicts[exercise]
            if len(beside) > 1 and verdict is not None and verdict.outcome is not Outcome.PASSED:
                verdicts[exercise] = verdict = self._alone(exercise, tracebacks) or verdict
            assert verdict is not None
            self.workspace.note_check(exercise, passed=verdict.outcome is Outcome.PASSED)
        return [verdict for verdict in verdicts.values() if verdict is not None]

    def look(self, verdict: Verdict) -> tuple[Mistake, ...]:
        """The known mistakes that fail in the same way. They run now, unless what they do is kept."""
        exercise = verdict.exercise
        if verdict.outcome is not Outcome.FAILED:
            return ()
        if returns_nothing(exercise, self.workspace.file(exercise).read_text(encoding="utf-8", errors="replace")):
            return (Mistake(exercise.number, "nothing is returned: `return` is missing", ()),)
        return recognise(verdict, self.known(exercise))

    def known(self, exercise: Exercise, watch: Callable[[int, Path], None] | None = None) -> dict[Mistake, Verdict]:
        """What the known mistakes of an exercise do; ``watch`` as in `CheckServer.run`."""
        return run_mistakes(self.server, [exercise], self.workspace.root / KEPT, watch)[exercise]

    def _before(self, exercise: Exercise) -> Verdict | None:
        """The verdict on an exercise whose tests need not run; None if they must."""
        outcomes = {State.NEW: Outcome.NEW, State.GAP: Outcome.GAP}
        outcome = outcomes.get(self.workspace.state(exercise))
        return None if outcome is None else Verdict(exercise, outcome)

    def _alone(self, exercise: Exercise, tracebacks: bool) -> Verdict | None:
        """The verdict with the reference in all other exercises; None if the markers are no longer there."""
        own = self.workspace.file(exercise)
        text = whole = own.read_text(encoding="utf-8", errors="replace")
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
            run = self.server.run(Path(folder).resolve(), [exercise], tracebacks=tracebacks)
        (verdict,) = run.verdicts
        where = verdict.where
        if where is not None:
            path, _, number = where.rpartition(":")
            line = corresponding_line(text, whole, int(number)) if path == str(file) else None
            where = f"{own}:{line}" if line else None
        return replace(verdict, where=where, file=None if verdict.file is None else str(own))
