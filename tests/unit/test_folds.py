"""No page of the course gives an exercise away: its lines are folded where the source is quoted, and nowhere else."""

from pathlib import Path

import pytest

from tests.exercise_lines import exercise_lines, given_away
from tutorial.checker.folds import fold, unfolded
from tutorial.workshop.exercises import exercises, reference

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "tutorial").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_a_line_of_an_exercise(page: Path) -> None:
    assert given_away(page.read_text(encoding="utf-8")) == []


def test_every_exercise_has_lines_that_would_be_noticed() -> None:
    noticed = set(exercise_lines().values())
    assert [exercise.number for exercise in exercises() if exercise.number not in noticed] == []


@pytest.mark.parametrize("form", ["{}", "    {}  # and why", "+        {}", "- {}", "So `{}` is the answer."])
def test_a_line_is_noticed_in_code_in_a_diff_and_in_a_sentence(form: str) -> None:
    line = "return num_tokens == request.num_unscheduled_tokens"
    assert given_away("Some prose.\n" + form.format(line))[0].startswith("line 2 is of exercise 07x3: ")
    assert given_away(form.format("return num_tokens")) == []


def test_a_fold_hides_the_lines_of_the_reference_at_its_own_indent() -> None:
    for exercise in exercises():
        _, region = reference(exercise)
        hints = [f"{region.indent}# hint: {hint}" for hint in region.hints]
        code = [line for line in region.lines if line not in hints]
        assert unfolded(fold(exercise.number, region.indent)) == (exercise.number, code)
        assert unfolded(fold(exercise.number)) == (exercise.number, [line.removeprefix(region.indent) for line in code])
