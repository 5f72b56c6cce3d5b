"""Bug hunts as text and as files: which there are, what is planted, and what a folder remembers."""

import ast
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.cli import app
from shared.errors import ConfigError
from shared.lessons import lessons
from tutorial.workshop.exercises import ROOT, exercises, find_exercise, modules_of
from tutorial.workshop.hunts import BUGS, Hunt, HuntFolder, find_hunts, hunts
from tutorial.workshop.overlay import WorkspaceFinder
from tutorial.workshop.workspace import State, Workspace


def by_number(hunt: Hunt) -> str:
    return hunt.number


def test_each_phase_of_the_main_line_from_3_on_has_at_least_two() -> None:
    counts = {lesson.number: 0 for lesson in lessons() if lesson.number >= "03" and not lesson.is_side_track}
    for hunt in hunts():
        counts[hunt.phase] += 1
    assert min(counts.values()) >= 2
    assert {path.name for path in BUGS.glob("report_*.py")} == {hunt.report.name for hunt in hunts()}


@pytest.mark.parametrize("hunt", hunts(), ids=by_number)
def test_a_hunt_is_a_fault_of_its_phase_s_engine_a_report_hints_and_tests(hunt: Hunt) -> None:
    planted = {path: hunt.planted(path) for path in hunt.paths}
    changed = [path for path, text in planted.items() if text != (ROOT / path).read_text(encoding="utf-8")]
    assert changed == [hunt.module]
    ast.parse(planted[hunt.module])
    assert hunt.title
    assert len(hunt.said.splitlines()) > 2
    assert hunt.judged(hunt.tests).target
    assert len(hunt.hints) >= 2
    assert 10 <= hunt.minutes <= 60
    for test in hunt.tests:
        path, _, name = test.partition("::")
        assert name.partition("::")[0] in (ROOT / path).read_text(encoding="utf-8")
    assert set(hunt.tests) <= set(hunt.tests_of_phase)


@pytest.mark.parametrize("hunt", hunts(), ids=by_number)
def test_the_faulty_module_does_not_stand_alone_among_those_of_another_phase(hunt: Hunt) -> None:
    phase_of = {path: lesson.number for lesson in lessons() for path in modules_of(lesson)}
    planted = [phase_of[path] for path in hunt.paths]
    assert planted.count(phase_of[hunt.module]) > 1


@pytest.mark.parametrize("hunt", hunts(), ids=by_number)
def test_a_report_does_not_name_the_place_of_its_fault(hunt: Hunt) -> None:
    name = hunt.judged(hunt.tests).target.rpartition(".")[2]
    words = hunt.said.replace("`", " ").split()
    assert hunt.module not in hunt.said
    assert name == "abort" or name not in words  # a method that users call


def test_hunts_are_found_by_number_and_phase() -> None:
    assert find_hunts("8b1") == find_hunts(" 08B1 ") == find_hunts("08")[:1]
    assert find_hunts(None) == hunts()
    assert [hunt.number for hunt in find_hunts("6.1")] == ["06.1b1", "06.1b2"]
    for name, message in (("08b9", "There is no bug '08b9'; there are 03b1"), ("01a", "Phase 01a has no bug hunts")):
        with pytest.raises(ConfigError, match=message):
            find_hunts(name)


def test_a_hunt_has_a_folder_of_its_own_and_leaves_the_exercises(tmp_path: Path) -> None:
    (hunt,) = find_hunts("08b1")
    workspace = Workspace(tmp_path)
    (file,) = workspace.start([find_exercise("08x5")])
    before = file.read_text()
    folder = HuntFolder(tmp_path, hunt)
    assert not folder.is_planted
    folder.plant()
    assert file.read_text() == before
    planted = tmp_path / "bugs/08b1" / hunt.module
    assert planted.read_text() == hunt.fault.applied((ROOT / hunt.module).read_text())
    planted.write_text("# mine\n")
    HuntFolder(tmp_path, hunt).plant()
    assert planted.read_text() == "# mine\n"
    assert Workspace(tmp_path).state(find_exercise("08x5")) is State.GAP
    assert "3 modules of" in WorkspaceFinder(folder.root, raises=False).summary()


def test_what_cannot_be_read_of_a_hunt_costs_neither_the_list_nor_the_fix(tmp_path: Path) -> None:
    (hunt,) = find_hunts("08b1")
    folder = HuntFolder(tmp_path, hunt)
    folder.plant()
    fix, state = folder.root / hunt.module, folder.root / ".hunt.json"
    fix.write_text("# mine\n")
    for text in ("[", "[]", '{"other": 1}'):
        state.write_text(text)
        code, printed = bug(tmp_path, "--list")
        assert code == 0
        assert "bugs/08b1/.hunt.json cannot be read" in " ".join(printed.split())
        assert "your copy stays" in printed
        assert "08b2" in printed
        assert "delete" not in printed
    assert bug(tmp_path, "08b1", "--hint")[0] == 0
    assert fix.read_text() == "# mine\n"
    assert HuntFolder(tmp_path, hunt).state.hints == 1
    assert "cannot be read" not in bug(tmp_path, "--list")[1]


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    folder = HuntFolder(tmp_path, find_hunts("08b1")[0])
    folder.plant()
    state = folder.root / ".hunt.json"
    before = state.stat().st_ino
    folder.next_hint()
    assert state.stat().st_ino != before, "a new file takes the name; the old one is never half written"
    (folder.root / ".hunt.json.new").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        folder.next_hint()
    assert HuntFolder(tmp_path, folder.hunt).state.hints == 1


