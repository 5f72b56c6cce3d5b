"""No page of the course gives an exercise away: its lines are folded where the source is quoted, and nowhere else."""

from pathlib import Path

import pytest

from shared.lesson_source import diff_lines
from shared.lessons import Lesson, find_lesson, lessons
from tests.exercise_lines import exercise_lines, given_away, plain
from tutorial.checker.folds import fold, folded_diff, unfolded
from tutorial.workshop.exercises import exercises, find_exercise, reference

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "tutorial").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_a_line_of_an_exercise(page: Path) -> None:
    assert given_away(page.read_text(encoding="utf-8")) == []


def test_no_other_source_has_all_lines_of_an_exercise() -> None:
    """The site shows the sources of tests and tools too, without folds."""
    folders = ("benchmarks", "docs", "tests", "tutorial")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lines: dict[str, list[str]] = {}
    for line, exercise in exercise_lines().items():
        lines.setdefault(exercise, []).append(line)
    for path in sources:
        text = plain(path.read_text(encoding="utf-8"))
        assert [number for number, own in lines.items() if all(line in text for line in own)] == [], path


@pytest.mark.parametrize("lesson", lessons(), ids=lambda lesson: lesson.number)
def test_a_diff_of_phases_has_a_fold_where_it_would_give_an_exercise_away(lesson: Lesson) -> None:
    """Against the phase before it, and against the first, to which nearly everything is added."""
    for older in filter(None, (lesson.previous, "01a" if lesson.number != "01a" else None)):
        lines = list(diff_lines(find_lesson(older), lesson, with_tests=True))
        shown = list(folded_diff(lines))
        assert given_away("\n".join(shown)) == []
        rest = iter(lines)
        assert all(line in rest for line in shown if unfolded(line[1:]) is None), "lines of no exercise, in order"
        hidden = {exercise_lines()[code] for line in lines if (code := plain(line[1:])) in exercise_lines()}
        assert hidden <= {found[0] for line in shown if (found := unfolded(line[1:]))}


def test_a_fold_in_a_diff_stands_for_a_run_of_lines_with_the_same_sign() -> None:
    source, region = reference(find_exercise("07x3"))
    marker = source.split("\n")[region.begin]
    added = [f"+{line}" for line in (marker, *region.lines, f"{region.indent}# end exercise")]
    header = ["--- phases/none.py", f"+++ {find_exercise('07x3').path}", f"@@ -0,0 +{region.begin + 1},{len(added)} @@"]
    assert list(folded_diff([*header, *added])) == [
        *header,
        added[0],
        f"+{fold('07x3', region.indent)}",
        added[-1],
    ]


def test_every_exercise_has_lines_that_would_be_noticed() -> None:
    noticed = set(exercise_lines().values())
    assert [exercise.number for exercise in exercises() if exercise.number not in noticed] == []


@pytest.mark.parametrize("form", ["{}", "    {}  # and why", "+        {}", "- {}", "So `{}` is the answer."])
def test_a_line_is_noticed_in_code_in_a_diff_and_in_a_sentence(form: str) -> None:
    line = reference(find_exercise("07x3"))[1].lines[-1].strip()
    assert given_away("Some prose.\n" + form.format(line))[0].startswith("line 2 is of exercise 07x3: ")
    assert given_away(form.format("return num_tokens")) == []


def test_a_fold_hides_the_lines_of_the_reference_at_its_own_indent() -> None:
    for exercise in exercises():
        _, region = reference(exercise)
        hints = [f"{region.indent}# hint: {hint}" for hint in region.hints]
        code = [line for line in region.lines if line not in hints]
        assert unfolded(fold(exercise.number, region.indent)) == (exercise.number, code)
        assert unfolded(fold(exercise.number)) == (exercise.number, [line.removeprefix(region.indent) for line in code])
