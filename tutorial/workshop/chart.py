"""The learner's own ladder: the speed of each phase with their code inside, beside the reference.

Two processes measure (`tutorial.workshop.rung_worker`): one loads the learner's modules, one the reference's. Phase by
phase they take turns, reference, learner, learner, reference, and only one holds an engine at a time: so neither a busy
moment of the machine nor its memory decides. Invariants: only lines whose tests have passed run as the learner's; a
phase is theirs if all of its own exercises that ran are, and any other phase shows the reference alone.
"""

import contextlib
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tutorial.workshop.exercises import exercises, find_exercise, reference
from tutorial.workshop.side_process import SideProcess
from tutorial.workshop.skeleton import with_gap
from tutorial.workshop.workspace import State, Workspace

Progress = Callable[[str, int, int], None]
VISITS = (0, 1, 1, 0)
"""Whose turn it is: 0 the reference's, 1 the learner's."""
TRIALS = 2
"""Of one turn; each begins with prompts of its own."""


@dataclass(frozen=True)
class ChartSize:
    """Tokens of the prompt and of the answer of one request; seconds after which a trial is broken off."""

    prompt_tokens: int = 32
    new_tokens: int = 12
    max_seconds: float = 1.0


DEFAULT = ChartSize()
QUICK = ChartSize(prompt_tokens=16, new_tokens=8, max_seconds=0.7)


@dataclass(frozen=True)
class Speeds:
    """Tokens a second: of one request after its first token, and of 16 at a time."""

    one: float
    together: float


@dataclass(frozen=True)
class PersonalRung:
    """One phase: its speeds, and the exercises whose function ran, by whose lines those were."""

    number: str
    title: str
    reference: Speeds
    own: Speeds | None  # None where the phase is not the learner's
    yours: tuple[str, ...]  # passed, and seen to run
    missing: tuple[str, ...]  # of this phase: run, and have not passed
    spread: float  # of the trials of either side, the fastest over the slowest
    is_equal: bool  # the learner's code gives the reference's tokens


@dataclass(frozen=True)
class PersonalLadder:
    """What was measured; ``flags`` say how."""

    model: str
    machine_title: str
    date: str
    flags: dict[str, Any]
    rungs: tuple[PersonalRung, ...]

    def line(self) -> str:
        """One JSON line: what was measured, by phase."""
        results = {
            rung.number: {
                "decode_tokens_per_second": rung.own and rung.own.one,
                "together_tokens_per_second": rung.own and rung.own.together,
                "reference_decode_tokens_per_second": rung.reference.one,
                "reference_together_tokens_per_second": rung.reference.together,
                "yours": list(rung.yours),
                "missing": list(rung.missing),
                "spread": round(rung.spread, 3),
                "equal_output": rung.is_equal,
            }
            for rung in self.rungs
        }
        head = {"benchmark": "workshop-chart", "model": self.model, "date": self.date}
        return json.dumps(head | {"flags": self.flags, "results": results}, ensure_ascii=False, allow_nan=False)


def measure(
    workspace: Workspace, model: str, size: ChartSize = DEFAULT, progress: Progress | None = None
) -> PersonalLadder:
    """Measure every phase that generates, with the reference and, where it is the learner's, with their code.

    Raises ConfigError with what a process said of the settings, or if the learner's code raised something.
    """
    passed = {e.number for e, state in workspace.states().items() if state is State.WRITTEN and workspace.has_passed(e)}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="infer-chart-")))
        passed = _copy_passed(workspace, passed, folder)
        settings = {"model": model, **vars(size)}
        sides = [stack.enter_context(SideProcess(settings, None))]
        about = sides[0].ask("begin")
        if passed:
            sides.append(stack.enter_context(SideProcess(settings, folder)))
        total = len(about["phases"]) * len(VISITS)
        rungs = []
        for place, (number, title) in enumerate(about["phases"]):
            report = _reporter(progress, f"phase {number}", place * len(VISITS), total)
            rungs.append(_measure_rung(number, title, sides, passed, report))
    trials = len(VISITS) // 2 * TRIALS
    flags = {**vars(size), "trials": trials, **{name: about[name] for name in ("together", "dtype", "threads")}}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return PersonalLadder(about["model"], about["machine_title"], date, flags, tuple(rungs))


def _copy_passed(workspace: Workspace, passed: set[str], folder: Path) -> set[str]:
    """Copy the modules with passed exercises, other written ones put back as gaps, which run the reference's lines.

    Returns the exercises that the copy holds: not those of a file in which another one cannot be told apart.
    """
    kept = set()
    for path in {exercise.path for exercise in map(find_exercise, passed)}:
        here = [exercise for exercise in exercises() if exercise.path == path]
        text: str | None = (workspace.root / path).read_text(encoding="utf-8")
        for exercise in here:
            if exercise.number not in passed and text is not None and workspace.state(exercise) is State.WRITTEN:
                text = with_gap(text, reference(exercise)[1])
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
            kept |= {exercise.number for exercise in here} & passed
    return kept


def _reporter(progress: Progress | None, what: str, done: int, total: int) -> Callable[[int, int], None]:
    """Reports one turn of a phase."""

    def report(turn: int, side: int) -> None:
        if progress is not None:
            progress(f"{what}, {'your code' if side else 'reference'}", done + turn, total)

    return report


def _measure_rung(
    number: str, title: str, sides: Sequence[SideProcess], passed: set[str], report: Callable[[int, int], None]
) -> PersonalRung:
    trials: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    called: list[list[str]] = [[], []]
    loaded: int | None = None
    is_theirs = True  # until the reference's first turn has said which exercises run
    missing: tuple[str, ...] = ()
    for turn, side in enumerate(VISITS):
        if side and not is_theirs:
            continue
        report(turn, side)
        if loaded != side:
            if loaded is not None:
                sides[loaded].ask("drop")
            called[side] = sides[side].ask("load", number)
            loaded = side
        if turn == 0:
            own = [n for n in called[0] if find_exercise(n).phase == number]
            missing = tuple(n for n in own if n not in passed)
            is_theirs = bool(own) and not missing
        first = len(trials[side])
        trials[side].extend(sides[side].ask("trial", n) for n in range(first, first + TRIALS))
    assert loaded is not None
    sides[loaded].ask("drop")
    speeds = [Speeds(_median(each, "one"), _median(each, "together")) if each else None for each in trials]
    assert speeds[0] is not None
    return PersonalRung(
        number,
        title,
        speeds[0],
        speeds[1],
        tuple(n for n in called[1] if n in passed),
        missing,
        max(_spread(each, name) for each in trials if each for name in ("one", "together")),
        all(_is_equal(a["token_ids"], b["token_ids"]) for a, b in zip(*trials, strict=False)),
    )


def _is_equal(some: Sequence[int], others: Sequence[int]) -> bool:
    """Whether answers are equal as far as both go: a trial may have been broken off."""
    return all(a == b for a, b in zip(some, others, strict=False))


def _median(trials: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(trial[name] for trial in trials)


def _spread(trials: Sequence[Mapping[str, Any]], name: str) -> float:
    speeds = [trial[name] for trial in trials]
    return float(max(speeds) / min(speeds))
