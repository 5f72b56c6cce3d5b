"""The screen of ``infer workshop check`` and ``watch``: which cases pass, the smallest that fails, what is wrong in it.

Invariant: a failed exercise fits on a screen, however many cases it has.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shared.lessons import find_lesson
from shared.terminal import printable

if TYPE_CHECKING:
    from tutorial.workshop.exercises import Exercise
    from tutorial.workshop.mistakes import Mistake
    from tutorial.workshop.verdicts import Case, Verdict
    from tutorial.workshop.workspace import Workspace

COLOURS = {"passed": "green", "failed": "red", "not run": "red", "to do": "yellow", "written": "cyan"}
_MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red")}
_INDENT = " " * 8
_FIRST_WITH_TEXT = "02"
"""The first phase that generates; earlier ones compute logits."""
_HYPHEN = re.compile(r"(?<=[^-])-")  # between two parameters; one more is the sign of a number
_MOST_ROWS = 10
_MOST_COLUMNS = 8
_MOST_LETTERS = 300
_OUT_OF_MEMORY = ("MemoryError", "can't allocate memory")  # of Python and NumPy, and of PyTorch


def headline(verdict: "Verdict") -> str:
    """The exercise's number, what became of it, and its title."""
    said = str(verdict.outcome)
    return f"{verdict.exercise.number}  {typer.style(f'{said:<11}', fg=COLOURS.get(said))}  {verdict.exercise.title}"


def screen(workspace: "Workspace", verdict: "Verdict") -> list[str]:
    """What the terminal shows of one exercise."""
    exercise, said = verdict.exercise, str(verdict.outcome)
    if said == "passed":
        again = "; nothing has changed since" if verdict.is_kept else ""
        about = [f"{verdict.num_passed} tests, run on {exercise.target} of {shown(workspace.file(exercise))}{again}"]
    elif said == "to do":
        about = [f"{shown(workspace.file(exercise))}:{line_of(workspace, exercise)}"]
    elif said == "not started":
        about = [f"infer workshop start {exercise.phase} --only {exercise.number}"]
    elif said == "not run":
        reason, *lines = verdict.reason.splitlines()
        about = [reason, *_place(verdict), *(f"    {printable(line)}" for line in lines)]
        about += [f"in {verdict.test}"] if verdict.test else []
    else:
        about = _failure(verdict)
    return [headline(verdict), *(_INDENT + line if line else "" for line in about)]


def tell_board(workspace: "Workspace") -> None:
    """Tell the board where the learner is, if they have joined one; a line on standard error if it does not hear it."""
    from tutorial.workshop.board import tell

    if said := tell(workspace.root):
        typer.echo(said, err=True)


def looks_like(found: "Sequence[Mistake]") -> list[str]:
    """What is said of known mistakes: of several, that it is one of them."""
    beginnings = ["This looks like:", *["or:"] * len(found)]
    lines = [f"{begin} {mistake.says}." for begin, mistake in zip(beginnings, found, strict=False)]
    return ["", *(_INDENT + typer.style(line, fg="yellow", bold=True) for line in lines)] if lines else []


def what_it_bought(exercise: "Exercise") -> list[str]:
    """What an exercise that passed is for, and a command that runs the learner's lines."""
    phase = max(exercise.phase, _FIRST_WITH_TEXT)
    command = f'INFER_WORKSHOP=1 infer generate --phase {phase} --prompt "The capital of France is" --stats'
    return [f"  a step towards: {find_lesson(exercise.phase).question}", f"  on your lines: {command}"]


def what_to_write(workspace: "Workspace", exercise: "Exercise") -> list[str]:
    """Where an exercise is written, or how it is started, and where its hints are."""
    if str(workspace.state(exercise)) != "not started":
        lines = [f"  write it at {shown(workspace.file(exercise))}:{line_of(workspace, exercise)}"]
    else:
        lines = [f"  start it: infer workshop start {exercise.number}"]
    return lines + ([f"  a hint: infer workshop hint {exercise.number}"] if exercise.hints else [])


def line_of(workspace: "Workspace", exercise: "Exercise") -> int:
    """The line, from 1, of the exercise's gap; where it is written, of its marker."""
    from tutorial.workshop.exercises import reference

    lines = workspace.file(exercise).read_text(encoding="utf-8", errors="replace").splitlines()
    gap = f'raise NotImplementedError("{exercise.message}")'
    for wanted in (gap, f"# {exercise.message}"):
        for number, text in enumerate(lines, start=1):
            if text.strip() == wanted:
                return number
    return reference(exercise)[1].begin + 1


