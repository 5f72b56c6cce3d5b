"""What is shown when a phase is finished: a mark for each later phase, run on the learner's lines."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from shared.lessons import Lesson
from shared.terminal import printable, working

if TYPE_CHECKING:
    from tutorial.workshop.check import CheckServer
    from tutorial.workshop.verdicts import Verdict
    from tutorial.workshop.workspace import Workspace


MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red"), "not run": ("–", "yellow")}


def say_later(workspace: "Workspace", server: "CheckServer", phases: Sequence[str]) -> None:
    """Of these phases, which were not finished before, run those that are now in the phases after them."""
    from tutorial.workshop.later import is_finished, run_later

    for phase in (phase for phase in phases if is_finished(workspace, phase)):
        with working(f"{phase} is finished; running the phases after it on your lines"):
            found = run_later(server, workspace, phase)
        typer.echo("".join(f"{line}\n" for line in later_lines(phase, found)), nl=False)


def later_lines(phase: str, found: "Mapping[Lesson, Verdict]") -> list[str]:
    """A mark for each later phase, and the first failure; none if no phase follows."""
    outcomes = {lesson: str(verdict.outcome) for lesson, verdict in found.items()}
    marks = [typer.style(f"{each.number} {MARKS[said][0]}", fg=MARKS[said][1]) for each, said in outcomes.items()]
    lines = [f"your {phase} in the phases after it: {'  '.join(marks)}"] if marks else []
    if failed := [lesson for lesson, said in outcomes.items() if said == "failed"]:
        verdict = found[failed[0]]
        lines += [f"  phase {failed[0].number} does not work with your lines: {verdict.test}"]
        lines += [f"    {printable(line)}" for line in verdict.reason.splitlines()[:1]]
    return lines
