"""A phase packed for handing out, read back as a student unpacks it."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typer

import tutorial.workshop.handout as handout
from shared.errors import ConfigError
from shared.lessons import Lesson, find_lesson
from tutorial.workshop.exercises import ROOT, exercises_of, reference
from tutorial.workshop.handout import contents, export, phases_to_hand_out
from tutorial.workshop.skeleton import has_gap, skeleton
from tutorial.workshop.workspace import State, Workspace

PHASES = [find_lesson(number) for number in phases_to_hand_out()]


def by_number(lesson: Lesson) -> str:
    return lesson.number


@pytest.mark.parametrize("lesson", PHASES, ids=by_number)
def test_a_student_finds_chapter_pictures_tests_and_skeleton_and_nothing_else(lesson: Lesson, tmp_path: Path) -> None:
    members = export([lesson], tmp_path / "out.zip")
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert archive.testzip() is None
        assert archive.namelist() == sorted(members)
        archive.extractall(tmp_path)
    folder = tmp_path / f"infer-workshop-{lesson.number}"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    wanted = exercises_of(lesson)
    chapter = f"tutorial/{lesson.folder.name}.md"
    tests = {test.partition("::")[0] for exercise in wanted for test in exercise.tests}
    modules = {exercise.path for exercise in wanted}
    text = (folder / chapter).read_text()
    names = re.findall(r"!\[[^\]]*\]\(([^)\s]+)", text)
    pictures = {(ROOT / "tutorial" / name).resolve().relative_to(ROOT).as_posix() for name in names}
    assert pictures
    own = {"README.md", "workspace/.progress.json"}
    assert files == own | {chapter} | tests | pictures | {
        f"workspace/{a}{m}" for m in modules for a in ("", ".handed/")
    }
    for path in {chapter} | tests | pictures:
        assert (folder / path).read_bytes() == (ROOT / path).read_bytes()
    for path in modules:
        numbers = {exercise.number for exercise in wanted if exercise.path == path}
        assert (folder / "workspace" / path).read_text() == skeleton((ROOT / path).read_text(), numbers)
    for exercise in wanted:
        assert has_gap((folder / "workspace" / exercise.path).read_text(), reference(exercise)[1])
        assert exercise.title in (folder / "README.md").read_text()

    states = Workspace(folder / "workspace").states()
    assert {exercise for exercise, state in states.items() if state is State.GAP} == set(wanted)


def test_several_phases_share_one_workspace(tmp_path: Path) -> None:
    wanted = [find_lesson(number) for number in ("03", "04", "06")]
    export(wanted, tmp_path / "out.zip")
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "infer-workshop-03-04-06"
    states = Workspace(folder / "workspace").states()
    assert {e for e, state in states.items() if state is State.GAP} == {e for one in wanted for e in exercises_of(one)}
    readme = (folder / "README.md").read_text()
    for lesson in wanted:
        assert (folder / f"tutorial/{lesson.folder.name}.md").is_file()
        assert f"infer workshop start {lesson.number}\n" in readme
        assert lesson.question in readme


def test_phases_are_packed_from_an_installed_course(tmp_path: Path) -> None:
    """As from a wheel: the packages lie where no tests are, and the command runs in another folder."""
    installed = tmp_path / "site-packages"
    for package in ("shared", "phases", "tutorial"):
        shutil.copytree(ROOT / package, installed / package, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from shared.cli import app; app()"
    subprocess.run(
        [sys.executable, "-c", code, "workshop", "export", *(lesson.number for lesson in PHASES), "--out", "all.zip"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        check=True,
    )
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        names = {name.partition("/")[2] for name in archive.namelist()}
    assert {f"tutorial/{lesson.folder.name}.md" for lesson in PHASES} <= names
    assert {exercise.path for lesson in PHASES for exercise in exercises_of(lesson)} <= {
        name.removeprefix("workspace/") for name in names
    }
    assert not any(name.startswith("tests/") for name in names)


def test_the_same_tree_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.zip", "b.zip"):
        export(PHASES[:1], tmp_path / name)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        for info in archive.infolist():
            assert (info.date_time, info.create_system, info.compress_type) == ((1980, 1, 1, 0, 0, 0), 3, 0)
            assert info.external_attr >> 16 == 0o100644


def test_a_file_that_exists_is_replaced_only_by_force(tmp_path: Path) -> None:
    file = tmp_path / "out.zip"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"out\.zip exists; replace it with --force"):
        export(PHASES[:1], file)
    assert file.read_text() == "mine"
    export(PHASES[:1], file, force=True)
    assert zipfile.is_zipfile(file)
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ConfigError, match="cannot be written"):
        export(PHASES[:1], tmp_path / "none" / "out.zip")
    with pytest.raises(ConfigError, match="cannot be written"):
        export(PHASES[:1], file / "out.zip")


def test_a_phase_without_chapter_or_exercises_is_refused_with_those_that_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handout, "chapter_of", lambda lesson: tmp_path / f"{lesson.number}.md")
    (tmp_path / "02.md").write_text("# A chapter\n")
    with pytest.raises(ConfigError, match=r"Phase 03 has no chapter.*phases that have both are 02\."):
        contents([find_lesson("03")])
    monkeypatch.undo()
    monkeypatch.setattr(handout, "exercises", lambda: exercises_of(find_lesson("03")))
    with pytest.raises(ConfigError, match=r"Phase 02 has no exercises.*phases that have both are 03\."):
        contents([find_lesson("02")])


def test_the_readme_s_commands_exist() -> None:
    from shared.cli import app
    from tutorial.checker.references import COMMAND, command_error

    infer = typer.main.get_command(app)
    text = contents(PHASES[:1])["README.md"].decode()
    commands = [command for line in text.splitlines() for command in COMMAND.findall(line)]
    assert len(commands) >= 4
    assert [command_error(command, infer) for command in commands] == [None] * len(commands)
    progress = json.loads(contents(PHASES[:1])["workspace/.progress.json"])
    assert list(progress) == [exercise.number for exercise in exercises_of(PHASES[0])]