def shown(path: Path) -> str:
    """A path as short as it can be said from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _place(verdict: "Verdict") -> list[str]:
    """The learner's line at which it happened, and the exercise that it belongs to if that is another."""
    from tutorial.workshop.skeleton import exercise_around

    if not verdict.where:
        return []
    path, _, number = verdict.where.rpartition(":")
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    other = exercise_around(text, int(number))
    told = f" (in exercise {other})" if other not in (None, verdict.exercise.number) else ""
    source = text.split("\n")[int(number) - 1 :][:1]
    return [f"  at {shown(Path(path))}:{number}{told}", *(f"    {printable(line.strip())}" for line in source)]


def _failure(verdict: "Verdict") -> list[str]:
    from tutorial.workshop.limits import MEMORY

    lines = []
    for name in dict.fromkeys(case.name for case in verdict.cases if case.outcome in _MARKS):
        lines += _matrix(name, [case for case in verdict.cases if case.name == name and case.outcome in _MARKS])
    case = verdict.first_failure
    assert case is not None
    brackets = f"[{case.parameters}]" if case.parameters else ""
    lines += ["", f"the smallest failing case: {case.name}{brackets}"]
    error = case.error.removeprefix("AssertionError: ")
    lines += [f"  {printable(line)[:_MOST_LETTERS]}" for line in (error, *case.details)]
    if any(said in case.error for said in _OUT_OF_MEMORY):
        lines.append(f"  a check has {MEMORY:g} GiB; correct code needs a quarter of that at most")
    lines += _place(verdict)
    if not verdict.where and "::" in case.test and not case.error.startswith("AssertionError") and not case.is_time_out:
        lines.append("  raised in lines that are not yours, by what they got from yours")
    lines.append(f"in {case.test}")
    return lines + [printable(line) for line in case.traceback.splitlines()]


def _matrix(name: str, cases: Sequence["Case"]) -> list[str]:
    """One test: a line if its cases agree, else a table of the parameters that decide."""
    passed = sum(case.outcome == "passed" for case in cases)
    if len(cases) == 1:
        return [f"{_mark(cases[0].outcome)} {name}"]
    if passed in (0, len(cases)):
        return [f"{_mark(cases[0].outcome)} {name}, {'all' if passed else 'none'} of {len(cases)} cases"]
    rows: dict[str, dict[str, str]] = {}
    outcomes = _deciding({tuple(_HYPHEN.split(case.parameters)): case.outcome for case in cases})
    columns = list(dict.fromkeys(parts[-1] for parts in outcomes))
    if len(columns) > _MOST_COLUMNS or all(len(parts) == 1 for parts in outcomes):
        rows = {"-".join(parts): {"": outcome} for parts, outcome in outcomes.items()}
        columns = [""]
    else:
        for parts, outcome in outcomes.items():
            rows.setdefault("-".join(parts[:-1]), {})[parts[-1]] = outcome
    lines = [f"{_mark('failed')} {name}, {passed} of {len(cases)} cases pass"]
    first = max(len(row) for row in rows)
    if columns != [""]:
        lines.append(f"    {'':{first}}  {'  '.join(columns)}".rstrip())
    for row, marks in list(rows.items())[:_MOST_ROWS]:
        cells = [_mark(marks.get(column)) + " " * max(0, len(column) - 1) for column in columns]
        lines.append(f"    {row:{first}}  {'  '.join(cells)}".rstrip())
    if len(rows) > _MOST_ROWS:
        rest = [outcome for marks in list(rows.values())[_MOST_ROWS:] for outcome in marks.values()]
        lines.append(f"    and {len(rest)} more, of which {rest.count('passed')} pass")
    return lines


def _deciding(outcomes: dict[tuple[str, ...], str]) -> dict[tuple[str, ...], str]:
    """The outcomes by those parts of the parameters alone on which they depend."""
    if len({len(parts) for parts in outcomes}) > 1:  # a value with a hyphen
        return {("-".join(parts),): outcome for parts, outcome in outcomes.items()}
    for place in range(len(next(iter(outcomes)))):
        fewer: dict[tuple[str, ...], str] = {}
        for parts, outcome in outcomes.items():
            if fewer.setdefault(parts[:place] + parts[place + 1 :], outcome) != outcome:
                break
        else:
            if len(next(iter(fewer))) >= 1:
                return _deciding(fewer)
    return outcomes


def _mark(outcome: str | None) -> str:
    if outcome is None:
        return " "
    mark, colour = _MARKS[outcome]
    return typer.style(mark, fg=colour)
