"""What is shown when a phase is finished: what it gains on this machine, and a mark for each later phase, both on the
learner's lines.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from shared.engine.config import EngineConfig
from shared.errors import InferError
from shared.lessons import Lesson
from shared.terminal import printable, working

if TYPE_CHECKING:
    from tutorial.workshop.check import CheckServer
    from tutorial.workshop.verdicts import Verdict
    from tutorial.workshop.workspace import Workspace


MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red"), "not run": ("–", "yellow")}


def say_later(workspace: "Workspace", server: "CheckServer", phases: Sequence[str]) -> None:
    """Of these phases, which were not finished before, show those that are now, and run the phases after them."""
    from tutorial.workshop.later import is_finished, run_later

    for phase in (phase for phase in phases if is_finished(workspace, phase)):
        say_reward(workspace, phase)
        with working(f"{phase} is finished; running the phases after it on your lines"):
            found = run_later(server, workspace, phase)
        typer.echo("".join(f"{line}\n" for line in later_lines(phase, found)), nl=False)


def say_reward(workspace: "Workspace", phase: str) -> None:
    """What a finished phase does on this machine with the learner's lines, where the demo model is here; Ctrl-C leaves
    it out.
    """
    from tutorial.workshop.chart import is_here, show_phase

    again = "infer workshop chart"
    if not is_here(EngineConfig.model):
        typer.echo(f"what your {phase} gains: infer model pull {EngineConfig.model}, then {again}")
        return
    typer.echo(f"your {phase} on this machine (Ctrl-C skips it):")
    try:
        typer.echo(show_phase(workspace, phase, EngineConfig.model) + "\n")
    except InferError as error:
        typer.echo(f"  {error}")
    except KeyboardInterrupt:
        typer.echo(f"  skipped; {again} shows it later")


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
