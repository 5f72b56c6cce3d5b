"""Verdicts of earlier checks, which answer a check in which nothing has changed.

What an exercise's tests say depends on its own lines, on the rest of the workspace and on the course. The lines of
other exercises do not count if the exercise was judged with the reference in their place. A verdict on all of them
together may need the others, however wrong they are, so it holds for these lines alone. Introduced in phase 1b.
Invariant: a verdict is found only under the key with which it was kept, and only if the tests came to their end in
time.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tutorial.workshop.course_state import state_of_the_course, state_of_the_installation
from tutorial.workshop.exercises import ROOT, Exercise, exercises, reference
from tutorial.workshop.skeleton import filled, with_gap
from tutorial.workshop.verdicts import Case, Outcome, Verdict


@dataclass(frozen=True)
class Keys:
    """Digests of all that a verdict on one exercise depends on; they are equal if no other exercise is written."""

    alone: str  # with the reference in all other exercises
    together: str  # with the lines of all exercises as they are


class KeptVerdicts:
    """The verdicts that a workspace keeps, a file for each exercise."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.folder = workspace / ".verdicts"

    def keys(self, wanted: Sequence[Exercise]) -> dict[Exercise, Keys]:
        """Of each exercise, what its verdict depends on now."""
        texts = {}
        for file in sorted((self.workspace / "shared").rglob("*.py")):
            path = file.relative_to(self.workspace).as_posix()
            if (ROOT / path).is_file():  # no other can run
                with suppress(OSError):  # while an editor replaces it
                    texts[path] = file.read_text(encoding="utf-8-sig", errors="replace")
        course = f"{state_of_the_course()} {state_of_the_installation()}"
        whole = {path: _filled(path, text) for path, text in texts.items()}
        without = {path: _without_exercises(path, text) for path, text in texts.items()}

        def digest(exercise: Exercise, texts: dict[str, str]) -> str:
            return hashlib.sha256(repr((exercise.number, course, sorted(texts.items()))).encode()).hexdigest()

        found = {}
        for exercise in wanted:
            own = {exercise.path: _without_exercises(exercise.path, texts.get(exercise.path, ""), exercise)}
            found[exercise] = Keys(digest(exercise, without | own), digest(exercise, whole))
        return found

    def find(self, exercise: Exercise, keys: Keys) -> Verdict | None:
        """The verdict with one of these keys."""
        try:
            kept = json.loads(self._file(exercise).read_text(encoding="utf-8"))
            if kept["key"] not in (keys.alone, keys.together):
                return None
            fields = kept["verdict"]
            cases = tuple(Case(**case | {"details": tuple(case["details"])}) for case in fields["cases"])
            fields |= {"outcome": Outcome(fields["outcome"]), "cases": cases, "is_kept": True}
            if fields["file"] is not None:
                fields["file"] = str(self.workspace / fields["file"])
            if (line := fields["where"]) is not None:
                fields["where"] = f"{self.workspace / exercise.path}:{self._lines(exercise)[line]}"
            return Verdict(exercise=exercise, **fields)
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None

    def keep(self, verdict: Verdict, keys: Keys, *, is_alone: bool) -> None:
        """Keep a verdict if the same check would give it again, and it can be written.

        What is kept names no folder, and counts the line of a failure from the exercise's marker: the workspace may be
        renamed, and other exercises above may grow. A failure at another line is not kept.

        Args:
            is_alone: whether the tests ran with the reference in all other exercises.
        """
        is_late = any(case.is_time_out for case in verdict.cases)
        if verdict.outcome not in (Outcome.PASSED, Outcome.FAILED) or is_late:
            return
        cases = tuple(replace(case, where=None, traceback="") for case in verdict.cases)
        fields = asdict(replace(verdict, cases=cases))
        del fields["exercise"]
        file = self._file(verdict.exercise)
        unfinished = file.with_suffix(f".{os.getpid()}")
        with suppress(OSError, ValueError):  # ValueError: another file or line than the exercise's
            if verdict.file is not None:
                fields["file"] = Path(verdict.file).relative_to(self.workspace).as_posix()
            if verdict.where is not None:
                path, _, line = verdict.where.rpartition(":")
                own = (
                    self._lines(verdict.exercise) if Path(path) == self.workspace / verdict.exercise.path else range(0)
                )
                fields["where"] = own.index(int(line))
            file.parent.mkdir(parents=True, exist_ok=True)
            kept = {"key": keys.alone if is_alone else keys.together, "verdict": fields}
            unfinished.write_text(json.dumps(kept), encoding="utf-8")
            unfinished.replace(file)

    def _lines(self, exercise: Exercise) -> range:
        """The numbers, from 1, of the lines between the markers of an exercise as they are now; ValueError if there
        are no markers."""
        text = (self.workspace / exercise.path).read_text(encoding="utf-8-sig", errors="replace")
        lines = [line.strip() for line in text.split("\n")]
        begin = lines.index(f"# {exercise.message}")
        return range(begin + 2, lines.index("# end exercise", begin) + 1)

    def _file(self, exercise: Exercise) -> Path:
        return self.folder / f"{exercise.number}.json"


def _without_exercises(path: str, text: str, kept: Exercise | None = None) -> str:
    """The text of a module with the reference in its exercises, except for one; where the markers are gone it stays."""
    for exercise in exercises():
        if exercise.path == path and exercise != kept:
            text = with_gap(text, reference(exercise)[1]) or text
    return _filled(path, text)


def _filled(path: str, text: str) -> str:
    """The text of a module as it runs: with the reference in its gaps."""
    source = next((reference(exercise)[0] for exercise in exercises() if exercise.path == path), None)
    return text if source is None else filled(text, source)[0]