def test_an_action_without_a_name_is_for_the_one_hunt_that_is_open(tmp_path: Path) -> None:
    for option in ("--check", "--hint", "--run", "--give-up"):
        code, printed = bug(tmp_path, option)
        assert code == 2, option
        assert f"infer workshop bug 08b1 {option}" in printed
    bug(tmp_path, "05b1")
    assert bug(tmp_path, "--hint")[1].startswith(f"1 of 2: {find_hunts('05b1')[0].hints[0]}\n")
    bug(tmp_path, "08b1")
    code, printed = bug(tmp_path, "--hint")
    assert code == 2
    assert "05b1, 08b1" in printed
    bug(tmp_path, "08b1", "--give-up")
    assert bug(tmp_path, "--hint")[1].startswith("1 of 2: "), "05b1 is the one that is left"


@pytest.mark.parametrize("hunt", hunts(), ids=by_number)
def test_a_test_of_a_hunt_has_the_time_that_it_has_in_an_exercise(hunt: Hunt) -> None:
    for tests in (hunt.tests, hunt.tests_of_phase):
        limits = [each.processor_seconds for each in exercises() if not set(tests).isdisjoint(each.tests)]
        assert hunt.judged(tests).processor_seconds == max(limits, default=5.0)


def test_a_syntax_error_in_any_module_of_the_copy_is_shown_with_its_line(tmp_path: Path) -> None:
    (hunt,) = find_hunts("08b1")
    bug(tmp_path, "08b1")
    other = next(path for path in hunt.paths if path != hunt.module)
    file = tmp_path / "bugs/08b1" / other
    text = file.read_text()
    file.write_text(f"{text}def broken(:\n")
    code, printed = bug(tmp_path, "08b1", "--check")
    assert code == 1
    assert "SyntaxError: " in printed
    assert f"{file}:{len(text.splitlines()) + 1}" in printed
    assert "def broken(:" in printed


def test_a_copy_that_is_no_utf_8_is_not_said_to_be_an_exercise(tmp_path: Path) -> None:
    """`infer workshop reset` hands out the phase's exercises anew, and leaves the hunt as it is."""
    (hunt,) = find_hunts("08b1")
    bug(tmp_path, "08b1")
    file = tmp_path / "bugs/08b1" / hunt.paths[0]
    file.write_bytes(b"# caf\xe9\n" + file.read_bytes())
    code, printed = bug(tmp_path, "08b1", "--check")
    assert code == 1
    assert "no UTF-8 text: byte 0xe9 at offset 5" in printed
    assert f"delete {tmp_path / 'bugs/08b1'} to plant the bug anew" in printed
    assert "reset" not in printed


def bug(workspace: Path, *arguments: str) -> tuple[int, str]:
    environment = {"INFER_WORKSPACE": str(workspace), "NO_COLOR": "1"}
    done = CliRunner().invoke(app, ["workshop", "bug", *arguments], env=environment)
    return done.exit_code, done.output


def test_a_seed_chooses_the_same_bug_for_a_whole_room(tmp_path: Path) -> None:
    first = [bug(tmp_path / str(n), "--seed", "7")[1].replace(f"/{n}/", "/") for n in range(2)]
    assert first[0] == first[1]
    assert first[0].startswith(f"{hunts()[7].number}  ")
    assert bug(tmp_path, "08", "--seed", "5")[1].startswith("08b2  ")


def test_hints_come_one_at_a_time_and_giving_up_shows_the_difference(tmp_path: Path) -> None:
    (hunt,) = find_hunts("05b1")
    assert bug(tmp_path, "05b1", "--hint")[1].startswith(f"1 of 2: {hunt.hints[0]}\n")
    assert hunt.hints[1] in bug(tmp_path, "05b1", "--hint")[1]
    code, printed = bug(tmp_path, "05b1", "--give-up")
    assert code == 0
    assert "-        if not self.running:\n" in printed
    assert hunt.breaks in printed
    listed = bug(tmp_path, "--list")[1]
    assert "given up" in listed
    assert f"0 of {len(hunts())} solved" in listed


def test_options_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    code, printed = bug(tmp_path, "08b1", "--run", "--check")
    assert code == 2
    assert "exclude each other" in printed
