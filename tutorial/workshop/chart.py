"""The learner's own ladder: how fast each phase decodes with their code inside, beside the reference.

Two processes measure the same ladder (`benchmarks.ladder`, same model, same prompts): one loads the workspace's
modules, one the reference's. They take turns step by step, so that a busy moment of the machine hits both, and never
compute at the same time. Invariant: an exercise counts as the learner's only where it is written and its function was
seen to run.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError
from tutorial.workshop.exercises import ROOT, exercises
from tutorial.workshop.overlay import ENABLED, FOLDER, GAPS
from tutorial.workshop.workspace import State, Workspace

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PersonalRung:
    """One phase: decode speeds in tokens a second, and the exercises whose function ran, by whose lines those were."""

    number: str
    title: str
    reference_speed: float
    own_speed: float | None  # None where nothing of the learner's ran, so that there was nothing to measure
    yours: tuple[str, ...]
    reference: tuple[str, ...]
    spread: float  # of the trials of either side, the fastest over the slowest
    is_equal: bool  # with the learner's code this phase gives the tokens of the first phase

    @property
    def ratio(self) -> float | None:
        """The learner's speed over the reference's."""
        return None if self.own_speed is None else self.own_speed / self.reference_speed


@dataclass(frozen=True)
class PersonalLadder:
    """What was measured; ``flags`` are those of the ladder's report."""

    model: str
    machine_title: str
    date: str
    flags: dict[str, Any]
    rungs: tuple[PersonalRung, ...]
    unchecked: tuple[str, ...]  # exercises of the learner's that ran and whose tests have not passed

    def line(self) -> str:
        """One JSON line: what was measured, by phase."""
        results = {
            rung.number: {
                "decode_tokens_per_second": rung.own_speed,
                "reference_decode_tokens_per_second": rung.reference_speed,
                "yours": list(rung.yours),
                "reference": list(rung.reference),
                "spread": round(rung.spread, 3),
                "equal_output": rung.is_equal,
            }
            for rung in self.rungs
        }
        head = {"benchmark": "workshop-chart", "model": self.model, "date": self.date}
        return json.dumps(head | {"flags": self.flags, "results": results}, ensure_ascii=False, allow_nan=False)


def measure(
    workspace: Workspace,
    model: str,
    *,
    prompt_tokens: int,
    new_tokens: int,
    trials: int,
    progress: Progress | None = None,
) -> PersonalLadder:
    """Measure every phase that generates, with the learner's code and with the reference.

    Where nothing is written yet only the reference is measured. Raises ConfigError with what a process said of the
    settings, or if the learner's code raised something.
    """
    settings = {"model": model, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "trials": trials}
    states = {exercise.number: state for exercise, state in workspace.states().items()}
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(_Side(settings, None))]
        if State.WRITTEN in states.values():
            sides.append(stack.enter_context(_Side(settings, workspace)))
        _take_turns(sides, progress)
    reference = sides[0].result
    own = sides[1].result if len(sides) > 1 else None
    rungs = []
    for number, result in reference["report"]["results"].items():
        called = (own or reference)["called"][number]
        yours = tuple(n for n in called if states[n] is State.WRITTEN) if own else ()
        mine = own["report"]["results"][number] if own and yours else None
        rungs.append(
            PersonalRung(
                number,
                result["title"],
                result["decode_tokens_per_second"],
                mine["decode_tokens_per_second"] if mine else None,
                yours,
                tuple(n for n in called if n not in yours),
                max(_spread(side) for side in (result, mine) if side),
                mine["equal_output"] if mine else True,
            )
        )
    ran = {number for rung in rungs for number in rung.yours}
    unchecked = tuple(e.number for e in exercises() if e.number in ran and not workspace.has_passed(e))
    report = reference["report"]
    return PersonalLadder(
        report["model"]["name"],
        reference["machine_title"],
        report["date"],
        report["flags"],
        tuple(rungs),
        unchecked,
    )


def _spread(result: Mapping[str, Any]) -> float:
    speeds = result["decode_tokens_per_second_trials"]
    return max(speeds) / min(speeds)


class _Side:
    """A process that measures one side; it stands still except between `step` and its return.

    Args:
        workspace: whose modules it loads; None for the reference's.
    """

    def __init__(self, settings: Mapping[str, Any], workspace: Workspace | None) -> None:
        self.workspace = workspace
        self.result: dict[str, Any] = {}
        self.at: dict[str, Any] = {}
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "INFER_WORKSHOP_SAID": "1",
            ENABLED: "0" if workspace is None else "1",
            GAPS: "reference",
        }
        if workspace is not None:
            variables[FOLDER] = str(workspace.root)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tutorial.workshop.rung_worker", json.dumps(settings)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interruption reaches this process alone, which then ends that one
        )

    def __enter__(self) -> "_Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    @property
    def has_loaded(self) -> bool:
        """Whether its engines hold their weights."""
        return bool(self.at) and self.at["step"] != "begin" and not self.at["step"].endswith(": load")

    def step(self) -> None:
        """Let it run to the next place where it meets the other side, or to its end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.at:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write("\n")
                self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise ConfigError(self._why_it_ended())
        message = json.loads(line)
        if "error" in message:
            raise ConfigError(message["error"])
        if "report" in message:
            self.result = message
        else:
            self.at = message

    def _why_it_ended(self) -> str:
        what = f"while {self.at['step']}" if self.at else "when it began"
        if self.workspace is None:
            return f"The measurement of the reference ended {what}, with exit code {self.process.wait()}; see above."
        return (
            f"Your code ended the measurement {what}, with exit code {self.process.wait()}; see above, and run "
            "`infer workshop check` first."
        )


def _take_turns(sides: list[_Side], progress: Progress | None) -> None:
    """Run all sides to their end. Each loads alone, so that it sees the memory that is left; then they alternate."""
    for side in sides:
        side.step()
        while not side.has_loaded:
            _step(side, sides, progress)
    turn = 0
    while not all(side.result for side in sides):
        first = turn // 2 % 2  # a step takes two turns: one computes, in the other it is only said to have ended
        for side in [*sides[first:], *sides[:first]]:
            if not side.result:
                _step(side, sides, progress)
        turn += 1


def _step(side: _Side, sides: list[_Side], progress: Progress | None) -> None:
    if progress is not None:
        whose = "reference" if side.workspace is None else "your code"
        done = sum(other.at.get("done", 0) for other in sides)
        progress(f"{whose}, {side.at['step']}", done, len(sides) * side.at["total"])
    side.step()
