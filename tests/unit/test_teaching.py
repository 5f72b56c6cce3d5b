"""The teaching material agrees with itself and with the course: timetables, minutes, slides and usual mistakes."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from shared.lessons import lessons
from tutorial.workshop.exercises import exercises
from tutorial.workshop.mistakes import mistakes_of

TUTORIAL = Path(__file__).parents[2] / "tutorial"
TEACHERS, DAY, SLIDES, ANSWERS = (
    (TUTORIAL / f"{name}.md").read_text(encoding="utf-8")
    for name in ("teachers", "serving_day", "serving_day_slides", "serving_day_answers")
)
PAGES = sorted(TUTORIAL.glob("*.md"))
CHAPTERS = [page for page in PAGES if re.fullmatch(r"phase_\d\d[a-z]?(_\d)?", page.stem)]
MINUTES = {exercise.number: exercise.minutes for exercise in exercises()}
NUMBER = r"\d\d[a-z]?(?:\.\d)?x\d"


def tables(text: str, header: str) -> list[list[list[str]]]:
    """The cells of each table whose first line begins with ``header``, without header and rule."""
    found = re.findall(rf"^{re.escape(header)}.*\n\|[-:|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[[cell.strip() for cell in row.split("|")[1:-1]] for row in body.splitlines()] for body in found]


TIMETABLES = [table for text in (TEACHERS, DAY) for table in tables(text, "| from | minutes |")]


def clock(time: str) -> int:
    hours, minutes = time.split(":")
    return 60 * int(hours) + int(minutes)


@pytest.mark.parametrize("rows", TIMETABLES, ids=lambda rows: rows[1][2][:20])
def test_the_slots_of_a_timetable_follow_one_another_and_hold_their_exercises(rows: list[list[str]]) -> None:
    assert rows[-1][1:3] == ["", "End"]
    for (begin, minutes, what, *_), (end, *_) in pairwise(rows):
        assert clock(begin) + int(minutes) == clock(end), f"{begin}: {minutes} minutes do not end at {end}"
        needed = sum(MINUTES[number] for number in re.findall(rf"\*\*({NUMBER})\*\*", what))
        assert needed <= int(minutes), f"{begin}: exercises of {needed} minutes in a slot of {minutes}"


def test_every_timetable_is_found_and_every_exercise_in_one_is_bold() -> None:
    assert len(TIMETABLES) == 9
    cells = [row[2] for table in TIMETABLES for row in table]
    assert not [cell for cell in cells if re.search(rf"(?<!\*\*)\b{NUMBER}", cell)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_minutes_on_a_page_are_those_of_the_lesson(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = re.findall(
        rf"\*\*({NUMBER}) [^*]+\*\* \((\d+) minutes\)|\b({NUMBER})(?:\*\*)? \((\d+)(?: minutes)?\)", text
    )
    said = [(title or name, int(minutes or bare)) for title, minutes, name, bare in found]
    assert said or page not in CHAPTERS
    assert said == [(number, MINUTES[number]) for number, _ in said]


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.name)
def test_a_chapter_says_at_its_top_how_long_its_exercises_take(page: Path) -> None:
    top, _, rest = page.read_text(encoding="utf-8").partition("\n## ")
    said = re.findall(r"(\d+)\sminutes\sfor\s(?:its|the)\sexercises", top)
    minutes = [MINUTES[number] for number in re.findall(rf"^\*\*({NUMBER}) ", rest, re.MULTILINE)]
    assert [int(number) for number in said] == [sum(minutes)]


def test_the_list_of_exercises_by_minutes_is_complete() -> None:
    (rows,) = tables(TEACHERS, "| minutes | exercises |")
    listed = {number: int(minutes) for minutes, numbers in rows for number in re.findall(NUMBER, numbers)}
    assert listed == MINUTES


def test_the_semester_has_every_exercise_of_its_phases_once_and_no_week_of_more_than_two_hours() -> None:
    (rows,) = tables(TEACHERS, "| week |")
    assert [week for week, *_ in rows] == [str(week) for week in range(1, 15)]
    weeks = [re.findall(NUMBER, homework) for _, _, homework in rows]
    phases = {number.partition("x")[0] for numbers in weeks for number in numbers}
    assert phases >= {"01a", "01b", "02", "03", "04", "05", "06", "07"}
    assert [number for numbers in weeks for number in numbers] == [
        number for number in MINUTES if number.partition("x")[0] in phases
    ]
    assert all(sum(MINUTES[number] for number in numbers) <= 120 for numbers in weeks)


def test_each_exercise_has_mistakes_on_the_page_for_teachers() -> None:
    (rows,) = tables(TEACHERS, "| exercise | mistake |")
    assert list(dict.fromkeys(row[0] for row in rows)) == list(MINUTES)


def test_what_is_cut_when_late_gives_the_minutes_that_are_missing() -> None:
    (rows,) = tables(DAY, "| at | late by |")
    given = 0
    for at, late, _, minutes in rows:
        given = int(minutes) + (0 if at else given)
        assert int(late) == given


def test_the_answer_sheet_has_usual_mistakes_of_the_day_s_exercises_as_the_check_says_them() -> None:
    (timetable,) = tables(DAY, "| from | minutes |")
    on_the_day = re.findall(rf"\*\*({NUMBER})\*\*", " ".join(row[2] for row in timetable))
    parts = re.split(r"^## ", ANSWERS, flags=re.MULTILINE)
    sheets = {part.split("\n")[0]: tables(part, "| the check says |") for part in parts}
    assert on_the_day == ["03x2", "04x1", "04x4", "05x3", "05x1", "06x5", "06x3"]
    for exercise in exercises():
        if exercise.number in on_the_day:
            said = [row[0] for row in sheets[exercise.number][0]]
            known = dict.fromkeys(mistake.says for mistake in mistakes_of(exercise))
            assert len(said) >= 3
            assert said == [sentence for sentence in known if sentence in said]
    early = re.findall(NUMBER, " ".join(row[1] for row in tables(DAY, "| after |")[0]))
    assert sorted(early) == sorted(re.findall(rf"^({NUMBER}): ", ANSWERS, re.MULTILINE))


def test_the_slides_follow_the_timetable_and_the_chapters() -> None:
    front, *slides = re.split(r"^---\n", SLIDES, flags=re.MULTILINE)[1:]
    assert front.startswith("marp: true")
    (timetable,) = tables(DAY, "| from | minutes |")
    shown: list[int] = []
    for *_, numbers in timetable:
        first, _, last = numbers.partition("–")
        shown += range(int(first), int(last or first) + 1) if first else []
    assert sorted(set(shown)) == list(range(1, len(slides) + 1))
    assert shown == sorted(shown)
    assert all("<!--\n" in slide for slide in slides), "a slide has no speaker notes"
    chapters = "\n".join((TUTORIAL / f"phase_{phase}.md").read_text(encoding="utf-8") for phase in ("05", "06"))
    lines = [line for fence in re.findall(r"```text\n(.*?)```", SLIDES, re.DOTALL) for line in fence.splitlines()]
    assert len(lines) > 10
    assert not [line for line in lines if line not in chapters]


def test_the_plan_of_ten_evenings_has_two_or_three_exercises_of_each_phase_of_the_main_line_in_order() -> None:
    evenings = []
    for lesson in lessons():
        chosen = [exercise.evening for exercise in lesson.exercises if exercise.evening is not None]
        assert len(chosen) == 0 if lesson.is_side_track else 2 <= len(chosen) <= 3, lesson.number
        evenings += chosen
    assert evenings == sorted(evenings)
    assert set(evenings) == set(range(1, 11))
